"""MetaImage, the format of ITK: .mha, and .mhd with its values beside it.

https://itk.org/Wiki/ITK/MetaIO/Documentation

Space counts to the left and back of the patient, whatever AnatomicalOrientation says, as in ITK. A header
without spacing, directions and origin has no affine. Refused by name: values in several files or as text,
types that are not numbers, and a scaling of values, which ITK ignores.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wardround.data.readers.value_blocks import (
    LPS_TO_RAS,
    MOST_HEADER,
    Affine,
    Array,
    Header,
    join_numbers,
    locate_values,
    make_affine,
    parse_sizes,
    read_values,
    to_bytes,
)
from wardround.errors import DataError

ENDINGS = (".mha", ".mhd")
TYPES = {
    "MET_CHAR": "i1", "MET_UCHAR": "u1", "MET_SHORT": "i2", "MET_USHORT": "u2", "MET_INT": "i4",
    "MET_UINT": "u4", "MET_LONG": "i4", "MET_ULONG": "u4", "MET_LONG_LONG": "i8", "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4", "MET_DOUBLE": "f8",
}  # fmt: skip


def load(path: Path) -> tuple[Array, Affine | None, bool]:
    """Values (*spatial) or (*spatial, C), affine, and whether the last axis holds channels."""
    header = read_header(path)
    values, channels = read_values(header, path)
    return values, header.affine, channels


def read_header(path: Path) -> Header:
    """The header of a file, without its values."""
    with path.open("rb") as file:
        start = file.read(MOST_HEADER)
    fields, offset = read_fields(start, path)
    try:
        return parse_header(fields, offset, path)
    except KeyError as error:
        raise DataError(f"{path} has a damaged header: it has no {error.args[0]}.") from None
    except (ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{path} has a damaged header: {error}.") from None


def read_fields(start: bytes, path: Path) -> tuple[dict[str, str], int]:
    """The lines up to ElementDataFile, which is the last, and where the values begin."""
    fields: dict[str, str] = {}
    offset = 0
    while "ElementDataFile" not in fields:
        line, end, _ = start[offset : offset + 4096].partition(b"\n")
        key, mark, value = line.decode("utf-8", "replace").partition("=")
        if not mark:
            raise DataError(f"{path} is not a MetaImage file, despite its name: it has no ElementDataFile.")
        fields[key.strip()] = value.strip()
        offset += len(line) + len(end)
    return fields, offset


def parse_header(fields: Mapping[str, str], offset: int, path: Path) -> Header:
    check_kind(fields, path)
    axes = int(fields["NDims"])
    sizes = parse_sizes(fields["DimSize"], axes, path)
    channels = int(fields.get("ElementNumberOfChannels", 1))
    if axes not in (2, 3, 4) or channels < 1 or (channels > 1 and axes == 4):
        raise DataError(
            f"{path} has {axes} axes and {channels} values a voxel; wardround reads 2 or 3 axes in space and "
            "one of channels."
        )
    big = is_true(fields.get("BinaryDataByteOrderMSB", fields.get("ElementByteOrderMSB", "False")))
    dtype = np.dtype(TYPES[fields["ElementType"]]).newbyteorder(">" if big else "<")
    data_file = path
    if fields["ElementDataFile"].upper() != "LOCAL":
        data_file, offset = locate_values(fields["ElementDataFile"], path), 0
    packed = "gzip" if is_true(fields.get("CompressedData", "False")) else ""
    skipped = int(fields.get("HeaderSize", 0))
    if skipped < -1 or (skipped == -1 and packed):
        raise ValueError(f"HeaderSize is {skipped}")
    offset = -1 if skipped == -1 else offset + skipped
    affine = read_affine(fields, axes)
    if channels > 1:
        return Header(data_file, offset, packed, dtype, (channels, *sizes), 0, affine, channels == 4, fields)
    return Header(data_file, offset, packed, dtype, sizes, 3 if axes == 4 else None, affine, False, fields)


def check_kind(fields: Mapping[str, str], path: Path) -> None:
    """Refuse what is no image of plain numbers."""
    if fields.get("ObjectType", "Image") != "Image":
        raise DataError(f"{path} is a MetaIO {fields['ObjectType'][:40]}, not an image.")
    if fields["ElementType"] not in TYPES:
        kind = fields["ElementType"][:40]
        raise DataError(f"{path} holds values of type {kind}, which are no numbers wardround reads.")
    if not is_true(fields.get("BinaryData", "True")):
        raise DataError(f"{path} holds its values as text; store them as binary (BinaryData = True).")
    slope = float(fields.get("ElementToIntensityFunctionSlope", 1))
    shift = float(fields.get("ElementToIntensityFunctionOffset", 0))
    if (slope, shift) != (1, 0):
        raise DataError(
            f"{path} asks to scale its values by {slope:g} and shift them by {shift:g}, which ITK does not "
            "do; store the scaled values."
        )


def is_true(said: str) -> bool:
    return said[:1].upper() in ("T", "1", "Y")


def read_affine(fields: Mapping[str, str], axes: int) -> Affine | None:
    """Rows of TransformMatrix are the directions of the axes."""

    def find(*names: str) -> list[float] | None:
        said = next((fields[name] for name in names if name in fields), None)
        return None if said is None else [float(number) for number in said.split()]

    sides = find("ElementSpacing", "ElementSize")
    matrix = find("TransformMatrix", "Rotation", "Orientation")
    origin = find("Offset", "Position", "Origin")
    if sides is None and matrix is None and origin is None:
        return None
    rows = np.eye(axes) if matrix is None else np.asarray(matrix).reshape(axes, axes)
    sides = [1.0] * axes if sides is None else sides
    if len(sides) != axes:
        raise ValueError(f"{len(sides)} spacings for {axes} axes")
    dims = min(axes, 3)
    columns = [list(rows[axis, :dims] * sides[axis]) for axis in range(dims)]
    return make_affine(columns, (origin or [])[:dims], LPS_TO_RAS)


def encode(values: Array, affine: Affine | None, *, channels: bool = False) -> bytes:
    """(*spatial), or (C, *spatial) with channels, as a packed .mha; a plane keeps only its own two axes."""
    spatial = values.ndim - channels
    content = zlib.compress(to_bytes(values), 6 if values.dtype == np.uint8 else 1)
    kinds = {code: name for name, code in reversed(TYPES.items())}
    lines = [
        "ObjectType = Image",
        f"NDims = {spatial}",
        "BinaryData = True",
        "BinaryDataByteOrderMSB = False",
        "CompressedData = True",
        f"CompressedDataSize = {len(content)}",
    ]
    if affine is not None:
        moved = affine[:3] * np.asarray(LPS_TO_RAS)[:, None]
        sides = np.linalg.norm(moved[:, :spatial], axis=0)
        lines += [
            f"TransformMatrix = {join_numbers((moved[:spatial, :spatial] / sides).T.reshape(-1))}",
            f"Offset = {join_numbers(moved[:spatial, 3])}",
            f"ElementSpacing = {join_numbers(sides)}",
        ]
    lines += [
        f"DimSize = {' '.join(map(str, values.shape[channels:]))}",
        *([f"ElementNumberOfChannels = {len(values)}"] if channels else []),
        f"ElementType = {kinds[values.dtype.str[1:]]}",
        "ElementDataFile = LOCAL",
    ]
    return "\n".join(lines).encode() + b"\n" + content
