"""MOON: golden numbers, who is compared with whom, the off switch, whole runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import Tensor

from wardround.clients import Answer
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.reference import Reference
from wardround.methods.moon import MOON, model_contrast

GOLDEN = vectors("moon")


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def losses_of(result: Any, term: str) -> list[list[float]]:
    return [[loss[term] for loss in record["loss"].values() if term in loss] for record in result.records]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_contrast_is_the_golden_one(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    previous = [tensor(each) for each in inputs["z_prev"]]
    losses = model_contrast(tensor(inputs["z"]), tensor(inputs["z_global"]), previous, inputs["temperature"])

    assert inputs["mu"] * float(losses.mean()) == pytest.approx(expected["loss"], abs=1e-6)
    if "per_sample" in expected:
        assert losses.tolist() == pytest.approx(expected["per_sample"], abs=1e-6)


def test_several_previous_models_share_the_denominator() -> None:
    z, glob, one, two = np.random.default_rng(0).normal(size=(4, 3, 5))

    def similarity(a: Any, b: Any) -> Any:
        return np.exp((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1) / 0.2)

    towards = similarity(z, glob)
    expected = -np.log(towards / (towards + similarity(z, one) + similarity(z, two)))
    losses = model_contrast(tensor(z), tensor(glob), [tensor(one), tensor(two)], temperature=0.2)
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_step_against_the_gradient_moves_towards_the_received_and_away_from_the_previous_model() -> None:
    z, glob, previous = tensor([[1.0, 1.0]]).requires_grad_(), tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]])
    model_contrast(z, glob, [previous], temperature=0.5).sum().backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    towards, away = (-z.grad)[0].tolist()
    assert towards > 0 > away


def test_equal_references_give_log_two_and_no_gradient_at_all() -> None:
    z, other = torch.randn(4, 7).requires_grad_(), torch.randn(4, 7)
    losses = model_contrast(z, other, [other], temperature=0.5)
    losses.mean().backward()  # type: ignore[no-untyped-call]
    assert losses.tolist() == pytest.approx([math.log(2)] * 4)
    assert z.grad is not None and not z.grad.any()


def test_features_of_an_empty_image_give_a_finite_loss_and_no_gradient() -> None:
    z = torch.zeros(2, 3).requires_grad_()
    losses = model_contrast(z, torch.zeros(2, 3), [torch.ones(2, 3)], temperature=0.05)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.tolist() == pytest.approx([math.log(2)] * 2)
    assert z.grad is not None and not z.grad.any()


@pytest.mark.parametrize("head", ["none", "mlp"])
def test_moon_with_mu_zero_is_fedavg(head: str, tmp_path: Path) -> None:
    moon = run(tmp_path / "moon", method={"name": "moon", "mu": 0.0, "head": head})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})
    assert moon.params_sha256 == fedavg.params_sha256


def test_the_first_participation_has_no_term_and_the_second_one_has(tmp_path: Path) -> None:
    moon = run(tmp_path / "moon", method={"name": "moon", "mu": 5.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})
    first, second = losses_of(moon, "contrast")
    assert first == [] and len(second) == 3 and min(second) > 0
    assert losses_of(moon, "total")[0] == losses_of(fedavg, "total")[0]
    assert moon.params_sha256 != fedavg.params_sha256


def test_a_client_that_was_away_compares_with_its_last_participation(tmp_path: Path) -> None:
    changes = {"rounds": 4, "participation": 0.34, "method": {"name": "moon"}}
    moon = run(tmp_path / "moon", **changes)
    seen: set[str] = set()
    for record in moon.records:
        for client, loss in record["loss"].items():
            assert ("contrast" in loss) == (client in seen)
        seen |= set(record["loss"])


def test_previous_is_the_clients_own_model_and_not_the_received_one(tmp_path: Path) -> None:
    """The term of the first step: z is the received model's, so the loss is softplus((cos - 1) / tau)."""
    changes = {"local_epochs": 1, "batch_size": 8, "augmentation": {"flip": 0.0, "intensity": 0.0}}
    moon = run(tmp_path / "moon", method={"name": "moon", "mu": 1.0}, **changes)
    assert all(value < math.log(2) for value in losses_of(moon, "contrast")[1])


def test_the_projection_travels_and_every_model_uses_its_own(tmp_path: Path) -> None:
    made = config(tmp_path, method={"name": "moon", "head": "mlp", "dimension": 6})
    model = build_model(made)
    frozen = Reference(build_model(made))
    for parameter in frozen.model.moon_head.parameters():  # type: ignore[union-attr]
        parameter.data.zero_()
    method, features = MOON(head="mlp", dimension=6), torch.rand(2, 4, 3, 3)

    assert method.represent(model, features).shape == (2, 6)
    assert method.represent(model, features).any() and not method.represent(frozen.model, features).any()
    assert "moon_head.layers.0.weight" in method.shared(model)
    result = run(tmp_path / "run", method={"name": "moon", "head": "mlp", "dimension": 6})
    before = build_model(result.config).state_dict()["moon_head.layers.2.weight"]
    assert not torch.equal(result.outcome.state.params["moon_head.layers.2.weight"], before)


def test_without_a_head_the_representation_is_the_mean_over_voxels(tmp_path: Path) -> None:
    features = torch.rand(2, 4, 3, 5)
    model = build_model(config(tmp_path, method={"name": "moon"}))
    assert torch.allclose(MOON().represent(model, features), features.mean(dim=(2, 3)))


def test_a_lost_client_is_left_out_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="boom"))
    moon = run(tmp_path / "run", method={"name": "moon"})
    assert set(moon.records[1]["weights"]) == {"north", "south"}


def test_batch_norm_is_warned_of(tmp_path: Path) -> None:
    batch = config(tmp_path, model={"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"})
    plain = config(tmp_path)
    assert "BatchNorm" in MOON().warnings(batch, build_model(batch))[0]
    assert MOON().warnings(plain, build_model(plain)) == []
    assert MOON(mu=0.0).warnings(batch, build_model(batch)) == []


@pytest.mark.parametrize(("key", "value"), [("mu", -1), ("temperature", 0), ("head", "deep")])
def test_impossible_settings_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method.{key}"):
        config(tmp_path, method={"name": "moon", key: value})


def test_a_network_without_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="features"):
        config(tmp_path, method={"name": "moon"}, model={"name": "user_nets:Flat"})
