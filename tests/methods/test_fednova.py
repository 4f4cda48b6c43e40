"""FedNova: golden vectors, normalisers against real optimizers, the server's rule, whole runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run, settings, vectors
from pytest import approx, mark, raises

import wardround as wr
from toy import answer, client, federation, pull_to, rounds, state, vector, weights
from wardround.aggregation.weights import weighted_mean
from wardround.clients import Answer
from wardround.errors import ConfigError
from wardround.methods.fednova import FedNova
from wardround.training.optimizers import accumulated

GOLDEN = vectors("fednova")
UNEQUAL = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 12, 24]}}
EQUAL = {"phantom": {"hospitals": 3, "size": 16, "cases": 8}}


def golden_normalisers(inputs: Mapping[str, Any]) -> list[float]:
    pull = inputs.get("mu", 0.0) * inputs.get("lr", 0.0)
    return [accumulated(tau, inputs.get("rho", 0.0), pull) for tau in inputs["tau"]]


def answers(
    w: Sequence[Sequence[float]], n: Sequence[int], tau: Sequence[int], a: Sequence[float]
) -> list[Answer]:
    return [
        answer(name, *one[:1], examples=one[1], steps=one[2], scalars={"a": one[3]})
        for name, one in zip("abcdef", zip(w, n, tau, a, strict=True), strict=False)
    ]


# Golden vectors


@mark.parametrize("name", GOLDEN)
def test_a_round_is_the_golden_one(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    a = golden_normalisers(inputs)
    assert a == approx(expected["a"], abs=1e-6)
    d = [
        [(x - w) / a_k for x, w in zip(inputs["x"], w_k, strict=True)]
        for w_k, a_k in zip(inputs["client_w"], a, strict=True)
    ]
    assert [v for row in d for v in row] == approx([v for row in expected["d"] for v in row], abs=1e-6)

    method = FedNova(mu=inputs.get("mu", 0.0))
    members = answers(inputs["client_w"], inputs["n"], inputs["tau"], a)
    after = method.run_round(state(inputs["x"]), federation(method, members))
    assert weights(after.params) == approx(expected["x_new"], abs=1e-6)
    assert after.notes["tau_eff"] == approx(expected["tau_eff"], abs=1e-6)
    if "fedavg" in expected:
        assert weights(after.params) == approx(expected["fedavg"], abs=1e-6)


def test_the_coefficients_of_the_clients_are_the_golden_ones() -> None:
    """A client that alone moves by 1 moves the model by its coefficient."""
    case = GOLDEN["vanilla_sgd_or_adam_step_count"]
    inputs, method = case["inputs"], FedNova()
    for number, coefficient in enumerate(case["expected"]["equivalent_client_coefficients"]):
        w = [[1.0 if k == number else 0.0, 0.0] for k in range(3)]
        members = answers(w, inputs["n"], inputs["tau"], [float(tau) for tau in inputs["tau"]])
        after = method.run_round(state([0.0, 0.0]), federation(method, members))
        assert weights(after.params) == approx([coefficient, 0.0], abs=1e-6)


# Normalisers


@mark.parametrize("nesterov", [False, True])
@mark.parametrize("momentum", [0.5, 0.9])
def test_a_normaliser_is_how_far_sgd_goes_along_a_constant_gradient(momentum: float, nesterov: bool) -> None:
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.01, momentum=momentum, nesterov=nesterov)
    for step in range(1, 8):
        w.grad = torch.ones_like(w)
        sgd.step()
        assert accumulated(step, momentum, nesterov=nesterov) == approx(-w.item() / 0.01)


def test_the_momentum_normaliser_is_the_papers_closed_form() -> None:
    for tau, rho in [(1, 0.9), (7, 0.9), (12, 0.3)]:
        closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        assert accumulated(tau, rho) == approx(closed)


def test_the_proximal_normaliser_is_the_geometric_sum() -> None:
    for tau, pull in [(1, 0.3), (6, 0.05)]:
        assert accumulated(tau, pull=pull) == approx(sum((1 - pull) ** j for j in range(tau)))


def test_momentum_and_pull_together_follow_the_recurrence() -> None:
    """rho 0.5, pull 0.1: m 1, a 1, then 0.9 + 1 = 1.9; m 1.5, a 3.4, then 3.06 + 1 = 4.06."""
    assert accumulated(2, 0.5, 0.1) == approx(4.06)


def test_tau_eff_of_equal_steps_is_exact() -> None:
    assert weighted_mean([1 / 3] * 3, [2.9] * 3) == 2.9  # a sum of products is off by one bit


@mark.parametrize(
    ("optimizer", "mu", "a"),
    [
        ({"name": "sgd"}, 0.0, 3.0),
        ({"name": "sgd", "momentum": 0.9}, 0.0, 1 + 1.9 + 2.71),
        ({"name": "sgd", "learning_rate": 0.1}, 0.5, 1 + 0.95 + 0.95**2),
        ({"name": "adam"}, 0.0, 3.0),
        ({"name": "adamw", "learning_rate": 0.1}, 0.5, 3.0),
    ],
)
def test_a_client_sends_the_normaliser_of_its_optimizer(optimizer: Any, mu: float, a: float) -> None:
    method = FedNova(mu=mu)
    north = client(gradient=pull_to(1.0), steps=3, optimizer=optimizer)
    (after,) = rounds(method, state([0.0, 0.0]), [north], 1)

    assert after.notes["a"]["north"] == approx(a)


# Server


def test_unequal_steps_no_longer_decide_where_the_mean_goes() -> None:
    """Constant gradients 1 and -1, steps 1 and 9: FedAvg drifts by 0.4, FedNova stays."""
    members = answers([[-0.1, 0.0], [0.9, 0.0]], [1, 1], [1, 9], [1.0, 9.0])
    after = FedNova().run_round(state([0.0, 0.0]), federation(FedNova(), members))

    assert weights(after.params) == approx([0.0, 0.0], abs=1e-12)
    assert after.notes["weights"] == {"a": 0.5, "b": 0.5}


def test_running_statistics_are_averaged_as_in_fedavg() -> None:
    members = answers([[1.0, 0.0], [1.0, 0.0]], [1, 3], [1, 9], [1.0, 9.0])
    with_statistics = []
    for member, value in zip(members, (4.0, 8.0), strict=True):
        sent = member.message.params.updated({"buffer": vector([value])})
        with_statistics.append(replace(member, message=replace(member.message, params=sent)))
    after = FedNova().run_round(state([0.0, 0.0]), federation(FedNova(), with_statistics))

    assert after.params["buffer"].tolist() == [7.0]


def test_a_client_without_a_step_or_a_normaliser_is_left_out() -> None:
    members = answers([[1.0, 1.0], [9.0, 9.0], [9.0, 9.0]], [1, 1, 1], [2, 0, 2], [2.0, 1.0, 0.0])
    after = FedNova().run_round(state([0.0, 0.0]), federation(FedNova(), members))
    assert weights(after.params) == [1.0, 1.0]
    assert after.notes["weights"] == {"a": 1.0}

    nobody = FedNova().run_round(state([5.0, 5.0]), federation(FedNova(), members[1:]))
    assert weights(nobody.params) == [5.0, 5.0] and nobody.round == 1


@mark.parametrize("lie", [1e30, 10**400, 5.1])
def test_a_normaliser_that_so_few_steps_cannot_make_is_left_out(lie: float) -> None:
    """Two steps accumulate less than 2 + 3 (Nesterov, momentum near 1); a larger a would scale the others up."""
    members = answers([[1.0, 1.0], [9.0, 9.0]], [1, 1], [2, 2], [5.0, lie])
    after = FedNova().run_round(state([0.0, 0.0]), federation(FedNova(), members))

    assert weights(after.params) == [1.0, 1.0] and after.notes["weights"] == {"a": 1.0}


def test_server_momentum_repeats_a_share_of_the_last_move() -> None:
    """Moves of 1 then 1 with 0.5: v = 1, x = 1; v = 0.5 + 1, x = 2.5."""
    method = FedNova(server_momentum=0.5)
    north = client(gradient=lambda w, step: [-10.0, 0.0])
    first, second = rounds(method, state([0.0, 0.0]), [north], 2)

    assert weights(first.params) == approx([1.0, 0.0])
    assert weights(second.params) == approx([2.5, 0.0])


# Whole runs


@mark.parametrize("optimizer", [{"name": "adam"}, {"name": "sgd", "momentum": 0.9, "learning_rate": 0.01}])
def test_with_equal_steps_fednova_is_fedavg(optimizer: Any, tmp_path: Path) -> None:
    fednova = run(tmp_path / "fednova", method={"name": "fednova"}, optimizer=optimizer, data=EQUAL)
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"}, optimizer=optimizer, data=EQUAL)

    assert fednova.params_sha256 == fedavg.params_sha256


def test_with_unequal_steps_it_is_not(tmp_path: Path) -> None:
    fednova = run(tmp_path / "fednova", method={"name": "fednova"}, data=UNEQUAL)
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"}, data=UNEQUAL)

    assert fednova.params_sha256 != fedavg.params_sha256
    assert len(set(fednova.records[0]["a"].values())) > 1
    assert fednova.records[0]["weights"] == fedavg.records[0]["weights"]


def test_the_proximal_option_trains_as_fedprox(tmp_path: Path) -> None:
    """Steps are equal and Adam counts them, so only the local loss differs from FedAvg."""
    fednova = run(tmp_path / "fednova", method={"name": "fednova", "mu": 0.5}, data=EQUAL)
    fedprox = run(tmp_path / "fedprox", method={"name": "fedprox", "mu": 0.5}, data=EQUAL)

    assert fednova.params_sha256 == fedprox.params_sha256


def test_server_momentum_survives_a_resumed_run(tmp_path: Path) -> None:
    from helpers import Watcher

    method = {"name": "fednova", "server_momentum": 0.5}
    whole = run(tmp_path / "whole", rounds=3, method=method)
    broken = settings(tmp_path / "broken", rounds=3, method=method)
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2))

    assert wr.run(broken, resume=True).params_sha256 == whole.params_sha256


@mark.parametrize(
    ("optimizer", "text"),
    [
        ({"name": "adam"}, "no normaliser is known for adam"),
        ({"name": "sgd", "momentum": 0.9, "state": "keep"}, "starts afresh"),
        ({"name": "sgd", "momentum": 0.9}, ""),
    ],
)
def test_a_run_says_when_the_normaliser_is_not_exact(optimizer: Any, text: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, method={"name": "fednova"}, optimizer=optimizer)

    said = " ".join(result.records[0]["warnings"])
    assert text in said and bool(said) == bool(text)


def test_a_pull_beyond_the_received_model_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="method.mu times optimizer.learning_rate is 1.5"):
        run(tmp_path, method={"name": "fednova", "mu": 3.0}, optimizer={"name": "sgd", "learning_rate": 0.5})
