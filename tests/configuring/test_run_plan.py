"""Run plans: names, refusals, and how many steps are timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, mark, raises

import wardround as wr
from wardround.configuring import run_plan
from wardround.configuring.budget import Budget, Pace
from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.configuring.run_plan import (
    choose_steps,
    count_steps,
    describe_artificial,
    describe_shortage,
    name_run,
)
from wardround.data.federation_file import FederationFile, write
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write as write_hospitals
from wardround.data.proposing.proposal import propose
from wardround.errors import ConfigError


@mark.parametrize(
    ("path", "sources", "name"),
    [
        ("work/federation.yaml", ["hospitals"], "hospitals"),
        ("work/federation.yaml", ["hospitals/east", "hospitals/north"], "hospitals"),
        ("work/federation.yaml", ["/a/east", "/b/north"], "work"),
        ("work/federation.yaml", ["lists/cases.csv"], "lists"),
        ("work/polyps.yaml", ["hospitals"], "polyps"),
    ],
)
def test_a_run_has_the_name_of_its_data(path: str, sources: list[str], name: str) -> None:
    file = FederationFile.read({"sources": [{"path": source} for source in sources]})

    assert name_run(Path(path), file) == name


def test_clients_that_were_made_up_are_called_artificial() -> None:
    def file(kind: str) -> FederationFile:
        return FederationFile.read({"sources": [{"path": "a"}], "partition": {"kind": kind, "column": "c"}})

    assert "ARTIFICIAL CLIENTS" in describe_artificial(file("iid"))[0]
    assert describe_artificial(file("natural")) == describe_artificial(file("column")) == []


def plan(steps: int) -> ConfigurationPlan:
    """A recipe that is slower from 1,000 steps on."""
    settings = {"rounds": max(1, steps // 10), "local_steps": 10, "seed": int(steps >= 1000)}
    return ConfigurationPlan(tuple(Choice(key, value, "") for key, value in settings.items()))


def test_each_recipe_is_timed_once(monkeypatch: MonkeyPatch) -> None:
    timed: list[int] = []

    def measure(config: Any) -> Pace:
        timed.append(config.seed)
        return Pace(step=0.1 * (1 + config.seed), round=0.0, validation=0.0, once=0.0)

    monkeypatch.setattr(run_plan, "measure_pace", measure)

    few, seconds = choose_steps(plan, Budget("20s", seconds=20.0), 2, lambda: None)
    many, _ = choose_steps(plan, Budget("1000s", seconds=1000.0), 2, lambda: None)

    assert 195 <= few <= 200 and seconds is not None and 19 < seconds <= 20
    assert 4900 <= many <= 5000
    assert timed == [0, 0, 1]


def test_steps_need_no_timing_and_tries_leave_time_for_themselves(monkeypatch: MonkeyPatch) -> None:
    assert choose_steps(plan, Budget("70", steps=70), 2, lambda: None) == (70, None)

    monkeypatch.setattr(run_plan, "measure_pace", lambda config: Pace(0.1, 0.0, 0.0, 0.0))
    steps, _ = choose_steps(plan, Budget("full", seconds=50.0, tries_methods=True), 2, lambda: None)
    assert 390 <= steps <= 400  # 40 s, and four times a sixteenth of it for the trials


def test_steps_are_those_that_the_rounds_make() -> None:
    rounds, local = Choice("rounds", 52, ""), Choice("local_steps", 20, "")

    assert count_steps(ConfigurationPlan((rounds, local)), 1049) == 1040
    assert count_steps(ConfigurationPlan((rounds,)), 1049) == 1049


def test_a_plan_that_takes_longer_than_its_budget_says_so() -> None:
    quick = Budget("quick", seconds=120.0)

    assert describe_shortage(quick, 119.0) == describe_shortage(Budget("9", steps=9), None) == []
    assert "quick means 2 min, but the fewest steps" in describe_shortage(quick, 600.0)[0]


def test_a_configuration_is_planned_from_python(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hospitals(PhantomSettings(hospitals=2, size=32, cases=10), Path("hospitals"), "png", seed=1)
    write(propose([Path("hospitals")]).file, Path("federation.yaml"))

    config = wr.configure("federation.yaml", budget="30", overrides=["seed=7"])

    assert isinstance(config, wr.Config)
    assert config.name == "hospitals" and config.seed == 7
    assert config.rounds * (config.local_steps or 0) == 30
    with raises(ConfigError, match="budget is 'long'"):
        wr.configure("federation.yaml", budget="long")


def test_a_plan_for_hospitals_without_labels_can_be_trained(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = PhantomSettings(hospitals=3, size=32, cases=8, unlabelled=("east", "south"))
    write_hospitals(made, Path("hospitals"), "png", seed=1)
    file = propose([Path("hospitals")]).file
    write(file.model_copy(update={"unlabelled": ("east", "south")}), Path("federation.yaml"))

    config = wr.configure("federation.yaml", budget="2")

    assert config.objective["name"] == "pseudo_labels" and config.min_clients == 1
    assert len(wr.run(config).records) == 1
