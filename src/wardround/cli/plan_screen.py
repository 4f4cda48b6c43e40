"""What `train` and `configure` show of a plan: one screen of what was chosen and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from wardround.cli.common import out
from wardround.text import clipped, format_duration, format_size

if TYPE_CHECKING:
    from wardround.configuring.run_plan import RunPlan

KINDS = {"ct": "CT", "mr": "MR", "rgb": "colour", "other": "neither CT nor colour"}
WIDTH = 80  # of the screen where the output is no terminal
LABEL = 14  # columns of a row's label
MOST_NOTES = 3
MOST_ROW_LINES = 17


def describe_run(run: RunPlan) -> list[str]:
    facts = run.facts
    channels = ", ".join(f"{c.name} ({KINDS[c.modality]})" for c in facts.channels)
    counts = f"{facts.num_train} training cases at {len(facts.clients)} clients, {facts.dimensions}D"
    sentences = [f"{run.name}: {counts}. Channels: {channels}. Classes: {', '.join(facts.classes)}."]
    took = "" if run.seconds is None else f", about {format_duration(run.seconds)} with validation and test"
    sentences.append(f"Budget {run.budget.name}: {run.steps:,} steps of each client{took}.")
    return sentences


def show_run_plan(run: RunPlan) -> None:
    """What was chosen and why, in one screen; plan.yaml has all of it in full."""
    width = screen_width()
    first, last = describe_run(run)
    print_wrapped(first, width)
    notes = [*run.notes, *run.plan.warnings]
    for note in notes[:MOST_NOTES]:
        print_wrapped(f"! {note}", width)
    if len(notes) > MOST_NOTES:
        out.print(f"! and {len(notes) - MOST_NOTES} more, in plan.yaml")
    out.print()
    for line in draw_rows(list_rows(run), width):
        out.print(escape(line), soft_wrap=True)
    out.print()
    print_wrapped(last, width)


def draw_rows(rows: Sequence[tuple[str, str, str]], width: int) -> list[str]:
    """Three columns; a reason has two lines, or one where there would be too many."""
    longest = min(max(len(value) for _, value, _ in rows), 30)
    start = LABEL + longest + 2

    def draw(most: int) -> Iterator[str]:
        for label, value, reason in rows:
            column = textwrap.wrap(reason, width - start, max_lines=most, placeholder=" …") or [""]
            yield f"{label:<{LABEL}}{clipped(value, longest):<{longest + 2}}{column[0]}"
            yield from (" " * start + line for line in column[1:])

    lines = list(draw(2))
    return lines if len(lines) <= MOST_ROW_LINES else list(draw(1))


def screen_width() -> int:
    return min(out.width, 120) if out.is_terminal else WIDTH


def print_wrapped(text: str, width: int) -> None:
    for line in textwrap.wrap(text, width, subsequent_indent="  " if text.startswith("! ") else ""):
        out.print(escape(line), soft_wrap=True)


def list_rows(run: RunPlan) -> list[tuple[str, str, str]]:
    """Label, value and reason of what a reader wants to know first."""
    values = {choice.key: choice.value for choice in run.plan.choices}
    reasons = {choice.key: choice.reason for choice in run.plan.choices}

    def sides(key: str) -> str:
        return format_size(values[key]) if values.get(key) else ""

    rows: list[tuple[str, str, str]] = [
        ("spacing", f"{sides('data.prepare.spacing')} mm", "data.prepare.spacing"),
        ("size", sides("data.prepare.size"), "data.prepare.size"),
        ("intensities", str(values.get("data.prepare.normalise", "")), "data.prepare.normalise"),
        ("patch", f"{sides('data.patch')}, {values.get('batch_size')} a batch", "data.patch"),
        ("network", describe_network(values), "model.base_filters"),
        ("loss", str(values.get("objective.name", "")), "objective.name"),
        ("optimizer", describe_optimizer(values), "optimizer.name"),
        ("augmentation", describe_augmentation(values.get("augmentation")), "augmentation"),
        ("rounds", f"{values.get('rounds')} of {values.get('local_steps')} steps", "local_steps"),
        ("method", str(values.get("method.name", "")), "method.name"),
    ]
    return [(label, value, reasons[key]) for label, value, key in rows if values.get(key) is not None]


def describe_network(values: dict[str, Any]) -> str:
    levels, filters = values.get("model.levels"), values.get("model.base_filters")
    return f"{values.get('model.name')}, {levels} levels of {filters}+"


def describe_optimizer(values: dict[str, Any]) -> str:
    return f"{values.get('optimizer.name')}, rate {values.get('optimizer.learning_rate')}"


def describe_augmentation(kinds: Any) -> str:
    how = ("chances", "mirror_axes")  # and no kinds
    on = [name for name, value in kinds.items() if name not in how and value] if kinds else []
    return f"{len(on)} kinds" if on else "none"
