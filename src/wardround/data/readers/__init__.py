"""Readers: one small file a folder layout, recognised by looking.

    detect(path)            which layout it is, and why
    read(source, base)      its cases, as a Listing

A new layout is a file with `recognise` and `read`, and a line in READERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wardround.data.listing import Entry, Listing
from wardround.data.readers import bids, centres, msd, nnunet, table
from wardround.data.readers.common import checked_name, entries_of, folders_in, named
from wardround.errors import ConfigError, DataError

if TYPE_CHECKING:
    from wardround.data.federation_file import Source


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
READERS = {
    "nnunet": Reader(
        "nnU-Net raw data: dataset.json, imagesTr/<case>_0000.nii.gz", nnunet.recognise, nnunet.read
    ),
    "msd": Reader(
        "Medical Segmentation Decathlon: dataset.json, imagesTr, labelsTr", msd.recognise, msd.read
    ),
    "bids": Reader("BIDS: sub-*/anat, masks beside or under derivatives/", bids.recognise, bids.read),
    "centres": Reader("one folder a centre, with images/ and labels/", centres.recognise, centres.read),
    "table": Reader("a CSV or JSON list of images and labels", table.recognise, table.read),
}


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
    raise DataError(unknown(path))


def unknown(path: Path) -> str:
    """Why nothing fits, and what to do, for the folders people really give."""
    if not path.is_dir():
        return f"{path} is not a folder, nor a list of cases (.csv, .json)."
    inner = [c.name for c in folders_in(path, []) if any(reader.recognise(c) for reader in READERS.values())]
    if inner:
        return f"{path} is not a data set but holds some: {named(inner)}. Give these folders instead."
    if holds_dicom(path):
        return (
            f"{path} holds DICOM files. Bring them into a centre's folder first: wardround data import-dicom"
        )
    seen = [entry.name for entry in entries_of(path, [])]
    layouts = "; ".join(reader.about for reader in READERS.values())
    return (
        f"{path} has none of the layouts wardround knows ({layouts}). It holds: {named(seen) or 'nothing'}."
    )


def holds_dicom(path: Path) -> bool:
    """Whether a file here, or one folder down, carries DICOM's mark."""
    files = [path / entry.name for entry in entries_of(path, [])]
    files += [child / e.name for child in folders_in(path, [])[:5] for e in entries_of(child, [])[:5]]
    return any(is_dicom(file) for file in files[:200])


def is_dicom(file: Path) -> bool:
    """DICM after 128 bytes, as the standard says."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(132)[128:] == b"DICM"
    except OSError:
        return False


def read(source: Source, base: Path) -> Listing:
    """The cases of one source, its folder relative to `base`; clients as the source asks for them."""
    path = base / source.path
    of_preset = source.reader.startswith("preset:")
    if source.reader != "auto" and source.reader not in READERS and not of_preset:
        from wardround.text import suggest

        raise ConfigError(
            f"sources: reader is '{source.reader}'.{suggest(source.reader, READERS)} "
            f"There are: auto, {', '.join(READERS)}."
        )
    if not path.exists():
        raise DataError(f"{path} does not exist; correct its path under sources.")
    name = detect(path)[0] if source.reader == "auto" else source.reader
    folder = path.parent if path.name == "dataset.json" and name in ("msd", "nnunet") else path
    if of_preset:
        from wardround.data import datasets

        listing = datasets.read(name.removeprefix("preset:"), folder, source.client)
    else:
        listing = READERS[name].read(folder, source.client)
    if not listing.entries:
        raise DataError(" ".join([f"{path} has no cases.", *listing.notes]))
    if source.column is not None:
        listing = by_column(listing, source.column, path)
    if source.client is not None:
        listing = under_one_name(listing, checked_name(source.client, str(path)))
    ordered = tuple(sorted(listing.entries, key=lambda entry: (entry.client, entry.name)))
    return replace(listing, entries=ordered)


def by_column(listing: Listing, column: str, path: Path) -> Listing:
    """Clients named by a column of the list."""
    head = column.strip().lower()
    without = [entry.name for entry in listing.entries if not entry.columns.get(head)]
    if without:
        from wardround.text import suggest

        known = sorted({name for entry in listing.entries for name in entry.columns})
        if head not in known:
            raise ConfigError(
                f"{path} has no column '{column}'.{suggest(head, known)} It has: "
                f"{named(known, 20) or 'none'}."
            )
        raise DataError(f"{path}: column '{column}' is empty for {named(without)}; fill it in.")
    named_entries = tuple(
        replace(entry, client=checked_name(entry.columns[head], f"{path}, column '{column}'"))
        for entry in listing.entries
    )
    return replace(listing, entries=told_apart(named_entries, listing))


def under_one_name(listing: Listing, client: str) -> Listing:
    renamed = tuple(replace(entry, client=client) for entry in listing.entries)
    return replace(listing, entries=told_apart(renamed, listing))


def told_apart(entries: tuple[Entry, ...], before: Listing) -> tuple[Entry, ...]:
    """Cases of one name from two centres keep apart by the centre's name in front."""
    if len({(entry.client, entry.name) for entry in entries}) == len(entries):
        return entries
    return tuple(
        replace(entry, name=f"{old.client}_{entry.name}", group=f"{old.client}_{entry.group}")
        for entry, old in zip(entries, before.entries, strict=True)
    )
