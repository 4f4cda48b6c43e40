"""One temperature for all hospitals, fitted on validation cases of which nothing leaves but sums.

p_T = softmax(s / T) (Guo et al., ICML 2017); s are logits, or ln of a Dirichlet's expected probabilities.
With β = 1/T the negative log-likelihood is a sum of convex functions of β, one a voxel:

    g(β) = Σ ln Σ_c exp(β s_c) - β s_y        g' = Σ E[s] - s_y     g'' = Σ Var[s]     g''' = Σ third cumulant

A client sends these three sums on a fixed grid of temperatures, in one exchange whatever the number of
voxels. The server adds them up and finds where g' is 0 by interpolation that matches all three (quintic, in
ln β); between two points of the grid its error is about 1e-9, far below the precision a temperature needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LIMIT = 16.0  # temperatures from 1/16 to 16
POINTS = 25
VOXELS_AT_ONCE = 2**18

Sums = NDArray[np.float64]


def grid() -> Sums:
    """β of the grid, even steps of ln β."""
    return np.exp(np.linspace(-math.log(LIMIT), math.log(LIMIT), POINTS))


def slopes(scores: Tensor, truth: Tensor, betas: Sequence[float] | Sums) -> Sums:
    """g', g'' and g''' at every β, (3, points): scores (classes, V), truth (V,) classes."""
    found = torch.zeros(3, len(betas), dtype=torch.float64, device=scores.device)
    for start in range(0, scores.shape[1], VOXELS_AT_ONCE):
        s = scores[:, start : start + VOXELS_AT_ONCE].double()
        true = s.gather(0, truth[None, start : start + VOXELS_AT_ONCE].long())
        s = s - true  # relative to the true class, so that sums stay small where the model is right
        for place, beta in enumerate(betas):
            p = torch.softmax(float(beta) * s, dim=0)
            mean = (p * s).sum(dim=0)
            apart = s - mean
            square = p * apart.square()
            found[0, place] += mean.sum()
            found[1, place] += square.sum()
            found[2, place] += (square * apart).sum()
    result: Sums = found.cpu().numpy()
    return result


@dataclass(frozen=True)
class Temperature:
    """value: 1 where none could be fitted; reason: why it is not a minimum, or None."""

    value: float
    reason: str | None = None


def fit(sums: Sums) -> Temperature:
    """The temperature with the lowest negative log-likelihood, from sums of `slopes` on the grid."""
    beta = grid()
    first, second, third = sums
    if not np.isfinite(sums).all() or not second.any():
        return Temperature(1.0, "there is no validation voxel to fit it on")
    x = np.log(beta)
    slope = beta * first  # dg / d ln β, and its next two derivatives
    bend = slope + beta**2 * second
    twist = slope + 3 * beta**2 * second + beta**3 * third
    if slope[-1] <= 0:  # more confidence is always better: there are no confident errors
        return Temperature(1.0, "the validation cases hold too few errors to fit it on")
    if slope[0] >= 0:
        return Temperature(LIMIT, f"the model is so overconfident that the largest one, {LIMIT:g}, is used")
    right = int(np.argmax(slope > 0))
    cell = slice(right - 1, right + 1)
    root = root_between(x[cell], np.stack([slope[cell], bend[cell], twist[cell]]))
    return Temperature(math.exp(-root))


def root_between(x: Sums, values: Sums) -> float:
    """Where the quintic with this value, slope and curvature at both ends is 0: x (2,), values (3, 2).

    Its value is negative at the left end and positive at the right one; halving finds the place.
    """
    step = x[1] - x[0]
    powers = np.arange(6)
    left = np.diag([1.0, 1.0, 2.0, 0, 0, 0])[:3]  # of t^0 ... t^5 and two derivatives, at t = 0 and 1
    right = np.stack([np.ones(6), powers, powers * (powers - 1)])
    wanted = (values * step ** np.arange(3)[:, None]).T.flatten()
    coefficients = np.linalg.solve(np.concatenate([left, right]), wanted)[::-1]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.polyval(coefficients, middle) < 0 else (low, middle)
    return float(x[0] + step * (low + high) / 2)


# As a message


def scalars(sums: Sums) -> dict[str, Any]:
    return {name: [float(v) for v in row] for name, row in zip(NAMES, sums, strict=True)}


def from_scalars(sent: Mapping[str, Any]) -> Sums:
    return np.array([sent[name] for name in NAMES], dtype=np.float64)


NAMES = ("first", "second", "third")
