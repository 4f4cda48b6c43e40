"""Positions: how classes lie to each other along each axis, and in how many patients.

Of a left and a right kidney, mirror images along that axis teach that they are the same. Which pairs lie so
is told as counts of patients, each at least BEHIND of them or zero. Centres no further apart than a voxel, or
than a tenth of the box around both classes, are level: the cup of an optic disc lies in its middle, a little
to this side or that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wardround.data.fingerprint.histogram import Count, FingerprintModel, Name

LEVEL = 0.1  # of the box around both classes
MOST_PAIRS = 500  # all pairs of 32 classes
ENOUGH = 5  # times the patients that can be hidden in a count: so that they are a minority
Patients = Annotated[int, Field(ge=0, le=10**9)]
AlongAxes = Annotated[tuple[Patients, ...], Field(min_length=2, max_length=3)]


class PairPosition(FingerprintModel):
    """Two classes. patients: who have both in a case; before, after: along each axis, those in whom the
    first class lies before the second, or after it. In the others the two are level, or it varies.
    """

    classes: tuple[Name, Name]
    patients: Count
    before: AlongAxes
    after: AlongAxes

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        first, second = self.classes
        most = max(map(sum, zip(self.before, self.after, strict=False)))
        if first == second or len(self.before) != len(self.after) or most > self.patients:
            raise ValueError("these are not positions of two classes")
        return self

    def count_patients(self) -> list[int]:
        """Every number of patients that it tells."""
        level = [self.patients - sum(pair) for pair in zip(self.before, self.after, strict=True)]
        return [self.patients, *(count for count in (*self.before, *self.after, *level) if count)]

    def swap(self) -> PairPosition:
        """The same, of the second class to the first."""
        first, second = self.classes
        return PairPosition(
            classes=(second, first), patients=self.patients, before=self.after, after=self.before
        )


class Span(NamedTuple):
    """A class along one axis, in voxels: its first, its last (excluded), and the middle of all its voxels."""

    start: float
    stop: float
    centre: float


Spans = Mapping[str, tuple[Span, ...]]  # class -> along each axis


def find_spans(label: NDArray[np.generic], classes: Mapping[str, Sequence[int]]) -> Spans:
    """Where each class of a label (*spatial) lies; those that it does not have are left out."""
    values = np.array(sorted({value for own in classes.values() for value in own}))
    places = np.minimum(np.searchsorted(values, label), len(values) - 1)
    places = np.where(values[places] == label, places, len(values)).astype(np.min_scalar_type(len(values)))
    slices = [np.moveaxis(places, axis, 0) for axis in range(label.ndim)]
    counts = [  # of each axis: (slices, values)
        np.stack([np.bincount(one.ravel(), minlength=len(values) + 1) for one in own]) for own in slices
    ]
    found: dict[str, tuple[Span, ...]] = {}
    for name, own in classes.items():
        along = [table[:, np.searchsorted(values, own)].sum(axis=1) for table in counts]
        if along[0].any():
            found[name] = tuple(map(find_span, along))
    return found


def find_span(along: NDArray[np.int64]) -> Span:
    """From the voxels in each slice."""
    where = np.flatnonzero(along)
    return Span(float(where[0]), float(where[-1] + 1), float(np.average(where, weights=along[where]) + 0.5))


def find_side(first: Span, second: Span) -> int:
    """-1 where the first lies before the second, 1 where after it, 0 where they are level."""
    gap = first.centre - second.centre
    extent = max(first.stop, second.stop) - min(first.start, second.start)
    return 0 if abs(gap) <= max(1.0, LEVEL * extent) else -1 if gap < 0 else 1


def list_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of classes, those that stand next to each other first, as left and right mostly do."""
    gaps = range(1, len(names))
    pairs = [(names[place], names[place + gap]) for gap in gaps for place in range(len(names) - gap)]
    return pairs[:MOST_PAIRS]


def summarise_positions(
    cases: Sequence[Spans], groups: Sequence[Hashable], names: Sequence[str], minimum: int, behind: int
) -> tuple[PairPosition, ...]:
    """The positions of all pairs that enough patients have; cases: with a label, groups: their patients.

    behind: fewest patients of a count. Where fewer are left, or lack a class, they count with the most, so a
    pair is told where those that are hidden so cannot be many.
    """
    everyone = len(set(groups))
    found = []
    for first, second in list_pairs(names):
        sides: dict[Hashable, list[list[int]]] = {}
        for group, own in zip(groups, cases, strict=True):
            if first in own and second in own:
                along = zip(own[first], own[second], strict=True)
                sides.setdefault(group, []).append([find_side(one, other) for one, other in along])
        if len(sides) < max(minimum, ENOUGH * (behind - 1), 1):
            continue
        few = everyone - len(sides) if everyone - len(sides) < behind else 0
        by_axis = zip(*(agree_sides(own) for own in sides.values()), strict=True)
        counts = [count_sides(axis, few, behind) for axis in by_axis]
        before, after = zip(*counts, strict=True)
        found.append(
            PairPosition(classes=(first, second), patients=len(sides) + few, before=before, after=after)
        )
    return tuple(found)


def agree_sides(cases: Iterable[Sequence[int]]) -> list[int]:
    """The side of a patient along each axis; 0 where its cases differ."""
    return [axis[0] if len(set(axis)) == 1 else 0 for axis in zip(*cases, strict=True)]


def count_sides(sides: Sequence[int], few: int, behind: int) -> tuple[int, int]:
    """Patients before and after; those of a side with fewer than `behind`, and `few`, count with the most."""
    counts = {side: sides.count(side) for side in (-1, 0, 1)}
    most = max(counts, key=counts.__getitem__)
    hidden = [side for side, count in counts.items() if side != most and count < behind]
    counts[most] += few + sum(counts[side] for side in hidden)
    counts.update(dict.fromkeys(hidden, 0))
    return counts[-1], counts[1]


def join_positions(
    clients: Iterable[Sequence[PairPosition]], names: Sequence[str]
) -> tuple[PairPosition, ...]:
    """All clients' patients together; names: the classes, in whose order pairs are named."""
    joined: dict[tuple[str, str], list[PairPosition]] = {}
    for one in (pair for own in clients for pair in own):
        if set(one.classes) <= set(names):
            ordered = one if names.index(one.classes[0]) < names.index(one.classes[1]) else one.swap()
            joined.setdefault(ordered.classes, []).append(ordered)
    return tuple(
        PairPosition(
            classes=classes,
            patients=sum(one.patients for one in own),
            before=tuple(map(sum, zip(*(one.before for one in own), strict=True))),
            after=tuple(map(sum, zip(*(one.after for one in own), strict=True))),
        )
        for classes, own in joined.items()
    )
