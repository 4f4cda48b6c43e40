"""Files of prepare_and_run.py: NIfTI (needs nibabel), pictures (needs pillow) and NumPy, in and out."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
NIFTI, TIFF = (".nii.gz", ".nii"), (".tif", ".tiff")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", *TIFF)


class RefusedScan(Exception):
    """What is wrong, in a sentence."""


class LoadedImage(NamedTuple):
    """data: (channels, *spatial) float32; affine: of the file, or None; spacing: mm along each spatial axis;
    thin: the axis of length one that was dropped, so that data is 2D."""

    data: Array
    affine: Array | None
    spacing: tuple[float, ...]
    thin: int | None


def load_package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        package = "pillow" if package == "PIL" else package
        raise RefusedScan(f"{package} is missing here: pip install {package}") from None


# Reading


def read_image(files: Sequence[Path]) -> LoadedImage:
    """All channels of a scan: one file that has them all, or one file a channel."""
    parts = [read_file(file) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        what = "" if part.data.shape[1:] == first.data.shape[1:] else "shape"
        if part.affine is not None and first.affine is not None and not what:
            what = "" if np.allclose(part.affine, first.affine, rtol=0, atol=1e-2) else "affine"
        if what:
            raise RefusedScan(
                f"{file} has another {what} than {files[0]}; the channels of a scan have one grid."
            )
    return first._replace(data=np.concatenate([part.data for part in parts]))


def read_file(file: Path) -> LoadedImage:
    name, affine = file.name.lower(), None
    try:
        if name.endswith(NIFTI):
            values, is_colour, affine = read_nifti(file)
        elif name.endswith(".npy"):
            values, is_colour = read_numpy(file)
        elif name.endswith(PICTURES):
            values, is_colour = read_picture(file)
        else:
            raise RefusedScan(f"{file} is none of {', '.join((*NIFTI, *PICTURES, '.npy'))}.")
    except RefusedScan:
        raise
    except Exception as error:  # every library has errors of its own for a broken file
        raise RefusedScan(f"{file} cannot be read: {error}") from None
    data = np.ascontiguousarray(np.moveaxis(values, -1, 0) if is_colour else values[None], dtype=np.float32)
    spatial = data.shape[1:]
    if len(spatial) not in (2, 3) or not data.size:
        raise RefusedScan(f"{file} has the shape {spatial}; images have 2 or 3 axes.")
    sides = np.ones(3) if affine is None else np.linalg.norm(affine[:3, :3], axis=0)
    spacing = [float(side) for side in sides[: len(spatial)]]
    if len(spatial) == 2 or spatial.count(1) != 1:
        return LoadedImage(data, affine, tuple(spacing), None)
    thin = spatial.index(1)
    del spacing[thin]
    return LoadedImage(np.squeeze(data, thin + 1), affine, tuple(spacing), thin)


def read_nifti(file: Path) -> tuple[Array, bool, Array]:
    loaded = load_package("nibabel").load(file)
    affine = np.array(loaded.affine, dtype=np.float64)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12:
        raise RefusedScan(f"{file} has a broken affine: its axes do not span space. Repair its header.")
    if loaded.get_data_dtype().fields is not None:
        parts = np.asanyarray(loaded.dataobj)
        return np.stack([parts[colour] for colour in "RGB"], axis=-1), True, affine
    values = loaded.get_fdata(dtype=np.float32, caching="unchanged")
    while values.ndim > 4 and values.shape[3] == 1:
        values = values[:, :, :, 0]
    while values.ndim > 3 and values.shape[-1] == 1:
        values = values[..., 0]
    return values, values.ndim == 4, affine


def read_numpy(file: Path) -> tuple[Array, bool]:
    """Channels are last or first, where that axis has at most four members."""
    values = np.load(file, allow_pickle=False)
    if values.ndim > 2 and values.shape[-1] <= 4:
        return values, True
    is_first = values.ndim == 4 or (values.ndim > 2 and values.shape[0] <= 4)
    return np.moveaxis(values, 0, -1) if is_first else values, is_first


def read_picture(file: Path) -> tuple[Array, bool]:
    """(row, column), pages of a TIFF behind them, colours last; upright as its EXIF orientation says."""
    images, tools, frames = (load_package(f"PIL.{name}") for name in ("Image", "ImageOps", "ImageSequence"))
    pages = []
    with warnings.catch_warnings(), file.open("rb") as stream, images.open(stream) as picture:
        warnings.simplefilter("ignore")
        for page in frames.Iterator(picture) if file.name.lower().endswith(TIFF) else [picture]:
            page.load()
            page = tools.exif_transpose(page)
            if page.mode == "LA":
                page = page.convert("L")
            elif page.mode not in ("1", "L", "F", "RGB") and not page.mode.startswith("I"):
                page = page.convert("RGB")
            pages.append(np.array(page))
    return (pages[0] if len(pages) == 1 else np.stack(pages, axis=2)), pages[0].ndim == 3


def find_axes(affine: Array) -> list[tuple[int, int]]:
    """For each axis of the file, the closest of R, A and S (0, 1, 2) and its sign (as nibabel finds them)."""
    sides = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    left, _, right = np.linalg.svd(sides)
    turned = left @ right  # the closest rotation
    found = [(0, 1)] * 3
    for axis in np.argsort(np.min(-(turned**2), axis=0), kind="stable"):
        target = int(np.argmax(np.abs(turned[:, axis])))
        found[axis] = target, -1 if turned[target, axis] < 0 else 1
        turned[target] = 0
    return found


# Writing


def write_mask(mask: Array, target: Path, scan: Path) -> None:
    """In the format of the target's name; NIfTI with the scan's own header."""
    name = target.name.lower()
    partial = target.with_name(f".partial-{target.name}")
    if name.endswith(NIFTI):
        loaded = load_package("nibabel").load(scan)
        header = loaded.header.copy()
        del header.extensions[:]  # they may name the patient
        header.set_data_dtype(np.uint8)
        header.set_slope_inter(1, 0)
        header["cal_min"], header["cal_max"] = 0, 0
        is_same = math.prod(loaded.shape) == mask.size
        type(loaded)(mask.reshape(loaded.shape) if is_same else mask, loaded.affine, header).to_filename(
            partial
        )
    elif name.endswith(".npy"):
        np.save(partial, mask, allow_pickle=False)
    else:
        planes = [mask] if mask.ndim == 2 else list(np.moveaxis(mask, 2, 0))
        pages = [load_package("PIL.Image").fromarray(np.ascontiguousarray(plane)) for plane in planes]
        more = {"save_all": True, "append_images": pages[1:]} if name.endswith(TIFF) else {}
        pages[0].save(partial, **more)
    partial.replace(target)


def check_target(target: Path, files: Sequence[Path], overwrite: bool) -> None:
    name = target.name.lower()
    if not name.endswith((*NIFTI, ".npy", ".png", *TIFF)):
        raise RefusedScan(f"{target}: a mask is stored as .nii.gz, .nii, .png, .tif or .npy.")
    if name.endswith(NIFTI) and not files[0].name.lower().endswith(NIFTI):
        raise RefusedScan(
            f"{target}: {files[0].name} is no NIfTI file, so its mask cannot be one; take .png or .npy."
        )
    if target.exists() and (not overwrite or target.resolve() in [file.resolve() for file in files]):
        raise RefusedScan(
            f"{target} exists; choose another name, or add --overwrite (never for the scan itself)."
        )
