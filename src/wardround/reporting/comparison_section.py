"""The sections about a group of runs: the result, all rows side by side, and what they cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from wardround.comparison.costs import cost_table, measure_costs
from wardround.comparison.groups import RunGroup, average_losses, first_weights
from wardround.comparison.headline import Name, Strong, describe_headline
from wardround.comparison.published import published_table
from wardround.comparison.runs import Run
from wardround.comparison.scores import (
    RowScores,
    Sheet,
    Statistics,
    compute_statistics,
    metric_loss,
    summarise_row,
)
from wardround.comparison.statistics import CaseKey
from wardround.comparison.tables import hospital_table, score_table, significance_table
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.result_tables import client_table
from wardround.metrics import METRICS
from wardround.papers import presets as papers
from wardround.reporting.charts import (
    area_chart,
    draw_legend,
    line_chart,
    number_labels,
    scatter_chart,
)
from wardround.reporting.html import Html, details, join, name, plain, section, tag
from wardround.reporting.sections import SUMS, case_label, has_regions, limits
from wardround.reporting.strips import Spot, strip_chart
from wardround.reporting.tabular import table_html
from wardround.tables import Table, shown

FIGURES = {  # the section it is in, and what it is
    "scores": ("beside", "scores of every client"),
    "curves": ("beside", "learning curves"),
    "losses": ("beside", "training losses"),
    "weights": ("beside", "aggregation weights"),
    "cost": ("cost", "score against time"),
    "cases": ("panel", "the same cases"),
    "uncertainty": ("panel", "their uncertainty"),
    "features": ("panel", "their features"),
}


def result_section(group: RunGroup, prefix: str) -> Html:
    """The result: a sentence, figures, and a table for every metric."""
    sheet, notices = group.sheet, draw_notices(group)
    if group.kind == "run" and group.runs[0].test is not None and group.runs[0].test.aggregates:
        return sums_section(group, prefix, group.runs[0].test, notices)
    if sheet is None:
        waiting = tag("p", "There is no test result yet.", class_="lead")
        return section(f"{prefix}-result", "Result", *notices, waiting)
    tested = {metric: compute_statistics(sheet, metric) for metric in group.metrics}
    verdict = describe_result(sheet, tested[group.metrics[0]], group.methods, group.tested)
    parts = [tag("p", verdict, class_="verdict"), point_to_figure(group, prefix), draw_figures(group, sheet)]
    parts += notices
    if group.kind == "run" and group.runs[0].test is not None:
        title = capitalise(f"{group.tested}scores of each client")
        table = client_table(group.runs[0].test, group.metrics, title, sheet.lengths, group.runs[0].remarks)
        parts.append(table_html(table, fixed=SUMS))
    else:
        for metric in group.metrics:
            title = capitalise(f"{group.tested}{METRICS[metric].title_in(sheet.lengths)}")
            parts.append(table_html(retitle(score_table(sheet, metric), title)))
            by_client = retitle(hospital_table(sheet, metric), f"{title} by client")
            parts.append(details(by_client.title, table_html(by_client)))
            printed = published_table(sheet, metric)
            if printed is not None:
                title = f"{METRICS[metric].title_in(sheet.lengths)}, printed and measured"
                parts.append(table_html(retitle(printed, title)))
            if len(sheet.rows) > 1:
                tests = significance_table(sheet, tested[metric])
                title = f"{METRICS[metric].label} against {plain(sheet.reference)}"
                parts.append(details(f"Tests: {title}", table_html(retitle(tests, title))))
    if group.cross_site is not None:
        parts.append(table_html(group.cross_site))
    return section(f"{prefix}-result", "Result", *parts)


def sums_section(group: RunGroup, prefix: str, test: Evaluation, notices: Sequence[Html]) -> Html:
    """The result of a run some of whose hospitals sent sums over cases, no rows: all of it from summaries."""
    run, first = group.runs[0], METRICS[group.runs[0].metrics[0]]
    overall, worst = test.overall[first.name], test.overall[first.name].worst
    verdict = join(
        f"Mean {group.tested}{first.label} over {overall.num_clients} clients: ",
        tag("strong", shown(overall.mean)), ".",
        None if worst is None else [" The weakest is ", name(worst.client), f", {shown(worst.value)}."],
    )  # fmt: skip
    cases = sum(test.summarise_means(first.name, client).num for client in test.clients[first.name])
    rows = [("clients", str(overall.num_clients + overall.num_left_out)), ("cases", str(cases))]
    figures = tag(
        "dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in rows], class_="figures"
    )
    title = capitalise(f"{group.tested}scores of each client")
    metrics = [metric for metric in run.metrics if metric in test.clients]
    table = table_html(client_table(test, metrics, title, run.lengths, run.remarks), fixed=SUMS)
    return section(
        f"{prefix}-result", "Result", tag("p", verdict, class_="verdict"), figures, *notices, table
    )


def retitle(table: Table, title: str) -> Table:
    return dataclasses.replace(table, title=title)


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


# Figures and notices


def point_to_figure(group: RunGroup, prefix: str) -> Html | None:
    """Where the picture is that a paper's figure shows, on this page and beside it, and what was guessed."""
    preset = papers.load(group.preset) if group.preset else None
    if preset is None or not preset.figures:
        return None
    links = [
        [", ", tag("a", FIGURES[kind][1], href=f"#{prefix}-{FIGURES[kind][0]}"), " (",
         tag("code", f"figures/{kind}.png"), ")"]
        for kind in preset.figures
    ]  # fmt: skip
    where = [part for link in links for part in link][1:]
    return tag("p", f"{preset.table} of the paper: ", where, " ".join([".", *preset.published.notes]))


def draw_figures(group: RunGroup, sheet: Sheet) -> Html:
    """The numbers of clients, cases, rounds and runs."""
    metric = group.metrics[0]
    cases = {(key.client, key.case) for row in sheet.rows for part in row.scores(metric) for key in part}
    rows = [("clients", str(len(sheet.clients(metric)))), (f"{group.tested}cases", str(len(cases)))]
    trained = [run for run in group.runs if not run.is_evaluation]
    if trained:
        rows.append(("rounds", format_range([run.rounds for run in trained])))
    if group.kind != "run":
        rows.append(("runs" if trained else "evaluations", str(group.num_done or len(group.runs))))
    elif trained:
        rows.append(("seed", str(group.runs[0].config.get("seed", ""))))
    else:
        run = group.runs[0]
        rows.append(("split", plain(str(run.evaluation.get("split", "")), 20)))
        rows.append(("could not be evaluated", str(len(run.failed_cases()))))
    return tag("dl", [tag("div", tag("dt", key), tag("dd", value)) for key, value in rows], class_="figures")


def format_range(counts: Sequence[int]) -> str:
    """
    >>> format_range([8, 8]), format_range([10, 8])
    ('8', '8 to 10')
    """
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def draw_notices(group: RunGroup) -> list[Html]:
    """What a reader must know first: missing cells of a comparison, or notes of an evaluation."""
    if group.kind != "comparison":
        notices = [draw_notes(run, with_name=len(group.runs) > 1) for run in group.runs]
        return [notice for notice in notices if notice]
    if group.num_done == group.num_cells:
        return []
    reasons = [tag("li", name(title, 80), ": ", why) for title, why in group.failures.items()]
    text = f"{group.num_done} of {group.num_cells} cells are done; the tables show these."
    return [
        tag("div", tag("p", text), tag("ul", reasons) if reasons else None, class_="notice", role="status")
    ]


def draw_notes(run: Run, *, with_name: bool) -> Html:
    """What an evaluation noted about its cases and its model."""
    notes = run.notes()
    failed = len(run.failed_cases())
    if failed:
        notes.append(f"{failed} {'cases' if failed > 1 else 'case'} could not be evaluated; see below.")
    if not notes:
        return Html("")
    whose = tag("p", name(run.label), ":") if with_name else None
    return tag(
        "div", whose, tag("ul", [tag("li", text) for text in notes], class_="warnings"), class_="notice",
        role="status",
    )  # fmt: skip


# The result in words


def describe_result(
    sheet: Sheet, statistics: Statistics, methods: Mapping[str, str], tested: str = "test "
) -> Html:
    """The headline; names are set apart from the text around them."""

    def draw(part: str) -> Html | str:
        if isinstance(part, Name):
            return name(part)
        return tag("strong", part) if isinstance(part, Strong) else part

    return join([draw(part) for part in describe_headline(sheet, statistics, methods, tested)])


# Side by side


def side_by_side_section(group: RunGroup, prefix: str) -> Html:
    """All rows in one picture: their learning curves, losses, weights, and every case."""
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
        places = number_labels(clients)
        rows = {row.label: spots_of(row, metric, places) for row in sheet.rows if row.replicates}
        many = has_regions(key for row in sheet.rows for part in row.scores(metric) for key in part)
        what = METRICS[metric].title_in(lengths)
        if group.preset and "scores" in papers.load(group.preset).figures:
            means = {row.label: client_spots(row, metric, places) for row in sheet.rows if row.replicates}
            title = capitalise(f"{group.tested}{what} of every client")
            charts.append(strip_chart(title, means, worst=metric_loss(metric), class_="wide"))
        title = capitalise(f"{group.tested}{what} of every case{' and region' * many}")
        chart = strip_chart(title, rows, within=limits(metric), worst=metric_loss(metric), class_="wide")
        charts += [chart, draw_legend(clients, places)]
    charts += draw_training(group)
    lead = (
        f"Learning curves of all rows, and their scores on every {group.tested}case (mean over seeds; the "
        "line is the mean of the dots)."
    )
    return section(f"{prefix}-beside", "Side by side", *charts, lead=lead) if charts else Html("")


def draw_training(group: RunGroup) -> list[Html]:
    """The training loss of all rows in one chart, and the aggregation weights of each in its own."""
    losses, weights = average_losses(group.replicates), first_weights(group.replicates)
    parts = []
    if len(losses) > 1:
        note = "Rows with different objectives minimise different things: compare shapes, not heights."
        parts.append(line_chart("Training loss, mean over clients", losses, with_table=True, class_="wide"))
        parts.append(tag("p", note, class_="table-note"))
    if len(weights) > 1:
        clients = sorted({client for series in weights.values() for client in series})
        places = number_labels(clients)
        charts = [
            area_chart(f"Weights: {plain(label)}", series, places=places, with_table=False, with_legend=False)
            for label, series in weights.items()
        ]
        which = " (the first seed)" * any(len(runs) > 1 for runs in group.replicates.values())
        parts.append(tag("h4", f"Aggregation weights by round{which}"))
        parts += [tag("div", charts, class_="charts"), draw_legend(clients, places)]
    return parts


def cost_section(group: RunGroup, prefix: str) -> Html:
    """The score against the time of a round, and both with the traffic as a table."""
    sheet = group.sheet
    costs = measure_costs(group.replicates, sheet) if sheet is not None else []
    if sheet is None or len(costs) < 2:
        return Html("")
    title = METRICS[group.metrics[0]].title_in(sheet.lengths)
    spots = {cost.label: (cost.seconds.mean, cost.score.mean) for cost in costs}
    axes = ("seconds a round", f"mean {group.tested}{title}")
    chart = scatter_chart(
        f"{title} against the time of a round", spots, axes=axes, within=limits(group.metrics[0])
    )
    table = retitle(cost_table(costs, sheet), "Time and traffic of a round")
    lead = "What a row reaches, and what a round of it takes."
    return section(f"{prefix}-cost", "Time and traffic", chart, table_html(table), lead=lead)


def client_spots(row: RowScores, metric: str, places: Mapping[str, int]) -> list[Spot]:
    """Every client once, its mean over cases and replicates."""
    means = summarise_row(row, metric, list(places)).clients
    return [Spot(means[client].mean, client, place) for client, place in places.items()]


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
