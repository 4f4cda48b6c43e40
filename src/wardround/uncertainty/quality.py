"""Does uncertainty find the errors? Overlap, risk against coverage, and what it says of a case's Dice.

Ties are given their expectation over a random order, so nothing here depends on how equal numbers happen
to be sorted.

>>> round(aurc([0.1, 0.2, 0.9], [0.0, 0.0, 1.0]), 4)  # the one bad case is the most uncertain
0.1111
>>> round(aurc([0.9, 0.2, 0.1], [0.0, 0.0, 1.0]), 4)
0.6111
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.uncertainty.histogram import Counts

Numbers = NDArray[np.float64]


def error_overlap(uncertainty: Tensor, wrong: Tensor) -> float | None:
    """Dice of the wrong voxels with the most uncertain ones, as many of these; None without an error.

    1: every error is where the model was least confident. Chance gives the share of wrong voxels.
    """
    errors = int(wrong.sum())
    if not errors:
        return None
    values, wrong = uncertainty.flatten().double(), wrong.flatten()
    threshold = values.kthvalue(len(values) - errors + 1).values  # the errors-th largest
    above, ties = values > threshold, values == threshold
    room = errors - int(above.sum())
    hits = int((above & wrong).sum()) + room * int((ties & wrong).sum()) / int(ties.sum())
    return hits / errors


# Risk and coverage


def grouped(uncertainty: Sequence[float], risk: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Cases grouped by uncertainty, the most confident first: how many, and the sum of their risks."""
    _, place = np.unique(np.asarray(uncertainty, dtype=float), return_inverse=True)
    sums = np.zeros((2, int(place.max()) + 1))
    np.add.at(sums[0], place, 1)
    np.add.at(sums[1], place, np.asarray(risk, dtype=float))
    return sums[0], sums[1]


def curve(counts: Counts, risks: Counts) -> tuple[Numbers, Numbers]:
    """Coverage and selective risk after each group: the mean risk of what is kept.

    Groups are ordered from confident to uncertain; empty ones are skipped.
    """
    counts, risks = counts[counts > 0], risks[counts > 0]
    kept = np.cumsum(counts)
    return kept / max(kept[-1], 1) if len(kept) else kept, np.cumsum(risks) / kept


def area(counts: Counts, risks: Counts) -> float:
    """AURC: the mean of the selective risk over keeping 1, 2, ... of all (Geifman and El-Yaniv, 2017).

    Inside a group of n after K others with risk E, the j-th is expected to bring e/n:
    Σ_j (E + j e/n) / (K + j) = e + (E - K e/n) (ψ(K + n + 1) - ψ(K + 1)).
    """
    counts, risks = counts[counts > 0], risks[counts > 0]
    if not len(counts):
        return math.nan
    before, risk_before = np.cumsum(counts) - counts, np.cumsum(risks) - risks
    harmonic = digamma(before + counts + 1) - digamma(before + 1)
    total = np.sum(risks + (risk_before - before * risks / counts) * harmonic)
    return float(total / counts.sum())


def digamma(values: Numbers) -> Numbers:
    found: Numbers = torch.digamma(torch.from_numpy(values)).numpy()
    return found


def risk_coverage(uncertainty: Sequence[float], risk: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Coverage and selective risk of cases, kept from the least uncertain on."""
    return curve(*grouped(uncertainty, risk))


def aurc(uncertainty: Sequence[float], risk: Sequence[float]) -> float:
    """Area under the risk-coverage curve of cases; NaN without any."""
    return area(*grouped(uncertainty, risk)) if len(uncertainty) else math.nan


def best_aurc(risk: Sequence[float]) -> float:
    """The lowest possible AURC: uncertainty in the exact order of the risks."""
    return aurc(risk, risk)


# Quality of a case


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation; None with fewer than three pairs or if one side is constant."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def ranks(values: Sequence[float]) -> Numbers:
    """Ranks from the smallest; equal numbers share their mean rank."""
    _, place, count = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    middle: Numbers = np.cumsum(count) - (count - 1) / 2
    return middle[place]


def voxel_groups(places: Tensor, wrong: Tensor, size: int) -> tuple[Counts, Counts]:
    """Voxels and errors of each bin of uncertainty."""
    counts = torch.bincount(places.flatten(), minlength=size)
    errors = torch.bincount(places.flatten(), wrong.flatten().double(), minlength=size)
    return counts.double().cpu().numpy(), errors.double().cpu().numpy()
