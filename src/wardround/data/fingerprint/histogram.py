"""Histogram: how values of cases are spread, told without the value of a case.

Values of cases (a side, a spacing, a size) are sorted and cut into bins of at least BEHIND patients, so that
cases within a bin are as alike as possible: optimal univariate microaggregation, Hansen and Mukherjee, IEEE
Trans. Knowl. Data Eng. 15(4), 2003. A bin sends its mean and its number of cases. Such bins fit any scanner
without being agreed on, a spacing that all share stays exact, and unlike in a histogram of fixed bins nothing
is suppressed.

Intensities of voxels are counted on a fixed grid, whose cells are joined until each bin has voxels of at
least BEHIND patients. Histograms of several clients join into one distribution.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

BEHIND = 3  # patients behind every bin
MOST_BINS = 64  # of a histogram of cases
MOST_INTENSITY_BINS = 256
MOST_RANKS = 1000  # of a client's cases are interpolated
SMALLEST, STEP = 1e-6, 1e-3  # cells of the intensity grid: absolute width near 0 (times STEP), relative width
LARGEST = 1e9  # intensity; beyond it is counted as that
LARGEST_NUMBER = 1e18
LONGEST_NAME = 200
TAILS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)  # per cent, finer cuts
CUTS = np.array([*TAILS, *range(5, 96), *(100 - tail for tail in reversed(TAILS))]) / 100

Array = NDArray[np.float64]
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Spread = Annotated[float, Field(ge=0, le=LARGEST_NUMBER)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]


class FingerprintModel(BaseModel):
    """Sent as JSON: unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# Cases


class Histogram(FingerprintModel):
    """Values of cases, ascending: the mean of each bin and its number of cases; sd: over all cases."""

    means: tuple[Number, ...] = Field(min_length=1, max_length=MOST_BINS)
    counts: tuple[Count, ...] = Field(min_length=1, max_length=MOST_BINS)
    sd: Spread

    @model_validator(mode="after")
    def _is_sorted(self) -> Self:
        if len(self.means) != len(self.counts) or list(self.means) != sorted(self.means):
            raise ValueError("means and counts are not of ascending bins")
        return self

    @property
    def cases(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return float(np.average(self.means, weights=self.counts))

    @property
    def median(self) -> float:
        return find_quantile([self], 0.5)


def make_histogram(
    values: Sequence[float] | Array, groups: Sequence[Hashable], behind: int = BEHIND
) -> Histogram:
    """The histogram of positive values, one a case; groups: their patients.

    behind: fewest patients of a bin; 1 takes every case for itself.
    """
    units: dict[Hashable, list[float]] = {}
    for number, (group, value) in enumerate(zip(groups, values, strict=True)):
        units.setdefault(number if behind == 1 else group, []).append(float(value))
    ordered = sorted((float(np.mean(own)), len(own)) for own in units.values())
    means, counts = np.array(ordered).T
    bins = cut_bins(means, counts, max(behind, -(-len(means) // MOST_BINS)))
    return Histogram(
        means=round_all((np.average(means[own], weights=counts[own]) for own in bins), 6),
        counts=tuple(int(counts[own].sum()) for own in bins),
        sd=round_all([float(np.std(values))], 6)[0],
    )


def cut_bins(values: Array, weights: Array, least: int) -> list[slice]:
    """Cut ascending values into bins of `least` members or more, with the least spread of logs within."""
    logs = np.log(np.maximum(values, 1e-12))
    logs = logs - np.average(logs, weights=weights)  # small numbers keep their digits when squared
    sums = [np.concatenate([[0.0], np.cumsum(weights * logs**power)]) for power in (0, 1, 2)]
    count = len(values)
    cost, start = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=int)
    cost[0] = 0.0
    for stop in range(least, count + 1):
        first = np.arange(max(0, stop - 2 * least + 1), stop - least + 1)  # larger bins can be halved
        weight, total, square = (own[stop] - own[first] for own in sums)
        found = cost[first] + np.maximum(square - total**2 / weight, 0.0)
        best = int(np.argmin(found))
        cost[stop], start[stop] = found[best], first[best]
    bins, stop = [], count
    while stop > 0:
        bins.append(slice(int(start[stop]), stop))
        stop = int(start[stop])
    return bins[::-1]


def find_quantile(histograms: Iterable[Histogram], level: float) -> float:
    """The quantile of all cases together, level from 0 to 1; of bins of one case, NumPy's own.

    Between the middles of a client's bins its cases are taken to be spread evenly.
    """
    pairs: list[tuple[float, float]] = []
    for one in histograms:
        counts = np.array(one.counts, dtype=np.float64)
        middles = np.cumsum(counts) - (counts + 1) / 2  # rank of the middle case of each bin, from 0
        ranks = np.linspace(0, one.cases - 1, min(one.cases, MOST_RANKS))
        pairs += [(value, one.cases / len(ranks)) for value in np.interp(ranks, middles, one.means).tolist()]
    values, weights = np.array(sorted(pairs)).T
    ranks = np.cumsum(weights) - (weights + 1) / 2
    return float(np.interp(level * (weights.sum() - 1), ranks, values))


# Voxels


class IntensityHistogram(FingerprintModel):
    """Intensities of one channel, every case with the same weight, as nnU-Net samples them.

    edges: of the bins, ascending; shares: of the voxels; means: of each bin; mean, sd: of all voxels.
    """

    edges: tuple[Number, ...] = Field(min_length=2, max_length=MOST_INTENSITY_BINS + 1)
    shares: tuple[Share, ...] = Field(min_length=1, max_length=MOST_INTENSITY_BINS)
    means: tuple[Number, ...] = Field(min_length=1, max_length=MOST_INTENSITY_BINS)
    mean: Number
    sd: Spread

    @model_validator(mode="after")
    def _is_distribution(self) -> Self:
        if not len(self.edges) - 1 == len(self.shares) == len(self.means):
            raise ValueError("edges, shares and means are not of the same bins")
        if list(self.edges) != sorted(self.edges) or abs(sum(self.shares) - 1) > 0.01:
            raise ValueError("edges do not rise, or shares do not add up to 1")
        return self

    def cumulate(self) -> tuple[Array, Array]:
        """Ascending values, and the share of voxels below each; a bin is split so that its mean is right."""
        edges, means = np.array(self.edges), np.array(self.means)
        means = np.clip(means, edges[:-1], edges[1:])
        widths = np.diff(edges)
        below = np.where(widths > 0, (edges[1:] - means) / np.where(widths > 0, widths, 1.0), 0.5)
        shares = np.array(self.shares) / sum(self.shares)
        parts = np.stack([shares * below, shares * (1 - below)], axis=1).reshape(-1)
        places = np.stack([means, edges[1:]], axis=1).reshape(-1)
        return np.concatenate([edges[:1], places]), np.concatenate([[0.0], np.cumsum(parts)])


class VoxelCounts:
    """One channel of one case on the grid. keys: its cells, ascending; shares: of the voxels."""

    def __init__(self, values: NDArray[Any]) -> None:
        found, counts = np.unique(clip_intensity(values), return_counts=True)  # few, of whole numbers
        found = found.astype(np.float64)
        every = to_keys(found)  # ascending, as the values are
        keys, starts = np.unique(every, return_index=True)
        shares = counts / len(values)
        self.keys: NDArray[np.int64] = keys
        self.shares: Array = np.add.reduceat(shares, starts)
        self.sums: Array = np.add.reduceat(shares * found, starts)
        self.low, self.high = float(found[0]), float(found[-1])
        self.mean, self.square = float(shares @ found), float(shares @ np.square(found))


def clip_intensity(values: NDArray[Any]) -> NDArray[Any]:
    clipped: NDArray[Any] = np.clip(values, -LARGEST, LARGEST)
    return clipped


def to_keys(values: Array) -> NDArray[np.int64]:
    """The cell of each value; cells are symmetric around 0 and widen with the value."""
    return (np.sign(values) * np.rint(np.log1p(np.abs(values) / SMALLEST) / STEP)).astype(np.int64)


def from_keys(keys: NDArray[Any]) -> Array:
    """The value at the middle of a cell, or at an edge for a key and a half."""
    found: Array = np.sign(keys) * np.expm1(np.abs(keys) * STEP) * SMALLEST
    return found


def count_intensities(
    cases: Sequence[VoxelCounts], groups: Sequence[Hashable], behind: int = BEHIND
) -> IntensityHistogram:
    """The histogram of one channel over cases of at least `behind` patients."""
    patients = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    owners = np.array([patients[group] for group in groups])
    keys = np.concatenate([case.keys for case in cases])
    order = np.argsort(keys, kind="stable")
    shares = np.concatenate([case.shares for case in cases])[order] / len(cases)
    sums = np.concatenate([case.sums for case in cases])[order] / len(cases)
    who = np.repeat(owners, [len(case.keys) for case in cases])[order]
    keys = keys[order]
    below = np.cumsum(shares)
    cuts = np.unique(keys[np.minimum(np.searchsorted(below, CUTS), len(keys) - 1)])  # a bin ends before these
    places = np.unique(np.concatenate([[0], np.searchsorted(keys, cuts), np.searchsorted(keys, cuts + 1)]))
    stops = choose_stops([*places[places < len(keys)].tolist(), len(keys)], who, behind)
    starts = stops[:-1]
    totals, firsts = np.add.reduceat(shares, starts), np.add.reduceat(sums, starts)
    low, high = (average_ends(cases, owners, end, behind) for end in ("low", "high"))
    inner = np.clip(from_keys(keys[starts[1:]] - 0.5), low, high)
    mean = float(np.mean([case.mean for case in cases]))
    square = float(np.mean([case.square for case in cases]))
    return IntensityHistogram(
        edges=round_all([low, *inner, high], 6),
        shares=round_all(totals, 4),
        means=round_all(np.clip(firsts / totals, low, high), 6),
        mean=round_all([mean], 6)[0],
        sd=round_all([max(square - mean**2, 0.0) ** 0.5], 6)[0],
    )


def choose_stops(places: Sequence[int], who: NDArray[np.int64], behind: int) -> list[int]:
    """The places to cut at, such that at least `behind` patients are between any two of them."""
    kept = [places[0]]
    for stop in places[1:]:
        if len(kept) <= MOST_INTENSITY_BINS and len(np.unique(who[kept[-1] : stop])) >= behind:
            kept.append(stop)
    if len(kept) == 1:
        return [places[0], places[-1]]
    return [*kept[:-1], places[-1]]  # what is left over joins the last bin


def average_ends(cases: Sequence[VoxelCounts], owners: NDArray[np.int64], end: str, behind: int) -> float:
    """The mean of the lowest (or highest) values of the `behind` patients that reach farthest."""
    sign = 1 if end == "low" else -1
    farthest: dict[int, float] = {}
    for owner, case in zip(owners.tolist(), cases, strict=True):
        farthest[owner] = min(farthest.get(owner, np.inf), sign * float(getattr(case, end)))
    return sign * float(np.mean(sorted(farthest.values())[:behind]))


def find_intensity(
    histograms: Sequence[IntensityHistogram], cases: Sequence[int], levels: Sequence[float]
) -> list[float]:
    """Quantiles of all clients' voxels together, levels from 0 to 1; cases: of each histogram."""
    curves = [one.cumulate() for one in histograms]
    places = np.unique(np.concatenate([values for values, _ in curves]))
    weights = np.array(cases, dtype=np.float64) / sum(cases)
    below = sum(
        w * np.interp(places, *curve, left=0, right=1) for w, curve in zip(weights, curves, strict=True)
    )
    return [float(value) for value in np.interp(levels, np.asarray(below), places)]


def round_all(values: Iterable[float], digits: int = 3) -> tuple[float, ...]:
    """Round to some digits.

    >>> round_all([1234.567, 0.00012345])
    (1230.0, 0.000123)
    """
    return tuple(float(f"{value:.{digits}g}") for value in values)
