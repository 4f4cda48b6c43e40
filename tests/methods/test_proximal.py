"""The squared distance to a received model: golden numbers, precision, and which tensors count."""

from pathlib import Path

import torch
from helpers import config, vectors
from pytest import approx
from torch import nn

from toy import Weights, vector
from wardround.engine.host import Host
from wardround.methods.proximal import anchor, squared_distance
from wardround.params import Params

GOLDEN = vectors("fedprox")["penalty"]


def test_half_the_squared_distance_and_its_gradient_are_the_golden_ones() -> None:
    inputs, expected = GOLDEN["inputs"], GOLDEN["expected"]
    model = Weights(inputs["w"])
    penalty = inputs["mu"] / 2 * squared_distance(model, {"w": vector(inputs["w_global"])})
    penalty.backward()

    assert penalty.item() == approx(expected["penalty"], abs=1e-6)
    assert model.w.grad is not None and model.w.grad.tolist() == approx(expected["grad"], abs=1e-6)


def test_at_the_received_model_both_value_and_gradient_are_zero() -> None:
    model = Weights([0.3, -0.7])
    distance = squared_distance(model, Params.of(model))
    distance.backward()  # type: ignore[no-untyped-call]

    assert distance.item() == 0.0
    assert model.w.grad is not None and model.w.grad.tolist() == [0.0, 0.0]


def test_under_autocast_and_for_half_precision_the_distance_is_float32() -> None:
    model = nn.Linear(4, 4)
    received = {name: p.detach() - 1e-3 for name, p in model.named_parameters()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        distance = squared_distance(model, received)
    assert distance.dtype == torch.float32
    assert distance.item() == approx(20e-6, rel=1e-2)

    half = nn.Linear(4, 4).to(torch.bfloat16)
    kept = {name: p.detach().clone() for name, p in half.named_parameters()}
    assert squared_distance(half, kept).dtype == torch.float32


def test_only_tensors_that_learn_and_travel_are_anchored(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    chosen = config(tmp_path, model=model, objective={"name": "simclr", "local_head": True})
    host = Host(chosen, tmp_path, ["north"])
    host.bench.model.get_parameter("head.bias").requires_grad_(False)
    kept = set(host.objective.local_names(host.bench.model))
    anchored = anchor(host.client("north"), Params.of(host.bench.model))

    learned = {name for name, p in host.bench.model.named_parameters() if p.requires_grad}
    assert kept and set(anchored) == learned - kept
    assert "head.bias" not in anchored and not any("running" in name for name in anchored)
