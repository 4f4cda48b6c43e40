"""How much privacy a list of answers has spent, by the Renyi accountant of Opacus.

Every answer is a number of steps of the sampled Gaussian mechanism (Mironov et al. 2019,
https://arxiv.org/abs/1908.10530), whose Renyi divergences add up; the library computes and converts them.
Here is only the search for the noise that makes a list end at a given epsilon.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq

from wardround.errors import ConfigError

ORDERS = [1 + tenth / 10 for tenth in range(1, 100)]
ORDERS += [*range(12, 64), 64, 80, 96, 128, 192, 256, 384, 512, 1024]
MOST_NOISE = 10_000.0  # beyond it nothing of an answer is left
TOLERANCE = 2e-7  # of the noise that is searched for
SPENT = 1 - 1e-5  # of epsilon: the last planned round ends above this share, and none before it


class Release(NamedTuple):
    """What one answer spends.

    noise: standard deviation over sensitivity; rate: chance of a case to be in a step; steps: of the answer.
    """

    noise: float
    rate: float = 1.0
    steps: int = 1


def load_library() -> Any:
    """The functions of Opacus."""
    try:
        from opacus.accountants.analysis import rdp
    except ImportError:
        raise ConfigError(
            "privacy needs Opacus, which is not installed. Install it with: pip install 'wardround[privacy]'"
        ) from None
    return rdp


@lru_cache(maxsize=4096)
def _divergences(noise: float, rate: float) -> np.ndarray:
    """Of one step, at every order."""
    found: np.ndarray = load_library().compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=ORDERS)
    return found


def count_epsilon(releases: Sequence[Release], delta: float) -> float:
    """What these answers have spent together.

    >>> count_epsilon([], 1e-5)
    0.0
    """
    if not releases:
        return 0.0
    total = sum(release.steps * _divergences(release.noise, release.rate) for release in releases)
    with warnings.catch_warnings():  # that the best order is the first or last of ours: epsilon is still true
        warnings.simplefilter("ignore")
        spent, _ = load_library().get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)
    return max(float(spent), 0.0)


def calibrate_noise(
    before: Sequence[Release], rate: float, steps: int, epsilon: float, delta: float
) -> float | None:
    """The least noise with which so many steps, after what was released before, end within epsilon.

    None where no noise does: epsilon is spent.
    """

    if count_epsilon(before, delta) >= SPENT * epsilon:
        return None

    def excess(noise: float) -> float:
        spent = count_epsilon([*before, Release(noise, rate, steps)], delta)
        return min(math.log(max(spent, 1e-12) / epsilon), 700.0)

    last = before[-1].noise if before else MOST_NOISE
    if excess(last) <= 0 < excess(last * (1 - 2 * TOLERANCE)):
        return last  # as planned in the round before
    low = high = 1.0
    while excess(high) > 0:
        low, high = high, high * 4
        if high > MOST_NOISE:
            return None
    while low > 1e-2 and excess(low) < 0:
        low, high = low / 4, low
    if excess(low) <= 0:
        return low
    found = brentq(lambda power: excess(math.exp(power)), math.log(low), math.log(high), xtol=TOLERANCE / 2)
    noise = math.exp(found)
    while excess(noise) > 0:
        noise *= 1 + TOLERANCE / 2
    return noise
