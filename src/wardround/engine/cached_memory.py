"""What clients of this process remember, kept where it was computed; the disk gets it with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wardround.clients import Snapshot, SyncState
from wardround.engine.memory_file import PackedMemory, clone_memory, pack, read_into_memory
from wardround.engine.memory_store import ONLY_TRAINING, MemoryStore
from wardround.params import Params


class MemoryBudget:
    """Bytes of messages and memories that may stay where they were computed; the rest goes to the disk."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._taken = 0

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes if they are there."""
        if self._taken + num_bytes > self.num_bytes:
            return False
        self._taken += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self._taken -= num_bytes


@dataclass
class Version:
    """A memory as a round left it. rewinds: how many came before; is_written: whether the disk has it."""

    round: int
    memory: Mapping[str, Any]
    rewinds: int
    num_bytes: int
    is_written: bool = False


class CachedMemory:
    """One client's memory, in the place of its `MemoryStore`.

    The newest version and the one before it are held: a round that begins again needs that. Where they do
    not fit, the store behind takes every version at once, as it does in other processes.
    """

    def __init__(self, store: MemoryStore, room: MemoryBudget, gpu: torch.device | None = None) -> None:
        self.folder = store.folder
        self._store = store
        self._room = room
        self._gpu = gpu
        self._versions: list[Version] | None = None  # oldest first; None until the disk was looked at
        self._best: tuple[int, Version] | None = None  # the round of the best model, and what belongs to it
        self._on_disk = -1  # the last round of a best model that the disk has the memory of
        self._is_too_large = False

    def follow(self, sync_state: SyncState) -> None:
        """Forget what the server took back, and keep what belongs to its best model."""
        versions = self._open()
        if self._is_too_large:
            self._store.follow(sync_state)
            return
        if versions and (missed := sync_state.rewinds[versions[-1].rewinds :]):
            while versions and versions[-1].round >= min(missed):
                self._drop(-1)
        best = sync_state.best
        if best is None or (self._best is not None and self._best[0] == best):
            return
        found = next((version for version in reversed(versions) if version.round <= best), None)
        if found is not None and not self._store.path("best", best).exists():
            self._best = (best, found)

    def load(self) -> dict[str, Any]:
        """The newest memory, or an empty one; it may be changed."""
        versions = self._open()
        if self._is_too_large:
            return self._store.load()
        return copy_out(versions[-1].memory) if versions else {}

    def load_best(self, round: int) -> dict[str, Any]:
        """The memory this client had when the best model was chosen."""
        if self._best is not None and self._best[0] == round:
            return copy_out(self._best[1].memory)
        return self._store.load_best(round)

    def save(self, round: int, memory: Mapping[str, Any], rewinds: int = 0) -> None:
        """Keep the memory of this round."""
        versions = self._open()
        if self._is_too_large:
            self._store.save(round, memory, rewinds)
            return
        if not memory and not versions:
            return
        if versions and versions[-1].round == round:
            self._drop(-1)
        while len(versions) > 1:
            self._drop(0)
        if not self._hold(Version(round, copy_out(memory), rewinds, count_bytes(memory))):
            self.snapshot(round).write()  # what only this process knows
            self._is_too_large = True
            while versions:
                self._drop(0)
            self._best = None
            self._store.save(round, memory, rewinds)

    def snapshot(self, round: int) -> Snapshot:
        """What brings this memory of so many rounds to the disk; another thread may run it."""
        if self._is_too_large:
            return self._store.snapshot(round)
        wanted = [*(self._versions or [])[-1:], *([] if self._best is None else [self._best[1]])]
        packed = {v.round: (v, PackedMemory(v.memory)) for v in wanted if not v.is_written}
        best = self._best

        def write() -> None:
            for version, memory in packed.values():
                memory.save(self._store.path("memory", version.round), rewinds=version.rewinds)
                version.is_written = True
            if best is not None and best[0] != self._on_disk:
                self._store.link_best(best[0], best[1].round)
                self._on_disk = best[0]

        return Snapshot(sum(memory.num_bytes for _, memory in packed.values()), write)

    def _open(self) -> list[Version]:
        """The versions that are held, the newest read from the disk at first."""
        if self._versions is None:
            self._versions = []
            files = self._store.list_files("memory")
            if files:
                round, path = files[-1]
                memory = read_into_memory(self._store.load(self._gpu))
                rewinds = self._store.count_rewinds(path)
                self._is_too_large = not self._hold(
                    Version(round, memory, rewinds, count_bytes(memory), is_written=True)
                )
        return self._versions

    def _hold(self, version: Version) -> bool:
        assert self._versions is not None
        if not self._room.take(version.num_bytes):
            return False
        self._versions.append(version)
        return True

    def _drop(self, place: int) -> None:
        assert self._versions is not None
        self._room.give_back(self._versions.pop(place).num_bytes)


def copy_out(memory: Mapping[str, Any]) -> dict[str, Any]:
    """A memory that may be changed; what only our training loop uses it never changes."""
    return {
        str(key): value if key in ONLY_TRAINING and isinstance(value, Params) else clone_memory(value)
        for key, value in memory.items()
    }


def count_bytes(memory: Mapping[str, Any]) -> int:
    tensors: dict[str, Tensor] = {}
    pack(memory, tensors)
    return sum(tensor.nbytes for tensor in tensors.values())
