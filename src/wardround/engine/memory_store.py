"""What clients remember between tasks, on their own disk.

    clients/<name>/memory-00006.safetensors what a client remembers; it never leaves the client
    clients/<name>/best-00004.safetensors   what it remembered when the best model was chosen

A client writes its own memory, whichever process or machine it is in. Files carry the round they were
written in, so a run that was killed drops memories of rounds that do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from wardround.clients import Snapshot, SyncState
from wardround.engine.memory_file import load_memory, save_memory
from wardround.errors import CheckpointError
from wardround.machine import link, sync_file
from wardround.storage import StoredTensors

KEEP = 3
IN_FLIGHT = 2  # rounds that a server may not have written when it is killed
ONLY_TRAINING = ("previous", "teacher", "optimizer", "optimizer_second")  # large; read when first used


class MemoryStore:
    """One client's memory on its own disk, a file for each round that changed it.

    durable: every file survives a power cut at once; otherwise once a `snapshot` is written; keep: rounds of
    the server that may be resumed, None where the server removes what none of them needs (`prune`). A file is
    checked when this store first reads it, not after every task.
    """

    def __init__(self, folder: Path, *, durable: bool = False, keep: int | None = KEEP) -> None:
        self.folder = folder
        self._durable = durable
        self._keep = keep
        self._checked: set[Path] = set()

    def follow(self, sync_state: SyncState) -> None:
        """Forget what the server took back, and keep what belongs to its best model.

        Every file says how many rewinds came before it, so a client that was away catches up on the rest.
        """
        newest = self.list_files("memory")
        if not newest:
            return
        if sync_state.rewinds:
            known = self.count_rewinds(newest[-1][1])
            if missed := sync_state.rewinds[known:]:
                self.rewind(min(missed))
        if sync_state.best is not None and not self.path("best", sync_state.best).exists():
            self.keep_best(sync_state.best)

    def load(self, gpu: torch.device | None = None) -> dict[str, Any]:
        """The newest memory, or an empty one; gpu: where tensors go that were on a GPU."""
        newest = self.list_files("memory")
        return self._read(newest[-1][1], gpu) if newest else {}

    def load_best(self, round: int) -> dict[str, Any]:
        """The memory this client had when the best model was chosen."""
        path = self.path("best", round)
        return self._read(path) if path.exists() else {}

    def save(self, round: int, memory: Mapping[str, Any], rewinds: int = 0) -> None:
        """Store the memory of this round; those that a rewind to a kept round needs stay."""
        if not memory and not self.list_files("memory"):
            return
        path = self.path("memory", round)
        save_memory(path, memory, durable=self._durable, rewinds=rewinds)
        self._checked.add(path)
        if self._keep is not None:
            self.prune(round + 1 - self._keep - IN_FLIGHT)

    def prune(self, oldest: int) -> None:
        """Remove what no run needs that is resumed after `oldest` rounds or more."""
        for kind in ("memory", "best"):
            for _, path in [entry for entry in self.list_files(kind) if entry[0] < oldest][:-1]:
                path.unlink(missing_ok=True)

    def keep_models(self, round: int) -> None:
        """Keep what personal models after so many rounds need, without what only training reads."""
        needed = self.list_before(round)
        for _, path in [*self.list_files("memory"), *self.list_files("best")]:
            memory = self._read(path) if path in needed else {}
            left = {key: value for key, value in memory.items() if key not in ONLY_TRAINING}
            if not left:
                path.unlink()
            elif left.keys() != memory.keys():
                save_memory(path, left, rewinds=self.count_rewinds(path))

    def list_before(self, round: int) -> list[Path]:
        """The files that a run resumed after so many rounds needs."""
        found = [
            [path for number, path in self.list_files(kind) if number < round] for kind in ("memory", "best")
        ]
        return [paths[-1] for paths in found if paths]

    def keep_best(self, round: int) -> None:
        """Remember the memory up to this round as the one of the best model."""
        files = [entry for entry in self.list_files("memory") if entry[0] <= round]
        if files:
            self.link_best(round, files[-1][0])

    def link_best(self, round: int, written: int) -> None:
        """Make the memory of round `written` the one of the best model."""
        path = self.path("best", round)
        path.unlink(missing_ok=True)
        with suppress(FileExistsError):  # another thread was quicker
            link(self.path("memory", written), path)

    def snapshot(self, round: int) -> Snapshot:
        """What brings to the disk what a run resumed after so many rounds needs."""

        def settle() -> None:
            for path in self.list_before(round):
                sync_file(path)

        return Snapshot(0, settle)

    def rewind(self, round: int) -> None:
        """Forget what was written in this round or later."""
        for kind in ("memory", "best"):
            for number, path in self.list_files(kind):
                if number >= round:
                    path.unlink()

    def count_rewinds(self, path: Path) -> int:
        """How many rewinds came before a file."""
        try:
            return int(StoredTensors(path).metadata.get("rewinds", 0))
        except (CheckpointError, ValueError) as error:
            number = read_number(path)
            advice = f"Remove it, and resume the run with --from-round {number} or an earlier round."
            raise CheckpointError(f"{self._without_folder(error, path)} {advice}") from None

    def _read(self, path: Path, gpu: torch.device | None = None) -> dict[str, Any]:
        later = () if gpu is not None else ONLY_TRAINING
        try:
            memory = load_memory(path, later, checked=path in self._checked, gpu=gpu)
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

    def path(self, kind: str, round: int) -> Path:
        """Where the memory of a round is, or the one of the best model ("best")."""
        return self.folder / f"{kind}-{round:05d}.safetensors"

    def list_files(self, kind: str) -> list[tuple[int, Path]]:
        """Rounds and files, oldest first."""
        found = self.folder.glob(f"{kind}-*.safetensors")
        return sorted((read_number(path), path) for path in found)


def read_number(path: Path) -> int:
    """The round in a file's name; -1 is the set-up before the first."""
    return int(path.stem.split("-", 1)[1])


def open_stores(clients: Path) -> list[MemoryStore]:
    """The memories of clients on this machine; hospitals keep theirs themselves."""
    return [MemoryStore(path) for path in sorted(clients.glob("*/"))]
