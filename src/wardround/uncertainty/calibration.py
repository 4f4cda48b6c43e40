"""Does a probability mean what it says? ECE, adaptive ECE, Brier score, reliability diagram.

Of each voxel two things count: the confidence, which is the probability of the predicted class, and
whether that class was right. A model is calibrated if of all voxels with confidence 0.8 eight in ten are
right (Guo et al., ICML 2017).

Most of a scan is easy background, so over whole scans every model seems calibrated. Only the voxels of
`around` count: the box of the true and the predicted foreground, a quarter wider on each side.

What a client sends is `Tally.scalars()`: sums over bins, never a voxel. Tallies add up to the tally of
all voxels together, except for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.uncertainty.histogram import Counts, dense, sparse, summed

BINS = 15  # equal-width bins of confidence, and equal-mass bins of adaptive ECE
FINE = 200  # bins from which the equal-mass ones are put together: 8 for each halving of 1 - confidence
AN_OCTAVE = 8
MARGIN = 0.25
LEAST_MARGIN = 2  # voxels


def around(truth: Tensor, predicted: Tensor) -> tuple[slice, ...]:
    """The box of all labelled and predicted voxels, a quarter wider each way; without any, the whole scan."""
    anything = (truth > 0) | (predicted > 0)
    box = []
    for axis, side in enumerate(anything.shape):
        others = [other for other in range(anything.ndim) if other != axis]
        used = anything.amax(dim=others).nonzero() if others else anything.nonzero()
        if not len(used):
            return tuple(slice(0, side) for side in anything.shape)
        low, high = int(used[0]), int(used[-1]) + 1
        margin = max(LEAST_MARGIN, round(MARGIN * (high - low)))
        box.append(slice(max(0, low - margin), min(side, high + margin)))
    return tuple(box)


@dataclass(frozen=True)
class Tally:
    """Sums over voxels.

    brier: of Σ_classes (p - y)²; nll: of -ln p of the true class; bins, fine: each (count, sum of
    confidence, number right) of every bin.
    """

    brier: float
    nll: float
    bins: tuple[Counts, Counts, Counts]
    fine: tuple[Counts, Counts, Counts]

    @classmethod
    def empty(cls) -> Tally:
        return cls(0.0, 0.0, dense([], 3, BINS), dense([], 3, FINE))  # type: ignore[arg-type]

    @classmethod
    def of(cls, log_p: Tensor, truth: Tensor, predicted: Tensor) -> Tally:
        """log_p: (classes, V) log-probabilities; truth, predicted: (V,) classes."""
        p = log_p.double().exp()
        truth, predicted = truth.long()[None], predicted.long()[None]
        confidence = p.gather(0, predicted)[0].clamp(0, 1)
        right = (truth == predicted)[0].double()
        true_p = p.gather(0, truth)
        brier = p.square().sum() + (1 - 2 * true_p).sum()  # Σ(p - y)² with y one-hot
        equal = (confidence * BINS).ceil().sub(1).clamp(0, BINS - 1).long()  # (0, 1/15], (1/15, 2/15] ...
        octaves = -(1 - confidence).log2() * AN_OCTAVE
        close = octaves.nan_to_num(posinf=FINE).floor().clamp(0, FINE - 1).long()
        bins = tuple(summed(equal, w, BINS) for w in (None, confidence, right))
        fine = tuple(summed(close, w, FINE) for w in (None, confidence, right))
        nll = -log_p.double().gather(0, truth).sum()
        return cls(float(brier), float(nll), bins, fine)  # type: ignore[arg-type]

    def __add__(self, other: Tally) -> Tally:
        bins = tuple(a + b for a, b in zip(self.bins, other.bins, strict=True))
        fine = tuple(a + b for a, b in zip(self.fine, other.fine, strict=True))
        return Tally(self.brier + other.brier, self.nll + other.nll, bins, fine)  # type: ignore[arg-type]

    @property
    def voxels(self) -> int:
        return int(self.bins[0].sum())

    # Scores

    def ece(self) -> float:
        """Σ_bins (n / N) |accuracy - confidence|, 15 bins of equal width."""
        return mean_gap(*self.bins)

    def adaptive_ece(self) -> float:
        """The same with 15 bins of equal mass (Nixon et al., 2019), put together from the fine ones."""
        return mean_gap(*equal_mass(*self.fine))

    def reliability(self) -> list[dict[str, float]]:
        """The bins in use, by increasing confidence: count, mean confidence, accuracy."""
        return [
            {"count": int(n), "confidence": float(c / n), "accuracy": float(r / n)}
            for n, c, r in zip(*self.bins, strict=True)
            if n
        ]

    def summary(self) -> dict[str, float | int | None]:
        n = self.voxels
        return {
            "ece": self.ece() if n else None,
            "adaptive_ece": self.adaptive_ece() if n else None,
            "brier": self.brier / n if n else None,
            "nll": self.nll / n if n else None,
            "voxels": n,
        }

    # As a message

    def scalars(self) -> dict[str, Any]:
        return {"brier": self.brier, "nll": self.nll, "bins": sparse(*self.bins), "fine": sparse(*self.fine)}

    @classmethod
    def from_scalars(cls, sent: Mapping[str, Any]) -> Tally:
        bins, fine = dense(sent["bins"], 3, BINS), dense(sent["fine"], 3, FINE)
        return cls(float(sent["brier"]), float(sent["nll"]), bins, fine)  # type: ignore[arg-type]


def mean_gap(count: Counts, confidence: Counts, right: Counts) -> float:
    total = count.sum()
    return float(np.abs(confidence - right).sum() / total) if total else float("nan")


def equal_mass(
    count: Counts, confidence: Counts, right: Counts, groups: int = BINS
) -> tuple[Counts, Counts, Counts]:
    """Neighbouring bins joined to groups of about equal mass; a bin is never split."""
    total = count.sum()
    middle = np.cumsum(count) - count / 2
    place = np.minimum(groups - 1, np.floor(groups * middle / max(total, 1))).astype(int)
    joined = np.zeros((3, groups))
    for row, column in zip(joined, (count, confidence, right), strict=True):
        np.add.at(row, place, column)
    return joined[0], joined[1], joined[2]


def log_probabilities(scores: Tensor, temperature: float = 1.0) -> Tensor:
    """ln p_T of `maps.scores`: (classes, V)."""
    return torch.log_softmax(scores.double() / temperature, dim=0)
