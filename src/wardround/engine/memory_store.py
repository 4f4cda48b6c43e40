"""What clients remember between tasks, on their own disk.

    clients/<name>/memory-00006.safetensors what a client remembers; it never leaves the client
    clients/<name>/best-00004.safetensors   what it remembered when the best model was chosen

A client writes its own memory, whichever process or machine it is in. Files carry the round they were
written in, so a run that was killed drops memories of rounds that do not count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.clients import SyncState
from wardround.engine.memory_file import load_memory, save_memory
from wardround.errors import CheckpointError
from wardround.storage import StoredTensors

KEEP = 3
ONLY_TRAINING = ("previous", "optimizer", "optimizer_second")  # large; read when first used


class MemoryStore:
    """One client's memory on its own disk, a file for each round that changed it.

    durable: every file survives a power cut at once; otherwise from `settle` on; keep: rounds of the server
    that may be resumed. A file is checked when this store first reads it, not after every task.
    """

    def __init__(self, folder: Path, *, durable: bool = False, keep: int = KEEP) -> None:
        self.folder = folder
        self._durable = durable
        self._keep = keep
        self._checked: set[Path] = set()

    def follow(self, sync_state: SyncState) -> None:
        """Forget what the server took back, and keep what belongs to its best model.

        Every file says how many rewinds came before it, so a client that was away catches up on the rest.
        """
        newest = self._files("memory")
        if not newest:
            return
        if sync_state.rewinds:
            known = self._count_rewinds(newest[-1][1])
            if missed := sync_state.rewinds[known:]:
                self.rewind(min(missed))
        if sync_state.best is not None and not self._path("best", sync_state.best).exists():
            self.keep_best(sync_state.best)

    def load(self) -> dict[str, Any]:
        """The newest memory, or an empty one."""
        newest = self._files("memory")
        return self._read(newest[-1][1]) if newest else {}

    def load_best(self, round: int) -> dict[str, Any]:
        """The memory this client had when the best model was chosen."""
        path = self._path("best", round)
        return self._read(path) if path.exists() else {}

    def save(self, round: int, memory: Mapping[str, Any], rewinds: int = 0) -> None:
        """Store the memory of this round; those that a rewind to a kept round needs stay."""
        if not memory and not self._files("memory"):
            return
        path = self._path("memory", round)
        save_memory(path, memory, durable=self._durable, rewinds=rewinds)
        self._checked.add(path)
        for kind in ("memory", "best"):
            for _, path in [entry for entry in self._files(kind) if entry[0] <= round - self._keep][:-1]:
                path.unlink()

    def list_before(self, round: int) -> list[Path]:
        """The files that a run resumed after so many rounds needs."""
        found = [
            [path for number, path in self._files(kind) if number < round] for kind in ("memory", "best")
        ]
        return [paths[-1] for paths in found if paths]

    def keep_best(self, round: int) -> None:
        """Remember the memory up to this round as the one of the best model."""
        files = [entry for entry in self._files("memory") if entry[0] <= round]
        if files:
            path = self._path("best", round)
            path.unlink(missing_ok=True)
            os.link(files[-1][1], path)

    def settle(self) -> None:
        """Bring the newest memory to the disk; called once a round, before the server's checkpoint."""
        newest = self._files("memory")
        if newest:
            with newest[-1][1].open("rb") as file:
                os.fsync(file.fileno())

    def rewind(self, round: int) -> None:
        """Forget what was written in this round or later."""
        for kind in ("memory", "best"):
            for number, path in self._files(kind):
                if number >= round:
                    path.unlink()

    def _count_rewinds(self, path: Path) -> int:
        """How many rewinds came before a file."""
        try:
            return int(StoredTensors(path).metadata.get("rewinds", 0))
        except (CheckpointError, ValueError) as error:
            number = read_number(path)
            advice = f"Remove it, and resume the run with --from-round {number} or an earlier round."
            raise CheckpointError(f"{self._without_folder(error, path)} {advice}") from None

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            memory = load_memory(path, ONLY_TRAINING, checked=path in self._checked)
        except CheckpointError as error:
            number = read_number(path)
            advice = (
                f"The run can continue after round {number} or before it: --resume --from-round {number}."
            )
            raise CheckpointError(f"{self._without_folder(error, path)} {advice}") from None
        self._checked.add(path)
        return memory

    def _without_folder(self, error: Exception, path: Path) -> str:
        """The reason as a hospital may tell the organiser, who has to act upon it: without paths."""
        return str(error).replace(str(path), f"{path.name} of client '{self.folder.name}'")

    def _path(self, kind: str, round: int) -> Path:
        return self.folder / f"{kind}-{round:05d}.safetensors"

    def _files(self, kind: str) -> list[tuple[int, Path]]:
        found = self.folder.glob(f"{kind}-*.safetensors")
        return sorted((read_number(path), path) for path in found)


def read_number(path: Path) -> int:
    """The round in a file's name; -1 is the set-up before the first."""
    return int(path.stem.split("-", 1)[1])


def open_stores(clients: Path) -> list[MemoryStore]:
    """The memories of clients on this machine; hospitals keep theirs themselves."""
    return [MemoryStore(path) for path in sorted(clients.glob("*/"))]
