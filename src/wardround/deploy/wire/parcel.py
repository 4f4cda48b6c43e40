"""Parcel: what an engine carries, a JSON header and numeric arrays by name.

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

from wardround.clients.traffic import (
    Array,
    short,
)
from wardround.errors import WardroundError
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
