"""Writing: masks and maps in the scan's own format and geometry.

    OUT/<scan>.nii.gz                     classes, uint8, the scan's header
    OUT/<scan>_probabilities.nii.gz       float32, classes along the fourth axis, background first
    OUT/<scan>_uncertainty.nii.gz         float32, nats; _epistemic and _aleatoric where available

Masks of pictures are PNG (TIFF for TIFF) with class values, which look black in most viewers; their maps are
16-bit PNG, where 65535 is 1 or the largest possible uncertainty (ln of the number of classes), and floats in
TIFF for TIFF. NumPy stays NumPy.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wardround.data.readers.image_files import NIFTI
from wardround.errors import DataError
from wardround.files import write_bytes
from wardround.prediction.inputs import Scan
from wardround.prediction.results import Prediction

Array = NDArray[Any]
MAPS = {"total": "uncertainty", "epistemic": "epistemic", "aleatoric": "aleatoric"}


def list_outputs(scan: Scan, folder: Path, *, probabilities: bool, uncertainty: bool) -> list[Path]:
    """Files a prediction of this scan may write, the mask first."""
    names = [scan.name]
    if probabilities:
        names.append(name_map(scan, "probabilities"))
    if uncertainty:
        names += [name_map(scan, name) for name in MAPS.values()]
    return [folder / name for name in names]


def name_map(scan: Scan, what: str) -> str:
    return f"{scan.stem}_{what}{scan.ending}"


def write(prediction: Prediction, folder: Path) -> dict[str, str]:
    """Write the mask and its maps, each file complete or not at all; returns kind -> file name."""
    scan = prediction.scan
    written = {"mask": scan.name}
    write_bytes(folder / scan.name, encode(prediction.mask, scan))
    if prediction.probabilities is not None:
        written["probabilities"] = name_map(scan, "probabilities")
        content = encode(prediction.probabilities, scan, classes=True)
        write_bytes(folder / written["probabilities"], content)
    top = math.log(len(prediction.classes) + 1)
    for name, values in prediction.uncertainty.items():
        written[name] = name_map(scan, MAPS[name])
        write_bytes(folder / written[name], encode(values, scan, top=top))
    return written


def encode(values: Array, scan: Scan, *, classes: bool = False, top: float = 1.0) -> bytes:
    """A mask (uint8) or a map (float32) as a file; classes: whether the first axis is classes."""
    lower = scan.ending.lower()
    if lower in NIFTI:
        return as_nifti(values, scan, classes=classes)
    if lower == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        return buffer.getvalue()
    return as_picture(values, tiff=lower in (".tif", ".tiff"), classes=classes, top=top)


# NIfTI


def as_nifti(values: Array, scan: Scan, *, classes: bool) -> bytes:
    """With the header of the scan's first file: its affine, codes and units, byte for byte."""
    header, affine, shape = read_header(scan.files[0])
    if classes:
        values = np.moveaxis(values, 0, -1)
        if values.ndim == 3:  # a slice stored as (x, y): classes are the fourth axis, as in any NIfTI
            values = values[:, :, None]
    elif math.prod(shape) == values.size:
        values = values.reshape(shape)  # keeps a fourth axis of length one
    tools: Any = nibabel  # it has no type hints
    kind = tools.Nifti2Image if int(header["sizeof_hdr"]) == 540 else tools.Nifti1Image
    header.set_data_dtype(values.dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"], header["cal_max"] = 0, 0
    content: bytes = kind(values, affine, header).to_bytes()
    packed = scan.name.lower().endswith(".gz")
    return gzip.compress(content, 6 if values.dtype == np.uint8 else 1, mtime=0) if packed else content


def read_header(path: Path) -> tuple[Any, Array, tuple[int, ...]]:
    """Header, affine and shape, without voxels, and without extensions, which may name the patient."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if packed else path.open("rb") as stream:
        start = stream.read(348)
        stream.seek(0)
        tools: Any = nibabel
        kind = tools.Nifti2Image if start[4:7] == b"n+2" else tools.Nifti1Image
        holder = tools.FileHolder(fileobj=stream)
        loaded = kind.from_file_map({"header": holder, "image": holder}, mmap=False)
        header, affine = loaded.header.copy(), np.array(loaded.affine)
        shape = tuple(int(side) for side in loaded.shape)
    del header.extensions[:]
    return header, affine, shape


# Pictures


def as_picture(values: Array, *, tiff: bool, classes: bool, top: float) -> bytes:
    """PNG, or TIFF with one page per slice; classes are side by side in PNG, successive pages in TIFF."""
    if values.dtype != np.uint8 and not tiff:
        values = np.rint(np.clip(values / top, 0, 1) * 65535).astype(np.uint16)
    if not tiff:
        shown = np.concatenate(list(values), axis=1) if classes else values
        if shown.ndim != 2:
            raise DataError("a PNG cannot hold a volume; store the scan as NIfTI or TIFF.")
        return save_pages([shown], "PNG")
    return save_pages(list(split_pages(values, classes)), "TIFF")


def split_pages(values: Array, classes: bool) -> Iterator[Array]:
    for part in values if classes else [values]:
        if part.ndim == 2:
            yield part
        else:
            yield from np.moveaxis(part, 2, 0)


def save_pages(pages: list[Array], kind: str) -> bytes:
    buffer = io.BytesIO()
    first, *others = [Image.fromarray(np.ascontiguousarray(page)) for page in pages]
    if kind == "TIFF":
        first.save(buffer, format=kind, save_all=True, append_images=others, compression="tiff_deflate")
    else:
        first.save(buffer, format=kind)
    return buffer.getvalue()
