"""Several runs beside each other: the headline, in words, in numbers and in pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from wardround.comparison.groups import Group
from wardround.comparison.runs import Run
from wardround.comparison.scores import RowScores, Sheet, statistics_of
from wardround.comparison.statistics import CaseKey
from wardround.comparison.tables import score_table, significance_table
from wardround.engine.judging.result_tables import client_table
from wardround.metrics import METRICS
from wardround.reporting.charts import legend, line_chart, places_of
from wardround.reporting.html import Html, details, plain, section, tag
from wardround.reporting.sections import SUMS, badness, case_label, has_regions, limits
from wardround.reporting.strips import Spot, strip_chart
from wardround.reporting.tabular import table_html
from wardround.reporting.verdict import in_words
from wardround.tables import Table


def headline(group: Group, prefix: str) -> Html:
    """The result: a sentence, figures, and a table for every metric."""
    sheet = group.sheet
    if sheet is None:
        waiting = tag("p", "There is no test result yet.", class_="lead")
        return section(f"{prefix}-result", "Result", *group.notes, waiting)
    tested = {metric: statistics_of(sheet, metric) for metric in group.metrics}
    verdict = in_words(sheet, tested[group.metrics[0]], group.methods, group.tested)
    parts: list[Html] = [tag("p", verdict, class_="verdict")]
    parts.append(figures(group, sheet))
    parts += group.notes
    if group.kind == "run" and group.runs[0].test is not None:
        title = capital(f"{group.tested}scores of each client")
        table = client_table(group.runs[0].test, group.metrics, title, sheet.lengths)
        parts.append(table_html(table, fixed=SUMS))
    else:
        for metric in group.metrics:
            title = capital(f"{group.tested}{METRICS[metric].title_in(sheet.lengths)}")
            parts.append(table_html(titled(score_table(sheet, metric), title)))
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
    rows = [("clients", str(len(clients))), (f"{group.tested}cases", str(len(cases)))]
    trained = [run for run in group.runs if not run.is_evaluation]
    if trained:
        rows.append(("rounds", span([run.rounds for run in trained])))
    if group.kind == "run":
        rows += of_one(group.runs[0])
    else:
        rows.append(("runs" if trained else "evaluations", str(group.facts.get("done", len(group.runs)))))
    return tag("dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in rows], class_="figures")


def of_one(run: Run) -> list[tuple[str, str]]:
    """What is known of a single run, or of a single evaluation, and of no group."""
    if run.is_evaluation:
        chosen = plain(str(run.evaluation.get("split", "")), 20)
        return [("split", chosen), ("could not be judged", str(len(run.not_judged())))]
    return [("seed", str(run.config.get("seed", "")))]


def span(counts: Sequence[int]) -> str:
    """
    >>> span([8, 8]), span([10, 8])
    ('8', '8 to 10')
    """
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def beside(group: Group, prefix: str) -> Html:
    """All rows in one picture: how they learned, and every case."""
    sheet = group.sheet
    lengths = "" if sheet is None else sheet.lengths
    charts = [
        line_chart(
            f"Validation {METRICS[metric].title_in(lengths)}, mean over clients",
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
        many = has_regions(key for row in sheet.rows for part in row.scores(metric) for key in part)
        what = METRICS[metric].title_in(lengths)
        title = capital(f"{group.tested}{what} of every case{' and region' * many}")
        chart = strip_chart(title, rows, within=limits(metric), worst=badness(metric), class_="wide")
        charts += [chart, legend(clients, places)]
    lead = f"How the rows learned, and how they do on every single {group.tested}case (averaged over seeds)."
    return section(f"{prefix}-beside", "Side by side", *charts, lead=lead) if charts else Html("")


def spots_of(row: RowScores, metric: str, places: Mapping[str, int]) -> list[Spot]:
    """Every case once, its mean over replicates."""
    sums: dict[CaseKey, list[float]] = {}
    for part in row.scores(metric):
        for key, value in part.items():
            if not math.isnan(value):
                sums.setdefault(key, []).append(value)
    many = has_regions(sums)
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
