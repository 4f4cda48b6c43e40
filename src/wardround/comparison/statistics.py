"""Paired tests, corrected p-values, intervals and effect sizes; pure functions on case scores.

A score belongs to a `CaseKey`: client, case and region. Two methods are compared on the keys both have.

Choices, each also written under the tables:

- Several seeds are what `seeds` is for. Folds, and seeds where one score a case is needed, are averaged case
  by case first, so a case counts once however often it was tested.
- Wilcoxon signed-rank test, two-sided. Pairs without a difference are dropped (Wilcoxon's own rule) and
  counted; with no pair left, p is 1. Equal differences share their mean rank. Up to 50 pairs the p-value is
  exact, ties included; beyond that it comes from the normal approximation, corrected for ties.
- An infinite distance (one mask is empty, the other is not) is a failure, not a missing value: it ranks as
  the worst possible. Dropping it would reward a method for failing. Two infinite values are a tie.
- A mean over infinite values says nothing, so means, differences and intervals use the finite ones.
- NaN (undefined, `evaluate.empty_policy: nan`) is skipped and counted.
- Intervals are percentiles of the mean over clients when the cases of each client are resampled with
  replacement; a case keeps its regions together. They show the variation due to the test cases, not that due
  to seeds or the choice of hospitals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wardround.tables import Interval

Array = NDArray[np.float64]

EXACT_PAIRS = 50
RESAMPLES = 10_000
CHUNK = 250  # resamples drawn at once: bounds the memory, and the stream of random numbers stays the same
SEED = 20_240_607


class CaseKey(NamedTuple):
    """Whose score: the same key in two runs is the same patient and the same structure."""

    client: str
    case: str
    region: str


Scores = Mapping[CaseKey, float]


@dataclass(frozen=True)
class SignedRank:
    """A Wilcoxon signed-rank test.

    rank_biserial: matched pairs, from -1 (every pair against us) to 1 (every pair for us);
    method: exact, normal, or none (no pair differs).
    """

    p: float
    rank_biserial: float
    num_positive: int
    num_negative: int
    num_zero: int
    method: str


@dataclass(frozen=True)
class PairedTest:
    """One method against the reference, on the cases both were tested on.

    p_holm: corrected for all methods compared with this reference; difference: mean over clients of the
    mean difference (method minus reference, metric units; distances from the best value for signed
    metrics); rank_biserial, num_better, num_worse: positive means better than the reference.
    num_pairs: behind the test; num_skipped: NaN in one of the two; num_infinite: infinite in one or both.
    seed_gains: with several seeds, how much better the mean of each was than the reference's.
    """

    p: float
    p_holm: float
    difference: float
    interval: Interval
    rank_biserial: float
    num_pairs: int
    num_better: int
    num_worse: int
    num_zero: int
    num_skipped: int
    num_infinite: int
    method: str
    seed_gains: tuple[float, ...] = ()

    @property
    def num_seeds_better(self) -> int:
        return sum(gain > 0 for gain in self.seed_gains)

    @property
    def signs_differ(self) -> bool:
        """Whether it was better with some seeds and worse with others."""
        return min(self.seed_gains, default=0.0) < 0 < max(self.seed_gains, default=0.0)


# Averaging over seeds and folds


def average(replicates: Sequence[Scores], *, finite: bool = False) -> dict[CaseKey, float]:
    """One score a case: the mean over the replicates that tested it.

    NaN is passed over unless there is nothing else. Infinite in one replicate is infinite (for tests);
    with `finite` it is passed over too (for means and intervals).
    """
    values: dict[CaseKey, list[float]] = {}
    for scores in replicates:
        for key, value in scores.items():
            values.setdefault(key, []).append(value)
    keep: Callable[[float], bool] = math.isfinite if finite else lambda value: not math.isnan(value)
    return {key: mean([value for value in values[key] if keep(value)]) for key in sorted(values)}


def mean(values: Sequence[float]) -> float:
    """
    >>> mean([0.5, 1.0]), mean([])
    (0.75, nan)
    """
    return math.fsum(values) / len(values) if values else math.nan


# Wilcoxon


def signed_rank(differences: Sequence[float]) -> SignedRank:
    """The two-sided test that differences are symmetric about zero; infinite ones rank highest.

    >>> signed_rank([1.0, 2.0, 3.0]).p  # 2 of the 8 sign patterns are as extreme
    0.25
    """
    given = np.asarray(differences, dtype=np.float64)
    used = given[given != 0]
    positive, negative = int((used > 0).sum()), int((used < 0).sum())
    zeros = len(given) - len(used)
    if not len(used):
        return SignedRank(1.0, 0.0, 0, 0, zeros, "none")
    from scipy.stats import rankdata  # half a second, which training should not wait for

    ranks = np.asarray(rankdata(np.abs(used)), dtype=np.float64)
    total = float(ranks.sum())
    plus = float(ranks[used > 0].sum())
    effect = (2 * plus - total) / total
    if len(used) <= EXACT_PAIRS:
        return SignedRank(exact_p(ranks, plus), effect, positive, negative, zeros, "exact")
    return SignedRank(normal_p(ranks, plus), effect, positive, negative, zeros, "normal")


def exact_p(ranks: Array, plus: float) -> float:
    """How many of all sign patterns are at least as far from the middle; ranks of ties are halves."""
    doubled = np.rint(2 * ranks).astype(int)
    counts = np.zeros(int(doubled.sum()) + 1)
    counts[0] = 1.0
    for rank in doubled:  # counts[s]: sign patterns whose positive ranks sum to s / 2
        counts[rank:] += counts[:-rank].copy()
    smaller = min(round(2 * plus), int(doubled.sum()) - round(2 * plus))
    tail = counts[: smaller + 1].sum() / counts.sum()
    return float(min(1.0, 2 * tail))


def normal_p(ranks: Array, plus: float) -> float:
    """The normal approximation; the sum of squared ranks carries the correction for ties."""
    sd = math.sqrt(float((ranks**2).sum()) / 4)
    z = (plus - float(ranks.sum()) / 2) / sd
    return math.erfc(abs(z) / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the family-wise error stays below the level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


# Means over clients and their intervals


def client_mean(scores: Scores) -> float:
    """Mean over clients of the mean over their finite scores: every client counts the same."""
    by_client: dict[str, list[float]] = {}
    for key, value in scores.items():
        if math.isfinite(value):
            by_client.setdefault(key.client, []).append(value)
    return mean([mean(values) for values in by_client.values()])


def bootstrap(scores: Scores, *, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """The 95 % interval of `client_mean`, cases resampled within each client.

    The same seed draws the same cases for every method, so intervals of two methods are comparable.
    """
    return Interval(*take_quantiles(resample_means(scores, resamples=resamples, seed=seed)))


def resample_means(scores: Scores, *, resamples: int = RESAMPLES, seed: int = SEED) -> Array:
    """`client_mean` of every bootstrap sample; NaN where there are no finite scores."""
    clients = sum_cases(scores)
    if not clients:
        return np.full(resamples, math.nan)
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [resample(clients, min(CHUNK, resamples - start), generator) for start in range(0, resamples, CHUNK)]
    )


def take_quantiles(values: Array) -> tuple[float, float]:
    """The ends of the 95 % interval."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def sum_cases(scores: Scores) -> list[Array]:
    """For each client an array (cases, 2): sum and number of the finite scores of a case."""
    sums: dict[str, dict[str, list[float]]] = {}
    for key in sorted(scores):
        if math.isfinite(scores[key]):
            entry = sums.setdefault(key.client, {}).setdefault(key.case, [0.0, 0.0])
            entry[0] += scores[key]
            entry[1] += 1
    return [np.array(list(cases.values())) for cases in sums.values()]


def resample(clients: Sequence[Array], count: int, generator: np.random.Generator) -> Array:
    """`count` means over clients."""
    total = np.zeros(count)
    for cases in clients:
        chosen = cases[generator.integers(0, len(cases), (count, len(cases)))].sum(axis=1)  # (count, 2)
        total += chosen[:, 0] / chosen[:, 1]
    return total / len(clients)


# A method against the reference


def compare_scores(
    scores: Scores,
    reference: Scores,
    *,
    best: float,
    higher_is_better: bool | None,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> PairedTest | None:
    """The paired test on the cases both have; None if there is none. `p_holm` is still the plain p."""
    loss = distance_to_best(best, higher_is_better)
    shared = sorted(scores.keys() & reference.keys())
    pairs = {key: (scores[key], reference[key]) for key in shared}
    valid = {key: pair for key, pair in pairs.items() if not any(math.isnan(value) for value in pair)}
    if not valid:
        return None
    gains = {key: gain(loss(ours), loss(theirs)) for key, (ours, theirs) in valid.items()}
    test = signed_rank(list(gains.values()))
    sign = -1.0 if higher_is_better is not True else 1.0  # a smaller distance is a gain
    finite = {key: sign * value for key, value in gains.items() if both_finite(valid[key])}
    return PairedTest(
        p=test.p,
        p_holm=test.p,
        difference=client_mean(finite) + 0.0,  # no -0.0
        interval=bootstrap(finite, resamples=resamples, seed=seed),
        rank_biserial=test.rank_biserial,
        num_pairs=len(valid),
        num_better=test.num_positive,
        num_worse=test.num_negative,
        num_zero=test.num_zero,
        num_skipped=len(pairs) - len(valid),
        num_infinite=sum(not both_finite(pair) for pair in valid.values()),
        method=test.method,
    )


def distance_to_best(best: float, higher_is_better: bool | None) -> Callable[[float], float]:
    """What a method should keep small: the value, its negative, or its distance from the best one."""
    if higher_is_better is None:
        return lambda value: abs(value - best)
    return (lambda value: -value) if higher_is_better else (lambda value: value)


def gain(ours: float, theirs: float) -> float:
    """How much smaller our loss is; two infinite ones are equal."""
    return 0.0 if ours == theirs else theirs - ours


def both_finite(pair: tuple[float, float]) -> bool:
    return math.isfinite(pair[0]) and math.isfinite(pair[1])
