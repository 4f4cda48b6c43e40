"""Measure: the fingerprint of a client's data, which a hospital may share before training.

A `Fingerprint` holds counts, histograms of shapes, spacings and foreground sizes, intensities averaged over
cases, how classes lie to each other, and what the client computes with; no name but the client's, no value of
a single case. Every number is of at least three patients (`histogram`, `positions`). With fewer than
`minimum` groups (patients) only that is reported, and a class that fewer of them have is not described
either. Where all cases are the user's own, `minimum` may be 1: then single cases are told apart.

Shapes are after cropping to what is not zero in any channel, as nnU-Net crops, with all that is labelled
inside; axes are those of prepared scans.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from wardround.data.fingerprint.case import ALL, LEVELS, CaseStatistics, Matrix, Modality, measure_case
from wardround.data.fingerprint.hardware import Hardware, describe_hardware
from wardround.data.fingerprint.histogram import (
    BEHIND,
    LONGEST_NAME,
    FingerprintModel,
    Histogram,
    IntensityHistogram,
    Name,
    Number,
    Share,
    count_intensities,
    make_histogram,
    round_all,
)
from wardround.data.fingerprint.positions import MOST_PAIRS, PairPosition, summarise_positions
from wardround.data.listing import Entry, Labels, map_cases
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError
from wardround.text import format_bytes

MOST_BYTES = 4 << 20  # of a fingerprint
MOST_CHANNELS, MOST_CLASSES = 64, 256
Read = Callable[[Entry], tuple[Volume, Volume | None]]
FewOrMany = (
    Annotated[int, Field(ge=1, le=10**9)]
    | Annotated[str, Field(pattern=r"^(fewer than \d{1,9}|\d{1,9} or more)$")]
)
Axes = Annotated[tuple[Histogram, ...], Field(max_length=3)]
Levels = Annotated[tuple[Number, ...], Field(min_length=len(LEVELS), max_length=len(LEVELS))]


class Curve(FingerprintModel):
    """Quantiles of one channel at LEVELS: mean and SD over the cases."""

    mean: Levels
    sd: Levels


class Sizes(FingerprintModel):
    """How large a class is where it is present.

    share: of the cases that have it, to a tenth (1 where few lack it, if strict); fraction: of the cropped
    image; volume: in mm to the power of the dimensions, None where files have no spacing.
    """

    share: Share
    fraction: Histogram
    volume: Histogram | None = None


class Fingerprint(FingerprintModel):
    """One client. cases, groups: a number, or "fewer than 5" where there are too few; then of the data
    nothing else is told.

    has_spacing: whether all files say millimetres; shape, spacing, extent: voxels, millimetres a voxel and
    millimetres along each axis, after cropping; kept: share of the voxels that cropping leaves; intensity,
    contrast: of each channel, as stored and with mean 0 and SD 1 in each case; inside: of labelled voxels;
    foreground: class -> sizes, None for a class that too few cases have; foreground_extent: millimetres of
    the box around all classes; positions: of pairs of classes to each other; modality: of each channel, by
    its values. Of a channel that too few cases have, None stands in all of these.
    """

    version: Literal[3] = 3
    client: Name
    cases: FewOrMany
    groups: FewOrMany
    hardware: Hardware | None = None
    has_spacing: bool = False
    shape: Axes = ()
    spacing: Axes = ()
    extent: Axes = ()
    kept: Histogram | None = None
    intensity: tuple[Curve | None, ...] = Field((), max_length=MOST_CHANNELS)
    contrast: tuple[Curve | None, ...] = Field((), max_length=MOST_CHANNELS)
    modality: tuple[Modality | None, ...] = Field((), max_length=MOST_CHANNELS)
    inside: tuple[IntensityHistogram | None, ...] = Field((), max_length=MOST_CHANNELS)
    foreground: dict[Name, Sizes | None] = Field(default_factory=dict, max_length=MOST_CLASSES)
    foreground_extent: Axes = ()
    positions: tuple[PairPosition, ...] = Field((), max_length=MOST_PAIRS)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        channels, axes = len(self.intensity), len(self.shape)
        channels_differ = {len(self.contrast), len(self.modality), len(self.inside) or channels} != {channels}
        axes_differ = {len(self.spacing), len(self.extent), len(self.foreground_extent) or axes} != {axes}
        pairs = [frozenset(one.classes) for one in self.positions]
        axes_differ = axes_differ or any(len(one.before) != axes for one in self.positions)
        if len(set(pairs)) < len(pairs) or not set().union(*pairs) <= set(self.foreground):
            raise ValueError("positions are twice of the same classes, or of classes without sizes")
        if channels_differ or axes_differ:
            raise ValueError("axes or channels are missing")
        if self.is_open and (axes < 2 or self.kept is None):
            raise ValueError("shapes are missing")
        if isinstance(self.cases, int) and isinstance(self.groups, int):
            patients = max((one.patients for one in self.positions), default=0)
            cases = max((one.cases for one in self._list_histograms()), default=0)
            if self.groups > self.cases or patients > self.groups or cases > self.cases:
                raise ValueError("numbers are of more cases or patients than there are")
        return self

    @property
    def is_open(self) -> bool:
        """Whether there were enough cases to share more than their count."""
        return isinstance(self.cases, int) and isinstance(self.groups, int) and bool(self.intensity)

    def _list_histograms(self) -> list[Histogram]:
        sizes = [one for own in self.foreground.values() if own for one in (own.fraction, own.volume)]
        every = [*self.shape, *self.spacing, *self.extent, *self.foreground_extent, self.kept, *sizes]
        return [one for one in every if one is not None]

    def count_bins(self) -> list[int]:
        """The number of cases of every bin."""
        positions = [count for one in self.positions for count in one.count_patients()]
        return [count for one in self._list_histograms() for count in one.counts] + positions

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def as_bytes(self) -> bytes:
        """What is sent."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Fingerprint:
        """Check what a hospital sent; nothing of it is used before."""
        if len(content) > MOST_BYTES:
            raise DataError(
                f"This is not a fingerprint: it has {format_bytes(len(content))}, the most is "
                f"{format_bytes(MOST_BYTES)}."
            )
        return check_content(lambda: cls.model_validate_json(content))

    @classmethod
    def from_dict(cls, value: Any) -> Fingerprint:
        """The same, of JSON that was read."""
        return check_content(lambda: cls.model_validate(value))


def check_content(validate: Callable[[], Fingerprint]) -> Fingerprint:
    try:
        return validate()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part)[:LONGEST_NAME] for part in first["loc"]) or "it"
        raise DataError(f"This is not a fingerprint: {where}: {first['msg']}.") from None


# One client


def measure_client(
    entries: Sequence[Entry],
    read: Read,
    *,
    minimum: int = 5,
    labels: Labels | None = None,
    orientation: str | None = "RAS",
    jobs: int = 1,
) -> Fingerprint:
    """The fingerprint of one client; each case is read once, in `jobs` threads.

    labels: class name -> values in the files; left out, every value above 0 is a class of its own.
    """
    clients = {entry.client for entry in entries}
    if len(clients) != 1:
        raise DataError(f"A fingerprint is of one client, and these cases are of {len(clients)}.")
    if len({entry.group for entry in entries}) < minimum:
        return withhold(entries, minimum)

    def measure(entry: Entry) -> CaseStatistics:
        return measure_case(entry, *read(entry), labels, orientation)

    return summarise(list(map_cases(measure, entries, jobs)), minimum)


def measure_clients(
    entries: Iterable[Entry], read: Read, *, minimum: int = 5, labels: Labels | None = None, jobs: int = 1
) -> list[Fingerprint]:
    """The fingerprints of all clients, sorted by name."""
    ordered = sorted(entries, key=lambda entry: (entry.client, entry.name))
    return [
        measure_client(list(own), read, minimum=minimum, labels=labels, jobs=jobs)
        for _, own in itertools.groupby(ordered, key=lambda entry: entry.client)
    ]


def withhold(entries: Sequence[Entry], minimum: int) -> Fingerprint:
    """The fingerprint of a client with too few patients."""
    few = f"fewer than {minimum}"
    shown = few if len(entries) < minimum else f"{minimum} or more"
    return Fingerprint(client=entries[0].client, cases=shown, groups=few, hardware=describe_hardware())


def summarise(cases: Sequence[CaseStatistics], minimum: int, behind: int | None = None) -> Fingerprint:
    """The fingerprint of a client from its measured cases; withheld where they are of too few patients.

    behind: fewest patients of a bin, and of those who lack a class where some do, so that no count below it
    can be worked out; default BEHIND, or `minimum` where that is less, for bins alone.
    """
    entries = [case.entry for case in cases]
    groups = [entry.group for entry in entries]
    if len(set(groups)) < minimum:
        return withhold(entries, minimum)
    check_alike(cases)
    strict, behind = behind is not None, behind or min(BEHIND, max(1, minimum))
    sides = np.array([case.shape for case in cases], dtype=np.float64)
    spacings = np.array([case.spacing for case in cases])
    drawn = [case for case in cases if case.inside]
    owners = [case.entry.group for case in drawn]
    known = drawn if len(set(owners)) >= max(1, minimum) else []
    extents = np.array([np.multiply(case.extent, case.spacing) for case in known])
    channels = [[case for case in cases if case.modality[n]] for n in range(len(cases[0].raw))]
    channels = [own if len({case.entry.group for case in own}) >= minimum else [] for own in channels]
    content = {
        "client": entries[0].client,
        "cases": len(entries),
        "groups": len(set(groups)),
        "hardware": describe_hardware(),
        "has_spacing": all(case.has_spacing for case in cases),
        "shape": tuple(make_histogram(column, groups, behind) for column in sides.T),
        "spacing": tuple(make_histogram(column, groups, behind) for column in spacings.T),
        "extent": tuple(make_histogram(column, groups, behind) for column in (sides * spacings).T),
        "kept": make_histogram([case.kept for case in cases], groups, behind),
        "intensity": tuple(average_curve([case.raw[n] for case in own]) for n, own in enumerate(channels)),
        "contrast": tuple(
            average_curve([case.standard[n] for case in own]) for n, own in enumerate(channels)
        ),
        "modality": tuple(agree([case.modality[n] for case in own]) for n, own in enumerate(channels)),
        "inside": tuple(count_labelled(own, n, minimum, behind) for n, own in enumerate(channels) if known),
        "foreground": summarise_sizes(cases, minimum, behind, strict=strict),
        "foreground_extent": tuple(make_histogram(column, owners, behind) for column in extents.T),
        "positions": summarise_positions(
            [case.spans for case in known], owners if known else [], list_classes(cases), minimum, behind
        ),
    }
    return Fingerprint.from_dict(content)


def check_alike(cases: Sequence[CaseStatistics]) -> None:
    for case in cases:
        if (len(case.shape), len(case.raw)) != (len(cases[0].shape), len(cases[0].raw)):
            raise DataError(
                f"{case.entry.where} has {len(case.shape)} dimensions and {len(case.raw)} channels, but the "
                f"first case of the client has {len(cases[0].shape)} and {len(cases[0].raw)}. "
                "Leave one kind out."
            )


def count_labelled(
    cases: Sequence[CaseStatistics], channel: int, minimum: int, behind: int
) -> IntensityHistogram | None:
    """Intensities of labelled voxels in a channel; None where too few of its cases have any."""
    found = [(counts, case.entry.group) for case in cases if case.inside and (counts := case.inside[channel])]
    owners = [group for _, group in found]
    if len(set(owners)) < max(1, minimum):
        return None
    return count_intensities([counts for counts, _ in found], owners, behind)


def agree(found: Sequence[Modality | None]) -> Modality | None:
    """The modality of nine cases in ten; None where there are none."""
    if not found:
        return None
    ((often, count),) = Counter(found).most_common(1)
    return often if count >= 0.9 * len(found) else "other"


# All cases


def average_curve(values: Sequence[Matrix]) -> Curve | None:
    """Of one channel over the cases that have it."""
    if not values:
        return None
    table = np.stack(values)  # (cases, levels)
    deviation = table.std(axis=0, ddof=1 if len(table) > 1 else 0)
    return Curve(mean=round_all(table.mean(axis=0)), sd=round_all(deviation))


def list_classes(cases: Iterable[CaseStatistics]) -> list[str]:
    """In the order of `labels`."""
    every = dict.fromkeys(name for case in cases for name in case.voxels or ())
    return [name for name in every if name != ALL]


def summarise_sizes(
    cases: Sequence[CaseStatistics], minimum: int, behind: int, *, strict: bool = False
) -> dict[str, Sizes | None]:
    """Sizes of each class where it is; None if of few groups. strict: few that lack it are not told."""
    labelled = [(case, case.voxels) for case in cases if case.voxels is not None]
    found: dict[str, Sizes | None] = {}
    classes = list_classes(cases)
    for name in [ALL, *sorted(classes)] if len(classes) > 1 else [ALL] if labelled else []:
        own = [(case, voxels[name]) for case, voxels in labelled if voxels.get(name, 0) > 0]
        groups = [case.entry.group for case, _ in own]
        if len(set(groups)) < max(1, minimum):
            found[name] = None
            continue
        without = {case.entry.group for case, voxels in labelled if not voxels.get(name, 0)}
        exact = len(own) / len(labelled)
        share = 1.0 if strict and len(without) < behind else round(exact, 1 if minimum > 1 else 4)
        fractions = [count / math.prod(case.shape) for case, count in own]
        volumes = [count * math.prod(case.spacing) for case, count in own]
        measured = all(case.has_spacing for case, _ in own)
        found[name] = Sizes(
            share=share,
            fraction=make_histogram(fractions, groups, behind),
            volume=make_histogram(volumes, groups, behind) if measured else None,
        )
    return found
