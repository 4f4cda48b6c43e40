"""Unpacking a parcel: every claim in it is checked before a byte of it is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wardround.clients.gate import content_complaint
from wardround.clients.traffic import (
    CODINGS,
    Array,
    Coding,
    decode,
    decompress_array,
)
from wardround.deploy.wire.packing import (
    ADDRESS,
    SCHEMA,
    TYPES,
    Kind,
    Parcel,
    ParcelError,
    array_key,
    as_plain,
    compute_sha256,
    show,
)
from wardround.messages import Message
from wardround.params import NoParams, Params

MAX_AXES = 64
FIELDS = frozenset({"schema", *ADDRESS, "layout", "tensors", "scalars", "more", "sha256"})
CARRIERS: dict[str, np.dtype[Any]] = {
    name: np.dtype("uint16" if name == "bfloat16" else name) for name in TYPES
}


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
    def num_bytes(self) -> int:
        """Bytes it needs when decoded."""
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
    header = _check_header(parcel)
    _check_address(header, expected)
    _check_size(parcel, largest)
    entries = list(_read_entries(header, parcel.arrays, base))
    _check_room(entries, largest)
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
    header: dict[str, Any] = as_plain(parcel.header)
    return header


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
    for key, array in parcel.arrays.items():
        if not isinstance(key, str):
            raise ParcelError(f"the message has an array whose name is {show(key)}, not text.")
        if type(array) is not np.ndarray:
            raise ParcelError(f"'{show(key)}' is of type {type(array).__name__}, not a NumPy array.")
        if array.dtype not in CARRIERS.values():
            raise ParcelError(f"array '{show(key)}' has type {show(str(array.dtype))}, which cannot be sent.")
    if parcel.num_bytes > largest:
        raise ParcelError(f"the message has {parcel.num_bytes:,} bytes, at most {largest:,} are allowed.")


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
    for entry in layout if isinstance(layout, list) else [None]:
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
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_AXES
        or any(type(side) is not int or side < 0 for side in shape)
    ):
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
    if coding.needs_base and not _fits(entry, coding, base):
        raise ParcelError(f"{place} is a difference, but no such tensor was sent with the request.")


def _fits(entry: TensorEntry, coding: Coding, base: Params | None) -> bool:
    return base is not None and entry.name in base and base.spec(entry.name) == (entry.shape, coding.restored)


def _check_room(entries: list[TensorEntry], largest: int) -> None:
    """A small message must not claim much memory."""
    room = sum(entry.num_bytes for entry in entries)
    if room > largest:
        raise ParcelError(f"the message has {show(room)} bytes unpacked, at most {largest:,} are allowed.")


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
