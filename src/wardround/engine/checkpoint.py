"""Checkpoints: server state and client memories as safetensors and JSON, written atomically.

    checkpoints/round-00007.safetensors     server params and memory after round 7
    checkpoints/round-00007.json            its index: what the run knew, and the SHA-256 of every file
                                            here that a run resumed after round 7 needs
    checkpoints/latest.json                 the index of the newest round; replaced last, in one step
    checkpoints/best-00005.safetensors      the model chosen on validation
    checkpoints/rewinds.json                rounds that were restarted
    clients/<name>/memory-00006.safetensors what a client remembers; it never leaves the client

A client writes its own memory, whichever process or machine it is in. Files carry the round they
were written in, so a killed run rewinds to the last whole round: memories of later rounds are dropped.
The last `checkpoint.keep` rounds stay, with the memories that belong to them. Every file has its own
checksum (`checksums`); one that is damaged is refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround.clients import SyncState
from wardround.engine.checksums import (
    BLANK,
    check_whole,
    read_checksum,
    read_guarded,
    read_object,
    seal,
    write_guarded,
)
from wardround.errors import CheckpointError
from wardround.files import write_parts
from wardround.params import Params
from wardround.storage import StoredTensors, tensor_parts

FORMAT = "wardround-memory-2"
FORMAT_WITHOUT_CHECKSUM = "wardround-memory-1"
KEEP = 3
ONLY_TRAINING = ("previous", "optimizer", "optimizer_second")  # large; read when first used


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Plain JSON for nested memory; tensors go into `tensors` under their path."""
    if isinstance(value, Params):
        names = list(value)
        for name in names:
            tensors[f"{path}/{name}"] = value[name]
        return {"kind": "params", "path": path, "names": names}
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"kind": "tensor", "path": path}
    if isinstance(value, Mapping):
        items = {str(key): pack(item, tensors, f"{path}/{key}") for key, item in value.items()}
        return {"kind": "dict", "items": items}
    if isinstance(value, list | tuple):
        return {"kind": "list", "items": [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, str | int | float | bool):
        return {"kind": "value", "value": value}
    raise TypeError(f"memory '{path}' holds a {type(value).__name__}; keep Params, tensors, numbers or text")


def unpack(tree: Any, tensors: Mapping[str, Tensor], *, later: bool = False) -> Any:
    """The inverse of `pack`; tensors are read into memory; later: params when they are looked at."""
    kind = tree["kind"]
    if kind == "params" and later and isinstance(tensors, StoredTensors):
        return Params(tensors.under(f"{tree['path']}/", tree["names"]))
    if kind == "params":
        return Params({name: tensors[f"{tree['path']}/{name}"] for name in tree["names"]})
    if kind == "tensor":
        return tensors[tree["path"]]
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in tree["items"].items()}
    if kind == "list":
        return [unpack(item, tensors) for item in tree["items"]]
    return tree["value"]


def read_into_memory(value: Any) -> Any:
    """The same memory with every stored tensor read, so that its file may go."""
    if isinstance(value, Params):
        return Params({name: value[name] for name in value})
    if isinstance(value, Mapping):
        return {key: read_into_memory(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [read_into_memory(item) for item in value]
    return value


def save_memory(path: Path, memory: Mapping[str, Any], *, durable: bool = True, rewinds: int = 0) -> str:
    """Write a memory and return its checksum."""
    tensors: dict[str, Tensor] = {}
    tree = pack(memory, tensors)
    header = {"sha256": BLANK, "format": FORMAT, "tree": json.dumps(tree), "rewinds": str(rewinds)}
    parts, checksum = seal(tensor_parts(tensors, header))
    write_parts(path, parts, durable=durable)
    return checksum


def load_memory(path: Path, later: Collection[str] = (), *, checked: bool = False) -> dict[str, Any]:
    """What `save_memory` wrote; later: entries read when they are looked at; checked: known to be whole."""
    if not checked:
        check_whole(path)
    stored = StoredTensors(path)
    wanted = FORMAT if "sha256" in stored.metadata else FORMAT_WITHOUT_CHECKSUM
    if stored.metadata.get("format") != wanted:
        raise CheckpointError(f"{path} is damaged, or not a wardround memory file.")
    try:
        tree = json.loads(stored.metadata["tree"])
        return {key: unpack(item, stored, later=key in later) for key, item in tree["items"].items()}
    except (ValueError, KeyError, TypeError) as error:  # of a file without a checksum
        raise CheckpointError(f"{path} cannot be read ({error}).") from None


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


class Checkpoints:
    """The server's checkpoints of one run, of the last `keep` rounds."""

    def __init__(self, folder: Path, *, keep: int = KEEP) -> None:
        self.folder = folder
        self._run = folder.parent
        self._keep = keep
        self._pointer = folder / "latest.json"
        self._rewinds = folder / "rewinds.json"
        self._checksums: dict[str, str | None] = {}  # of files that later rounds name too

    def exists(self) -> bool:
        return self._pointer.exists()

    # Writing

    def save(self, round: int, params: Params, memory: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write the state after `round` rounds; `facts` are plain JSON (best round, history)."""
        name = f"round-{round:05d}.safetensors"
        checksum = save_memory(self.folder / name, {"params": params, "memory": dict(memory)})
        files: dict[str, str | None] = {f"{self.folder.name}/{name}": checksum}
        if facts.get("best_file") is not None:
            best = f"{self.folder.name}/{facts['best_file']}"
            files[best] = self._checksums.get(best)
        for store in open_stores(self._run / "clients"):
            files |= {
                path.relative_to(self._run).as_posix(): read_checksum(path)
                for path in store.list_before(round)
            }
        self._write_index({"round": round, "state": name, **facts, "files": files})
        self._remove_old()

    def save_best(self, round: int, params: Params) -> str:
        """Write the best model so far and return its file name."""
        name = f"best-{round:05d}.safetensors"
        self._checksums[f"{self.folder.name}/{name}"] = save_memory(self.folder / name, {"params": params})
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
        for path in (self._index(index["round"]), self._pointer):
            write_guarded(path, index)

    def _remove_old(self) -> None:
        """Remove rounds that are no longer kept, and models that none of the others names."""
        rounds = list_indexed(self.folder)
        for number in rounds[: -self._keep]:
            self._remove(number)
        named = set()
        for number in rounds[-self._keep :]:
            with suppress(CheckpointError):  # a damaged index does not end a run that does not need it
                index = self._read_index(number)
                named |= {index["state"], index.get("best_file")}
        for path in self.folder.glob("*-*.safetensors"):
            if path.name not in named:
                path.unlink()

    def _remove(self, round: int) -> None:
        self._index(round).unlink(missing_ok=True)  # first: what has an index can be resumed
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
            return read_any_index(self._index(round))
        except CheckpointError:
            with suppress(CheckpointError):
                newest = read_any_index(self._pointer)
                if newest["round"] == round:
                    return newest
            raise

    def load(self, round: int | None = None) -> tuple[dict[str, Any], Params, dict[str, Any]]:
        """Facts, params and server memory of the newest round, or of another that is kept."""
        with self._advising():
            facts = self._read_index(round)
            stored = load_memory(self.folder / facts["state"])
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
            return tuple(read_guarded(self._rewinds)["rewinds"])
        except CheckpointError as error:
            with suppress(OSError, ValueError):
                earlier = json.loads(self._rewinds.read_text(encoding="utf-8"))
                if isinstance(earlier, list):  # earlier versions wrote no checksum
                    return tuple(int(round) for round in earlier)
            raise CheckpointError(
                f"{error} It says what clients must forget: bring it back from a copy, or start a new run."
            ) from None

    def add_rewind(self, round: int) -> tuple[int, ...]:
        """Note that a round begins again, before any client hears of it."""
        every = (*self.rewinds(), round)
        write_guarded(self._rewinds, {"rewinds": list(every)})
        return every

    def _index(self, round: int) -> Path:
        return self.folder / f"round-{round:05d}.json"


def list_indexed(folder: Path) -> list[int]:
    """Rounds that have an index, in order."""
    return sorted(read_number(path) for path in folder.glob("round-*.json"))


def read_any_index(path: Path) -> dict[str, Any]:
    """The index of a checkpoint; earlier versions wrote none of the two keys, and no checksum."""
    content = read_object(path)
    if content.keys() & {"files", "sha256"}:
        return read_guarded(path)
    if not {"round", "state", "best_file"} <= content.keys():
        raise CheckpointError(f"{path} is damaged: it is not an index of a checkpoint.")
    return content
