"""Inspection: a few files of every client, opened for `data init`.

A rare label value may be missed; `wardround data check` opens all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

    channels: most that a client's images have, of pictures what most have; counts: what those of each client
    have; is_named: whether images have as many as their layout names; dimensions: of most images; shapes and
    spacings: of every image opened with as many dimensions, in the orientation they will be prepared in;
    has_spacing: whether they say millimetres; labelled: cases and the facts of their labels; low: the
    smallest intensity; pictures: PNG, JPEG and the like; notes: files that could not be opened.
    """

    channels: int
    counts: Mapping[str, int]
    is_named: bool
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
    images: list[tuple[Entry, Volume]] = []
    opened: list[tuple[Entry, CaseFacts]] = []
    share = 1 / max(1, len(listing.clients))
    for client in listing.clients:
        watch(f"inspecting {client}")
        labelled = [entry for entry in listing.of(client) if entry.label is not None]
        for entry in choose_evenly(labelled or listing.of(client), max(FEWEST, int(NUM_IMAGES * share))):
            read = try_reading(lambda entry=entry: read_image(entry.images), notes)  # type: ignore[misc]
            images += [(entry, image) for image in read]
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
    return summarise(images, len(listing.channels), opened, first.endswith(PICTURES), notes)


def try_reading(read: Callable[[], Volume | None], notes: list[str]) -> list[Volume]:
    try:
        found = read()
        return [] if found is None else [found]
    except DataError as error:
        notes.append(str(error))
        return []


def summarise(
    images: Sequence[tuple[Entry, Volume]],
    num_named: int,
    labelled: list[tuple[Entry, CaseFacts]],
    pictures: bool,
    notes: Sequence[str],
) -> Inspection:
    dimensions = Counter(image.data.ndim - 1 for _, image in images).most_common(1)[0][0]
    opened = [(entry, image) for entry, image in images if image.data.ndim - 1 == dimensions]
    alike = [image for _, image in opened]
    numbers: dict[str, Counter[int]] = {}
    for entry, image in opened:
        numbers.setdefault(entry.client, Counter())[image.channels] += 1
    counts = {client: own.most_common(1)[0][0] for client, own in numbers.items()}
    named = Counter(image.channels == (len(entry.channels) or num_named) for entry, image in opened)
    grids = [reorient_grid(image.spatial, image.spacing, image.affine) for image in alike]
    finite = [image.data[np.isfinite(image.data)] for image in alike]
    return Inspection(
        channels=sum(numbers.values(), Counter()).most_common(1)[0][0] if pictures else max(counts.values()),
        counts=counts,
        is_named=named[True] > named[False],
        dimensions=dimensions,
        shapes=tuple(shape for shape, _ in grids),
        spacings=tuple(spacing for _, spacing in grids),
        has_spacing=all(image.affine is not None for image in alike),
        labelled=labelled,
        low=float(np.median([part.min() for part in finite if part.size] or [0.0])),
        pictures=pictures,
        notes=tuple(notes),
    )
