"""FedDyn: golden vectors, two rounds by hand, where it converges, clipping, whole runs."""

import math
from pathlib import Path
from typing import Any

import torch
from helpers import run, spoil, vectors
from pytest import approx, mark, raises

from toy import Weights, always, answer, client, federation, pull_to, rounds, state, vector, weights
from wardround.clients import Answer
from wardround.engine.memory_store import MemoryStore
from wardround.errors import ClientError
from wardround.messages import Message
from wardround.methods.feddyn import FedDyn, penalty
from wardround.params import Params

GOLDEN = vectors("feddyn")


def moves(values: Any) -> Params:
    return Params({"w": vector(values)})


# Golden vectors


def test_a_round_of_two_of_three_clients_is_the_golden_one() -> None:
    inputs, expected = GOLDEN["two_of_three"]["inputs"], GOLDEN["two_of_three"]["expected"]
    x, alpha = inputs["x"], 0.1
    method = FedDyn(alpha=alpha, clip=None)
    members = []
    for number, w in zip(inputs["participants"], inputs["client_w"], strict=True):
        h = inputs["h"][number]
        # one step at rate 1 ends at w if gradient and penalty, which is alpha h_k at x, add up to x - w
        gradient = [a - b - alpha * c for a, b, c in zip(x, w, h, strict=True)]
        one = client("abc"[number], gradient=always(gradient), optimizer={"learning_rate": 1.0})
        one.memory["h"] = moves(h)
        members.append(one)
    mean_h = [math.fsum(column) / 3 for column in zip(*inputs["h"], strict=True)]
    before = state(x, h=moves(mean_h))
    after = method.run_round(before, federation(method, members, absent=1))

    assert weights(after.params) == approx(expected["x_new"], abs=1e-6)
    for number, member in zip(inputs["participants"], members, strict=True):
        assert weights(member.memory["h"]) == approx(expected["h_new"][number], abs=1e-6)
    new_mean = [math.fsum(column) / 3 for column in zip(*expected["h_new"], strict=True)]
    assert weights(after.memory["h"]) == approx(new_mean, abs=1e-6)


def test_the_local_penalty_and_its_gradient_are_the_golden_ones() -> None:
    inputs, expected = GOLDEN["local_penalty"]["inputs"], GOLDEN["local_penalty"]["expected"]
    model = Weights(inputs["w"])
    value = inputs["alpha"] * penalty(model, moves(inputs["h"]) - moves(inputs["x"]))
    value.backward()  # type: ignore[no-untyped-call]

    assert value.item() == approx(expected["value"], abs=1e-6)
    assert model.w.grad is not None and model.w.grad.tolist() == approx(expected["grad"], abs=1e-6)


# By hand


def two_hospitals() -> list[Any]:
    """F_north = (w - 1)²/2, F_east = 3/2 (w + 1)²; with alpha 1, rates 1/2 and 1/4 solve a round in one step."""
    north = client("north", gradient=pull_to(1.0), num_weights=1, optimizer={"learning_rate": 1 / 2})
    east = client("east", gradient=pull_to(-1.0, 3.0), num_weights=1, optimizer={"learning_rate": 1 / 4})
    return [north, east]


def test_two_rounds_are_those_worked_out_by_hand() -> None:
    """theta_k solves a (w - b) + (h_k - theta + w) = 0, so w = (a b + theta - h_k) / (a + 1).

    Round 1, theta 0, h 0.        north 1/2, east -3/4; h_k 1/2 and -3/4, h -1/8; theta = -1/8 - 1/8 = -1/4
    Round 2, theta -1/4.          north (1 - 3/4)/2 = 1/8, east (-3 + 1/2)/4 = -5/8;
                                  h_k 7/8 and -9/8, h -1/8; theta = -1/4 - 1/8 = -3/8
    """
    members = two_hospitals()
    first, second = rounds(FedDyn(alpha=1.0), state([0.0]), members, 2, num_weights=1)

    assert weights(first.params) == approx([-0.25], abs=1e-12)
    assert weights(second.params) == approx([-0.375], abs=1e-12)
    assert weights(second.memory["h"]) == approx([-0.125], abs=1e-12)
    assert [weights(member.memory["h"]) for member in members] == [approx([0.875]), approx([-1.125])]


def test_it_converges_where_the_sum_of_the_losses_is_least() -> None:
    """(w - 1) + 3 (w + 1) = 0 at -1/2; the mean of the two optima, where FedAvg ends, is 0."""
    *_, last = rounds(FedDyn(alpha=1.0), state([0.0]), two_hospitals(), 40, num_weights=1)

    assert weights(last.params) == approx([-0.5], abs=1e-6)


def test_the_servers_h_is_the_mean_of_the_clients() -> None:
    members = two_hospitals()
    *_, last = rounds(FedDyn(alpha=1.0), state([0.0]), members, 5, num_weights=1)

    assert weights(last.memory["h"]) == approx([sum(weights(m.memory["h"])[0] for m in members) / 2])


# Client and server


def test_gradients_are_clipped_with_the_penalty_inside() -> None:
    """Gradient (30, 40) and penalty (0, 0) at the start: norm 50 becomes 10, so a step of 0.1 x (6, 8)."""
    for clip, step in [(10.0, [-0.6, -0.8]), (None, [-3.0, -4.0])]:
        north = client(gradient=always([30.0, 40.0]))
        reply = FedDyn(clip=clip).train(north, Message(params=Params.of(Weights([0.0, 0.0]))))
        assert weights(reply.params) == approx(step, abs=1e-6)


def test_running_statistics_take_no_part_in_h() -> None:
    sent = answer("a", [1.0, 1.0]).message.params
    assert sent is not None
    method = FedDyn()
    one = Answer("a", Message(params=sent.updated({"buffer": vector([4.0])})), num_examples=1, num_steps=1)
    after = method.run_round(state([0.0, 0.0]), federation(method, [one]))

    assert after.params["buffer"].tolist() == [4.0]
    assert weights(after.params) == [2.0, 2.0] and set(after.memory["h"]) == {"w"}


def test_clients_count_alike_whatever_their_size() -> None:
    """Mean of 1 and 3 is 2, and h moves by 2 as well."""
    method = FedDyn()
    members = [answer("a", [1.0, 0.0], examples=1), answer("b", [3.0, 0.0], examples=9)]
    after = method.run_round(state([0.0, 0.0]), federation(method, members))

    assert weights(after.params) == [4.0, 0.0]
    assert after.notes["weights"] == {"a": 0.5, "b": 0.5}


def test_a_model_that_is_not_finite_is_not_remembered() -> None:
    north = client(gradient=always([1e308, 0.0]), optimizer={"learning_rate": 100.0})
    north.memory["h"] = moves([0.2, 0.2])
    with raises(ClientError, match="client 'north': its model is no longer finite"):
        FedDyn(clip=None).train(north, Message(params=Params.of(Weights([1e-3, 1.0]))))

    assert weights(north.memory["h"]) == [0.2, 0.2]


# Whole runs


def test_feddyn_with_alpha_zero_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    feddyn = run(tmp_path / "feddyn", method={"name": "feddyn", "alpha": 0.0, "clip": 1e-6})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg", "weighting": "uniform"})

    assert feddyn.params_sha256 == fedavg.params_sha256
    assert feddyn.outcome.state.memory == {}


def test_the_penalty_is_recorded_and_nothing_more_is_sent(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "feddyn", "alpha": 0.1})

    assert all("dynamic" in loss for loss in result.records[0]["loss"].values())
    model = result.outcome.state.params.num_bytes
    assert set(result.records[1]["exchanges"][0]["bytes_up"].values()) == {model}


@mark.parametrize("participation", [1.0, 0.5])
def test_h_at_the_server_is_the_mean_over_all_clients(participation: float, tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=4, method={"name": "feddyn"}, participation=participation)

    stored = [MemoryStore(tmp_path / "run" / "clients" / n).load() for n in ("east", "north", "south")]
    for name, h in result.outcome.state.memory["h"].items():
        total = sum(memory["h"][name].double() for memory in stored if "h" in memory)
        assert torch.allclose(h, torch.as_tensor(total) / 3, atol=1e-6)


def test_a_lost_client_does_not_move_h(tmp_path: Path, monkeypatch: Any) -> None:
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="RuntimeError: boom"))
    result = run(tmp_path / "run", method={"name": "feddyn"})

    stored = [MemoryStore(tmp_path / "run" / "clients" / n).load()["h"] for n in ("north", "south")]
    for name, h in result.outcome.state.memory["h"].items():
        assert torch.allclose(h, (stored[0][name].double() + stored[1][name].double()) / 3, atol=1e-6)


def test_objectives_with_a_head_of_their_own_leave_it_out(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run", method={"name": "feddyn"}, objective={"name": "simclr", "local_head": True}
    )

    h = result.outcome.state.memory["h"]
    assert all(bool((tensor == 0).all()) == name.startswith("projection") for name, tensor in h.items())
