"""Image files, each read into a `Volume`: NIfTI, NRRD, MetaImage, PNG, JPEG, TIFF, NumPy; or a DataError.

Axes stay as the file stores them: (x, y, z), but (row, column) in pictures, with pages of a TIFF last.

- A scan of one slice is 2D: the axis of length one is dropped, and `Volume.thin` remembers which.
- Colours are three channels; an alpha channel is dropped; a palette is looked up in images, and in labels
  its numbers are the classes. A label stored as RGB has equal channels, or comes with a map of its colours.
- A picture is rotated as its EXIF orientation says, as every viewer shows it.
- A JPEG label is blurred by its format: black and white ones are cut in the middle to 0 and 255, others
  are refused.
- A NumPy image may have its channels last or first, where that axis has at most four members.
- NaN and infinite voxels of an image are read as they are; checking and preparing judge them.
"""

from __future__ import annotations

import gzip
import io
import math
import stat
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageSequence, UnidentifiedImageError

from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.colours import apply_colours
from wardround.errors import DataError
from wardround.text import format_size

Array = NDArray[Any]

NIFTI = (".nii.gz", ".nii")
PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
JPEG = (".jpg", ".jpeg")
NUMPY = (".npy", ".npz")
COLOURS = frozenset({"rgb", "red", "green", "blue", "r", "g", "b"})  # names of channels
WITH_GEOMETRY = NIFTI + nrrd.ENDINGS + metaimage.ENDINGS
ENDINGS = WITH_GEOMETRY + PICTURES + NUMPY
MOST_PACKED = 1100  # gzip makes nothing smaller than about a thousandth
MAX_VALUES = 2**32  # a file that claims more is broken, or made to fill our memory
ORIENTATION = 0x0112  # the EXIF tag
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SAME_PLACE = 1e-2  # millimetres (or parts of a voxel) two channels of a case may lie apart


@dataclass(frozen=True)
class Volume:
    """What a file holds.

    data: (C, *spatial), float32 for images, int64 and one channel for labels; affine: voxel to millimetres
    of the file's own grid, None where the format has none; spacing: millimetres a voxel along each spatial
    axis, 1 where unknown; thin: the axis of length one that was dropped, so that `data` is 2D; placed:
    whether a label stored its voxels in another way than its image.
    """

    data: Array
    affine: NDArray[np.float64] | None
    spacing: tuple[float, ...]
    thin: int | None = None
    placed: bool = False

    @property
    def spatial(self) -> tuple[int, ...]:
        return tuple(self.data.shape[1:])

    @property
    def channels(self) -> int:
        return int(self.data.shape[0])


@dataclass(frozen=True)
class Raw:
    """Values as a file stores them: (*spatial) or (*spatial, C); colours: whether the last axis is C."""

    values: Array
    affine: NDArray[np.float64] | None
    colours: bool


def read_image(paths: Sequence[Path]) -> Volume:
    """All channels of a case: one file that has them all, or one file a channel in channel order."""
    if not paths:
        raise DataError("A case without an image file cannot be read.")
    volumes = [_read_one(Path(path)) for path in paths]
    first = volumes[0]
    for path, volume in zip(paths[1:], volumes[1:], strict=True):
        if volume.spatial != first.spatial:
            raise DataError(
                f"{path} is {format_size(volume.spatial)} but {Path(paths[0]).name} is "
                f"{format_size(first.spatial)}; the channels of a case have one grid. Resample one."
            )
        if not same_affine(first.affine, volume.affine):
            raise DataError(
                f"{path} has another affine than {Path(paths[0]).name}; "
                "the channels of a case have one grid. Resample one."
            )
    if len(volumes) == 1:
        return first
    data = np.concatenate([volume.data for volume in volumes])
    return Volume(data, first.affine, first.spacing, first.thin)


def read_label(path: Path, colours: Mapping[str, int] | None = None) -> Volume:
    """Whole class values, int64 (1, *spatial); colours: value of each, where colours tell classes apart."""
    path = Path(path)
    if colours:
        shown, affine = read_colours(path)
        return _make_volume(apply_colours(shown, colours, path)[None], affine, path)
    raw = _load(path, label=True)
    values = raw.values
    if raw.colours:
        values = _drop_equal_channels(values, path)
    if path.suffix.lower() in JPEG:
        values = _binarise_jpeg(values, path)
    return _make_volume(_to_whole(values, path)[None], raw.affine, path)


def read_colours(path: Path) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """The colours of a label as 0xrrggbb (*spatial), and its affine; grey counts as a colour."""
    raw = _load(path, label=False)
    values = raw.values if raw.colours else np.repeat(raw.values[..., None], 3, axis=-1)
    if path.suffix.lower() in JPEG:
        raise DataError(f"{path} is a JPEG, which blurs colours; store the label as PNG.")
    if values.shape[-1] != 3 or values.min(initial=0) < 0 or values.max(initial=0) > 255:
        raise DataError(f"{path} is not a picture of red, green and blue from 0 to 255.")
    return np.asarray(values).astype(np.int64) @ np.array([1 << 16, 1 << 8, 1]), raw.affine


def is_coloured(path: Path) -> bool:
    """Whether a label is stored in colours that are not shades of grey."""
    raw = _load(path, label=True)
    return raw.colours and bool((raw.values != raw.values[..., :1]).any())


def same_affine(one: Array | None, other: Array | None, tolerance: float = SAME_PLACE) -> bool:
    """Whether two grids lie in one place; a file without an affine agrees with any."""
    return one is None or other is None or bool(np.allclose(one, other, rtol=0, atol=tolerance))


def has_known_ending(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS)


def _read_one(path: Path) -> Volume:
    raw = _load(path, label=False)
    if np.iscomplexobj(raw.values):
        raise DataError(f"{path} holds complex numbers; store their magnitude.")
    values = np.moveaxis(raw.values, -1, 0) if raw.colours else raw.values[None]
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and found by the check
        data = np.ascontiguousarray(values, dtype=np.float32)
    return _make_volume(data, raw.affine, path)


def _make_volume(data: Array, affine: NDArray[np.float64] | None, path: Path) -> Volume:
    """The values with their geometry, the axis of a single slice dropped."""
    if data.size == 0:
        raise DataError(f"{path} holds no voxels: its shape is {format_size(data.shape[1:])}.")
    spatial = data.shape[1:]
    if len(spatial) not in (2, 3):
        raise DataError(
            f"{path} has {len(spatial)} spatial axes ({format_size(spatial)}); wardround reads 2 or 3."
        )
    sides = np.ones(3) if affine is None else np.linalg.norm(affine[:3, :3], axis=0)
    spacing = [float(side) for side in sides[: len(spatial)]]
    if len(spatial) == 3 and spatial.count(1) == 1:
        thin = spatial.index(1)
        del spacing[thin]
        return Volume(np.squeeze(data, axis=thin + 1), affine, tuple(spacing), thin)
    return Volume(data, affine, tuple(spacing))


# Opening


def _load(path: Path, *, label: bool) -> Raw:
    """The file's values; any error of a library becomes one sentence."""
    name = path.name.lower()
    if not name.endswith(ENDINGS):
        raise DataError(f"{path} is not a format wardround reads ({', '.join(ENDINGS)}).")
    _check_file(path)
    try:
        if name.endswith(NIFTI):
            return _load_nifti(path, label)
        if name.endswith(nrrd.ENDINGS + metaimage.ENDINGS):
            return _load_block(path, label)
        if name.endswith(NUMPY):
            return _load_numpy(path, label)
        return _load_picture(path, label)
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path} does not fit into memory.") from None
    except Exception as error:  # every library has errors of its own for a broken file
        raise DataError(f"{path} cannot be read: {_explain(error)}.") from None


def _check_file(path: Path) -> None:
    """A regular file with something in it; opening a pipe by mistake would wait forever."""
    try:
        found = path.stat()
    except FileNotFoundError:
        what = "is a link to a file that is not there" if path.is_symlink() else "does not exist"
        raise DataError(f"{path} {what}.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {_explain(error)}.") from None
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{path} is a folder, not a file.")
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a regular file.")
    if found.st_size == 0:
        raise DataError(f"{path} is empty (0 bytes).")


def _explain(error: BaseException) -> str:
    """The first line of what a library says, without a full stop."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, EOFError):
        return "it ends too early (truncated)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0].rstrip(".") if lines else type(error).__name__)[:200]


# NIfTI


def _load_nifti(path: Path, label: bool) -> Raw:
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":  # whatever its name says
            file.seek(0)
            return _read_nifti(file, path, label)
    with gzip.open(path, "rb") as unpacked:
        raw = _read_nifti(unpacked, path, label)
        for _ in range(64):  # at its end gzip compares the checksum: a flipped bit is found
            if not unpacked.read(1 << 20):
                break
        return raw


def _read_nifti(stream: io.BufferedIOBase, path: Path, label: bool) -> Raw:
    start = stream.read(348)
    stream.seek(0)
    if len(start) < 348 or not (start[344:347] == b"n+1" or start[4:7] == b"n+2"):
        raise DataError(f"{path} is not a NIfTI file, despite its name.")
    import nibabel  # when a file is read: a run on synthetic cases need not wait for it

    kind = nibabel.Nifti2Image if start[4:7] == b"n+2" else nibabel.Nifti1Image
    holder = nibabel.FileHolder(fileobj=stream)
    loaded = kind.from_file_map({"header": holder, "image": holder}, mmap=False)  # type: ignore[no-untyped-call]
    shape = tuple(int(side) for side in loaded.shape)
    claimed = math.prod(shape) * loaded.get_data_dtype().itemsize
    packed = isinstance(stream, gzip.GzipFile)
    if math.prod(shape) > MAX_VALUES or claimed > path.stat().st_size * (MOST_PACKED if packed else 1):
        raise DataError(
            f"{path} claims to hold {format_size(shape)} values, more than a file of its size can: "
            "it is cut off or damaged."
        )
    if loaded.get_data_dtype().fields is not None:
        parts = np.asanyarray(loaded.dataobj)
        values = np.stack([parts[colour] for colour in "RGB"], axis=-1)
        return Raw(values, _read_affine(loaded, path), colours=True)
    if label or np.issubdtype(loaded.get_data_dtype(), np.complexfloating):
        values = np.asanyarray(loaded.dataobj)
    else:
        values = loaded.get_fdata(dtype=np.float32, caching="unchanged")
    values, colours = _arrange_axes(values, path, label)
    return Raw(values, _read_affine(loaded, path), colours)


def _arrange_axes(values: Array, path: Path, label: bool) -> tuple[Array, bool]:
    """The fourth axis holds channels; a fifth only where the fourth is empty (NIfTI vectors)."""
    while values.ndim > 4 and values.shape[3] == 1:
        values = values[:, :, :, 0]
    while values.ndim > 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim < 4:
        return values, False
    if values.ndim > 4 or label:
        needs = "a label has one value a voxel" if label else "wardround reads up to four"
        raise DataError(f"{path} has {values.ndim} axes ({format_size(values.shape)}); {needs}.")
    return values, True


def _read_affine(loaded: Any, path: Path) -> NDArray[np.float64]:
    affine = np.array(loaded.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        raise DataError(f"{path} has a broken affine: its axes do not span space. Repair its header.")
    return affine


# NRRD and MetaImage


def _load_block(path: Path, label: bool) -> Raw:
    is_nrrd = path.name.lower().endswith(nrrd.ENDINGS)
    values, affine, channels = nrrd.load(path, label) if is_nrrd else metaimage.load(path)
    if label and channels:
        raise DataError(f"{path} has {values.shape[-1]} values a voxel; a label has one.")
    return Raw(values, affine, channels)


# Pictures


def _load_picture(path: Path, label: bool) -> Raw:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unexpected metadata does not matter; a broken picture raises
        # Opened here: from a path, Pillow maps a plain TIFF and scrambles one that lies on its side.
        with path.open("rb") as file, _open_picture(file, path) as picture:
            if getattr(picture, "n_frames", 1) > 1 and path.suffix.lower() in (".tif", ".tiff"):
                pages = [_read_pixels(page, label) for page in ImageSequence.Iterator(picture)]
            else:
                pages = [_read_pixels(picture, label)]
    if len({page.shape for page in pages}) > 1:
        raise DataError(f"{path} has pages of several sizes; a volume needs pages of one.")
    colours = pages[0].ndim == 3
    if len(pages) == 1:
        return Raw(pages[0], None, colours)
    return Raw(np.stack(pages, axis=2), None, colours)  # (row, column, page[, C])


def _open_picture(file: IO[bytes], path: Path) -> Image.Image:
    try:
        return Image.open(file)
    except UnidentifiedImageError:
        raise DataError(f"{path} cannot be read: it is not a picture, despite its name.") from None


def _read_pixels(picture: Image.Image, label: bool) -> Array:
    """(row, column) or (row, column, 3) as numbers, upright, without alpha."""
    picture = apply_exif_orientation(picture)
    mode = picture.mode
    if mode == "P":
        picture = picture if label else picture.convert("RGB")
    elif mode == "LA":
        picture = picture.convert("L")
    elif mode not in ("1", "L", "F", "RGB") and not mode.startswith("I"):
        picture = picture.convert("RGB")  # RGBA, CMYK, YCbCr, ...
    values = np.array(picture)
    return values.astype(np.uint8) if values.dtype == bool else values


def apply_exif_orientation(picture: Image.Image) -> Image.Image:
    """Rotated as its EXIF orientation says: masks are annotated on what a viewer shows."""
    picture.load()  # a TIFF turns itself here, and then no longer says that it lies
    try:
        turn = UPRIGHT.get(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # metadata that cannot be read turn nothing; the picture itself is whole
        return picture
    return picture if turn is None else picture.transpose(turn)


# NumPy


def _load_numpy(path: Path, label: bool) -> Raw:
    values = _read_array(path, "label" if label else "image")
    if values.size > MAX_VALUES:
        raise DataError(f"{path} holds {format_size(values.shape)} values, more than wardround reads.")
    if values.dtype.kind not in "biufc":
        raise DataError(f"{path} holds {values.dtype} values, not numbers.")
    if label:
        while values.ndim > 2 and 1 in (values.shape[0], values.shape[-1]):
            values = values[0] if values.shape[0] == 1 else values[..., 0]
        return Raw(values, None, colours=False)
    if values.ndim > 2 and values.shape[-1] <= 4:
        return Raw(values, None, colours=True)
    # More than four channels are first, as PyTorch has them.
    if values.ndim == 4 or (values.ndim > 2 and values.shape[0] <= 4):
        return Raw(np.moveaxis(values, 0, -1), None, colours=True)
    return Raw(values, None, colours=False)


def _read_array(path: Path, name: str) -> Array:
    """The array of an .npy, or of an .npz that has one or calls it `image` (`label`); never pickled."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            return found if isinstance(found, np.ndarray) else _choose_array(found, name, path)
    except ValueError as error:
        if "pickle" in str(error):
            raise DataError(f"{path} is not a plain NumPy file; pickled objects are not read.") from None
        raise
    except zipfile.BadZipFile:
        raise DataError(f"{path} is not a whole .npz file (truncated?).") from None


def _choose_array(arrays: Any, name: str, path: Path) -> Array:
    names = list(arrays.files)
    if name not in names and len(names) != 1:
        raise DataError(f"{path} holds {', '.join(names) or 'no arrays'}; name one of them '{name}'.")
    array: Array = arrays[name if name in names else names[0]]
    return array


# Labels


def _drop_equal_channels(values: Array, path: Path) -> Array:
    """One channel of a label stored in colours, which must say the same three times."""
    if bool((values != values[..., :1]).any()):
        if path.suffix.lower() in JPEG:
            raise DataError(f"{path} is a coloured JPEG, which blurs colours; store the label as PNG.")
        raise DataError(
            f"{path} is a coloured label. Say what its colours mean under sources, such as "
            "colours: {'#000000': 0, '#ff0000': 1}; `wardround data init` proposes it."
        )
    grey: Array = values[..., 0]
    return grey


def _binarise_jpeg(values: Array, path: Path) -> Array:
    """A black and white JPEG as 0 and 255; in others the blur between classes looks like classes."""
    near = int(((values <= 32) | (values >= 223)).sum())
    black_and_white = near >= 0.95 * values.size and (values.max() >= 223 or values.max() == 0)
    if not black_and_white:
        raise DataError(f"{path} is a JPEG, which blurs class values; store the label as PNG or NIfTI.")
    return np.where(values >= 128, 255, 0)


def _to_whole(values: Array, path: Path) -> NDArray[np.int64]:
    if values.dtype.kind in "biu":
        return np.ascontiguousarray(values, dtype=np.int64)
    if values.dtype.kind == "c":
        raise DataError(f"{path} holds complex numbers, which cannot be classes.")
    if not bool(np.isfinite(values).all()):
        raise DataError(f"{path} is a label with NaN or infinite values.")
    whole = np.rint(values)
    if bool((np.abs(values - whole) > 1e-4).any()):  # a scaled header leaves a little rounding
        first = float(values[np.abs(values - whole) > 1e-4].flat[0])
        raise DataError(f"{path} is a label with values that are not whole numbers, such as {first:g}.")
    if bool((np.abs(whole) > 2**31).any()):
        raise DataError(f"{path} is a label with values beyond 2,147,483,648, which cannot be classes.")
    return np.ascontiguousarray(whole, dtype=np.int64)
