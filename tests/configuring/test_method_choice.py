"""The choice of a method: a short list, on validation cases alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml
from pytest import LogCaptureFixture, MonkeyPatch, approx, fixture

from wardround.api import Result
from wardround.configuring import method_choice
from wardround.configuring.method_choice import (
    METHODS_TRIED,
    MethodChoice,
    choose_method,
    is_open,
    judge,
    list_trials,
    take_method,
)
from wardround.configuring.plan import Choice, ConfigurationPlan, override_plan
from wardround.data.federation_file import load
from wardround.data.federation_file import write as write_file
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write
from wardround.data.proposing.proposal import propose
from wardround.data.sources import list_cases
from wardround.data.splits import assign


@fixture
def federation(tmp_path: Path) -> Path:
    write(PhantomSettings(hospitals=2, size=16, cases=10), tmp_path / "data", "png", seed=1)
    path = tmp_path / "federation.yaml"
    write_file(propose([tmp_path / "data"]).file, path)
    return path


def make_plan(federation: Path) -> ConfigurationPlan:
    values = {
        "data.federation": str(federation),
        "rounds": 2,
        "batch_size": 4,
        "model": {"base_filters": 2, "levels": 2},
        "method.name": "fedavg",
        "method.weighting": "samples",
        "evaluate": {"metrics": ["dice"]},
        "compute": {"threads": 1, "workers": 1},
    }
    return ConfigurationPlan(tuple(Choice(key, value, "a test") for key, value in values.items()))


def spoil_test_cases(federation: Path) -> int:
    """Make the images and labels of all test cases unreadable."""
    file = load(federation)
    entries = assign(list_cases(file, federation.parent).entries, file.splits, federation.parent)
    tested = [entry for entry in entries if entry.split == "test"]
    for entry in tested:
        for path in (*entry.images, entry.label):
            assert path is not None
            path.write_bytes(b"not an image")
    return len(tested)


def test_no_test_case_is_opened_during_the_choice(
    federation: Path, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setattr(method_choice, "METHODS_TRIED", {"fedavg": {}, "fedprox": {"mu": 0.01}})
    plan = make_plan(federation)
    _, before = choose_method(plan, tmp_path / "whole")
    assert spoil_test_cases(federation) >= 2

    with caplog.at_level(logging.WARNING):
        chosen, after = choose_method(plan, tmp_path / "choice")

    assert after.scores == before.scores  # as if nothing had happened to them
    assert not caplog.records  # nobody missed them either
    for name in ("fedavg", "fedprox"):
        folder = tmp_path / "choice" / name
        assert Result.load(folder).test is None
        assert not (folder / "left_out.json").exists() and not (folder / "cases.csv").exists()
        assert not any('"test"' in line for line in (folder / "egress.jsonl").read_text().splitlines())
    assert chosen.settings()["method"]["name"] == after.name


def test_trials_differ_in_the_method_alone(federation: Path) -> None:
    trials, refused = list_trials(make_plan(federation).settings() | {"rounds": 160, "output": "elsewhere"})

    assert list(trials) == list(METHODS_TRIED) and not refused
    rest = [{k: v for k, v in trial.items() if k not in ("method", "name")} for trial in trials.values()]
    assert all(trial == rest[0] for trial in rest)
    assert rest[0]["rounds"] == 10 and rest[0]["data"]["test"] is False and "output" not in rest[0]
    assert trials["fedavg"]["method"] == {"name": "fedavg", "weighting": "samples"}
    assert trials["fedprox"]["method"] == {"name": "fedprox", "mu": 0.01}


def test_a_method_that_the_plan_forbids_is_left_out_with_its_reason(
    federation: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(method_choice, "METHODS_TRIED", {"fedavg": {}, "fedevi": {}})

    trials, refused = list_trials(make_plan(federation).settings() | {"objective": {"name": "dice_bce"}})

    assert list(trials) == ["fedavg"]
    assert "Dirichlet" in refused["fedevi"]


def judged(scores: dict[str, float], monkeypatch: MonkeyPatch) -> MethodChoice:
    class Done:
        class config:
            rounds = 5

            class evaluate:
                select = "dice"

    monkeypatch.setattr(method_choice, "read_score", lambda result, metric: scores[result.name])
    results: dict[str, Any] = {}
    for name in scores:
        results[name] = Done()
        results[name].name = name
    return judge(results, {})


def test_the_best_on_validation_cases_is_taken(monkeypatch: MonkeyPatch) -> None:
    found = judged({"fedavg": 0.80, "fedprox": 0.83, "safcf": 0.82}, monkeypatch)

    assert found.name == "fedprox"
    assert found.describe() == "validation dice 0.830 after 5 rounds, against fedavg 0.800, safcf 0.820"
    assert found.as_dict()["validation_dice"]["fedprox"] == approx(0.83)


def test_fedavg_stays_where_none_is_better_by_the_margin(monkeypatch: MonkeyPatch) -> None:
    found = judged({"fedavg": 0.800, "fedprox": 0.803, "safcf": float("nan")}, monkeypatch)

    assert found.name == "fedavg"
    assert "none is better by 0.005" in found.describe()


def test_the_method_takes_its_place_in_the_plan() -> None:
    plan = ConfigurationPlan(
        (
            Choice("rounds", 9, ""),
            Choice("method.name", "fedavg", ""),
            Choice("method.weighting", "samples", ""),
        )
    )

    other = take_method(plan, MethodChoice("fedavgm", "dice", {"fedavg": 0.1, "fedavgm": 0.2}, 3, {}))
    same = take_method(plan, MethodChoice("fedavg", "dice", {"fedavg": 0.1}, 3, {}))

    assert other.settings() == {
        "rounds": 9,
        "method": {"name": "fedavgm", **METHODS_TRIED["fedavgm"]},
    }
    assert "0.200 after 3 rounds, against fedavg 0.100" in other.choices[1].reason
    assert same.settings() == plan.settings() and "against no other" in same.choices[1].reason


def test_a_method_of_the_users_own_is_not_put_to_the_choice() -> None:
    plan = ConfigurationPlan((Choice("method.name", "fedavg", "by the rules"),))

    assert is_open(plan)
    assert not is_open(override_plan(plan, ["method.name=scaffold"]))
    assert is_open(override_plan(plan, ["rounds=3"]))
    assert not is_open(ConfigurationPlan((Choice("method.name", "fedadam", "where labels are partial"),)))


def test_an_interrupted_choice_continues_with_what_is_done(
    federation: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(method_choice, "METHODS_TRIED", {"fedavg": {}, "fedprox": {"mu": 0.01}})
    plan = make_plan(federation)
    _, whole = choose_method(plan, tmp_path / "choice")
    done = yaml.safe_load((tmp_path / "choice" / "fedavg" / "config.yaml").read_text())
    assert done["rounds"] == 3 and done["data"]["test"] is False
    times = (tmp_path / "choice" / "fedavg" / "result.json").stat().st_mtime_ns
    (tmp_path / "choice" / "fedprox" / "result.json").unlink()

    _, again = choose_method(plan, tmp_path / "choice")

    assert again.scores == whole.scores
    assert (tmp_path / "choice" / "fedavg" / "result.json").stat().st_mtime_ns == times
