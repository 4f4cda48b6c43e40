"""Checkpoints: server state and client memories as safetensors and JSON, written atomically.

    checkpoints/latest.json                 points to the files below; replaced last, in one step
    checkpoints/round-00007.safetensors     server params and memory after round 7
    checkpoints/best-00005.safetensors      the model chosen on validation
    checkpoints/rewinds.json                rounds that were restarted
    clients/<name>/memory-00006.safetensors what a client remembers; it never leaves the client

A client writes its own memory, whichever process or machine it is in. Files carry the round they
were written in, so a killed run rewinds to the last whole round: memories of later rounds are dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround.clients import SyncState
from wardround.errors import CheckpointError
from wardround.files import write_json
from wardround.params import Params
from wardround.storage import StoredTensors, save_tensors

FORMAT = "wardround-memory-1"
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


def save_memory(path: Path, memory: Mapping[str, Any], *, durable: bool = True, rewinds: int = 0) -> None:
    tensors: dict[str, Tensor] = {}
    tree = pack(memory, tensors)
    header = {"format": FORMAT, "tree": json.dumps(tree), "rewinds": str(rewinds)}
    save_tensors(path, tensors, header, durable=durable)


def load_memory(path: Path, later: Collection[str] = ()) -> dict[str, Any]:
    """What `save_memory` wrote; later: entries that are read when they are looked at."""
    stored = StoredTensors(path)
    if stored.metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a wardround memory file.")
    tree = json.loads(stored.metadata["tree"])
    return {key: unpack(item, stored, later=key in later) for key, item in tree["items"].items()}


class MemoryStore:
    """One client's memory on its own disk, a file for each round that changed it.

    durable: every file survives a power cut at once; otherwise from `settle` on.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self.folder = folder
        self._durable = durable

    def follow(self, sync_state: SyncState) -> None:
        """Forget what the server took back, and keep what belongs to its best model.

        Every file says how many rewinds came before it, so a client that was away catches up on the rest.
        """
        newest = self._files("memory")
        if not newest:
            return
        if sync_state.rewinds:
            known = int(StoredTensors(newest[-1][1]).metadata.get("rewinds", 0))
            if missed := sync_state.rewinds[known:]:
                self.rewind(min(missed))
        if sync_state.best is not None and not self._path("best", sync_state.best).exists():
            self.keep_best(sync_state.best)

    def load(self) -> dict[str, Any]:
        """The newest memory, or an empty one."""
        newest = self._files("memory")
        return load_memory(newest[-1][1], ONLY_TRAINING) if newest else {}

    def load_best(self, round: int) -> dict[str, Any]:
        """The memory this client had when the best model was chosen."""
        path = self._path("best", round)
        return load_memory(path, ONLY_TRAINING) if path.exists() else {}

    def save(self, round: int, memory: Mapping[str, Any], rewinds: int = 0) -> None:
        """Store the memory of this round; the newest of the rounds before stays for a rewind."""
        if not memory and not self._files("memory"):
            return
        save_memory(self._path("memory", round), memory, durable=self._durable, rewinds=rewinds)
        for kind in ("memory", "best"):
            for _, path in [entry for entry in self._files(kind) if entry[0] < round][:-1]:
                path.unlink()

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

    def _path(self, kind: str, round: int) -> Path:
        return self.folder / f"{kind}-{round:05d}.safetensors"

    def _files(self, kind: str) -> list[tuple[int, Path]]:
        found = self.folder.glob(f"{kind}-*.safetensors")
        return sorted((int(path.stem.removeprefix(f"{kind}-")), path) for path in found)


class Checkpoints:
    """The server's checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pointer = folder / "latest.json"

    def exists(self) -> bool:
        return self._pointer.exists()

    def save(self, round: int, params: Params, memory: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write the state after `round` rounds; `facts` are plain JSON (best round, history)."""
        name = f"round-{round:05d}.safetensors"
        save_memory(self.folder / name, {"params": params, "memory": dict(memory)})
        write_json(self._pointer, {"round": round, "state": name, **facts})
        self._remove_all_but("round", name)

    def save_best(self, round: int, params: Params) -> str:
        """Write the best model so far and return its file name."""
        name = f"best-{round:05d}.safetensors"
        save_memory(self.folder / name, {"params": params})
        return name

    def load(self) -> tuple[dict[str, Any], Params, dict[str, Any]]:
        """Facts, params and server memory of the last whole round."""
        try:
            facts: dict[str, Any] = json.loads(self._pointer.read_text())
            stored = load_memory(self.folder / facts["state"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self._pointer} cannot be read ({error}). Start a new run without --resume."
            ) from None
        return facts, stored["params"], stored["memory"]

    def load_best(self, name: str) -> Params:
        params: Params = load_memory(self.folder / name)["params"]
        return params

    def rewinds(self) -> tuple[int, ...]:
        """Rounds that were restarted so far."""
        path = self.folder / "rewinds.json"
        return tuple(json.loads(path.read_text())) if path.exists() else ()

    def add_rewind(self, round: int) -> tuple[int, ...]:
        """Note that a round begins again, before any client hears of it."""
        every = (*self.rewinds(), round)
        write_json(self.folder / "rewinds.json", list(every))
        return every

    def remove_other_best(self, name: str | None) -> None:
        if name is not None:
            self._remove_all_but("best", name)

    def _remove_all_but(self, kind: str, name: str) -> None:
        for path in self.folder.glob(f"{kind}-*.safetensors"):
            if path.name != name:
                path.unlink()
