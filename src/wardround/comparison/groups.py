"""Runs that are shown together: the cells of a comparison, or the runs somebody named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wardround.comparison.outcome import Comparison, fill_defaults
from wardround.comparison.runs import Run, Series, join_origins, mapping, read_run
from wardround.comparison.scores import (
    Replicate,
    ReplicateKey,
    RowScores,
    Sheet,
    set_apart,
)
from wardround.comparison.tables import cross_site_table, score_table
from wardround.metrics import combine_units
from wardround.tables import Table

MOST_DETAILED = 24  # rows that are shown one by one

Lines = dict[str, list[tuple[float, float]]]  # row -> (round, value)
Curves = dict[str, Lines]  # by metric


@dataclass(frozen=True)
class RunGroup:
    """Runs with one set of tables. kind: run, runs or comparison.

    runs: those shown in detail; methods: of every row; sheet: the scores of all rows; cross_site: each
    client's own model at the other clients; curves: mean validation score over replicates; replicates: all
    runs of every row. Of a comparison: the paper's preset it is of, seeds, the number of its cells and of
    those done, and cell title -> reason of the failed ones; is_sample: runs holds one cell of every row, and
    there are more.
    """

    title: str
    kind: str
    runs: Sequence[Run]
    methods: Mapping[str, str]
    sheet: Sheet | None = None
    cross_site: Table | None = None
    curves: Curves = field(default_factory=dict)
    seeds: Sequence[int] = ()
    num_cells: int = 0
    num_done: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)
    is_sample: bool = False
    replicates: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    preset: str | None = None

    @property
    def metrics(self) -> list[str]:
        return list(self.sheet.metrics) if self.sheet else []

    @property
    def tested(self) -> str:
        """The word before the name of a score: an evaluation need not be on test cases of a run."""
        return "" if any(run.is_evaluation for run in self.runs) else "test "

    def as_dict(self) -> dict[str, Any]:
        """The score tables as plain values, for JSON."""
        start: dict[str, Any] = {"title": self.title, "kind": self.kind}
        if self.sheet is None:
            return {**start, "tables": []}
        if self.kind == "comparison":
            start |= {"seeds": self.seeds, "cells": self.num_cells, "done": self.num_done}
        return {**start, "tables": [score_table(self.sheet, metric).as_dict() for metric in self.metrics]}


# Runs somebody named


def group_runs(runs: Sequence[Run]) -> RunGroup:
    """Runs as rows of one table, over the metrics that all finished ones have."""
    relabel_twins(runs)
    done = [run for run in runs if run.cases]
    metrics = [
        metric for metric in (done[0].metrics if done else []) if all(metric in run.cases for run in done)
    ]
    sheet, lengths = None, combine_units(run.lengths for run in done)
    if metrics:
        reference = next((run.label for run in done if run.method == "fedavg"), done[0].label)
        held_out = {run.label: run.test.held_out for run in done if run.test is not None}
        rows = set_apart([row_of_run(run) for run in done], held_out)
        said = join_origins(done)
        sheet = Sheet("Runs", rows, reference, metrics, lengths=lengths, partition=said)
    crossed = {run.label: [run.cross_site] for run in done if run.cross_site}
    return RunGroup(
        ", ".join(run.label for run in runs),
        "run" if len(runs) == 1 else "runs",
        runs,
        {run.label: run.method for run in runs},
        sheet=sheet,
        cross_site=keep_personal(cross_site_table(crossed, metrics[0], "Cross-site", lengths))
        if crossed and metrics
        else None,
        curves=average_curves({run.label: [run] for run in runs}) if len(runs) > 1 else {},
        replicates={run.label: [run] for run in runs},
    )


def relabel_twins(runs: Sequence[Run]) -> None:
    """Add the folder to the label of runs that share a name."""
    names = [run.label for run in runs]
    taken: set[str] = set()
    for run in runs:
        if names.count(run.label) > 1:
            run.label = f"{run.label} ({run.folder.name})"
        while run.label in taken:
            run.label += "'"
        taken.add(run.label)


def row_of_run(run: Run) -> RowScores:
    """A run as a row of the tables; only rows with the same data can be paired case by case."""
    evaluate = mapping(run.config.get("evaluate"))
    seed = run.config.get("seed", 42)
    data = fill_defaults(mapping(run.config.get("data")))
    if run.is_evaluation:  # its settings name the data its model was trained on
        data = {"evaluated": run.evaluation.get("data"), "split": run.evaluation.get("split")}
    found: dict[ReplicateKey, Replicate] = {(seed, None): Replicate(seed, None, run.cases)}
    written = json.dumps(data, sort_keys=True, default=str)
    policy, tested = str(evaluate.get("empty_policy", "defined")), str(evaluate.get("model", "best"))
    objective = mapping(run.config.get("objective"))
    return RowScores(run.label, found, data=written, empty_policy=policy, tested=tested, objective=objective)


# A comparison


def group_comparison(found: Comparison) -> RunGroup:
    """A comparison with one run of every row in detail, the first of its seeds."""
    done = [cell for cell in found.cells if cell.is_done]
    first = {cell.row: cell for cell in reversed(done)}
    detailed = [first[label] for label in found.rows if label in first][:MOST_DETAILED]
    several = len(found.facts["seeds"]) * max(1, len(found.facts["folds"])) > 1 or found.facts["held_out"]
    runs = [read_run(cell.folder, cell.title if several else cell.row) for cell in detailed]
    crossed = found.cross_site(found.metrics[0]) if done and found.metrics else None
    titles = {cell.name: cell.title for cell in found.cells}
    return RunGroup(
        found.name,
        "comparison",
        runs,
        {row["label"]: str(row["method"]) for row in found.facts["rows"]},
        sheet=found.sheet if done else None,
        cross_site=None if crossed is None else keep_personal(crossed),
        curves=average_curves(found.runs),
        seeds=found.facts["seeds"],
        num_cells=len(found.cells),
        num_done=len(done),
        failures={titles.get(cell, cell): why for cell, why in found.failures.items()},
        is_sample=bool(several and runs),
        replicates=found.runs,
        preset=found.facts["preset"],
    )


def keep_personal(table: Table) -> Table | None:
    """Rows of methods whose clients end with models of their own; one common model is in the main table."""
    models: dict[str, set[str]] = {}
    for row in table.rows:
        models.setdefault(row[0], set()).add(str(row[2:-1]))
    kept = [row for row in table.rows if len(models[row[0]]) > 1]
    return dataclasses.replace(table, rows=kept) if kept else None


def average_curves(rows: Mapping[str, Sequence[Run]]) -> Curves:
    """The mean over clients and replicates of the first validation metric, by round."""
    metrics = next((run.records.validation_metrics() for runs in rows.values() for run in runs), [])
    if not metrics:
        return {}
    found = average_rows(rows, lambda run: run.records.validation_mean(metrics[0]))
    return {metrics[0]: found} if found else {}


def average_losses(rows: Mapping[str, Sequence[Run]]) -> Lines:
    """The mean over clients and replicates of the total training loss, by round."""
    return average_rows(
        rows, lambda run: [point for p in run.records.losses().get("total", {}).values() for point in p]
    )


def average_rows(
    rows: Mapping[str, Sequence[Run]], points_of: Callable[[Run], Sequence[tuple[float, float]]]
) -> Lines:
    """The mean of all points of a row's runs, round by round; rows without any are left out."""
    found: Lines = {}
    for label, runs in rows.items():
        values: dict[float, list[float]] = {}
        for run in runs:
            for at, value in points_of(run):
                values.setdefault(at, []).append(value)
        if values:
            found[label] = [(at, sum(entry) / len(entry)) for at, entry in sorted(values.items())]
    return found


def first_weights(rows: Mapping[str, Sequence[Run]]) -> dict[str, Series]:
    """The aggregation weights of every row's first run, where its method has any."""
    first = {label: runs[0] for label, runs in list(rows.items())[:MOST_DETAILED] if runs}
    found = {label: run.records.series("weights") for label, run in first.items()}
    return {label: series for label, series in found.items() if series}
