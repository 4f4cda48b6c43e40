"""Private runs as a whole: what leaves, what is recorded, and that resuming resets nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import torch
from helpers import Watcher, config, settings
from pytest import approx, mark, raises

import wardround as wr
from wardround.engine.host import Host
from wardround.engine.records import read_lines
from wardround.messages import Message
from wardround.params import Params
from wardround.privacy import PrivacyBudget, PrivacySettings
from wardround.privacy.words import describe_cost, describe_told, gather_told
from wardround.reporting import write_report

CLIENT = {"level": "client", "epsilon": 4.0}
# noise on a few weights points anywhere, also against that of the others
LIMITS = {"refuse_opposite": False, "max_norm": None}


def run(folder: Path, **changes: Any) -> Any:
    return helpers.run(folder, limits=LIMITS, **changes)


def budget_of(folder: Path, client: str = "north") -> PrivacyBudget:
    return PrivacyBudget(folder / "clients" / client / "privacy.jsonl")


def answer(host: Host, task: str = "train", round: int = 0, **scalars: Any) -> Any:
    message = Message(params=Params.of(host.bench.model), scalars=scalars)
    return host.run("north", task, round, message)


@mark.parametrize("level", ["client", "case"])
def test_a_private_run_spends_what_it_was_given_and_says_so(tmp_path: Path, level: str) -> None:
    result = run(tmp_path, privacy={"level": level, "epsilon": 4.0})

    told = gather_told(read_lines(tmp_path / "records.jsonl"))
    assert sorted(told) == ["east", "north", "south"]
    assert {entry["level"] for entry in told.values()} == {level}
    assert told["north"]["epsilon"] == approx(4.0, rel=1e-4)
    assert "epsilon 4.00 at delta 1e-05" in write_report([tmp_path]).read_text()
    assert all(torch.isfinite(tensor).all() for tensor in result.outcome.state.params.values())


def test_losses_scores_and_seconds_stay_unless_scores_are_shown(tmp_path: Path) -> None:
    run(tmp_path / "a", privacy=CLIENT, rounds=1)
    run(tmp_path / "b", privacy={**CLIENT, "scores": "show"}, rounds=1)

    withheld, shown = (read_lines(tmp_path / name / "records.jsonl")[0] for name in "ab")
    assert set(withheld["exchanges"][0]["seconds"].values()) == {0.0}
    assert withheld["loss"] == shown["loss"] == {"east": {}, "north": {}, "south": {}}
    assert "north" not in json.dumps(withheld["validation"]) and "north" in json.dumps(shown["validation"])
    assert len((tmp_path / "a" / "cases.csv").read_text().splitlines()) == 1


def test_resuming_after_a_crash_goes_on_with_the_same_budget(tmp_path: Path) -> None:
    with raises(KeyboardInterrupt):
        wr.run(
            settings(tmp_path, privacy=CLIENT, limits=LIMITS, rounds=3),
            listener=Watcher(crash_in_round=2, crash_at="south"),
        )
    before = budget_of(tmp_path).read()
    assert len(before) == 2  # its second answer was lost with the round

    wr.run(settings(tmp_path, privacy=CLIENT, limits=LIMITS, rounds=3), resume=True)
    after = budget_of(tmp_path).read()
    assert after[:2] == before
    assert [line.round for line in after] == [1, 2, 2, 3]
    assert after[2].release.noise > before[1].release.noise
    assert budget_of(tmp_path).spent(PrivacySettings()) <= 4.0


@mark.parametrize("level", ["client", "case"])
def test_a_task_that_is_done_twice_draws_fresh_noise(tmp_path: Path, level: str) -> None:
    host = Host(config(tmp_path, privacy={**CLIENT, "level": level}), tmp_path / "clients", ["north"])
    first, second = answer(host), answer(host)

    assert first.message.params.sha256() != second.message.params.sha256()
    assert len(budget_of(tmp_path).read()) == 2


def test_a_client_stops_answering_when_its_budget_is_spent(tmp_path: Path) -> None:
    chosen = config(tmp_path, privacy=CLIENT, rounds=1)
    assert answer(Host(chosen, tmp_path / "clients", ["north"])).failure is None

    again = answer(Host(chosen, tmp_path / "clients", ["north"]))
    assert "budget of this run is spent" in again.failure
    assert again.message.optional_params is None


@mark.parametrize("task", ["norm_stats", "personal_model", "anything"])
def test_tasks_without_a_filter_are_not_answered(tmp_path: Path, task: str) -> None:
    host = Host(config(tmp_path, privacy=CLIENT), tmp_path / "clients", ["north"])

    assert answer(host, task).failure == f"task '{task}' is not answered under privacy.level: client"


@mark.parametrize("split", ["train", "all", None])
@mark.parametrize("level", ["client", "case"])
def test_scores_of_training_cases_stay_even_where_scores_are_shown(
    tmp_path: Path, level: str, split: str | None
) -> None:
    chosen = config(tmp_path, privacy={**CLIENT, "level": level, "scores": "show"})
    host = Host(chosen, tmp_path / "clients", ["north"])

    refused = answer(host, "evaluate", split=split, metrics=["dice"])
    assert f"scores of split '{split}' do not leave" in refused.failure and not refused.message.scalars
    assert answer(host, "evaluate", split="val", metrics=["dice"]).message.scalars["cases"]


def test_a_request_to_train_without_a_model_spends_nothing(tmp_path: Path) -> None:
    host = Host(config(tmp_path, privacy=CLIENT), tmp_path / "clients", ["north"])

    assert "brings no model" in host.run("north", "train", 0, Message()).failure
    assert not budget_of(tmp_path).read()


def test_the_number_of_cases_that_is_told_is_the_declared_one(tmp_path: Path) -> None:
    chosen = config(tmp_path, privacy={**CLIENT, "cases": 40})
    host = Host(chosen, tmp_path / "clients", ["north"])

    entry = host.register("north")
    assert (entry.num_train, entry.num_val, entry.num_test) == (40, 0, 0)
    assert answer(host).num_examples == 40
    assert answer(host).num_steps == chosen.count_steps(40)


def test_why_a_task_failed_stays_at_the_client(tmp_path: Path, monkeypatch: Any) -> None:
    host = Host(config(tmp_path, privacy=CLIENT), tmp_path / "clients", ["north"])
    monkeypatch.setattr(host.method.__class__, "train", lambda *_: 1 / 0)

    assert answer(host).failure == "the task failed; under privacy the reason stays in this client's log"


def test_worker_processes_tell_the_same(tmp_path: Path) -> None:
    run(tmp_path, privacy=CLIENT, rounds=1, compute={"threads": 1, "workers": 2})

    told = gather_told(read_lines(tmp_path / "records.jsonl"))
    assert told["north"]["filters"][1]["filter"] == "client_noise"
    assert len(budget_of(tmp_path).read()) == 1


def test_a_run_without_privacy_says_nothing_of_it(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)

    assert "privacy" not in json.loads((tmp_path / "records.jsonl").read_text())
    assert not budget_of(tmp_path).path.exists()
    assert describe_told({}) is None


def test_words_name_what_is_not_covered_and_who_is_without() -> None:
    entry = {"level": "client", "epsilon": 2.0, "delta": 1e-5, "scores": "show", "counts": "given"}

    words = describe_told({"north": entry}, ["east", "north"])
    assert words is not None
    assert "covers whatever a hospital trained on" in words
    assert "does not cover numbers of training cases; scores" in words
    assert words.endswith("Without privacy: east.")
    assert "share the noise" not in words
    shared = describe_told({"north": {**entry, "shared": True}})
    assert shared is not None and "while all others in them add their share" in shared


def test_a_run_with_shared_noise_says_so_in_report_records_and_budget(tmp_path: Path) -> None:
    private = {**CLIENT, "secure_sum": True, "cases": 10}
    run(tmp_path, privacy=private, rounds=1)

    page = " ".join(write_report([tmp_path]).read_text().split())
    assert "Hospitals share the noise of a secure sum" in page and "no single one" in page
    assert read_lines(tmp_path / "records.jsonl")[0]["privacy"]["north"]["shared"] is True
    assert [line.is_shared for line in budget_of(tmp_path).read()] == [True]


def test_a_plan_says_what_a_setting_cost_where_it_was_measured() -> None:
    (note,) = describe_cost(PrivacySettings(level="case", epsilon=7.0))

    assert "privacy.level is case with epsilon 7" in note
    assert "without" in note and "at epsilon 8" in note
    assert describe_cost(PrivacySettings()) == []

    (shared,) = describe_cost(PrivacySettings(level="client", epsilon=7.0, secure_sum=True))
    assert "its noise shared in a secure sum" in shared and "at epsilon 8" in shared
