"""DICOM as an import step: every series becomes one NIfTI file, or a PNG a picture, in a centre's folder.

    <folder>/images/<patient>_<modality>_<series>.nii.gz | .png
    <folder>/labels/<patient>_<modality>_<series>.seg.nrrd   masks drawn on it (SEG, RTSTRUCT), by name
    <folder>/index.csv           stem, patient, modality; series (its description) for those who ask
    <folder>/.patient-key        the secret behind the pseudonyms; it stays at the hospital
    <folder>/.patient-map.csv    which file came from which patient and folder; it stays there too

Volumes (CT, MR, PET ...) are ordered by where their slices lie, and keep their geometry. Single pictures
(X-ray, ultrasound, endoscopy, fundus) become 8 or 16 bit PNG. Patient and series are pseudonyms: nothing
that is written repeats a name, an ID, a date, a folder or a free text of the source. Pixels stay as they are.
Structures keep their names where these are medical terms (`class_names`).

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wardround.data.dicom.masks import (
    KINDS,
    Mask,
    find_images,
    join_structures,
    read_mask,
    read_structures,
)
from wardround.data.dicom.patient_map import KEY, Origin, read_origins, write_origins
from wardround.data.dicom.volume import (
    Stack,
    is_multi_frame,
    is_volume,
    plan_stack,
    read_pixels,
    read_stack,
)
from wardround.data.readers import nrrd
from wardround.data.readers.common import (
    is_dicom,
    list_images,
    note_names,
    read_rows,
)
from wardround.errors import DataError
from wardround.files import file_name, write_bytes, write_private, write_text

PACKED = 1  # level of gzip: 6 takes five times as long on a CT, for 2 % smaller files
HEADS = ("stem", "patient", "modality")
DESCRIPTION = "series"  # the column of those who keep descriptions
BURNED_IN = (
    "BurnedInAnnotation is YES: these pictures have text in them, which may name somebody, and are left out; "
    "look at them, and import those that name nobody with --burned-in"
)
# DICOM PS3.3 C.7.3.1.1.1, those with pictures. Anything else in this field may be free text.
MODALITIES = re.compile(
    "BI|CR|CT|DG|DX|ES|GM|IO|IVOCT|IVUS|MG|MR|NM|OCT|OP|OPT|PT|PX|RF|SM|TG|US|XA|XC", re.ASCII
)
OTHER = "OT"
Row = tuple[str, str, str, str]
Watch = Callable[[int, int, str], None]  # number, of how many, name


@dataclass
class Series:
    """The files of one series, by the folder they lie in."""

    folder: Path
    uid: str
    files: list[Path] = field(default_factory=list)
    stack: Stack | None = None  # of a volume, once it is converted


@dataclass
class Imported:
    """What an import wrote, and what it left out and why; volumes: the series behind each, by stem."""

    written: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    volumes: dict[str, Series] = field(default_factory=dict)


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
    keep_descriptions: bool = False,
    structures: Mapping[str, str] | None = None,
    burned_in: bool = False,
    by_folders: bool = False,
    place: str | None = None,
    watch: Watch = lambda number, total, name: None,
) -> Imported:
    """Bring all series below `source` into the centre's folder `target`.

    keep_descriptions: list those of series, with whatever they reveal of the patient; structures: class names
    of some masks, by their names in the source; others are then left out; burned_in: also series that say
    they have text in their pictures; by_folders: for files that are thrown away after use, names follow the
    source's folders instead of pseudonyms, and masks are not read; place: where the files came from, for the
    map, if not from `source`. A series that cannot be used, or is there already, is noted and the others go
    on. Notes name the source's folders, for those who may see them.
    """
    pydicom = import_pydicom()
    if not source.is_dir():
        raise DataError(f"{source} is not a folder of DICOM files.")
    index = read_index(target / "index.csv")
    had_descriptions = any(row[3] for row in index.values())
    origins, result = read_origins(target), Imported()
    taken: set[str] = set()
    burned: list[str] = []
    masks: list[Path] = []
    every = list(find_series(source, pydicom, masks, result.notes))
    for number, found in enumerate(every, start=1):
        heads = [pydicom.dcmread(file, stop_before_pixels=True) for file in found.files]
        if says_burned_in(heads) and not (burned_in or by_folders):
            burned.append(str(found.folder.relative_to(source)))
            continue
        patient, modality, name = name_series(found, heads[0], read_secret(target / KEY), taken)
        name = make_folder_name(found, heads[0], source, taken) if by_folders else name
        for stem, content, ending in convert_series(found, name, heads, source, pydicom, result.notes):
            store(target / "images" / f"{stem}{ending}", content, result)
            if found.stack is not None:
                result.volumes[stem] = found
            facts = index.get(stem, (stem, patient, modality))[:3]  # what was listed may have been corrected
            index[stem] = (*facts, str(heads[0].get("SeriesDescription", "")))
            where = place or str(found.folder.resolve())
            origins[stem] = Origin(stem, facts[1], str(heads[0].get("PatientID", "")), found.uid, where)
        watch(number, len(every), name)
    note_names(result.notes, BURNED_IN, burned)
    if not index:
        raise DataError(" ".join([f"{source}: no DICOM series could be imported.", *result.notes[:3]]))
    if not by_folders:
        write_origins(target, origins)
        import_masks(masks, source, target, structures or {}, result)
    if had_descriptions and not keep_descriptions:
        result.notes.append(f"Descriptions of an earlier import are taken out of {target / 'index.csv'}.")
    write_index(target, index, keep_descriptions)
    return result


def says_burned_in(heads: Sequence[Any]) -> bool:
    return any(str(head.get("BurnedInAnnotation", "")).strip().upper() == "YES" for head in heads)


def name_series(series: Series, head: Any, key: bytes, taken: set[str]) -> tuple[str, str, str]:
    """The pseudonym of its patient, its modality, and the name of its file."""
    modality = read_modality(head)
    patient = "patient_" + make_pseudonym(str(head.get("PatientID", "")) or series.uid, key)
    return patient, modality, make_free_name(f"{patient}_{modality}_{make_pseudonym(series.uid, key)}", taken)


def import_pydicom() -> Any:
    try:
        import pydicom  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            "Reading DICOM needs pydicom. Install it with: pip install 'wardround[dicom]'"
        ) from None
    return pydicom


def find_series(source: Path, pydicom: Any, masks: list[Path], notes: list[str]) -> Iterator[Series]:
    """Every series below a folder, in the order of folders; links to folders are not followed.

    masks: filled with the files of segmentations and contours.
    """
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
                if str(head.get("Modality", "")).strip().upper() in KINDS:  # a mask must not pass for a scan
                    masks.append(file)
                    continue
                head.Rows  # noqa: B018 - reports have none
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
        if is_volume(heads):
            series.stack = plan_stack(heads)
            yield stem, convert_volume(series.stack, series.files, pydicom), ".nii.gz"
            return
        if any(is_multi_frame(head) for head in heads):
            raise DataError("it is multi-frame and no volume in one file; convert it with dcm2niix")
        for number, file in enumerate(series.files, start=1):
            name = stem if len(series.files) == 1 else f"{stem}_{number:04d}"
            yield name, convert_picture(pydicom.dcmread(file), pydicom), ".png"
    except Exception as error:  # a broken file may break the library in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        # The folder, so that one finds it, and no pseudonym beside it.
        which = f", series {heads[0].SeriesNumber}" if heads[0].get("SeriesNumber") else ""
        notes.append(f"{series.folder.relative_to(source)}{which}: {reason.rstrip('.')}; left out.")


def import_masks(
    paths: Sequence[Path], source: Path, target: Path, renamed: Mapping[str, str], result: Imported
) -> None:
    """A label for each volume that masks were drawn on; a mask that cannot be used is noted, and why."""
    pydicom = import_pydicom()
    found: dict[str, dict[str, Mask]] = {}
    stacks = {stem: series.stack for stem, series in result.volumes.items() if series.stack is not None}
    wanted = {name.strip().casefold(): own for name, own in renamed.items()}
    for path in paths:
        where = path.relative_to(source)
        try:
            mask = read_mask(path, pydicom)
            for stem in find_images(mask, stacks):
                own = read_structures(mask, stacks[stem], wanted, pydicom)
                result.notes += [f"{where}: {note}." for note in own.notes]
                twice = sorted(set(own.found) & set(found.get(stem, {})))
                note_names(result.notes, f"{where}: an earlier mask of this image has these already", twice)
                found[stem] = {**own.found, **found.get(stem, {})}
        except Exception as error:  # a broken file may break the library in any way
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            result.notes.append(f"{where}: {reason.rstrip('.')}; left out.")
    for stem, structures in found.items():
        if structures:
            label, names, overlaps = join_structures(structures)
            result.notes += [f"{stem}: {note}." for note in overlaps]
            content = nrrd.encode_segments(label, stacks[stem].affine, names, nrrd.COLOURS)
            store(target / "labels" / f"{stem}{nrrd.SEGMENTATION}", content, result)


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


def convert_volume(stack: Stack, files: Sequence[Path], pydicom: Any) -> bytes:
    """A stack of slices as compressed NIfTI with its geometry."""
    import nibabel

    image = nibabel.Nifti1Image(read_stack(stack, files, pydicom), stack.affine)  # type: ignore[no-untyped-call]
    image.header.set_xyzt_units("mm")  # type: ignore[no-untyped-call]
    return gzip.compress(image.to_bytes(), PACKED, mtime=0)


def convert_picture(data: Any, pydicom: Any) -> bytes:
    """One picture as PNG: colour in 8 bit, grey in 8 bit where it fits, else 16; white bones stay white."""
    from PIL import Image

    values = read_pixels(data, pydicom)
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
        write_private(path, f"{secrets.token_hex(16)}\n".encode())
    key = path.read_bytes().strip()
    if not key:  # pseudonyms without a secret could be found by trying out IDs
        raise DataError(f"{path} is empty; restore it, or remove it to give all patients new pseudonyms.")
    return key


def make_pseudonym(identity: str, key: bytes) -> str:
    """A name for a patient or series: the same for the same ID, and no way back without the key."""
    return hmac.new(key, identity.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:10]
