"""Secure sums of models: the same as the plain mean, for whoever is left, and never of a single client."""

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import Watcher, config, params, run, settings, spoil
from pytest import MonkeyPatch, fixture, importorskip, mark, raises

import wardround as wr
from wardround.aggregation.mean import mean
from wardround.clients import Answer
from wardround.clients.secure_sum.layout import KEY, SumLayout, Terms, choose_threshold, round_up
from wardround.clients.secure_sum.sender import SUMMED, Sender
from wardround.clients.secure_sum.session import SumSession
from wardround.engine.host import Host
from wardround.errors import ClientError, ConfigError, TooFewClients, WardroundError
from wardround.messages import Message, Reply
from wardround.methods import METHODS
from wardround.params import Params
from wardround.privacy import BUDGET_FILE, PrivacyBudget, SumNoise
from wardround.privacy.secure_sum import SumRefusal

importorskip("cryptography")

NAMES = ("anna", "bert", "cora", "dora", "emil")
FIVE = {"phantom": {"hospitals": 5, "size": 16, "cases": [8, 10, 14, 9, 8]}}
SECURE = {"secure_sum": True}
PHASES = ("train", "sum_shares", "sum_masked", "sum_confirm", "sum_unmask")


class Table:
    """Clients without data around a table: what each would answer, and who keeps silent in which exchange."""

    def __init__(self, folder: Path, answers: Mapping[str, Message], base: Params | None = None) -> None:
        self.answers = dict(answers)
        self.base = (
            base if base is not None else Params({n: torch.zeros_like(t) for n, t in self.first.items()})
        )
        self.learned = list(self.base)
        self.senders = {name: Sender(name, folder / name, self.learned, None) for name in answers}
        self.silent: dict[str, set[str]] = {}
        self.change: Callable[[str, str, Message], Message] = lambda task, name, reply: reply
        self.sent: dict[tuple[str, str], Message] = {}
        self.refused: dict[str, str] = {}
        self.excluded: dict[str, str] = {}
        self.notes: list[dict[str, Any]] = []
        self.rounds = 0
        self.files = (folder / f"{number}.safetensors" for number in itertools.count())

    def travel(self, message: Message) -> Message:
        """What the other side reads."""
        path = next(self.files)
        message.save(path)
        return Message.load(path)

    @property
    def first(self) -> Params:
        return next(iter(self.answers.values())).params

    def open(self, min_clients: int = 1, round: int = 0) -> list[Reply]:
        """Everybody answers `train` and withholds its tensors."""
        sent = dict.fromkeys(self.answers, Message(params=self.base))
        self.session = SumSession(
            "train", round, sent, min_clients, self.learned,
            ask=self.ask,
            refuse=lambda task, name, reason: self.refused.update({f"{task}/{name}": reason}),
            exclude=lambda name, reason: self.excluded.update({name: reason}),
            keep=lambda names: None,
            judge=lambda norm, start: None,
            note=self.notes.append,
        )  # fmt: skip
        opened = []
        for name, request in self.session.requests.items():
            asked = request.scalars[KEY]
            withheld = self.senders[name].withhold(
                asked, round, "train", self.answers[name], self.base, lambda: None
            )
            told = self.session.open(name, self.travel(withheld))
            opened.append(Reply(told.params, told.extras, told.scalars, client=name, num_examples=1))
        return opened

    def ask(self, task: str, requests: Mapping[str, Message]) -> list[Reply]:
        replies = []
        for name, request in requests.items():
            if name in self.silent.get(task, ()):
                continue
            try:
                answer = self.senders[name].answer(task, self.travel(request))
            except ClientError as error:
                self.refused[f"{task}/{name}"] = str(error)
                continue
            self.sent[task, name] = answer = self.change(task, name, answer)
            replies.append(Reply(answer.params, answer.extras, answer.scalars, client=name))
        return replies


def draw(count: int = 5, **shapes: tuple[int, ...]) -> dict[str, Message]:
    """A model for each client."""
    generator = torch.Generator().manual_seed(3)
    sizes = shapes or {"b": (7,), "a": (2, 3)}
    return {
        name: Message(Params({t: torch.randn(s, generator=generator) for t, s in sizes.items()}))
        for name in NAMES[:count]
    }


@fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path, draw())


# The sum


def test_a_sum_is_the_plain_mean_within_its_stated_error(table: Table) -> None:
    weights = [0.1, 0.3, 0.2, 0.25, 0.15]
    found = mean([reply.params for reply in table.open()], weights)
    plain = mean([message.params for message in table.answers.values()], weights)

    [told] = table.notes
    assert told["clients"] == list(NAMES) and told["bits"] == 32 and told["error"] == 5 * 2.0**-29
    for name in plain:
        rounding = torch.finfo(torch.float32).eps * plain[name].abs().max()
        assert (found[name] - plain[name]).abs().max() <= told["error"] + rounding


def test_equal_models_stay_as_they_are(tmp_path: Path) -> None:
    same = next(iter(draw().values()))
    table = Table(tmp_path, dict.fromkeys(NAMES, same), base=same.params)

    assert mean([reply.params for reply in table.open()])["a"].equal(same.params["a"])


def test_counters_travel_as_they_are_and_take_their_maximum(tmp_path: Path) -> None:
    answers = {n: Message(params(w=[float(k)], steps=k)) for k, n in enumerate(NAMES)}
    table = Table(tmp_path, answers, base=params(w=[0.0], steps=0))
    found = mean([reply.params for reply in table.open()])

    assert int(found["steps"]) == 4 and found["w"].tolist() == [2.0]


def test_what_does_not_learn_is_summed_in_64_bits(tmp_path: Path) -> None:
    specs = {"running_var": ((2,), torch.float32), "w": ((3,), torch.float32)}
    base = params(running_var=[1.0, 1.0], w=[0.0, 5.0, 0.0])

    wide, narrow = SumLayout.of(specs, base, ["w"]), SumLayout.of({"w": specs["w"]}, base, ["w"])

    assert (wide.bits, narrow.bits) == (64, 32)
    assert narrow.steps["w"] == 8 * 2.0**-28  # 5 is at most 8
    assert (
        wide.encode(lambda name: [torch.full((2,) if name == "running_var" else (3,), 1e8).double()], 5).dtype
        == np.uint64
    )


def test_the_scale_of_a_tensor_is_a_power_of_two_from_one_on() -> None:
    values = [[], [0.0], [0.7, -1.0], [1.1], [-8.0], [8.5]]
    assert [round_up(torch.tensor(value)) for value in values] == [1, 1, 1, 2, 8, 16]


def test_a_change_beyond_the_range_is_refused_by_its_client(tmp_path: Path) -> None:
    answers = {name: Message(params(w=[100.0 if name == "cora" else 0.1])) for name in NAMES}
    table = Table(tmp_path, answers)
    found = mean([reply.params for reply in table.open()])

    refusal = table.refused["sum_masked/cora"]
    assert "tensor 'w'" in refusal and "20" not in refusal  # its number would be one of a single update
    assert abs(float(found["w"]) - 0.1) < 1e-7  # of the others


def test_numbers_that_would_only_together_leave_the_range_are_refused_too(tmp_path: Path) -> None:
    table = Table(tmp_path, {name: Message(params(w=[9.0])) for name in NAMES})  # 1.8 each, room for 8
    with raises(TooFewClients):
        mean([reply.params for reply in table.open()])
    assert "more than the 1.6 that a sum has room for" in table.refused["sum_masked/anna"]


@mark.parametrize("phase", PHASES[1:])
@mark.parametrize("lost", [{"bert"}, {"bert", "emil"}])
def test_a_round_closes_where_one_or_two_of_five_are_lost(table: Table, phase: str, lost: set[str]) -> None:
    replies = table.open()
    table.silent = {phase: lost, **dict.fromkeys(PHASES[PHASES.index(phase) :], lost)}
    found = mean([reply.params for reply in replies])

    in_sum = set(NAMES) - (lost if phase in ("sum_shares", "sum_masked") else set())
    plain = mean([message.params for name, message in table.answers.items() if name in in_sum])
    assert table.notes[0]["clients"] == sorted(in_sum)
    assert torch.allclose(found["a"], plain["a"], atol=1e-6)


def test_a_sum_takes_three_exchanges_and_a_fourth_where_one_is_lost(table: Table) -> None:
    mean([reply.params for reply in table.open()])
    assert {task for task, _ in table.sent} == {"sum_shares", "sum_masked", "sum_unmask"}

    replies = table.open(round=1)
    table.silent = {phase: {"bert"} for phase in PHASES[2:]}
    mean([reply.params for reply in replies])
    assert ("sum_confirm", "anna") in table.sent


def test_with_one_that_signs_no_list_beside_its_vector_all_are_asked_for_it(table: Table) -> None:
    replies = table.open()
    table.change = lambda task, name, reply: (
        Message(extras=reply.extras) if (task, name) == ("sum_masked", "dora") else reply
    )
    found = mean([reply.params for reply in replies])

    plain = mean([message.params for message in table.answers.values()])
    assert ("sum_confirm", "dora") in table.sent and torch.allclose(found["a"], plain["a"], atol=1e-6)


def test_with_fewer_than_the_threshold_nothing_is_revealed(table: Table) -> None:
    replies = table.open()
    table.silent = {"sum_masked": {"anna", "bert", "cora"}}

    with raises(TooFewClients, match="no secure sum"):
        mean([reply.params for reply in replies])
    assert not any(task == "sum_unmask" for task, _ in table.sent)


def test_three_are_the_least_and_more_than_half_must_stay() -> None:
    assert [choose_threshold(n) for n in (3, 4, 5, 6, 7, 10)] == [3, 3, 3, 4, 4, 6]
    assert choose_threshold(5, 4) == 4


# What must not be had


def test_no_tensor_of_a_single_client_can_be_read(table: Table) -> None:
    reply = table.open()[0]

    with raises(WardroundError, match="secure_sum = False"):
        reply.params["a"]
    with raises(WardroundError):
        reply.params - table.base


def test_the_same_answers_are_summed_once(table: Table) -> None:
    models = [reply.params for reply in table.open()]
    mean(models)

    with raises(SumRefusal, match="second time"):
        mean(models, [0.5, 0.2, 0.1, 0.1, 0.1])


def test_a_repeated_round_over_other_clients_is_refused_by_each(table: Table) -> None:
    mean([reply.params for reply in table.open()])
    mean([reply.params for reply in table.open()])  # the same once more gives nothing away
    replies = table.open()
    table.silent = {phase: {"emil"} for phase in PHASES[1:]}

    with raises(TooFewClients):
        mean([reply.params for reply in replies])
    assert "this answer was summed before, over" in table.refused["sum_unmask/anna"]
    assert json.loads((table.senders["anna"]._folder / SUMMED).read_text())


@mark.parametrize(("learned", "change"), [(["a", "b"], 0.1), (["a", "b"], 1e-9), (["a"], 2.0**-54)])
def test_a_repeated_round_with_other_weights_is_refused_by_each(
    table: Table, learned: list[str], change: float
) -> None:
    """Of as many sums of the same updates as there are clients, with other weights each, all can be computed."""
    for sender in table.senders.values():
        sender._learned = frozenset(learned)
    table.learned = learned
    mean([reply.params for reply in table.open()], [0.2, 0.2, 0.2, 0.2, 0.2])
    mean([reply.params for reply in table.open()], [0.2, 0.2, 0.2, 0.2, 0.2])  # the same gives nothing away
    with raises(TooFewClients):
        mean([reply.params for reply in table.open()], [0.2, 0.2, 0.2, 0.2 - change, 0.2 + change])

    assert "with other weights" in table.refused["sum_unmask/anna"]
    assert [told["bits"] for told in table.notes] == [32 if len(learned) == 2 else 64] * 2


def test_a_round_can_be_repeated_among_those_who_were_summed_whose_weights_then_add_up_again(
    table: Table,
) -> None:
    replies, counts = table.open(), [17, 23, 5, 11, 31]
    table.silent = {phase: {"emil"} for phase in PHASES[2:]}
    mean([reply.params for reply in replies], [count / sum(counts) for count in counts])

    again = table.open()[:4]
    found = mean([reply.params for reply in again], [count / sum(counts[:4]) for count in counts[:4]])
    assert table.notes[1]["clients"] == list(NAMES[:4]) and found["a"].shape == (2, 3)


def test_a_weight_that_singles_out_a_client_is_refused_by_it(table: Table) -> None:
    replies = table.open()
    table.silent = {"sum_unmask": {"emil"}}
    mean([reply.params for reply in replies], [0.9, 0.025, 0.025, 0.025, 0.025])

    assert "0.9 of all" in table.refused["sum_masked/anna"]
    assert "anna" not in table.notes[0]["clients"]


def test_a_weight_that_singles_out_a_client_once_others_are_lost_is_refused_by_all(table: Table) -> None:
    replies = table.open()
    table.silent = {"sum_masked": {"dora", "emil"}}
    with raises(TooFewClients):
        mean([reply.params for reply in replies], [0.6, 0.05, 0.05, 0.15, 0.15])

    assert "'anna' is 0.857 of all" in table.refused["sum_confirm/cora"]
    assert not any(task == "sum_unmask" for task, _ in table.sent)


def test_a_list_that_was_refused_changes_nothing(table: Table) -> None:
    """A server asks out of turn, to have another list taken for the one that was summed."""
    replies, honest = table.open(), table.ask

    def ask(task: str, requests: Mapping[str, Message]) -> list[Reply]:
        found = honest(task, requests)
        if task in ("sum_shares", "sum_confirm"):
            request, key = (
                requests["anna"].scalars[KEY],
                {"sum_shares": "adverts", "sum_confirm": "survivors"},
            )
            told = request[key[task]]
            made_up = [*told, "mallory"] if isinstance(told, list) else {**told, "mallory": told["anna"]}
            honest(task, {"anna": Message(scalars={KEY: {**request, key[task]: made_up}})})
        return found

    table.session._ask = ask
    table.silent = {"sum_masked": {"emil"}}
    mean([reply.params for reply in replies])

    pending = table.senders["anna"]._pending["params"]
    assert pending.names == NAMES
    remembered = json.loads((table.senders["anna"]._folder / SUMMED).read_text())
    assert remembered[pending.key]["clients"] == list(NAMES[:4])


def test_clients_that_were_told_different_weights_do_not_add_up(table: Table) -> None:
    replies, honest = table.open(), table.ask

    def dishonest(task: str, requests: Mapping[str, Message]) -> list[Reply]:
        if task == "sum_masked":
            told = dict(requests["anna"].scalars[KEY])
            factors = {"anna": 0.8, **dict.fromkeys(NAMES[1:], 0.05)}
            told["weights"] = [{**part, "factors": factors} for part in told["weights"]]
            requests = {**requests, "anna": Message(scalars={KEY: told})}
        return honest(task, requests)

    table.session._ask = dishonest
    found = mean([reply.params for reply in replies])

    alone = 0.8 * table.answers["anna"].params["a"]
    assert (found["a"] - alone).abs().min() > 1e-3 and float(found["a"].abs().max()) <= 8  # noise


def test_the_vector_that_leaves_looks_random_whatever_it_holds(tmp_path: Path) -> None:
    answers = {name: Message(params(w=torch.zeros(250_000))) for name in NAMES}
    table = Table(tmp_path, answers)
    mean([reply.params for reply in table.open()])

    for name in NAMES[:2]:
        values = table.sent["sum_masked", name].extras["masked"]["values"].numpy().view(np.uint8)
        counts = np.bincount(values, minlength=256)
        chi_square = float(((counts - len(values) / 256) ** 2 / (len(values) / 256)).sum())
        assert len(values) == 10**6 and chi_square < 255 + 6 * math.sqrt(2 * 255)


# Clients that lie


def test_a_client_that_spoils_the_shares_of_others_is_left_out(table: Table) -> None:
    def lie(task: str, name: str, reply: Message) -> Message:
        if task != "sum_shares" or name != "dora":
            return reply
        swapped = dict(zip(reply.scalars["shares"], reversed(reply.scalars["shares"].values()), strict=True))
        return Message(scalars={"shares": swapped})

    replies, table.change = table.open(), lie
    with raises(TooFewClients):
        mean([reply.params for reply in replies])
    assert list(table.excluded) == ["dora"]


def test_a_client_that_gives_a_wrong_share_is_refused_and_the_rest_suffice(table: Table) -> None:
    def lie(task: str, name: str, reply: Message) -> Message:
        if task != "sum_unmask" or name != "dora":
            return reply
        seeds = reply.scalars["unmasked"]["seeds"]
        wrong = dict(zip(seeds, reversed(seeds.values()), strict=True))
        return Message(scalars={"unmasked": {**reply.scalars["unmasked"], "seeds": wrong}})

    replies, table.change = table.open(), lie
    found = mean([reply.params for reply in replies])

    assert "dora" in table.refused["sum_unmask/dora"] and not table.excluded
    plain = mean([message.params for message in table.answers.values()])
    assert torch.allclose(found["a"], plain["a"], atol=1e-6)


@mark.parametrize(
    "told",
    [
        None,
        [],
        {"params": 3},
        {"params": {}},
        {"params": {"specs": {"a": [[2], "F32"]}, "counters": {"a": [1]}}},
        {"params": {"specs": 5}},
        {"params": {"specs": {"a": [[2], "I64"]}, "counters": {"a": [1]}, "advert": {}}},
        {"params": {"specs": {"a": [[], "I64"]}, "counters": {"a": 10**30}, "advert": {}}},
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(table: Table, told: Any) -> None:
    table.open()
    with raises(ValueError):
        table.session.open("anna", Message(scalars={KEY: told} if told is not None else {KEY: 1}))
    with raises(ValueError, match="in the clear"):
        table.session.open("anna", table.answers["anna"])


@mark.parametrize(
    "weights",
    [
        None,
        [{"names": ["a", "b"], "factors": {"anna": 1.0}}],
        [{"names": ["a", "b"], "factors": {**dict.fromkeys(NAMES, 0.2), "anna": math.nan}}],
        [{"names": ["a"], "factors": dict.fromkeys(NAMES, 0.2)}],
        [3],
    ],
)
def test_weights_that_are_none_are_refused_by_clients(table: Table, weights: Any) -> None:
    replies, honest = table.open(), table.ask

    def ask(task: str, requests: Mapping[str, Message]) -> list[Reply]:
        told = {"sum_masked": {"weights": weights}}.get(task, {})
        changed = {n: Message(scalars={KEY: {**r.scalars[KEY], **told}}) for n, r in requests.items()}
        return honest(task, changed)

    table.session._ask = ask
    with raises(TooFewClients):
        mean([reply.params for reply in replies])


# Whole runs


@mark.parametrize("method", [name for name in METHODS if not METHODS[name].secure_sum])
def test_a_method_that_needs_single_models_is_refused_with_the_nearest(method: str, tmp_path: Path) -> None:
    with raises(ConfigError, match=f"method '{method}' does not work with privacy.secure_sum: .* nearest"):
        run(tmp_path / "run", method={"name": method}, privacy=SECURE)


def test_the_same_bytes_in_workers_and_after_a_resume(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", privacy=SECURE, rounds=3)
    parted = run(tmp_path / "parted", privacy=SECURE, rounds=3, compute={"threads": 1, "workers": 2})
    broken = settings(tmp_path / "broken", privacy=SECURE, rounds=3)
    with raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2, crash_at="north"))
    resumed = wr.run(broken, resume=True)

    assert whole.params_sha256 == parted.params_sha256 == resumed.params_sha256
    record = whole.records[-1]
    assert record["secure_sum"][0]["clients"] == ["east", "north", "south"]
    lines = [json.loads(line) for line in (whole.folder / "egress.jsonl").read_text().splitlines()]
    tensors = {name for line in lines for name in line["tensors"]}
    assert tensors == {"extras/masked/values"}


def test_a_lost_client_shrinks_the_sum_and_the_weights(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="RuntimeError: boom"), "sum_masked")
    result = run(tmp_path / "run", data=FIVE, privacy=SECURE)

    for record in result.records:
        assert record["secure_sum"][0]["lost"] == ["east"] and record["lost"] == {
            "sum_masked/east": "RuntimeError: boom"
        }
        assert "east" not in record["weights"] and math.isclose(sum(record["weights"].values()), 1)


def test_a_lying_client_is_left_out_when_the_round_is_repeated(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def lie(answer: Answer) -> Answer:
        shares = answer.message.scalars["shares"]
        swapped = dict(zip(shares, reversed(shares.values()), strict=True))
        return replace(answer, message=Message(scalars={"shares": swapped}))

    spoil(monkeypatch, "east", lie, "sum_shares")
    result = run(tmp_path / "run", data=FIVE, privacy=SECURE, rounds=1)

    assert "east" not in result.records[0]["secure_sum"][0]["clients"]
    assert len(result.records[0]["secure_sum"][0]["clients"]) == 4


def test_a_sum_far_larger_than_before_is_not_used(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    honest = Sender.withhold

    def huge(
        self: Sender, asked: Any, round: int, task: str, reply: Message, received: Any, charge: Any
    ) -> Message:
        if round == 3 and self._name == "east":
            reply = Message(reply.params.map(lambda tensor: tensor + 3.0))
        return honest(self, asked, round, task, reply, received, charge)

    monkeypatch.setattr(Sender, "withhold", huge)
    slow = {"learning_rate": 1e-3}
    with raises(TooFewClients, match="times the norm of earlier rounds"):
        run(tmp_path / "run", privacy=SECURE, rounds=5, retries=0, optimizer=slow)


def test_two_clients_are_too_few(tmp_path: Path) -> None:
    with raises(ConfigError, match="at least 3 clients"):
        run(tmp_path / "run", data={"phantom": {"hospitals": 2, "size": 16, "cases": 8}}, privacy=SECURE)


@mark.parametrize(
    ("changes", "words"),
    [
        ({"traffic": {"upload": "float16"}}, "neither rounded nor compressed"),
        ({"evaluate": {"metrics": ["dice"], "cross_site": True}}, "send its own model"),
        (
            {"model": {"name": "unet2d", "norm": "batch", "bn_stats": "reestimate"}},
            "statistics of each client",
        ),
    ],
)
def test_settings_under_which_single_updates_would_leave_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with raises(ConfigError, match=words):
        run(tmp_path / "run", privacy=SECURE, **changes)


# With noise


def test_the_sum_has_the_noise_of_the_client_level_once(tmp_path: Path) -> None:
    importorskip("opacus")
    private = {**SECURE, "level": "client", "clip": 1e-6, "cases": 10}
    result = run(
        tmp_path / "run", data=FIVE, privacy=private, rounds=1,
        model={"name": "unet2d", "base_filters": 16, "levels": 2},
    )  # fmt: skip
    start = run(tmp_path / "start", data=FIVE, rounds=1, optimizer={"name": "sgd", "learning_rate": 0.0},
                model={"name": "unet2d", "base_filters": 16, "levels": 2})  # fmt: skip
    before, after = start.outcome.state.params, result.outcome.state.params
    noise = torch.cat([(after[name].double() - before[name].double()).flatten() for name in after])

    budget = PrivacyBudget(tmp_path / "run" / "clients" / "north" / BUDGET_FILE)
    [multiplier] = [line.release.noise for line in budget.read()]
    expected = multiplier * 2 * 1e-6 / 5 * math.sqrt(5 / 3)  # weights of 1/5; for 3 that must stay, all 5 add
    assert len(noise) > 10_000
    assert abs(float(noise.std()) / expected - 1) < 0.05


@mark.parametrize("epsilon", [8.0, 1.0])
def test_noise_of_the_client_level_has_room_in_the_sum_whatever_epsilon(
    tmp_path: Path, epsilon: float
) -> None:
    importorskip("opacus")
    private = {**SECURE, "level": "client", "epsilon": epsilon, "cases": 10}
    result = run(tmp_path / "run", data=FIVE, privacy=private, rounds=6)

    for record in result.records:
        assert not record["lost"] and len(record["secure_sum"][0]["clients"]) == 5
        assert record["secure_sum"][0]["bits"] == 64


@mark.parametrize(
    ("needed", "planned"), [(1.5, 1.5), (4.0, 1.5), (1.5, 0.0), (1.0, 1.5)]
)  # as planned, more than planned, with others who plan none, less
def test_with_the_planned_shares_of_the_others_the_sum_has_what_each_needs(
    needed: float, planned: float
) -> None:
    members, clip, largest = 4, 0.5, 0.3
    own = SumNoise(clip, needed, planned * clip).share(largest, members)
    others = SumNoise(clip, planned, planned * clip).share(largest, members)

    total = math.sqrt(own**2 + (members - 1) * others**2)
    assert total >= max(needed, planned) * 2 * clip * largest * (1 - 1e-12)
    if needed in (planned, 4.0) or not planned:
        assert math.isclose(total, max(needed, planned) * 2 * clip * largest)


def test_clients_that_were_told_different_noise_make_no_sum(table: Table) -> None:
    table.senders["anna"]._terms = Terms("client", 8.0, 1e-5, 1.0, 6)  # the others: none
    with raises(TooFewClients):
        mean([reply.params for reply in table.open()])

    assert "signature of 'anna' is not valid" in table.refused["sum_shares/bert"]


def test_why_a_client_helps_with_no_sum_is_told_under_privacy_too(tmp_path: Path) -> None:
    importorskip("opacus")
    private = config(tmp_path, data=FIVE, privacy={**SECURE, "level": "client"})
    host = Host(private, tmp_path / "clients", ["north"])
    about = {"session": "s", "threshold": 3, "wide": True}
    model = Params.of(host.bench.model)
    assert host.run("north", "train", 0, Message(model, scalars={KEY: about})).failure is None

    asked = Message(scalars={KEY: {"session": "s", "group": "params", "adverts": {}}})
    assert "the advert of 'north'" in str(host.run("north", "sum_shares", 0, asked).failure)


def test_a_change_that_rounding_made_longer_is_clipped_again(tmp_path: Path) -> None:
    """A server may send a model so large that adding a change to it rounds every number up."""
    base = Params({"w": torch.full((1000,), 2.0**20)})  # neighbours are 1/8 apart
    sent = Params({"w": base["w"] + 0.1})
    table = Table(tmp_path, dict.fromkeys(NAMES, Message(sent)), base=base)
    table.open()

    change = sent["w"].double() - base["w"].double()
    factor = table.senders["anna"]._clip_factor(table.senders["anna"]._pending["params"], 1.0)

    assert float(change.norm()) > 3.9
    assert math.isclose(float((change * factor).norm()), 1.0)
