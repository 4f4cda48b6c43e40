"""Writing: masks and maps in the scan's own format and geometry, or in another that has its geometry.

    OUT/<scan>.nii.gz                     classes, uint8, the scan's header
    OUT/<scan>_probabilities.nii.gz       float32, classes along the fourth axis, background first
    OUT/<scan>_uncertainty.nii.gz         float32, nats; _epistemic and _aleatoric where available

An NRRD scan gets <scan>.seg.nrrd, which 3D Slicer shows with names and colours, and maps as .nrrd; MetaImage
gets .mha. A DICOM volume may get <scan>.seg.dcm (binary; its maps are fractional) or <scan>.rtstruct.dcm,
which refer to its series.

Masks of pictures are PNG (TIFF for TIFF) with class values, which look black in most viewers; their maps are
16-bit PNG, where 65535 is 1 or the largest possible uncertainty (ln of the number of classes), and floats in
TIFF for TIFF. NumPy stays NumPy.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wardround.data.dicom.writing import MadeBy, encode_rtstruct, encode_seg, encode_shares, read_source
from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.grids import read_nifti_header
from wardround.data.readers.image_files import NIFTI
from wardround.errors import DataError
from wardround.files import write_bytes
from wardround.prediction.inputs import DICOM, Scan
from wardround.prediction.results import Prediction

Array = NDArray[Any]
MAP_ENDINGS = {nrrd.SEGMENTATION: ".nrrd", ".rtstruct.dcm": ".seg.dcm"}  # where a mask's own holds no map
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
    ending = scan.ending.lower()
    return f"{scan.stem}_{what}{MAP_ENDINGS.get(ending, ending)}"


def write(prediction: Prediction, folder: Path, made_by: MadeBy) -> dict[str, str]:
    """Write the mask and its maps, each file complete or not at all; returns kind -> file name."""
    scan, affine = prediction.scan, prediction.affine
    if scan.name.endswith(DICOM):
        return write_dicom(prediction, folder, made_by)
    written = {"mask": scan.name}
    write_bytes(folder / scan.name, encode(prediction.mask, scan, affine, names=prediction.classes))
    if prediction.probabilities is not None:
        written["probabilities"] = name_map(scan, "probabilities")
        content = encode(prediction.probabilities, scan, affine, classes=True)
        write_bytes(folder / written["probabilities"], content)
    top = math.log(len(prediction.classes) + 1)
    for name, values in prediction.uncertainty.items():
        written[name] = name_map(scan, MAPS[name])
        write_bytes(folder / written[name], encode(values, scan, affine, top=top))
    return written


def write_dicom(prediction: Prediction, folder: Path, made_by: MadeBy) -> dict[str, str]:
    """The same as objects that refer to the scan's series; uncertainty as a part of its largest value."""
    scan, names = prediction.scan, list(prediction.classes.values())
    source = read_source(scan.series)
    encode_mask = encode_seg if scan.name.endswith(".seg.dcm") else encode_rtstruct
    mask = prediction.mask.reshape(source.stack.shape)
    files = {"mask": (scan.name, encode_mask(source, mask, prediction.classes, made_by))}
    if prediction.probabilities is not None:
        shares = prediction.probabilities[1:].reshape(-1, *source.stack.shape)
        files["probabilities"] = (
            name_map(scan, "probabilities"),
            encode_shares(source, shares, names, made_by),
        )
    top = math.log(len(names) + 1)
    for name, values in prediction.uncertainty.items():
        shares = (values / top).reshape(1, *source.stack.shape)
        files[name] = name_map(scan, MAPS[name]), encode_shares(source, shares, [MAPS[name]], made_by)
    for name, content in files.values():
        write_bytes(folder / name, content)
    return {what: name for what, (name, _) in files.items()}


def encode(
    values: Array,
    scan: Scan,
    affine: NDArray[np.float64] | None,
    *,
    names: Mapping[int, str] | None = None,
    classes: bool = False,
    top: float = 1.0,
) -> bytes:
    """A mask (uint8) or a map (float32) as a file.

    names: of the mask's values; classes: whether the first axis is classes.
    """
    lower = scan.ending.lower()
    if lower in NIFTI:
        return as_nifti(values, scan, affine, classes=classes)
    if lower in nrrd.ENDINGS:
        if names is not None:
            return nrrd.encode_segments(values, affine, names, nrrd.COLOURS)
        return nrrd.encode(values, affine, channels=classes)
    if lower in metaimage.ENDINGS:
        return metaimage.encode(values, affine, channels=classes)
    if lower == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        return buffer.getvalue()
    return as_picture(values, tiff=lower in (".tif", ".tiff"), classes=classes, top=top)


# NIfTI


def as_nifti(values: Array, scan: Scan, affine: NDArray[np.float64] | None, *, classes: bool) -> bytes:
    """With the header of the scan's first file: its affine, codes and units, byte for byte; affine: of a scan
    in another format."""
    if scan.files[0].name.lower().endswith(NIFTI):
        header, place, shape = read_nifti_header(scan.files[0])
    else:
        header, place, shape = make_header(values.shape[classes:], affine)
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
    content: bytes = kind(values, place, header).to_bytes()
    packed = scan.name.lower().endswith(".gz")
    return gzip.compress(content, 6 if values.dtype == np.uint8 else 1, mtime=0) if packed else content


def make_header(shape: tuple[int, ...], affine: Array | None) -> tuple[Any, Array, tuple[int, ...]]:
    """The same for a scan that is no NIfTI."""
    tools: Any = nibabel
    header = tools.Nifti1Header()
    header.set_xyzt_units("mm")
    return header, np.eye(4) if affine is None else affine, shape


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
