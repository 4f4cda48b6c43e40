"""Tensors in safetensors files, written atomically.

`StoredTensors` reads one tensor at a time from a safetensors file, so that a rule which
averages eighty models need not hold eighty models.
"""

from __future__ import annotations

import copy
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wardround.errors import CheckpointError
from wardround.files import parse_json, write_parts
from wardround.machine import open_file, read_into

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format itself
MAX_AXES = 64  # as many as NumPy has


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, durable: bool = True
) -> None:
    """Write tensors and a few strings into one safetensors file, atomically."""
    write_parts(path, tensor_parts(tensors, metadata), durable=durable)


def tensor_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece, each tensor from its own memory: large models are not copied."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    arrays = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        arrays[name] = StoredArray(kinds[plain.dtype], tuple(plain.shape), plain.element_size(), raw)
    return array_parts(arrays, metadata)


class StoredArray(NamedTuple):
    """What a file says of a tensor, and its bytes; kind: as the format calls its type, width: of a number."""

    kind: str
    shape: tuple[int, ...]
    width: int
    raw: np.ndarray[Any, np.dtype[np.uint8]]


def array_parts(
    arrays: Mapping[str, StoredArray], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The safetensors format piece by piece.

    Eight bytes of header length, the header as JSON, then all values; wide types first, so that every
    tensor starts at a multiple of its element size.
    """
    names = sorted(arrays, key=lambda name: -arrays[name].width)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in names:
        kind, shape, _, raw = arrays[name]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, place + raw.nbytes]}
        place += raw.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        if arrays[name].raw.size:
            yield arrays[name].raw.data


def _read_entry(entry: Any) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Type, shape, start and end of a tensor, as the file's header declares them."""
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if len(shape) > MAX_AXES or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, end)):
        raise ValueError("a tensor with an impossible shape or place")  # before sides are multiplied
    return DTYPES[entry["dtype"]], tuple(shape), start, end


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            (length,) = struct.unpack("<Q", self._read(0, 8))
            if length > MAX_HEADER_BYTES:
                raise ValueError("header too long")
            header = dict(parse_json(self._read(8, length)))
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
            if not all(isinstance(text, str) for text in self.metadata.values()):
                raise ValueError("metadata that is not text")
            self._data_start = 8 + length
            self._entries = {name: _read_entry(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise CheckpointError(f"{path} is not a readable tensor file ({error}).") from None

    def _read(self, start: int, length: int) -> bytearray:
        try:
            size = self._path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}.") from None
        if start + length > size:  # before room is made for what a few bytes claim
            raise ValueError("file ends too early")
        content = bytearray(length)
        self._fill(content, start)
        return content

    def _fill(self, place: bytearray | memoryview, start: int) -> None:
        """Fill a buffer with the bytes from `start` on."""
        view = memoryview(place)
        try:
            file = open_file(self._path, os.O_RDONLY)
            try:
                done = read_into(file, view, start)
            finally:
                os.close(file)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}.") from None
        if done != len(view):
            raise ValueError("file ends too early")

    def under(self, prefix: str, names: Iterable[str]) -> StoredTensors:
        """Some of the tensors, without the prefix of their names."""
        found = copy.copy(self)
        found._entries = {name: self._entries[prefix + name] for name in names}
        return found

    def __getitem__(self, name: str) -> Tensor:
        shape, _ = self.spec(name)
        return self.part(name, 0, math.prod(shape)).reshape(shape)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from `start` to `stop` of the flattened tensor; no others are read."""
        dtype, shape, first, end = self._entries[name]
        try:
            if end - first != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{end - first} bytes do not make the shape {shape}")
            if start == stop:
                return torch.empty(0, dtype=dtype)
            raw = np.empty((stop - start) * dtype.itemsize, dtype=np.uint8)
            self._fill(raw.data, self._data_start + first + start * dtype.itemsize)
        except (ValueError, MemoryError) as error:
            raise CheckpointError(f"{self._path}, tensor '{name}': {error}.") from None
        return torch.from_numpy(raw).view(dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a tensor, without reading it."""
        dtype, shape, _, _ = self._entries[name]
        return shape, dtype
