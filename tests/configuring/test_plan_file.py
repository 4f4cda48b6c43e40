"""Plans as files: a configuration to edit, and plan.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml
from pytest import raises

from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.configuring.plan_file import as_configuration, as_record, read_record
from wardround.errors import CheckpointError
from wardround.yaml_file import read_yaml

PLAN = ConfigurationPlan(
    (
        Choice("rounds", 20, "the budget"),
        Choice("data.federation", "federation.yaml", "your data"),
        Choice("data.prepare.spacing", [1.0, 1.0, 2.5], "median of all cases"),
        Choice("data.patch", None, "whole images: " + "they are small, and " * 8),
        Choice("augmentation", {"mirror": 0.5, "chances": {"noise": 0.1}}, "enough\nsteps"),
    ),
    warnings=("Only 3 validation cases.",),
)


def test_a_configuration_file_has_every_setting_below_its_reason(tmp_path: Path) -> None:
    text = as_configuration(PLAN, tmp_path / "run.yaml", Path("federation.yaml"), ["Taken for MR."])
    (tmp_path / "run.yaml").write_text(text)

    assert read_yaml(tmp_path / "run.yaml") == PLAN.settings()
    lines = text.splitlines()
    assert lines[lines.index("rounds: 20") - 1] == "# the budget"
    assert lines[lines.index("    spacing: [1.0, 1.0, 2.5]") - 1] == "    # median of all cases"
    assert "# Taken for MR." in lines and "# Only 3 validation cases." in lines
    assert "# enough steps" in lines  # a line break cannot leave the comment
    assert max(map(len, lines)) <= 110


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(as_record(PLAN, {"budget": "quick", "steps": 400}))

    plan, facts = read_record(tmp_path)

    assert plan == PLAN
    assert facts == {"budget": "quick", "steps": 400}
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["choices"][0]["reason"] == "the budget"


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("rounds: 3\n")

    with raises(CheckpointError, match="not a plan that wardround wrote"):
        read_record(tmp_path)
