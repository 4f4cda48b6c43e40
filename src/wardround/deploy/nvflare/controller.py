"""The organiser's side of a job: FLARE's process that runs the experiment.

FLARE moves work by polling: each hospital asks for a task, works, asks whether the answer is still wanted,
and sends it. `FlareChannel` answers these questions itself, in the place of FLARE's own communicator: that
one drops late and double answers without a word, ends a job when its hospitals are away, and loses its
monitor when a hospital that came back asks for its task a second time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.wf_comm_spec import WFCommSpec
from nvflare.fuel.utils.msg_root_utils import delete_msg_root

from wardround.deploy.kits import KIT
from wardround.deploy.nvflare.executor import empty, from_shareable, to_shareable
from wardround.deploy.nvflare.job import SLOT, TASK, jobs_folder, read_arguments
from wardround.deploy.nvflare.processes import end_with_parent
from wardround.deploy.wire import Parcel
from wardround.errors import WardroundError

REMEMBERED = 10_000  # closed letters, so that a late answer can be named
SILENT_SECONDS = 10.0  # of a job process, which beats every two
MOST_STRAYS = 1000  # between two looks at them
log = logging.getLogger(__name__)


class JobEnded(WardroundError):
    """FLARE was told to end the job while the run was still going."""


@dataclass
class Letter:
    """One request on its way to one hospital."""

    hospital: str
    parcel: Parcel
    deadline: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class _Closed:
    hospital: str
    answered: bool
    told: bool = False


class FlareChannel(WFCommSpec):  # type: ignore[misc]
    """Requests out, replies in; what FLARE's runner calls stands below what the run calls.

    refresh: asks the server for hospitals that came (back) since; ended: whether the job is to end.
    """

    def __init__(
        self, refresh: Callable[[], None] = lambda: None, ended: Callable[[], bool] = lambda: False
    ) -> None:
        self.controller: Any = None
        self._refresh = refresh
        self._ended = ended
        self._lock = threading.Lock()
        self._open: dict[str, Letter] = {}  # by letter
        self._closed: OrderedDict[str, _Closed] = OrderedDict()
        self._arrived: queue.SimpleQueue[tuple[Letter, Parcel | None]] = queue.SimpleQueue()
        self._heard: dict[str, float] = {}
        self._strays: deque[tuple[str, str]] = deque(maxlen=MOST_STRAYS)
        self._newcomer = threading.Event()
        self._sending = ""  # the letter whose large answer is on its way

    # What the run calls

    def alive(self) -> Mapping[str, float]:
        now = time.monotonic()
        with self._lock:
            return {hospital: now - heard for hospital, heard in self._heard.items()}

    def strays(self) -> list[tuple[str, str]]:
        with self._lock:
            told = list(self._strays)
            self._strays.clear()
        return told

    def exchange(self, requests: Mapping[str, Parcel], deadline: float) -> Iterator[tuple[str, Parcel]]:
        """Send each hospital its parcel; yield (hospital, reply) as they come, until all answered or the
        deadline (of time.monotonic) passes. What is left then is cancelled."""
        letters = {letter.id: letter for letter in (Letter(*item, deadline) for item in requests.items())}
        self._renew()
        with self._lock:
            self._open.update(letters)
        try:
            waiting = set(letters)
            while waiting:
                arrived = self._next(deadline)
                if arrived is None:
                    return
                letter, reply = arrived
                del arrived
                if letter.id not in waiting:
                    continue  # of an exchange that was given up
                waiting.discard(letter.id)
                if reply is not None:
                    hospital = letter.hospital
                    del letter
                    yield hospital, reply
                    del reply
        finally:
            for letter in letters.values():
                self._close(letter.id, answered=False)
            self._forget_arrived()

    def _forget_arrived(self) -> None:
        """Replies that came while the exchange was given up: a model each, which nobody will read."""
        with contextlib.suppress(queue.Empty):
            while True:
                letter, _ = self._arrived.get_nowait()
                self._stray(letter.hospital, "late: its reply came when the exchange was over")

    def _next(self, deadline: float) -> tuple[Letter, Parcel | None] | None:
        """The next answer, or None at the deadline."""
        while True:
            if self._ended():
                raise JobEnded("the job was ended from outside; resume the run to continue it.")
            left = deadline - time.monotonic()
            try:
                return self._arrived.get(timeout=max(0.0, min(left, 0.2)))
            except queue.Empty:
                if left <= 0:
                    return None
            if self._newcomer.is_set():
                self._renew()

    def _renew(self) -> None:
        """Learn the hospitals that came since: without it FLARE turns their requests away."""
        self._newcomer.clear()
        try:
            self._refresh()
        except Exception:  # the server is busy or going; the next exchange asks again
            log.warning("the list of hospitals could not be renewed", exc_info=True)

    def _close(self, letter_id: str, *, answered: bool) -> Letter | None:
        with self._lock:
            letter = self._open.pop(letter_id, None)
            if letter is None:
                return None
            self._closed[letter_id] = _Closed(letter.hospital, answered)
            while len(self._closed) > REMEMBERED:
                self._closed.popitem(last=False)
        delete_msg_root(letter_id)  # arrays that FLARE still holds ready for fetching
        return letter

    def _stray(self, hospital: str, why: str) -> None:
        log.warning("%s: %s", hospital, why)
        with self._lock:
            self._strays.append((hospital, why))

    # What FLARE's runner calls, each in a thread of its own

    def initialize_run(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def finalize_run(self, fl_ctx: FLContext) -> None:
        for letter_id in list(self._open):
            self._close(letter_id, answered=False)

    def process_task_request(self, client: Client, fl_ctx: FLContext) -> tuple[str, str, Shareable | None]:
        """A hospital asks for work. One that was restarted asks again and gets its letter again."""
        now = time.monotonic()
        with self._lock:
            mine = [letter for letter in self._open.values() if letter.hospital == client.name]
            letter = next((letter for letter in mine if letter.deadline > now), None)
        if letter is None:
            return "", "", None
        shareable = to_shareable(letter.parcel)
        shareable.set_header(ReservedHeaderKey.TASK_ID, letter.id)
        shareable.set_header(ReservedHeaderKey.MSG_ROOT_ID, letter.id)
        shareable.set_header(ReservedHeaderKey.MSG_ROOT_TTL, max(1.0, letter.deadline - now))
        return TASK, letter.id, shareable

    def process_task_check(self, task_id: str, fl_ctx: FLContext) -> Letter | None:
        """A hospital has its answer ready and asks whether it is still wanted."""
        with self._lock:
            letter = self._open.get(task_id)
            closed = self._closed.get(task_id)
            late = letter is None and closed is not None and not closed.answered and not closed.told
            if late and closed is not None:
                closed.told = True
        if late and closed is not None:
            self._stray(closed.hospital, "late: its reply was ready after the deadline")
        return letter

    def may_send(self, letter_id: str) -> bool:
        """Whether the large answer to this letter may come now. One at a time, and nobody waits for the dead;
        an answer nobody wants any more may try, FLARE then tells the hospital so."""
        now = time.monotonic()
        with self._lock:
            current = self._open.get(self._sending)
            free = current is None or now - self._heard.get(current.hospital, now) > SILENT_SECONDS
            if letter_id in self._open and free:
                self._sending = letter_id
            return letter_id not in self._open or self._sending == letter_id

    def process_submission(
        self, client: Client, task_name: str, task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer arrives: hand it on at once and leave nothing of it in FLARE's own objects."""
        try:
            self._accept(client.name, task_id, result)
        finally:
            empty(result)

    def _accept(self, hospital: str, task_id: str, result: Shareable) -> None:
        with self._lock:
            letter = self._open.get(task_id)
            closed = self._closed.get(task_id)
        if letter is None:
            self._refuse(hospital, closed)
        elif letter.hospital != hospital:
            self._stray(hospital, f"foreign: a reply to a request made to '{letter.hospital}'")
        else:
            reply = self._read(hospital, result)
            if self._close(task_id, answered=True) is None:
                self._stray(hospital, "duplicate: this request was answered a moment ago")
            else:
                self._arrived.put((letter, reply))

    def _refuse(self, hospital: str, closed: _Closed | None) -> None:
        if closed is None or closed.hospital != hospital:
            self._stray(hospital, "unknown: a reply to no request of this run")
        elif closed.answered:
            self._stray(hospital, "duplicate: this request was answered before")
        elif not closed.told:
            closed.told = True
            self._stray(hospital, "late: its reply came after the deadline")

    def _read(self, hospital: str, result: Shareable) -> Parcel | None:
        code = result.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            self._stray(hospital, f"failed: its process answered {code}")
            return None
        try:
            return from_shareable(result)
        except ValueError as error:
            self._stray(hospital, f"unreadable: {error}")
            return None

    def client_is_active(self, client_name: str, reason: str, fl_ctx: FLContext) -> None:
        with self._lock:
            self._heard[client_name] = time.monotonic()
        if reason == "syncRunner":  # its job process has just started
            self._newcomer.set()

    def process_dead_client_report(self, client_name: str, fl_ctx: FLContext) -> None:
        """The run goes on without it: rounds have deadlines, and it may come back."""

    def get_client_disconnect_time(self, client_name: str) -> float | None:
        return None

    def handle_exception(self, task_id: str, fl_ctx: FLContext) -> None:
        """FLARE could not prepare a letter; the hospital asks again."""

    def check_tasks(self) -> None:
        """Nothing to check: deadlines are kept by `exchange`."""

    def cancel_all_tasks(self, completion_status: Any = None, fl_ctx: FLContext | None = None) -> None:
        for letter_id in list(self._open):
            self._close(letter_id, answered=False)

    def get_num_standing_tasks(self) -> int:
        return len(self._open)


def write_page(folder: Path) -> None:
    """The run's page, also where nobody watches; a run that went well is not spoilt by one that fails."""
    from wardround.reporting import write_report

    try:
        write_report([folder])
    except Exception:  # the run is done and safe; whatever is wrong is the page's alone, and logged in full
        log.warning("the report could not be written; try: wardround report %s", folder, exc_info=True)


class WardroundController(Controller):  # type: ignore[misc]
    """Runs the experiment with the hospitals at the other end of a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.args: dict[str, Any] = {}  # of the run, see `job.write_job`
        self.experiment: Any = None
        self._stop_asked = False
        self._abort: Signal | None = None
        self.channel = FlareChannel(self._renew, self._is_ended)
        end_with_parent()

    def set_communicator(self, communicator: WFCommSpec) -> None:
        communicator.controller = self  # FLARE keeps it as a listener
        super().set_communicator(self.channel)

    def start_controller(self, fl_ctx: FLContext) -> None:
        # By default FLARE ends everybody's job when one hospital answers with one of these.
        fl_ctx.get_prop(FLContextKey.RUNNER).ABORT_RETURN_CODES = []
        self._engine.register_aux_message_handler(topic=SLOT, message_handle_func=self._slot)
        for command in ("status", "stop"):
            self._engine.register_app_command(f"wardround.{command}", self._command)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Tell the server at once that the job is over; this process takes some seconds more to leave, and
        `Returning` would take the hospitals that left already for lost."""
        self._engine.update_job_run_status()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self._abort = abort_signal
        app = Path(fl_ctx.get_prop(FLContextKey.APP_ROOT))
        self.args = read_arguments(app, jobs_folder(Path(os.environ[KIT])))
        self.conduct(fl_ctx.get_job_id())

    def conduct(self, job: str) -> None:
        from wardround.config_file import load_config
        from wardround.deploy.remote import conduct, rehearsed_pictures

        config, kits = load_config(self.args["config"]), self.args.get("kits")
        conduct(
            self.channel,
            config,
            names=self.args["names"],
            resume=self.args.get("resume", False),
            overwrite=self.args.get("overwrite", False),
            job=job,
            pictures_at=partial(rehearsed_pictures, Path(kits), config.folder) if kits else None,
            on_experiment=self._begin,
            on_done=write_page,
        )

    def _begin(self, experiment: Any) -> None:
        self.experiment = experiment
        if self._stop_asked:
            experiment.stop_requested = True

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.channel._refuse(client.name, None)

    def _command(self, topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """A question from the organiser's command line; must be quick, FLARE holds a lock meanwhile."""
        if topic == "wardround.stop":
            self._stop_asked = True
            if self.experiment is not None:
                self.experiment.stop_requested = True
        return {"alive": dict(self.channel.alive()), "stopping": self._stop_asked}

    def _slot(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        granted = self.channel.may_send(str(request.get_header(ReservedHeaderKey.TASK_ID)))
        return make_reply(ReturnCode.OK if granted else ReturnCode.SERVER_NOT_READY)

    def _is_ended(self) -> bool:
        return self._abort is not None and bool(self._abort.triggered)

    def _renew(self) -> None:
        self._engine.sync_clients_from_main_process()
