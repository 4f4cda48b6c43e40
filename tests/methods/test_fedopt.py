"""FedAvgM, FedAdam, FedYogi, FedAdagrad: golden vectors, zero updates, buffers, whole runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from helpers import config, run, vectors
from pytest import approx, mark, raises

from wardround.clients import Clients
from wardround.errors import ConfigError
from wardround.messages import Reply, ServerState
from wardround.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from wardround.params import Params

GOLDEN = vectors("fedopt")
KINDS = {"adam": FedAdam, "adam_bias_corrected": FedAdam, "yogi": FedYogi, "adagrad": FedAdagrad}
ALL = [FedAvgM(), FedAdam(), FedYogi(), FedAdagrad(), FedAdam(bias_correction=True)]


def model(*values: float, **buffers: Any) -> Params:
    return Params({"w": torch.tensor(values, dtype=torch.float64), **buffers})


def after_round(
    method: ServerOptimizer, state: ServerState, sent: Sequence[Params], *sizes: int
) -> ServerState:
    """One round in which the clients return these models."""
    numbers = sizes or (1,) * len(sent)
    replies = [
        Reply(params, client=f"client {k}", num_examples=number)
        for k, (params, number) in enumerate(zip(sent, numbers, strict=True))
    ]
    clients = SimpleNamespace(ask=lambda task, message: replies, rounds=4)
    return method.run_round(state, cast(Clients, clients))


def start(*values: float, **buffers: Any) -> ServerState:
    return ServerState(params=model(*values, **buffers), trainable=("w",))


# Golden vectors


@mark.parametrize("name", KINDS)
def test_adaptive_rounds_are_the_golden_ones(name: str) -> None:
    inputs = GOLDEN[name]["inputs"]
    settings = {"server_lr": inputs["server_lr"], "beta": inputs["beta1"], "tau": inputs["tau"]}
    if name != "adagrad":
        settings["beta2"] = inputs["beta2"]
    if inputs["bias_correction"]:
        settings["bias_correction"] = True
    method, state = KINDS[name](**settings), start(*inputs["x"])

    expected = GOLDEN[name]["expected"]["rounds"]
    for delta, after in zip(inputs["mean_delta_per_round"], expected, strict=True):
        state = after_round(method, state, [state.params + model(*delta)])
        assert state.params["w"].tolist() == approx(after["x"], abs=1e-6)
        assert state.memory["m"]["w"].tolist() == approx(after["m"], abs=1e-6)
        assert state.memory["v"]["w"].tolist() == approx(after["v"], abs=1e-6)


def test_momentum_rounds_are_the_golden_ones() -> None:
    case = GOLDEN["fedavgm_momentum_0.9_server_lr_1"]
    method = FedAvgM(server_lr=case["inputs"]["server_lr"], beta=case["inputs"]["momentum"])
    state = start(*case["inputs"]["x"])

    for delta, after in zip(case["inputs"]["mean_delta_per_round"], case["expected"]["x"], strict=True):
        state = after_round(method, state, [state.params + model(*delta)])
        assert state.params["w"].tolist() == approx(after, abs=1e-6)


def test_every_golden_case_is_tested() -> None:
    assert set(GOLDEN) == {*KINDS, "fedavgm_momentum_0.9_server_lr_1"}


# One round


@mark.parametrize("method", ALL)
def test_the_update_is_the_mean_weighted_by_cases(method: ServerOptimizer) -> None:
    state = start(1.0, 1.0)
    three_to_one = after_round(method, state, [model(1.4, 1.0), model(1.0, 0.6)], 3, 1)
    together = after_round(method, state, [model(1.3, 0.9)])

    assert three_to_one.params["w"].tolist() == approx(together.params["w"].tolist(), abs=1e-12)
    assert three_to_one.notes["weights"] == {"client 0": 0.75, "client 1": 0.25}
    assert three_to_one.notes["update_norm"] == approx((0.3**2 + 0.1**2) ** 0.5)


@mark.parametrize("method", ALL)
def test_a_zero_update_leaves_the_model_alone(method: ServerOptimizer) -> None:
    first = Params({"w": torch.tensor([0.1, 0.0, 3e-39, -7.7])})
    state = ServerState(params=first, trainable=("w",))

    for _ in range(2):
        state = after_round(method, state, [first, first, first], 5, 7, 11)

    assert state.params.sha256() == first.sha256()
    assert state.notes["step_norm"] == 0


@mark.parametrize("method", ALL)
def test_buffers_follow_fedavg_and_have_no_moments(method: ServerOptimizer) -> None:
    def reply(w: float, mean: float, count: int) -> Params:
        return model(w, running_mean=torch.tensor([mean]), num_batches=torch.tensor(count))

    state = start(1.0, running_mean=torch.tensor([0.0]), num_batches=torch.tensor(0))
    state = after_round(method, state, [reply(2.0, 4.0, 9), reply(2.0, 8.0, 5)], 3, 1)

    assert state.params["running_mean"].tolist() == [5.0]
    assert state.params["num_batches"].item() == 9
    assert all(list(state.memory[key]) == ["w"] for key in method.moments)


@mark.parametrize("method", ALL)
def test_decay_shortens_the_step_and_leaves_moments_alone(method: ServerOptimizer) -> None:
    kept = falling = start(1.0)
    for number in range(4):
        sent = kept.params + model(0.5)
        before = falling.params["w"].item()
        kept = after_round(method, kept, [sent])
        step = kept.notes["step_norm"]
        falling = after_round(replace(method, decay_power=0.9), falling, [falling.params + model(0.5)])

        assert falling.params["w"].item() - before == approx(step * (1 - number / 4) ** 0.9)
        for key in method.moments:
            assert falling.memory[key]["w"].item() == approx(kept.memory[key]["w"].item())


def test_what_does_not_travel_stays_and_has_no_momentum() -> None:
    state = ServerState(params=Params({"w": torch.ones(1), "own": torch.ones(2)}), trainable=("w", "own"))

    for _ in range(2):
        state = after_round(FedAdam(), state, [Params({"w": state.params["w"] + 1})])

    assert state.params["own"].tolist() == [1, 1] and state.memory["m"]["own"].tolist() == [0, 0]
    assert state.params["w"].item() > 1


def test_moments_have_the_type_of_the_model() -> None:
    state = ServerState(params=Params({"w": torch.ones(1)}), trainable=("w",))
    state = after_round(FedYogi(), state, [Params({"w": torch.zeros(1)})])

    assert state.params["w"].dtype == state.memory["m"]["w"].dtype == torch.float32


def test_yogis_second_moment_never_becomes_negative() -> None:
    v, generator = torch.zeros(1000, dtype=torch.float64), torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-3, 1.0, 1e-6, 1e-6):
        change = torch.randn(1000, generator=generator, dtype=torch.float64) * scale
        v = FedYogi(beta2=0.0).second_moment(v, change.square())
        assert bool((v >= 0).all())


# Whole runs


def test_fedavgm_without_momentum_at_rate_one_is_fedavg(tmp_path: Path) -> None:
    off = run(tmp_path / "off", method={"name": "fedavgm", "beta": 0.0, "server_lr": 1.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})

    assert off.params_sha256 == fedavg.params_sha256
    assert not off.outcome.state.memory


def test_the_first_step_of_fedavgm_is_that_of_fedavg_and_the_second_is_not(tmp_path: Path) -> None:
    norm = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    for rounds, equal in ((1, True), (2, False)):
        fedavgm = run(tmp_path / f"m{rounds}", method={"name": "fedavgm"}, rounds=rounds, model=norm)
        fedavg = run(tmp_path / f"a{rounds}", method={"name": "fedavg"}, rounds=rounds, model=norm)
        pairs = zip(fedavgm.outcome.state.params.values(), fedavg.outcome.state.params.values(), strict=True)
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in pairs) == equal


@mark.parametrize(
    "wrong",
    [
        {"beta": 1.0},
        {"beta": -0.1},
        {"beta2": 1.0},
        {"tau": 0.0},
        {"server_lr": 0.0},
        {"decay_power": -1},
        {"nesterov": True},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with raises(ConfigError, match=f"method.{next(iter(wrong))}"):
        config(tmp_path, method={"name": "fedadam", **wrong})
