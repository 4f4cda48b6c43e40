"""A hospital that takes part: the connection to the organiser, and one process for each run.

    wardround join             this module: the connection, the queue of work, no model and no scan
      '-- deploy.worker        one for each run: reads scans, trains, keeps the ledger

Nothing listens at a hospital, not even on 127.0.0.1.
"""

from __future__ import annotations

import base64
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from wardround.child_process import ChildProcess, Line
from wardround.deploy import limits
from wardround.deploy.kits.kit import KIT, Kit
from wardround.deploy.kits.statements import sign_statement
from wardround.deploy.processes import STEADY_MEMORY, claim_kit, open_log
from wardround.deploy.rpc.client import CallRefused, Connection, KitInUse, KitRefused, NoConnection
from wardround.deploy.rpc.requests import Request, RequestTooLarge
from wardround.deploy.rpc.service import BEAT_SECONDS, MessageError, Transfer
from wardround.errors import ConfigError, WardroundError

log = logging.getLogger(__name__)
Say = Callable[[str], None]
MOST_TRIES = 3  # of a request whose process ends
MOST_HELD = 8  # requests at the same time
MOST_WORKERS = 4  # processes that train: as many runs as a server has at the same time
SEND_SECONDS = 24 * 3600.0  # for a reply, over all connections; the organiser's deadline is usually shorter
PACE_SECONDS = 5.0, 30.0  # of a transfer, before it is told of, and between two times
RETRY_SECONDS = 1.0
GRACE_SECONDS = 60.0  # for a task to end by itself when its time is up
FIRST_WORD_SECONDS = 10.0  # without a connection, before that is said
IN_USE_SECONDS = 40.0  # in which a server notices that a process of this hospital is gone, and some more


COPIED = "If it is not yours, the kit was copied: tell the organiser at once."


class WorkerEnded(WardroundError):
    """The process that answers requests has ended."""


class Superseded(WardroundError):
    """The organiser has gone on to another request of the run, so this one is not wanted any more."""


class TooManyRuns(WardroundError):
    """All processes that train are at work."""


class TransferReporter:
    """Tells how far a transfer is and how long it will take, where that is a while."""

    def __init__(self, what: str, say: Say) -> None:
        self._what = what
        self._say = say
        self._next = time.monotonic() + PACE_SECONDS[0]

    def tell(self, transfer: Transfer) -> None:
        if time.monotonic() >= self._next and transfer.done < transfer.num_bytes:
            self._next = time.monotonic() + PACE_SECONDS[1]
            self._say(f"{self._what}: {transfer}")


class WorkerProcess:
    """The process that answers requests of one run."""

    def __init__(self, kit: Kit, environment: Mapping[str, str]) -> None:
        with open_log(kit, "worker") as file:
            variables = {**STEADY_MEMORY, **environment, KIT: str(kit.folder)}
            self._child = ChildProcess("wardround.deploy.worker", variables, log=file)
        self._kit = kit
        self._turn = threading.Lock()  # one request at a time

    def check(self) -> Line:
        """What this hospital takes part with; raises where it cannot."""
        found = self._child.ask({"check": str(self._kit.folder)})
        if found is None:
            raise ConfigError(
                f"the process that trains ended while starting. See {self._kit.logs / 'worker.log'}"
            )
        if "wrong" in found:
            raise ConfigError(str(found["wrong"]))
        return found

    def answer(
        self, request: Path, largest: int, seconds: float | None, is_wanted: Callable[[], bool]
    ) -> tuple[Path | None, str]:
        """The file of the reply; or None, and why there is none. Raises where the process ends meanwhile.

        seconds: for the task; the site itself keeps them between steps, so a little more are given here.
        is_wanted: asked when it is this request's turn, which may be long after it came.
        """
        reply, model = request.with_suffix(".reply"), request.with_suffix(".model")
        facts = {"request": str(request), "reply": str(reply), "model": str(model), "largest": largest}
        with self._turn:
            if not is_wanted():
                raise Superseded("a newer request of the run has come")
            self._child.send(facts)
            try:
                deadline = None if seconds is None else time.monotonic() + seconds + GRACE_SECONDS
                found = self._child.receive(deadline)
                while found is not None and "sign" in found:
                    self._child.send(self._sign(found))
                    found = self._child.receive(deadline)
            except TimeoutError:
                self.end()
                return None, "its task took too long (resources.seconds in its site.yaml)"
        if found is None:
            raise WorkerEnded(f"its process ended (exit code {self._child.exit_code()})")
        return (reply, "") if "reply" in found else (None, str(found["failed"]))

    def _sign(self, line: Line) -> Line:
        """What the process that trains has to sign; the key and its passphrase stay here."""
        try:
            signature = sign_statement(self._kit, base64.b64decode(line["sign"]))
        except (WardroundError, OSError, ValueError) as error:
            return {"failed": str(error)}
        return {"signature": base64.b64encode(signature).decode()}

    def is_alive(self) -> bool:
        return self._child.is_alive()

    def end(self) -> None:
        self._child.kill()


class Joining:
    """Takes part from `__enter__` to `__exit__`; `serve` is its loop.

    environment: variables for the processes that train. say: receives one line for every event.
    """

    def __init__(self, kit: Kit, environment: Mapping[str, str], say: Say = lambda line: None) -> None:
        self.kit = kit
        self._environment = environment
        self._say = say
        self._folder = kit.state / "exchange"
        self._lock = threading.Lock()
        self._workers: dict[str, WorkerProcess] = {}  # by job
        self._spare: WorkerProcess | None = None
        self._held: dict[str, str] = {}  # letters that are being answered, and their jobs
        self._newest: dict[str, str] = {}  # the last letter of each job
        self._connected = threading.Event()
        self._largest = limits.REPLY_BYTES
        self._seconds: float | None = None
        self._ended = threading.Event()
        self._end: WardroundError | None = None  # why it cannot take part any longer
        self._lock_file: IO[str] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Joining:
        self._lock_file = claim_kit(self.kit)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:  # from here on none is started
            workers = [*self._workers.values(), *([self._spare] if self._spare else [])]
        for worker in workers:
            worker.end()
        if self._connection is not None:
            self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock_file is not None:
            self._lock_file.close()

    def check(self) -> str:
        """What this hospital takes part with, in words; the process that looks stays for the first run."""
        self._spare = WorkerProcess(self.kit, self._environment)
        found = self._spare.check()
        self._largest = min(limits.REPLY_BYTES, int(found["largest"]))
        self._seconds = found["seconds"]
        return str(found["ready"])

    # The connection

    def serve(self) -> None:
        """Connect, and answer requests until the organiser no longer takes this kit."""
        self._connection = Connection(self.kit)
        beats = threading.Thread(target=self._beat, name="wardround-beat", daemon=True)
        beats.start()
        while self._end is None and not self._ended.is_set():
            try:
                if not self._connected.wait(RETRY_SECONDS) or len(self._held) >= MOST_HELD:
                    self._ended.wait(RETRY_SECONDS / 10)
                    continue
                request = self._connection.wait(
                    list(self._held),
                    self._folder,
                    self._largest,
                    TransferReporter("a request arrives", self._say).tell,
                )
                if request is not None:
                    self._take(request)
            except RequestTooLarge as error:
                log.warning("a request was refused: %s", error)
                self._send(error.request, None, str(error))
            except (NoConnection, CallRefused, KitInUse, MessageError) as error:
                log.info("waiting for a request: %s", error)
                time.sleep(RETRY_SECONDS)
            except OSError as error:
                log.error("a request could not be stored: %s", error)
                time.sleep(RETRY_SECONDS)
        if self._end is not None:
            raise self._end

    def _beat(self) -> None:
        """Say hello when there is a connection, then give signs of life; say when it is lost."""
        assert self._connection is not None
        where, since = f"{self.kit.server}:{self.kit.port}", time.monotonic()
        is_connected: bool | None = None
        in_use: float | None = None  # since when
        while not self._ended.is_set():
            try:
                if not is_connected:
                    self._connection.hello()
                    self._say(f"connected to {where}")
                    is_connected, in_use = True, None
                    self._connected.set()
                self._end_workers(self._connection.beat())
                if self._connection.has_double:
                    self._say(f"the organiser refused a second process as '{self.kit.name}'. {COPIED}")
            except KitRefused as error:
                self._give_up(ConfigError(f"the organiser refuses this kit: {error}."))
                return
            except KitInUse:
                is_connected = False
                self._connected.clear()
                words = f"another process takes part as '{self.kit.name}' with this kit"
                if in_use is None:
                    in_use = time.monotonic()
                    self._say(f"refused: {words}; trying for {IN_USE_SECONDS:.0f} s")
                elif time.monotonic() - in_use > IN_USE_SECONDS:
                    self._give_up(WardroundError(f"{words}, so this one ends. {COPIED}"))
                    return
            except (NoConnection, CallRefused, MessageError) as error:
                log.info("the organiser does not answer: %s", error)
                self._connected.clear()
                if is_connected or (is_connected is None and time.monotonic() - since > FIRST_WORD_SECONDS):
                    no = "connection lost" if is_connected else "no connection yet"
                    self._say(f"{no} to {where}; retrying. Why: wardround preflight {self.kit.folder}")
                    is_connected = False
            self._ended.wait(BEAT_SECONDS if is_connected else RETRY_SECONDS)

    def _give_up(self, why: WardroundError) -> None:
        self._end = why
        if self._connection is not None:
            self._connection.close()  # which ends the wait for a request

    # The work

    def _take(self, request: Request) -> None:
        with self._lock:
            is_held = request.letter in self._held
            self._newest[request.job] = request.letter
            self._held.setdefault(request.letter, request.job)
        if is_held:  # a server that repeats itself must not pile up work
            log.warning("a request that is being answered came again and was dropped")
            request.path.unlink(missing_ok=True)
            return
        threading.Thread(target=self._answer, args=(request,), name="wardround-answer", daemon=True).start()

    def _answer(self, request: Request) -> None:
        try:
            reply, failed = self._work(request)
            if self._connection is not None and (model := request.path.with_suffix(".model")).exists():
                self._connection.add_model(model)  # before the organiser goes on to send it
            self._send(request, reply, failed)
        except Superseded as error:
            log.info("a request was left: %s", error)
        finally:
            for suffix in (request.path.suffix, ".reply", ".model"):
                request.path.with_suffix(suffix).unlink(missing_ok=True)
            with self._lock:
                self._held.pop(request.letter, None)

    def _work(self, request: Request) -> tuple[Path | None, str]:
        """The reply; a process that ends meanwhile is started again, which finds the run as it left it."""
        failed = ""
        for _ in range(MOST_TRIES):
            try:
                worker = self._find_worker(request.job)
                return worker.answer(
                    request.path, self._largest, self._seconds, lambda: self._is_newest(request)
                )
            except TooManyRuns as error:
                log.warning("a request was refused: %s", error)
                return None, str(error)
            except WorkerEnded as error:
                failed = str(error)
                log.warning("%s", failed)
        return None, failed

    def _is_newest(self, request: Request) -> bool:
        """A run asks one thing after the other: a newer request means that it no longer waits for this."""
        with self._lock:
            return self._newest.get(request.job) == request.letter

    def _send(self, request: Request, reply: Path | None, failed: str) -> None:
        """Send a reply, again and again while the connection is away and the organiser may still want it."""
        assert self._connection is not None
        deadline, again = time.monotonic() + SEND_SECONDS, False
        pace = TransferReporter("a reply leaves", self._say)
        while time.monotonic() < deadline and not self._ended.is_set():
            try:
                self._connection.answer(request, reply, failed, again=again, on_transfer=pace.tell)
                return
            except NoConnection as error:
                log.info("a reply waits for the connection: %s", error)
                again = True
                self._ended.wait(RETRY_SECONDS)
            except (CallRefused, KitInUse, MessageError) as error:
                log.warning("a reply was not taken: %s", error)
                return

    def _find_worker(self, job: str) -> WorkerProcess:
        """The process of a run; a new one may take the place of the one that has been idle for longest."""
        with self._lock:
            if self._ended.is_set():
                raise Superseded("this hospital is leaving")
            worker = self._workers.pop(job, None)
            if worker is None or not worker.is_alive():
                self._make_room()
                spare, self._spare = self._spare, None
                usable = spare is not None and spare.is_alive()
                worker = spare if spare is not None and usable else WorkerProcess(self.kit, self._environment)
            self._workers[job] = worker  # last, so that the first is the one used longest ago
            return worker

    def _make_room(self) -> None:
        if len(self._workers) < MOST_WORKERS:
            return
        idle = next((job for job in self._workers if job not in self._held.values()), None)
        if idle is None:
            raise TooManyRuns(f"this hospital takes part in at most {MOST_WORKERS} runs at the same time")
        self._workers.pop(idle).end()

    def _end_workers(self, jobs: list[str]) -> None:
        """End the processes of runs that are over."""
        with self._lock:
            over = [job for job in self._workers if job not in {*jobs, *self._held.values()}]
            workers = [self._workers.pop(job) for job in over]
            self._newest = {
                job: letter for job, letter in self._newest.items() if job in {*jobs, *self._held.values()}
            }
        for worker in workers:
            worker.end()
