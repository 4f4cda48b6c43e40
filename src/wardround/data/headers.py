"""What the headers of some files say before any image is opened.

- A .seg.nrrd of 3D Slicer names its segments, in each file with values of its own: classes go by name.
- An .mhd or .nhdr has its values in a file beside it, which belongs to the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wardround.data.listing import Entry, Labels, Listing
from wardround.data.readers import metaimage, nrrd
from wardround.errors import DataError


def read_headers(listing: Listing) -> Listing:
    """The listing with label maps of cases, class names where it has none, and the files beside headers."""
    entries = tuple(read_entry(entry) for entry in listing.entries)
    return replace(listing, entries=entries, labels=listing.labels or join_segments(entries))


def read_entry(entry: Entry) -> Entry:
    data_files = tuple(found for path in entry.files if (found := find_data_file(path)) is not None)
    if data_files:
        entry = replace(entry, data_files=data_files)
    if entry.label is None or not entry.label.name.lower().endswith(nrrd.SEGMENTATION):
        return entry
    try:
        segments = nrrd.read_segments(entry.label)
    except (DataError, OSError):  # checking opens it, and says why
        return entry
    values: dict[str, tuple[int, ...]] = {}
    for segment in segments:
        values[segment.name] = (*values.get(segment.name, ()), segment.value)
    return replace(entry, labels=values) if values else entry


def find_data_file(path: Path) -> Path | None:
    """The file beside a header that holds its values; None where there is none, or it cannot be read."""
    reader = {".mhd": metaimage, ".nhdr": nrrd}.get(path.suffix.lower())
    try:
        found = path if reader is None else reader.read_header(path).data_file
    except (DataError, OSError):
        return None
    return None if found == path else found


def join_segments(entries: Sequence[Entry]) -> Labels:
    """Every name of a segment as a class, with the value of the first file that has it, or a free one."""
    joined: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        for name, values in (entry.labels or {}).items():
            taken = {value for own in joined.values() for value in own}
            if not any(name.casefold() == other.casefold() for other in joined):
                joined[name] = (max(taken) + 1,) if taken & set(values) else values
    return joined


def match_names(own: Labels, labels: Labels) -> Labels:
    """A case's own map with all classes of the federation in their order, whatever the capitals of its names;
    absent classes are empty."""
    folded = {name.casefold(): values for name, values in own.items()}
    return {name: tuple(own.get(name, folded.get(name.casefold(), ()))) for name in labels}


def names_no_class(entry: Entry, labels: Labels) -> bool:
    """Whether a label names its segments, and none as a class of the federation."""
    is_segmentation = entry.label is not None and entry.label.name.lower().endswith(nrrd.SEGMENTATION)
    return (
        is_segmentation and bool(entry.labels) and not any(match_names(entry.labels or {}, labels).values())
    )
