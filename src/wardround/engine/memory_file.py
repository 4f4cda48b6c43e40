"""A memory as one safetensors file: Params, tensors, numbers and text, nested in dictionaries and lists."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround.engine.checksums import BLANK, check_whole, seal
from wardround.errors import CheckpointError
from wardround.files import write_parts
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
