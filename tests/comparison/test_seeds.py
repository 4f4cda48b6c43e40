"""Tests and intervals over seeds: by hand, against independent computations, and where nothing differs."""

import math
from typing import Any

import numpy as np
from pytest import approx, mark
from scipy import stats

from wardround.comparison.seeds import compare_seeds, estimate_mean
from wardround.comparison.statistics import CaseKey, compare_scores

inf, nan = math.inf, math.nan


def keyed(values: Any, client: str = "north") -> dict[CaseKey, float]:
    return {CaseKey(client, f"case-{n:03d}", "lesion"): float(v) for n, v in enumerate(values)}


def seeds(rows: Any) -> dict[int, dict[CaseKey, float]]:
    return {seed: keyed(row) for seed, row in enumerate(rows)}


def dice_test(ours: Any, theirs: Any) -> Any:
    return compare_seeds(seeds(ours), seeds(theirs), best=1.0, higher_is_better=True)


def test_a_hand_worked_example() -> None:
    # Seed means 2 and 4, case means 2 and 4, no residual: V_seeds = 2 / 2 = 1, V_cases = 2 / 2 = 1.
    # V = 2; df = 2^2 / (1^2 / 1 + 1^2 / 1) = 2; t(0.975, 2) = 4.3027.
    found = estimate_mean([keyed([1, 3]), keyed([3, 5])])

    assert (found.mean, found.variance, found.df) == (3.0, approx(2.0), approx(2.0))
    assert found.interval(3.0) == approx((3 - 4.30265 * 2**0.5, 3 + 4.30265 * 2**0.5), abs=1e-4)
    assert found.p == approx(2 * stats.t.sf(3 / 2**0.5, 2))


def test_the_variance_is_that_of_a_two_way_analysis_of_variance() -> None:
    generator = np.random.default_rng(3)
    values = generator.normal(0, 3, (4, 1)) + generator.normal(0, 2, (1, 9)) + generator.normal(0, 1, (4, 9))
    grand, rows, columns = values.mean(), values.mean(axis=1), values.mean(axis=0)
    ms_seeds = 9 * ((rows - grand) ** 2).sum() / 3
    ms_cases = 4 * ((columns - grand) ** 2).sum() / 8
    ms_rest = ((values - rows[:, None] - columns + grand) ** 2).sum() / (3 * 8)
    expected = (ms_seeds + ms_cases - ms_rest) / (4 * 9)

    assert estimate_mean([keyed(row) for row in values]).variance == approx(expected)


def test_seeds_alone_give_the_paired_t_test() -> None:
    """Cases that all shift alike leave nothing but seeds."""
    shifts = [0.01, 0.03, 0.05, 0.02]
    found = estimate_mean([keyed([shift] * 6) for shift in shifts])

    assert found.p == approx(stats.ttest_1samp(shifts, 0).pvalue) and found.df == approx(3)


def test_clients_count_the_same_and_a_single_case_is_as_uncertain_as_others() -> None:
    rows = [{**keyed([0.2, 0.4]), **keyed([0.9], "south")}, {**keyed([0.3, 0.5]), **keyed([0.8], "south")}]
    alone = [{key: v for key, v in row.items() if key.client == "north"} for row in rows]

    assert estimate_mean(rows).mean == approx((0.35 + 0.85) / 2)
    assert estimate_mean(rows).variance > estimate_mean(alone).variance / 4


def test_identical_rows_cannot_be_told_apart() -> None:
    found = dice_test([[0.5, 0.6, 0.7]] * 3, [[0.5, 0.6, 0.7]] * 3)

    assert (found.p, found.difference, found.interval) == (1.0, 0.0, (0.0, 0.0))
    assert not found.signs_differ


def test_a_difference_that_every_seed_and_case_shows_is_found() -> None:
    generator = np.random.default_rng(0)
    theirs = generator.uniform(0.3, 0.6, (3, 40))
    found = dice_test(theirs + generator.uniform(0.18, 0.22, (3, 40)), theirs)

    assert found.p < 0.01 and found.interval.low > 0.15 and found.num_seeds_better == 3


def test_a_seed_that_turns_the_sign_round_is_flagged() -> None:
    theirs = np.full((3, 4), 0.5)
    ours = theirs + np.array([[0.1], [0.1], [-0.05]]) + np.array([0.01, 0.0, 0.02, 0.03])
    found = dice_test(ours, theirs)
    lower = compare_seeds(seeds(ours), seeds(theirs), best=0.0, higher_is_better=False)

    assert found.signs_differ and found.num_seeds_better == 2
    assert lower is not None and lower.num_seeds_better == 1 and lower.difference == found.difference


def test_one_seed_is_tested_over_its_cases() -> None:
    ours, theirs = [[0.5, 0.7, 0.9]], [[0.4, 0.5, 0.95]]

    assert dice_test(ours, theirs) == compare_scores(
        keyed(ours[0]), keyed(theirs[0]), best=1.0, higher_is_better=True
    )


def test_infinite_distances_count_as_the_worst_and_undefined_ones_are_left_out() -> None:
    theirs = [[5.0, 6.0, 7.0, 8.0, nan]] * 3
    ours = [[4.0, inf, inf, inf, 1.0], [4.5, inf, inf, inf, 1.0], [4.2, inf, inf, inf, 1.0]]
    found = compare_seeds(seeds(ours), seeds(theirs), best=0.0, higher_is_better=False)

    assert found is not None and found.rank_biserial < 0 and found.difference < 0  # of the finite pair alone
    assert (found.num_pairs, found.num_infinite, found.num_skipped) == (4, 3, 1)
    assert compare_seeds(seeds([[nan]] * 2), seeds([[1.0]] * 2), best=0.0, higher_is_better=False) is None


def test_cases_that_differ_between_seeds_are_used_as_they_are() -> None:
    first, second = keyed([0.1, 0.2, 0.3]), keyed([0.2, 0.3, 0.4], "north")
    other = {key._replace(case=f"other {key.case}"): value for key, value in second.items()}

    assert math.isfinite(estimate_mean([first, other]).variance)


@mark.parametrize("noise", [0.05, 0.2])
def test_seeds_that_differ_are_seldom_taken_for_a_difference_of_methods(noise: float) -> None:
    """At the 5 % level; over cases alone it is far more. benchmarks/false_positives.py has the numbers."""
    generator, trials = np.random.default_rng(7), 200
    both, alone = 0, 0
    for _ in range(trials):
        ours, theirs = (
            generator.normal(0, 0.0145, (3, 1)) + generator.normal(0.7, noise, (3, 60)) for _ in range(2)
        )
        both += dice_test(ours, theirs).p < 0.05
        averaged = (keyed(rows.mean(axis=0)) for rows in (ours, theirs))
        test = compare_scores(*averaged, best=1.0, higher_is_better=True, resamples=1)
        alone += test is not None and test.p < 0.05

    assert both / trials <= 0.07
    if noise == 0.05:
        assert alone / trials > 0.3
