"""L-DAWA: golden vectors, the layer-wise rule, whole runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run, vectors

from wardround.clients import Answer, Clients, Registration
from wardround.messages import Message, ServerState
from wardround.methods.ldawa import LDAWA, cosine, cosines
from wardround.params import Params

GOLDEN = vectors("ldawa")


def params(values: Mapping[str, Any]) -> Params:
    return Params({name: torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()})


def after_round(
    before: Params, items: Sequence[Params], trainable: Sequence[str], method: LDAWA | None = None
) -> ServerState:
    """One round in which the clients return these models."""
    names = "abcdef"[: len(items)]

    class Given:
        def deliver(
            self, task: str, round: int, messages: Mapping[str, Message], sync_state: Any
        ) -> list[Answer]:
            return [
                Answer(name, Message(item), num_examples=1 + number, num_steps=1)
                for number, (name, item) in enumerate(zip(names, items, strict=True))
            ]

    spec = {name: before.spec(name) for name in before}
    registered = [Registration(name, 9, tensors=spec) for name in names]
    clients = Clients(Given(), registered, rounds=1, min_clients=1)  # type: ignore[arg-type]
    return (method or LDAWA()).run_round(ServerState(before, trainable=tuple(trainable)), clients)


# Golden vectors


@pytest.mark.parametrize("name", GOLDEN)
def test_the_rule_is_the_golden_one(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    before, items = params(inputs["global_prev"]), [params(model) for model in inputs["client_w"]]
    state = ServerState(before, trainable=tuple(before))

    delta = cosines(state, items)
    for k, by_layer in enumerate(expected["delta"]):
        assert {layer: delta[layer][k] for layer in delta} == pytest.approx(by_layer, abs=1e-6)

    after = after_round(before, items, list(before))
    for layer, values in expected["state"].items():
        assert after.params[layer].tolist() == pytest.approx(values, abs=1e-6)
    shown = [sum(by_layer.values()) / len(by_layer) for by_layer in expected["delta"]]
    assert list(after.notes["cosine"].values()) == pytest.approx(shown, abs=1e-6)
    assert after.notes["weights"] == {"a": 0.5, "b": 0.5}


# The rule


def test_a_tensor_of_zeros_counts_in_full() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    assert cosine(zero, one) == cosine(one, zero) == cosine(zero, zero) == 1.0


def test_rounding_does_not_take_a_cosine_above_one() -> None:
    values = torch.full((7,), 0.1)
    assert cosine(values, 3 * values) <= 1.0


def test_one_client_alone_is_taken_as_it_is() -> None:
    before, item = params({"w": [1.0, 0.0]}), params({"w": [0.6, 0.8]})
    after = after_round(before, [item], ["w"])
    assert torch.equal(after.params["w"], item["w"]) and after.notes["weights"] == {"a": 1.0}


def test_buffers_are_averaged_and_counters_take_the_maximum() -> None:
    def model(w: float, var: float, count: int) -> Params:
        floating = params({"w": [1.0, w], "running_var": [var]})
        return Params({**floating, "count": torch.tensor(count)})

    after = after_round(model(0.0, 1.0, 0), [model(1.0, 2.0, 3), model(-1.0, 4.0, 5)], ["w"])
    assert after.params["running_var"].tolist() == [3.0] and int(after.params["count"]) == 5
    # both have the cosine 1/sqrt 2 with (1, 0): their mean (1, 0) shrinks by it
    assert after.params["w"].tolist() == pytest.approx([0.5**0.5, 0.0], abs=1e-12)


def test_with_normalise_nothing_shrinks() -> None:
    items = [params({"w": [1.0, 1.0]}), params({"w": [1.0, -1.0]})]
    after = after_round(params({"w": [1.0, 0.0]}), items, ["w"], LDAWA(normalise=True))
    assert after.params["w"].tolist() == pytest.approx([1.0, 0.0], abs=1e-12)


def test_cosines_that_cancel_are_not_divided_by() -> None:
    items = [params({"w": [1.0, 0.5]}), params({"w": [-1.0, 0.5]})]
    after = after_round(params({"w": [1.0, 0.0]}), items, ["w"], LDAWA(normalise=True))
    assert after.params["w"].tolist() == pytest.approx([0.0, 0.5], abs=1e-12)
    flipped = after_round(params({"w": [1.0, 0.0]}), items, ["w"])
    assert flipped.params["w"][0].item() == pytest.approx(0.8**0.5, abs=1e-12)  # the sign turns


def test_a_tensor_that_does_not_travel_stays() -> None:
    before = params({"w": [1.0, 0.0], "own": [7.0]})
    state = ServerState(before, trainable=("w", "own"))
    assert set(cosines(state, [params({"w": [1.0, 1.0]})])) == {"w"}


# Whole runs


def test_a_run_records_uniform_weights_and_a_cosine_a_client(tmp_path: Path) -> None:
    record = run(tmp_path, method={"name": "ldawa"}).records[1]
    assert set(record["weights"].values()) == {1 / 3}
    assert set(record["cosine"]) == {"east", "north", "south"}
    assert all(0.5 < value <= 1 for value in record["cosine"].values())


def test_batch_norm_statistics_are_those_of_the_plain_mean(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    ldawa = run(tmp_path / "ldawa", rounds=1, model=model, method={"name": "ldawa"})
    plain = run(tmp_path / "plain", rounds=1, model=model, method={"name": "fedavg", "weighting": "uniform"})
    left, right = ldawa.outcome.state, plain.outcome.state
    assert any(not torch.equal(left.params[name], right.params[name]) for name in left.trainable)
    for name in set(left.params) - set(left.trainable):
        assert torch.equal(left.params[name], right.params[name])
