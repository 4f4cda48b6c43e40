"""A message on its way between organiser and hospital: a JSON header, numeric arrays, one SHA-256 over both.

`pack` makes a parcel; `unpack` believes nothing of one. It checks that the parcel is the one expected, that
it is not too large, that names, shapes and types agree, and the SHA-256, before a byte of it is used. What is
wrong becomes a `ParcelError` of one sentence. There is no form in which an object other than a number, a text
or a list or dictionary of these could travel, so there is nothing to execute.

The header, by key: schema, kind, run, request, client, task, round; layout, the groups of tensors and their
names, in order; tensors, type and shape of each as it travels, with the coding and compression to undo;
scalars, as in the message; more, facts beside it; sha256, over all the rest. The SHA-256 shows damage; who
sent a parcel is for the engine's connection to prove.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wardround.clients.gate import content_complaint
from wardround.clients.traffic import (
    CODINGS,
    Array,
    Coding,
    as_array,
    compress_array,
    decode,
    decompress_array,
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
MAX_AXES = 64

Kind = Literal["request", "reply"]

ADDRESS = ("kind", "run", "task", "round", "client", "request")
FIELDS = frozenset({"schema", *ADDRESS, "layout", "tensors", "scalars", "more", "sha256"})
TYPES = {short(dtype): dtype for dtype in DTYPES.values()}
CARRIERS: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == "bfloat16" else name) for name in TYPES
}


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
            raise ParcelError("the message's header is no text, or one of more than 64 MiB.")
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


# Packing


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

    more: facts beside the message. traffic: only replies heed it; base: the model the request held.
    """
    settings = (traffic if kind == "reply" else None) or TrafficSettings()
    tensors: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Array] = {}
    for label, group in message.tensors().items():
        recoded = label == "params" and task == "train"
        for name in group:  # one at a time, so that no second model lies beside the parcel
            one, key = Params({name: group[name]}), _key(label, name)
            carried, codings = encode(one, base, settings) if recoded else (one, {})
            arrays[key], tensors[key] = _packed(name, carried[name], settings.compress == "zlib")
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
    plain = _plain(header)
    return Parcel(plain | {"sha256": fingerprint(plain, arrays)}, arrays)


def _packed(name: str, tensor: Tensor, compress: bool) -> tuple[Array, dict[str, Any]]:
    """An array that can travel, and what the header says of it."""
    dtype = short(tensor.dtype)
    if dtype not in TYPES:
        raise ParcelError(f"tensor '{name}' has type {dtype}, which cannot be sent.")
    array = as_array(tensor)
    facts: dict[str, Any] = {"dtype": dtype, "shape": list(tensor.shape)}
    small = compress_array(array) if compress else None
    return (array, facts) if small is None else (small, facts | {"compress": "zlib"})


def _key(label: str, name: str) -> str:
    """An array's name; a slash in an extra's own name is escaped, so that no two tensors share one."""
    kind, slash, extra = label.partition("/")
    return kind + slash + extra.replace("%", "%25").replace("/", "%2F") + "/" + name


def fingerprint(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    """SHA-256 over the header without its own, then every array's name, type, shape and bytes."""
    rest = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.str, list(array.shape)]).encode())
        if array.size:
            digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _plain(value: Any, where: str = "the header", depth: int = 0) -> Any:
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
            raise ParcelError(f"{where} holds a whole number of more than 64 bits.")
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), None)
        if odd is not None:
            raise ParcelError(f"{where} has a key of type {type(odd).__name__}; only text can be sent.")
        return {str(key): _plain(item, f"'{_shown(key)}'", depth + 1) for key, item in value.items()}
    raise ParcelError(f"{where} holds a {type(value).__name__}, which cannot be sent.")


def _shown(value: Any) -> str:
    """A stranger's value for a sentence: short, on one line, nothing but printable characters."""
    text = ascii(value)
    text = text[1:-1] if isinstance(value, str) else text
    return text if len(text) <= 80 else text[:77] + "..."


# Unpacking


class Entry(NamedTuple):
    """One tensor as the header declares it, after the checks."""

    label: str
    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    code: str
    is_compressed: bool

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Room it needs once everything is undone."""
        coding = CODINGS.get(self.code)
        return self.num_numbers * (TYPES[self.dtype] if coding is None else coding.restored).itemsize


def unpack(
    parcel: Parcel,
    *,
    kind: Kind,
    run: str | None = None,
    task: str | None = None,
    round: int | None = None,
    client: str | None = None,
    request: str | None = None,
    largest: int,
    base: Params | None = None,
    finite: bool = False,
) -> tuple[Message, dict[str, Any]]:
    """The message and the facts beside it, or a ParcelError that says what is wrong.

    kind to request: what the parcel must say of itself; None compares nothing. largest: bytes it may have, on
    the way and unpacked. base: the model the request held, for replies that are differences to it. finite:
    refuse NaN and infinities (a server leaves that to its gate).
    """
    expected = dict(zip(ADDRESS, (kind, run, task, round, client, request), strict=True))
    header = _plain_header(parcel)
    _check_address(header, expected)
    _check_size(parcel, largest)
    entries = list(_entries(header, parcel.arrays, base))
    _check_room(entries, largest)
    if header["sha256"] != fingerprint(header, parcel.arrays):
        raise ParcelError("the message was changed on its way: its SHA-256 does not fit its content.")
    message = _message(header, entries, parcel.arrays, base)
    reason = content_complaint(message) if finite else None
    if reason is not None:
        raise ParcelError(f"the message cannot be used: {reason}.")
    return message, header["more"]


def _plain_header(parcel: Parcel) -> dict[str, Any]:
    if not isinstance(parcel.header, dict):
        raise ParcelError("the message's header is not a JSON object.")
    schema = parcel.header.get("schema")
    if schema != SCHEMA:
        raise ParcelError(
            f"the message has the schema '{_shown(schema)}', this wardround reads '{SCHEMA}'. "
            "Install the same version at both ends."
        )
    header: dict[str, Any] = _plain(parcel.header)
    return header


def _check_address(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Whose message it is, and an answer to what."""
    if header.get("kind") not in ("request", "reply"):
        raise ParcelError(f"the message is of kind '{_shown(header.get('kind'))}', not a request or a reply.")
    for field in ADDRESS:
        given, kind = header.get(field), int if field == "round" else str
        if type(given) is not kind:
            what = "a whole number" if kind is int else "a text"
            raise ParcelError(f"the message's {field} is {_shown(given)}, not {what}.")
        wanted = expected[field]
        if wanted is not None and given != wanted:
            raise ParcelError(f"the message's {field} is '{_shown(given)}', expected was '{_shown(wanted)}'.")


def _check_size(parcel: Parcel, largest: int) -> None:
    """Arrays are numeric NumPy arrays and, with the header, not too large. No element is looked at."""
    if not isinstance(parcel.arrays, Mapping):
        raise ParcelError("the message's arrays do not come by name.")
    for key, array in parcel.arrays.items():
        if not isinstance(key, str):
            raise ParcelError(f"the message has an array whose name is {_shown(key)}, not a text.")
        if type(array) is not np.ndarray:
            raise ParcelError(f"'{_shown(key)}' is of type {type(array).__name__}, not a NumPy array.")
        if array.dtype not in CARRIERS.values():
            raise ParcelError(
                f"array '{_shown(key)}' has type {_shown(str(array.dtype))}, which cannot be sent."
            )
    if parcel.num_bytes > largest:
        raise ParcelError(f"the message has {parcel.num_bytes:,} bytes, at most {largest:,} are allowed.")


def _entries(header: Mapping[str, Any], arrays: Mapping[str, Array], base: Params | None) -> Iterator[Entry]:
    """Every tensor the layout names, held against its declaration and its array."""
    for field in sorted(FIELDS ^ set(header)):
        what = "lacks" if field in FIELDS else "has the unknown"
        raise ParcelError(f"the message's header {what} field '{_shown(field)}'.")
    for field in ("tensors", "scalars", "more"):
        if not isinstance(header[field], dict):
            raise ParcelError(f"the header's {field} are not a JSON object.")
    seen: set[str] = set()
    for label, name in _names(header["layout"]):
        key = _key(label, name)
        if key in seen:
            raise ParcelError(f"the header's layout names '{_shown(key)}' twice.")
        seen.add(key)
        if key not in header["tensors"] or key not in arrays:
            raise ParcelError(f"tensor '{_shown(key)}' is missing.")
        entry = _entry(label, name, header["tensors"][key])
        _check_array(entry, arrays[key])
        _check_coding(entry, base)
        yield entry
    for key in [*arrays, *header["tensors"]]:
        if key not in seen:
            raise ParcelError(f"array '{_shown(key)}' is not in the header's layout.")


def _names(layout: Any) -> Iterator[tuple[str, str]]:
    """(group, tensor) in order, from [[group, [tensor, ...]], ...]."""
    groups = []
    for entry in layout if isinstance(layout, list) else [None]:
        match entry:
            case [str(label), [*names]] if label == "params" or label.startswith("extras/"):
                groups.append(label)
            case _:
                raise ParcelError("the header's layout is not a list of groups and their tensors' names.")
        for name in names:
            if not isinstance(name, str):
                raise ParcelError(f"the header's layout names a tensor {_shown(name)}, which is not a text.")
            yield label, name
    if len(set(groups)) != len(groups):
        raise ParcelError("the header's layout names a group twice.")


def _entry(label: str, name: str, facts: Any) -> Entry:
    """What the header says of one tensor, if it says it well."""
    key = _key(label, name)
    if not isinstance(facts, dict) or not {"dtype", "shape"} <= set(facts) <= {
        "dtype", "shape", "coding", "compress"
    }:  # fmt: skip
        raise ParcelError(f"tensor '{_shown(key)}' is not described by its type and shape.")
    dtype, shape = facts["dtype"], facts["shape"]
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise ParcelError(f"tensor '{_shown(key)}' is said to have type {_shown(dtype)}, which there is not.")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_AXES
        or any(type(side) is not int or side < 0 for side in shape)
    ):
        raise ParcelError(
            f"tensor '{_shown(key)}' is said to have shape {_shown(shape)}, which there is not."
        )
    if facts.get("compress", "zlib") != "zlib":
        raise ParcelError(f"tensor '{_shown(key)}' has the unknown compression {_shown(facts['compress'])}.")
    code = facts.get("coding", "")
    if not isinstance(code, str):
        raise ParcelError(f"tensor '{_shown(key)}' has the unknown coding {_shown(code)}.")
    return Entry(label, name, key, dtype, tuple(shape), code, "compress" in facts)


def _check_array(entry: Entry, array: Array) -> None:
    """An array is what its declaration says; of a compressed one only the outside is known yet."""
    place = f"tensor '{_shown(entry.key)}'"
    if entry.is_compressed:
        if array.dtype != np.uint8 or array.ndim != 1 or not entry.num_numbers:
            raise ParcelError(f"{place} is said to be compressed, but its array is not a row of bytes.")
        return
    if array.dtype != CARRIERS[entry.dtype]:
        raise ParcelError(f"{place} is said to have type {entry.dtype}, but its array has {array.dtype}.")
    if array.shape != entry.shape:
        raise ParcelError(
            f"{place} is said to have shape {_shown(entry.shape)}, but its array has {array.shape}."
        )


def _check_coding(entry: Entry, base: Params | None) -> None:
    if not entry.code:
        return
    place, coding = f"tensor '{_shown(entry.key)}'", CODINGS.get(entry.code)
    if coding is None or coding.carried != TYPES[entry.dtype] or entry.label != "params":
        raise ParcelError(f"{place} has the unknown coding '{_shown(entry.code)}' for type {entry.dtype}.")
    if coding.needs_base and not _fits(entry, coding, base):
        raise ParcelError(f"{place} is a difference, but no such tensor was sent with the request.")


def _fits(entry: Entry, coding: Coding, base: Params | None) -> bool:
    return base is not None and entry.name in base and base.spec(entry.name) == (entry.shape, coding.restored)


def _check_room(entries: list[Entry], largest: int) -> None:
    """A small message must not ask for much memory."""
    room = sum(entry.num_bytes for entry in entries)
    if room > largest:
        raise ParcelError(f"the message has {_shown(room)} bytes unpacked, at most {largest:,} are allowed.")


def _message(
    header: Mapping[str, Any], entries: list[Entry], arrays: Mapping[str, Array], base: Params | None
) -> Message:
    groups: dict[str, dict[str, Tensor]] = {label: {} for label, _ in header["layout"]}
    for entry in entries:
        tensor = {entry.name: _tensor(entry, arrays[entry.key])}
        groups[entry.label] |= decode(tensor, {entry.name: entry.code}, base)
    model = groups.pop("params", None)
    return Message(
        params=None if model is None else Params(model),
        extras={label.removeprefix("extras/"): Params(group) for label, group in groups.items()},
        scalars=header["scalars"],
    )


def _tensor(entry: Entry, array: Array) -> Tensor:
    """The tensor over the array's own memory; a copy only of what was compressed or may not be written to."""
    if entry.is_compressed:
        try:
            array = decompress_array(array, CARRIERS[entry.dtype], entry.num_numbers).reshape(entry.shape)
        except ValueError as error:
            raise ParcelError(f"tensor '{_shown(entry.key)}': {error}.") from None
    if entry.dtype == "bool" and array.size and int(array.view(np.uint8).max()) > 1:
        raise ParcelError(f"tensor '{_shown(entry.key)}' holds a truth value that is neither true nor false.")
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if entry.dtype == "bfloat16" else tensor
