"""Clipping and noise, by statistics over many draws."""

from __future__ import annotations

import random

import numpy as np
import torch
from pytest import approx
from scipy import stats

from wardround.privacy.noise import add_noise, clip_factor, draw_gaussian, draw_uniform

DRAWS = 10_000
CHANCE = 1e-6  # of a sound generator to fail a test


def test_ten_thousand_draws_are_normal_with_the_deviation_asked_for() -> None:
    drawn = add_noise(torch.full((DRAWS,), 3.0, dtype=torch.float64), 2.5).numpy()

    assert stats.kstest(drawn, stats.norm(3.0, 2.5).cdf).pvalue > CHANCE
    assert drawn.std() == approx(2.5, rel=0.04)


def test_draws_are_independent_of_each_other() -> None:
    first, second = draw_gaussian(torch.zeros(DRAWS)), draw_gaussian(torch.zeros(DRAWS))

    assert abs(float(np.corrcoef(first, second)[0, 1])) < 0.05
    assert abs(float(np.corrcoef(first[1:], first[:-1])[0, 1])) < 0.05


def test_uniform_numbers_stay_inside_zero_and_one() -> None:
    drawn = draw_uniform(DRAWS)

    assert drawn.min() > 0 and drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > CHANCE


def test_no_seed_repeats_the_noise() -> None:
    def seeded() -> torch.Tensor:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        return draw_gaussian(torch.zeros(8))

    assert not torch.equal(seeded(), seeded())


def test_the_norm_of_all_tensors_together_is_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-30, 0.1, 1.0, 1e6):
        tensors = [
            scale * torch.randn(50, generator=generator),
            scale * torch.randn(7, 3, generator=generator),
        ]
        factor = clip_factor(tensors, 2.0)
        before = torch.cat([tensor.flatten().double() for tensor in tensors]).norm()
        assert float(factor * before) == approx(min(2.0, float(before)))


def test_of_ten_thousand_updates_none_is_longer_than_the_norm_and_short_ones_are_kept() -> None:
    updates = torch.randn(DRAWS, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norms = updates.norm(dim=1)
    factors = torch.tensor([clip_factor([update], 2.0) for update in updates], dtype=torch.float64)

    assert 0 < int((norms <= 2).sum()) < DRAWS
    assert float((factors * norms).max()) <= 2.0 * (1 + 1e-12)
    assert bool((factors[norms <= 2] == 1).all())
    torch.testing.assert_close((factors * norms)[norms > 2], torch.full_like(norms[norms > 2], 2.0))


def test_nothing_is_left_of_numbers_that_are_not_finite() -> None:
    assert clip_factor([torch.tensor([1.0, float("nan")])], 1.0) == 0.0
    assert clip_factor([torch.tensor([float("inf")])], 1.0) == 0.0


def test_zeros_and_no_tensors_are_left_alone() -> None:
    assert clip_factor([torch.zeros(3)], 1.0) == 1.0
    assert clip_factor([], 1.0) == 1.0
