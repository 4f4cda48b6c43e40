"""The transport of a run on this machine: a for loop in this process, or several workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from wardround.clients import Answer, Registration, Transport
from wardround.clients.sync_state import SyncState
from wardround.data.federation import Federation
from wardround.engine.host import Host, OnProgress
from wardround.engine.judging.pictures import PICTURES
from wardround.engine.run_folder import RunFolder
from wardround.engine.transports.placement import Placement
from wardround.engine.transports.workers import Workers
from wardround.messages import Message


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
        given = federation if folder.config.data.in_memory else None  # else a host opens its own
        return InProcess(Host(folder.config, folder.clients, names, on_progress, given), Spilling(exchange))
    return Workers(
        folder.path / "config.yaml",
        folder.clients,
        exchange,
        federation.sizes(names),
        placement.devices,
        threads=placement.threads,
        deadline=folder.config.deadline,
        on_progress=on_progress,
    )


class Spilling:
    """Keeps a round's replies in memory while they are small, and on disk beyond that.

    A rule that streams over replies then needs one model's room, whatever the number of clients.
    """

    def __init__(self, folder: Path, room: int = 48 * 2**20) -> None:
        self._folder = folder
        self._room = room
        self._used = 0
        self._count = 0
        self._round: int | None = None

    def begin(self, round: int) -> None:
        """A new round: the replies of the last one are no longer needed."""
        if round != self._round:
            self._round, self._used = round, 0
            for path in self._folder.glob("reply-*.safetensors"):
                path.unlink()

    def kept(self, answer: Answer) -> Answer:
        self._used += answer.message.num_bytes
        if answer.failure is not None or self._used <= self._room or not answer.message.tensors():
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

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: SyncState
    ) -> Iterator[Answer]:
        self._spilling.begin(round)
        for name, message in messages.items():
            yield self._spilling.kept(self.host.send(name, task, round, message, sync_state))

    def settle(self) -> None:
        for name in self.host.names:
            self.host.store(name).settle()

    def strays(self) -> list[tuple[str, str]]:
        return []

    def pictures(self, name: str) -> Path | None:
        return self.host.folder(name) / PICTURES

    def close(self) -> None:
        self.host.close()
