"""Readers: one module for each folder layout, and for the image files in it.

    detect(path)                 which layout a folder has, and why
    READERS[name].read(path)     its cases, as a Listing
    image_files                  one scan or label

A new layout is a module with `recognise` and `read`, and a line in READERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wardround.data.listing import Listing
from wardround.data.readers import beside, bids, centres, msd, nnunet, table
from wardround.data.readers.common import holds_dicom, join_names, list_entries, list_folders
from wardround.errors import DataError
from wardround.plugins import Registry


@dataclass(frozen=True)
class Reader:
    """One layout.

    about: in a few words; recognise: a sentence why a folder is of this layout, None if it is not;
    read: its cases, under the client's name if one is given and the layout has no centres of its own.
    """

    about: str
    recognise: Callable[[Path], str | None]
    read: Callable[[Path, str | None], Listing]


# In the order they are tried: the one that asks for most comes first.
_LAYOUTS = {
    "nnunet": (nnunet, "nnU-Net raw data: dataset.json, imagesTr/<case>_0000.nii.gz"),
    "msd": (msd, "Medical Segmentation Decathlon: dataset.json, imagesTr, labelsTr"),
    "bids": (bids, "BIDS: sub-*/anat, masks beside or under derivatives/"),
    "centres": (centres, "one folder a centre, with images/ and labels/"),
    "table": (table, "a CSV or JSON list of images and labels"),
    "beside": (beside, "labels beside their images, as p01/p01_t1 and p01/p01_seg"),
}
_READERS = {name: Reader(about, own.recognise, own.read) for name, (own, about) in _LAYOUTS.items()}


def accept_reader(name: str, found: object) -> Reader | None:
    """A reader of the user's."""
    return found if isinstance(found, Reader) else None


READERS = Registry("reader", _READERS, accept_reader, "a wardround.data.readers.Reader", has_command=False)


def detect(path: Path) -> tuple[str, str]:
    """The layout of a folder or list, and a sentence that says why."""
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    if path.name == "dataset.json":
        path = path.parent
    for name, reader in READERS.items():
        why = reader.recognise(path)
        if why is not None:
            return name, f"{path}: {why}."
    raise DataError(explain_unknown(path))


def explain_unknown(path: Path) -> str:
    """Why no layout fits, and what to do about it."""
    if not path.is_dir():
        return f"{path} is not a folder, nor a list of cases (.csv, .json)."
    readers = READERS.values()
    inner = [c.name for c in list_folders(path, []) if any(reader.recognise(c) for reader in readers)]
    if inner:
        return f"{path} is not a data set but holds some: {join_names(inner)}. Give these folders instead."
    if holds_dicom(path):
        return (
            f"{path} holds DICOM files. Bring them into a centre's folder first: wardround data import-dicom"
        )
    unclear = beside.explain_unknown_labels(path)
    if unclear is not None:
        return unclear
    seen = [entry.name for entry in list_entries(path, [])]
    layouts = "; ".join(reader.about for reader in readers)
    held = join_names(seen) or "nothing"
    return f"{path} has none of the layouts wardround knows ({layouts}). It holds: {held}."
