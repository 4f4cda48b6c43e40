"""Checkpoints: the server's state as safetensors and JSON, written atomically.

    checkpoints/round-00007.safetensors     server params and memory after round 7
    checkpoints/round-00007.json            its index: what the run knew, and the SHA-256 of every file
                                            here that a run resumed after round 7 needs
    checkpoints/latest.json                 the index of the newest round; replaced last, in one step
    checkpoints/best-00005.safetensors      the model chosen on validation
    checkpoints/rewinds.json                rounds that were restarted

A killed run rewinds to the last whole round. The last `checkpoint.keep` rounds stay, with the memories of
clients that belong to them (`memory_store`). Every file has its own checksum (`checksums`); one that is
damaged is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from wardround.clients import Snapshot
from wardround.engine.checksums import check_whole, read_checksum, read_guarded, read_object, write_guarded
from wardround.engine.memory_file import PackedMemory, clone_memory, load_memory
from wardround.engine.memory_store import KEEP, open_stores, read_number
from wardround.errors import CheckpointError
from wardround.files import parse_json
from wardround.params import Params


class Checkpoints:
    """The server's checkpoints of one run, of the last `keep` rounds."""

    def __init__(self, folder: Path, *, keep: int = KEEP) -> None:
        self.folder = folder
        self._run = folder.parent
        self._prefix = f"{folder.name}/"  # of files of this folder, as an index names them
        self._keep = keep
        self._pointer = folder / "latest.json"
        self._rewinds = folder / "rewinds.json"
        self._checksums: dict[str, str | None] = {}  # of files that later rounds name too
        self._best: tuple[str, PackedMemory] | None = None  # the best model, to be written with a state

    def exists(self) -> bool:
        return self._pointer.exists()

    # Writing

    def snapshot(
        self, round: int, params: Params, memory: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> Snapshot:
        """The state after `round` rounds, to be written; `facts` are plain JSON (best round, history).

        A method may change its memory before it is.
        """
        state = PackedMemory({"params": params, "memory": clone_memory(memory)})
        best, known = self._best, dict(facts)
        if best is not None and self._prefix + best[0] in self._checksums:
            best = self._best = None  # it is written

        def write() -> None:
            if best is not None and self._prefix + best[0] not in self._checksums:
                self._checksums[self._prefix + best[0]] = best[1].save(self.folder / best[0])
            self._write(round, state, known)

        return Snapshot(state.num_bytes + (0 if best is None else best[1].num_bytes), write)

    def _write(self, round: int, state: PackedMemory, facts: Mapping[str, Any]) -> None:
        name = f"round-{round:05d}.safetensors"
        files: dict[str, str | None] = {self._prefix + name: state.save(self.folder / name)}
        if facts.get("best_file") is not None:
            best = self._prefix + facts["best_file"]
            files[best] = self._checksums.get(best)
        for store in open_stores(self._run / "clients"):
            files |= {
                path.relative_to(self._run).as_posix(): read_checksum(path)
                for path in store.list_before(round)
            }
        self._write_index({"round": round, "state": name, **facts, "files": files})
        self._remove_old()

    def hold_best(self, round: int, params: Params) -> str:
        """Take the best model so far, to be written with the next state; the name of its file."""
        name = f"best-{round:05d}.safetensors"
        self._best = (name, PackedMemory({"params": params}))
        return name

    def rewind(self, round: int) -> None:
        """Make a kept round the newest one; later ones go."""
        index = self._read_index(round)
        self._checksums = dict(index.get("files", {}))
        self._write_index(index)
        for number in list_indexed(self.folder):
            if number > round:
                self._remove(number)

    def _write_index(self, index: Mapping[str, Any]) -> None:
        for path in (index_path(self.folder, index["round"]), self._pointer):
            write_guarded(path, index)

    def _remove_old(self) -> None:
        """Remove rounds that are no longer kept, and models that none of the others names."""
        rounds = list_indexed(self.folder)
        for number in rounds[: -self._keep]:
            self._remove(number)
        for store in open_stores(self._run / "clients"):
            store.prune(rounds[-self._keep :][0])
        named = set()
        for number in rounds[-self._keep :]:
            with suppress(CheckpointError):  # a damaged index does not end a run that does not need it
                index = self._read_index(number)
                named |= {index["state"], index.get("best_file")}
        for path in self.folder.glob("*-*.safetensors"):
            if path.name not in named:
                path.unlink()

    def _remove(self, round: int) -> None:
        index_path(self.folder, round).unlink(missing_ok=True)  # first: what has an index can be resumed
        (self.folder / f"round-{round:05d}.safetensors").unlink(missing_ok=True)

    # Reading

    def kept(self) -> list[int]:
        """The rounds that are kept, in order; what is later than the newest index was taken back."""
        try:
            newest = int(self._read_index()["round"])
        except CheckpointError:
            return list_indexed(self.folder)
        return [*(number for number in list_indexed(self.folder) if number < newest), newest]

    def read_index(self) -> dict[str, Any]:
        """What is known of the newest round."""
        with self._advising():
            return self._read_index()

    def _read_index(self, round: int | None = None) -> dict[str, Any]:
        """What is known of a kept round, or of the newest one; of that there are two copies."""
        if round is None:
            return read_any_index(self._pointer)
        try:
            return read_any_index(index_path(self.folder, round))
        except CheckpointError:
            with suppress(CheckpointError):
                newest = read_any_index(self._pointer)
                if newest["round"] == round:
                    return newest
            raise

    def load(
        self, round: int | None = None, gpu: torch.device | None = None
    ) -> tuple[dict[str, Any], Params, dict[str, Any]]:
        """Facts, params and server memory of the newest round, or of another that is kept.

        gpu: where tensors go that were on a GPU.
        """
        with self._advising():
            facts = self._read_index(round)
            stored = load_memory(self.folder / facts["state"], gpu=gpu)
        return facts, stored["params"], stored["memory"]

    def load_best(self, name: str) -> Params:
        with self._advising():
            params: Params = load_memory(self.folder / name)["params"]
        return params

    def check(self, round: int | None = None) -> int:
        """Refuse a round that is not kept, or of which a file is missing or damaged; its number."""
        if round is not None and round not in (kept := self.kept()):
            rounds = ", ".join(map(str, kept))
            raise CheckpointError(f"{self._run} does not keep round {round}; --from-round can be {rounds}.")
        self.rewinds()
        with self._advising():
            index = self._read_index(round)
        if index.get("models_only"):
            raise CheckpointError(
                f"{self._run} is done and keeps its models alone, as runs of a comparison do; it cannot be "
                "resumed. To train further, start a new run from its model (model.weights)."
            )
        with self._advising():
            return self._check(round)

    def _check(self, round: int | None) -> int:
        index = self._read_index(round)
        for name, checksum in index.get("files", {}).items():
            check_whole(self._run / name, checksum)
        return int(index["round"])

    @contextmanager
    def _advising(self) -> Iterator[None]:
        """Say of a damaged round which other one the run could continue from."""
        try:
            yield
        except CheckpointError as error:
            whole = next((number for number in reversed(self.kept()) if self._is_whole(number)), None)
            advice = (
                "No other kept round is whole: bring the file back from a copy, or start a new run."
                if whole is None
                else f"Round {whole} is whole; continue after it with --resume --from-round {whole}."
            )
            raise CheckpointError(f"{error} {advice}") from None

    def _is_whole(self, round: int) -> bool:
        try:
            return self._check(round) == round
        except CheckpointError:
            return False

    # Rounds that were restarted

    def rewinds(self) -> tuple[int, ...]:
        """Rounds that were restarted so far."""
        if not self._rewinds.exists():
            return ()
        try:
            return check_rounds(self._rewinds, read_guarded(self._rewinds).get("rewinds"))
        except CheckpointError as error:
            with suppress(OSError, ValueError, CheckpointError):  # earlier versions wrote no checksum
                return check_rounds(self._rewinds, parse_json(self._rewinds.read_text(encoding="utf-8")))
            raise CheckpointError(
                f"{error} It says what clients must forget: bring it back from a copy, or start a new run."
            ) from None

    def add_rewind(self, round: int) -> tuple[int, ...]:
        """Note that a round begins again, before any client hears of it."""
        every = (*self.rewinds(), round)
        write_guarded(self._rewinds, {"rewinds": list(every)})
        return every


def keep_models(run: Path) -> None:
    """Keep of a finished run what its models need, so that many runs fit on a disk.

    What only training reads goes: earlier rounds, optimizer moments. The run can no longer be resumed.
    """
    folder = run / "checkpoints"
    index = Checkpoints(folder).read_index()
    if index.get("models_only"):
        return
    write_guarded(
        folder / "latest.json", {**index, "models_only": True, "files": {}}
    )  # first: a kill may come
    for number in list_indexed(folder):
        index_path(folder, number).unlink(missing_ok=True)
    for path in folder.glob("*-*.safetensors"):
        if path.name not in (index["state"], index.get("best_file")):
            path.unlink()
    for store in open_stores(run / "clients"):
        store.keep_models(index["round"])


def index_path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:05d}.json"


def list_indexed(folder: Path) -> list[int]:
    """Rounds that have an index, in order."""
    return sorted(read_number(path) for path in folder.glob("round-*.json"))


def read_any_index(path: Path) -> dict[str, Any]:
    """The index of a checkpoint; earlier versions wrote none of the two keys, and no checksum."""
    content = read_object(path)
    if content.keys() & {"files", "sha256"}:
        content = read_guarded(path)
    files, best = content.get("files", {}), content.get("best_file", "")
    whole = (
        type(content.get("round")) is int
        and content["round"] >= 0
        and is_file_name(content.get("state"))
        and (best is None or is_file_name(best))
        and isinstance(content.get("best_round", 0), int | None)
        and isinstance(files, dict)
        and all(is_file_name(name) and isinstance(text, str | None) for name, text in files.items())
    )
    if not whole:
        raise CheckpointError(f"{path} is damaged: it is not an index of a checkpoint.")
    return content


def is_file_name(value: Any) -> bool:
    """Whether it can be the name of a file in the folder of a run."""
    return isinstance(value, str) and value.isprintable() and value != "" and ".." not in value


def check_rounds(path: Path, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(round) is int and round >= 0 for round in value):
        raise CheckpointError(f"{path} is damaged: it is not a list of rounds.")
    return tuple(value)
