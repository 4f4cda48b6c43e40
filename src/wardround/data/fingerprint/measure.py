"""Fingerprints: what a hospital may share before training.

A `Fingerprint` holds counts, shapes, spacings, intensity quantiles averaged over cases, and quantiles of
foreground size; no name but the client's, no value of a single case. The minimum-count rule: with fewer than
`minimum` groups (patients) only that is said, and a class that fewer of them have is not described either.
Numbers are rounded to three digits, so that a quantile does not give away the case it falls on.

`data.fingerprint.distance` holds those of several hospitals against each other.
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

from wardround.data.listing import Entry
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError

LEVELS = (1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0)  # per cent, of the intensities of a case
SIZE_LEVELS = (10.0, 25.0, 50.0, 75.0, 90.0)  # per cent, of the foreground sizes of the cases
MOST_VOXELS = 500_000  # of a channel are looked at; more would not move a quantile
ALL = "foreground"  # all classes together
Matrix = NDArray[np.float64]
Read = Callable[[Entry], tuple[Volume, Volume | None]]


class Part(BaseModel):
    """Travels as JSON: what is unknown or not a number is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Range(Part):
    low: float
    median: float
    high: float


class Curve(Part):
    """Quantiles of one channel at LEVELS, averaged over the cases, and their SD between cases."""

    mean: tuple[float, ...] = Field(min_length=len(LEVELS), max_length=len(LEVELS))
    sd: tuple[float, ...] = Field(min_length=len(LEVELS), max_length=len(LEVELS))


class Sizes(Part):
    """How large a class is where it is there, quantiles at SIZE_LEVELS.

    share: of the cases that have it, to a tenth; fraction: of the image; volume: in mm to the power of the
    dimensions, None where files tell no spacing.
    """

    share: float
    fraction: tuple[float, ...] = Field(min_length=len(SIZE_LEVELS), max_length=len(SIZE_LEVELS))
    volume: tuple[float, ...] | None = Field(None, min_length=len(SIZE_LEVELS), max_length=len(SIZE_LEVELS))


class Fingerprint(Part):
    """One client. cases, groups: a number, or in words ("fewer than 5") where too few; then nothing follows.

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
        """Whether there were enough cases to say more than that."""
        return isinstance(self.cases, int) and isinstance(self.groups, int) and bool(self.intensity)

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, value: Any) -> Fingerprint:
        """What a hospital sent, checked."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "it"
            raise DataError(f"This is not a fingerprint: {where}: {first['msg']}.") from None


# One client


@dataclass(frozen=True)
class Look:
    """One case, at home: quantiles of each channel, raw and standardised, and the voxels of each class."""

    group: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    raw: Matrix
    standard: Matrix
    voxels: Mapping[str, int] | None
    knows_spacing: bool


def fingerprint(
    entries: Sequence[Entry],
    read: Read,
    *,
    minimum: int = 5,
    labels: Mapping[str, tuple[int, ...]] | None = None,
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
        return Fingerprint(
            client=client, cases=few if len(entries) < minimum else f"{minimum} or more", groups=few
        )
    looks = [look_at(entry, *read(entry), labels) for entry in entries]
    for entry, look in zip(entries, looks, strict=True):
        if (len(look.shape), len(look.raw)) != (len(looks[0].shape), len(looks[0].raw)):
            raise DataError(
                f"{entry.where} has {len(look.shape)} dimensions and {len(look.raw)} channels, but the first "
                f"case of the client has {len(looks[0].shape)} and {len(looks[0].raw)}. Leave one kind out."
            )
    return Fingerprint(
        client=client,
        cases=len(entries),
        groups=num_groups,
        shape=ranges([look.shape for look in looks]),
        spacing=ranges([look.spacing for look in looks]),
        intensity=curves([look.raw for look in looks]),
        contrast=curves([look.standard for look in looks]),
        foreground=sizes(looks, minimum),
    )


def fingerprints(
    entries: Iterable[Entry],
    read: Read,
    *,
    minimum: int = 5,
    labels: Mapping[str, tuple[int, ...]] | None = None,
) -> list[Fingerprint]:
    """The fingerprints of all clients, sorted by name."""
    ordered = sorted(entries, key=lambda entry: (entry.client, entry.name))
    return [
        fingerprint(list(own), read, minimum=minimum, labels=labels)
        for _, own in itertools.groupby(ordered, key=lambda entry: entry.client)
    ]


def look_at(
    entry: Entry, image: Volume, label: Volume | None, labels: Mapping[str, tuple[int, ...]] | None
) -> Look:
    """What a fingerprint needs of one case."""
    flat = image.data.reshape(len(image.data), -1)
    flat = flat[:, :: max(1, flat.shape[1] // MOST_VOXELS)].astype(np.float64)
    flat = flat[:, np.isfinite(flat).all(axis=0)]
    if flat.size == 0:
        raise DataError(f"{entry.where}: the image has no voxel with a number; leave the case out.")
    raw = np.percentile(flat, LEVELS, axis=1).T  # (C, levels)
    spread = flat.std(axis=1, keepdims=True)
    standard = (raw - flat.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    shape = tuple(int(side) for side in image.data.shape[1:])
    voxels = None if label is None else count_voxels(label.data, labels)
    return Look(entry.group, shape, tuple(image.spacing), raw, standard, voxels, image.affine is not None)


def count_voxels(label: NDArray[Any], labels: Mapping[str, tuple[int, ...]] | None) -> dict[str, int]:
    """Class -> its voxels, and those of all classes together."""
    values, counts = np.unique(label, return_counts=True)
    found = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
    meaning = labels or {f"class {value}": (value,) for value in found if value > 0}
    voxels = {name: sum(found.get(value, 0) for value in own) for name, own in meaning.items()}
    return {ALL: sum(voxels.values()), **voxels}


def ranges(values: Sequence[Sequence[float]]) -> tuple[Range, ...]:
    """Smallest, median and largest along each axis."""
    table = np.asarray(values, dtype=np.float64)
    rows = zip(table.min(0), np.median(table, axis=0), table.max(0), strict=True)
    return tuple(Range(low=short(low), median=short(middle), high=short(high)) for low, middle, high in rows)


def curves(values: Sequence[Matrix]) -> tuple[Curve, ...]:
    table = np.stack(values)  # (cases, C, levels)
    return tuple(
        Curve(mean=shortened(mean), sd=shortened(sd))
        for mean, sd in zip(
            table.mean(axis=0), table.std(axis=0, ddof=1 if len(table) > 1 else 0), strict=True
        )
    )


def sizes(looks: Sequence[Look], minimum: int) -> dict[str, Sizes | None]:
    """Sizes of each class over the cases that have it; None where they are of fewer than `minimum` groups."""
    drawn = [(look, look.voxels) for look in looks if look.voxels is not None]
    found: dict[str, Sizes | None] = {}
    classes = sorted({name for _, voxels in drawn for name in voxels} - {ALL})
    for name in [ALL, *classes] if len(classes) > 1 else [ALL] if drawn else []:
        own = [(look, voxels[name]) for look, voxels in drawn if voxels.get(name, 0) > 0]
        if len({look.group for look, _ in own}) < minimum:
            found[name] = None
            continue
        fractions = [count / math.prod(look.shape) for look, count in own]
        volumes = [count * math.prod(look.spacing) for look, count in own]
        measured = all(look.knows_spacing for look, _ in own)
        found[name] = Sizes(
            share=round(len(own) / len(drawn), 1),
            fraction=shortened(np.percentile(fractions, SIZE_LEVELS)),
            volume=shortened(np.percentile(volumes, SIZE_LEVELS)) if measured else None,
        )
    return found


def short(value: float) -> float:
    """Three digits.

    >>> short(1234.567), short(0.00012345)
    (1230.0, 0.000123)
    """
    return float(f"{value:.3g}")


def shortened(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(short(value) for value in values)
