"""Plan files: a plan as a configuration to edit, each line with its reason, and plan.yaml in a run folder."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.engine.run_folder import PLAN as PLAN
from wardround.errors import CheckpointError
from wardround.yaml_file import commented, dumped, read_yaml

WIDTH = 96  # of a comment
ABOUT = """\
# A run on {federation}. Written by `wardround configure`; made to be edited.
# Train: wardround {command} {name}"""
COSTS = "    What it takes: wardround plan {name}"  # where the cases are on this machine


def as_configuration(
    plan: ConfigurationPlan,
    path: Path,
    federation: Path,
    notes: Sequence[str] = (),
    command: Literal["train", "submit"] = "train",
) -> str:
    """The plan as a configuration file, every setting below its reason; notes: comments on top."""
    about = ABOUT + (COSTS if command == "train" else "") + "\n"
    about = about.format(federation=federation, name=path.name, command=command)
    remarks = "".join(comment(note) for note in [*notes, *plan.warnings])
    reasons = {choice.key: choice.reason for choice in plan.choices}
    return about + remarks + "\n" + write_section(plan.settings(), reasons)


def write_section(values: Mapping[str, Any], reasons: Mapping[str, str], place: str = "") -> str:
    lines = []
    indent = "  " * place.count(".")
    for name, value in values.items():
        key = f"{place}{name}"
        if key in reasons:
            lines.append(textwrap.indent(comment(reasons[key]) + dumped(name, value), indent))
        else:  # a section with choices inside
            lines.append(f"{indent}{dumped(name, None).partition(':')[0]}:\n")
            lines.append(write_section(value, reasons, f"{key}."))
    return "".join(lines)


def comment(text: str) -> str:
    return commented("\n".join(textwrap.wrap(text, WIDTH)))


# plan.yaml


def as_record(plan: ConfigurationPlan, facts: Mapping[str, Any]) -> str:
    """plan.yaml: facts of the plan as a whole, then every choice with its reason."""
    parts = ["# How this run was configured; every choice with its reason.\n"]
    parts += [dumped(name, value) for name, value in facts.items()]
    parts.append(dumped("warnings", list(plan.warnings)))
    rows = [{"setting": c.key, "value": c.value, "reason": c.reason} for c in plan.choices]
    parts.append(dumped("choices", rows))
    return "".join(parts)


def read_record(folder: Path) -> tuple[ConfigurationPlan, dict[str, Any]]:
    """The plan in a run folder, and the facts beside it."""
    path = folder / PLAN
    values = read_yaml(path, "choices: []")
    try:
        choices = tuple(Choice(r["setting"], r["value"], r["reason"]) for r in values.pop("choices"))
        return ConfigurationPlan(choices, tuple(values.pop("warnings"))), values
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{path} is not a plan that wardround wrote. Start anew with --overwrite."
        ) from None
