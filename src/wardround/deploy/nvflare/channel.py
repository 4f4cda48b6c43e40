"""Parcels over FLARE, whose hospitals ask for work.

Each hospital waits until there is a letter for it, asks for its task, works, asks whether the reply is still
wanted, and sends it. `FlareChannel` answers these questions itself, in the place of FLARE's own communicator:
that one silently drops late and duplicate replies, ends a job when its hospitals are away, and loses its
monitor when a hospital that rejoins asks for its task a second time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.wf_comm_spec import WFCommSpec
from nvflare.fuel.utils.msg_root_utils import delete_msg_root

from wardround.deploy import limits
from wardround.deploy.mailbox import Letter, Mailbox, are_absent
from wardround.deploy.nvflare.job import TASK
from wardround.deploy.nvflare.shareable import clear_content, from_shareable, to_shareable
from wardround.deploy.wire import Parcel
from wardround.errors import WardroundError

SILENT_SECONDS = 10.0  # of a job process, which beats every two
HOLD_SECONDS = 2.0  # that a hospital's question for a letter is held
MOST_HELD = 32  # such questions: each takes a thread of FLARE's, which has 64 for all that it is asked
log = logging.getLogger(__name__)


class FlareMailbox(Mailbox[Parcel, Parcel]):
    """Letters over FLARE: its job processes give signs of life, ask before they send, and take turns."""

    def __init__(self, on_close: Callable[[str], None]) -> None:
        super().__init__(on_close)
        self._heard: dict[str, float] = {}
        self._sending = ""  # the letter whose large reply is on its way
        self._lent = 0.0  # since when
        self._posted = threading.Condition()
        self._held = 0
        self._is_over = False

    def post(self, letters: Iterable[Letter[Parcel]]) -> None:
        super().post(letters)
        with self._posted:
            self._posted.notify_all()

    def end(self) -> None:
        """No more letters will come, so nobody waits for one."""
        self.close_all()
        with self._posted:
            self._is_over = True
            self._posted.notify_all()

    def wait_for_letter(self, hospital: str, seconds: float) -> bool:
        """Whether there is a letter for the hospital; waits for one, but not where many wait already."""
        with self._posted:
            if self._held < MOST_HELD:
                self._held += 1
                self._posted.wait_for(lambda: self._is_over or self.find(hospital) is not None, seconds)
                self._held -= 1
        return self.find(hospital) is not None

    def note_alive(self, hospital: str) -> None:
        with self._lock:
            self._heard[hospital] = time.monotonic()

    def alive(self) -> dict[str, float]:
        """Seconds since each hospital was last heard from."""
        now = time.monotonic()
        with self._lock:
            return {hospital: now - heard for hospital, heard in self._heard.items()}

    def check(self, letter_id: str) -> Letter[Parcel] | None:
        """The letter, if its reply is still wanted; one that is too late is a stray, once."""
        with self._lock:
            letter, closed = self._open.get(letter_id), self._closed.get(letter_id)
            if letter is not None or closed is None or closed.answered or closed.reported:
                return letter
            closed.reported = True
        self.note_stray(closed.hospital, "late: its reply was ready after the deadline")
        return None

    def may_send(self, letter_id: str) -> bool:
        """Whether the large reply to this letter may come now.

        The turn is lent: a silent hospital loses it at once, any other when its time is over.

        A reply that is no longer wanted may try; FLARE then rejects it.
        """
        now = time.monotonic()
        with self._lock:
            current = self._open.get(self._sending)
            silent = current is not None and now - self._heard.get(current.hospital, now) > SILENT_SECONDS
            if letter_id in self._open and (
                current is None or silent or now - self._lent > limits.SLOT_SECONDS
            ):
                self._sending, self._lent = letter_id, now
            return letter_id not in self._open or self._sending == letter_id

    def drop_arrived(self) -> None:
        """Discard replies that came while their exchange was given up: a model each, which nobody reads."""
        with contextlib.suppress(queue.Empty):
            while True:
                letter, _ = self._arrived.get_nowait()
                self.note_stray(letter.hospital, "late: its reply came when the exchange was over")


class JobEnded(WardroundError):
    """FLARE was told to end the job while the run was still going."""


class FlareChannel(WFCommSpec):  # type: ignore[misc]
    """Requests out, replies in: first the methods that the run calls, then those that FLARE's runner calls.

    refresh: asks the server for hospitals that (re)joined since; ended: whether the job is to end.
    """

    def __init__(
        self, refresh: Callable[[], None] = lambda: None, ended: Callable[[], bool] = lambda: False
    ) -> None:
        self.controller: Any = None
        # FLARE holds the arrays of a letter ready for fetching until it is told to drop them
        self.mailbox = FlareMailbox(delete_msg_root)
        self._refresh = refresh
        self._ended = ended
        self._newcomer = threading.Event()

    def alive(self) -> Mapping[str, float]:
        return self.mailbox.alive()

    def strays(self) -> list[tuple[str, str]]:
        return self.mailbox.take_strays()

    def exchange(
        self, requests: Mapping[str, Parcel], deadline: float, absent_after: float = math.inf
    ) -> Iterator[tuple[str, Parcel]]:
        """Send each hospital its parcel; yield (hospital, reply) as they come, until all answered, the
        deadline (of time.monotonic) passes or nobody else is there. What is left then is cancelled."""
        letters = {letter.id: letter for letter in (Letter(*item, deadline) for item in requests.items())}
        self._renew()
        self.mailbox.post(letters.values())
        try:
            waiting = set(letters)
            while waiting:
                expected = [letters[letter_id].hospital for letter_id in waiting]
                arrived = self._next(deadline, expected, absent_after)
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
            for letter_id in letters:
                self.mailbox.close(letter_id)
            self.mailbox.drop_arrived()

    def _next(
        self, deadline: float, expected: Sequence[str], absent_after: float
    ) -> tuple[Letter[Parcel], Parcel | None] | None:
        """The next reply, or None where none is to be waited for."""
        while True:
            if self._ended():
                raise JobEnded("the job was ended from outside; resume the run to continue it.")
            left = deadline - time.monotonic()
            try:
                return self.mailbox.take(max(0.0, min(left, 0.2)))
            except queue.Empty:
                if left <= 0 or are_absent(expected, self.alive(), absent_after):
                    return None
            if self._newcomer.is_set():
                self._renew()

    def _renew(self) -> None:
        """Learn the hospitals that joined since: without it FLARE rejects their requests."""
        self._newcomer.clear()
        try:
            self._refresh()
        except Exception:  # the server is busy or ending; the next exchange asks again
            log.warning("the list of hospitals could not be renewed", exc_info=True)

    # What FLARE's runner calls, each in a thread of its own

    def initialize_run(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def finalize_run(self, fl_ctx: FLContext) -> None:
        self.mailbox.end()

    def process_task_request(self, client: Client, fl_ctx: FLContext) -> tuple[str, str, Shareable | None]:
        """A hospital asks for work."""
        letter = self.mailbox.find(client.name)
        if letter is None:
            return "", "", None
        shareable = to_shareable(letter.content)
        shareable.set_header(ReservedHeaderKey.TASK_ID, letter.id)
        shareable.set_header(ReservedHeaderKey.MSG_ROOT_ID, letter.id)
        shareable.set_header(ReservedHeaderKey.MSG_ROOT_TTL, max(1.0, letter.deadline - time.monotonic()))
        return TASK, letter.id, shareable

    def process_task_check(self, task_id: str, fl_ctx: FLContext) -> Letter[Parcel] | None:
        """A hospital has its reply ready and asks whether it is still wanted."""
        return self.mailbox.check(task_id)

    def process_submission(
        self, client: Client, task_name: str, task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """A reply arrives: pass it on at once and leave nothing of it in FLARE's own objects."""
        try:
            self.mailbox.accept(client.name, task_id, partial(self._read, client.name, result))
        finally:
            clear_content(result)

    def _read(self, hospital: str, result: Shareable) -> Parcel | None:
        code = result.get_return_code(ReturnCode.OK)
        if code != ReturnCode.OK:
            self.mailbox.note_stray(hospital, f"failed: its process answered {code}")
            return None
        try:
            return from_shareable(result)
        except ValueError as error:
            self.mailbox.note_stray(hospital, f"unreadable: {error}")
            return None

    def client_is_active(self, client_name: str, reason: str, fl_ctx: FLContext) -> None:
        self.mailbox.note_alive(client_name)
        if reason == "syncRunner":  # its job process has just started
            self._newcomer.set()

    def process_dead_client_report(self, client_name: str, fl_ctx: FLContext) -> None:
        """The run continues without it: rounds have deadlines, and it may rejoin."""

    def get_client_disconnect_time(self, client_name: str) -> float | None:
        return None

    def handle_exception(self, task_id: str, fl_ctx: FLContext) -> None:
        """FLARE could not prepare a letter; the hospital asks again."""

    def check_tasks(self) -> None:
        """Nothing to check: `exchange` keeps the deadlines."""

    def cancel_all_tasks(self, completion_status: Any = None, fl_ctx: FLContext | None = None) -> None:
        self.mailbox.close_all()

    def get_num_standing_tasks(self) -> int:
        return len(self.mailbox)
