"""SCAFFOLD: golden vectors, a NumPy version, clipping, control variates on both sides, whole runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import run, spoil, vectors
from numpy.typing import NDArray
from pytest import approx, mark, raises

from toy import Weights, answer, client, federation, pull_to, rounds, state, vector, weights
from wardround.clients import Answer, Client
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.memory_store import MemoryStore
from wardround.errors import ClientError
from wardround.messages import Message
from wardround.methods.scaffold import SCAFFOLD, option_two
from wardround.params import Params

GOLDEN = vectors("scaffold")
BATCH_NORM = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
TWO_OF_FOUR = GOLDEN["option_ii_plain_sgd_two_of_four_clients"]
SCHEDULE = GOLDEN["option_ii_with_lr_schedule_uses_sum_of_lrs"]


def variate(values: Sequence[float]) -> Params:
    return Params({"w": vector(values)})


def golden_clients(case: dict[str, Any]) -> list[Client]:
    """Clients whose gradients are written down, and whose rate may change from step to step."""
    made: list[Client] = []
    for name, given in zip(("east", "north"), case["inputs"]["clients"], strict=False):

        def gradient(w: torch.Tensor, step: int, name: str = name, given: Any = given) -> list[float]:
            made_so_far = {member.name: member for member in made}
            for group in made_so_far[name]._bench.optimizer.param_groups:
                group["lr"] = given["lrs"][step]
            return list(given["grads"][step])

        one = client(name, gradient=gradient, steps=len(given["lrs"]), optimizer={"learning_rate": 0.1})
        one.memory["control"] = variate(given["ci"])
        made.append(one)
    return made


# Golden vectors


@mark.parametrize("control", ["option_two", "mean_gradient"])  # the same, for plain SGD at a constant rate
def test_a_round_of_two_of_four_clients_is_the_golden_one(control: Any) -> None:
    inputs, expected = TWO_OF_FOUR["inputs"], TWO_OF_FOUR["expected"]
    method = SCAFFOLD(control=control, server_lr=inputs["server_lr"])
    members = golden_clients(TWO_OF_FOUR)
    before = state(inputs["x"], control=variate(inputs["c"]))
    sent = Message(params=before.params, extras={"control": before.memory["control"]})

    for number, member in enumerate(members):
        kept = dict(member.memory)
        reply = method.train(member, sent)
        assert weights(reply.params) == approx(expected["y"][number], abs=1e-6)
        assert weights(member.memory["control"]) == approx(expected["c_i_new"][number], abs=1e-6)
        assert weights(reply.extras["control_change"]) == approx(expected["delta_c"][number], abs=1e-6)
        member.memory = kept

    after = method.run_round(before, federation(method, members, absent=inputs["n_clients_total"] - 2))
    assert weights(after.params) == approx(expected["x_new_uniform"], abs=1e-6)
    assert weights(after.memory["control"]) == approx(expected["c_new"], abs=1e-6)


def test_weighting_by_samples_is_the_golden_one() -> None:
    inputs, expected = TWO_OF_FOUR["inputs"], TWO_OF_FOUR["expected"]
    zeros = {"control_change": variate([0.0, 0.0])}
    answers = [
        answer(name, y, examples=examples, extras=zeros)
        for name, y, examples in zip("ab", expected["y"], (10, 30), strict=True)
    ]
    method = SCAFFOLD(weighting="samples")
    after = method.run_round(state(inputs["x"]), federation(method, answers))

    assert weights(after.params) == approx(expected["x_new_sample_weighted_n_10_30"], abs=1e-6)


def test_a_rate_that_changes_is_the_golden_case_of_the_sum_of_rates() -> None:
    inputs, expected = SCHEDULE["inputs"], SCHEDULE["expected"]
    (north,) = golden_clients(SCHEDULE)
    x = state(inputs["x"]).params
    reply = SCAFFOLD().train(north, Message(params=x, extras={"control": variate(inputs["c"])}))
    assert weights(reply.params) == approx(expected["y"][0], abs=1e-6)
    mean_gradient = expected["c_i_new_if_mean_raw_gradient_used"][0]
    assert weights(north.memory["control"]) == approx(mean_gradient, abs=1e-6)

    given = inputs["clients"][0]
    y = reply.params.only(["w"])
    new = option_two(variate(given["ci"]), variate(inputs["c"]), x.only(["w"]), y, sum(given["lrs"]))
    assert weights(new) == approx(expected["c_i_new"][0], abs=1e-6)


# Two rounds and more in NumPy

Vector = NDArray[np.float64]
TARGETS = {"east": (np.array([1.0, 0.0]), 3.0), "north": (np.array([-2.0, 1.0]), 1.0)}
STEPS = {"east": 2, "north": 4}


def sgd(w: Vector, g: Vector, memory: dict[str, Any]) -> Vector:
    return w - 0.1 * g


def adam(w: Vector, g: Vector, memory: dict[str, Any]) -> Vector:
    t = memory["t"] = memory.get("t", 0) + 1
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
    return np.asarray(w - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8))


def in_numpy(step: Callable[..., Vector], count: int, limit: float = np.inf) -> tuple[Vector, Vector]:
    """x and c after so many rounds, with the mean of gradients as control variate."""
    x, c = np.zeros(2), np.zeros(2)
    variates = {name: np.zeros(2) for name in TARGETS}
    for _ in range(count):
        models, changes = [], []
        for name, (target, curvature) in TARGETS.items():
            y, total, memory = x.copy(), np.zeros(2), dict[str, Any]()
            for _ in range(STEPS[name]):
                g = curvature * (y - target)
                g = g * min(1.0, limit / (np.linalg.norm(g) + 1e-6))
                total += g
                y = step(y, g + c - variates[name], memory)
            models.append(y)
            changes.append(total / STEPS[name] - variates[name])
            variates[name] = total / STEPS[name]
        x = np.mean(models, axis=0)
        c = c + np.mean(changes, axis=0)
    return x, c


@mark.parametrize("clip", [None, 0.7])
@mark.parametrize(("name", "step"), [("sgd", sgd), ("adam", adam)])
def test_three_rounds_equal_the_numpy_version(name: str, step: Callable[..., Vector], clip: Any) -> None:
    """Clipping acts on g before the correction, so the mean gradient is one of clipped gradients."""
    settings = {"name": name, "learning_rate": 0.1, "clip_norm": clip}

    def gradient_of(name: str) -> Any:
        target, curvature = TARGETS[name]
        return lambda w, step: curvature * (w - torch.from_numpy(target))

    members = [client(n, gradient=gradient_of(n), steps=STEPS[n], optimizer=settings) for n in TARGETS]
    *_, last = rounds(SCAFFOLD(), state([0.0, 0.0]), members, 3)
    x, c = in_numpy(step, 3, np.inf if clip is None else clip)

    assert weights(last.params) == approx(x.tolist(), abs=1e-10)
    assert weights(last.memory["control"]) == approx(c.tolist(), abs=1e-10)


def test_drift_vanishes_where_fedavg_keeps_it() -> None:
    """F_east = 3/2 (w - 1)², F_north = (w + 1)²/2: the sum is least at 0.5; unequal steps move FedAvg away."""
    members = [
        client("east", gradient=pull_to(1.0, 3.0), steps=2, num_weights=1),
        client("north", gradient=pull_to(-1.0), steps=6, num_weights=1),
    ]
    *_, last = rounds(SCAFFOLD(), state([0.0]), members, 60, num_weights=1)

    assert weights(last.params) == approx([0.5], abs=1e-4)


# Server


def test_the_server_rate_scales_the_move_but_not_running_statistics() -> None:
    moved = answer("a", [1.0, 2.0], extras={"control_change": variate([0.0, 0.0])})
    sent = moved.message.params.updated({"buffer": vector([4.0])})
    moved = replace(moved, message=replace(moved.message, params=sent))
    method = SCAFFOLD(server_lr=0.5)
    after = method.run_round(state([0.0, 0.0]), federation(method, [moved]))

    assert weights(after.params) == [0.5, 1.0]
    assert after.params["buffer"].tolist() == [4.0]


def test_alone_the_correction_is_exactly_zero_in_every_round() -> None:
    """Both sides add the same rounded change, so c and c_k stay equal to the last bit, also in float32."""
    north = client(gradient=lambda w, step: 1.1 * w + 0.1 * step, steps=3, num_weights=50)
    north.model.float()
    start = Params.of(Weights([1 / (n + 1) for n in range(50)])).map(lambda tensor: tensor.float())
    message, c = Message(params=start), start.only(["w"]).zeros()
    for number in range(4):
        north.round = number
        c = c + SCAFFOLD().train(north, message).extras["control_change"]
        assert torch.equal(c["w"], north.memory["control"]["w"])
        message = Message(params=start * 7.3 ** (number + 1), extras={"control": c})


def test_an_ill_shaped_change_is_refused_and_the_rest_go_on() -> None:
    method = SCAFFOLD()
    short = Params({"w": vector([1.0])})
    good = answer("b", [1.0, 2.0], extras={"control_change": variate([0.0, 0.0])})
    for extras, reason in [({"control_change": short}, "'w' has shape"), ({}, "'w' is missing")]:
        clients = federation(method, [answer("a", [9.0, 9.0], extras=extras), good])
        after = method.run_round(state([0.0, 0.0]), clients)

        assert weights(after.params) == [1.0, 2.0]
        assert reason in clients.exchanges[0].refused["a"]


# Client


def test_a_client_that_was_away_keeps_its_stale_variate() -> None:
    north = client(gradient=pull_to(1.0), steps=2)
    method = SCAFFOLD()
    method.train(north, Message(params=Params.of(Weights([0.0, 0.0]))))
    stale = weights(north.memory["control"])
    north.round = 7
    reply = method.train(
        north, Message(params=Params.of(Weights([0.5, 0.5])), extras={"control": variate([0.1, 0.1])})
    )

    kept = [
        new - change
        for new, change in zip(
            weights(north.memory["control"]), weights(reply.extras["control_change"]), strict=True
        )
    ]
    assert kept == approx(stale)


def test_a_variate_that_is_not_finite_never_leaves_and_is_not_remembered() -> None:
    """Every loss is finite, only the sum of the gradients overflows."""
    north = client(gradient=lambda w, step: [1e308, 1.0], steps=2, optimizer={"learning_rate": 0.0})
    north.memory["control"] = variate([0.2, 0.2])
    with raises(ClientError, match="client 'north': its control variate"):
        SCAFFOLD().train(north, Message(params=Params.of(Weights([1e-3, 1.0]))))

    assert weights(north.memory["control"]) == [0.2, 0.2]


def test_option_two_at_a_rate_of_zero_keeps_the_variate() -> None:
    x = variate([1.0, 2.0])
    assert weights(option_two(variate([0.3, 0.1]), x, x, x, 0.0)) == [0.3, 0.1]


# Whole runs


def test_the_first_round_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    scaffold = run(tmp_path / "scaffold", rounds=1, method={"name": "scaffold"})
    fedavg = run(tmp_path / "fedavg", rounds=1, method={"name": "fedavg", "weighting": "uniform"})

    assert scaffold.params_sha256 == fedavg.params_sha256


def test_control_variates_cover_parameters_only_and_travel_both_ways(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "scaffold"}, model=BATCH_NORM)

    _, params, memory = Checkpoints(tmp_path / "run" / "checkpoints").load()
    learned = result.outcome.state.trainable
    assert set(memory["control"]) == set(learned) and len(learned) < len(params)
    kept = MemoryStore(tmp_path / "run" / "clients" / "north").load()["control"]
    assert set(kept) == set(learned)
    model, control = params.num_bytes, memory["control"].num_bytes
    first, second = (record["exchanges"][0] for record in result.records)
    assert first["bytes_down"]["north"] == model and second["bytes_down"]["north"] == model + control
    assert first["bytes_up"]["north"] == second["bytes_up"]["north"] == model + control


def test_a_lost_client_does_not_reach_the_control_variate(tmp_path: Path, monkeypatch: Any) -> None:
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="RuntimeError: boom"))
    result = run(tmp_path / "run", method={"name": "scaffold"})

    c = result.outcome.state.memory["control"]
    variates = [MemoryStore(tmp_path / "run" / "clients" / n).load()["control"] for n in ("north", "south")]
    for name in c:
        assert torch.allclose(c[name], (variates[0][name] + variates[1][name]) / 3, atol=1e-6)


def test_a_change_of_nan_is_refused_at_the_gate(tmp_path: Path, monkeypatch: Any) -> None:
    def spoilt(answer: Answer) -> Answer:
        change = answer.message.extras["control_change"] * float("nan")
        return replace(answer, message=replace(answer.message, extras={"control_change": change}))

    spoil(monkeypatch, "east", spoilt)
    result = run(tmp_path / "run", method={"name": "scaffold"})

    assert result.summary["num_refused"] == 2
    assert all(bool(torch.isfinite(t).all()) for t in result.outcome.state.memory["control"].values())


@mark.parametrize("control", ["mean_gradient", "option_two"])
def test_option_two_warns_of_an_optimizer_that_is_not_plain_sgd(control: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, method={"name": "scaffold", "control": control})

    assert any("option II" in text for text in result.records[0]["warnings"]) == (control == "option_two")


def test_objectives_with_a_head_of_their_own_leave_it_out(tmp_path: Path) -> None:
    method, objective = {"name": "scaffold", "server_lr": 0.5}, {"name": "simclr", "local_head": True}
    result = run(tmp_path / "run", method=method, objective=objective)

    control = result.outcome.state.memory["control"]
    assert 0 < len(control) < len(result.outcome.state.trainable)
