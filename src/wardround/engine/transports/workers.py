"""Worker processes behind the same `ask`: each owns some clients for the whole run.

Requests and answers are JSON lines on pipes; tensors travel as safetensors files in the run's
`exchange` folder. A worker that dies loses its clients for this task only: the next request starts
it again, and the clients' memories are on disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.clients import Answer, Registration
from wardround.clients.sync_state import SyncState
from wardround.engine.checkpoint import MemoryStore
from wardround.engine.host import Progress
from wardround.engine.judging.pictures import PICTURES
from wardround.engine.transports.placement import deal
from wardround.errors import WardroundError
from wardround.files import file_name
from wardround.messages import Message

log = logging.getLogger(__name__)

START_SECONDS = 120.0


class Worker:
    """One process and the thread that reads its lines."""

    def __init__(self, number: int, names: Sequence[str], command: Mapping[str, Any]) -> None:
        self.number = number
        self.names = list(names)
        self._command = {**command, "names": self.names}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def ensure(self) -> None:
        """Start the process unless it is running."""
        if self.alive():
            return
        self.stop()
        self.lines = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wardround.engine.transports.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the server's to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._reader = threading.Thread(target=self._read, args=(self._process, self.lines), daemon=True)
        self._reader.start()
        self.send(self._command)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[dict[str, Any] | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                lines.put(json.loads(line))
        lines.put(None)  # the process ended

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is already in `lines`
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """The next line, or None when the process is gone; TimeoutError past the deadline."""
        try:
            return self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None

    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.wait(timeout=10)

    def stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join(timeout=10)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Workers:
    """A transport over worker processes; devices: of each of them."""

    def __init__(
        self,
        config_path: Path,
        clients_folder: Path,
        exchange: Path,
        sizes: Mapping[str, int],
        devices: Sequence[str],
        *,
        threads: int,
        deadline: float,
        on_progress: Progress | None = None,
    ) -> None:
        command = {"config": str(config_path), "folder": str(clients_folder), "threads": threads}
        hands = deal(sizes, len(devices))
        self._workers = [
            Worker(number, names, {**command, "device": device})
            for number, (names, device) in enumerate(zip(hands, devices, strict=False))
        ]
        self._home = {name: worker for worker in self._workers for name in worker.names}
        self._clients_folder = clients_folder
        self._exchange = exchange
        self._deadline = deadline
        self._on_progress = on_progress
        self._count = 0
        self._round: int | None = None

    def register(self) -> list[Registration]:
        """Start all workers and collect what their clients register."""
        for worker in self._workers:
            worker.ensure()
        entries = []
        for worker in self._workers:
            ready = self._ready(worker)
            for entry in ready["clients"]:
                entries.append(Registration.of(entry))
        return entries

    def _ready(self, worker: Worker) -> dict[str, Any]:
        try:
            ready = worker.receive(time.monotonic() + START_SECONDS)
        except TimeoutError:
            raise WardroundError(
                f"worker {worker.number} did not start within {START_SECONDS:g} s."
            ) from None
        if ready is None or "clients" not in ready:
            reason = (ready or {}).get("failure", f"exit code {worker.exit_code()}")
            raise WardroundError(f"worker {worker.number} could not start: {reason}")
        return ready

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: SyncState
    ) -> Iterator[Answer]:
        """Hand each worker its clients' requests at once; yield answers as they come."""
        self._forget_replies_before(round)
        paths: dict[int, Path] = {}  # one file for a message that several clients get
        waiting: dict[Worker, list[str]] = {}
        for name, message in messages.items():
            if id(message) not in paths:
                paths[id(message)] = self._new_path("down")
                message.save(paths[id(message)], durable=False)
            waiting.setdefault(self._home[name], []).append(name)
        for worker, names in waiting.items():
            try:
                self._wake(worker)
            except WardroundError as error:
                yield from (Answer(name, failure=str(error)) for name in names)
                names.clear()
                continue
            for name in names:
                worker.send(
                    {
                        "client": name,
                        "task": task,
                        "round": round,
                        "sync_state": sync_state.facts(),
                        "message": str(paths[id(messages[name])]),
                        "reply": str(self._new_path("up")),
                    }
                )
        for worker, names in waiting.items():
            yield from self._answers(worker, names, task)
        for path in paths.values():
            path.unlink(missing_ok=True)

    def _forget_replies_before(self, round: int) -> None:
        """A new round no longer needs the replies of the last one."""
        if round != self._round:
            self._round = round
            for path in self._exchange.glob("up-*.safetensors"):
                path.unlink()

    def _wake(self, worker: Worker) -> None:
        """A worker that died is started again and must register before it works."""
        if not worker.alive():
            worker.ensure()
            self._ready(worker)

    def _answers(self, worker: Worker, names: list[str], task: str) -> Iterator[Answer]:
        """All answers of one worker; each client has the deadline to itself, since they queue."""
        pending = list(names)
        deadline = time.monotonic() + self._deadline
        while pending:
            try:
                line = worker.receive(deadline)
            except TimeoutError:
                worker.kill()
                reason = f"no answer to '{task}' within the deadline of {self._deadline:g} s"
                yield from (Answer(name, failure=reason) for name in pending)
                return
            if line is None:
                code = worker.exit_code()
                reason = f"its worker process ended with exit code {code}"
                yield from (Answer(name, failure=reason) for name in pending)
                return
            if "progress" in line:
                if self._on_progress is not None:
                    self._on_progress(*line["progress"])
                continue
            name = line["client"]
            pending.remove(name)
            deadline = time.monotonic() + self._deadline
            yield self._answer(line)

    def _answer(self, line: Mapping[str, Any]) -> Answer:
        if line.get("failure") is not None:
            return Answer(line["client"], failure=line["failure"], seconds=line["seconds"])
        try:
            message = Message.load(Path(line["reply"]))
        except WardroundError as error:
            return Answer(line["client"], failure=str(error), seconds=line["seconds"])
        return Answer(
            line["client"],
            message,
            num_examples=line["num_examples"],
            num_steps=line["num_steps"],
            seconds=line["seconds"],
            loss=line["loss"],
            num_bytes=line["num_bytes"],
        )

    def _new_path(self, kind: str) -> Path:
        self._count += 1
        return self._exchange / f"{kind}-{self._count:06d}.safetensors"

    def settle(self) -> None:
        """Workers write on this machine's disk."""
        for name in self._home:
            MemoryStore(self._clients_folder / file_name(name)).settle()

    def strays(self) -> list[tuple[str, str]]:
        return []  # a worker that is late is ended

    def pictures(self, name: str) -> Path | None:
        return self._clients_folder / file_name(name) / PICTURES

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
