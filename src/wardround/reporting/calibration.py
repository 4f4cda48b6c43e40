"""Is it sure when it should be? What calibration.json says, for a reader who has to decide what to check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wardround.comparison.runs import Run, mapping, number
from wardround.reporting.charts import (
    Axis,
    Lines,
    axis_of,
    axis_titles,
    curve,
    described,
    figure,
    grid,
    legend,
    percent,
    places_of,
    reliability_chart,
    short,
    stretched,
    style_of,
)
from wardround.reporting.html import Html, plain, section, tag
from wardround.reporting.tabular import Cell, table_html
from wardround.tables import Table
from wardround.uncertainty.quality import risk_coverage

ALL = "all clients"


def sureness(run: Run, prefix: str) -> Html:
    """Reliability before and after the temperature, risk against coverage, and the numbers by client."""
    found = run.calibration
    overall = mapping(found.get("overall"))
    if not overall:
        return Html("")
    charts = [part for part in (reliability(found), risks(found)) if part]
    parts = [tag("div", charts, class_="charts") if charts else None, errors_table(found), cases_table(found)]
    return section(
        f"{prefix}-sure",
        "Is it sure when it should be?",
        *parts,
        quantiles_line(found),
        level=3,
        lead=lead(found, overall),
    )


def lead(found: Mapping[str, Any], overall: Mapping[str, Any]) -> str:
    temperature, note = number(found.get("temperature")), found.get("temperature_note")
    before, after = (number(mapping(overall.get(when)).get("ece")) for when in ("before", "after"))
    if note:
        said = f"No temperature was fitted: {plain(str(note), 200)}."
    else:
        away = (
            "about right" if abs(temperature - 1) < 0.02 else "too sure" if temperature > 1 else "too unsure"
        )
        said = (
            f"On validation cases the model is {away}: temperature {short(temperature)}. On test cases "
            f"that changes the calibration error from {short(before)} to {short(after)}."
        )
    unsure = number(overall.get("spearman"))
    if math.isfinite(unsure):
        said += f" Rank correlation of a case's uncertainty with its Dice: {unsure:.2f} (best: -1)."
    return said


def reliability(found: Mapping[str, Any]) -> Html | None:
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
    words = "Share of voxels that were right, by how sure the model was: "
    axes = ("how sure of its class the model was", "share of voxels that are right")
    title = "How often a sure voxel is right"
    return reliability_chart(title, lines, places_of(list(lines)), axes=axes, words=words)


def known_cases(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Uncertainty and risk (1 - Dice) of every test case that has both."""
    listed = found.get("cases")
    rows = [mapping(row) for row in (listed if isinstance(listed, list) else [])]
    pairs = [(number(row.get("uncertainty")), 1 - number(row.get("dice"))) for row in rows]
    return [(u, r) for u, r in pairs if math.isfinite(u) and math.isfinite(r)]


def risks(found: Mapping[str, Any]) -> Html | None:
    """The mean risk of the surest cases, against how many are kept."""
    pairs = known_cases(found)
    if len(pairs) < 2:
        return None
    unsure, risk = [u for u, _ in pairs], [r for _, r in pairs]
    mean = sum(risk) / len(risk)
    lines = {
        "by uncertainty": points(risk_coverage(unsure, risk)),
        "best possible order": points(risk_coverage(risk, risk)),
        "any order": [(0.0, mean), (1.0, mean)],
    }
    return xy_chart(
        "What is left wrong if the most uncertain cases are checked by hand",
        lines,
        "Share of cases kept without a look, against 1 - Dice of those kept: ",
    )


def points(found: tuple[Any, Any]) -> list[tuple[float, float]]:
    return [(float(coverage), float(risk)) for coverage, risk in zip(*found, strict=True)]


def xy_chart(title: str, lines: Lines, words: str) -> Html:
    """Lines over the share of cases; the vertical axis starts at 0."""
    x = Axis(0.0, 1.0, [0, 0.25, 0.5, 0.75, 1])
    y = axis_of([0.0, *(value for line in lines.values() for _, value in line)], within=(0.0, math.inf))
    places = places_of(list(lines))
    curves = [curve(line, x, y, style_of(places[label])) for label, line in lines.items()]
    dots = [
        tag(
            "circle",
            tag("title", f"keep {100 * at:.0f} %: 1 - Dice is {short(value)}"),
            cx=percent(x.percent(at)), cy=percent(100 - y.percent(value)), r="3",
            class_=f"dot {style_of(0)}",
        )
        for at, value in thinned(next(iter(lines.values())))
    ]  # fmt: skip
    return figure(
        title,
        words + described(lines),
        *grid(x, y),
        *axis_titles("share of cases kept without a look", "mean of 1 - Dice of those kept"),
        stretched(*curves),
        *dots,
        height=280,
        below=[legend(list(lines), places)],
        class_="square",
    )


def thinned(line: Sequence[tuple[float, float]], most: int = 40) -> list[tuple[float, float]]:
    return list(line)[:: max(1, math.ceil(len(line) / most))]


def rows_of(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    clients = [(str(name), mapping(entry)) for name, entry in mapping(found.get("clients")).items()]
    return [*clients, (ALL, mapping(found.get("overall")))]


def whole(value: Any) -> int:
    found = number(value)
    return int(found) if math.isfinite(found) else 0


def summed_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str) -> Html:
    """The row of all clients stays at the end however the others are sorted."""
    filled = [[Cell(short(v), v) if isinstance(v, float) else v for v in row] for row in rows]
    return table_html(Table(title, columns, filled, note), fixed=(ALL,))


def errors_table(found: Mapping[str, Any]) -> Html:
    columns = ["client", "ECE", "ECE after", "adaptive", "adaptive after", "Brier", "Brier after", "voxels"]
    rows = []
    for name, entry in rows_of(found):
        sides = [mapping(entry.get(when)) for when in ("before", "after")]
        errors = [number(side.get(key)) for key in ("ece", "adaptive_ece", "brier") for side in sides]
        rows.append([name, *errors, whole(sides[0].get("voxels"))])
    note = (
        "ECE: mean distance between how sure the model was of its class and how often it was right, 15 bins "
        "of equal width (adaptive: of equal mass). Voxels around true and predicted structures only, since "
        "everybody is sure of the rest."
    )
    title = "Calibration error on test cases, before and after temperature scaling"
    return summed_table(title, columns, rows, note)


def cases_table(found: Mapping[str, Any]) -> Html:
    columns = ["client", "cases", "rank correlation", "AURC", "best", "any order", "error overlap"]
    keys = ("spearman", "aurc", "aurc_best", "aurc_chance", "error_overlap")
    rows = [
        [name, whole(entry.get("num_cases")), *(number(entry.get(key)) for key in keys)]
        for name, entry in rows_of(found)
    ]
    note = (
        "AURC: area under the curve of 1 - Dice against the share of cases kept, surest first; lower "
        "is better. Error overlap: Dice of the wrong voxels with as many most uncertain ones."
    )
    return summed_table("Does uncertainty find what is wrong?", columns, rows, note)


def quantiles_line(found: Mapping[str, Any]) -> Html | None:
    """What `predict` compares a new scan with."""
    lines = []
    for kind, entry in mapping(found.get("quantiles")).items():
        case = mapping(mapping(entry).get("case"))
        low, middle, high = (number(case.get(key)) for key in ("q05", "q50", "q95"))
        if math.isfinite(middle):
            lines.append(
                f"{plain(str(kind), 20)}: {short(low)}, {short(middle)}, {short(high)} "
                f"of {short(number(case.get('count')))} cases"
            )
    if not lines:
        return None
    text = "Case uncertainty of validation cases (5 %, 50 %, 95 % quantile). " + "; ".join(lines) + ". "
    return tag("p", text + "A new scan beyond the last is pointed out by predict.", class_="muted")
