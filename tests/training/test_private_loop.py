"""Case-level steps: every case clipped by itself, the sum noised, nothing carried over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import config
from pytest import approx, raises

from toy import Weights, client
from wardround.engine.host import Host
from wardround.errors import ClientError
from wardround.params import Params
from wardround.privacy.guard import CaseNoise


class Charged:
    """A guard whose noise is given."""

    cases = 4

    def __init__(self, noise: CaseNoise) -> None:
        self.noise = noise

    def charge_steps(self, round: int) -> CaseNoise:
        return self.noise


def fit(noise: CaseNoise, gradient: Any, num_weights: int = 2, cases: int = 4, **hooks: Any) -> Params:
    north = client(gradient=gradient, steps=cases, num_weights=num_weights, optimizer={"learning_rate": 1.0})
    north.guard = Charged(noise)  # type: ignore[assignment]
    return north.fit(Params.of(Weights([0.0] * num_weights)), **hooks).params


PLAIN = CaseNoise(clip=1.0, noise=0.0, rate=1.0, steps=1, batch=4)


def test_without_noise_the_step_is_the_mean_of_clipped_gradients() -> None:
    moved = fit(PLAIN, lambda w, step: [3.0, 4.0])  # norm 5, clipped to 1; four cases over a batch of four

    assert moved["w"].tolist() == approx([-0.6, -0.8])


def test_a_step_of_volumes_is_the_mean_of_gradients_of_single_cases(tmp_path: Path) -> None:
    host = Host(
        config(
            tmp_path,
            data={"phantom": {"hospitals": 1, "dimensions": 3, "size": 16, "cases": 5}},
            model={"name": "unet3d", "base_filters": 2, "levels": 2},
            optimizer={"name": "sgd", "learning_rate": 1.0, "momentum": 0.0},
            augmentation={"flip": 0.0, "intensity": 0.0},
        ),
        tmp_path / "clients",
        ["north"],
    )
    north, model, start = host.client("north"), host.bench.model, Params.of(host.bench.model)
    gradients = []
    for index in range(len(north.data.train)):
        case = north.data.train.batch([index])
        loss = host.objective.sample_losses(model.train()(case.image), case.label).mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in found]).norm()
        gradients.append([gradient * min(1.0, 0.1 / float(norm)) for gradient in found])
    north.guard = Charged(PLAIN._replace(clip=0.1, batch=len(gradients)))  # type: ignore[assignment]
    moved = north.fit(start).params

    assert len(gradients) > 1
    for (name, _), *those in zip(model.named_parameters(), *gradients, strict=True):
        expected = start[name] - torch.stack(those).mean(dim=0)
        torch.testing.assert_close(moved[name], expected, rtol=1e-4, atol=1e-6)


def test_gradients_inside_the_norm_are_not_changed() -> None:
    assert fit(PLAIN, lambda w, step: [0.3, 0.4])["w"].tolist() == approx([-0.3, -0.4])


def test_a_gradient_that_is_not_finite_counts_as_none() -> None:
    assert fit(PLAIN, lambda w, step: [float("nan"), 1.0])["w"].tolist() == [0.0, 0.0]


def test_noise_has_the_deviation_that_was_charged() -> None:
    noise = PLAIN._replace(noise=2.0, clip=0.5, batch=10)
    moved = fit(noise, lambda w, step: [0.0] * 10_000, num_weights=10_000)["w"]

    assert float(moved.std()) == approx(2.0 * 0.5 / 10, rel=0.04)
    assert abs(float(moved.mean())) < 0.005


def test_cases_are_drawn_one_by_one_with_the_rate() -> None:
    drawn: list[float] = []
    for _ in range(20):
        noise = PLAIN._replace(rate=0.25, steps=5, batch=1, clip=9.0)
        drawn.append(-float(fit(noise, lambda w, step: [1.0, 0.0], cases=20)["w"][0]))  # cases of five steps

    assert sum(drawn) / 20 == approx(25, abs=4)  # 100 chances of a quarter, twenty times; 4 is 4 deviations
    assert len(set(drawn)) > 1


def test_a_step_without_cases_is_noise_alone() -> None:
    noise = PLAIN._replace(rate=1e-9, noise=1.0)

    assert bool(fit(noise, lambda w, step: [1.0, 1.0])["w"].abs().sum() > 0)


def test_a_network_that_counts_cases_beside_gradients_is_refused() -> None:
    north = client(gradient=lambda w, step: [1.0, 1.0])
    north.guard = Charged(PLAIN)  # type: ignore[assignment]
    model = north.model

    def count(w: torch.Tensor, step: int) -> Sequence[float]:
        model.get_buffer("buffer").add_(1)
        return [1.0, 1.0]

    object.__setattr__(north.objective, "gradient", count)
    with raises(ClientError, match="'buffer' changes with every case"):
        north.fit(Params.of(Weights([0.0, 0.0])))


def test_a_method_that_changes_the_step_is_refused() -> None:
    with raises(ClientError, match=r"\(step of fit\)"):
        fit(PLAIN, lambda w, step: w, step=lambda step: None)


def test_what_a_method_does_to_gradients_comes_after_the_noise() -> None:
    def stop(model: Any) -> None:
        model.w.grad.zero_()

    moved = fit(PLAIN._replace(noise=5.0), lambda w, step: [1.0, 1.0], after_backward=stop)
    assert moved["w"].tolist() == [0.0, 0.0]
