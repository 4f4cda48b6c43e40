"""Several runs beside each other: the headline, in words, in numbers and in pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from wardround.metrics import METRICS
from wardround.reporting.comparison import score_table, significance_table
from wardround.reporting.report.charts import legend, line_chart, places_of
from wardround.reporting.report.facts import Run
from wardround.reporting.report.groups import Group
from wardround.reporting.report.html import Html, details, plain, section, tag
from wardround.reporting.report.sections import SUMS, badness, case_label, limits
from wardround.reporting.report.strips import Spot, strip_chart
from wardround.reporting.report.tabular import table_html
from wardround.reporting.report.verdict import in_words
from wardround.reporting.result_tables import client_table
from wardround.reporting.scores import RowScores, Sheet, statistics_of
from wardround.reporting.statistics import CaseKey
from wardround.reporting.tables import Table


def headline(group: Group, prefix: str) -> Html:
    """The result: a sentence, figures, and a table for every metric."""
    sheet = group.sheet
    if sheet is None:
        waiting = tag("p", "There is no test result yet.", class_="lead")
        return section(f"{prefix}-result", "Result", *group.notes, waiting)
    tested = {metric: statistics_of(sheet, metric) for metric in group.metrics}
    parts: list[Html] = [tag("p", in_words(sheet, tested[group.metrics[0]], group.methods), class_="verdict")]
    parts.append(figures(group, sheet))
    parts += group.notes
    if group.kind == "run" and group.runs[0].test is not None:
        table = client_table(group.runs[0].test, group.metrics, "Test scores of each client")
        parts.append(table_html(table, fixed=SUMS))
    else:
        for metric in group.metrics:
            parts.append(table_html(titled(score_table(sheet, metric), f"Test {METRICS[metric].title}")))
            if len(sheet.rows) > 1:
                tests = significance_table(sheet, tested[metric])
                title = f"{METRICS[metric].label} against {plain(sheet.reference)}"
                parts.append(details(f"Tests: {title}", table_html(titled(tests, title))))
    if group.crossed is not None:
        parts.append(table_html(group.crossed))
    return section(f"{prefix}-result", "Result", *parts)


def titled(table: Table, title: str) -> Table:
    return dataclasses.replace(table, title=title)


def figures(group: Group, sheet: Sheet) -> Html:
    """Four numbers one wants to know first."""
    metric = group.metrics[0]
    clients = sheet.clients(metric)
    cases = {(key.client, key.case) for row in sheet.rows for part in row.scores(metric) for key in part}
    run = group.runs[0]
    rows = [
        ("clients", str(len(clients))),
        ("test cases", str(len(cases))),
        ("rounds", str(run.rounds)),
        ("runs" if group.kind != "run" else "seed", count_of(group, run)),
    ]
    return tag("dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in rows], class_="figures")


def count_of(group: Group, run: Run) -> str:
    if group.kind == "run":
        return str(run.config.get("seed", ""))
    return str(group.facts.get("done", len(group.runs)))


def beside(group: Group, prefix: str) -> Html:
    """All rows in one picture: how they learned, and every case."""
    sheet = group.sheet
    charts = [
        line_chart(
            f"Validation {METRICS[metric].title}, mean over clients",
            lines, within=limits(metric), with_table=True, class_="wide",
        )
        for metric, lines in group.curves.items()
        if len(lines) > 1
    ]  # fmt: skip
    if sheet is not None and len(sheet.rows) > 1:
        metric = group.metrics[0]
        clients = sheet.clients(metric)
        places = places_of(clients)
        rows = {row.label: spots_of(row, metric, places) for row in sheet.rows if row.replicates}
        title = f"Test {METRICS[metric].title} of every case"
        chart = strip_chart(title, rows, within=limits(metric), worst=badness(metric), class_="wide")
        charts += [chart, legend(clients, places)]
    lead = "How the rows learned, and how they do on every single test case (averaged over seeds)."
    return section(f"{prefix}-beside", "Side by side", *charts, lead=lead) if charts else Html("")


def spots_of(row: RowScores, metric: str, places: Mapping[str, int]) -> list[Spot]:
    """Every case once, its mean over replicates."""
    sums: dict[CaseKey, list[float]] = {}
    for part in row.scores(metric):
        for key, value in part.items():
            if not math.isnan(value):
                sums.setdefault(key, []).append(value)
    many = len({key.region for key in sums}) > 1
    return [
        Spot(sum(values) / len(values), case_label(key, many), places.get(key.client, 0))
        for key, values in sums.items()
    ]


def plain_facts(group: Group) -> dict[str, Any]:
    """The headline for programs."""
    if group.sheet is None:
        return {"title": group.title, "kind": group.kind, "tables": []}
    tables = [score_table(group.sheet, metric).as_dict() for metric in group.metrics]
    return {"title": group.title, "kind": group.kind, **group.facts, "tables": tables}
