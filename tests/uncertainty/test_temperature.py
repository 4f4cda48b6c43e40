"""The federated temperature is the one a single hospital with all voxels would fit."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from wardround.methods.fedevi import Evidential
from wardround.uncertainty import temperature
from wardround.uncertainty.maps import scores
from wardround.uncertainty.temperature import fit, from_scalars, grid, scalars, slopes


def made(voxels, classes, factor, seed=0):
    """Scores that are `factor` times too large for the truth drawn from them."""
    draw = torch.Generator().manual_seed(seed)
    right = 2 * torch.randn(classes, voxels, generator=draw, dtype=torch.float64)
    truth = torch.multinomial(torch.softmax(right, dim=0).T, 1, generator=draw)[:, 0]
    return factor * right, truth


def centralised(s, truth):
    """Minimise the loss over all voxels, by another way: scipy on PyTorch's cross entropy."""

    def loss(log_t):
        return float(torch.nn.functional.cross_entropy(s.T / np.exp(log_t), truth, reduction="mean"))

    found = minimize_scalar(loss, bracket=(-0.5, 0.5), options={"xtol": 1e-12})
    beta = torch.tensor(1 / np.exp(found.x), dtype=torch.float64, requires_grad=True)
    for _ in range(5):  # a minimiser sees eight digits of a flat minimum; Newton sees all
        value = torch.nn.functional.cross_entropy(beta * s.T, truth)
        (slope,) = torch.autograd.grad(value, beta, create_graph=True)
        (bend,) = torch.autograd.grad(slope, beta)
        beta = (beta - slope / bend).detach().requires_grad_()
    return 1 / beta.item()


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("factor", [0.2, 0.77, 1.0, 1.9, 9.0])
def test_the_sum_of_three_hospitals_gives_the_fit_of_all_voxels(classes, factor):
    s, truth = made(3000, classes, factor)
    parts = [slice(0, 100), slice(100, 1700), slice(1700, 3000)]
    sent = [json.loads(json.dumps(scalars(slopes(s[:, p], truth[p], grid())))) for p in parts]
    found = fit(sum(from_scalars(one) for one in sent))

    assert found.reason is None
    assert found.value == pytest.approx(centralised(s, truth), rel=1e-6)


def test_it_holds_for_the_expected_probabilities_of_a_dirichlet():
    draw = torch.Generator().manual_seed(4)
    z = 3 * torch.randn(3, 4000, generator=draw)
    s = scores(Evidential(), z[None])[0]
    truth = torch.multinomial(torch.softmax(1.6 * s, dim=0).T, 1, generator=draw)[:, 0]
    found = fit(slopes(s, truth, grid()))

    assert found.value == pytest.approx(centralised(s, truth), rel=1e-6)
    assert found.value == pytest.approx(1 / 1.6, rel=0.1)


def test_slopes_are_the_derivatives_of_the_loss():
    s, truth = made(200, 3, 1.5)
    beta = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    value = torch.nn.functional.cross_entropy(beta * s.T, truth, reduction="sum")
    expected = []
    for _ in range(3):
        (value,) = torch.autograd.grad(value, beta, create_graph=True)
        expected.append(value.item())

    assert slopes(s, truth, [0.8])[:, 0] == pytest.approx(expected, rel=1e-10)


def test_pieces_give_the_same_sums(monkeypatch):
    s, truth = made(500, 2, 1.0)
    whole = slopes(s, truth, grid())
    monkeypatch.setattr(temperature, "VOXELS_AT_ONCE", 77)

    assert np.allclose(slopes(s, truth, grid()), whole, rtol=1e-12)


def test_a_hospital_without_validation_cases_changes_nothing():
    s, truth = made(500, 2, 2.0)
    sums = slopes(s, truth, grid())
    none = slopes(s[:, :0], truth[:0], grid())

    assert fit(sums + none) == fit(sums)


def test_without_any_voxel_the_temperature_is_one():
    found = fit(np.zeros((3, len(grid()))))

    assert found.value == 1 and "no validation voxel" in found.reason


def test_without_an_error_the_temperature_is_one():
    s = torch.tensor([[3.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
    found = fit(slopes(s, torch.tensor([0, 1]), grid()))

    assert found.value == 1 and "too few errors" in found.reason


def test_a_model_that_is_hardly_ever_right_gets_the_largest_temperature():
    s, truth = made(500, 2, 1.0)
    found = fit(slopes(-s, truth, grid()))

    assert found.value == temperature.LIMIT and "overconfident" in found.reason


def test_numbers_that_are_none_leave_the_temperature_at_one():
    assert fit(np.full((3, len(grid())), np.nan)).value == 1
