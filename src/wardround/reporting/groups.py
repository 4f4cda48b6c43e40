"""What stands together on the page: one comparison, or the runs named on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wardround.comparison import Comparison
from wardround.comparison.scores import Replicate, RowScores, Sheet
from wardround.comparison.tables import cross_site_table
from wardround.metrics import combine_units
from wardround.reporting.facts import Run, Source, mapping, read_run
from wardround.reporting.html import Html, join, name, tag
from wardround.tables import Table

MOST_DETAILED = 24


@dataclass
class Group:
    """What stands together on the page: one comparison, or the runs named on the command line.

    runs: those shown in detail; methods: of every row; sheet: the scores of all rows; crossed: each
    client's own model at the others; notes: what a reader must know before reading on; curves: metric ->
    row -> mean validation score over its replicates, by round; remark: which runs are in detail.
    """

    title: str
    kind: str
    runs: Sequence[Run]
    methods: Mapping[str, str]
    sheet: Sheet | None = None
    crossed: Table | None = None
    notes: Sequence[Html] = ()
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    remark: Html | None = None

    @property
    def metrics(self) -> list[str]:
        return list(self.sheet.metrics) if self.sheet else []

    @property
    def tested(self) -> str:
        """What goes before the name of a score: cases of an evaluation need not be test cases of a run."""
        return "" if any(run.is_evaluation for run in self.runs) else "test "


def groups_of(sources: Sequence[Source]) -> list[Group]:
    """The runs together first, then each comparison."""
    folders = [source.folder for source in sources if source.kind == "run"]
    runs = distinct([read_run(folder) for folder in folders])
    groups = [of_runs(runs)] if runs else []
    groups += [of_comparison(Comparison.load(s.folder)) for s in sources if s.kind == "comparison"]
    return groups


def distinct(runs: Sequence[Run]) -> list[Run]:
    """Runs of one name are told apart by their folders."""
    names = [run.label for run in runs]
    taken: set[str] = set()
    for run in runs:
        if names.count(run.label) > 1:
            run.label = f"{run.label} ({run.folder.name})"
        while run.label in taken:
            run.label += "'"
        taken.add(run.label)
    return list(runs)


def of_runs(runs: Sequence[Run]) -> Group:
    done = [run for run in runs if run.cases]
    metrics = [
        metric for metric in (done[0].metrics if done else []) if all(metric in run.cases for run in done)
    ]
    sheet, lengths = None, combine_units(run.lengths for run in done)
    if metrics:
        reference = next((run.label for run in done if run.method == "fedavg"), done[0].label)
        sheet = Sheet("Runs", [row_of(run) for run in done], reference, metrics, lengths=lengths)
    title = runs[0].label if len(runs) == 1 else ", ".join(run.label for run in runs)
    crossed = {run.label: [run.cross_site] for run in done if run.cross_site}
    table = cross_site_table(crossed, metrics[0], "Cross-site", lengths) if crossed and metrics else None
    return Group(
        title,
        "run" if len(runs) == 1 else "runs",
        runs,
        {run.label: run.method for run in runs},
        sheet=sheet,
        crossed=None if table is None else only_personal(table),
        notes=[note for note in (noted(run, several=len(runs) > 1) for run in runs) if note],
        curves=mean_curves({run.label: [run] for run in runs}) if len(runs) > 1 else {},
    )


def noted(run: Run, *, several: bool) -> Html:
    """What an evaluation said of its cases and its model. several: with the name of the run."""
    said = run.notes()
    failed = len(run.not_judged())
    if failed:
        said.append(f"{failed} {'cases' if failed > 1 else 'case'} could not be judged; reasons are below.")
    if not said:
        return Html("")
    whose = tag("p", name(run.label), ":") if several else None
    return tag(
        "div", whose, tag("ul", [tag("li", text) for text in said], class_="warnings"), class_="notice",
        role="status",
    )  # fmt: skip


def row_of(run: Run) -> RowScores:
    """A run as a row of the comparison tables; only the same data under the same seed can be paired."""
    evaluate = mapping(run.config.get("evaluate"))
    seed = run.config.get("seed", 42)
    return RowScores(
        run.label,
        {(seed, None): Replicate(seed, None, run.cases)},
        data=json.dumps(data_of(run), sort_keys=True, default=str),
        empty_policy=str(evaluate.get("empty_policy", "defined")),
        tested=str(evaluate.get("model", "best")),
    )


def data_of(run: Run) -> Any:
    """What its scores are of; the settings of an evaluation name the data its model was trained on."""
    if run.is_evaluation:
        return {"evaluated": run.evaluation.get("data"), "split": run.evaluation.get("split")}
    return run.config.get("data")


def of_comparison(found: Comparison) -> Group:
    done = [cell for cell in found.cells if cell.is_done]
    first = {cell.row: cell for cell in reversed(done)}
    shown_cells = [first[label] for label in found.rows if label in first]
    several = len(found.facts["seeds"]) * max(1, len(found.facts["folds"])) > 1 or found.facts["held_out"]
    runs = [
        read_run(cell.folder, cell.title if several else cell.row) for cell in shown_cells[:MOST_DETAILED]
    ]
    by_row = {label: [cell for cell in done if cell.row == label] for label in found.rows}
    records = {
        label: [read_run(cell.folder, label) for cell in cells] for label, cells in by_row.items() if cells
    }
    notes = [incomplete(found, len(done))]
    crossed = found.cross_site(found.metrics[0]) if done and found.metrics else None
    remark = join(
        "One run of every row, the first of its seeds; ",
        tag("code", "wardround report"),
        " on the folder of another cell shows that one.",
    )
    facts = {"seeds": found.facts["seeds"], "cells": len(found.cells), "done": len(done)}
    return Group(
        found.name,
        "comparison",
        runs,
        {row["label"]: str(row["method"]) for row in found.facts["rows"]},
        sheet=found.sheet if done else None,
        crossed=None if crossed is None else only_personal(crossed),
        notes=[note for note in notes if note],
        curves=mean_curves(records),
        facts=facts,
        remark=remark if several and runs else None,
    )


def only_personal(table: Table) -> Table | None:
    """Rows of methods whose clients end with models of their own; one common model is in the main table."""
    models: dict[str, set[str]] = {}
    for row in table.rows:
        models.setdefault(row[0], set()).add(str(row[2:-1]))
    kept = [row for row in table.rows if len(models[row[0]]) > 1]
    return dataclasses.replace(table, rows=kept) if kept else None


def incomplete(found: Comparison, done: int) -> Html:
    """Cells that are missing, and why."""
    if done == len(found.cells):
        return Html("")
    titles = {cell.name: cell.title for cell in found.cells}
    reasons = [tag("li", name(titles.get(cell, cell), 80), ": ", why) for cell, why in found.failures.items()]
    text = f"{done} of {len(found.cells)} cells are done; the tables show what is there."
    return tag("div", tag("p", text), tag("ul", reasons) if reasons else None, class_="notice", role="status")


def mean_curves(
    rows: Mapping[str, Sequence[Run]],
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Metric -> row -> the mean over clients (and replicates) of the validation score, by round."""
    metrics = next((run.validation_metrics() for runs in rows.values() for run in runs), [])
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for metric in metrics[:1]:
        for label, runs in rows.items():
            values: dict[float, list[float]] = {}
            for run in runs:
                for at, value in run.validation_mean(metric):
                    values.setdefault(at, []).append(value)
            if values:
                means = [(at, sum(entry) / len(entry)) for at, entry in sorted(values.items())]
                found.setdefault(metric, {})[label] = means
    return found
