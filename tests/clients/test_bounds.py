"""Bounds: attacks that are well formed, each refused by name; what honest clients do is not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import config, run, settings, spoil
from pytest import MonkeyPatch, approx, mark, raises

import wardround as wr
from wardround.clients import Answer, Registration
from wardround.clients.bounds import Bounds, bound_counts, compare_directions, measure_change
from wardround.config import LimitSettings
from wardround.engine.host import Host
from wardround.errors import ConfigError, WardroundError
from wardround.messages import Message, Reply
from wardround.params import Params

START = torch.linspace(-1, 1, 8)
FIVE = {"phantom": {"hospitals": 5, "size": 16, "cases": 10, "heterogeneity": 0.3}}


# Counts


@mark.parametrize(
    ("counts", "share", "lowered"),
    [
        ((100, 20, 20), "auto", {}),  # five times the others' mean
        ((101, 20, 20), "auto", {"a": 100}),
        ((10**7, 20, 20), "auto", {"a": 20}),
        ((10, 1, 1, 1, 1, 1, 1, 1), "auto", {"a": 7}),
        ((10**7, 3), "auto", {}),
        ((10**7, 3), 0.5, {"a": 3}),
        ((90, 5, 5), 0.4, {"a": 6}),
        ((40, 40, 10, 10), 0.3, {"a": 15, "b": 15}),
        ((10**7, 3), 1.0, {}),
        ((7, 7, 7), 0.1, {}),
    ],
)
def test_a_count_is_lowered_where_it_would_weigh_too_much(
    counts: Sequence[int], share: Any, lowered: dict[str, int]
) -> None:
    assert bound_counts(dict(zip("abcdefgh", counts, strict=False)), share) == lowered


# Updates


def judge(
    updates: Mapping[str, Sequence[float]],
    bounds: Bounds | None = None,
    round: int = 0,
    annotates: Mapping[str, tuple[bool, ...]] | None = None,
    **sizes: int,
) -> dict[str, str]:
    """What is said of a round in which clients moved so far from START."""
    gate, sent, told = bounds or Bounds(LimitSettings()), Message(Params({"w": START})), annotates or {}
    replies = {
        n: Reply(Params({"w": START + torch.tensor(u)}), client=n, annotates=told.get(n, ()))
        for n, u in updates.items()
    }
    changes = {n: measure_change(r, sent, ["w"], sizes.get(n, 10)) for n, r in replies.items()}
    return gate.judge(round, replies, dict.fromkeys(updates, sent), changes)


def steps(*factors: float) -> dict[str, list[float]]:
    """Updates along one direction, with a little of each client's own."""
    return {
        name: [factor * (0.01 + 0.002 * ((k + place) % 3)) for place in range(8)]
        for k, (name, factor) in enumerate(zip("abcde", factors, strict=False))
    }


def test_an_update_far_larger_than_the_others_is_refused_with_the_figure() -> None:
    assert judge(steps(1, 1, 1, 1, 15)) == {}
    (refused,) = judge(steps(1, 1, 1, 1, -100)).items()

    assert refused[0] == "e" and "times the norm of the others'; at most 20 times is allowed" in refused[1]
    assert set(judge(steps(1, 1, 1, 1, 1e30))) == {"e"}
    assert judge(steps(1, 1, 1, 1, 30), e=100) == {}  # ten times the cases


def test_few_clients_that_do_nothing_make_no_other_look_large() -> None:
    assert judge(steps(0, 0, 1)) == {} and judge(steps(0, 1)) == {}


def test_updates_made_without_labels_make_none_made_with_them_look_large() -> None:
    bare = dict.fromkeys("abc", (False,))
    assert set(judge(steps(1, 1, 1, 40))) == {"d"}
    assert judge(steps(1, 1, 1, 40), annotates=bare) == {}  # the only one that has labels
    assert set(judge(steps(40, 1, 1, 1, 1), annotates={"a": (False,)})) == {"a"}  # held against all
    assert judge(steps(1, 1, 1, -1, -1), annotates=bare) == {}  # nor do directions


def test_of_two_clients_the_first_round_is_held_against_the_model_and_later_ones_against_the_past() -> None:
    bounds = Bounds(LimitSettings())
    assert judge(steps(1, 20), bounds) == {}  # small beside the model
    assert set(judge(steps(1, 4000), bounds)) == {"b"}
    for number in range(1, 4):
        assert judge(steps(1, 2), bounds, number) == {}

    assert set(judge(steps(1, 60), bounds, 4)) == {"b"}


def test_a_jump_beyond_what_is_usual_for_a_client_is_refused() -> None:
    bounds = Bounds(LimitSettings())
    for number in range(3):
        assert judge(steps(1, 1, 1, 0.2), bounds, number) == {}

    (sentence,) = judge(steps(1, 1, 1, 6), bounds, 3).values()
    assert "in its rounds before" in sentence


def test_a_client_that_points_against_the_others_is_refused_also_after_a_resume() -> None:
    bounds = Bounds(LimitSettings())
    (refused,) = judge(steps(1, 1, 1, 1, -1), bounds).items()
    assert refused[0] == "e" and "point against the others: their mean cosine is -0.9" in refused[1]

    resumed = Bounds(LimitSettings(), bounds.as_dict())
    assert resumed.seen == bounds.seen
    resumed.begin(0)  # that round is done again
    assert not any(resumed.seen.values())


def test_directions_are_compared_among_clients_that_annotate_the_same() -> None:
    flipped, all_told = steps(1, 1, 1, 1, -1), (True, True)
    assert judge(flipped, annotates={"e": (True, False)}) == {}  # e alone teaches the first class
    assert set(judge(flipped, annotates={"a": all_told, "e": all_told})) == {"e"}
    alone = dict.fromkeys("cde", (False, True))
    assert set(judge(flipped, annotates=alone)) == {"e"}  # three of a kind, of which one is against


def test_off_switches_leave_everything_as_it_is() -> None:
    off = Bounds(LimitSettings(max_norm=None, refuse_opposite=False))

    assert not off.are_on and judge(steps(1, 1, 1, -1, 1e30), off) == {}
    assert judge(steps(1, 1, 1, 1, 90), Bounds(LimitSettings(max_norm=100))) == {}


def test_poison_in_one_tensor_a_buffer_or_an_extra_is_refused_by_its_name() -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(1000, generator=generator), "b": torch.full((2,), 0.01), "mean": torch.zeros(3)}
    sent = Message(Params(base))

    def say(name: str, value: float) -> dict[str, str]:
        replies = {}
        for client in "abcd":
            tensors = {key: tensor + 0.01 for key, tensor in base.items()} | {"c": torch.full((2,), 0.5)}
            if client == "d":
                tensors[name] = torch.full_like(tensors[name], value)
            extra = {"control": Params({"c": tensors.pop("c")})}
            replies[client] = Reply(Params(tensors), extra, client=client)
        changes = {n: measure_change(r, sent, ["w", "b"], 10) for n, r in replies.items()}
        return Bounds(LimitSettings()).judge(0, replies, dict.fromkeys(replies, sent), changes)

    assert say("mean", 0.05) == {} and say("c", 5.0) == {} and say("b", 0.3) == {}
    assert "tensor 'mean' changed by 173" in say("mean", 100.0)["d"]
    assert "extras 'control' changed by 141" in say("c", 100.0)["d"]
    assert "tensor 'b' changed by" in say("b", 3.0)["d"]


def test_directions_are_mean_cosines_over_tensors() -> None:
    base = Params({"u": torch.zeros(2), "v": torch.zeros(2)})
    ends = [[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]]
    replies = [Params({"u": torch.tensor(end), "v": torch.tensor([1.0, 0.0])}) for end in ends]
    changes = [measure_change(Reply(r), Message(base), ["u", "v"], 1) for r in replies]

    found = compare_directions(replies, [base] * 3, changes)

    assert [direction.cosine for direction in found] == approx(
        [0.75, 0.75, 0.5]
    )  # (1 + 0) / 2 and 1; 0 and 1
    assert [direction.agreement for direction in found] == approx([0.5, 0.5, 1.0])


# Whole runs


def attack(monkeypatch: MonkeyPatch, factor: float = 1.0, value: float | None = None) -> None:
    """Let west return its update so many times, or one number everywhere."""
    honest = Host.run

    def dishonest(self: Host, name: str, task: str, round: int, message: Message, *rest: Any) -> Answer:
        answer = honest(self, name, task, round, message, *rest)
        if name != "west" or task != "train":
            return answer
        sent, got = message.params, answer.message.params
        moved = {n: sent[n] + factor * (got[n] - sent[n]) for n in got if got[n].is_floating_point()}
        if value is not None:
            moved = {n: torch.full_like(tensor, value) for n, tensor in moved.items()}
        return replace(answer, message=replace(answer.message, params=got.updated(moved)))

    monkeypatch.setattr(Host, "run", dishonest)


@mark.parametrize("how", [{"factor": -100.0}, {"factor": -1.0}, {"value": 1e30}])
def test_an_attack_gives_the_bytes_of_a_run_without_the_attacker(
    how: dict[str, float], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    others = ["east", "hospital-05", "north", "south"]
    alone = run(tmp_path / "alone", data=FIVE, participation=others)
    attack(monkeypatch, **how)

    attacked = run(tmp_path / "attacked", data=FIVE)

    assert [list(record["refused"]) for record in attacked.records] == [["train/west"]] * 2
    assert attacked.params_sha256 == alone.params_sha256


def test_claimed_cases_count_as_those_of_the_others_and_it_is_said(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    honest = Host.register

    def claim(self: Host, name: str) -> Registration:
        entry = honest(self, name)
        return replace(entry, num_train=10**7) if name == "west" else entry

    clean = run(tmp_path / "clean", data=FIVE, rounds=1)
    monkeypatch.setattr(Host, "register", claim)
    spoil(monkeypatch, "west", lambda answer: replace(answer, num_examples=10**7))

    result = run(tmp_path / "claimed", data=FIVE, rounds=1)

    assert result.params_sha256 == clean.params_sha256
    assert result.records[0]["weights"]["west"] == approx(0.2)
    assert "'west' registered 10000000 training cases" in result.records[0]["warnings"][-1]


def test_a_client_that_registers_more_than_was_agreed_on_does_not_take_part(tmp_path: Path) -> None:
    result = run(tmp_path / "run", limits={"cases": {"east": 3, "north": 5}}, rounds=1)

    assert set(result.records[0]["weights"]) == {"north", "south"}
    assert "limits.cases says 3" in result.records[0]["warnings"][-1]


@mark.parametrize("method", ["fedavg", "scaffold", "fednova", "fedadam"])
def test_limits_that_do_not_act_change_no_byte(method: str, tmp_path: Path) -> None:
    off = {"max_norm": None, "refuse_opposite": False, "max_share": 1}

    assert (
        run(tmp_path / "on", method={"name": method}).params_sha256
        == run(tmp_path / "off", method={"name": method}, limits=off).params_sha256
    )


def test_a_spoilt_model_is_never_a_checkpoint_and_the_run_goes_on_without_the_client(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    off = {"max_norm": None, "refuse_opposite": False}
    others = ["east", "hospital-05", "north", "south"]
    expected = run(tmp_path / "alone", data=FIVE, participation=others)
    with monkeypatch.context() as patch:
        attack(patch, value=1e30)
        with raises(WardroundError, match=r"too large to compute with. Round 0 is safe.*without"):
            run(tmp_path / "run", data=FIVE, limits=off)

    again = settings(tmp_path / "run", data=FIVE, limits=off)
    with raises(ConfigError, match="'wst' is not a client of this run and cannot be left out. Did you mean"):
        wr.run({**again, "without": ["wst"]}, resume=True)
    with raises(ConfigError, match="add resume=True"):
        wr.run({**again, "without": ["west"]})
    result = wr.run({**again, "without": ["west"], "rounds": 2}, resume=True)

    assert result.params_sha256 == expected.params_sha256
    assert "west" not in result.summary["test"]["dice"]["clients"]
    assert wr.run({**again, "rounds": 3}, resume=True).config.rounds == 3  # and it stays away
    assert "west" not in wr.Result.load(tmp_path / "run").records[-1]["clients"]


@mark.parametrize(
    ("change", "reason"),
    [
        ({"seconds": math.nan}, "seconds is nan"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"seconds": math.inf}, "seconds is inf"),
        ({"loss": {"loss": math.nan}}, "loss 'loss' is nan"),
        ({"loss": {"loss": -math.inf}}, "loss 'loss' is -inf"),
    ],
)
def test_seconds_and_losses_that_are_no_numbers_are_refused(
    change: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", lambda answer: replace(answer, **change))

    record = run(tmp_path / "run", rounds=1).records[0]

    assert reason in record["refused"]["train/east"]
    assert all(math.isfinite(float(s)) for e in record["exchanges"] for s in e["seconds"].values())


def test_limits_are_read_with_a_sentence_for_each_mistake(tmp_path: Path) -> None:
    for key, value in {"max_share": 0, "max_norm": 0.5}.items():
        with raises(ConfigError, match=f"limits.{key}: it is {value}; give auto"):
            config(tmp_path, limits={key: value})
