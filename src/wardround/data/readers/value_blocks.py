"""Files that are a text header and a block of values, in the same file or beside it: what NRRD and MetaImage
share.

    header = Header(...)               made by `nrrd` or `metaimage` from the text
    read_values(header, path, ...)     (*spatial) or (*spatial, C), bounded by what the file can hold

Affines are NIfTI's: millimetres to the right, front and top (RAS). ITK counts to the left and back (LPS).
"""

from __future__ import annotations

import bz2
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import DataError
from wardround.text import format_size

Array = NDArray[Any]
Affine = NDArray[np.float64]

MOST_HEADER = 1 << 20  # bytes; a longer header is a binary file under a wrong name
MOST_PACKED = {"": 1, "gzip": 1100, "bzip2": 50_000, "text": 8}  # bytes a byte of the file can become
MAX_VALUES = 2**32
LONGEST_NAME = 255  # of a file
LPS_TO_RAS = (-1.0, -1.0, 1.0)


@dataclass(frozen=True)
class Header:
    """Where the values are, and what they mean.

    offset: bytes before the values, -1 where they are the last bytes of the file; packed: gzip, bzip2, text
    or ""; sizes: fastest axis first; channel: the axis that is not in space, None where there is none; alpha:
    whether a fourth channel is opacity; fields: every line of the text.
    """

    data_file: Path
    offset: int
    packed: str
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    channel: int | None
    affine: Affine | None
    alpha: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)


def parse_sizes(text: str, axes: int, path: Path) -> tuple[int, ...]:
    sizes = tuple(int(side) for side in text.split())
    if len(sizes) != axes or min(sizes, default=0) < 0:
        raise ValueError(f"sizes are {text[:60]!a} for {axes} axes")
    if 0 in sizes:
        raise DataError(f"{path} holds no voxels: its shape is {format_size(sizes)}.")
    return sizes


def locate_values(said: str, path: Path) -> Path:
    """A detached file of values, which lies in the header's folder or below."""
    if said.upper().startswith("LIST") or "%" in said:
        raise DataError(f"{path} keeps its values in several files ({said[:40]}); join them into one.")
    folder = path.parent.resolve()
    if "\0" in said or len(said) > LONGEST_NAME or not (folder / said).resolve().is_relative_to(folder):
        raise DataError(f"{path} names {said[:80]!a} as the file of its values, which is outside its folder.")
    found = path.parent / said
    if not found.is_file():
        raise DataError(f"{path} is a header whose values are in {said[:80]}, which is not beside it.")
    return found


def make_affine(
    columns: Sequence[Sequence[float]], origin: Sequence[float], factors: Sequence[float]
) -> Affine:
    """Voxel to millimetres from axes and origin in another space; a plane gets its normal as third axis.

    factors: -1 for each axis of that space that counts to the left, back or bottom.
    """
    affine = np.eye(4)
    for axis, column in enumerate(columns[:3]):
        affine[:3, axis] = [*column, 0.0, 0.0][:3]
    if len(columns) == 2:
        normal = np.cross(affine[:3, 0], affine[:3, 1])
        affine[:3, 2] = normal / max(float(np.linalg.norm(normal)), 1e-12)
    affine[:3, 3] = [*origin, 0.0, 0.0, 0.0][:3]
    affine[:3] *= np.asarray(factors)[:, None]
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        raise ValueError("its axes do not span space")
    return affine


# Values


def read_values(header: Header, path: Path) -> tuple[Array, bool]:
    """(*spatial) or (*spatial, C), and whether the last axis holds channels."""
    values = read_block(header, path)
    if header.channel is None:
        return values, False
    values = np.moveaxis(values, header.channel, -1)
    if header.alpha:
        values = values[..., :3]
    return (values[..., 0], False) if values.shape[-1] == 1 else (values, True)


def read_block(header: Header, path: Path) -> Array:
    """The values in the file's own axes."""
    count = math.prod(header.sizes)
    wanted = count * header.dtype.itemsize
    size = header.data_file.stat().st_size
    if count > MAX_VALUES or wanted > size * MOST_PACKED[header.packed]:
        raise DataError(
            f"{path} claims to hold {format_size(header.sizes)} values, more than a file of its size can: "
            "it is cut off or damaged."
        )
    with header.data_file.open("rb") as file:
        file.seek(size - wanted if header.offset < 0 else header.offset)
        if header.packed == "":
            values = np.fromfile(file, dtype=header.dtype, count=count)
        elif header.packed == "text":
            values = np.array(file.read().split(), dtype=np.float64).astype(header.dtype)
        else:
            values = np.frombuffer(unpack(file.read(), header.packed, wanted, path), dtype=header.dtype)
    if values.size != count:
        raise DataError(
            f"{path} should hold {count} values and holds {values.size}: it is cut off or damaged."
        )
    return values.reshape(header.sizes, order="F")


def unpack(content: bytes, packed: str, wanted: int, path: Path) -> bytes:
    """Exactly as many bytes as the header claims, with the checksum at the end compared."""
    # gzip or zlib, whatever it begins with
    opened = bz2.BZ2Decompressor() if packed == "bzip2" else zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        values = opened.decompress(content, wanted + 1)
    except (OSError, zlib.error):
        values = b""
    if len(values) != wanted or not opened.eof:
        raise DataError(f"{path} does not unpack to the {wanted} bytes its header claims: it is damaged.")
    return values


def to_bytes(values: Array) -> bytes:
    """Little endian, first axis fastest."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes(order="F")


def join_numbers(numbers: Sequence[float] | Array, between: str = " ") -> str:
    """Numbers that read back exactly."""
    return between.join(repr(float(number)) for number in numbers)
