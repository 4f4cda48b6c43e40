"""Tests and intervals that count seeds: another seed and another case would both have given other scores.

A seed stands to a method as a reader to a modality in a study of several readers and cases, so the analysis
is that of Obuchowski and Rockette (Commun. Stat. Simul. Comput. 24, 1995) with degrees of freedom after
Hillis (Stat. Med. 26, 2007). Seeds and cases are crossed random effects; the variance of a mean over both is

    V = V_seeds + max(V_cases - V_residual, 0), and at least V_cases

    V_seeds      variance of the means of single seeds / number of seeds; holds the residual once
    V_cases      of a mean over cases, from the cases' means over seeds; holds the residual once more
    V_residual   what is neither seed nor case

and the degrees of freedom are Satterthwaite's, of V_seeds and the second term. The lower bound is ours: two
or three seeds may agree by chance. Clients are fixed, cases vary
within them, and the regions of a case stay together.

Why no bootstrap over seeds: with three of them a percentile interval of the seeds' means is that from the
smallest to the largest, which misses the truth one time in four.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wardround.comparison.statistics import (
    Array,
    CaseKey,
    PairedTest,
    Scores,
    average,
    both_finite,
    client_mean,
    compare_scores,
    distance_to_best,
    gain,
)
from wardround.tables import Interval

BySeed = Mapping[int, Scores]


@dataclass(frozen=True)
class MixedMean:
    """A mean over seeds and cases with its variance and degrees of freedom."""

    mean: float
    variance: float
    df: float

    @property
    def p(self) -> float:
        """Two-sided, that the mean is zero; NaN where nothing varies."""
        if not self.variance > 0:
            return math.nan
        from scipy.special import stdtr  # late, as in `statistics`

        return float(2 * stdtr(self.df, -abs(self.mean) / math.sqrt(self.variance)))

    def interval(self, centre: float) -> Interval:
        if math.isnan(self.variance):
            return Interval(math.nan, math.nan)
        from scipy.special import stdtrit

        half = float(stdtrit(self.df, 0.975)) * math.sqrt(self.variance) if self.variance else 0.0
        return Interval(centre - half, centre + half)


def estimate_mean(seeds: Sequence[Scores]) -> MixedMean:
    """The mean over clients, cases and seeds; at least two seeds. Values that are not finite are left out."""
    clients = tabulate(seeds)
    if not clients:
        return MixedMean(math.nan, math.nan, math.nan)
    means = np.array([mean_known([mean_known(cases[s]) for cases in clients]) for s in range(len(seeds))])
    means = means[~np.isnan(means)]
    of_seeds = float(means.var(ddof=1)) / len(means) if len(means) > 1 else 0.0
    with_residual, residual = vary_cases(clients)
    from_cases = max(0.0, with_residual - residual)
    variance = max(of_seeds + from_cases, with_residual)  # no less than the cases alone say
    df_seeds, df_cases = max(1, len(means) - 1), sum(cases.shape[1] - 1 for cases in clients)
    spread = of_seeds**2 / df_seeds + (from_cases**2 / df_cases if df_cases else 0.0)
    return MixedMean(float(means.mean()), variance, variance**2 / spread if spread else math.inf)


def tabulate(seeds: Sequence[Scores]) -> list[Array]:
    """For each client an array (seeds, cases): the mean over a case's regions, NaN where there is none."""
    cells: dict[str, dict[str, list[list[float]]]] = {}
    for place, scores in enumerate(seeds):
        for key in sorted(scores):
            if math.isfinite(scores[key]):
                rows = cells.setdefault(key.client, {}).setdefault(key.case, [[] for _ in seeds])
                rows[place].append(scores[key])
    return [
        np.array([[mean_known(regions) for regions in rows] for rows in cases.values()]).T
        for cases in cells.values()
    ]


def vary_cases(clients: Sequence[Array]) -> tuple[float, float]:
    """V_cases and V_residual of the mean over clients; a client with one case varies as the others do."""
    found = [np.array(vary_client(cases)) for cases in clients if cases.shape[1] > 1]
    usual = np.mean(found, axis=0) if found else np.zeros(2)
    each = iter(found)
    parts = [(next(each) if cases.shape[1] > 1 else usual) / cases.shape[1] for cases in clients]
    total, residual = np.sum(parts, axis=0) / len(clients) ** 2
    return float(total), float(residual)


def vary_client(cases: Array) -> tuple[float, float]:
    """Variance of the cases' means over seeds, and how much of it is residual. (seeds, cases)"""
    known = ~np.isnan(cases)
    means = np.nansum(cases, axis=0) / known.sum(axis=0)
    complete = cases[:, known.all(axis=0)]
    residual = 0.0  # errs on the safe side, where no two cases were tested with every seed
    if complete.shape[1] > 1 and len(cases) > 1:
        centred = complete - complete.mean(axis=0) - complete.mean(axis=1, keepdims=True) + complete.mean()
        residual = float((centred**2).sum()) / ((len(cases) - 1) * (complete.shape[1] - 1)) / len(cases)
    return float(means.var(ddof=1)), residual


def mean_known(values: Sequence[float] | Array) -> float:
    known = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def compare_seeds(
    ours: BySeed, theirs: BySeed, *, best: float, higher_is_better: bool | None
) -> PairedTest | None:
    """The paired test on the seeds and cases both have; of a single seed, over its cases alone.

    The test is of signed ranks, as Wilcoxon's, so that an infinite distance is the worst and not left out.
    """
    shared = sorted(ours.keys() & theirs.keys())
    averaged = (average([side[seed] for seed in shared]) for side in (ours, theirs))
    if len(shared) < 2:
        return compare_scores(*averaged, best=best, higher_is_better=higher_is_better)
    test = compare_scores(*averaged, best=best, higher_is_better=higher_is_better, resamples=1)
    if test is None:
        return None
    loss, sign = distance_to_best(best, higher_is_better), 1.0 if higher_is_better is True else -1.0
    gains: list[dict[CaseKey, float]] = []
    finite: list[dict[CaseKey, float]] = []
    for seed in shared:
        keys = sorted(ours[seed].keys() & theirs[seed].keys())
        pairs = {key: (ours[seed][key], theirs[seed][key]) for key in keys}
        pairs = {key: pair for key, pair in pairs.items() if not any(map(math.isnan, pair))}
        gains.append({key: gain(loss(a), loss(b)) for key, (a, b) in pairs.items()})
        finite.append({key: sign * gains[-1][key] for key, pair in pairs.items() if both_finite(pair)})
    ranked = estimate_mean(rank_signed(gains))
    difference = client_mean(average(finite, finite=True)) + 0.0
    return replace(
        test,
        p=test.p if math.isnan(ranked.p) else ranked.p,
        p_holm=test.p if math.isnan(ranked.p) else ranked.p,
        difference=difference,
        interval=estimate_mean(finite).interval(difference),
        method="seeds and cases",
        seed_gains=tuple(sign * client_mean(entry) for entry in finite),
    )


def rank_signed(gains: Sequence[Scores]) -> list[dict[CaseKey, float]]:
    """Ranks of all gains by their size, with their signs; zero stays zero. All clients together."""
    from scipy.stats import rankdata

    values = np.array([value for entry in gains for value in entry.values()])
    ranks = np.zeros(len(values))
    used = values != 0
    ranks[used] = rankdata(np.abs(values[used])) * np.sign(values[used])
    found = iter(ranks.tolist())
    return [{CaseKey("", f"{k.client}\x1f{k.case}", k.region): next(found) for k in entry} for entry in gains]
