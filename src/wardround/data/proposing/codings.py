"""What colours of masks, and names of mask files, mean: maps that `data init` proposes for a source.

code_colours(sources, listings, said)  a value for each colour that masks hold
code_masks(sources, listings, said)    a value for each class that has mask files of its own
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from wardround.data.federation_file import Source
from wardround.data.listing import Entry, Listing
from wardround.data.readers.colours import name_colour
from wardround.data.readers.common import join_names
from wardround.data.readers.image_files import JPEG, PICTURES, is_coloured, read_colours
from wardround.data.readers.label_files import read_masks
from wardround.data.sources import read_source
from wardround.errors import DataError

MOST_COLOURS = 32  # a mask with more has blurred edges, or is a photograph
NUM_COLOURED = 40  # masks of a client that are opened for their colours
NUM_MASKED = 3  # cases of a client whose masks are opened for overlaps
BLACK = 0

Pairs = tuple[list[Source], list[Listing]]


def code_colours(sources: list[Source], listings: list[Listing], said: list[str]) -> Pairs:
    """Sources whose masks are coloured with a value for every colour, one map for all of them."""
    coloured = [find_coloured(listing) for listing in listings]
    if not any(coloured):
        return sources, listings
    counts: Counter[int] = Counter()
    files: Counter[int] = Counter()
    blurred = []
    for path in (path for labels in coloured for path in labels):
        own = count_colours(path)
        if len(own) > MOST_COLOURS:
            blurred.append(
                f"{path} holds {len(own)} colours, but a mask has one a class. If its edges are blurred, "
                "save it as PNG without smoothing; if it is a photograph, it is no mask."
            )
        else:
            counts += own
            files.update(own.keys())
    number = sum(map(len, coloured)) - len(blurred)
    if not number:
        raise DataError(blurred[0])
    said += blurred[:1]
    background = BLACK if 2 * files[BLACK] >= number else counts.most_common(1)[0][0]
    drawn = [colour for colour, _ in counts.most_common() if colour != background]
    colours = {name_colour(background): 0, **{name_colour(c): n for n, c in enumerate(drawn, start=1)}}
    shares = {colour: 100 * count / counts.total() for colour, count in counts.items()}
    shown = (f"{name_colour(c)} class_{n} ({shares[c]:.2g} %)" for n, c in enumerate(drawn, start=1))
    said.append(
        f"Masks are coloured; {number} were opened. {name_colour(background)} ({shares[background]:.2g} % of "
        f"pixels) is taken for background: a guess. Others are a class each: {join_names(shown, 12)}. "
        "Correct the values under colours of the sources; 0 is background."
    )
    plain = [own.clients[0] for own, labels in zip(listings, coloured, strict=True) if not labels]
    if plain:
        said.append(
            f"Masks of {join_names(plain)} hold numbers, those of the others colours. Number 1 is taken for "
            "class_1 and so on: a guess, correct it under colours."
        )
    return reread(
        [
            s.model_copy(update={"colours": colours}) if own else s
            for s, own in zip(sources, coloured, strict=True)
        ]
    )


def find_coloured(listing: Listing) -> list[Path]:
    """The masks that are opened for their colours, if one of them is coloured."""
    labels = [
        entry.label
        for client in listing.clients
        for entry in choose_evenly([e for e in listing.of(client) if is_picture(e)], NUM_COLOURED)
        if entry.label is not None
    ]
    found = []
    for path in labels:
        try:
            found.append(is_coloured(path))
        except DataError:  # whoever inspects it next says why
            found.append(False)
    return labels if any(found) else []


def is_picture(entry: Entry) -> bool:
    """Whether its label may be coloured; JPEG blurs colours, and is refused where it is read."""
    name = "" if entry.label is None or entry.masks else entry.label.name.lower()
    return name.endswith(PICTURES) and not name.endswith(JPEG)


def count_colours(path: Path) -> Counter[int]:
    try:
        shown, _ = read_colours(path)
    except DataError:
        return Counter()
    values, counts = np.unique(shown, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def code_masks(sources: list[Source], listings: list[Listing], said: list[str]) -> Pairs:
    """Sources whose classes have mask files of their own with a value for each, the same in all of them."""
    masked = [any(entry.masks for entry in listing.entries) for listing in listings]
    if not any(masked):
        return sources, listings
    names = sorted({name for own in listings for entry in own.entries for name in entry.masks})
    sizes: Counter[str] = Counter()
    shared: Counter[tuple[str, str]] = Counter()
    for entry in (e for own in listings for e in choose_masked(own)):
        measure_masks(entry, sizes, shared)
    update: dict[str, object] = {}
    if shared:
        names.sort(key=lambda name: -sizes[name])
        update["overlap"] = "later"
        told = (f"{one} and {other} ({count} voxels)" for (one, other), count in shared.most_common())
        said.append(
            f"Masks overlap: {join_names(told, 4)}. The smaller is painted over the larger (overlap: later, "
            f"in the order {', '.join(names)}): a guess. If they are drawings of one structure by several "
            "people, keep one of them."
        )
    update["masks"] = {name: number for number, name in enumerate(names, start=1)}
    return reread([s.model_copy(update=update) if own else s for s, own in zip(sources, masked, strict=True)])


def choose_masked(listing: Listing) -> Iterator[Entry]:
    for client in listing.clients:
        yield from choose_evenly([entry for entry in listing.of(client) if entry.masks], NUM_MASKED)


def measure_masks(entry: Entry, sizes: Counter[str], shared: Counter[tuple[str, str]]) -> None:
    """Add the voxels of each mask of a case, and those that two have in common."""
    try:
        masks = {name: mask.data != 0 for name, mask in read_masks(entry).items()}
    except DataError:  # whoever inspects it next says why
        return
    sizes.update({name: int(mask.sum()) for name, mask in masks.items()})
    for one, other in combinations(sorted(masks), 2):
        count = int((masks[one] & masks[other]).sum())
        if count:
            shared[one, other] += count


def choose_evenly(entries: Sequence[Entry], count: int) -> list[Entry]:
    """Some cases, evenly from first to last: neighbours in a folder are often alike."""
    if len(entries) <= count:
        return list(entries)
    return [entries[place * len(entries) // count] for place in range(count)]


def reread(sources: list[Source]) -> Pairs:
    return sources, [read_source(source, Path()) for source in sources]
