"""Inspection: a few files of every client, opened for `data init`.

A rare label value may be missed; `wardround data check` opens all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wardround.data.checking.facts import CaseFacts, measure_label
from wardround.data.listing import Entry, Listing
from wardround.data.preparing.grid import reorient_grid
from wardround.data.proposing.codings import choose_evenly
from wardround.data.readers.image_files import PICTURES, Volume, read_image
from wardround.data.readers.label_files import read_case_label
from wardround.errors import DataError

NUM_IMAGES = 60  # opened in all, shared among the clients, at least FEWEST of each
NUM_LABELS = 120
FEWEST = 3
MOST_CLASSES = 32  # a label with more values is an image


@dataclass(frozen=True)
class Inspection:
    """What a few files of every client contain.

    channels, dimensions: of most images; shapes and spacings: of every image opened with as many
    dimensions, in the orientation they will be prepared in; has_spacing: whether they say millimetres;
    labelled: cases and the facts of their labels; low: the smallest intensity; pictures: PNG, JPEG and the
    like; notes: files that could not be opened.
    """

    channels: int
    dimensions: int
    shapes: tuple[tuple[int, ...], ...]
    spacings: tuple[tuple[float, ...], ...]
    has_spacing: bool
    labelled: list[tuple[Entry, CaseFacts]]
    low: float
    pictures: bool
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> list[int]:
        """All values of the labels, sorted."""
        return sorted({value for _, facts in self.labelled if facts.label for value in facts.label.values})


def inspect_files(listing: Listing, watch: Callable[[str], None]) -> Inspection:
    """Open a few files of every client; note those that cannot be read, and raise if no image can."""
    notes: list[str] = []
    images: list[Volume] = []
    opened: list[tuple[Entry, CaseFacts]] = []
    share = 1 / max(1, len(listing.clients))
    for client in listing.clients:
        watch(f"inspecting {client}")
        labelled = [entry for entry in listing.of(client) if entry.label is not None]
        for entry in choose_evenly(labelled or listing.of(client), max(FEWEST, int(NUM_IMAGES * share))):
            images += try_reading(lambda entry=entry: read_image(entry.images), notes)  # type: ignore[misc]
        for entry in choose_evenly(labelled, max(FEWEST, int(NUM_LABELS * share))):
            for label in try_reading(lambda entry=entry: read_case_label(entry), notes):  # type: ignore[misc]
                facts = measure_label(label)
                if facts.num_values > MOST_CLASSES:
                    held = f"{entry.label} holds {facts.num_values} values"
                    notes.append(f"{held}: is this an image, not a label?")
                else:
                    opened.append((entry, CaseFacts(label=facts)))
    if not images:
        raise DataError(" ".join(["None of the inspected images can be read.", *notes[:2]]))
    first = listing.entries[0].images[0].name.lower()
    return summarise(images, opened, first.endswith(PICTURES), notes)


def try_reading(read: Callable[[], Volume | None], notes: list[str]) -> list[Volume]:
    try:
        found = read()
        return [] if found is None else [found]
    except DataError as error:
        notes.append(str(error))
        return []


def summarise(
    images: Sequence[Volume],
    labelled: list[tuple[Entry, CaseFacts]],
    pictures: bool,
    notes: Sequence[str],
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
        has_spacing=all(image.affine is not None for image in alike),
        labelled=labelled,
        low=float(np.median([part.min() for part in finite if part.size] or [0.0])),
        pictures=pictures,
        notes=tuple(notes),
    )
