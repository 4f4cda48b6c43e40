"""Files: synthetic hospitals as folders of images and labels, laid out like real ones.

    <folder>/index.csv                        centre,stem,split
    <folder>/<hospital>/images/<case>.nii.gz  what the scanner stores, not normalised
    <folder>/<hospital>/labels/<case>.nii.gz  classes 0, 1, ... in the same geometry
    <folder>/<hospital>/<case>/*.dcm          as DICOM: a series and a mask drawn on it (`dicom_files`)

NIfTI keeps the axes of `PhantomScan` (rows, columns, slices), with their directions and spacing in the
affine; a 2D case is a volume of one slice, and several channels are a fourth axis. PNG holds 2D cases
of one channel (grey) or three (red, green, blue), each channel scaled to its brightest voxel.
The same settings and seed give the same bytes.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wardround.data.phantom import cases as phantom
from wardround.data.phantom import dicom_files
from wardround.data.phantom.cases import PhantomScan, PhantomSettings
from wardround.data.phantom.scans import SLICE_THICKNESS
from wardround.errors import DataError
from wardround.files import new_folder

FileFormat = Literal["nifti", "png", "dicom"]
WriteScan = Callable[[PhantomScan, Path, int], None]  # scan, folder of its hospital, number of the hospital


def write(settings: PhantomSettings, folder: Path, file_format: FileFormat, seed: int) -> None:
    """Write all hospitals into a new or empty folder; it appears when complete, or not at all."""
    write_scan = _choose_writer(settings, file_format)
    folder = Path(folder).absolute().resolve()
    _check_free(folder)
    with new_folder(folder) as unfinished:
        _write_hospitals(settings, unfinished, write_scan, seed)
        _check_free(folder)


def _choose_writer(settings: PhantomSettings, file_format: str) -> WriteScan:
    """The function that writes one scan; refuse a format that cannot hold it."""
    if file_format == "nifti":
        return _write_nifti
    if file_format == "dicom":
        if settings.unlabelled:
            raise DataError("DICOM series are written with their masks; for unlabelled, choose 'nifti'.")
        if settings.dimensions != 3 or settings.channels != 1:
            raise DataError("DICOM series hold 3D cases of one channel; choose these, or the format 'nifti'.")
        return _write_dicom
    if file_format != "png":
        raise DataError(f"The file format is {file_format!r}; choose 'nifti', 'png' or 'dicom'.")
    if settings.dimensions != 2:
        raise DataError(
            "PNG files hold 2D cases and these are 3D; choose the format 'nifti', or dimensions: 2."
        )
    if settings.lacks:
        raise DataError("PNG files hold 1 or 3 channels; choose the format 'nifti', or leave lacks out.")
    if settings.channels not in (1, 3):
        raise DataError(
            f"PNG files hold 1 or 3 channels and these cases have {settings.channels}; "
            "choose the format 'nifti', or another number of channels."
        )
    return _write_png


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(
            f"{folder} already exists and is not an empty folder; name a new one, or remove it first."
        )


def _write_hospitals(settings: PhantomSettings, folder: Path, write_scan: WriteScan, seed: int) -> None:
    rows = []
    for index, name in enumerate(phantom.list_hospitals(settings)):
        if write_scan is not _write_dicom:
            (folder / name / "images").mkdir(parents=True)
            (folder / name / "labels").mkdir()
        style = phantom.make_hospital(settings, index, seed)
        for number in range(1, phantom.count_cases(settings, name) + 1):
            scan = phantom.make_scan(settings, style, number, seed)
            write_scan(scan, folder / name, index)
            if name in settings.unlabelled:
                for label in (folder / name).glob(f"labels/{scan.name}.*"):
                    label.unlink()
            split = phantom.choose_split(settings, name, number)
            rows.append((name, scan.name, "train" if name in settings.unlabelled else split))
    with (folder / "index.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("centre", "stem", "split"))
        table.writerows(rows)


def _write_nifti(scan: PhantomScan, home: Path, hospital: int) -> None:
    image = np.moveaxis(scan.image, 0, -1)  # (C, *spatial) -> (*spatial, C)
    label = scan.label
    spacing = scan.spacing
    if label.ndim == 2:
        image, label, spacing = image[:, :, None], label[:, :, None], (*spacing, SLICE_THICKNESS)
    if image.shape[-1] == 1:
        image = image[..., 0]
    affine = _make_affine(label.shape, spacing)
    _save_nifti(image, affine, home / "images" / scan.name)
    _save_nifti(label, affine, home / "labels" / scan.name)


def _make_affine(shape: tuple[int, ...], spacing: tuple[float, ...]) -> NDArray[np.float64]:
    """Rows run to the back, columns to the patient's left, slices upwards; the middle is at zero."""
    affine = np.zeros((4, 4))
    rows, columns, slices = spacing
    affine[1, 0], affine[0, 1], affine[2, 2], affine[3, 3] = -rows, -columns, slices, 1.0
    affine[:3, 3] = -affine[:3, :3] @ ((np.asarray(shape) - 1) / 2)
    return affine


def _save_nifti(values: NDArray[np.generic], affine: NDArray[np.float64], stem: Path) -> None:
    volume = nibabel.Nifti1Image(values, affine)  # type: ignore[no-untyped-call]
    volume.header.set_xyzt_units("mm")  # type: ignore[no-untyped-call]
    # Without a time stamp, so that equal scans are equal files.
    stem.with_name(f"{stem.name}.nii.gz").write_bytes(gzip.compress(volume.to_bytes(), 6, mtime=0))


def _write_dicom(scan: PhantomScan, home: Path, hospital: int) -> None:
    dicom_files.write_scan(scan, _make_affine(scan.label.shape, scan.spacing), home, hospital)


def _write_png(scan: PhantomScan, home: Path, hospital: int) -> None:
    brightest = np.maximum(scan.image.max(axis=(1, 2), keepdims=True), 1)
    channels = np.rint(scan.image * (255.0 / brightest)).astype(np.uint8)
    picture = channels[0] if len(channels) == 1 else np.moveaxis(channels, 0, -1)
    Image.fromarray(picture).save(home / "images" / f"{scan.name}.png")
    Image.fromarray(scan.label).save(home / "labels" / f"{scan.name}.png")
