"""A parcel as one safetensors file: its header is text in the file's metadata, its arrays are the tensors.

What came over the network is streamed into such a file; `read_parcel` trusts nothing in it. The arrays it
gives are views on a private map of the file: pages are read when they are used, and what is written to an
array stays in this process. The file may be deleted meanwhile, but not changed.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from wardround.clients.traffic import Array, short
from wardround.deploy import limits
from wardround.deploy.strict_json import find_excess, is_shape, parse_json, show
from wardround.deploy.wire import CARRIERS, Parcel, ParcelError
from wardround.files import write_parts
from wardround.storage import DTYPES, StoredArray, array_parts

HEADER = "parcel"
KINDS = {kind: CARRIERS[short(dtype)] for kind, dtype in DTYPES.items()}  # bfloat16 is carried as uint16
NAMES = {dtype: kind for kind, dtype in KINDS.items()}
PLAINLY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # not through a link, and no pipe is waited for
ALIGNMENT = 8  # of the first number, as every writer of the format has it


class Place(NamedTuple):
    """An array in the file; start: bytes from the first number."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


def write_parcel(path: Path, parcel: Parcel) -> int:
    """Write a parcel, whole or not at all, and return its size in bytes; its arrays are not copied."""
    parts = _make_parts(parcel)
    write_parts(path, parts, durable=False)
    return sum(len(part) for part in parts)


def write_numbers(path: Path, parcel: Parcel) -> None:
    """Write a parcel's numbers alone, as they follow the header in its file."""
    write_parts(path, _make_parts(parcel)[1:], durable=False)


def _make_parts(parcel: Parcel) -> list[bytes | memoryview]:
    """The pieces of a parcel's file, its header first."""
    if len(parcel.arrays) > limits.TENSORS:
        raise ParcelError(f"the message has more than {limits.TENSORS:,} tensors.")
    arrays = {name: _describe_array(name, array) for name, array in parcel.arrays.items()}
    parts = list(array_parts(arrays, {HEADER: parcel.text}))
    reason = find_excess(str(parts[0][8:], "ascii"))
    if reason is not None:
        raise ParcelError(f"the message's header {reason}.")
    return parts


def find_numbers(path: Path) -> int:
    """The bytes before the numbers of a parcel that this process wrote."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _describe_array(name: str, array: Array) -> StoredArray:
    if array.dtype not in NAMES:
        raise ParcelError(f"array '{show(name)}' has type {show(str(array.dtype))}, which cannot be sent.")
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return StoredArray(NAMES[array.dtype], array.shape, array.itemsize, raw)


def read_parcel(path: Path, largest: int) -> Parcel:
    """The parcel in a file, or a ParcelError in a sentence; largest: bytes that its arrays may have."""
    try:
        with os.fdopen(os.open(path, PLAINLY), "rb") as file:
            size = _check_size(os.fstat(file.fileno()), largest)
            header, start = _read_header(file, size)
            text, places = _read_places(header, size - start)
            parcel = Parcel.read(text, {})
            whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ParcelError(f"the message's file cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ParcelError(f"the message's file {error}.") from None
    arrays = {}
    for name, dtype, shape, place in places:
        flat = np.frombuffer(whole, dtype, math.prod(shape), start + place)
        arrays[name] = flat.reshape(shape)
    return replace(parcel, arrays=arrays)


def _check_size(facts: os.stat_result, largest: int) -> int:
    """Its size; nothing of the file is read for it."""
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("is not a file")
    if facts.st_size > largest + limits.HEADER_CHARACTERS:
        raise ValueError(f"has {facts.st_size:,} bytes, at most {largest:,} are allowed beside its header")
    return facts.st_size


def _read_header(file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    """The file's header, and where the numbers begin."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > min(limits.HEADER_CHARACTERS, size - 8) or length % ALIGNMENT:
        raise ValueError("is not a message: its header does not have the length it declares")
    try:
        text = file.read(length).decode()
    except UnicodeDecodeError:
        raise ValueError("has a header that is not text") from None
    try:
        header = parse_json(text)
    except ValueError as error:
        raise ValueError(f"has a header that {error}") from None
    if not isinstance(header, dict) or len(header) > limits.TENSORS + 1:
        raise ValueError(f"has a header that is not a JSON object of at most {limits.TENSORS:,} tensors")
    return header, 8 + length


def _read_places(header: dict[str, Any], room: int) -> tuple[str, list[Place]]:
    """The parcel's header as text, and every array; they fill the file without gaps, in the order given."""
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or list(metadata) != [HEADER]:
        raise ValueError("is not a message: its metadata hold no header")
    places, end = [], 0
    for name, facts in header.items():
        place = _read_place(name, facts, end)
        places.append(place)
        end += math.prod(place.shape) * place.dtype.itemsize
    if end != room:
        raise ValueError(f"has {room:,} bytes of numbers, but declares {end:,}")
    return metadata[HEADER], places


def _read_place(name: str, facts: Any, start: int) -> Place:
    """An array that begins where the last one ended."""
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"does not describe array '{show(name)}' by its type, shape and place")
    kind, shape = facts["dtype"], facts["shape"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"declares the unknown type {show(kind)} for array '{show(name)}'")
    if not is_shape(shape):
        raise ValueError(f"declares the invalid shape {show(shape)} for array '{show(name)}'")
    dtype = KINDS[kind]
    if facts["data_offsets"] != [start, start + math.prod(shape) * dtype.itemsize] or start % dtype.itemsize:
        raise ValueError(f"declares a place for array '{show(name)}' that is not its own")
    return Place(name, dtype, tuple(shape), start)
