"""Histograms: joined quantiles are those of the pooled cases within one bin, and no bin is of few patients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from wardround.data.fingerprint.histogram import (
    BEHIND,
    MOST_BINS,
    Histogram,
    IntensityHistogram,
    VoxelCounts,
    count_intensities,
    cut_bins,
    find_intensity,
    find_quantile,
    make_histogram,
)

LEVELS = (0.1, 0.5, 0.9)


def draw(count: int, seed: int = 0) -> Any:
    return np.exp(np.random.default_rng(seed).normal(3, 0.5, count))


# Cases


def test_two_clusters_are_not_mixed_and_bins_have_three_patients_each() -> None:
    found = make_histogram([0.5, 6, 0.5, 6, 0.5, 6, 6], range(7))

    assert found == Histogram(means=(0.5, 6.0), counts=(3, 4), sd=2.72179)


def test_bins_are_the_best_of_all_ways_to_cut() -> None:
    values = np.sort(draw(11))
    logs = np.log(values)

    def spread(places: tuple[int, ...]) -> float:
        return sum(
            float(((p := logs[a:b]) - p.mean()).__pow__(2).sum()) for a, b in itertools.pairwise(places)
        )

    ways = [
        (0, *inner, 11)
        for number in range(4)
        for inner in itertools.combinations(range(1, 11), number)
        if min(np.diff((0, *inner, 11))) >= 3
    ]
    found = cut_bins(values, np.ones(11), 3)

    assert (0, *[own.stop for own in found]) == min(ways, key=spread)


@pytest.mark.parametrize("count", [5, 6, 40, 1000])
def test_joined_quantiles_are_those_of_the_pooled_cases_within_one_bin(count: int) -> None:
    clients = [draw(count, seed) * (1 + seed / 4) for seed in range(3)]
    told = [make_histogram(values, range(count)) for values in clients]
    pooled = np.sort(np.concatenate(clients))

    for level in LEVELS:
        rank = np.searchsorted(pooled, find_quantile(told, level))
        largest = max(max(one.counts) for one in told)
        assert abs(rank - level * (len(pooled) - 1)) <= largest


def test_bins_of_one_case_give_the_quantiles_of_numpy() -> None:
    clients = [draw(20, seed) for seed in range(3)]
    told = [make_histogram(values, range(20), behind=1) for values in clients]

    for level in LEVELS:
        assert find_quantile(told, level) == pytest.approx(np.quantile(np.concatenate(clients), level), 1e-5)


def test_a_value_that_all_share_stays_exact() -> None:
    assert find_quantile([make_histogram([0.9375] * 7, range(7))], 0.5) == 0.9375


def test_many_cases_of_one_patient_are_one_patient() -> None:
    groups = [*[0] * 50, 1, 2, 3, 4, 5]
    found = make_histogram([9.0] * 50 + [1.0, 2.0, 3.0, 4.0, 5.0], groups)

    assert [int(count) for count in found.counts] == [3, 52]


@pytest.mark.parametrize("behind", [1, BEHIND])
def test_the_number_of_bins_is_bounded(behind: int) -> None:
    found = make_histogram(draw(5000), range(5000), behind)

    assert len(found.means) <= MOST_BINS
    assert found.cases == 5000
    assert min(found.counts) >= behind


@pytest.mark.parametrize(
    "change",
    [
        {"counts": [3]},
        {"means": [2.0, 1.0]},
        {"counts": [-3, 3]},
        {"counts": [0, 3]},
        {"means": [1.0, float("nan")]},
        {"means": [1.0, float("inf")]},
        {"means": [1.0] * 10_000, "counts": [1] * 10_000},
        {"means": [], "counts": []},
        {"sd": -1.0},
    ],
)
def test_what_is_no_histogram_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Histogram.model_validate({"means": [1.0, 2.0], "counts": [3, 3], "sd": 1.0, **change})


def test_a_huge_count_costs_no_memory() -> None:
    told = Histogram(means=(1.0, 2.0), counts=(10**9, 10**9), sd=1.0)

    assert find_quantile([told, told], 0.1) == pytest.approx(1.0, abs=0.1)


# Voxels


def count(cases: list[Any], behind: int = BEHIND) -> IntensityHistogram:
    return count_intensities([VoxelCounts(np.asarray(case)) for case in cases], range(len(cases)), behind)


@pytest.mark.parametrize(
    "change",
    [lambda v: v, lambda v: np.rint(v * 200 - 900), lambda v: np.abs(v) * 1e-4, lambda v: np.exp(3 * v)],
)
def test_joined_intensities_are_those_of_the_pooled_voxels(change: Any) -> None:
    random = np.random.default_rng(0)
    clients = [[change(random.normal(place, 1, 4000)) for _ in range(6)] for place in (0, 1, 4)]
    pooled = np.concatenate([case for client in clients for case in client])
    levels = (0.005, 0.05, 0.5, 0.95, 0.995)
    found = find_intensity([count(client) for client in clients], [6, 6, 6], levels)

    ranks = np.searchsorted(np.sort(pooled), found) / len(pooled)
    np.testing.assert_allclose(ranks, levels, atol=0.004)


def test_every_case_has_the_same_weight_whatever_its_number_of_voxels() -> None:
    found = count([np.zeros(10), np.zeros(10), np.ones(10_000), np.ones(10_000)], behind=1)

    assert (found.mean, found.sd) == (0.5, 0.5)


def test_what_one_patient_alone_has_is_not_told() -> None:
    random = np.random.default_rng(0)
    cases = [random.normal(0, 1, 1000) for _ in range(6)]
    implant = [*cases[:5], np.concatenate([cases[5], np.full(200, 3000.0)])]
    found = count(implant)

    assert found.edges[-1] < 1100, "the mean of three patients' highest values"
    assert 3000.0 not in found.means
    assert found.edges[0] > min(case.min() for case in cases)


def test_every_bin_has_voxels_of_three_patients() -> None:
    cases = [np.random.default_rng(seed).normal(seed, 0.5, 500) for seed in range(5)]
    found = count(cases)
    inner = np.array(found.edges[1:-1])
    present = [{int(place) for place in np.searchsorted(inner, case)} for case in cases]

    assert all(sum(number in own for own in present) >= BEHIND for number in range(len(found.shares)))


def test_voxels_beyond_all_reason_are_clipped() -> None:
    found = count([np.array([1e30, -1e30])] * 3)

    assert (found.edges[0], found.edges[-1]) == (-1e9, 1e9)


def test_a_constant_channel_has_its_value_at_every_level() -> None:
    assert find_intensity([count([np.full(9, 7.0)] * 3)], [3], (0.005, 0.5, 0.995)) == pytest.approx(
        [7.0] * 3
    )


@pytest.mark.parametrize(
    "change",
    [
        {"edges": [0.0, 2.0, 1.0]},
        {"shares": [0.9, 0.9]},
        {"shares": [-0.5, 1.5]},
        {"means": [1.0]},
        {"mean": float("nan")},
        {"edges": [0.0] * 10_001, "shares": [1e-4] * 10_000, "means": [0.0] * 10_000},
    ],
)
def test_what_is_no_distribution_is_refused(change: dict[str, Any]) -> None:
    good = {"edges": [0.0, 1.0, 2.0], "shares": [0.5, 0.5], "means": [0.5, 1.5], "mean": 1.0, "sd": 0.6}
    IntensityHistogram.model_validate(good)
    with pytest.raises(ValidationError):
        IntensityHistogram.model_validate({**good, **change})
