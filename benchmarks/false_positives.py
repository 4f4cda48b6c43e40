"""How often a comparison finds a difference where there is none: seeds differ, the methods do not.

    python benchmarks/false_positives.py

Two rows of the same method on the same test cases. A seed shifts all scores of its run (SD 0.0145 Dice, as
traffic.py measured on synthetic hospitals; 0.008 to 0.016 on polyps, real_data/README.md), every case differs
from the next (SD 0.25, which pairing removes), and every run gives a case another score (`noise`). A false
positive is a p below 0.05. Three tests see the same scores:

    cases alone            Wilcoxon over cases, seeds averaged first: what `compare` printed before
    two-stage bootstrap    seeds, then cases, resampled: 95 % percentile interval without zero
    seeds and cases        what `compare` prints now
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from numpy.typing import NDArray

from wardround.comparison.seeds import BySeed, compare_seeds
from wardround.comparison.statistics import CaseKey, average, compare_scores
from wardround.tables import Table

Array = NDArray[np.float64]

CLIENTS = 4
RESAMPLES = 400


def draw_row(options: argparse.Namespace, base: Array, generator: np.random.Generator) -> Array:
    """Scores (seeds, cases) of one row."""
    shift = generator.normal(options.difference, options.seed_sd, (options.seeds, 1))
    noise = generator.laplace(0, options.noise / np.sqrt(2), (options.seeds, len(base)))
    return base + shift + noise


def to_scores(values: Array) -> BySeed:
    keys = [CaseKey(f"client {n % CLIENTS}", f"case {n}", "lesion") for n in range(values.shape[1])]
    return {seed: dict(zip(keys, row.tolist(), strict=True)) for seed, row in enumerate(values)}


def bootstrap_misses(differences: Array, generator: np.random.Generator) -> bool:
    """Whether the percentile interval of the two-stage bootstrap leaves zero out. (seeds, cases)"""
    seeds, cases = differences.shape
    drawn_seeds = generator.integers(0, seeds, (RESAMPLES, seeds))
    drawn_cases = generator.integers(0, cases, (RESAMPLES, cases))
    counts = np.stack([np.bincount(row, minlength=cases) for row in drawn_cases]) / cases
    means = np.take_along_axis(counts @ differences.T, drawn_seeds, axis=1).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return bool(low > 0 or high < 0)


def measured(options: argparse.Namespace) -> dict[str, float]:
    """The share of trials in which each test finds a difference."""
    generator = np.random.default_rng(options.seed)
    found = {"cases alone": 0, "two-stage bootstrap": 0, "seeds and cases": 0}
    true = options.difference
    for _ in range(options.trials):
        base = generator.normal(0.7, options.case_sd, options.cases)
        first = draw_row(options, base, generator)
        options.difference = 0.0
        second = draw_row(options, base, generator)
        options.difference = true
        ours, theirs = to_scores(first), to_scores(second)
        averaged = (average(list(side.values())) for side in (ours, theirs))
        alone = compare_scores(*averaged, best=1.0, higher_is_better=True, resamples=1)
        both = compare_seeds(ours, theirs, best=1.0, higher_is_better=True)
        assert alone is not None and both is not None
        found["cases alone"] += alone.p < 0.05
        found["two-stage bootstrap"] += bootstrap_misses(first - second, generator)
        found["seeds and cases"] += both.p < 0.05
    return {name: count / options.trials for name, count in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 5])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--cases", type=int, default=120, help="test cases of all four clients together")
    parser.add_argument("--seed-sd", type=float, default=0.0145)
    parser.add_argument("--case-sd", type=float, default=0.25)
    parser.add_argument("--difference", type=float, default=0.0, help="a true one; then rates are the power")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for seeds in options.seeds:
        for noise in options.noise:
            chosen = argparse.Namespace(**{**vars(options), "seeds": seeds, "noise": noise})
            rows.append({"seeds": seeds, "noise": noise, **measured(chosen)})
    if options.json:
        print(json.dumps(rows))
        return
    title = f"Share of {options.trials} trials with p < 0.05, true difference {options.difference}"
    print(f"{title}\n\n{Table(title, list(rows[0]), [list(row.values()) for row in rows]).markdown()}")


if __name__ == "__main__":
    main()
