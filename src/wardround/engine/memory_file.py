"""A memory as one safetensors file: Params, tensors, numbers and text, nested in dictionaries and lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wardround.engine.checksums import BLANK, check_whole, seal
from wardround.errors import CheckpointError
from wardround.files import parse_json, write_parts
from wardround.host_copy import HostCopy
from wardround.params import Params
from wardround.storage import StoredTensors, tensor_parts

FORMAT = "wardround-memory-2"
FORMAT_WITHOUT_CHECKSUM = "wardround-memory-1"


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Plain JSON for nested memory; tensors go into `tensors` under their path."""
    if isinstance(value, Params):
        names = list(value)
        for name in names:
            tensors[f"{path}/{name}"] = value[name]
        on_gpu = any(value.device(name).type == "cuda" for name in names)
        return {"kind": "params", "path": path, "names": names, **({"on_gpu": True} if on_gpu else {})}
    if isinstance(value, Tensor):
        tensors[path] = value
        on_gpu = value.device.type == "cuda"
        return {"kind": "tensor", "path": path, **({"on_gpu": True} if on_gpu else {})}
    if isinstance(value, Mapping):
        items = {str(key): pack(item, tensors, f"{path}/{key}") for key, item in value.items()}
        return {"kind": "dict", "items": items}
    if isinstance(value, list | tuple):
        return {"kind": "list", "items": [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, str | int | float | bool):
        return {"kind": "value", "value": value}
    raise TypeError(f"memory '{path}' holds a {type(value).__name__}; keep Params, tensors, numbers or text")


def unpack(
    tree: Any, tensors: Mapping[str, Tensor], *, later: bool = False, gpu: torch.device | None = None
) -> Any:
    """The inverse of `pack`; tensors are read into memory.

    later: params are read when they are looked at; gpu: where tensors go that were on a GPU, so that a
    resumed run computes where it would have.
    """
    kind = tree["kind"]
    device = gpu if tree.get("on_gpu") else None
    if kind == "params" and later and isinstance(tensors, StoredTensors):
        return Params(tensors.under(f"{tree['path']}/", tree["names"]))
    if kind == "params":
        return Params({name: tensors[f"{tree['path']}/{name}"].to(device) for name in tree["names"]})
    if kind == "tensor":
        return tensors[tree["path"]].to(device)
    if kind == "dict":
        return {key: unpack(item, tensors, gpu=gpu) for key, item in tree["items"].items()}
    if kind == "list":
        return [unpack(item, tensors, gpu=gpu) for item in tree["items"]]
    return tree["value"]


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same memory with another tensor in the place of each; containers are copied."""
    if isinstance(value, Params):
        return value.map(function)
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {str(key): map_tensors(item, function) for key, item in value.items()}  # as a file has them
    if isinstance(value, list | tuple):
        return [map_tensors(item, function) for item in value]
    return value


def read_into_memory(value: Any) -> Any:
    """The same memory with every stored tensor read, so that its file may go."""
    return map_tensors(value, lambda tensor: tensor)


def clone_memory(value: Any) -> Any:
    """A memory that shares nothing with this one: either may change."""
    return map_tensors(value, lambda tensor: tensor.detach().clone())


class PackedMemory:
    """A memory as it is now, to be written later, also by another thread."""

    def __init__(self, memory: Mapping[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        self._tree = json.dumps(pack(memory, tensors))
        self._copy = HostCopy(tensors)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def save(self, path: Path, *, durable: bool = True, rewinds: int = 0) -> str:
        """Write the memory and return its checksum."""
        header = {"sha256": BLANK, "format": FORMAT, "tree": self._tree, "rewinds": str(rewinds)}
        parts, checksum = seal(tensor_parts(self._copy.get(), header))
        write_parts(path, parts, durable=durable)
        return checksum


def save_memory(path: Path, memory: Mapping[str, Any], *, durable: bool = True, rewinds: int = 0) -> str:
    """Write a memory and return its checksum."""
    return PackedMemory(memory).save(path, durable=durable, rewinds=rewinds)


def load_memory(
    path: Path, later: Collection[str] = (), *, checked: bool = False, gpu: torch.device | None = None
) -> dict[str, Any]:
    """What `save_memory` wrote.

    later: entries read when they are looked at; checked: known to be whole; gpu: as in `unpack`.
    """
    if not checked:
        check_whole(path)
    stored = StoredTensors(path)
    wanted = FORMAT if "sha256" in stored.metadata else FORMAT_WITHOUT_CHECKSUM
    if stored.metadata.get("format") != wanted:
        raise CheckpointError(f"{path} is damaged, or not a wardround memory file.")
    try:
        tree = parse_json(stored.metadata["tree"])
        return {key: unpack(item, stored, later=key in later, gpu=gpu) for key, item in tree["items"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:  # without a checksum
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
