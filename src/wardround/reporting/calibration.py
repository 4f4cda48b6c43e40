"""Confidence and uncertainty: what calibration.json says, for a reader who decides what to review."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wardround.comparison.runs import Run, mapping, number
from wardround.reporting.charts import (
    Axis,
    Lines,
    axis_titles,
    choose_style,
    describe_lines,
    draw_curve,
    draw_dot,
    draw_figure,
    draw_grid,
    draw_legend,
    fit_axis,
    format_number,
    number_labels,
    reliability_chart,
    stretch,
)
from wardround.reporting.html import Html, plain, section, tag
from wardround.reporting.tabular import plain_table
from wardround.uncertainty.quality import risk_coverage

ALL = "all clients"
MOST_DOTS = 40  # of a line


def confidence_section(run: Run, prefix: str) -> Html:
    """Reliability before and after the temperature, risk against coverage, and the numbers by client."""
    found = run.calibration
    overall = mapping(found.get("overall"))
    if not overall:
        return Html("")
    charts = [part for part in (draw_reliability(found), draw_risks(found)) if part]
    drawn = tag("div", charts, class_="charts") if charts else None
    parts = [drawn, errors_table(found), cases_table(found), quantiles_line(found)]
    lead = describe_calibration(found, overall)
    return section(f"{prefix}-confidence", "Confidence and uncertainty", *parts, level=3, lead=lead)


def describe_calibration(found: Mapping[str, Any], overall: Mapping[str, Any]) -> str:
    temperature, note = number(found.get("temperature")), found.get("temperature_note")
    before, after = (number(mapping(overall.get(when)).get("ece")) for when in ("before", "after"))
    if note:
        text = f"No temperature was fitted: {plain(str(note), 200)}."
    else:
        away = "overconfident" if temperature > 1 else "underconfident"
        away = "well calibrated" if abs(temperature - 1) < 0.02 else away
        text = (
            f"On validation cases the model is {away}: temperature {format_number(temperature)}. On test "
            f"cases it changes the calibration error from {format_number(before)} to {format_number(after)}."
        )
    correlation = number(overall.get("spearman"))
    if math.isfinite(correlation):
        text += f" Rank correlation of a case's uncertainty with its Dice: {correlation:.2f} (best: -1)."
    return text


def draw_reliability(found: Mapping[str, Any]) -> Html | None:
    lines = {}
    names = {"before": "as trained", "after": "with temperature"}
    for when, label in names.items():
        bins = mapping(found.get("reliability")).get(when)
        points = [
            (number(mapping(entry).get("confidence")), number(mapping(entry).get("accuracy")))
            for entry in (bins if isinstance(bins, list) else [])
        ]
        points = [(x, y) for x, y in points if 0 <= x <= 1 and 0 <= y <= 1]
        if points:
            lines[label] = points
    if not lines:
        return None
    words = "Share of correct voxels, by confidence of the model: "
    axes = ("confidence in the predicted class", "share of correct voxels")
    title = "Accuracy by confidence"
    return reliability_chart(title, lines, number_labels(list(lines)), axes=axes, words=words)


def known_cases(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Uncertainty and risk (1 - Dice) of every test case that has both."""
    listed = found.get("cases")
    rows = [mapping(row) for row in (listed if isinstance(listed, list) else [])]
    pairs = [(number(row.get("uncertainty")), 1 - number(row.get("dice"))) for row in rows]
    return [(u, r) for u, r in pairs if math.isfinite(u) and math.isfinite(r)]


def draw_risks(found: Mapping[str, Any]) -> Html | None:
    """The mean risk of the most confident cases, against how many are kept."""
    pairs = known_cases(found)
    if len(pairs) < 2:
        return None
    uncertainty, risk = [u for u, _ in pairs], [r for _, r in pairs]
    mean = sum(risk) / len(risk)
    lines = {
        "by uncertainty": points(risk_coverage(uncertainty, risk)),
        "best possible order": points(risk_coverage(risk, risk)),
        "any order": [(0.0, mean), (1.0, mean)],
    }
    words = "Share of cases kept without review, against 1 - Dice of those kept: "
    return xy_chart("Remaining error when the most uncertain cases are reviewed", lines, words)


def points(found: tuple[Any, Any]) -> list[tuple[float, float]]:
    return [(float(coverage), float(risk)) for coverage, risk in zip(*found, strict=True)]


def xy_chart(title: str, lines: Lines, words: str) -> Html:
    """Lines over the share of cases; the vertical axis starts at 0."""
    x = Axis(0.0, 1.0, [0, 0.25, 0.5, 0.75, 1])
    y = fit_axis([0.0, *(value for line in lines.values() for _, value in line)], within=(0.0, math.inf))
    places = number_labels(list(lines))
    curves = [draw_curve(line, x, y, choose_style(places[label])) for label, line in lines.items()]
    dots = []
    line = list(next(iter(lines.values())))
    for at, value in line[:: math.ceil(len(line) / MOST_DOTS) or 1]:
        tooltip = f"keep {100 * at:.0f} %: {format_number(value)}"
        dots.append(draw_dot(x.percent(at), y.percent(value), choose_style(0), tooltip))
    axes = axis_titles("coverage: share of cases kept without review", "risk: mean 1 - Dice of those kept")
    plot, legend = [*draw_grid(x, y), *axes, stretch(*curves), *dots], draw_legend(list(lines), places)
    words += describe_lines(lines)
    return draw_figure(title, words, *plot, height=280, below=[legend], class_="square")


def rows_of(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    clients = [(str(name), mapping(entry)) for name, entry in mapping(found.get("clients")).items()]
    return [*clients, (ALL, mapping(found.get("overall")))]


def whole(value: Any) -> int:
    found = number(value)
    return int(found) if math.isfinite(found) else 0


def errors_table(found: Mapping[str, Any]) -> Html:
    columns = ["client", "ECE", "ECE after", "adaptive", "adaptive after", "Brier", "Brier after", "voxels"]
    rows = []
    for name, entry in rows_of(found):
        sides = [mapping(entry.get(when)) for when in ("before", "after")]
        errors = [number(side.get(key)) for key in ("ece", "adaptive_ece", "brier") for side in sides]
        rows.append([name, *errors, whole(sides[0].get("voxels"))])
    note = (
        "ECE: mean distance between confidence and accuracy, in 15 bins of equal width (adaptive: of equal "
        "mass). Only voxels around true and predicted structures: the rest is trivially confident."
    )
    title = "Calibration error on test cases, before and after temperature scaling"
    return plain_table(title, columns, rows, note, fixed=(ALL,))


def cases_table(found: Mapping[str, Any]) -> Html:
    columns = ["client", "cases", "rank correlation", "AURC", "best", "any order", "error overlap"]
    keys = ("spearman", "aurc", "aurc_best", "aurc_chance", "error_overlap")
    rows = [
        [name, whole(entry.get("num_cases")), *(number(entry.get(key)) for key in keys)]
        for name, entry in rows_of(found)
    ]
    note = (
        "AURC: area under the curve of 1 - Dice against the share of cases kept, most confident first; lower "
        "is better. Error overlap: Dice of the wrong voxels with as many most uncertain ones."
    )
    return plain_table("Does uncertainty find the errors?", columns, rows, note, fixed=(ALL,))


def quantiles_line(found: Mapping[str, Any]) -> Html | None:
    """The values `predict` compares a new scan with."""
    lines = []
    for kind, entry in mapping(found.get("quantiles")).items():
        case = mapping(mapping(entry).get("case"))
        low, middle, high = (number(case.get(key)) for key in ("q05", "q50", "q95"))
        if math.isfinite(middle):
            lines.append(
                f"{plain(str(kind), 20)}: {', '.join(map(format_number, (low, middle, high)))} "
                f"of {format_number(number(case.get('count')))} cases"
            )
    if not lines:
        return None
    text = "Case uncertainty of validation cases (5 %, 50 %, 95 % quantile). " + "; ".join(lines) + ". "
    return tag("p", text + "predict flags a new scan above the last one.", class_="muted")
