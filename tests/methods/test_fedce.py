"""FedCE: golden vectors, the scores, the exchanges, whole runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import nn

from wardround.aggregation.mean import mean
from wardround.clients import Answer, Client, Clients, Registration
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.objective import Dice
from wardround.losses.segmentation import mask_dice
from wardround.messages import Message, ServerState
from wardround.methods import build_method
from wardround.methods.fedce import FedCE, cosines_to_rest, shares, without_client
from wardround.metrics import measure
from wardround.params import Params

GOLDEN = vectors("fedce")
ROUNDS = [name for name in GOLDEN if name.startswith("round")]
NAMES = "abcdef"
BATCH_NORM = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}


def by_name(values: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=False))


def vector(values: Sequence[float]) -> Params:
    return Params({"w": torch.tensor(values, dtype=torch.float64)})


class Fake:
    """Clients whose updates and errors are given; keeps what they were sent."""

    def __init__(self, updates: Mapping[str, Sequence[float]], errors: Mapping[str, float]) -> None:
        self.updates, self.errors, self.sent = updates, errors, {}  # type: ignore[var-annotated]
        self.lost: set[tuple[int, str]] = set()

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: Any
    ) -> Iterator[Answer]:
        for name, message in messages.items():
            self.sent[round, name] = message.scalars
            if (round, name) in self.lost:
                yield Answer(name, failure="gone")
                continue
            scalars = {"error": self.errors[name]} if name in self.errors else {}
            model = message.params + vector(self.updates[name])
            yield Answer(name, Message(model, scalars=scalars), num_examples=1, num_steps=1)


def server(fake: Fake) -> Clients:
    spec = {"w": ((3,), torch.float64)}
    registered = [Registration(name, 5, tensors=spec) for name in fake.updates]
    return Clients(fake, registered, rounds=9, min_clients=1)


def played(
    method: FedCE, fake: Fake, present: Sequence[str], start: ServerState | None = None
) -> list[ServerState]:
    """States after each round."""
    clients = server(fake)
    states = [start or ServerState(vector([0, 0, 0]), trainable=("w",))]
    for round, names in enumerate(present):
        clients.begin_round(round, list(names))
        states.append(method.run_round(states[-1], clients))
    return states[1:]


UPDATES = by_name([[0.5, 0.1, -0.2], [0.4, 0.3, -0.1], [-0.3, 0.6, 0.2]])


# Golden vectors


def test_every_golden_case_is_tested() -> None:
    assert set(GOLDEN) == {*ROUNDS, "minus_model"} and len(ROUNDS) == 4


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_is_the_golden_one(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    errors = by_name([1 - sum(dices) / len(dices) for dices in inputs["minus_dice_history"]])
    memory = {"cosines": by_name(inputs.get("cos_history", []))}
    if "coef_prev" in inputs:
        memory["weights"] = by_name(inputs["coef_prev"])
    start = ServerState(vector([0, 0, 0]), trainable=("w",), memory=memory)
    method = FedCE(mode=inputs["mode"], consensus=inputs.get("consensus", "weighted"))
    (after,) = played(method, Fake(by_name(inputs["delta"]), errors), ["abc"], start)

    notes = after.notes
    found = {
        "cos": notes["cosine"],
        "gradient_score": notes["gradient_score"],
        "data_score": notes["data_score"],
        "gradient_weight": shares(notes["gradient_score"], method.floor),
        "data_weight": shares(notes["data_score"], method.floor),
        "coef": notes["weights"],
    }
    for key, values in expected.items():
        assert list(found[key].values()) == pytest.approx(values, abs=2e-6), key
    combined = np.array(list(notes["weights"].values())) @ np.array(inputs["delta"])
    assert after.params["w"].tolist() == pytest.approx(combined.tolist(), abs=1e-12)


def test_the_model_without_a_client_is_the_golden_one() -> None:
    inputs = GOLDEN["minus_model"]["inputs"]
    found = without_client(
        vector(inputs["global"]), vector(inputs["previous_local"]), inputs["coef"], nn.Identity()
    )
    assert found["w"].tolist() == pytest.approx(GOLDEN["minus_model"]["expected"]["minus"], abs=1e-6)


# Data space


def test_the_model_without_a_client_is_the_mean_of_the_others() -> None:
    models = [vector([1, 2, 3]), vector([-4, 0, 1]), vector([2, 2, 9])]
    received = mean(models, [0.5, 0.2, 0.3])
    found = without_client(received, models[0], 0.5, nn.Identity())
    assert found["w"].tolist() == pytest.approx(mean(models[1:], [0.4, 0.6])["w"].tolist(), abs=1e-12)


def test_variances_stay_positive_and_counters_are_those_of_the_received_model() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1))
    received, sent = Params.of(model), Params.of(model)
    received["0.running_var"].fill_(0.1)
    sent["0.num_batches_tracked"].fill_(7)
    found = without_client(received, sent, 0.5, model)  # 0.1 - 0.5 is below 0
    assert found["0.running_var"].item() == pytest.approx(1e-5)
    assert int(found["0.num_batches_tracked"]) == 0


def test_the_dice_is_that_of_the_metrics_with_empty_masks_and_absent_classes() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 3, 4, 4, generator=generator)
    label = torch.randint(0, 3, (6, 4, 4), generator=generator)
    label[0], logits[0, 0] = 0, 9  # empty, and predicted so
    label[1] = 0  # empty, but not predicted so
    label[2][label[2] == 2] = 1  # class 2 is absent
    logits[3, 0] = 9  # nothing predicted
    objective = Dice()
    found = mask_dice(objective.predict(logits), label, 3)
    for case in range(6):
        predicted = objective.predict(logits)[case].numpy()
        scores = measure(predicted, label[case].numpy(), {"1": [1], "2": [2]}, ["dice"], (1.0, 1.0))
        assert found[case].item() == pytest.approx((scores["1"]["dice"] + scores["2"]["dice"]) / 2, abs=1e-6)
    one = mask_dice(objective.predict(torch.tensor([[[[5.0, -5.0]]]])), torch.tensor([[[1, 1]]]), 1)
    assert one.item() == pytest.approx(2 / 3)


def lone_client(memory: dict[str, Any], dice: float = 0.8) -> Any:
    return SimpleNamespace(
        memory=memory,
        device=torch.device("cpu"),
        model=nn.Identity(),
        objective=Dice(),
        dice=lambda params: dice,
        fit=lambda start: SimpleNamespace(params=start),
    )


def test_the_first_participation_counts_as_zero_and_later_ones_are_averaged() -> None:
    client: Client = lone_client({})
    received = Message(vector([1, 1, 1]))
    assert FedCE().train(client, received).scalars["error"] == 1.0
    weighed = Message(vector([1, 1, 1]), scalars={"weight": 0.5})
    assert FedCE().train(client, weighed).scalars["error"] == pytest.approx(1 - 0.8 / 2)
    assert FedCE().train(client, received).scalars["error"] == pytest.approx(1 - 0.8 / 2)  # a lost reply
    assert client.memory["scores"] == [0.0, 0.8]


def test_nothing_is_left_without_a_client_that_has_all_the_weight() -> None:
    client: Client = lone_client({"sent": vector([1, 1, 1]), "scores": [0.0]})
    assert FedCE().score_without(client, vector([1, 1, 1]), 1.0) == 0.0


# Gradient space


def test_cosines_are_those_of_whole_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    weights = [0.1, 0.2, 0.3, 0.4]
    found = cosines_to_rest(updates @ updates.T, weights)
    for k in range(4):
        rest = sum(weights[j] * updates[j] for j in range(4) if j != k)
        assert found[k] == pytest.approx(float(torch.cosine_similarity(updates[k], rest, dim=0)), abs=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", [[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("mode", ["plus", "times"])
def test_equal_updates_give_equal_weights(update: list[float], mode: Any) -> None:
    fake = Fake(dict.fromkeys("abc", update), dict.fromkeys("abc", 0.7))
    for state in played(FedCE(mode=mode), fake, ["abc"] * 2):
        assert list(state.notes["weights"].values()) == pytest.approx([1 / 3] * 3, abs=1e-12)


def test_a_score_of_nothing_is_shared_evenly_and_the_floor_holds() -> None:
    assert shares({"a": 0.0, "b": 1e-17}, 1e-3) == {"a": 0.5, "b": 0.5}
    assert shares({"a": 0.0, "b": 1.0}, 1e-3) == {"a": 1e-3, "b": 1.0}


# Exchanges


def test_every_client_is_sent_the_weight_its_last_model_had() -> None:
    fake = Fake(UPDATES, dict.fromkeys("abc", 0.5))
    first, second, _ = played(FedCE(), fake, ["abc", "ab", "abc"])
    assert fake.sent[0, "a"] == {}
    assert fake.sent[1, "a"] == {"weight": first.notes["weights"]["a"]}
    assert fake.sent[2, "b"] == {"weight": second.notes["weights"]["b"]}
    assert fake.sent[2, "c"] == {"weight": first.notes["weights"]["c"]}  # of its last participation


def test_a_lost_model_has_no_weight_to_send() -> None:
    fake = Fake(UPDATES, dict.fromkeys("abc", 0.5))
    fake.lost = {(1, "c")}
    played(FedCE(), fake, ["abc"] * 3)
    assert fake.sent[1, "c"] and fake.sent[2, "c"] == {}


def test_the_absent_keep_weight_and_history() -> None:
    fake = Fake(UPDATES, dict.fromkeys("abc", 0.5))
    first, second = played(FedCE(), fake, ["abc", "ab"])
    assert second.memory["weights"]["c"] == first.memory["weights"]["c"]
    assert {name: len(seen) for name, seen in second.memory["cosines"].items()} == {"a": 2, "b": 2, "c": 1}
    assert math.fsum(second.memory["weights"].values()) == pytest.approx(1, abs=1e-12)


def test_a_newcomer_enters_with_an_even_share() -> None:
    fake = Fake(UPDATES, {})
    _, second = played(FedCE(), fake, ["ab", "c"])
    assert second.memory["weights"]["c"] == pytest.approx(1 / 3)
    assert second.notes["weights"] == {"c": 1.0} and second.notes["data_score"] == {"c": 1.0}


def test_one_client_alone_keeps_all_the_weight() -> None:
    for mode in ("plus", "times"):
        for state in played(FedCE(mode=mode), Fake({"a": [1.0, 2, 3]}, {"a": 0.3}), ["a"] * 2):
            assert state.notes["weights"] == {"a": 1.0}


# Whole runs


def test_a_run_scores_the_mean_of_the_others(tmp_path: Path) -> None:
    records = run(tmp_path, method={"name": "fedce"}).records
    assert set(records[0]["data_score"].values()) == {1.0}
    assert all(0.5 <= score <= 1 for score in records[1]["data_score"].values())
    assert len(set(records[1]["weights"].values())) == 3
    first, second = (record["exchanges"][0] for record in records)
    assert 0 < second["bytes_down"]["east"] - first["bytes_down"]["east"] < 50  # one number


def test_batch_norm_and_a_client_without_validation_cases(tmp_path: Path) -> None:
    uneven = {"phantom": {"hospitals": 3, "size": 16, "cases": [2, 8, 11]}}
    records = run(tmp_path, rounds=3, model=BATCH_NORM, data=uneven, method={"name": "fedce"}).records
    assert all(math.isfinite(value) for value in records[2]["data_score"].values())


def test_a_floor_of_one_is_the_uniform_mean_bit_for_bit(tmp_path: Path) -> None:
    even = run(tmp_path / "fedce", method={"name": "fedce", "floor": 1})
    plain = run(tmp_path / "fedavg", method={"name": "fedavg", "weighting": "uniform"})
    assert even.params_sha256 == plain.params_sha256


def test_a_client_lost_for_a_round_comes_back(tmp_path: Path, monkeypatch: Any) -> None:
    rounds = iter([True, False, True])
    spoil(monkeypatch, "east", lambda answer: answer if next(rounds) else Answer("east", failure="power cut"))
    records = run(tmp_path, rounds=3, method={"name": "fedce"}).records
    assert "east" not in records[1]["weights"] and "east" in records[2]["weights"]


def test_sampling_is_warned_of(tmp_path: Path) -> None:
    for share, count in ((1.0, 0), (0.5, 1)):
        chosen = config(tmp_path, method={"name": "fedce"}, participation=share)
        assert len(build_method(chosen).warnings(chosen, build_model(chosen))) == count


@pytest.mark.parametrize("wrong", [{"floor": -1}, {"mode": "max"}, {"consensus": "all"}])
def test_impossible_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(tmp_path, method={"name": "fedce", **wrong})
