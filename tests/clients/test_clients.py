"""Bad replies, each injected into a real run: refused, named, the rest averaged."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import run, spoil
from pytest import LogCaptureFixture, MonkeyPatch, approx, mark, raises

from wardround.clients import Answer, Client
from wardround.clients.gate import (
    all_finite,
    scalar_complaint,
    scores_complaint,
    steps_complaint,
    variance_complaint,
)
from wardround.config import Config
from wardround.errors import TooFewClients
from wardround.messages import Message
from wardround.methods.fedavg import FedAvg
from wardround.params import Params

NAME = "head.weight"


def tampered(change: Any) -> Any:
    """An answer whose tensors went through `change(dict)`."""

    def spoiled(answer: Answer) -> Answer:
        tensors = dict(answer.message.optional_params or {})
        change(tensors)
        return replace(answer, message=Message(params=Params(tensors)))

    return spoiled


def put(value: float) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NAME] = tensors[NAME].clone()
        tensors[NAME].view(-1)[0] = value

    return tampered(change)


BAD = {
    "NaN": (put(math.nan), f"tensor '{NAME}' holds NaN"),
    "Inf": (put(math.inf), f"tensor '{NAME}' holds an infinite value"),
    "wrong shape": (tampered(lambda t: t.update({NAME: t[NAME][..., :0]})), f"tensor '{NAME}' has shape"),
    "wrong dtype": (
        tampered(lambda t: t.update({NAME: t[NAME].double()})),
        "has type float64, registered float32",
    ),
    "missing tensor": (tampered(lambda t: t.pop(NAME)), f"tensor '{NAME}' is missing"),
    "extra tensor": (
        tampered(lambda t: t.update(extra=torch.ones(1))),
        "tensor 'extra' was never registered",
    ),
    "no tensors": (lambda a: replace(a, message=Message()), "is missing"),
    "count 0": (lambda a: replace(a, num_examples=0), "num_examples is 0"),
    "count -1": (lambda a: replace(a, num_examples=-1), "num_examples is -1"),
    "count NaN": (lambda a: replace(a, num_examples=math.nan), "num_examples is nan"),
    "count 1e12": (lambda a: replace(a, num_examples=10**12), "the client registered"),
    "count 1e12 as a float": (lambda a: replace(a, num_examples=1e12), "not a whole number"),
    "steps -1": (lambda a: replace(a, num_steps=-1), "num_steps is -1"),
    "steps 1e18": (lambda a: replace(a, num_steps=10**18), "but its 5 cases make at most 2 a round"),
    "one step more than asked for": (lambda a: replace(a, num_steps=a.num_steps + 1), "num_steps is 3, but"),
    "scalar NaN": (
        lambda a: replace(a, message=Message(a.message.params, scalars={"gap": math.nan})),
        "scalar 'gap' is nan",
    ),
    "extra NaN": (
        lambda a: replace(a, message=Message(a.message.params, {"c": Params({"x": torch.tensor(math.nan)})})),
        "tensor 'x' of extras/c holds NaN",
    ),
    "a number of 5,000 digits": (
        lambda a: replace(a, message=Message(a.message.params, scalars={"gap": 10**5000})),
        "scalar 'gap' is a whole number of more than 64 bits",
    ),
    "undeclared scalar": (
        lambda a: replace(a, message=Message(a.message.params, scalars={"age": 71.0})),
        "'age' is not among what the method's card says it sends",
    ),
    "undeclared tensors": (
        lambda a: replace(a, message=Message(a.message.params, {"scan": Params({"x": torch.ones(3)})})),
        "'scan' is not among what the method's card says it sends",
    ),
    "unknown client": (lambda a: replace(a, client="stranger"), "never registered"),
}


@mark.parametrize("kind", BAD)
def test_a_bad_reply_is_refused_named_and_the_rest_averaged(
    kind: str, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    change, reason = BAD[kind]
    spoil(monkeypatch, "east", change)

    result = run(tmp_path / "spoiled", rounds=1)

    record = result.records[0]
    who = "stranger" if kind == "unknown client" else "east"
    assert list(record["refused"]) == [f"train/{who}"]
    assert reason in record["refused"][f"train/{who}"]
    assert f"client '{who}'" in caplog.text and reason in caplog.text
    assert set(record["weights"]) == {"north", "south"}
    assert abs(math.fsum(record["weights"].values()) - 1) <= 1e-12
    assert result.summary["num_refused"] == 1
    assert all(bool(torch.isfinite(t).all()) for t in result.outcome.state.params.values())


def test_a_refused_reply_equals_a_run_without_that_client(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    alone = run(tmp_path / "alone", participation=["north", "south"])
    spoil(monkeypatch, "east", put(math.nan))

    assert run(tmp_path / "spoiled").params_sha256 == alone.params_sha256


def test_below_min_clients_the_round_is_repeated_and_then_the_run_stops_with_a_checkpoint(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    calls = []

    def fail_in_round_two(answer: Answer) -> Answer:
        calls.append(answer.client)
        return put(math.nan)(answer) if len(calls) > 1 else answer

    spoil(monkeypatch, "east", fail_in_round_two)

    with raises(
        TooFewClients,
        match=r"min_clients is 3.*'east'.*[^.]\. The run stopped; its last checkpoint is after round 1",
    ):
        run(tmp_path / "run", min_clients=3, retries=2)

    assert len(calls) == 1 + 3  # round 1 once, round 2 tried three times
    assert "Trying the round again" in caplog.text
    assert (tmp_path / "run/checkpoints/latest.json").exists()


def test_a_round_repeated_after_a_passing_fault_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    keep = {"learning_rate": 0.01, "state": "keep"}  # client memory must be rewound too
    clean = run(tmp_path / "clean", optimizer=keep)
    calls = []

    def fail_once(answer: Answer) -> Answer:
        calls.append(1)
        return put(math.nan)(answer) if len(calls) == 2 else answer

    spoil(monkeypatch, "east", fail_once)

    faulty = run(tmp_path / "faulty", optimizer=keep, min_clients=3)

    assert faulty.params_sha256 == clean.params_sha256
    assert list(faulty.records[1]["refused"]) == ["train/east"]  # the failed attempt is not forgotten


def test_a_client_that_crashes_is_lost_for_the_round_only(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    calls = []

    def crash_once(answer: Answer) -> Answer:
        calls.append(1)
        return Answer("east", failure="RuntimeError: boom") if len(calls) == 1 else answer

    spoil(monkeypatch, "east", crash_once)
    result = run(tmp_path / "run")

    first, second = result.records
    assert first["lost"] == {"train/east": "RuntimeError: boom"} and "east" not in first["weights"]
    assert second["lost"] == {} and "east" in second["weights"]


def test_a_loss_that_becomes_nan_loses_the_client_with_a_hint(tmp_path: Path) -> None:
    with raises(TooFewClients, match=r"client 'east', train: the loss became NaN.*learning_rate 1e\+30"):
        run(tmp_path / "run", optimizer={"name": "sgd", "learning_rate": 1e30}, local_epochs=3, retries=0)


def test_a_sum_that_overflows_is_not_mistaken_for_an_infinite_value() -> None:
    assert all_finite(torch.full((4,), 3e38))
    assert not all_finite(torch.tensor([math.inf, -math.inf]))
    assert not all_finite(torch.tensor([1.0, math.nan]))


def test_scalars_of_any_depth_are_checked() -> None:
    assert scalar_complaint({"a": [1, 2.0, "x", None, {"b": True}]}) is None
    assert scalar_complaint({"a": [{"b": math.inf}]}) == "scalar 'b' is inf"
    assert scalar_complaint({"a": object()}) == "scalar 'a' has type object"


def test_weights_of_the_remaining_clients_follow_their_cases(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", put(math.nan))
    result = run(
        tmp_path / "run", rounds=1, data={"phantom": {"hospitals": 3, "size": 16, "cases": [6, 12, 24]}}
    )

    assert result.records[0]["weights"] == approx({"north": 3 / 17, "south": 14 / 17})  # 60 % of 6 and of 24


@mark.parametrize("method", ["fednova", "scaffold", "ditto", "centralised"])
def test_all_steps_that_were_asked_for_pass(method: str, tmp_path: Path) -> None:
    result = run(
        tmp_path / "run",
        method={"name": method},
        local_epochs=3,
        batch_size=3,
        compute={"threads": 1, "micro_batch": 1},  # pieces of a batch are no steps of their own
        data={"phantom": {"hospitals": 3, "size": 16, "cases": [8, 10, 14]}},
    )

    assert result.summary["num_refused"] == result.summary["num_lost"] == 0


def test_a_method_that_trains_longer_says_so(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def train(self: FedAvg, client: Client, message: Message) -> Message:
        return Message(params=client.fit(start=message.params, epochs=4).params)

    monkeypatch.setattr(FedAvg, "train", train)
    with raises(TooFewClients, match="num_steps is 8, but .* at most 2 .* says so in most_steps"):
        run(tmp_path / "silent", rounds=1, retries=0)

    monkeypatch.setattr(FedAvg, "most_steps", lambda self, config, num_train: 8)
    assert run(tmp_path / "said", rounds=1).summary["num_refused"] == 0


def test_a_client_without_training_cases_has_no_steps() -> None:
    assert steps_complaint(0, 0, 0) is None
    assert "its 1 case makes at most 1 a round" in str(steps_complaint(2, 1, 1))
    assert steps_complaint("2", 2, 2) == "num_steps is '2', not a whole number"
    assert FedAvg().most_steps(Config(), 0) == 0


def test_a_negative_variance_does_not_pass() -> None:
    stats = Params({"norm.running_mean": torch.zeros(2), "norm.running_var": torch.tensor([1.0, -1e6])})
    assert variance_complaint(stats) == "tensor 'norm.running_var' holds a negative variance"
    assert variance_complaint(stats.map(torch.abs)) is None and variance_complaint(None) is None


def test_scores_beyond_their_range_are_refused() -> None:
    def say(*values: float) -> str | None:
        rows = [{"case": "a", "regions": {"lesion": {"dice": value, "hd95": math.inf}}} for value in values]
        return scores_complaint(Message(scalars={"cases": rows}), 2)

    assert say(0.0, 1.0) is None and say(math.nan) is None
    assert say(1.5) == "dice of a case is 1.5, not between 0 and 1"
    assert say(0.1, 0.2, 0.3) == "it scored 3 cases, but the client registered 2"
    assert scores_complaint(Message(scalars={"cases": 3}), 2) is not None
