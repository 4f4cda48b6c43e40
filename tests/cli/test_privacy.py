"""wardround privacy status: what a hospital or a run has spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers import call
from pytest import fixture, mark

from wardround.privacy import Policy, PrivacyBudget, PrivacySettings

SITE = PrivacySettings(level="client", epsilon=4.0, cases=20)


@fixture
def kit(tmp_path: Path) -> Path:
    """The folder of a hospital that took part in two runs."""
    budget = PrivacyBudget(tmp_path / "north" / "state" / "privacy.jsonl")
    small = PrivacySettings(level="client", epsilon=2.0)
    for run in ("first", "second"):
        budget.charge(Policy(small, SITE), run, 0, rounds_left=1)
    (tmp_path / "north" / "site.yaml").write_text("privacy: {level: client, epsilon: 4, cases: 20}\n")
    return tmp_path / "north"


def test_status_shows_every_run_and_all_together(monkeypatch: Any, capsys: Any, kit: Path) -> None:
    code, out, _ = call(monkeypatch, capsys, "privacy", "status", str(kit))

    assert code == 0
    assert "first" in out and "all runs" in out and "2.000" in out
    assert "Client level covers whatever a hospital trained on." in out
    assert "Epsilon of all runs together may reach 4 (privacy.epsilon)." in out


def test_status_of_both_levels_says_what_they_cover_together(
    monkeypatch: Any, capsys: Any, kit: Path
) -> None:
    budget = PrivacyBudget(kit / "state" / "privacy.jsonl")
    case = PrivacySettings(level="case", epsilon=3.9)
    budget.charge(Policy(case), "third", 0, rounds_left=1, rate=0.5)
    shared = PrivacySettings(level="client", epsilon=3.9, secure_sum=True)
    budget.charge(Policy(shared), "fourth", 0, rounds_left=1)
    _, out, _ = call(monkeypatch, capsys, "privacy", "status", str(kit))

    words = " ".join(out.split())
    assert "Case and client level covers whether any one training case took part." in words
    assert "epsilon holds for whoever sees sums alone" in words


def test_status_as_json_has_the_numbers(monkeypatch: Any, capsys: Any, kit: Path) -> None:
    _, out, _ = call(monkeypatch, capsys, "privacy", "status", str(kit), "--json")

    told = json.loads(out)
    assert told["limit"] == 4.0
    assert [entry["client"] for entry in told["spent"]] == ["north"] * 3
    assert 2.0 < told["spent"][2]["epsilon"] < 4.0


def test_a_place_without_a_budget_is_named(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    code, _, err = call(monkeypatch, capsys, "privacy", "status", str(tmp_path))

    assert code == 2 and "has no privacy.jsonl" in " ".join(err.split())


def test_a_kit_that_has_not_answered_yet_has_spent_nothing(monkeypatch: Any, capsys: Any, kit: Path) -> None:
    (kit / "state" / "privacy.jsonl").unlink()
    code, out, _ = call(monkeypatch, capsys, "privacy", "status", str(kit))

    assert code == 0 and "has spent nothing yet." in out and "may reach 4" in out


@mark.parametrize("delta", ["-1", "0", "1", "nan"])
def test_a_delta_that_is_no_chance_is_refused(monkeypatch: Any, capsys: Any, kit: Path, delta: str) -> None:
    code, _, err = call(monkeypatch, capsys, "privacy", "status", str(kit), "--delta", delta)

    assert code == 2 and f"--delta is {delta}; it must be between 0 and 1." in " ".join(err.split())
