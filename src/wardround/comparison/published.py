"""Printed numbers beside measured ones, and whether the methods come in the paper's order.

Two rows are compared where they were measured on the same cases after the same number of rounds; where every
row has data of its own (5 to 80 clients), any two are. Rows printed as equal have no order. Intervals: cases
resampled within each client, the same ones for every row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.comparison.scores import RowScores, Sheet, metric_loss, summarise_row
from wardround.comparison.statistics import (
    CaseKey,
    Scores,
    average,
    client_mean,
    resample_means,
    take_quantiles,
)
from wardround.comparison.tables import MEAN, WEIGHTED, WIDTH, group_rows, score_columns
from wardround.metrics import METRICS
from wardround.tables import Interval, Spread, Table
from wardround.text import format_count

Printed = Mapping[str, Spread]  # our column -> the printed value


@dataclass(frozen=True)
class OrderAgreement:
    """How many pairs of rows come in the printed order.

    tau: Kendall's, (same - other) / pairs; best: the row that is printed as best; place: of it here, of
    `among` rows; num_level: others with its very value here.
    """

    num_pairs: int
    num_same: int
    tau: float
    interval: Interval
    best: str
    place: int
    among: int
    num_level: int

    def sentence(self, label: str) -> str:
        """For the caption; label: of the metric."""
        start = f"Order by {label}: {self.num_same} of {self.num_pairs} pairs of rows as printed"
        interval = f"95 % interval over cases {self.interval.low:.2f} to {self.interval.high:.2f}"
        place = "also the best" if self.place == 1 else f"number {self.place} of {self.among}"
        level = f", level with {format_count(self.num_level, 'other')}" if self.num_level else ""
        return (
            f"{start} (Kendall's tau {self.tau:.2f}, {interval}); {self.best}, the best in print, "
            f"is {place} here{level}."
        )


# Side by side


def published_table(sheet: Sheet, metric: str) -> Table | None:
    """One line for every printed number that is of a column of ours; None where nothing is printed."""
    columns = dict(reversed(score_columns(sheet, metric)))  # the mean, not a client of that name
    lines: list[list[Any]] = []
    for row in sheet.rows:
        summary = summarise_row(row, metric, sheet.clients(metric))
        for heading, printed in find_printed(sheet, row.label, metric).items():
            if heading in columns and row.replicates:
                ours = columns[heading](summary)
                lines.append([row.label, heading, printed, ours, ours.mean - printed.mean])
    if not lines:
        return None
    entry = METRICS[metric]
    agreement = compare_order(sheet, metric)
    order = [] if agreement is None else [agreement.sentence(entry.label)]
    over = f" Measured: mean ± SD over {sheet.expected} {sheet.over}." if sheet.expected > 1 else ""
    caption = " ".join(
        [f"Difference: measured minus printed.{over}", *order, *sheet.notes, *sheet.print_notes]
    )
    heads = ["method", "column", "printed", "measured", "difference"]
    return Table(
        f"{sheet.title}: {entry.title_in(sheet.lengths)} beside the paper's", heads, lines, caption, WIDTH
    )


def find_printed(sheet: Sheet, label: str, metric: str) -> Printed:
    return sheet.published.get(label, {}).get(metric, {})


# The order of rows


def compare_order(sheet: Sheet, metric: str) -> OrderAgreement | None:
    """Pairs of rows in the printed order; None where fewer than two rows can be compared."""
    rows = [row for row in sheet.rows if row.replicates and find_printed(sheet, row.label, metric)]
    groups = group_rows(rows, lambda row: row.group)
    loss = metric_loss(metric)
    printed = {row.label: loss(summarise_print(find_printed(sheet, row.label, metric))) for row in rows}
    pairs = [
        (one.label, other.label)
        for group in groups
        for one, other in itertools.combinations(group, 2)
        if printed[one.label] != printed[other.label]
    ]
    if not pairs:
        return None
    pooled = {row.label: pool(row, metric, find_printed(sheet, row.label, metric)) for row in rows}
    ours = {label: loss(client_mean(scores)) for label, scores in pooled.items()}
    draws = {label: np.vectorize(loss)(resample_means(scores)) for label, scores in pooled.items()}
    same, other = count_pairs(pairs, printed, {label: np.array([v]) for label, v in ours.items()})
    low, high = take_quantiles(np.subtract(*count_pairs(pairs, printed, draws)) / len(pairs))
    group = max(reversed(groups), key=len)  # the last one: after most rounds
    best = min(group, key=lambda row: printed[row.label]).label
    place = 1 + sum(ours[row.label] < ours[best] for row in group)
    level = sum(ours[row.label] == ours[best] for row in group) - 1
    tau = float(same[0] - other[0]) / len(pairs)
    return OrderAgreement(len(pairs), int(same[0]), tau, Interval(low, high), best, place, len(group), level)


def count_pairs(
    pairs: Sequence[tuple[str, str]], printed: Mapping[str, float], ours: Mapping[str, NDArray[np.float64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many pairs are in the printed order, and in the other, for every draw of `ours`."""
    signs = np.stack([np.sign(ours[b] - ours[a]) * np.sign(printed[b] - printed[a]) for a, b in pairs])
    return (signs > 0).sum(axis=0), (signs < 0).sum(axis=0)


def summarise_print(printed: Printed) -> float:
    """One number a row: the one over all clients, else the mean of those of clients."""
    for column in (WEIGHTED, MEAN):
        if column in printed:
            return printed[column].mean
    return math.fsum(value.mean for value in printed.values()) / len(printed)


def pool(row: RowScores, metric: str, printed: Printed) -> Scores:
    """A row's scores so that `client_mean` is what was printed: over all cases, all clients, or some."""
    scores = average(row.scores(metric), finite=True)
    if WEIGHTED in printed:
        return {CaseKey("", f"{key.client}/{key.case}", key.region): v for key, v in scores.items()}
    if MEAN in printed:
        return scores
    return {key: value for key, value in scores.items() if key.client in printed}
