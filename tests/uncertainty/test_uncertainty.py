"""Overlap, risk-coverage and rank correlation against plain loops and scipy; histograms against numpy."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from wardround.uncertainty.histogram import (
    NUM_BINS,
    bin_of,
    counted,
    dense,
    edges,
    quantile,
    quantiles,
    sparse,
)
from wardround.uncertainty.quality import (
    area,
    aurc,
    best_aurc,
    curve,
    error_overlap,
    risk_coverage,
    spearman,
    voxel_groups,
)

DRAW = np.random.default_rng(0)


# Overlap


def test_the_overlap_is_the_dice_of_errors_with_as_many_most_uncertain_voxels():
    uncertainty = torch.rand(12, 13, generator=torch.Generator().manual_seed(0))
    wrong = torch.rand(12, 13, generator=torch.Generator().manual_seed(1)) < 0.3
    errors = int(wrong.sum())
    most = np.zeros(12 * 13, dtype=bool)
    most[np.argsort(-uncertainty.numpy().ravel())[:errors]] = True
    expected = 2 * (most & wrong.numpy().ravel()).sum() / (most.sum() + errors)

    assert error_overlap(uncertainty, wrong) == pytest.approx(expected, abs=1e-12)


def test_overlap_of_a_perfect_a_reversed_and_a_flat_map():
    wrong = torch.tensor([True, False, False, False])

    assert error_overlap(wrong.double(), wrong) == 1.0
    assert error_overlap(-wrong.double(), wrong) == 0.0
    assert error_overlap(torch.ones(4), wrong) == 0.25  # what chance gives


def test_without_an_error_there_is_no_overlap():
    assert error_overlap(torch.rand(5), torch.zeros(5, dtype=torch.bool)) is None


# Risk and coverage


def loop_aurc(uncertainty, risk):
    order = np.argsort(uncertainty, kind="stable")
    return np.mean([risk[order[: kept + 1]].mean() for kept in range(len(order))])


def test_aurc_is_the_mean_of_the_risks_of_the_surest_one_two_three():
    uncertainty, risk = DRAW.uniform(size=50), DRAW.uniform(size=50)

    assert aurc(uncertainty, risk) == pytest.approx(loop_aurc(uncertainty, risk), abs=1e-12)


def test_ties_are_expected_values_over_all_orders():
    uncertainty, risk = np.array([0.1, 0.5, 0.5, 0.5, 0.9]), np.array([0.2, 0.0, 1.0, 0.4, 0.8])
    shuffled = []
    for _ in range(4000):
        noise = 1e-6 * DRAW.uniform(size=5)
        shuffled.append(loop_aurc(uncertainty + noise, risk))

    assert aurc(uncertainty, risk) == pytest.approx(np.mean(shuffled), abs=5e-3)
    assert aurc(np.ones(5), risk) == pytest.approx(risk.mean())


def test_no_order_is_better_than_that_of_the_risks_themselves():
    uncertainty, risk = DRAW.uniform(size=40), DRAW.uniform(size=40)

    assert best_aurc(risk) < aurc(uncertainty, risk) < aurc(-risk, risk)


def test_the_curve_ends_with_everything():
    uncertainty, risk = DRAW.uniform(size=30), DRAW.uniform(size=30)
    coverage, selective = risk_coverage(uncertainty, risk)

    assert coverage[-1] == 1 and selective[-1] == pytest.approx(risk.mean())
    assert coverage[0] == pytest.approx(1 / 30) and selective[0] == risk[uncertainty.argmin()]


def test_voxels_in_bins_have_nearly_the_area_of_voxels_one_by_one():
    uncertainty = torch.rand(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64) ** 4
    wrong = torch.rand(20_000, generator=torch.Generator().manual_seed(3)) < uncertainty
    binned = area(*voxel_groups(bin_of(uncertainty), wrong, NUM_BINS))

    assert binned == pytest.approx(aurc(uncertainty.numpy(), wrong.double().numpy()), rel=0.01)


def test_no_case_and_no_voxel_have_no_area():
    assert math.isnan(aurc([], []))
    assert math.isnan(area(np.zeros(3), np.zeros(3)))
    assert [len(side) for side in curve(np.zeros(3), np.zeros(3))] == [0, 0]


# Rank correlation


def test_spearman_is_scipys_with_ties_too():
    a, b = DRAW.integers(0, 5, 30), DRAW.uniform(size=30)

    assert spearman(a.tolist(), b.tolist()) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)


@pytest.mark.parametrize("a, b", [([], []), ([1, 2], [2, 1]), ([1, 1, 1], [1, 2, 3])])
def test_too_few_or_constant_numbers_have_no_correlation(a, b):
    assert spearman(a, b) is None


# Histograms


def test_pooled_quantiles_are_numpys_to_the_width_of_a_bin():
    hospitals = [DRAW.lognormal(-3, 1, size) for size in (40, 300, 7)]
    pooled = sum(counted(values) for values in hospitals)
    everything = np.concatenate(hospitals)

    found = quantiles(pooled)
    assert found["count"] == 347
    for name in ("q05", "q25", "q50", "q75", "q95"):
        exact = np.quantile(everything, int(name[1:]) / 100)
        assert found[name] == pytest.approx(exact, rel=0.1)
    assert found["min"] <= everything.min() and found["max"] >= everything.max()
    assert found["min"] == pytest.approx(everything.min(), rel=0.06)
    assert found["max"] == pytest.approx(everything.max(), rel=0.06)


def test_one_case_alone_gives_the_limits_of_its_bin():
    found = quantiles(counted([0.037]))

    assert found["min"] <= 0.037 <= found["max"] <= 1.07 * found["min"]
    assert found["min"] <= found["q05"] <= found["q99"] <= found["max"]


def test_zero_tiny_huge_and_nan_fall_into_the_outer_bins():
    places = bin_of(torch.tensor([0.0, 1e-20, 1e9, math.inf, math.nan, 0.5]))

    assert places.tolist()[:5] == [0, 0, NUM_BINS - 1, NUM_BINS - 1, NUM_BINS - 1]
    low, high = edges()[places[5]], edges()[places[5] + 1]
    assert low <= 0.5 < high
    assert math.isfinite(quantile(counted([math.inf]), 0.5))


def test_no_number_has_no_quantile():
    assert math.isnan(quantile(counted([]), 0.5))


def test_sparse_rows_become_the_columns_again():
    columns = [counted([0.1, 0.2, 0.2]), counted([0.1]) * 0.5]

    for before, after in zip(columns, dense(sparse(*columns), 2), strict=True):
        assert np.array_equal(before, after)
