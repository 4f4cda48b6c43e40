"""A look into a few files of every client: channels, sizes, spacings, label values; and the grid to propose.

Only some files are opened, so a rare label value may be missed; `wardround data check` opens all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wardround.data.listing import Entry, Listing
from wardround.data.readers.image_files import PICTURES, Volume, read_image, read_label
from wardround.errors import DataError
from wardround.text import format_size

NUM_IMAGES = 60  # opened in all, shared among the clients, at least FEWEST of each
NUM_LABELS = 120
FEWEST = 3
MOST_CLASSES = 32  # more values than this are the greys of a picture
MULTIPLE = 16  # four halvings of a U-Net
LARGEST_PICTURE = 512
LARGEST_VOLUME = 128**3  # voxels; above it, patches

Grid = tuple[tuple[int, ...] | None, tuple[float, ...] | None, str]


@dataclass(frozen=True)
class Look:
    """What a few files showed.

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


def look_into(listing: Listing, watch: Callable[[str], None]) -> Look:
    """Open a few files of every client; what cannot be opened is noted, and all of it is an error."""
    notes: list[str] = []
    images: list[Volume] = []
    values: set[int] = set()
    share = 1 / max(1, len(listing.clients))
    for client in listing.clients:
        watch(f"looking at {client}")
        labelled = [entry for entry in listing.of(client) if entry.label is not None]
        for entry in spread(labelled or listing.of(client), max(FEWEST, int(NUM_IMAGES * share))):
            images += tried(lambda entry=entry: read_image(entry.images), notes)  # type: ignore[misc]
        for entry in spread(labelled, max(FEWEST, int(NUM_LABELS * share))):
            for label in tried(lambda entry=entry: read_label(entry.label), notes):  # type: ignore[misc]
                own = set(np.unique(label.data).tolist())
                if len(own) > MOST_CLASSES:
                    notes.append(f"{entry.label} holds {len(own)} values: is this an image, not a label?")
                else:
                    values |= own
    if not images:
        raise DataError(" ".join(["None of the images that were tried can be read.", *notes[:2]]))
    first = listing.entries[0].images[0].name.lower()
    return summary(images, sorted(values), first.endswith(PICTURES), notes)


def spread(entries: Sequence[Entry], count: int) -> list[Entry]:
    """Some cases evenly from first to last: neighbours in a folder are often alike."""
    if len(entries) <= count:
        return list(entries)
    return [entries[place * len(entries) // count] for place in range(count)]


def tried(opened: Callable[[], Volume], notes: list[str]) -> list[Volume]:
    try:
        return [opened()]
    except DataError as error:
        notes.append(str(error))
        return []


def summary(images: Sequence[Volume], values: Sequence[int], pictures: bool, notes: Sequence[str]) -> Look:
    dimensions = Counter(image.data.ndim - 1 for image in images).most_common(1)[0][0]
    alike = [image for image in images if image.data.ndim - 1 == dimensions]
    grids = [oriented(image) for image in alike]
    finite = [image.data[np.isfinite(image.data)] for image in alike]
    return Look(
        channels=Counter(len(image.data) for image in alike).most_common(1)[0][0],
        dimensions=dimensions,
        shapes=tuple(shape for shape, _ in grids),
        spacings=tuple(spacing for _, spacing in grids),
        values=tuple(int(value) for value in values),
        low=float(np.median([part.min() for part in finite if part.size] or [0.0])),
        pictures=pictures,
        notes=tuple(notes),
    )


def oriented(image: Volume) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Shape and spacing with the axes in the order they have after orientation to RAS."""
    shape = tuple(image.data.shape[1:])
    spacing = tuple(float(side) for side in image.spacing)
    if image.affine is None or len(shape) != 3:
        return shape, spacing
    import nibabel

    places = nibabel.io_orientation(image.affine)[:, 0]  # type: ignore[no-untyped-call]
    if np.isnan(places).any():
        return shape, spacing
    order = np.argsort(places)
    return tuple(shape[axis] for axis in order), tuple(spacing[axis] for axis in order)


def proposed_grid(seen: Look) -> Grid:
    """Size, spacing and the sentence why."""
    middle = np.median(np.asarray(seen.shapes), axis=0)
    said = format_size(round(side) for side in middle)
    if seen.dimensions == 2:
        return picture_grid(seen, said)
    spacings = np.asarray(seen.spacings)
    if not np.allclose(spacings, 1.0, atol=1e-3):
        spacing = tuple(round(float(side), 4) for side in np.median(spacings, axis=0))
        return (
            None,
            spacing,
            f"Volumes are resampled to their median spacing, {format_size(spacing)} mm; "
            "training takes patches.",
        )
    if np.prod(middle) > LARGEST_VOLUME:
        return (
            None,
            (1.0, 1.0, 1.0),
            f"Volumes of {said} voxels are large: they keep 1 mm and training takes patches.",
        )
    size = tuple(to_multiple(side) for side in middle)
    return (
        size,
        None,
        f"Volumes have unit spacing and a median size of {said}: all become {format_size(size)}.",
    )


def picture_grid(seen: Look, said: str) -> Grid:
    """One shape is kept; where shapes differ, a square of the median short side, as is usual for pictures."""
    shapes = np.asarray(seen.shapes)
    sides = shapes[0] if len(set(seen.shapes)) == 1 else np.repeat(np.median(shapes.min(axis=1)), 2)
    shrink = min(1.0, LARGEST_PICTURE / float(max(sides)))
    size = tuple(to_multiple(side * shrink) for side in sides)
    return size, None, f"Pictures have a median size of {said}: all become {format_size(size)}."


def to_multiple(side: float) -> int:
    """The nearest multiple of 16, at least 16; halves go up."""
    return max(MULTIPLE, int(side / MULTIPLE + 0.5) * MULTIPLE)


def is_ct(seen: Look, channels: Sequence[str]) -> bool:
    """Air in Hounsfield units, or a channel that is called CT."""
    return seen.channels == 1 and (seen.low <= -500 or any(name.strip().upper() == "CT" for name in channels))


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
