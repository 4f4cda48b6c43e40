"""A message on its way between organiser and hospital: a JSON header, numeric arrays, one SHA-256 over both.

`pack` makes a parcel; `unpack` trusts nothing in one: it checks address, size, names, shapes, types and
SHA-256 first, and says what is wrong in a `ParcelError` of one sentence. Only numbers, text, lists and
dictionaries can travel, so there is nothing to execute.

The header, by key: schema, kind, run, request, client, task, round; layout, the groups of tensors and their
names, in order; tensors, type and shape of each as it travels, with the coding and compression to undo;
scalars, as in the message; more, facts beside it; sha256, over all the rest. The SHA-256 shows damage; who
sent a parcel is for the engine's connection to prove.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wardround.clients.gate import Spec, content_complaint
from wardround.clients.traffic import (
    CODINGS,
    Array,
    as_array,
    compress_array,
    decode,
    decompress_array,
    encode,
    short,
)
from wardround.config import TrafficSettings
from wardround.deploy import limits
from wardround.deploy.strict_json import as_plain, is_shape, parse_json, show
from wardround.errors import WardroundError
from wardround.messages import Message
from wardround.params import NoParams, Params
from wardround.storage import DTYPES

SCHEMA = "wardround-parcel-1"
Kind = Literal["request", "reply"]
ADDRESS = ("kind", "run", "task", "round", "client", "request")
TYPES = {short(dtype): dtype for dtype in DTYPES.values()}
FIELDS = frozenset({"schema", *ADDRESS, "layout", "tensors", "scalars", "more", "sha256"})
CARRIERS: dict[str, np.dtype[Any]] = {key: np.dtype("uint16" if key == "bfloat16" else key) for key in TYPES}


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
        try:
            return cls(parse_json(text), arrays)
        except ValueError as error:
            raise ParcelError(f"the message's header {error}.") from None

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


def make_plain(header: Any) -> dict[str, Any]:
    """The header made of JSON's own types alone and within the limits."""
    try:
        plain: dict[str, Any] = as_plain(header)
    except ValueError as error:
        raise ParcelError(f"{error}.") from None
    return plain


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
    compress = settings.compress == "zlib" and task == "train"
    tensors: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Array] = {}
    for label, group in message.tensors().items():
        recoded = label == "params" and task == "train"
        for name in group:  # one at a time, so that no second model lies beside the parcel
            one, key = Params({name: group[name]}), array_key(label, name)
            carried, codings = encode(one, base, settings) if recoded else (one, {})
            arrays[key], tensors[key] = _pack_tensor(name, carried[name], compress)
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
    plain = make_plain(header)
    return Parcel(plain | {"sha256": compute_sha256(plain, arrays)}, arrays)


def _pack_tensor(name: str, tensor: Tensor, compress: bool) -> tuple[Array, dict[str, Any]]:
    """An array that can travel, and what the header says of it."""
    dtype = short(tensor.dtype)
    if dtype not in TYPES:
        raise ParcelError(f"tensor '{name}' has type {dtype}, which cannot be sent.")
    if not is_shape(list(tensor.shape)):
        raise ParcelError(f"tensor '{name}' has the shape {show(tuple(tensor.shape))}, which cannot be sent.")
    array = as_array(tensor)
    facts: dict[str, Any] = {"dtype": dtype, "shape": list(tensor.shape)}
    small = compress_array(array) if compress else None
    return (array, facts) if small is None else (small, facts | {"compress": "zlib"})


# Unpacking: every claim in a parcel is checked before a byte of it is used


class TensorEntry(NamedTuple):
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
    def spec(self) -> Spec:
        """Shape and type when decoded."""
        coding = CODINGS.get(self.code)
        return self.shape, TYPES[self.dtype] if coding is None else coding.restored

    @property
    def num_bytes(self) -> int:
        """Bytes it needs when decoded."""
        return self.num_numbers * self.spec[1].itemsize


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
    unpacked: int = 0,
    expected: Mapping[str, Spec] | None = None,
    base: Params | None = None,
    finite: bool = False,
) -> tuple[Message, dict[str, Any]]:
    """The message and the facts beside it, or a ParcelError that says what is wrong.

    kind to request: what the parcel must say of itself; None compares nothing. largest: bytes it may have on
    the way. unpacked: bytes that its compressed and recoded tensors may need, by default none. expected: the
    tensors its params may hold, None for any. base: the model the request held, for replies that are
    differences to it. finite: refuse NaN and infinities (a server leaves that to its gate).
    """
    header = _check_header(parcel)
    _check_address(header, dict(zip(ADDRESS, (kind, run, task, round, client, request), strict=True)))
    _check_size(parcel, largest)
    entries = list(_read_entries(header, parcel.arrays, base))
    _check_room(entries, unpacked)
    if expected is not None:
        for entry in entries:
            _check_expected(entry, expected)
    if header["sha256"] != compute_sha256(header, parcel.arrays):
        raise ParcelError("the message was changed in transit: its SHA-256 does not match its content.")
    message = _build_message(header, entries, parcel.arrays, base)
    reason = content_complaint(message) if finite else None
    if reason is not None:
        raise ParcelError(f"the message cannot be used: {reason}.")
    return message, header["more"]


def _check_header(parcel: Parcel) -> dict[str, Any]:
    if not isinstance(parcel.header, dict):
        raise ParcelError("the message's header is not a JSON object.")
    schema = parcel.header.get("schema")
    if schema != SCHEMA:
        raise ParcelError(
            f"the message has the schema '{show(schema)}', this wardround reads '{SCHEMA}'. "
            "Install the same version at both ends."
        )
    return make_plain(parcel.header)


def _check_address(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Whose message it is, and an answer to what."""
    if header.get("kind") not in ("request", "reply"):
        raise ParcelError(f"the message is of kind '{show(header.get('kind'))}', not a request or a reply.")
    for field in ADDRESS:
        given, kind = header.get(field), int if field == "round" else str
        if type(given) is not kind:
            what = "a whole number" if kind is int else "text"
            raise ParcelError(f"the message's {field} is {show(given)}, not {what}.")
        wanted = expected[field]
        if wanted is not None and given != wanted:
            raise ParcelError(f"the message's {field} is '{show(given)}', expected '{show(wanted)}'.")


def _check_size(parcel: Parcel, largest: int) -> None:
    """Arrays are numeric NumPy arrays and, with the header, not too large. No element is read."""
    if not isinstance(parcel.arrays, Mapping):
        raise ParcelError("the message's arrays are not a dictionary by name.")
    if len(parcel.arrays) > limits.TENSORS:
        raise ParcelError(f"the message has more than {limits.TENSORS:,} tensors.")
    for key, array in parcel.arrays.items():
        if not isinstance(key, str):
            raise ParcelError(f"the message has an array whose name is {show(key)}, not text.")
        if type(array) is not np.ndarray:
            raise ParcelError(f"'{show(key)}' is of type {type(array).__name__}, not a NumPy array.")
        if array.dtype not in CARRIERS.values():
            raise ParcelError(f"array '{show(key)}' has type {show(str(array.dtype))}, which cannot be sent.")
    num_bytes = sum(array.nbytes for array in parcel.arrays.values())
    num_bytes += len(parcel.text) if num_bytes <= largest else 0
    if num_bytes > largest:
        raise ParcelError(f"the message has {num_bytes:,} bytes, at most {largest:,} are allowed.")


def _read_entries(
    header: Mapping[str, Any], arrays: Mapping[str, Array], base: Params | None
) -> Iterator[TensorEntry]:
    """Every tensor the layout names, checked against its declaration and its array."""
    for field in sorted(FIELDS ^ set(header)):
        what = "lacks" if field in FIELDS else "has the unknown"
        raise ParcelError(f"the message's header {what} field '{show(field)}'.")
    for field in ("tensors", "scalars", "more"):
        if not isinstance(header[field], dict):
            raise ParcelError(f"the header's {field} are not a JSON object.")
    seen: set[str] = set()
    for label, name in _read_layout(header["layout"]):
        key = array_key(label, name)
        if key in seen:
            raise ParcelError(f"the header's layout names '{show(key)}' twice.")
        seen.add(key)
        if key not in header["tensors"] or key not in arrays:
            raise ParcelError(f"tensor '{show(key)}' is missing.")
        entry = _read_entry(label, name, header["tensors"][key])
        _check_array(entry, arrays[key])
        _check_coding(entry, base)
        yield entry
    for key in [*arrays, *header["tensors"]]:
        if key not in seen:
            raise ParcelError(f"array '{show(key)}' is not in the header's layout.")


def _read_layout(layout: Any) -> Iterator[tuple[str, str]]:
    """(group, tensor) in order, from [[group, [tensor, ...]], ...]."""
    groups = []
    for entry in layout if isinstance(layout, list) and len(layout) <= limits.TENSORS else [None]:
        match entry:
            case [str(label), [*names]] if label == "params" or label.startswith("extras/"):
                groups.append(label)
            case _:
                raise ParcelError("the header's layout is not a list of groups and their tensors' names.")
        for name in names:
            if not isinstance(name, str):
                raise ParcelError(f"the header's layout names a tensor {show(name)}, which is not text.")
            yield label, name
    if len(set(groups)) != len(groups):
        raise ParcelError("the header's layout names a group twice.")


def _read_entry(label: str, name: str, facts: Any) -> TensorEntry:
    """One tensor as the header declares it, checked."""
    key = array_key(label, name)
    if not isinstance(facts, dict) or not {"dtype", "shape"} <= set(facts) <= {
        "dtype", "shape", "coding", "compress"
    }:  # fmt: skip
        raise ParcelError(f"tensor '{show(key)}' is not described by its type and shape.")
    dtype, shape = facts["dtype"], facts["shape"]
    if not isinstance(dtype, str) or dtype not in TYPES:
        raise ParcelError(f"tensor '{show(key)}' declares the unknown type {show(dtype)}.")
    if not is_shape(shape):
        raise ParcelError(f"tensor '{show(key)}' declares the invalid shape {show(shape)}.")
    if facts.get("compress", "zlib") != "zlib":
        raise ParcelError(f"tensor '{show(key)}' has the unknown compression {show(facts['compress'])}.")
    code = facts.get("coding", "")
    if not isinstance(code, str):
        raise ParcelError(f"tensor '{show(key)}' has the unknown coding {show(code)}.")
    return TensorEntry(label, name, key, dtype, tuple(shape), code, "compress" in facts)


def _check_array(entry: TensorEntry, array: Array) -> None:
    """An array is what its declaration says; of a compressed one only its type is checked here."""
    place = f"tensor '{show(entry.key)}'"
    if entry.is_compressed:
        if array.dtype != np.uint8 or array.ndim != 1 or not entry.num_numbers:
            raise ParcelError(f"{place} is declared as compressed, but its array is not a row of bytes.")
        return
    if array.dtype != CARRIERS[entry.dtype]:
        raise ParcelError(f"{place} is declared as type {entry.dtype}, but its array has {array.dtype}.")
    if array.shape != entry.shape:
        raise ParcelError(
            f"{place} is declared with shape {show(entry.shape)}, but its array has {array.shape}."
        )


def _check_coding(entry: TensorEntry, base: Params | None) -> None:
    if not entry.code:
        return
    place, coding = f"tensor '{show(entry.key)}'", CODINGS.get(entry.code)
    if coding is None or coding.carried != TYPES[entry.dtype] or entry.label != "params":
        raise ParcelError(f"{place} has the unknown coding '{show(entry.code)}' for type {entry.dtype}.")
    sent = base.spec(entry.name) if base is not None and entry.name in base else None
    if coding.needs_base and sent != (entry.shape, coding.restored):
        raise ParcelError(f"{place} is a difference, but no such tensor was sent with the request.")


def _check_room(entries: Iterable[TensorEntry], unpacked: int) -> None:
    """A small message must not claim much memory."""
    grown = [entry for entry in entries if entry.is_compressed or entry.code]
    if grown and not unpacked:
        key = show(grown[0].key)
        raise ParcelError(f"tensor '{key}' is compressed or recoded; only that of a reply to 'train' may be.")
    room = sum(entry.num_bytes for entry in grown)
    if room > unpacked:
        raise ParcelError(f"the message has {room:,} bytes unpacked, at most {unpacked:,} are allowed.")


def _check_expected(entry: TensorEntry, expected: Mapping[str, Spec]) -> None:
    """A tensor of the params is one of those expected; what is missing is for the gate to say."""
    if entry.label != "params":
        return
    wanted = expected.get(entry.name)
    if wanted is None:
        raise ParcelError(f"tensor '{show(entry.name)}' was never registered.")
    (shape, dtype), (wanted_shape, wanted_dtype) = entry.spec, wanted
    if shape != wanted_shape:
        raise ParcelError(f"tensor '{show(entry.name)}' has shape {shape}, registered {wanted_shape}.")
    if dtype != wanted_dtype:
        types = f"{short(dtype)}, registered {short(wanted_dtype)}"
        raise ParcelError(f"tensor '{show(entry.name)}' has type {types}.")


def _build_message(
    header: Mapping[str, Any], entries: list[TensorEntry], arrays: Mapping[str, Array], base: Params | None
) -> Message:
    groups: dict[str, dict[str, Tensor]] = {label: {} for label, _ in header["layout"]}
    for entry in entries:
        tensor = {entry.name: _build_tensor(entry, arrays[entry.key])}
        groups[entry.label] |= decode(tensor, {entry.name: entry.code}, base)
    model = groups.pop("params", None)
    return Message(
        params=NoParams() if model is None else Params(model),
        extras={label.removeprefix("extras/"): Params(group) for label, group in groups.items()},
        scalars=header["scalars"],
    )


def _build_tensor(entry: TensorEntry, array: Array) -> Tensor:
    """The tensor over the array's own memory; a copy only of what was compressed or may not be written to."""
    if entry.is_compressed:
        try:
            array = decompress_array(array, CARRIERS[entry.dtype], entry.num_numbers).reshape(entry.shape)
        except ValueError as error:
            raise ParcelError(f"tensor '{show(entry.key)}': {error}.") from None
    if entry.dtype == "bool" and array.size and int(array.view(np.uint8).max()) > 1:
        raise ParcelError(f"tensor '{show(entry.key)}' holds a boolean that is neither 0 nor 1.")
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if entry.dtype == "bfloat16" else tensor
