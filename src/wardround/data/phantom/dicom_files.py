"""Synthetic scans as DICOM: a made-up patient each, with a mask drawn on the series.

    <hospital>/<case>/CT0001.dcm ...    a CT with a DICOM SEG, mask.dcm
    <hospital>/<case>/MR0001.dcm ...    of every other hospital an MR with an RTSTRUCT

The same scan gives the same bytes: UIDs follow from its name, and dates are fixed.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.dicom.importing import import_pydicom
from wardround.data.dicom.writing import (
    MadeBy,
    encode_rtstruct,
    encode_seg,
    make_uid,
    read_source,
    to_bytes,
    write_series,
)
from wardround.data.phantom.cases import PhantomScan

CLASSES = {1: "lesion", 2: "necrosis"}  # of three classes the second is the lesion's core
DATES = {"DA": "20000101", "TM": "120000", "DT": "20000101120000"}


def write_scan(scan: PhantomScan, affine: NDArray[np.float64], home: Path, hospital: int) -> None:
    """A folder of the case in that of its hospital; affine: of (row, column, slice)."""
    folder = home / scan.name
    modality, encode = ("MR", encode_rtstruct) if hospital % 2 else ("CT", encode_seg)
    turned = affine[:, [1, 0, 2, 3]]  # DICOM counts columns first
    files = write_series(folder, scan.image[0].swapaxes(0, 1), turned, scan.name, modality)
    classes = {value: name for value, name in CLASSES.items() if value == 1 or (scan.label == value).any()}
    mask = encode(read_source(files), scan.label.swapaxes(0, 1), classes, MadeBy("phantom", ""))
    (folder / "mask.dcm").write_bytes(fix_identity(mask, files, scan.name))


def fix_identity(content: bytes, files: list[Path], seed: str) -> bytes:
    """A mask with UIDs and dates that depend on the seed alone; UIDs of its source stay."""
    pydicom = import_pydicom()
    heads = [pydicom.dcmread(file, stop_before_pixels=True) for file in files]
    known = {str(element.value) for head in heads for element in head if element.VR == "UI"}
    numbers: dict[str, str] = {}
    data = pydicom.dcmread(io.BytesIO(content))

    def fix(_: Any, element: Any) -> None:
        if element.VR in DATES and element.value:
            element.value = DATES[element.VR]
        elif element.VR == "UI" and isinstance(element.value, str):
            uid = str(element.value)
            if uid not in known and not uid.startswith("1.2.840.10008."):  # of DICOM itself
                element.value = numbers.setdefault(uid, make_uid(seed, len(numbers)))

    data.walk(fix)
    data.file_meta.walk(fix)
    return to_bytes(data)
