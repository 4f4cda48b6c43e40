"""What the caption of a paper's table says of runs that are not as printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround.comparison.departures import Departures
from wardround.comparison.presets import plan_paper
from wardround.papers.presets import load
from wardround.papers.scaling import WHOLE, Scale

FEDERATION = load("fedevi-table1").datasets["polyp"]
PRINTED = load("fedevi-table1").settings
DATA = {"federation": "x.yaml", "prepare": {"size": [384, 384]}, "splits": {"ratios": [0.7, 0.1, 0.2]}}


def sentences(**changes: Any) -> list[str]:
    found = Departures()
    found.add(PRINTED, FEDERATION, {**PRINTED, "data": DATA, **changes})
    return found.sentences(WHOLE)


def test_the_experiment_as_printed_needs_no_caption() -> None:
    assert sentences() == []


def test_other_rounds_and_sizes_are_named() -> None:
    data = {**DATA, "prepare": {"size": [32, 32]}}
    assert sentences(rounds=20, data=data) == [
        "Not as in the paper: rounds 20 instead of 200; image size 32x32 instead of 384x384. "
        "Printed numbers are not comparable."
    ]


def test_synthetic_hospitals_have_a_size_of_their_own() -> None:
    assert "64x64 instead of 384x384" in sentences(data={"phantom": {"hospitals": 4}})[0]


def test_other_settings_that_set_changes_are_named(tmp_path: Path) -> None:
    changes = ["model.stem=none", "optimizer.learning_rate=0.1", "compute.threads=1", "datasets=polyp"]
    grid = plan_paper(
        load("fedevi-table5"), ["synthetic"], tmp_path, scale=Scale.parse("0.01"), overrides=changes
    )
    assert "Set otherwise than in the preset: model.stem=none." in grid.notes
    assert any("learning rate 0.1 instead of 0.001" in note for note in grid.notes)
    assert grid.notes[0].startswith("Data: synthetic") and "not comparable" in grid.notes[0]


def test_a_planned_table_has_the_papers_splits_and_says_what_was_scaled(tmp_path: Path) -> None:
    preset, scale = load("fedevi-table5"), Scale.parse("0.01")
    grid = plan_paper(
        preset, ["synthetic"], tmp_path, scale=scale, seeds=[1, 2, 3], overrides=["datasets=polyp"]
    )
    assert [row.label for row in grid.rows] == ["uniform, polyp", "by samples, polyp"]
    splits = [cell.settings["data"]["splits"] for cell in grid.cells if cell.row == "uniform, polyp"]
    assert [(entry["by"], entry["repeat"]) for entry in splits] == [("repeated", n) for n in range(3)]
    assert splits[0]["ratios"] == [0.7, 0.1, 0.2]
    assert "Scaled to 0.01." in grid.notes and any("32x32 instead of 384x384" in n for n in grid.notes)
