"""Inspection: channels, sizes, spacings and label values of a few files; and the grid to propose.

Only some files are opened, so a rare label value may be missed; `wardround data check` opens all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wardround.data.listing import Entry, Listing
from wardround.data.preparing.grid import reorient_grid, round_to_multiple
from wardround.data.readers.image_files import PICTURES, Volume, read_image, read_label
from wardround.errors import DataError
from wardround.text import format_size

NUM_IMAGES = 60  # opened in all, shared among the clients, at least FEWEST of each
NUM_LABELS = 120
FEWEST = 3
MOST_CLASSES = 32  # a label with more values is an image
LARGEST_PICTURE = 512
LARGEST_VOLUME = 128**3  # voxels; above it, patches

GridProposal = tuple[tuple[int, ...] | None, tuple[float, ...] | None, str]


@dataclass(frozen=True)
class Inspection:
    """What a few files of every client contain.

    channels, dimensions: of most images; shapes and spacings: of every image opened with as many
    dimensions, in the orientation they will be prepared in; values: in the labels, sorted; low: the smallest
    intensity; pictures: PNG, JPEG and the like; notes: files that could not be opened.
    """

    channels: int
    dimensions: int
    shapes: tuple[tuple[int, ...], ...]
    spacings: tuple[tuple[float, ...], ...]
    values: tuple[int, ...]
    low: float
    pictures: bool
    notes: tuple[str, ...] = ()


def inspect_files(listing: Listing, watch: Callable[[str], None]) -> Inspection:
    """Open a few files of every client; note those that cannot be read, and raise if no image can."""
    notes: list[str] = []
    images: list[Volume] = []
    values: set[int] = set()
    share = 1 / max(1, len(listing.clients))
    for client in listing.clients:
        watch(f"inspecting {client}")
        labelled = [entry for entry in listing.of(client) if entry.label is not None]
        for entry in choose_evenly(labelled or listing.of(client), max(FEWEST, int(NUM_IMAGES * share))):
            images += try_reading(lambda entry=entry: read_image(entry.images), notes)  # type: ignore[misc]
        for entry in choose_evenly(labelled, max(FEWEST, int(NUM_LABELS * share))):
            for label in try_reading(lambda entry=entry: read_label(entry.label), notes):  # type: ignore[misc]
                own = set(np.unique(label.data).tolist())
                if len(own) > MOST_CLASSES:
                    notes.append(f"{entry.label} holds {len(own)} values: is this an image, not a label?")
                else:
                    values |= own
    if not images:
        raise DataError(" ".join(["None of the inspected images can be read.", *notes[:2]]))
    first = listing.entries[0].images[0].name.lower()
    return summarise(images, sorted(values), first.endswith(PICTURES), notes)


def choose_evenly(entries: Sequence[Entry], count: int) -> list[Entry]:
    """Some cases, evenly from first to last: neighbours in a folder are often alike."""
    if len(entries) <= count:
        return list(entries)
    return [entries[place * len(entries) // count] for place in range(count)]


def try_reading(read: Callable[[], Volume], notes: list[str]) -> list[Volume]:
    try:
        return [read()]
    except DataError as error:
        notes.append(str(error))
        return []


def summarise(
    images: Sequence[Volume], values: Sequence[int], pictures: bool, notes: Sequence[str]
) -> Inspection:
    dimensions = Counter(image.data.ndim - 1 for image in images).most_common(1)[0][0]
    alike = [image for image in images if image.data.ndim - 1 == dimensions]
    grids = [reorient_grid(image.spatial, image.spacing, image.affine) for image in alike]
    finite = [image.data[np.isfinite(image.data)] for image in alike]
    return Inspection(
        channels=Counter(len(image.data) for image in alike).most_common(1)[0][0],
        dimensions=dimensions,
        shapes=tuple(shape for shape, _ in grids),
        spacings=tuple(spacing for _, spacing in grids),
        values=tuple(int(value) for value in values),
        low=float(np.median([part.min() for part in finite if part.size] or [0.0])),
        pictures=pictures,
        notes=tuple(notes),
    )


def propose_grid(found: Inspection) -> GridProposal:
    """Size, spacing, and a sentence that says why."""
    middle = np.median(np.asarray(found.shapes), axis=0)
    median = format_size(round(side) for side in middle)
    if found.dimensions == 2:
        return propose_picture_grid(found, median)
    spacings = np.asarray(found.spacings)
    if not np.allclose(spacings, 1.0, atol=1e-3):
        spacing = tuple(round(float(side), 4) for side in np.median(spacings, axis=0))
        how = f"resampled to their median spacing, {format_size(spacing)} mm"
        return None, spacing, f"Volumes are {how}; training takes patches."
    if np.prod(middle) > LARGEST_VOLUME:
        why = f"Volumes of {median} voxels are large: they keep 1 mm and training takes patches."
        return None, (1.0, 1.0, 1.0), why
    size = tuple(round_to_multiple(side) for side in middle)
    why = f"Volumes have unit spacing and a median size of {median}: all become {format_size(size)}."
    return size, None, why


def propose_picture_grid(found: Inspection, median: str) -> GridProposal:
    """Pictures of one shape keep it; otherwise a square of the median short side."""
    shapes = np.asarray(found.shapes)
    sides = shapes[0] if len(set(found.shapes)) == 1 else np.repeat(np.median(shapes.min(axis=1)), 2)
    shrink = min(1.0, LARGEST_PICTURE / float(max(sides)))
    size = tuple(round_to_multiple(side * shrink) for side in sides)
    return size, None, f"Pictures have a median size of {median}: all become {format_size(size)}."


def is_ct(found: Inspection, channels: Sequence[str]) -> bool:
    """Whether values reach air in Hounsfield units, or the channel is called CT."""
    is_named = any(name.strip().upper() == "CT" for name in channels)
    return found.channels == 1 and (found.low <= -500 or is_named)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
