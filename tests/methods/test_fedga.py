"""FedGA: golden vectors, both rules, the exchanges, whole runs."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import config, run, spoil, vectors

from wardround.clients import Answer, Clients, Registration
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.messages import Message, Reply, ServerState
from wardround.methods import build_method
from wardround.methods.adaptive_weights import adapt, differences
from wardround.methods.fedga import FedGA, adapt_centred
from wardround.params import Params

GOLDEN = vectors("fedga")
NAMES = "abcdef"


def by_name(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(NAMES, values, strict=False))


def close(weights: Mapping[str, float], expected: Sequence[float]) -> bool:
    return list(weights.values()) == pytest.approx(expected, abs=1e-6)


def gaps_of(name: str) -> dict[str, float]:
    inputs = GOLDEN[name]["inputs"]
    if "gap" in inputs:
        return by_name(inputs["gap"])
    kind = "acc" if "acc_local" in inputs else "loss"
    gaps = differences(by_name(inputs[f"{kind}_global"]), by_name(inputs[f"{kind}_local"]))
    if "gap" in GOLDEN[name]["expected"]:
        assert close(gaps, GOLDEN[name]["expected"]["gap"])
    return gaps


# Golden vectors


def test_every_golden_case_is_tested() -> None:
    assert set(GOLDEN) == {
        "paper_rule_mean_centred",
        "released_code_rule",
        "released_code_rule_accuracy_metric",
        "no_1_over_K_scale",
        "clipping",
        "all_gaps_zero_keeps_weights",
    }


def test_the_papers_rule_is_the_golden_one() -> None:
    case = GOLDEN["paper_rule_mean_centred"]
    inputs, expected = case["inputs"], case["expected"]
    method = FedGA(rule="paper", d=inputs["d"])
    step = method.step(inputs["round"], inputs["rounds"])
    assert step == pytest.approx(expected["step"])
    after = method.adjust(by_name(inputs["a"]), gaps_of("paper_rule_mean_centred"), step)
    assert close(after, expected["a_new"])


@pytest.mark.parametrize(
    ("name", "metric"),
    [("released_code_rule", "loss"), ("released_code_rule_accuracy_metric", "dice"), ("clipping", "loss")],
)
def test_the_released_rule_is_the_golden_one(name: str, metric: Any) -> None:
    inputs = GOLDEN[name]["inputs"]
    after = FedGA(metric=metric).adjust(by_name(inputs["a"]), gaps_of(name), inputs["step"])
    assert close(after, GOLDEN[name]["expected"]["a_new"])


@pytest.mark.parametrize("rule", ["code", "paper"])
@pytest.mark.parametrize("lie", [1.7e308, -1.7e308, 9e299, -9e299])
def test_huge_scores_of_a_client_give_weights_all_the_same(rule: Any, lie: float) -> None:
    a = {"north": 0.25, "east": 0.25, "south": 0.5}
    gaps = differences({"north": lie, "east": 1.0, "south": lie}, {"north": 0.0, "east": 0.5, "south": 0.0})
    after = FedGA(rule=rule).adjust(a, gaps, 0.1)

    assert set(gaps) == ({"east"} if abs(lie) > 1e300 else set(a))
    assert sum(after.values()) == pytest.approx(1) and min(after.values()) >= 0


def test_without_the_scale_it_is_the_golden_step_of_aaw() -> None:
    inputs = GOLDEN["no_1_over_K_scale"]["inputs"]
    after = adapt(by_name(inputs["a"]), gaps_of("no_1_over_K_scale"), inputs["step"])
    assert close(after, GOLDEN["no_1_over_K_scale"]["expected"]["a_new"])


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_gaps_of_zero_keep_the_golden_weights(rule: Any) -> None:
    case = GOLDEN["all_gaps_zero_keeps_weights"]
    a = by_name(case["inputs"]["a"])
    after = FedGA(rule=rule).adjust(a, gaps_of("all_gaps_zero_keeps_weights"), case["inputs"]["step"])
    assert after == a and close(after, case["expected"]["a_new"])


# The rules


def test_the_papers_rule_clips_at_zero_and_keeps_weights_when_all_gaps_are_alike() -> None:
    assert adapt_centred(by_name([0.1, 0.9]), by_name([-1.0, 1.0]), 0.2) == by_name([0.0, 1.0])
    assert adapt_centred(by_name([0.4, 0.6]), by_name([0.3, 0.3]), 0.2) == by_name([0.4, 0.6])
    assert adapt_centred(by_name([0.4, 0.6]), {}, 0.2) == by_name([0.4, 0.6])


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_a_client_without_a_gap_keeps_its_weight(rule: Any) -> None:
    after = FedGA(rule=rule).adjust(by_name([0.5, 0.3, 0.2]), {"a": 0.1, "c": -0.1}, 0.2)
    assert after["b"] == 0.3 and after["a"] > 0.5 and after["c"] < 0.2
    assert math.fsum(after.values()) == pytest.approx(1, abs=1e-12)


def test_all_clipped_to_zero_keeps_the_weights() -> None:
    a = by_name([0.01, 0.01, 0.98])
    assert FedGA().adjust(a, {"a": -1.0, "b": -1.0}, 0.2) == a


# Exchanges


class Fake:
    """Clients that move towards a truth of their own; a loss is the distance to it."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def loss(self, name: str, params: Params) -> float:
        return float((params["w"] - NAMES.index(name)).abs().sum())

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: Any
    ) -> Iterator[Answer]:
        for name, message in messages.items():
            model = Params({"w": 0.5 * message.params["w"] + 0.5 * NAMES.index(name) + 0.1 * round})
            scalars = {"P": self.loss(name, model)}
            if round:
                scalars["Q"] = self.loss(name, message.params)
            yield Answer(name, Message(model, scalars=scalars), num_examples=self.sizes[name], num_steps=1)


def played(method: FedGA, present: Sequence[str], sizes: Mapping[str, int]) -> list[ServerState]:
    """States after each round; `present` names the clients of each."""
    tensors = {"w": ((2,), torch.float64)}
    registered = [Registration(name, size, tensors=tensors) for name, size in sizes.items()]
    clients = Clients(Fake(sizes), registered, rounds=len(present), min_clients=1)
    states = [ServerState(Params({"w": torch.tensor([0.3, 1.1], dtype=torch.float64)}))]
    for round, names in enumerate(present):
        clients.begin_round(round, list(names))
        states.append(method.run_round(states[-1], clients))
    return states[1:]


def by_hand(rule: str, rounds: int) -> list[tuple[list[float], list[float]]]:
    """Four rounds of three clients in plain numbers: weights, then the model they give."""
    a, w, history = [1 / 3] * 3, [0.3, 1.1], []
    for t in range(rounds):
        local = [[0.5 * x + 0.5 * truth + 0.1 * t for x in w] for truth in range(3)]
        w = [sum(a[k] * local[k][j] for k in range(3)) for j in range(2)]
        history.append((list(a), w))
        gaps = [
            sum(abs(x - truth) for x in w) - sum(abs(x - truth) for x in local[truth]) for truth in range(3)
        ]
        step = (1 - t / rounds) * 0.2
        if rule == "code":
            a = [a[k] + gaps[k] / max(map(abs, gaps)) * step / 3 for k in range(3)]
        else:
            mean = sum(gaps) / 3
            a = [a[k] + (gaps[k] - mean) * step / (max(gaps) - mean) for k in range(3)]
        a = [min(max(value, 0.0), 1.0) for value in a]
        a = [value / sum(a) for value in a]
    return history


SIZES = {"a": 5, "b": 10, "c": 25}


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_four_rounds_are_those_of_plain_numbers(rule: Any) -> None:
    states = played(FedGA(rule=rule), ["abc"] * 4, SIZES)
    for state, (a, w) in zip(states, by_hand(rule, 4), strict=True):
        assert list(state.notes["weights"].values()) == pytest.approx(a, abs=1e-12)
        assert state.params["w"].tolist() == pytest.approx(w, abs=1e-12)


def test_one_client_alone_keeps_all_the_weight() -> None:
    for rule in ("code", "paper"):
        for state in played(FedGA(rule=rule), ["b"] * 3, {"b": 4}):
            assert state.notes["weights"] == {"b": 1.0}


def test_only_clients_seen_in_the_round_before_move() -> None:
    _, second, third = played(FedGA(), ["ab", "bc", "abc"], SIZES)
    assert list(second.notes["gap"]) == ["b"]
    assert set(third.notes["gap"]) == {"b", "c"}
    assert third.memory["weights"]["a"] == second.memory["weights"]["a"]


def test_if_all_present_have_no_weight_their_sizes_count() -> None:
    state = ServerState(Params(), memory={"weights": {"a": 0.0, "b": 0.0, "c": 1.0}})
    replies = [Reply(client=name, num_examples=SIZES[name]) for name in "ab"]
    assert FedGA().weigh(state, replies) == pytest.approx([1 / 3, 2 / 3])


# Whole runs


@pytest.mark.parametrize("metric", ["loss", "dice"])
def test_a_run_records_scores_gaps_and_step(tmp_path: Path, metric: str) -> None:
    records = run(tmp_path, rounds=3, method={"name": "fedga", "metric": metric}).records
    assert records[0]["gap"] == {} and records[0]["step"] == 0
    assert set(records[0]["weights"].values()) == {1 / 3}
    for before, after in itertools.pairwise(records):
        for name in ("east", "north", "south"):
            assert after["gap"][name] == after["Q"][name] - before["P"][name]
    assert records[2]["step"] == pytest.approx(0.2 * 2 / 3)
    shown = records[0]["validation"][metric]["clients"]["east"]["mean"]
    assert records[1]["Q"]["east"] == pytest.approx(shown, rel=1e-5)


def test_with_a_step_of_zero_and_weights_by_size_it_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    sizes = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 5, 11]}}
    plain = run(tmp_path / "fedavg", rounds=3, data=sizes)
    method = {"name": "fedga", "d": 0, "init": "samples"}
    still = run(tmp_path / "fedga", rounds=3, data=sizes, method=method)
    assert still.params_sha256 == plain.params_sha256
    assert still.records[1]["P"] == {}


def test_a_client_without_validation_cases_is_scored_on_its_training_cases(tmp_path: Path) -> None:
    uneven = {"phantom": {"hospitals": 3, "size": 16, "cases": [2, 8, 11]}}  # north has no validation cases
    record = run(tmp_path, data=uneven, method={"name": "fedga"}).records[1]
    assert set(record["gap"]) == {"east", "north", "south"}


def test_a_client_lost_in_one_round_has_no_gap_in_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    def lost_at_first(answer: Answer) -> Answer:
        return answer if "Q" in answer.message.scalars else Answer("east", failure="power cut")

    spoil(monkeypatch, "east", lost_at_first)
    record = run(tmp_path, method={"name": "fedga"}).records[1]
    assert set(record["gap"]) == {"north", "south"}
    assert record["weights"]["east"] == pytest.approx(1 / 3, abs=1e-12)


def test_sampling_is_warned_of(tmp_path: Path) -> None:
    for share, count in ((1.0, 0), (0.5, 1)):
        chosen = config(tmp_path, method={"name": "fedga"}, participation=share)
        assert len(build_method(chosen).warnings(chosen, build_model(chosen))) == count


@pytest.mark.parametrize("wrong", [{"d": -0.1}, {"rule": "mean"}, {"metric": "accuracy"}])
def test_impossible_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(tmp_path, method={"name": "fedga", **wrong})
