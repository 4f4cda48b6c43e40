"""Statistics equal SciPy's and hand-worked numbers; corrections and intervals keep their promises."""

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as some
from pytest import approx, mark
from scipy import stats

from wardround.comparison.statistics import (
    CaseKey,
    average,
    bootstrap,
    client_mean,
    compare_scores,
    holm,
    signed_rank,
)

nan, inf = math.nan, math.inf
probabilities = some.lists(some.floats(0, 1), min_size=1, max_size=12)


def keyed(values: Any, client: str = "north") -> dict[CaseKey, float]:
    return {CaseKey(client, f"case-{n:03d}", "lesion"): float(v) for n, v in enumerate(values)}


def dice_test(ours: Any, theirs: Any) -> Any:
    return compare_scores(keyed(ours), keyed(theirs), best=1.0, higher_is_better=True)


# Wilcoxon


@mark.parametrize("number", [1, 2, 6, 13, 14, 30, 50, 51, 80, 300])
@mark.parametrize("shift", [0.0, 0.4])
def test_p_equals_scipys_on_random_data(number: int, shift: float) -> None:
    differences = np.random.default_rng(number).normal(shift, 1, number)

    assert signed_rank(differences).p == approx(stats.wilcoxon(differences).pvalue, rel=1e-12)


@mark.parametrize("seed", range(5))
def test_p_with_ties_equals_scipys_permutation_test(seed: int) -> None:
    differences = np.random.default_rng(seed).choice([-3, -2, -1, 1, 2, 3], 9).astype(float)
    exact = stats.wilcoxon(differences, method=stats.PermutationMethod(n_resamples=np.inf))

    assert signed_rank(differences).p == approx(exact.pvalue, rel=1e-12)


def test_p_with_ties_and_many_pairs_equals_scipys_normal_approximation() -> None:
    differences = np.random.default_rng(1).choice([-3, -2, -1, 1, 2, 3, 4], 120).astype(float)

    assert signed_rank(differences).p == approx(stats.wilcoxon(differences).pvalue, rel=1e-12)


def test_a_hand_worked_example() -> None:
    # |d| ranks: 0.1 -> 1, 0.2 -> 2, 0.3 -> 3, 0.4 -> 4, 0.5 -> 5; only 0.2 is negative, so W- = 2, W+ = 13.
    # Sign patterns with W- <= 2: none, {1}, {2}: 3 of 32; two-sided p = 6/32. Effect (13 - 2) / 15.
    found = signed_rank([0.1, -0.2, 0.3, 0.4, 0.5])

    assert found.p == 6 / 32
    assert found.rank_biserial == approx(11 / 15)
    assert (found.num_positive, found.num_negative, found.num_zero) == (4, 1, 0)


def test_a_hand_worked_example_with_a_tie_and_a_zero() -> None:
    # The zero is dropped. |d| = 1, 1, 2 rank 1.5, 1.5, 3; W- = 1.5. Patterns with a sum <= 1.5: none, two
    # single ones: 3 of 8; two-sided p = 6/8.
    found = signed_rank([1.0, -1.0, 2.0, 0.0])

    assert found.p == 0.75 and found.num_zero == 1
    assert found.rank_biserial == approx((4.5 - 1.5) / 6)


def test_identical_methods_give_p_1_and_a_difference_of_0() -> None:
    values = np.random.default_rng(0).random(20)
    found = dice_test(values, values)

    assert (found.p, found.p_holm, found.difference, found.rank_biserial) == (1.0, 1.0, 0.0, 0.0)
    assert found.interval == (0.0, 0.0)
    assert math.copysign(1, found.difference) == 1  # not -0.0
    assert found.num_zero == 20


@given(some.lists(some.floats(-10, 10), min_size=1, max_size=60))
def test_p_is_a_probability_and_symmetric(differences: list[float]) -> None:
    found, mirrored = signed_rank(differences), signed_rank([-d for d in differences])

    assert 0 <= found.p <= 1
    assert found.p == approx(mirrored.p, rel=1e-9) and found.rank_biserial == approx(-mirrored.rank_biserial)
    assert -1 <= found.rank_biserial <= 1


# Pairs


def test_the_difference_is_in_metric_units_and_positive_effects_are_better() -> None:
    up = dice_test([0.9, 0.8], [0.7, 0.7])
    nearer = compare_scores(keyed([2, 3]), keyed([4, 4]), best=0.0, higher_is_better=False)

    assert up.difference == approx(0.15) and up.rank_biserial == 1 and up.num_better == 2
    assert nearer is not None
    assert nearer.difference == approx(-1.5) and nearer.rank_biserial == 1  # a smaller distance is better


def test_signed_metrics_are_compared_by_their_distance_from_the_best_value() -> None:
    found = compare_scores(keyed([-1.0, 1.0]), keyed([3.0, -2.0]), best=0.0, higher_is_better=None)

    assert found is not None and found.rank_biserial == 1
    assert found.difference == approx((1 + 1 - 3 - 2) / 2)


def test_an_infinite_distance_ranks_as_the_worst_and_two_are_a_tie() -> None:
    # Ours fails on case 0, theirs on case 1, both on case 2; on case 3 ours is better by 1.
    found = compare_scores(keyed([inf, 5, inf, 4]), keyed([5, inf, inf, 5]), best=0.0, higher_is_better=False)

    assert found is not None
    assert (found.num_pairs, found.num_infinite, found.num_zero) == (4, 3, 1)
    assert found.rank_biserial == approx((2.5 + 1 - 2.5) / 6)  # the two failures share the highest rank
    assert found.difference == -1.0  # finite pairs alone


def test_dropping_a_failure_would_reward_it() -> None:
    theirs = [10.0] * 8
    ours = [9.0, *[inf] * 7]
    found = compare_scores(keyed(ours), keyed(theirs), best=0.0, higher_is_better=False)

    assert found is not None and found.rank_biserial < 0 and found.num_worse == 7


def test_undefined_values_are_skipped_and_counted() -> None:
    found = dice_test([0.5, nan, 0.7], [0.4, 0.5, nan])

    assert (found.num_pairs, found.num_skipped) == (1, 2)
    assert dice_test([nan], [0.5]) is None
    assert compare_scores({}, {}, best=1.0, higher_is_better=True) is None


def test_only_cases_both_have_are_paired() -> None:
    assert dice_test([0.5, 0.6, 0.7], [0.4]).num_pairs == 1


def test_seeds_are_averaged_case_by_case() -> None:
    first, second = keyed([0.2, nan, inf]), keyed([0.4, 0.6, 1.0, 0.9])
    keys = list(second)

    assert average([first, second]) == {keys[0]: approx(0.3), keys[1]: 0.6, keys[2]: inf, keys[3]: 0.9}
    assert average([first, second], finite=True)[keys[2]] == 1.0
    assert math.isnan(average([keyed([nan])])[keys[0]])


# Holm


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(probabilities)
def test_holm_is_no_smaller_than_p_and_no_larger_than_bonferroni(values: list[float]) -> None:
    for plain, corrected in zip(values, holm(values), strict=True):
        assert plain <= corrected <= min(1.0, len(values) * plain)


@given(probabilities)
def test_holm_keeps_the_order_and_does_not_depend_on_it(values: list[float]) -> None:
    corrected = holm(values)
    order = sorted(range(len(values)), key=lambda n: values[n])

    assert [corrected[n] for n in order] == sorted(corrected)
    assert sorted(holm(values[::-1])) == approx(sorted(corrected))
    assert holm([min(values)])[0] == min(values)  # one test needs no correction


@given(probabilities, some.floats(0.001, 0.2))
def test_holm_rejects_at_least_what_bonferroni_does(values: list[float], level: float) -> None:
    for plain, corrected in zip(values, holm(values), strict=True):
        if plain * len(values) <= level:
            assert corrected <= level * (1 + 1e-9)


# Bootstrap

scores = some.lists(some.floats(0, 1), min_size=1, max_size=15)


@settings(max_examples=30)
@given(scores, scores)
def test_the_interval_is_inside_the_values_and_repeatable(north: list[float], south: list[float]) -> None:
    values = keyed(north) | keyed(south, "south")
    low, high = bootstrap(values, resamples=200)

    assert bootstrap(values, resamples=200) == (low, high)
    assert bootstrap(dict(reversed(values.items())), resamples=200) == (low, high)  # order does not matter
    least, most = (min(north) + min(south)) / 2, (max(north) + max(south)) / 2
    assert least - 1e-9 <= low <= high <= most + 1e-9


@settings(max_examples=30)
@given(scores, some.floats(-5, 5))
def test_the_interval_moves_with_the_values(values: list[float], shift: float) -> None:
    low, high = bootstrap(keyed(values), resamples=100)
    moved = bootstrap(keyed([value + shift for value in values]), resamples=100)

    assert moved == (approx(low + shift, abs=1e-9), approx(high + shift, abs=1e-9))


def test_equal_values_have_an_interval_without_width() -> None:
    assert bootstrap(keyed([0.5] * 9)) == (approx(0.5), approx(0.5))


def test_the_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        low, high = bootstrap(keyed(random.normal(0.7, 0.1, 40)), resamples=400)
        hits += low <= 0.7 <= high

    assert 0.88 <= hits / 200 <= 0.99


def test_the_interval_equals_scipys_for_one_client() -> None:
    values = np.random.default_rng(5).random(40)
    ours = bootstrap(keyed(values), resamples=9000)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=9000, method="percentile", rng=1)

    assert ours == approx(tuple(theirs.confidence_interval), abs=0.006)


def test_infinite_and_undefined_values_are_left_out_of_means_and_intervals() -> None:
    values = keyed([0.5, inf, nan, 0.5])

    assert client_mean(values) == 0.5 and bootstrap(values) == (0.5, 0.5)
    assert all(math.isnan(end) for end in bootstrap(keyed([inf, nan])))


def test_every_client_counts_the_same() -> None:
    assert client_mean(keyed([1.0] * 9) | keyed([0.0], "south")) == 0.5


def test_the_regions_of_a_case_are_drawn_together() -> None:
    # Disc and cup of a case cancel out: whatever cases are drawn, the mean is 0.5.
    pairs = {
        CaseKey("a", f"{n}", region): value
        for n in range(8)
        for region, value in (("disc", 0.5 + n / 20), ("cup", 0.5 - n / 20))
    }

    assert bootstrap(pairs) == (approx(0.5), approx(0.5))
