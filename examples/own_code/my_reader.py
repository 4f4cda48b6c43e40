"""A reader of one's own: one folder a patient, `scan.nii.gz` beside `mask.nii.gz`."""

from __future__ import annotations

from pathlib import Path

from wardround.data.listing import Entry, Listing
from wardround.data.readers import Reader


def recognise(path: Path) -> str | None:
    """A sentence why a folder has this layout, None if it has not."""
    found = sorted(path.glob("*/scan.nii.gz"))
    return f"{len(found)} folders with scan.nii.gz" if found else None


def read(path: Path, client: str | None) -> Listing:
    """Its cases; nothing is opened yet."""
    entries = [
        Entry(
            client=client or path.name,
            name=folder.name,
            images=(folder / "scan.nii.gz",),
            label=folder / "mask.nii.gz",
            group=folder.name,  # cases of one patient are never divided between splits
        )
        for folder in sorted(path.iterdir())
        if (folder / "scan.nii.gz").exists()
    ]
    return Listing(reader="my_reader", entries=tuple(entries))


READER = Reader("one folder a patient: scan.nii.gz, mask.nii.gz", recognise, read)
