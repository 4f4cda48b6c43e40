"""Uncertainty of a Dirichlet: golden vectors, sampling, what always holds."""

import math

import mpmath
import pytest
import torch
from helpers import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Dirichlet

from wardround.uncertainty.evidential import case_means, decompose

GOLDEN = vectors("fedevi")
NUMBERS = st.floats(min_value=-30, max_value=80, allow_nan=False)


def alpha_of(logits):
    """(pixels, classes) -> (1, classes, pixels)."""
    return torch.tensor(logits, dtype=torch.float64).exp().T[None] + 1


@pytest.mark.parametrize("case", ["uncertainty_binary", "uncertainty_three_class"])
def test_uncertainties_are_the_golden_ones(case):
    expected = GOLDEN[case]["expected"]
    found = decompose(alpha_of(GOLDEN[case]["inputs"]["logits"]))
    for field, values in (("U_total", found.total), ("U_epi", found.epistemic), ("U_ale", found.aleatoric)):
        assert values[0].tolist() == pytest.approx(expected[field], abs=1e-11)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=4))
def test_the_parts_sum_to_the_total_and_none_is_negative(logits):
    found = decompose(alpha_of(logits))
    assert torch.allclose(found.total, found.epistemic + found.aleatoric, rtol=0, atol=1e-12)
    for part in (found.total, found.epistemic, found.aleatoric):
        assert (part >= 0).all()
        assert (part <= math.log(3) + 1e-12).all()


def test_aleatoric_uncertainty_is_the_mean_entropy_of_samples():
    alpha = torch.tensor([[[3.0], [1.5], [1.2]]], dtype=torch.float64)
    torch.manual_seed(0)
    rho = Dirichlet(alpha[0, :, 0]).sample((40_000,)).clamp_min(1e-300)
    entropy = -(rho * rho.log()).sum(dim=1).mean()
    assert decompose(alpha).aleatoric.item() == pytest.approx(entropy.item(), abs=3e-3)


def test_more_evidence_of_the_same_kind_lowers_epistemic_uncertainty_alone():
    weak = decompose(torch.tensor([[[2.0], [2.0]]]))
    strong = decompose(torch.tensor([[[2000.0], [2000.0]]]))
    assert strong.epistemic.item() < 1e-3 < weak.epistemic.item()
    assert strong.aleatoric.item() > 0.69


def test_no_evidence_is_the_flat_distribution():
    found = decompose(torch.ones(1, 2, 1))
    assert found.total.item() == pytest.approx(math.log(2))
    assert found.aleatoric.item() == pytest.approx(0.5)


@pytest.mark.parametrize("size", [(6, 5), (3, 4, 5)])
def test_pieces_give_what_the_whole_gives(size):
    alpha = torch.rand(2, 3, *size).exp()
    whole, pieces = decompose(alpha), decompose(alpha, voxels_at_once=11)
    assert whole.total.shape == (2, *size)
    assert torch.equal(whole.epistemic, pieces.epistemic)
    assert torch.equal(whole.aleatoric, pieces.aleatoric)


def test_maps_are_float64_whatever_comes_in():
    assert decompose(torch.ones(1, 2, 3, dtype=torch.bfloat16)).epistemic.dtype == torch.float64


@pytest.mark.parametrize("logits", [(15.0, -15.0), (15.0, 14.0), (10.0, 3.0)])
def test_epistemic_uncertainty_is_exact_where_float32_is_not(logits):
    found = decompose(alpha_of([logits]))
    with mpmath.workdps(60):
        alpha = [1 + mpmath.exp(z) for z in logits]
        total = sum(alpha)
        means = [a / total for a in alpha]
        exact = sum(
            p * (mpmath.digamma(a + 1) - mpmath.digamma(total + 1) - mpmath.log(p))
            for p, a in zip(means, alpha, strict=True)
        )
    assert found.epistemic.item() == pytest.approx(float(exact), rel=1e-6)


def test_a_case_counts_as_the_mean_of_its_voxels():
    assert case_means(torch.tensor([[[1.0, 3.0]], [[0.0, 1.0]]])).tolist() == [2.0, 0.5]
