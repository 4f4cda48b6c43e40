"""Measure: the fingerprint of a client's data, which a hospital may share before training.

A `Fingerprint` holds counts, shapes, spacings, intensity quantiles averaged over cases, and quantiles of
foreground size; no name but the client's, no value of a single case. With fewer than `minimum` groups
(patients) only that is reported, and a class that fewer of them have is not described either. Numbers are
rounded to three digits, so that a quantile does not reveal the case it falls on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wardround.data.listing import Entry, Labels
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError

LEVELS = (1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0)  # per cent, of the intensities of a case
SIZE_LEVELS = (10.0, 25.0, 50.0, 75.0, 90.0)  # per cent, of the foreground sizes of the cases
MOST_VOXELS = 500_000  # of a channel are read; more would not move a quantile
ALL = "foreground"  # all classes together
Matrix = NDArray[np.float64]
Read = Callable[[Entry], tuple[Volume, Volume | None]]


class FingerprintModel(BaseModel):
    """Sent as JSON: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Range(FingerprintModel):
    low: float
    median: float
    high: float


class Curve(FingerprintModel):
    """Quantiles of one channel at LEVELS: mean and SD over the cases."""

    mean: tuple[float, ...] = Field(min_length=len(LEVELS), max_length=len(LEVELS))
    sd: tuple[float, ...] = Field(min_length=len(LEVELS), max_length=len(LEVELS))


class Sizes(FingerprintModel):
    """How large a class is where it is present: quantiles at SIZE_LEVELS.

    share: of the cases that have it, to a tenth; fraction: of the image; volume: in mm to the power of the
    dimensions, None where files have no spacing.
    """

    share: float
    fraction: tuple[float, ...] = Field(min_length=len(SIZE_LEVELS), max_length=len(SIZE_LEVELS))
    volume: tuple[float, ...] | None = Field(None, min_length=len(SIZE_LEVELS), max_length=len(SIZE_LEVELS))


class Fingerprint(FingerprintModel):
    """One client. cases, groups: a number, or "fewer than 5" where there are too few; then the rest is empty.

    foreground: class -> sizes; None for a class that too few cases have.
    """

    version: Literal[1] = 1
    client: str
    cases: Annotated[int, Field(ge=1)] | str
    groups: Annotated[int, Field(ge=1)] | str
    shape: tuple[Range, ...] = ()
    spacing: tuple[Range, ...] = ()
    intensity: tuple[Curve, ...] = ()
    contrast: tuple[Curve, ...] = ()
    foreground: dict[str, Sizes | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.contrast) != len(self.intensity) or len(self.spacing) != len(self.shape):
            raise ValueError("axes or channels are missing")
        return self

    @property
    def is_open(self) -> bool:
        """Whether there were enough cases to share more than their count."""
        return isinstance(self.cases, int) and isinstance(self.groups, int) and bool(self.intensity)

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, value: Any) -> Fingerprint:
        """Check what a hospital sent."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "it"
            raise DataError(f"This is not a fingerprint: {where}: {first['msg']}.") from None


# One client


@dataclass(frozen=True)
class CaseStatistics:
    """One case, never shared: quantiles of each channel, raw and standardised; voxels of each class."""

    group: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    raw: Matrix
    standard: Matrix
    voxels: Mapping[str, int] | None
    knows_spacing: bool


def measure_client(
    entries: Sequence[Entry], read: Read, *, minimum: int = 5, labels: Labels | None = None
) -> Fingerprint:
    """The fingerprint of one client; each case is read once.

    labels: class name -> values in the files; left out, every value above 0 is a class of its own.
    """
    clients = {entry.client for entry in entries}
    if len(clients) != 1:
        raise DataError(f"A fingerprint is of one client, and these cases are of {len(clients)}.")
    (client,) = clients
    num_groups = len({entry.group for entry in entries})
    if num_groups < minimum:
        few = f"fewer than {minimum}"
        shown = few if len(entries) < minimum else f"{minimum} or more"
        return Fingerprint(client=client, cases=shown, groups=few)
    cases = [measure_case(entry, *read(entry), labels) for entry in entries]
    for entry, case in zip(entries, cases, strict=True):
        if (len(case.shape), len(case.raw)) != (len(cases[0].shape), len(cases[0].raw)):
            raise DataError(
                f"{entry.where} has {len(case.shape)} dimensions and {len(case.raw)} channels, but the first "
                f"case of the client has {len(cases[0].shape)} and {len(cases[0].raw)}. Leave one kind out."
            )
    return Fingerprint(
        client=client,
        cases=len(entries),
        groups=num_groups,
        shape=summarise_ranges([case.shape for case in cases]),
        spacing=summarise_ranges([case.spacing for case in cases]),
        intensity=average_curves([case.raw for case in cases]),
        contrast=average_curves([case.standard for case in cases]),
        foreground=summarise_sizes(cases, minimum),
    )


def measure_clients(
    entries: Iterable[Entry], read: Read, *, minimum: int = 5, labels: Labels | None = None
) -> list[Fingerprint]:
    """The fingerprints of all clients, sorted by name."""
    ordered = sorted(entries, key=lambda entry: (entry.client, entry.name))
    return [
        measure_client(list(own), read, minimum=minimum, labels=labels)
        for _, own in itertools.groupby(ordered, key=lambda entry: entry.client)
    ]


def measure_case(entry: Entry, image: Volume, label: Volume | None, labels: Labels | None) -> CaseStatistics:
    """Measure what a fingerprint needs of one case."""
    flat = image.data.reshape(len(image.data), -1)
    flat = flat[:, :: max(1, flat.shape[1] // MOST_VOXELS)].astype(np.float64)
    flat = flat[:, np.isfinite(flat).all(axis=0)]
    if flat.size == 0:
        raise DataError(f"{entry.where}: the image has no finite voxel; leave the case out.")
    raw = np.percentile(flat, LEVELS, axis=1).T  # (C, levels)
    spread = flat.std(axis=1, keepdims=True)
    standard = (raw - flat.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    shape = tuple(int(side) for side in image.data.shape[1:])
    voxels = None if label is None else count_voxels(label.data, labels)
    knows_spacing = image.affine is not None
    return CaseStatistics(entry.group, shape, tuple(image.spacing), raw, standard, voxels, knows_spacing)


def count_voxels(label: NDArray[Any], labels: Labels | None) -> dict[str, int]:
    """Class -> its voxels, and those of all classes together."""
    values, counts = np.unique(label, return_counts=True)
    found = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
    meaning = labels or {f"class {value}": (value,) for value in found if value > 0}
    voxels = {name: sum(found.get(value, 0) for value in own) for name, own in meaning.items()}
    return {ALL: sum(voxels.values()), **voxels}


def summarise_ranges(values: Sequence[Sequence[float]]) -> tuple[Range, ...]:
    """Smallest, median and largest along each axis."""
    table = np.asarray(values, dtype=np.float64)
    rows = zip(table.min(0), np.median(table, axis=0), table.max(0), strict=True)
    return tuple(Range(low=low, median=median, high=high) for low, median, high in map(round_all, rows))


def average_curves(values: Sequence[Matrix]) -> tuple[Curve, ...]:
    table = np.stack(values)  # (cases, C, levels)
    deviations = table.std(axis=0, ddof=1 if len(table) > 1 else 0)
    pairs = zip(table.mean(axis=0), deviations, strict=True)
    return tuple(Curve(mean=round_all(mean), sd=round_all(sd)) for mean, sd in pairs)


def summarise_sizes(cases: Sequence[CaseStatistics], minimum: int) -> dict[str, Sizes | None]:
    """Sizes of each class over the cases that have it; None where they are of fewer than `minimum` groups."""
    labelled = [(case, case.voxels) for case in cases if case.voxels is not None]
    found: dict[str, Sizes | None] = {}
    classes = sorted({name for _, voxels in labelled for name in voxels} - {ALL})
    for name in [ALL, *classes] if len(classes) > 1 else [ALL] if labelled else []:
        own = [(case, voxels[name]) for case, voxels in labelled if voxels.get(name, 0) > 0]
        if len({case.group for case, _ in own}) < minimum:
            found[name] = None
            continue
        fractions = [count / math.prod(case.shape) for case, count in own]
        volumes = [count * math.prod(case.spacing) for case, count in own]
        measured = all(case.knows_spacing for case, _ in own)
        found[name] = Sizes(
            share=round(len(own) / len(labelled), 1),
            fraction=round_all(np.percentile(fractions, SIZE_LEVELS)),
            volume=round_all(np.percentile(volumes, SIZE_LEVELS)) if measured else None,
        )
    return found


def round_digits(value: float) -> float:
    """Round to three digits.

    >>> round_digits(1234.567), round_digits(0.00012345)
    (1230.0, 0.000123)
    """
    return float(f"{value:.3g}")


def round_all(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round_digits(value) for value in values)
