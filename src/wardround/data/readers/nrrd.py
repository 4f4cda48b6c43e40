"""NRRD, the format of 3D Slicer: .nrrd, .nhdr with its values beside it, and .seg.nrrd with segments.

http://teem.sourceforge.net/nrrd/format.html

- A header without directions and spacings has no affine; one that names no anatomical space is taken as
  left-posterior-superior, as ITK takes it.
- The axis that is not in space holds channels.
- A .seg.nrrd is a label with a table of segments. In one layer its values are those of the table. Several
  layers (segments that may overlap) are joined, and segments count 1, 2 ... in the order of the table;
  segments that do overlap are refused by name, since a label has one class a voxel.
- Refused by name: values in several files, hexadecimal values, types that are not numbers.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

SEGMENTATION = ".seg.nrrd"
ENDINGS = (SEGMENTATION, ".nrrd", ".nhdr")
NAMES = {  # of each type, the one we write first
    "i1": "int8, signed char, int8_t",
    "u1": "uint8, uchar, unsigned char, uint8_t",
    "i2": "short, short int, signed short, signed short int, int16, int16_t",
    "u2": "ushort, unsigned short, unsigned short int, uint16, uint16_t",
    "i4": "int, signed int, int32, int32_t",
    "u4": "uint, unsigned int, uint32, uint32_t",
    "i8": "int64, longlong, long long, long long int, signed long long, signed long long int, int64_t",
    "u8": "uint64, ulonglong, unsigned long long, unsigned long long int, uint64_t",
    "f4": "float",
    "f8": "double",
}
TYPES = {name: code for code, names in NAMES.items() for name in names.split(", ")}
ENCODINGS = {
    **dict.fromkeys(("raw",), ""),
    **dict.fromkeys(("gz", "gzip"), "gzip"),
    **dict.fromkeys(("bz2", "bzip2"), "bzip2"),
    **dict.fromkeys(("txt", "text", "ascii"), "text"),
}
# Factors from the axes of a space to right, front and top; those without a patient are taken as LPS.
SPACES = {
    **dict.fromkeys(("left-posterior-superior", "lps"), LPS_TO_RAS),
    **dict.fromkeys(("right-anterior-superior", "ras"), (1.0, 1.0, 1.0)),
    **dict.fromkeys(("left-anterior-superior", "las"), (-1.0, 1.0, 1.0)),
    **dict.fromkeys(("", "scanner-xyz", "3d-right-handed", "3d-left-handed"), LPS_TO_RAS),
}
# Okabe and Ito's, which colour-blind readers tell apart, without black and grey, which are the scan's
COLOURS = ((213, 94, 0), (86, 180, 233), (0, 158, 115), (230, 159, 0), (204, 121, 167), (0, 114, 178))
NOT_IN_SPACE = ("list", "vector", "point", "color", "normal", "stub", "scalar", "time", "matrix", "gradient")


def load(path: Path, label: bool) -> tuple[Array, Affine | None, bool]:
    """Values (*spatial) or (*spatial, C), affine, and whether the last axis holds channels."""
    header = read_header(path)
    if not path.name.lower().endswith(SEGMENTATION):
        values, channels = read_values(header, path)
        return values, header.affine, channels
    if not label:
        raise DataError(f"{path} is a segmentation of 3D Slicer, not a scan; give it as a label.")
    values, channels = read_values(header, path)
    segments = list_segments(header.fields)
    if segments:
        return join_layers(values if channels else values[..., None], segments, path), header.affine, False
    return values, header.affine, channels


def read_header(path: Path) -> Header:
    """The header of a file, without its values."""
    with path.open("rb") as file:
        start = file.read(MOST_HEADER)
    if not start.startswith(b"NRRD000"):
        raise DataError(f"{path} is not an NRRD file, despite its name.")
    try:
        return parse_header(start, path)
    except KeyError as error:
        raise DataError(f"{path} has a damaged header: it has no {error.args[0]}.") from None
    except (ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{path} has a damaged header: {error}.") from None


def parse_header(start: bytes, path: Path) -> Header:
    fields, offset = read_fields(start, path)
    kind, encoding = fields["type"].lower(), fields["encoding"].lower()
    if kind not in TYPES:
        raise DataError(f"{path} holds values of type '{kind[:40]}', which are no numbers wardround reads.")
    if encoding not in ENCODINGS:
        raise DataError(f"{path} stores its values as '{encoding[:40]}'; wardround reads raw, gzip and text.")
    packed = ENCODINGS[encoding]
    sizes = parse_sizes(fields["sizes"], int(fields["dimension"]), path)
    dtype = np.dtype(TYPES[kind])
    if dtype.itemsize > 1 and packed != "text":
        dtype = dtype.newbyteorder(">" if fields["endian"].lower() == "big" else "<")
    data_file = path
    if "datafile" in fields:
        data_file, offset = locate_values(fields["datafile"], path), 0
    skipped = int(fields.get("byteskip", 0))
    if int(fields.get("lineskip", 0)) or skipped < -1 or (skipped and packed):
        raise DataError(f"{path} skips lines, or bytes of packed values, which wardround does not read.")
    offset = -1 if skipped == -1 else offset + skipped
    channel, alpha = find_channel(fields, len(sizes), path)
    affine = read_affine(fields, len(sizes), channel)
    return Header(data_file, offset, packed, dtype, sizes, channel, affine, alpha, fields)


def read_fields(start: bytes, path: Path) -> tuple[dict[str, str], int]:
    """`field: value` in lower case without blanks, `key:=value` as written; and where the values begin."""
    ends = [(start.find(mark), len(mark)) for mark in (b"\n\n", b"\r\n\r\n")]
    found = min(((place, size) for place, size in ends if place >= 0), default=(len(start), 0))
    if found[0] == MOST_HEADER:
        raise DataError(f"{path} has no end of its header in the first {MOST_HEADER:,} bytes.")
    fields: dict[str, str] = {}
    for line in start[: found[0]].decode("utf-8", "replace").splitlines()[1:]:
        place = line.find(":")
        if line.startswith("#") or not line.strip():
            continue
        if place < 0:
            raise ValueError(f"the line {line[:60]!a} is neither a field nor a key")
        if line[place : place + 2] == ":=":
            fields[line[:place].strip()] = line[place + 2 :].strip()
        else:
            fields[line[:place].lower().replace(" ", "")] = line[place + 1 :].strip()
    return fields, sum(found)


def find_channel(fields: Mapping[str, str], axes: int, path: Path) -> tuple[int | None, bool]:
    """The axis that is not in space, and whether its fourth value is opacity."""
    kinds = fields.get("kinds", "").lower().split() or ["domain"] * axes
    vectors = split_vectors(fields.get("spacedirections", ""))
    if len(kinds) != axes or (vectors and len(vectors) != axes):
        raise ValueError(f"{len(kinds)} kinds and {len(vectors)} space directions for {axes} axes")
    if "complex" in kinds:
        raise DataError(f"{path} holds complex numbers; store their magnitude.")
    outside = [n for n, kind in enumerate(kinds) if any(word in kind for word in NOT_IN_SPACE)]
    if vectors:
        outside = [n for n, vector in enumerate(vectors) if vector is None]
    elif axes == 4 and not outside:
        outside = [3]
    inside = axes - len(outside)
    if inside not in (2, 3) or len(outside) > 1:
        raise DataError(
            f"{path} has {inside} axes in space and {len(outside)} others; wardround reads 2 or 3 in space "
            "and one of channels."
        )
    return (outside[0] if outside else None), bool(outside) and kinds[outside[0]] in ("rgba-color", "4-color")


def split_vectors(text: str) -> list[list[float] | None]:
    """The vectors of a line.

    >>> split_vectors("(1,0) none (0, 2)")
    [[1.0, 0.0], None, [0.0, 2.0]]
    """
    vectors: list[list[float] | None] = []
    for part in text.split("("):
        inside, mark, after = part.partition(")")
        if mark:
            numbers = [float(number) for number in inside.split(",")]
            vectors.append(None if all(np.isnan(numbers)) else numbers)
        vectors += [None] * (after if mark else inside).lower().split().count("none")
    return vectors


def read_affine(fields: Mapping[str, str], axes: int, channel: int | None) -> Affine | None:
    columns = [vector for vector in split_vectors(fields.get("spacedirections", "")) if vector is not None]
    inside = [axis for axis in range(axes) if axis != channel]
    if not columns and "spacings" in fields:
        sides = [float(side) for side in fields["spacings"].split()]
        columns = [[sides[axis] if axis == other else 0.0 for other in inside] for axis in inside]
    if not columns:
        return None
    space = fields.get("space", "").lower()
    if space not in SPACES:
        raise ValueError(f"its space is '{space[:60]}'; wardround reads left-posterior-superior and the like")
    origin = split_vectors(fields.get("spaceorigin", ""))
    return make_affine(columns, (origin[0] if origin else None) or [], SPACES[space])


# Segments


@dataclass(frozen=True)
class Segment:
    """A row of the table of a .seg.nrrd; value: in the label as it is read; stored: in its layer."""

    name: str
    value: int
    layer: int
    stored: int


def list_segments(fields: Mapping[str, str]) -> list[Segment]:
    """The table of a .seg.nrrd; empty where it has none."""
    rows: list[tuple[str, int, int]] = []
    while f"Segment{len(rows)}_ID" in fields or f"Segment{len(rows)}_Name" in fields:
        front = f"Segment{len(rows)}_"
        said = fields.get(f"{front}Name") or fields.get(f"{front}ID") or f"segment_{len(rows) + 1}"
        layer = int(fields.get(f"{front}Layer", len(rows)))  # Slicer 4.10 wrote a layer for each segment
        rows.append((" ".join(said.split()), layer, int(fields.get(f"{front}LabelValue", 1))))
    several = len({layer for _, layer, _ in rows}) > 1
    return [
        Segment(name, n if several else stored, layer, stored)
        for n, (name, layer, stored) in enumerate(rows, start=1)
    ]


def read_segments(path: Path) -> list[Segment]:
    """The table of a .seg.nrrd, without opening its values."""
    header = read_header(path)
    try:
        return list_segments(header.fields)
    except ValueError as error:
        raise DataError(f"{path} has a damaged table of segments: {error}.") from None


def join_layers(values: Array, segments: Sequence[Segment], path: Path) -> Array:
    """(*spatial, layers) -> one value a voxel."""
    highest = max(segment.layer for segment in segments)
    if highest >= values.shape[-1]:
        raise DataError(
            f"{path} has {values.shape[-1]} layers, but its table of segments names {highest + 1}."
        )
    if len({segment.layer for segment in segments}) == 1:
        return values[..., highest]
    joined = np.zeros(values.shape[:-1], dtype=np.uint16)
    for segment in segments:
        inside = values[..., segment.layer] == segment.stored
        taken = joined[inside]
        if taken.any():
            other = next(own for own in segments if own.value == int(taken[taken > 0][0]))
            raise DataError(
                f"{path}: segments '{other.name}' and '{segment.name}' overlap in "
                f"{int((taken == other.value).sum())} voxels; a label has one class a voxel."
            )
        joined[inside] = segment.value
    return joined


# Writing


def encode(
    values: Array, affine: Affine | None, *, channels: bool = False, pairs: Mapping[str, str] | None = None
) -> bytes:
    """(*spatial), or (C, *spatial) with channels, packed; pairs: further lines key:=value."""
    spatial = values.ndim - channels
    lines = [
        "NRRD0004",
        f"type: {NAMES[values.dtype.str[1:]].split(', ')[0]}",
        f"dimension: {values.ndim}",
        f"sizes: {' '.join(map(str, values.shape))}",
        f"kinds: {' '.join(['list'] * channels + ['domain'] * spatial)}",
        "endian: little",
        "encoding: gzip",
    ]
    if affine is not None:
        moved = affine[:3] * np.asarray(LPS_TO_RAS)[:, None]
        axes = [f"({join_numbers(moved[:, axis], ',')})" for axis in range(spatial)]
        lines += [
            "space: left-posterior-superior",
            f"space directions: {' '.join(['none'] * channels + axes)}",
            f"space origin: ({join_numbers(moved[:, 3], ',')})",
        ]
    lines += [f"{key}:={value}" for key, value in (pairs or {}).items()]
    packed = gzip.compress(to_bytes(values), 6 if values.dtype == np.uint8 else 1, mtime=0)
    return "\n".join(lines).encode() + b"\n\n" + packed


def encode_segments(
    mask: Array, affine: Affine | None, classes: Mapping[int, str], colours: Sequence[tuple[int, int, int]]
) -> bytes:
    """A mask as .seg.nrrd; classes: value -> name; colours: of the classes in their order, 0 to 255."""
    return encode(mask, affine, pairs=dict(tabulate_segments(mask, classes, colours)))


def tabulate_segments(
    mask: Array, classes: Mapping[int, str], colours: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[str, str]]:
    sides = [*mask.shape, 1][:3]
    yield "Segmentation_ContainedRepresentationNames", "Binary labelmap|"
    yield "Segmentation_MasterRepresentation", "Binary labelmap"
    yield "Segmentation_ReferenceImageExtentOffset", "0 0 0"
    for number, (value, name) in enumerate(classes.items()):
        front = f"Segment{number}_"
        yield f"{front}ID", f"Segment_{value}"
        yield f"{front}Name", " ".join(name.split())
        yield f"{front}NameAutoGenerated", "0"
        yield f"{front}Color", " ".join(f"{part / 255:.6g}" for part in colours[number % len(colours)])
        yield f"{front}ColorAutoGenerated", "0"
        yield f"{front}LabelValue", str(value)
        yield f"{front}Layer", "0"
        yield f"{front}Extent", " ".join(f"0 {side - 1}" for side in sides)
        yield f"{front}Tags", "|"
