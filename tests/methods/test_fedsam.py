"""FedSAM: the way to the worst point by hand, both variants, what the second pass leaves alone, whole runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import config, run
from pytest import approx, mark, raises
from torch import nn

from toy import Weights, client, rounds, state, vector, weights
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.messages import Message
from wardround.methods.fedsam import FedSAM, ascent
from wardround.params import Params

SAM = {"name": "fedsam"}


def with_gradient(w: list[float], g: list[float]) -> dict[str, torch.Tensor]:
    parameter = nn.Parameter(vector(w))
    parameter.grad = vector(g)
    return {"w": parameter}


# By hand


def test_the_way_up_has_length_rho_over_all_tensors_together() -> None:
    parameters = {"a": nn.Parameter(vector([1.0])), "b": nn.Parameter(vector([2.0]))}
    parameters["a"].grad, parameters["b"].grad = vector([3.0]), vector([4.0])
    way = ascent(parameters, rho=0.5)

    assert way["a"].tolist() == approx([0.3]) and way["b"].tolist() == approx([0.4])


def test_the_adaptive_way_up_is_scaled_by_the_size_of_each_weight() -> None:
    """T = (|3| + 1, |-4| + 1) = (4, 5); T g = (12, -20), norm sqrt(544); eps = rho T (T g) / norm."""
    way = ascent(with_gradient([3.0, -4.0], [3.0, -4.0]), rho=0.5, eta=1.0)

    assert way["w"].tolist() == approx([0.5 * 48 / np.sqrt(544), -0.5 * 100 / np.sqrt(544)])


def test_a_gradient_of_zero_gives_no_way_and_a_plain_step() -> None:
    for eta in (None, 0.2):
        assert ascent(with_gradient([1.0, 2.0], [0.0, 0.0]), rho=0.5, eta=eta)["w"].tolist() == [0.0, 0.0]


def test_two_rounds_take_their_gradient_at_the_worst_point() -> None:
    """F = |w|²/2, rate 0.1, rho 0.5: g' = w + 0.5 w/|w|. From (3, 4): (2.67, 3.56), one more: (2.373, 3.164)."""
    north = client(gradient=lambda w, step: w)
    first, second = rounds(FedSAM(rho=0.5), state([3.0, 4.0]), [north], 2)

    assert weights(first.params) == approx([2.67, 3.56])
    assert weights(second.params) == approx([2.373, 3.164])


def test_the_adaptive_variant_equals_a_numpy_version() -> None:
    curvature = np.array([1.0, 3.0])
    w = np.array([1.0, -0.5])
    for _ in range(3):
        g, scale = curvature * w, np.abs(w) + 0.2
        worst = w + 0.7 * scale**2 * g / (np.linalg.norm(scale * g) + 1e-12)
        w = w - 0.1 * curvature * worst
    north = client(gradient=lambda w, step: torch.from_numpy(curvature) * w, steps=3)
    (after,) = rounds(FedSAM(rho=0.7, variant="asam"), state([1.0, -0.5]), [north], 1)

    assert weights(after.params) == approx(w.tolist(), abs=1e-10)


def test_clipping_acts_on_the_gradient_of_the_second_pass() -> None:
    """At (3, 4) + (0.3, 0.4) the gradient has norm 5.5; clipped to 1 it is (0.6, 0.8)."""
    north = client(gradient=lambda w, step: w, optimizer={"clip_norm": 1.0})
    (after,) = rounds(FedSAM(rho=0.5), state([3.0, 4.0]), [north], 1)

    assert weights(after.params) == approx([3 - 0.06, 4 - 0.08], abs=1e-6)


def test_the_recorded_loss_is_that_of_the_first_pass() -> None:
    north = client(gradient=lambda w, step: w)
    FedSAM(rho=0.5).train(north, Message(params=Params.of(Weights([3.0, 4.0]))))

    assert north.fitted is not None and north.fitted.loss["total"] == approx(25.0)


# What the second pass leaves alone


def test_running_statistics_are_those_of_one_pass_a_step(tmp_path: Path) -> None:
    """With a rate of 0 the model stays, so statistics must be FedAvg's to the last bit."""
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    still = {"name": "sgd", "learning_rate": 0.0}
    chosen = config(tmp_path, model=model, optimizer=still, method=SAM)
    start = Message(params=Params.of(build_model(chosen)))
    sent = []
    for method in (FedSAM(rho=0.5), FedSAM(rho=0.0)):
        host = Host(chosen, tmp_path, ["north"])
        reply = method.train(host.client("north"), start)
        sent.append(reply.params.sha256())

    assert sent[0] == sent[1]


# Whole runs


@mark.parametrize("variant", ["sam", "asam"])
def test_fedsam_with_rho_zero_is_fedavg(variant: str, tmp_path: Path) -> None:
    fedsam = run(tmp_path / "fedsam", method={**SAM, "variant": variant, "rho": 0.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})

    assert fedsam.params_sha256 == fedavg.params_sha256


def test_both_variants_train_and_differ(tmp_path: Path) -> None:
    dropout = {"name": "unet2d", "base_filters": 2, "levels": 2, "dropout": 0.2}
    runs: list[Any] = [
        run(tmp_path / variant, rounds=1, model=dropout, method={**SAM, "variant": variant})
        for variant in ("sam", "asam")
    ]

    assert runs[0].params_sha256 != runs[1].params_sha256


def test_a_negative_rho_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="method.rho is -0.1"):
        run(tmp_path, method={**SAM, "rho": -0.1})
