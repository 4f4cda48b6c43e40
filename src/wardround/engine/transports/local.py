"""The transport of a run on this machine: a for loop in this process, or several workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.child_process import ChildProcess
from wardround.clients import Answer, Registration, Snapshot, SyncState, Transport
from wardround.clients.clients import Messages
from wardround.data.federation import Federation
from wardround.engine.cached_memory import MemoryBudget
from wardround.engine.host import Host, OnProgress
from wardround.engine.judging.pictures import PICTURES
from wardround.engine.memory_store import MemoryStore
from wardround.engine.run_folder import RunFolder
from wardround.engine.transports.placement import ROOM_ON_HOST, Placement, deal
from wardround.errors import WardroundError
from wardround.files import file_name
from wardround.messages import Message

START_SECONDS = 120.0  # for a worker to be ready


def open_transport(
    folder: RunFolder,
    federation: Federation,
    names: Sequence[str],
    placement: Placement,
    on_progress: OnProgress,
) -> Transport:
    """Clients where the placement has them, with an empty folder for messages on their way."""
    exchange = folder.clear_exchange()
    if placement.workers == 1:
        room = MemoryBudget(placement.room)
        host = Host(folder.config, folder.clients, names, on_progress, federation, room=room)
        return InProcess(host, Spilling(exchange, room))
    return Workers(
        folder.path / "config.yaml",
        folder.clients,
        exchange,
        federation.sizes(names),
        placement.devices,
        threads=placement.threads,
        deadline=folder.config.give_seconds(),
        on_progress=on_progress,
    )


class Spilling:
    """Keeps a round's replies where they were computed while there is room, and on disk beyond that.

    A rule that streams over replies then needs one model's room, whatever the number of clients.
    """

    def __init__(self, folder: Path, room: MemoryBudget | None = None) -> None:
        self._folder = folder
        self._room = room or MemoryBudget(ROOM_ON_HOST)
        self._taken = 0
        self._count = 0
        self._round: int | None = None

    def begin(self, round: int) -> None:
        """A new round: the replies of the last one are no longer needed."""
        if round != self._round:
            self._room.give_back(self._taken)
            self._round, self._taken = round, 0
            for path in self._folder.glob("reply-*.safetensors"):
                path.unlink()

    def kept(self, answer: Answer) -> Answer:
        size = answer.message.num_bytes
        if answer.failure is not None or not answer.message.tensors():
            return answer
        if self._room.take(size):
            self._taken += size
            return answer
        self._count += 1
        path = self._folder / f"reply-{self._count:06d}.safetensors"
        answer.message.save(path, durable=False)
        return replace(answer, message=Message.load(path))


class InProcess:
    """A transport that is a for loop."""

    def __init__(self, host: Host, spilling: Spilling) -> None:
        self.host = host
        self._spilling = spilling

    def register(self) -> list[Registration]:
        return [self.host.register(name) for name in self.host.names]

    def deliver(self, task: str, round: int, messages: Messages, sync_state: SyncState) -> Iterator[Answer]:
        self._spilling.begin(round)
        for name, message in messages.items():
            yield self._spilling.kept(self.host.send(name, task, round, message, sync_state))

    def snapshot(self, round: int) -> Snapshot:
        return self.host.snapshot(round)

    def strays(self) -> list[tuple[str, str]]:
        return []

    def pictures(self, name: str) -> Path | None:
        return self.host.folder(name) / PICTURES

    def close(self) -> None:
        self.host.close()


# Worker processes: each owns some clients for the whole run. Requests and answers are JSON lines on pipes;
# tensors travel as safetensors files in the run's `exchange` folder. A worker that dies loses its clients for
# this task only: the next request starts it again, and the clients' memories are on disk.


class Worker:
    """A process, started when it is needed, and the clients it serves."""

    def __init__(self, number: int, names: Sequence[str], setup: Mapping[str, Any]) -> None:
        self.number = number
        self.names = list(names)
        self._setup = {**setup, "names": self.names}
        self._child: ChildProcess | None = None

    @property
    def child(self) -> ChildProcess:
        assert self._child is not None
        return self._child

    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_alive()

    def start(self) -> None:
        self.stop()
        self._child = ChildProcess("wardround.engine.transports.worker")
        self._child.send(self._setup)

    def wait_ready(self) -> list[Registration]:
        """What its clients register once they are loaded."""
        try:
            ready = self.child.receive(time.monotonic() + START_SECONDS)
        except TimeoutError:
            raise WardroundError(f"worker {self.number} did not start within {START_SECONDS:g} s.") from None
        if ready is None or "clients" not in ready:
            reason = (ready or {}).get("failure", f"exit code {self.child.exit_code()}")
            raise WardroundError(f"worker {self.number} could not start: {reason}")
        return [Registration.from_dict(entry) for entry in ready["clients"]]

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


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
        on_progress: OnProgress | None = None,
    ) -> None:
        setup = {"config": str(config_path), "folder": str(clients_folder), "threads": threads}
        hands = deal(sizes, len(devices))
        self._workers = [
            Worker(number, names, {**setup, "device": device})
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
            worker.start()
        return [entry for worker in self._workers for entry in worker.wait_ready()]

    def deliver(self, task: str, round: int, messages: Messages, sync_state: SyncState) -> Iterator[Answer]:
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
                if not worker.is_alive():  # it died; the clients' memories are on disk
                    worker.start()
                    worker.wait_ready()
            except WardroundError as error:
                yield from (Answer(name, failure=str(error)) for name in names)
                names.clear()
                continue
            for name in names:
                worker.child.send(
                    {
                        "client": name,
                        "task": task,
                        "round": round,
                        "sync_state": sync_state.as_dict(),
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

    def _answers(self, worker: Worker, names: list[str], task: str) -> Iterator[Answer]:
        """All answers of one worker; each client has the deadline to itself, since they queue."""
        pending = list(names)
        deadline = time.monotonic() + self._deadline
        while pending:
            try:
                line = worker.child.receive(deadline)
            except TimeoutError:
                worker.child.kill()
                reason = f"no answer to '{task}' within the deadline of {self._deadline:g} s"
                yield from (Answer(name, failure=reason) for name in pending)
                return
            if line is None:
                code = worker.child.exit_code()
                reason = f"its worker process ended with exit code {code}"
                yield from (Answer(name, failure=reason) for name in pending)
                return
            if "progress" in line:
                if self._on_progress is not None:
                    self._on_progress(*line["progress"])
                continue
            pending.remove(line["client"])
            deadline = time.monotonic() + self._deadline
            yield read_answer(line)

    def _new_path(self, kind: str) -> Path:
        self._count += 1
        return self._exchange / f"{kind}-{self._count:06d}.safetensors"

    def snapshot(self, round: int) -> Snapshot:
        """Workers have written their clients' memories, on this machine's disk."""
        stores = [MemoryStore(self._clients_folder / file_name(name)) for name in self._home]
        return Snapshot.joined([store.snapshot(round) for store in stores])

    def strays(self) -> list[tuple[str, str]]:
        return []  # a worker that is late is ended

    def pictures(self, name: str) -> Path | None:
        return self._clients_folder / file_name(name) / PICTURES

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


def read_answer(line: dict[str, Any]) -> Answer:
    """A worker's answer, with the message it wrote."""
    path = Path(line.pop("reply"))
    answer = Answer(**line)
    try:
        return answer if answer.failure is not None else replace(answer, message=Message.load(path))
    except WardroundError as error:
        return replace(answer, failure=str(error))
