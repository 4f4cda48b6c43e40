"""DICOM as an import step: every series becomes one NIfTI file, or a PNG a picture, in a centre's folder.

    <folder>/images/<patient>_<modality>_<series>.nii.gz | .png
    <folder>/index.csv           stem, patient, modality; series (its description) for those who ask
    <folder>/.patient-key        the secret behind the pseudonyms; it stays at the hospital
    <folder>/.patient-map.csv    which file came from which patient and folder; it stays there too

Volumes (CT, MR, PET ...) are ordered by where their slices lie, and keep their geometry. Single pictures
(X-ray, ultrasound, endoscopy, fundus) become 8 or 16 bit PNG. Patient and series are pseudonyms: nothing
that is written repeats a name, an ID, a date, a folder or a free text of the source. Pixels stay as they are.
Labels are not made here: put them into <folder>/labels under the same names.

Needs pydicom: pip install wardround[dicom]
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import hmac
import io
import logging
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.readers.common import (
    join_names,
    list_entries,
    list_folders,
    list_images,
    note_names,
    read_rows,
)
from wardround.data.readers.patient_map import KEY, Origin, read_origins, write_origins
from wardround.errors import DataError
from wardround.files import file_name, write_bytes, write_private, write_text

DEEPEST = 5  # folders down, as in country/hospital/patient/study/series; the first few of each level
MOST_LOOKED_AT = 20
UNEVEN = 0.05  # of the slice distance: more is a missing slice
SAME_DIRECTION = 1e-3
# DICOM counts to the patient's left and back, NIfTI to right and front.
TO_NIFTI = np.diag([-1.0, -1.0, 1.0, 1.0])
HEADS = ("stem", "patient", "modality")
DESCRIPTION = "series"  # the column of those who keep descriptions
# DICOM PS3.3 C.7.3.1.1.1, those with pictures. Anything else in this field may be free text.
MODALITIES = re.compile(
    "BI|CR|CT|DG|DX|ES|GM|IO|IVOCT|IVUS|MG|MR|NM|OCT|OP|OPT|PT|PX|RF|SM|TG|US|XA|XC", re.ASCII
)
OTHER = "OT"
Row = tuple[str, str, str, str]


@dataclass
class Imported:
    """What an import wrote, and what it left out and why."""

    written: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Series:
    """The files of one series, by the folder they lie in."""

    folder: Path
    uid: str
    files: list[Path] = field(default_factory=list)


@contextmanager
def silence_pydicom() -> Iterator[None]:
    """pydicom warns of unexpected values by repeating them, names too; errors still raise."""
    log = logging.getLogger("pydicom")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pydicom")
            yield
    finally:
        log.setLevel(before)


@silence_pydicom()
def import_dicom(
    source: Path,
    target: Path,
    *,
    series: str | None = None,
    keep_descriptions: bool = False,
    by_folders: bool = False,
    watch: Callable[[str], None] = lambda name: None,
) -> Imported:
    """Bring all series below `source` into the centre's folder `target`.

    series: only those whose description has this text (flair); keep_descriptions: list them, with whatever
    they reveal of the patient; by_folders: names follow the source's folders instead of pseudonyms, where the
    files are thrown away after use; watch: called with each name. A series that cannot be used, or is there
    already, is noted and the others go on. Notes name the source's folders, for those who may see them.
    """
    pydicom = import_pydicom()
    if not source.is_dir():
        raise DataError(f"{source} is not a folder of DICOM files.")
    index = read_index(target / "index.csv")
    had_descriptions = any(row[3] for row in index.values())
    key = b""
    result = Imported()
    wanted = (series or "").casefold()
    taken: set[str] = set()
    burned: list[str] = []
    origins = read_origins(target)
    for found in find_series(source, pydicom, result.notes):
        heads = [pydicom.dcmread(file, stop_before_pixels=True) for file in found.files]
        description = str(heads[0].get("SeriesDescription", ""))
        if wanted not in description.casefold():
            continue
        key = key or read_secret(target / KEY)
        patient_id = str(heads[0].get("PatientID", ""))
        patient = "patient_" + make_pseudonym(patient_id or found.uid, key)
        modality = read_modality(heads[0])
        if by_folders:
            name = make_folder_name(found, heads[0], source, taken)
        else:
            name = make_free_name(f"{patient}_{modality}_{make_pseudonym(found.uid, key)}", taken)
        for stem, content, ending in convert_series(found, name, heads, source, pydicom, result.notes):
            watch(stem)
            store(target / "images" / f"{stem}{ending}", content, result)
            facts = index.get(stem, (stem, patient, modality))[:3]  # what was listed may have been corrected
            index[stem] = (*facts, description)
            origins[stem] = Origin(stem, facts[1], patient_id, found.uid, str(found.folder.resolve()))
            if str(heads[0].get("BurnedInAnnotation", "")).upper() == "YES":
                burned.append(stem)
    if not index:
        raise DataError(" ".join([f"{source}: no DICOM series could be imported.", *result.notes[:3]]))
    if burned and not by_folders:
        result.notes.append(warn_of_burned_text(burned))
    if had_descriptions and not keep_descriptions:
        result.notes.append(f"Descriptions of an earlier import are taken out of {target / 'index.csv'}.")
    write_index(target, index, keep_descriptions)
    if not by_folders:
        write_origins(target, origins)
    return result


def warn_of_burned_text(stems: Sequence[str]) -> str:
    return (
        f"BurnedInAnnotation is YES for {join_names(stems)}: check that the text in these pictures "
        "identifies nobody; it stays in them."
    )


def holds_dicom(path: Path) -> bool:
    """Whether a file here, or in the first folders down to a series, carries DICOM's mark."""
    level = [path]
    for _ in range(DEEPEST + 1):
        files = [f / entry.name for f in level for entry in list_entries(f, [])[:MOST_LOOKED_AT]]
        if any(is_dicom(file) for file in files):
            return True
        level = [child for folder in level for child in list_folders(folder, [])[:5]][:MOST_LOOKED_AT]
    return False


def is_dicom(file: Path) -> bool:
    """DICM after 128 bytes, as the standard says."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(132)[128:] == b"DICM"
    except OSError:
        return False


def import_pydicom() -> Any:
    try:
        import pydicom  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            "Reading DICOM needs pydicom. Install it with: pip install 'wardround[dicom]'"
        ) from None
    return pydicom


def find_series(source: Path, pydicom: Any, notes: list[str]) -> Iterator[Series]:
    """Every series below a folder, in the order of folders; links to folders are not followed."""
    found: dict[tuple[str, str], Series] = {}
    broken = []
    for place, folders, names in os.walk(source, followlinks=False):
        folders.sort()
        for name in sorted(names):
            file = Path(place) / name
            if name == "DICOMDIR" or not (is_dicom(file) or name.lower().endswith(".dcm")):
                continue
            try:
                tags = ["SeriesInstanceUID", "Rows", "Modality"]
                head = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=tags)
                uid = str(head.SeriesInstanceUID)
                head.Rows  # noqa: B018 - reports and structure sets have none
                if str(head.get("Modality", "")).strip().upper() == "SEG":
                    raise DataError("a mask must not pass for a scan")
            except Exception:  # a broken file may break the library in any way
                broken.append(str(file.relative_to(source)))
                continue
            series = found.setdefault((place, uid), Series(Path(place), uid))
            series.files.append(file)
    note_names(notes, f"{len(broken)} files are not DICOM images", broken, "; left out")
    yield from found.values()


def convert_series(
    series: Series, stem: str, heads: Sequence[Any], source: Path, pydicom: Any, notes: list[str]
) -> Iterator[tuple[str, bytes, str]]:
    """Names and contents of the files a series becomes."""
    try:
        if any(int(head.get("NumberOfFrames", 1) or 1) > 1 for head in heads):
            raise DataError("it is multi-frame; convert it with dcm2niix")
        if "ImagePositionPatient" in heads[0] and len(heads) > 1:
            yield stem, convert_volume(series, heads, pydicom), ".nii.gz"
            return
        for number, file in enumerate(series.files, start=1):
            name = stem if len(series.files) == 1 else f"{stem}_{number:04d}"
            yield name, convert_picture(pydicom.dcmread(file), pydicom), ".png"
    except Exception as error:  # a broken file may break the library in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # The folder, so that one finds it, and no pseudonym beside it.
        which = f", series {heads[0].SeriesNumber}" if heads[0].get("SeriesNumber") else ""
        notes.append(f"{series.folder.relative_to(source)}{which}: {reason.rstrip('.')}; left out.")


def read_modality(head: Any) -> str:
    """CT, MR ...; a word that DICOM does not know may be anything, and is not repeated."""
    modality = str(head.get("Modality", "")).strip().upper()
    return modality if MODALITIES.fullmatch(modality) else OTHER


def make_folder_name(series: Series, head: Any, source: Path, taken: set[str]) -> str:
    """The folders' names joined; with the series' number where a folder holds several."""
    parts = series.folder.relative_to(source).parts or (source.resolve().name,)
    stem = file_name(re.sub(r"\s+", "_", "_".join(parts)))
    if stem in taken:
        stem = file_name(f"{stem}_s{head.get('SeriesNumber', '') or len(taken)}")
    return make_free_name(stem, taken)


def make_free_name(stem: str, taken: set[str]) -> str:
    """A name not yet used in this import: one series in two folders is two."""
    base, number = stem, 1
    while stem in taken:
        number += 1
        stem = f"{base}_{number}"
    taken.add(stem)
    return stem


def convert_volume(series: Series, heads: Sequence[Any], pydicom: Any) -> bytes:
    """A stack of slices in the order they lie, as compressed NIfTI with its geometry."""
    import nibabel

    shapes = {(int(head.Rows), int(head.Columns)) for head in heads}
    if len(shapes) > 1:
        raise DataError(f"slices have different sizes: {sorted(shapes)}")
    directions = np.asarray([[float(v) for v in head.ImageOrientationPatient] for head in heads])
    if np.abs(directions - directions[0]).max() > SAME_DIRECTION:
        raise DataError("slices lie in different directions (a scout?)")
    normal = np.cross(directions[0, :3], directions[0, 3:])
    places = np.asarray([[float(v) for v in head.ImagePositionPatient] for head in heads])
    heights = places @ normal
    order = np.argsort(heights)
    steps = np.diff(heights[order])
    step = float(np.median(steps))
    if step <= 0 or np.abs(steps - step).max() > UNEVEN * step:
        raise DataError(
            f"slices are missing or doubled: distances from {steps.min():.2f} to {steps.max():.2f} mm"
        )
    slices = [rescale(pydicom.dcmread(series.files[place]), pydicom) for place in order]
    values = np.stack(slices, axis=-1).swapaxes(0, 1)  # (row, column, slice) -> (column, row, slice)
    image = nibabel.Nifti1Image(
        to_smallest_type(values), compute_affine(heads[0], directions[0], places[order], step)
    )  # type: ignore[no-untyped-call]
    image.header.set_xyzt_units("mm")  # type: ignore[no-untyped-call]
    return gzip.compress(image.to_bytes(), 6, mtime=0)


def compute_affine(
    head: Any, direction: NDArray[np.float64], places: NDArray[np.float64], step: float
) -> NDArray[np.float64]:
    """Voxel to millimetres, DICOM PS3.3 C.7.6.2.1.1, in NIfTI's directions."""
    row_distance, column_distance = (float(v) for v in head.PixelSpacing)
    affine = np.eye(4)
    affine[:3, 0] = direction[:3] * column_distance
    affine[:3, 1] = direction[3:] * row_distance
    affine[:3, 2] = (places[-1] - places[0]) / (len(places) - 1)  # a tilted gantry shears the stack
    affine[:3, 3] = places[0]
    return TO_NIFTI @ affine


def rescale(data: Any, pydicom: Any) -> NDArray[np.float32]:
    """Stored values in the unit of the modality (Hounsfield for CT)."""
    values = pydicom.pixels.apply_rescale(data.pixel_array, data)
    return np.asarray(values, dtype=np.float32)


def to_smallest_type(values: NDArray[np.float32]) -> NDArray[Any]:
    """Whole numbers that fit 16 bit are stored so; anything else as float32."""
    rounded = np.rint(values)
    if np.array_equal(rounded, values) and values.min() >= -32768 and values.max() <= 32767:
        return rounded.astype(np.int16)
    return values


def convert_picture(data: Any, pydicom: Any) -> bytes:
    """One picture as PNG: colour in 8 bit, grey in 8 bit where it fits, else 16; white bones stay white."""
    from PIL import Image

    values = data.pixel_array
    kind = str(data.PhotometricInterpretation)
    if kind.startswith("YBR"):
        values = pydicom.pixels.convert_color_space(values, kind, "RGB")
    elif kind == "PALETTE COLOR":
        values = pydicom.pixels.apply_color_lut(values, data) >> 8
    elif kind.startswith("MONOCHROME"):
        values = np.asarray(values, dtype=np.int64)
        values = values.max() - values if kind == "MONOCHROME1" else values - min(0, int(values.min()))
    highest = int(values.max(initial=0))
    if highest > 65535 or (values.ndim == 3 and highest > 255):
        raise DataError(f"values up to {highest} do not fit a PNG")
    buffer = io.BytesIO()
    Image.fromarray(values.astype(np.uint8 if highest <= 255 else np.uint16)).save(buffer, format="PNG")
    return buffer.getvalue()


def store(path: Path, content: bytes, result: Imported) -> None:
    if path.exists():
        result.notes.append(f"{path} is there already and is kept.")
        return
    write_bytes(path, content)
    result.written.append(path)


def read_index(path: Path) -> dict[str, Row]:
    """The rows of an earlier import; a list that was not written here is refused before anything is."""
    if not path.exists():
        return {}
    rows = read_rows(path)
    if any(tuple(row) not in (HEADS, (*HEADS, DESCRIPTION)) for row in rows):
        raise DataError(
            f"{path} is a list of yours and is not replaced; choose another folder for the import."
        )
    return {
        row["stem"]: (row["stem"], row["patient"], row["modality"], row.get(DESCRIPTION, "")) for row in rows
    }


def write_index(target: Path, rows: dict[str, Row], keep_descriptions: bool) -> None:
    """The list of the centre. Images that were there before stay in it: what is not listed is not used."""
    others = {stem: (stem, "", "", "") for stem in list_images(target / "images", [])}
    heads = (*HEADS, DESCRIPTION) if keep_descriptions else HEADS
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heads)
    table.writerows(row[: len(heads)] for _, row in sorted({**others, **rows}.items()))
    write_text(target / "index.csv", text.getvalue())


def read_secret(path: Path) -> bytes:
    """A random key that stays in the centre's folder, so that later imports call a patient the same."""
    if not path.exists():
        write_private(path, secrets.token_hex(16) + "\n")
    key = path.read_bytes().strip()
    if not key:  # pseudonyms without a secret could be found by trying out IDs
        raise DataError(f"{path} is empty; restore it, or remove it to give all patients new pseudonyms.")
    return key


def make_pseudonym(identity: str, key: bytes) -> str:
    """A name for a patient or series: the same for the same ID, and no way back without the key."""
    return hmac.new(key, identity.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:10]
