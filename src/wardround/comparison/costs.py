"""What the rows of a comparison cost: seconds and megabytes of a round, beside the score they reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wardround.comparison.runs import Records, Run, number
from wardround.comparison.scores import Sheet, summarise_row, to_spread
from wardround.comparison.tables import WIDTH, name_row
from wardround.metrics import METRICS
from wardround.tables import Spread, Table

MEGABYTE = 1e6


@dataclass(frozen=True)
class RowCost:
    """A row's median round, and the score it reached, both as means over replicates.

    seconds: of the whole round; work: of all clients together; sent, received: MB of all clients together.
    """

    label: str
    score: Spread
    seconds: Spread
    work: Spread
    sent: Spread
    received: Spread


def measure_costs(rows: Mapping[str, Sequence[Run]], sheet: Sheet) -> list[RowCost]:
    """The rows with runs of their own; one read off another row's run costs what that one does."""
    metric = sheet.metrics[0]
    clients = sheet.clients(metric)
    scores = {row.label: summarise_row(row, metric, clients).mean for row in sheet.rows if row.replicates}
    return [
        RowCost(
            label,
            scores[label],
            seconds=over_runs(runs, lambda records: [number(record.get("seconds")) for record in records]),
            work=over_runs(runs, lambda records: sum_clients(records, "seconds")),
            sent=over_runs(runs, lambda records: sum_clients(records, "bytes_up", MEGABYTE)),
            received=over_runs(runs, lambda records: sum_clients(records, "bytes_down", MEGABYTE)),
        )
        for label, runs in rows.items()
        if label in scores and any(run.records for run in runs)
    ]


def over_runs(runs: Sequence[Run], values_of: Callable[[Records], Sequence[float]]) -> Spread:
    """The median round of every run, then mean and SD over runs."""
    found = [values_of(run.records) for run in runs]
    return to_spread([statistics.median(values) for values in found if values])


def sum_clients(records: Records, key: str, unit: float = 1.0) -> list[float]:
    """What all clients together took or sent, round by round."""
    sums: dict[float, float] = {}
    for points in records.exchanged(key).values():
        for at, value in points:
            sums[at] = sums.get(at, 0.0) + value / unit
    return list(sums.values())


def cost_table(costs: Sequence[RowCost], sheet: Sheet) -> Table:
    """Score, time and traffic of every row."""
    heading = f"mean {METRICS[sheet.metrics[0]].title_in(sheet.lengths)}"
    columns = [
        "method", *(["objective"] if sheet.objectives else []), heading, "s a round", "s of clients' work",
        "MB sent by clients", "MB received by clients",
    ]  # fmt: skip
    rows = [
        [*name_row(sheet, cost.label), cost.score, cost.seconds, cost.work, cost.sent, cost.received]
        for cost in costs
    ]
    caption = (
        "The median round of each run"
        + (f", mean ± SD over {sheet.over}" if sheet.expected > 1 else "")
        + ". "
        "Seconds of a round are those of the clock, validation included; work and megabytes are sums over "
        "clients, validation left out. Runs that shared a machine were slowed down by each other: compare "
        "times of runs that ran one at a time (--jobs 1)."
    )
    return Table(f"{sheet.title}: time and traffic of a round", columns, rows, caption, WIDTH)
