"""Numbers from several hospitals put together without a list of them: counts in fixed bins.

Bins are geometric, 40 a decade from 1e-8 to 10, so a number is known to 6 % whatever its size; the
first bin takes what is smaller, the last what is larger. Counts add up, so the pooled quantiles are those
of one histogram over everybody's numbers.

>>> both = counted([0.1, 0.2]) + counted([0.4])
>>> round(quantile(both, 0.5), 1)
0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOWEST, DECADES, A_DECADE = -8, 9, 40
NUM_BINS = DECADES * A_DECADE + 2
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

Counts = NDArray[np.float64]


def bin_of(values: Tensor) -> Tensor:
    """The bin of each number; NaN counts as large, since nothing is known of it."""
    place = ((values.double().log10() - LOWEST) * A_DECADE).floor() + 1
    return place.nan_to_num(nan=NUM_BINS - 1).clamp(0, NUM_BINS - 1).long()


def summed(places: Tensor, weights: Tensor | None = None, size: int = NUM_BINS) -> Counts:
    """How many numbers, or how much weight, each bin has."""
    values = None if weights is None else weights.flatten().double()
    found: Counts = torch.bincount(places.flatten(), values, minlength=size).double().cpu().numpy()
    return found


def counted(values: Iterable[float]) -> Counts:
    """The histogram of some numbers."""
    return summed(bin_of(torch.tensor(list(values), dtype=torch.float64)))


def edges() -> Counts:
    """Lower and upper limit of every bin: NUM_BINS + 1 numbers."""
    inner = 10.0 ** (LOWEST + np.arange(DECADES * A_DECADE + 1) / A_DECADE)
    return np.concatenate([[0.0], inner, [10 * inner[-1]]])


def quantile(counts: Counts, share: float) -> float:
    """The number below which this share of all numbers lies; inside a bin they count as evenly spread."""
    total = counts.sum()
    if not total:
        return float("nan")
    cumulative = np.concatenate([[0.0], np.cumsum(counts)])
    wanted = share * total
    place = int(np.searchsorted(cumulative, wanted, side="left")) - 1
    filled = np.flatnonzero(counts)
    place = int(np.clip(place, filled[0], filled[-1]))
    limits = edges()
    within = np.clip((wanted - cumulative[place]) / counts[place], 0, 1) if counts[place] else 0.0
    return float(limits[place] + within * (limits[place + 1] - limits[place]))


def quantiles(counts: Counts) -> dict[str, float | int]:
    """What calibration.json keeps: q05 ... q99, min, max and count; no number of any single case.

    min and max are the limits of the outermost bins in use.
    """
    found: dict[str, float | int] = {quantile_name(share): quantile(counts, share) for share in QUANTILES}
    return {**found, "min": quantile(counts, 0.0), "max": quantile(counts, 1.0), "count": int(counts.sum())}


def quantile_name(share: float) -> str:
    """
    >>> quantile_name(0.05)
    'q05'
    """
    return f"q{round(100 * share):02d}"


# As a message


def sparse(*columns: Counts) -> list[list[float]]:
    """Rows [bin, number, ...] of the bins in use: whole numbers as such."""
    used = np.flatnonzero(np.any([column != 0 for column in columns], axis=0))
    return [[int(place), *(plain(column[place]) for column in columns)] for place in used]


def plain(value: float) -> float:
    return int(value) if float(value).is_integer() else float(value)


def dense(rows: Sequence[Sequence[Any]], width: int = 1, size: int = NUM_BINS) -> tuple[Counts, ...]:
    """The columns `sparse` was given."""
    columns = np.zeros((width, size))
    for place, *values in rows:
        columns[:, int(place)] = values
    return tuple(columns)
