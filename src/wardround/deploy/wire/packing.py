"""Parcel, what an engine carries, and packing a message into one.

The header, by key: schema, kind, run, request, client, task, round; layout, the groups of tensors and their
names, in order; tensors, type and shape of each as it travels, with the coding and compression to undo;
scalars, as in the message; more, facts beside it; sha256, over all the rest. The SHA-256 shows damage; who
sent a parcel is for the engine's connection to prove.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from wardround.clients.traffic import (
    Array,
    as_array,
    compress_array,
    encode,
    short,
)
from wardround.config import TrafficSettings
from wardround.errors import WardroundError
from wardround.messages import Message
from wardround.params import Params
from wardround.storage import DTYPES

SCHEMA = "wardround-parcel-1"
MAX_HEADER_CHARACTERS = 64 * 2**20
MAX_DEPTH = 50
Kind = Literal["request", "reply"]
ADDRESS = ("kind", "run", "task", "round", "client", "request")
TYPES = {short(dtype): dtype for dtype in DTYPES.values()}


class ParcelError(WardroundError):
    """A parcel that cannot be made, or is not what it should be."""


@dataclass(frozen=True)
class Parcel:
    """What an engine carries: plain JSON and numeric arrays by name."""

    header: dict[str, Any]
    arrays: Mapping[str, Array]

    @classmethod
    def read(cls, text: str, arrays: Mapping[str, Array]) -> Parcel:
        """A parcel whose header came as text."""
        if not isinstance(text, str) or len(text) > MAX_HEADER_CHARACTERS:
            raise ParcelError("the message's header is not text, or is longer than 64 MiB.")
        try:
            return cls(json.loads(text), arrays)
        except (ValueError, RecursionError):
            raise ParcelError("the message's header is not readable JSON.") from None

    @property
    def text(self) -> str:
        """The header as JSON; NaN and infinities as Python writes and reads them."""
        return json.dumps(self.header)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays and of the header's text."""
        return len(self.text) + sum(array.nbytes for array in self.arrays.values())

    @property
    def sha256(self) -> str:
        return str(self.header["sha256"])


def array_key(label: str, name: str) -> str:
    """An array's name; a slash in an extra's own name is escaped, so that no two tensors share one."""
    kind, slash, extra = label.partition("/")
    return kind + slash + extra.replace("%", "%25").replace("/", "%2F") + "/" + name


def compute_sha256(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """SHA-256 over the header without its own, then every array's name, type, shape and bytes."""
    rest = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        if array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def as_plain(value: Any, where: str = "the header", depth: int = 0) -> Any:
    """The same value made of JSON's own types alone; anything else is refused by name."""
    if depth > MAX_DEPTH:
        raise ParcelError(f"{where} is nested more than {MAX_DEPTH} levels deep.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        if abs(value) >= 2**64:
            raise ParcelError(f"{where} holds an integer of more than 64 bits.")
        return int(value)
    if isinstance(value, list | tuple):
        return [as_plain(item, where, depth + 1) for item in value]
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            raise ParcelError(f"{where} has a key of type {type(odd).__name__}; only text can be sent.")
        return {str(key): as_plain(item, f"'{show(key)}'", depth + 1) for key, item in value.items()}
    raise ParcelError(f"{where} holds a {type(value).__name__}, which cannot be sent.")


def show(value: Any) -> str:
    """An untrusted value for a message: short, on one line, printable characters only."""
    text = ascii(value)
    text = text[1:-1] if isinstance(value, str) else text
    return text if len(text) <= 80 else text[:77] + "..."


def pack(
    message: Message,
    *,
    kind: Kind,
    run: str,
    request: str,
    client: str,
    task: str,
    round: int,
    more: Mapping[str, Any] | None = None,
    traffic: TrafficSettings | None = None,
    base: Params | None = None,
) -> Parcel:
    """The message ready to travel; tensors on the host are not copied unless they are recoded.

    more: facts beside the message. traffic: applies to replies only; base: the model the request held.
    """
    settings = (traffic if kind == "reply" else None) or TrafficSettings()
    tensors: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Array] = {}
    for label, group in message.tensors().items():
        recoded = label == "params" and task == "train"
        for name in group:  # one at a time, so that no second model lies beside the parcel
            one, key = Params({name: group[name]}), array_key(label, name)
            carried, codings = encode(one, base, settings) if recoded else (one, {})
            arrays[key], tensors[key] = _pack_tensor(name, carried[name], settings.compress == "zlib")
            if name in codings:
                tensors[key]["coding"] = codings[name]
    header = {
        "schema": SCHEMA,
        "kind": kind,
        "run": run,
        "request": request,
        "client": client,
        "task": task,
        "round": round,
        "layout": [[label, list(group)] for label, group in message.tensors().items()],
        "tensors": tensors,
        "scalars": dict(message.scalars),
        "more": dict(more or {}),
    }
    plain = as_plain(header)
    return Parcel(plain | {"sha256": compute_sha256(plain, arrays)}, arrays)


def _pack_tensor(name: str, tensor: Tensor, compress: bool) -> tuple[Array, dict[str, Any]]:
    """An array that can travel, and what the header says of it."""
    dtype = short(tensor.dtype)
    if dtype not in TYPES:
        raise ParcelError(f"tensor '{name}' has type {dtype}, which cannot be sent.")
    array = as_array(tensor)
    facts: dict[str, Any] = {"dtype": dtype, "shape": list(tensor.shape)}
    small = compress_array(array) if compress else None
    return (array, facts) if small is None else (small, facts | {"compress": "zlib"})
