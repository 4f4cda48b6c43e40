"""The organiser's server: the port that hospitals connect to, and one process for each run.

    wardround server              this module: the port, the queue, no model and no array
      '-- deploy.run_process      one for each run

A reply goes from the network into a file, the file's name through a pipe to the run, and the run reads it.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from wardround.child_process import ChildProcess, Line
from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import KIT, Kit
from wardround.deploy.live_file import Live
from wardround.deploy.mailbox import Letter
from wardround.deploy.preflight.connection import refuse_taken_port
from wardround.deploy.processes import STEADY_MEMORY, claim_kit, open_log
from wardround.deploy.rpc.server import HospitalServer, RequestFile

log = logging.getLogger(__name__)
Say = Callable[[str], None]
MOST_RUNS = 4  # at the same time; others wait
LOOK_SECONDS = 0.2
PUBLISH_SECONDS = 1.0
HERE_SECONDS, GONE_SECONDS = 10.0, 30.0  # since a hospital was last heard from


class RunningJob:
    """A run's process, and the letters between it and the hospitals."""

    def __init__(
        self, job: str, arguments: Path, exchange: Path, hospitals: HospitalServer, kit: Kit
    ) -> None:
        self.job = job
        self._hospitals = hospitals
        self._mailbox = hospitals.open_job(job)
        self._is_stopping = False
        with open_log(kit, "run") as file:
            environment = {**STEADY_MEMORY, KIT: str(kit.folder)}
            self.child = ChildProcess("wardround.deploy.run_process", environment, log=file)
        self.child.send({"job": job, "arguments": str(arguments), "exchange": str(exchange / job)})
        threads = (self._carry_out, self._bring_in)
        for work in threads:
            threading.Thread(target=work, name=f"wardround-{job}", daemon=True).start()

    def _carry_out(self) -> None:
        """Requests of the run, until its process ends."""
        while (line := self.child.receive()) is not None:
            if "post" in line:
                self._post(line["post"])
            for letter in line.get("close", ()):
                self._mailbox.close(letter)
        self._hospitals.close_job(self.job)

    def _post(self, line: Line) -> None:
        content = RequestFile(Path(line["path"]), int(line["limit"]), int(line["head"]), line["sha256"])
        deadline = time.monotonic() + float(line["seconds"])
        self._hospitals.post(self.job, Letter(line["hospital"], content, deadline, line["letter"]))

    def _bring_in(self) -> None:
        """Replies of hospitals, as long as the process lives."""
        while self.child.is_alive():
            try:
                letter, path = self._mailbox.take(1.0)
            except queue.Empty:
                continue
            found = {"letter": letter.id, "hospital": letter.hospital, "path": path and str(path)}
            self.child.send({**found, "strays": self._mailbox.take_strays()})  # why there is none, in time

    def tell(self, alive: dict[str, float], moving: list[str]) -> None:
        """Who is there, who has a message on its way, and which replies were not wanted."""
        self.child.send({"alive": alive, "moving": moving, "strays": self._mailbox.take_strays()})

    def stop(self) -> None:
        """Have it end after its round."""
        if not self._is_stopping:
            self._is_stopping = True
            self.child.send({"stop": True})


class OrganiserServer:
    """Listens from `__enter__` to `__exit__`; `serve` is its loop. most_runs: at the same time."""

    def __init__(self, kit: Kit, say: Say = lambda line: None, most_runs: int = MOST_RUNS) -> None:
        self.kit = kit
        self._most_runs = most_runs
        self._say = say
        self._exchange = kit.state / "exchange"
        self._queue = JobQueue(kit)
        self._hospitals = HospitalServer(kit, self._exchange)
        self._running: dict[str, RunningJob] = {}
        self._here: set[str] = set()
        self._published = 0.0
        self._lock: IO[str] | None = None

    def __enter__(self) -> OrganiserServer:
        self._lock = claim_kit(self.kit)
        try:
            refuse_taken_port(self.kit)
            self._queue.clear()
            shutil.rmtree(self._exchange, ignore_errors=True)
            self._exchange.mkdir(parents=True)
            self._hospitals.start()
            self._publish()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running in self._running.values():
            running.child.kill()
        self._hospitals.stop()
        self._queue.clear()
        shutil.rmtree(self._exchange, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def serve(self) -> None:
        """Start runs that are submitted and follow them, for ever."""
        while True:
            self.step()
            time.sleep(LOOK_SECONDS)

    def step(self) -> None:
        for job, running in list(self._running.items()):
            self._look_after(job, running)
        for job in self._queue.list_waiting():
            if self._queue.is_asked(job, "stop") or self._queue.is_asked(job, "abort"):
                self._take_out(job)
            elif len(self._running) < self._most_runs:
                arguments = self._queue.begin(job)
                self._running[job] = RunningJob(job, arguments, self._exchange, self._hospitals, self.kit)
                self._published = 0.0  # the run waits to hear who is there
        if time.monotonic() - self._published >= PUBLISH_SECONDS:
            self._publish()

    def _take_out(self, job: str) -> None:
        """A run that was stopped before its turn came."""
        folder = self._queue.find_folder(job)
        if folder is not None:
            reason = "it was taken out of the queue before it began"
            Live(folder / "live.json", job=job).say(state="stopped", reason=reason)
        self._queue.finish(job)

    def _look_after(self, job: str, running: RunningJob) -> None:
        if self._queue.is_asked(job, "abort"):
            running.child.kill()
        elif self._queue.is_asked(job, "stop"):
            running.stop()
        if running.child.is_alive():
            return
        code = running.child.exit_code()
        if code != 0:
            self._say(f"the process of a run ended (exit code {code}); see {self.kit.logs / 'run.log'}")
        self._hospitals.close_job(job)
        del self._running[job]
        self._queue.finish(job)

    def _publish(self) -> None:
        """Tell runs and the organiser's commands which hospitals are there."""
        self._published = time.monotonic()
        callers = self._hospitals.callers
        for line in callers.refresh():
            self._say(line)
        self._hospitals.replies.end_stalled()
        alive, transfers = self._hospitals.alive(), self._hospitals.transfers.describe()
        self._here &= alive.keys()
        self._queue.publish(alive, transfers, callers.expires(), callers.revoked.number)
        for running in self._running.values():
            running.tell(alive, list(transfers))
        for name, seconds in sorted(alive.items()):
            if seconds < HERE_SECONDS and name not in self._here:
                self._here.add(name)
                self._say(f"{name} is connected")
            elif seconds > GONE_SECONDS and name in self._here:
                self._here.discard(name)
                self._say(f"{name} has not been heard from for half a minute")
