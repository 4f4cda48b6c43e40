"""Files broken in every way we have met, and a small healthy federation to break.

    folder = make_federation(tmp_path / "data", clients=2, cases=10)
    broken = break_some(folder, share=0.2)      {(client, case): kind}

`KINDS[kind].code` is what `data.checking.check` calls it. `UNUSUAL` names must simply work.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

SHAPE = (12, 10, 8)
UNUSUAL = ("scan with spaces", "größe ☃", "мозг", "a'b\"c", "dots.in.name", "100%", "$HOME", "-n")


# A healthy federation


def affine_of(spacing: Sequence[float] = (1.0, 1.0, 1.0)) -> np.ndarray:
    return np.diag([*spacing, 1.0])


def save_nifti(path: Path, values: np.ndarray, affine: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, affine_of() if affine is None else affine)
    content = image.to_bytes()
    path.write_bytes(gzip.compress(content, 1, mtime=0) if path.name.endswith(".gz") else content)
    return path


def scan(seed: int, shape: Sequence[int] = SHAPE) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright box, and the box as label."""
    draw = np.random.default_rng(seed)
    image = draw.normal(100, 10, shape).astype(np.float32)
    label = np.zeros(shape, np.uint8)
    box = tuple(slice(side // 4, side // 4 + side // 2) for side in shape)
    label[box] = 1
    image[box] += 60
    return image, label


def make_case(
    folder: Path, client: str, case: str, seed: int, shape: Sequence[int] = SHAPE
) -> tuple[Path, Path]:
    image, label = scan(seed, shape)
    paths = tuple(folder / client / part / f"{case}.nii.gz" for part in ("images", "labels"))
    save_nifti(paths[0], image)
    save_nifti(paths[1], label)
    return paths[0], paths[1]


def make_federation(folder: Path, clients: int = 2, cases: int = 10, shape: Sequence[int] = SHAPE) -> Path:
    """One folder a centre, with images/ and labels/."""
    for number in range(clients):
        for case in range(cases):
            make_case(folder, f"site{number}", f"s{number}c{case:02}", 1000 * number + case, shape)
    return folder


# Ways to break a case, given its image and its label


def empty(image: Path, label: Path) -> None:
    image.write_bytes(b"")


def empty_label(image: Path, label: Path) -> None:
    label.write_bytes(b"")


def truncated(image: Path, label: Path) -> None:
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])


def truncated_label(image: Path, label: Path) -> None:
    content = label.read_bytes()
    label.write_bytes(content[: len(content) * 2 // 3])


def flipped_bit(image: Path, label: Path) -> None:
    """The checksum of gzip no longer fits."""
    content = bytearray(image.read_bytes())
    content[-6] ^= 0xFF
    image.write_bytes(bytes(content))


def wrong_affine(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(label).dataobj)
    moved = affine_of()
    moved[:3, 3] = (5, 0, 0)
    save_nifti(label, values, moved)


def flipped_affine(image: Path, label: Path) -> None:
    save_nifti(label, np.asarray(nibabel.load(label).dataobj), np.diag([-1.0, 1.0, 1.0, 1.0]))


def float_label(image: Path, label: Path) -> None:
    save_nifti(label, np.asarray(nibabel.load(label).dataobj) * np.float32(0.37))


def nan_label(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(label).dataobj).astype(np.float32)
    values[0, 0, 0] = np.nan
    save_nifti(label, values)


def nan(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(image).dataobj).astype(np.float32)
    values[1, 2, :3] = np.nan
    save_nifti(image, values)


def infinite(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(image).dataobj).astype(np.float32)
    values[0, 0, 0], values[1, 0, 0] = np.inf, -np.inf
    save_nifti(image, values)


def other_shape(image: Path, label: Path) -> None:
    save_nifti(label, np.asarray(nibabel.load(label).dataobj)[:-2])


def text(image: Path, label: Path) -> None:
    image.write_text("<html>404 Not Found</html>\n" * 20)


def gzipped_text(image: Path, label: Path) -> None:
    image.write_bytes(gzip.compress(b"patient,age\n1,63\n" * 100))


def noise(image: Path, label: Path) -> None:
    image.write_bytes(np.random.default_rng(0).bytes(4000))


def symlink_loop(image: Path, label: Path) -> None:
    other = image.with_name(f".{image.name}.loop")
    image.unlink()
    image.symlink_to(other.name)
    other.symlink_to(image.name)


def self_loop(image: Path, label: Path) -> None:
    label.unlink()
    label.symlink_to(label.name)


def dangling(image: Path, label: Path) -> None:
    image.unlink()
    image.symlink_to("nowhere.nii.gz")


def folder(image: Path, label: Path) -> None:
    """A folder named like the image; a reader of folders may pass over it with a note."""
    image.unlink()
    image.mkdir()


def pipe(image: Path, label: Path) -> None:
    """Opening it would wait for ever."""
    image.unlink()
    os.mkfifo(image)


def forbidden(image: Path, label: Path) -> None:
    image.chmod(0)


def header(shape: Sequence[int], kind: int = 16) -> bytes:
    """A NIfTI-1 header as bytes, whatever it claims; kind 16 is float32."""
    start = bytearray(352)
    struct.pack_into("<i", start, 0, 348)
    struct.pack_into("<8h", start, 40, len(shape), *shape, *[1] * (7 - len(shape)))
    struct.pack_into("<2h", start, 70, kind, 32)
    struct.pack_into("<8f", start, 76, 1, 1, 1, 1, 1, 1, 1, 1)
    struct.pack_into("<f", start, 108, 352)
    start[344:348] = b"n+1\0"
    return bytes(start)


def huge(image: Path, label: Path) -> None:
    """Claims 32,767 cubed voxels, 128 TiB, the most a NIfTI-1 header can."""
    image.write_bytes(gzip.compress(header((32767, 32767, 32767)) + b"\0" * 64))


def large(image: Path, label: Path) -> None:
    """Claims 256 cubed voxels, 64 MiB, and holds 64 bytes: believable, and not there."""
    image.write_bytes(gzip.compress(header((256, 256, 256)) + b"\0" * 64))


def odd_value(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(label).dataobj).copy()
    values[0, 0, 0] = 7
    save_nifti(label, values)


def negative_value(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(label).dataobj).astype(np.int16)
    values[0, 0, 0] = -1
    save_nifti(label, values)


def picture_as_label(image: Path, label: Path) -> None:
    draw = np.random.default_rng(0)
    save_nifti(label, draw.integers(0, 4000, SHAPE).astype(np.int16))


def more_channels(image: Path, label: Path) -> None:
    values = np.asarray(nibabel.load(image).dataobj)
    save_nifti(image, np.stack([values, values + 1], axis=-1))


def flat(image: Path, label: Path) -> None:
    """2D among 3D."""
    for path in (image, label):
        save_nifti(path, np.asarray(nibabel.load(path).dataobj)[:, :, :1])


def broken_header(image: Path, label: Path) -> None:
    """Axes that span no space."""
    singular = np.zeros((4, 4))
    singular[3, 3] = 1
    content = bytearray(gzip.decompress(image.read_bytes()))
    struct.pack_into("<2h", content, 252, 0, 1)  # sform only
    for row in range(3):
        struct.pack_into("<4f", content, 280 + 16 * row, *singular[row])
    image.write_bytes(gzip.compress(bytes(content)))


@dataclass(frozen=True)
class Kind:
    """breaks: spoils a case in place; code: what the check calls it."""

    breaks: Callable[[Path, Path], None]
    code: str


KINDS = {
    "0 bytes": Kind(empty, "empty"),
    "0 bytes label": Kind(empty_label, "empty"),
    "truncated gzip": Kind(truncated, "unreadable"),
    "truncated label": Kind(truncated_label, "unreadable"),
    "flipped bit": Kind(flipped_bit, "unreadable"),
    "wrong affine": Kind(wrong_affine, "geometry"),
    "flipped affine": Kind(flipped_affine, "geometry"),
    "float label": Kind(float_label, "not_whole"),
    "NaN label": Kind(nan_label, "not_whole"),
    "NaN": Kind(nan, "not_finite"),
    "infinite": Kind(infinite, "not_finite"),
    "label of another shape": Kind(other_shape, "shape"),
    "text named .nii.gz": Kind(text, "unreadable"),
    "gzipped text": Kind(gzipped_text, "unreadable"),
    "noise": Kind(noise, "unreadable"),
    "symlink loop": Kind(symlink_loop, "unreadable"),
    "link to itself": Kind(self_loop, "unreadable"),
    "dangling link": Kind(dangling, "missing"),
    "folder": Kind(folder, "unreadable"),
    "pipe": Kind(pipe, "unreadable"),
    "no permission": Kind(forbidden, "unreadable"),
    "huge header": Kind(huge, "unreadable"),
    "large header": Kind(large, "unreadable"),
    "unexpected label value": Kind(odd_value, "label_value"),
    "negative label value": Kind(negative_value, "label_value"),
    "picture as label": Kind(picture_as_label, "label_value"),
    "more channels": Kind(more_channels, "channels"),
    "2D among 3D": Kind(flat, "dimensions"),
    "broken header": Kind(broken_header, "unreadable"),
}
if os.geteuid() == 0:  # root may read everything
    del KINDS["no permission"]


def break_some(
    root: Path, share: float = 0.2, kinds: Sequence[str] = tuple(KINDS)
) -> dict[tuple[str, str], str]:
    """Break every n-th case, a kind after the other; (client, case) -> kind."""
    images = sorted(root.glob("*/images/*.nii.gz"))
    chosen = images[:: round(1 / share)]
    broken = {}
    for number, image in enumerate(chosen):
        kind = kinds[number % len(kinds)]
        KINDS[kind].breaks(image, image.parent.parent / "labels" / image.name)
        broken[image.parent.parent.name, image.name.removesuffix(".nii.gz")] = kind
    return broken


# Pictures


def save_png(path: Path, values: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def bomb(path: Path, side: int = 50_000) -> Path:
    """A PNG that claims side x side pixels in a few bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    parts = [chunk(b"IHDR", head), chunk(b"IDAT", body), chunk(b"IEND", b"")]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path
