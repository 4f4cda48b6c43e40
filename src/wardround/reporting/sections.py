"""One run in sections: curves, weights, losses, cases, pictures, calibration, traffic, trouble, data.

What to do next is in advice.py, what was chosen by the data in choices.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wardround.comparison.runs import Run, Series, mapping, number, validation_of
from wardround.comparison.scores import metric_loss
from wardround.comparison.statistics import CaseKey
from wardround.data.fingerprint.histogram import find_quantile
from wardround.engine.judging.result_tables import client_table
from wardround.metrics import METRICS
from wardround.reporting.advice import next_steps
from wardround.reporting.calibration import confidence_section
from wardround.reporting.charts import area_chart, format_number, line_chart, number_labels, reliability_chart
from wardround.reporting.choices import configuration, postprocessing
from wardround.reporting.html import Html, details, name, section, tag
from wardround.reporting.overlays import Encoded, gallery
from wardround.reporting.strips import Spot, strip_chart
from wardround.reporting.tabular import NumberCell, facts_table, in_words, plain_table, table_html

MOST_SMALL_CHARTS = 12
MOST_LINES = 40  # of refused replies and warnings
WORST_CASES = 6
SUMS = ("mean", "SD between clients", "weighted mean", "worst client")


def run_sections(
    run: Run, prefix: str, pictures: Mapping[str, Sequence[Encoded]], *, with_scores: bool = True
) -> list[Html]:
    """Everything about one run, in reading order."""
    places = number_labels(run.clients)
    parts = [
        state(run),
        next_steps(run, prefix),
        scores(run, prefix) if with_scores else Html(""),
        curves(run, prefix, places),
        weights(run, prefix, places),
        losses(run, prefix, places),
        cases(run, prefix, places),
        gallery(f"{prefix}-pictures", pictures, temperature=number(run.calibration.get("temperature"))),
        calibration(run, prefix, places),
        confidence_section(run, prefix),
        traffic(run, prefix, places),
        failed_cases(run, prefix) if run.is_evaluation else trouble(run, prefix),
        heterogeneity(run, prefix, places),
        postprocessing(run, prefix),
        configuration(run, prefix),
    ]
    return [part for part in parts if part]


def state(run: Run) -> Html:
    """How far a run is that has not finished."""
    done = len(run.records)
    if run.status == "done":
        return Html("")
    words = "was stopped" if run.status == "stopped" else "is running, or was interrupted,"
    text = f"This run {words} after round {done} of {run.rounds}; there are no test scores yet."
    return tag("p", text, class_="notice", role="status")


def scores(run: Run, prefix: str) -> Html:
    if run.test is None:
        return Html("")
    metrics = [metric for metric in run.metrics if metric in run.test.clients]
    if run.is_evaluation:
        table = client_table(run.test, metrics, "Scores of each client", run.lengths, run.remarks)
        return section(f"{prefix}-scores", "Scores", table_html(table, fixed=SUMS), level=3)
    table = client_table(run.test, metrics, "Test scores of each client", run.lengths, run.remarks)
    best = run.result.get("best_round")
    chosen = "" if best is None else f" The best round on validation cases was round {best} of {run.rounds}."
    tested = {"best": "Tested: that round's model.", "last": "Tested: the last round's model."}
    lead = chosen + " " + tested.get(str(run.result.get("tested_model")), "")
    return section(
        f"{prefix}-scores", "Test scores", table_html(table, fixed=SUMS), level=3, lead=lead.strip()
    )


def limits(metric: str) -> tuple[float, float]:
    """Where values of a metric can lie."""
    entry = METRICS[metric]
    if entry.unit == "" and entry.higher_is_better:
        return (0.0, 1.0)
    return (0.0, math.inf) if entry.higher_is_better is False else (-math.inf, math.inf)


def curves(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """Validation scores by client and round."""
    best = run.result.get("best_round")
    charts = [
        line_chart(
            f"Validation {METRICS[metric].title_in(run.lengths)}",
            run.records.validation(metric),
            places=places,
            within=limits(metric),
            mark=None if best is None else (number(best), f"best round {best}"),
            with_table=True,
            class_="wide",
        )
        for metric in run.records.validation_metrics()
        if run.records.validation(metric)
    ]
    lead = "Every client's mean on its validation cases, round by round."
    return section(f"{prefix}-curves", "Learning curves", *charts, level=3, lead=lead) if charts else Html("")


def weights(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """Aggregation weights stacked, then what they were made from."""
    found = run.records.series("weights")
    stacked = [area_chart("Aggregation weights", found, places=places, class_="wide")] if found else []
    ingredients = [
        small_chart(key, series, places)
        for key, series in list(run.records.ingredients().items())[:MOST_SMALL_CHARTS]
    ]
    small = [tag("h4", "Computed from"), tag("div", ingredients, class_="charts")] if ingredients else []
    if not stacked and not small:
        return Html("")
    lead = (
        "The weight of each client in the global model"
        + ("; below, what the method recorded while computing it." if small else ".")
        + (" This method has no such weights." if not stacked else "")
    )
    return section(f"{prefix}-weights", "Aggregation weights", *stacked, *small, level=3, lead=lead)


def small_chart(
    title: str, series: Series, places: Mapping[str, int], *, is_first: bool = False, from_zero: bool = False
) -> Html:
    """A client has one colour on the whole page; other labels have their own, and a legend."""
    are_clients = set(series) <= set(places)
    colours = places if are_clients else number_labels(list(series))
    with_legend = is_first or (len(series) > 1 and not are_clients)
    return line_chart(title, series, places=colours, from_zero=from_zero, with_legend=with_legend)


def losses(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    terms = run.records.losses()
    charts = [
        small_chart("Total loss" if term == "total" else term, series, places, is_first=term == "total")
        for term, series in list(terms.items())[:MOST_SMALL_CHARTS]
    ]
    lead = "What each client minimised, as the mean over its training steps of a round."
    if not charts:
        return Html("")
    return section(f"{prefix}-losses", "Loss terms", tag("div", charts, class_="charts"), level=3, lead=lead)


# Cases


def case_label(key: CaseKey, many_regions: bool) -> str:
    return f"{key.case}, {key.region}" if many_regions else key.case


def has_regions(keys: Iterable[CaseKey]) -> bool:
    """Whether a case has several scores, one a region."""
    return len({key.region for key in keys}) > 1


def cases(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """One dot a case and region, and the worst by name."""
    blocks = []
    several = any(has_regions(run.cases.get(metric, {})) for metric in run.metrics)
    and_region = " and region" if several else ""
    for metric in run.metrics:
        values = run.cases.get(metric, {})
        many = has_regions(values)
        rows = {
            client: [
                Spot(value, case_label(key, many), places.get(client, 0))
                for key, value in values.items()
                if key.client == client and not math.isnan(value)
            ]
            for client in run.clients
        }
        rows = {client: spots for client, spots in rows.items() if spots}
        if rows:
            what = METRICS[metric].title_in(run.lengths)
            title = f"{what if run.is_evaluation else 'Test ' + what} of every case{and_region}"
            blocks.append(
                strip_chart(title, rows, within=limits(metric), worst=metric_loss(metric), class_="wide")
            )
            blocks.append(worst_table(run, metric, many))
    one = "case" if run.is_evaluation else "test case"
    lead = f"One dot is one {one}{and_region}; the line is their mean; the worst of each client is named."
    sums = sums_table(run)
    if not blocks and sums is None:
        return Html("")
    return section(f"{prefix}-cases", "Case by case", *blocks, sums, level=3, lead=lead if blocks else None)


def sums_table(run: Run) -> Html | None:
    """How scores are spread at hospitals that send sums and histograms, no rows."""
    if run.test is None or not run.test.aggregates:
        return None
    rows = []
    for client, one in sorted(run.test.aggregates.items()):
        for region, own in one.scores.items():
            for metric, sums in own.items():
                if metric not in METRICS or sums is None or sums.histogram is None:
                    continue
                levels = [find_quantile([sums.histogram], level) for level in (0.1, 0.5, 0.9)]
                what = region or "mean of its structures"
                rows.append([client, what, METRICS[metric].title_in(run.lengths), sums.num, *levels])
    note = "From histograms of several cases a bin; no row of a case left these hospitals."
    heads = ["client", "structure", "score", "cases", "10 %", "median", "90 %"]
    return plain_table("Scores from sums and histograms", heads, rows, note) if rows else None


def worst_table(run: Run, metric: str, many_regions: bool) -> Html:
    """The cases a person should look at first."""
    values = {key: value for key, value in run.cases[metric].items() if not math.isnan(value)}
    order = sorted(values, key=lambda key: (-metric_loss(metric)(values[key]), key))[:WORST_CASES]
    others = [other for other in run.metrics if other != metric and other in run.cases]
    headings = [METRICS[name].title_in(run.lengths) for name in (metric, *others)]
    rows = []
    for key in order:
        found = [values[key], *(run.cases[other].get(key, math.nan) for other in others)]
        numbers = [NumberCell(format_number(value), value) for value in found]
        rows.append([case_label(key, many_regions), key.client, *numbers])
    table = plain_table("Worst cases", ["case", "client", *headings], rows)
    return details(f"The {len(rows)} worst by {METRICS[metric].label}", table)


# Calibration


def calibration(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """Whether a probability of 0.8 is right in 8 of 10 voxels."""
    lines: dict[str, list[tuple[float, float]]] = {}
    errors: list[list[Any]] = []
    num_low = num_all = 0.0
    for client, files in run.files.items():
        bins = [(n, p, hit) for n, p, hit in files.calibration if n > 0]
        total = sum(n for n, _, _ in bins)
        if bins:
            num_all += total
            num_low += sum(n for n, p, _ in bins if p / n < 0.1)
            lines[client] = [(p / n, hit / n) for n, p, hit in bins]
            gap = sum(abs(p - hit) for _, p, hit in bins) / total
            inner = [(n, p, hit) for n, p, hit in bins if 0.1 <= p / n < 0.9]
            middle = sum(abs(p - hit) for _, p, hit in inner) / max(1.0, sum(n for n, _, _ in inner))
            errors.append([client, gap, middle if inner else math.nan, int(total)])
    if not lines:
        return Html("")
    note = "Mean distance from the diagonal, ten bins; probabilities as trained, without a temperature."
    if num_low > num_all / 2 and all(gap < middle for _, gap, middle, _ in errors):
        note += " Most voxels have a probability below 0.1, which makes the first number small."
    columns = ["client", "all voxels", "between 0.1 and 0.9", "voxels"]
    table = plain_table("Expected calibration error of the foreground", columns, errors, note)
    title = "Reliability of the predicted foreground"
    words = "Share of true foreground by predicted probability: "
    axes = ("predicted probability of foreground", "share that is foreground")
    chart = reliability_chart(title, lines, places, axes=axes, words=words)
    lead = "On the diagonal the model is calibrated; below it the model is overconfident of foreground."
    both = tag("div", chart, table, class_="side-by-side")
    return section(f"{prefix}-calibration", "Calibration", both, level=3, lead=lead)


# Traffic and time


def traffic(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """Bytes and seconds, by round and client."""
    seconds = run.records.exchanged("seconds")
    up, down = (
        {label: [(at, value / 1e6) for at, value in points] for label, points in found.items()}
        for found in map(run.records.exchanged, ("bytes_up", "bytes_down"))
    )
    if not seconds:
        return Html("")
    parts = {
        "Seconds of work per round": seconds,
        "Sent by clients per round (MB)": up,
        "Sent to clients per round (MB)": down,
    }
    charts = [
        small_chart(title, series, places, is_first=place == 0, from_zero=True)
        for place, (title, series) in enumerate(parts.items())
        if series
    ]
    sums = [{c: sum(v for _, v in points) for c, points in part.items()} for part in (up, down, seconds)]
    rows = [
        [client, *(NumberCell(f"{part.get(client, 0.0):,.2f}", part.get(client, 0.0)) for part in sums)]
        for client in sorted(set().union(*sums))
    ]
    table = plain_table("In all rounds", ["client", "sent (MB)", "received (MB)", "seconds of work"], rows)
    wall = sum(number(record.get("seconds")) for record in run.records)
    lead = f"{len(run.records)} rounds took {wall:,.1f} seconds."
    drawn = tag("div", charts, class_="charts")
    return section(f"{prefix}-traffic", "Traffic and time", drawn, table, level=3, lead=lead)


# Refused and lost replies, warnings


def trouble(run: Run, prefix: str) -> Html:
    """Refused and lost replies, and warnings."""
    refused, lost, said = run.records.trouble("refused"), run.records.trouble("lost"), run.records.warnings()
    parts = []
    if said:
        lines = [
            tag("li", text, tag("span", f" ({format_rounds(at)})", class_="muted"))
            for text, at in said.items()
        ]
        parts.append(tag("ul", lines[:MOST_LINES], class_="warnings"))
    for kind, found in (("Refused", refused), ("Lost", lost)):
        if found:
            rows = [
                [NumberCell(str(at), at), *split_task(who), reason] for at, who, reason in found[:MOST_LINES]
            ]
            left = len(found) - len(rows)
            note = f"And {left} more; records.jsonl has them all." if left > 0 else ""
            table = plain_table(f"{kind} replies", ["round", "client", "task", "reason"], rows, note)
            parts.append(table)
    if not parts:
        parts = [tag("p", "No reply was refused or lost, and there were no warnings.", class_="quiet")]
    return section(f"{prefix}-trouble", "Refused updates and warnings", *parts, level=3)


def failed_cases(run: Run, prefix: str) -> Html:
    """Cases an evaluation left out, and why."""
    found = run.failed_cases()
    lines = [tag("li", name(where), ": ", why) for where, why in list(found.items())[:MOST_LINES]]
    left = len(found) - len(lines)
    if left > 0:
        lines.append(tag("li", f"And {left} more; evaluation.json has them all."))
    listed = tag("ul", lines, class_="warnings") if lines else None
    return section(f"{prefix}-failed", "Cases that could not be evaluated", listed, level=3)


def format_rounds(rounds: Sequence[int]) -> str:
    """
    >>> format_rounds([1, 2, 3]), format_rounds([4])
    ('rounds 1 to 3', 'round 4')
    """
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if rounds[-1] - rounds[0] + 1 == len(rounds):
        return f"rounds {rounds[0]} to {rounds[-1]}"
    return f"{len(rounds)} rounds, first {rounds[0]}, last {rounds[-1]}"


def split_task(who: str) -> tuple[str, str]:
    """`train/north` -> north, train."""
    task, _, client = who.partition("/")
    return (client, task) if client else (who, "")


# How the clients differ


def heterogeneity(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """How far the clients' data differ, as far as the run knows."""
    if run.is_evaluation:  # nothing was trained here, so the rest is unknown
        counts = [[client, num_tested(run, client)] for client in run.clients]
        table = plain_table("Cases of each client", ["client", "cases"], counts)
        return section(f"{prefix}-data", "How the clients differ", table, level=3)
    columns = ["client", "training cases", "validation", "test", "foreground", "last weight"]
    clients = sorted({*run.clients, *run.unlabelled})
    rows = [client_row(run, client) for client in clients]
    if run.lacks:
        columns.append("channels absent")
        rows = [[*row, run.lacks.get(client, "")] for row, client in zip(rows, clients, strict=True)]
    note = "Foreground: mean share of a test case."
    if run.unlabelled:
        bare = ", ".join(f"{client} {count}" for client, count in run.unlabelled.items())
        note += f" Training cases without a label: {bare}; they are in no score."
    parts = [plain_table("Cases of each client", columns, rows, note), *foreground_chart(run, places)]
    if run.fingerprint:
        parts.append(fingerprint(run))
    return section(f"{prefix}-data", "How the clients differ", *parts, level=3)


def client_row(run: Run, client: str) -> list[Any]:
    shares = run.files[client].foreground if client in run.files else ()
    mean = sum(shares) / len(shares) if shares else math.nan
    weights = run.records.series("weights").get(client, [])
    counts = [run.num_trained.get(client, "n/a"), num_validation(run, client), num_tested(run, client)]
    return [client, *counts, NumberCell(percent_of(mean), mean), weights[-1][1] if weights else math.nan]


def num_tested(run: Run, client: str) -> int:
    if run.test is not None and client in run.test.aggregates:
        return run.test.summarise_means(run.metrics[0], client).num
    return len({key.case for values in run.cases.values() for key in values if key.client == client})


def foreground_chart(run: Run, places: Mapping[str, int]) -> list[Html]:
    """One dot a test case: how much of it is what we look for."""
    rows = {
        client: [
            Spot(100 * value, f"{client}, case {place}", places.get(client, 0))
            for place, value in enumerate(files.foreground, start=1)
        ]
        for client, files in run.files.items()
        if files.foreground
    }
    title = "Foreground of every test case (%)"
    return [strip_chart(title, rows, within=(0.0, 100.0), class_="wide unnamed")] if rows else []


def percent_of(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{100 * share:.1f} %"


def num_validation(run: Run, client: str) -> int:
    for record in reversed(run.records):
        entry = mapping(mapping(validation_of(record, "loss").get("clients")).get(client))
        if entry:
            return int(number(entry.get("num")) or 0)
    return 0


def fingerprint(run: Run) -> Html:
    """fingerprint.json, if the run has one: client -> fact -> value, or anything else fact by fact."""
    clients = mapping(run.fingerprint.get("clients"))
    if not clients or not all(isinstance(entry, Mapping) for entry in clients.values()):
        found = [(key, in_words(value)) for key, value in run.fingerprint.items()]
        return details("Data fingerprint", facts_table("Data fingerprint", found))
    facts = list(dict.fromkeys(key for entry in clients.values() for key in entry))
    rows = [[client, *(plain_fact(entry.get(key, "")) for key in facts)] for client, entry in clients.items()]
    return plain_table("Data fingerprint", ["client", *facts], rows)


def plain_fact(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else in_words(value)
