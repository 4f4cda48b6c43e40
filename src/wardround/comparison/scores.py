"""The scores of a comparison: what every table, test and figure of it is made from.

    Sheet                        one comparison
      rows: RowScores            one method (or whatever the rows are)
        replicates: Replicate    one seed and fold
          scores                 metric -> CaseKey -> value, from the run's cases.csv

With held-out clients a replicate joins several runs: `scores` then has each client's cases as tested by
the run that never saw that client, and `seen` the cases of the clients that took part.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from wardround.comparison.seeds import compare_seeds, estimate_mean
from wardround.comparison.statistics import (
    RESAMPLES,
    SEED,
    CaseKey,
    PairedTest,
    Scores,
    average,
    bootstrap,
    distance_to_best,
    holm,
)
from wardround.engine.judging.result_tables import bound_interval, find_interval, sd_between
from wardround.errors import CheckpointError, ConfigError
from wardround.metrics import METRICS, MM, ClientsSummary, across_clients, summarise
from wardround.tables import Interval, Spread, formula_read, one_line
from wardround.text import suggest

ReplicateKey = tuple[int, int | None]  # seed, fold
CaseScores = Mapping[str, Scores]  # metric -> case -> value


class HasLabel(Protocol):
    @property
    def label(self) -> str: ...


Labelled = TypeVar("Labelled", bound=HasLabel)


@dataclass(frozen=True)
class Replicate:
    """One seed and fold of one row.

    seen: of clients that trained, where `scores` are of clients held out of training; unseen: of held-out
    clients, where `scores` are of those that trained.
    """

    seed: int
    fold: int | None
    scores: CaseScores
    seen: CaseScores = field(default_factory=dict)
    unseen: CaseScores = field(default_factory=dict)


@dataclass(frozen=True)
class RowScores:
    """One row: all of its replicates that are complete.

    data: what its cases were made from; rows with other data cannot be paired case by case.
    empty_policy, tested: how its runs judged empty masks, and which round's model was tested;
    failed: it has no replicates because runs failed, not because they are still to come;
    group: alike for rows with the same data and number of rounds, whose order means something;
    objective: what its clients minimised, with all settings.
    """

    label: str
    replicates: Mapping[ReplicateKey, Replicate]
    data: str = ""
    empty_policy: str = "defined"
    tested: str = "best"
    failed: bool = False
    group: str = ""
    objective: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why_empty(self) -> str:
        """Why there is nothing to test: "failed", "no finished run", or "" where there is something."""
        return "" if self.replicates else "failed" if self.failed else "no finished run"

    def scores(self, metric: str, only: Iterable[ReplicateKey] | None = None) -> list[Scores]:
        """Case scores of a metric, one mapping a replicate (of all, or of these)."""
        wanted = self.replicates if only is None else set(only)
        return [
            r.scores[metric] for key, r in self.replicates.items() if key in wanted and metric in r.scores
        ]

    def of_region(self, region: str) -> RowScores:
        """The same row with the scores of one structure alone."""

        def select(scores: CaseScores) -> CaseScores:
            return select_keys(scores, lambda key: key.region == region)

        kept = {
            key: replace(r, scores=select(r.scores), seen=select(r.seen), unseen=select(r.unseen))
            for key, r in self.replicates.items()
        }
        return replace(self, replicates=kept)

    def by_seed(self, metric: str, only: Iterable[ReplicateKey] | None = None) -> dict[int, Scores]:
        """Case scores of a metric, all folds of a seed together."""
        wanted = self.replicates if only is None else set(only)
        seeds = {seed: [key for key in wanted if key[0] == seed] for seed, _ in wanted}
        return {seed: average(self.scores(metric, keys)) for seed, keys in seeds.items()}


@dataclass(frozen=True)
class Sheet:
    """A comparison's scores.

    expected: how many replicates each row should have; over: what they are ("seeds", "seeds and folds");
    held_out: whether scores are of clients that took no part in training; lengths: what distances are in;
    published: label -> metric -> column -> printed value, for a paper's table; print_notes: what to know of
    them; notes: for the caption; partition: sentences where clients are not those the data came with.
    """

    title: str
    rows: Sequence[RowScores]
    reference: str
    metrics: Sequence[str]
    expected: int = 1
    over: str = "seeds"
    held_out: bool = False
    published: Mapping[str, Mapping[str, Mapping[str, Spread]]] = field(default_factory=dict)
    print_notes: Sequence[str] = ()
    notes: Sequence[str] = ()
    lengths: str = MM
    partition: Sequence[str] = ()

    def row(self, label: str) -> RowScores:
        return find_row(label, self.rows)

    def clients(self, metric: str) -> list[str]:
        return sorted({key.client for row in self.rows for part in row.scores(metric) for key in part})

    def unseen_clients(self, metric: str) -> list[str]:
        """Clients that took no part in training and are in no mean of those that did."""
        parts = (r.unseen.get(metric, {}) for row in self.rows for r in row.replicates.values())
        return sorted({key.client for part in parts for key in part})

    def regions(self, metric: str) -> list[str]:
        """The structures that were measured, in the order of the cases."""
        parts = [part for row in self.rows for part in row.scores(metric)]
        return list(dict.fromkeys(key.region for part in parts for key in part))

    def is_mixed(self, label: str, metric: str) -> bool:
        """Whether clients are scored in different structures, as where they annotate different ones."""
        found: dict[str, set[str]] = {}
        for part in self.row(label).scores(metric):
            for key in part:
                found.setdefault(key.client, set()).add(key.region)
        return len({tuple(sorted(own)) for own in found.values()}) > 1

    @property
    def objectives(self) -> dict[str, str]:
        """The objective of each row, where rows differ in it."""
        found = describe_objectives({row.label: row.objective for row in self.rows})
        return found if len({text for text in found.values() if text}) > 1 else {}


def describe_objectives(objectives: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The objective of each row in short: its name, and settings in which rows of that name differ.

    >>> describe_objectives({"a": {"name": "dice", "smooth": 1}, "b": {"name": "dice", "smooth": 2}, "c": {}})
    {'a': 'dice, smooth 1', 'b': 'dice, smooth 2', 'c': ''}
    """

    def describe(own: Mapping[str, Any]) -> str:
        alike = [other for other in objectives.values() if other.get("name") == own.get("name")]
        keys = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        return ", ".join([str(own.get("name", "")), *(f"{key} {own[key]}" for key in keys)])

    return {label: describe(own) for label, own in objectives.items()}


def find_row(label: str, rows: Sequence[Labelled]) -> Labelled:
    """The row with a label; an unknown label is an error that lists the rows."""
    for row in rows:
        if row.label == label:
            return row
    labels = [row.label for row in rows]
    raise ConfigError(
        f"'{one_line(str(label), 60)}' is not a row.{suggest(str(label), labels)} "
        f"Rows: {', '.join(one_line(known, 60) for known in labels)}."
    )


def read_cases(path: Path) -> dict[str, dict[CaseKey, float]]:
    """The scores of a finished run, from its cases.csv."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file)
            metrics = next(lines)[3:]
            scores: dict[str, dict[CaseKey, float]] = {metric: {} for metric in metrics}
            for client, case, region, *values in lines:
                key = CaseKey(*map(formula_read, (client, case, region)))
                for metric, value in zip(metrics, values, strict=True):
                    scores[metric][key] = float(value)
    except (OSError, ValueError, StopIteration) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Run this cell again.") from None
    return scores


def select_keys(scores: CaseScores, wanted: Callable[[CaseKey], bool]) -> dict[str, dict[CaseKey, float]]:
    return {
        metric: {key: value for key, value in values.items() if wanted(key)}
        for metric, values in scores.items()
    }


def select_clients(scores: CaseScores, wanted: Callable[[str], bool]) -> dict[str, dict[CaseKey, float]]:
    """Only the cases of some clients."""
    return select_keys(scores, lambda key: wanted(key.client))


def set_apart(rows: Sequence[RowScores], held_out: Mapping[str, Collection[str]]) -> list[RowScores]:
    """Take held-out clients out of the scores; they stay as `unseen`.

    held_out: of each row. A client that one row held out is set apart in all, so that means are over the same
    clients, unless none would be left: then each row sets its own apart.
    """
    every = {name for names in held_out.values() for name in names}
    tested = {
        key.client for row in rows for r in row.replicates.values() for s in r.scores.values() for key in s
    }
    common = not tested <= every

    def divide(row: RowScores) -> RowScores:
        out = every if common else set(held_out.get(row.label, ()))
        replicates = {
            key: replace(
                r,
                scores=select_clients(r.scores, lambda name: name not in out),
                unseen=select_clients(r.scores, out.__contains__),
            )
            for key, r in row.replicates.items()
        }
        return replace(row, replicates=replicates)

    return [divide(row) for row in rows] if every else list(rows)


# What a row says in numbers


@dataclass(frozen=True)
class ClientEstimate:
    """How sure a client's mean is: the number of its cases that have a value, and the 95 % interval."""

    num: int
    interval: Interval


@dataclass(frozen=True)
class RowSummary:
    """One row and metric, each number a mean over replicates with its SD.

    estimates: of each client, held out or not;
    sd_between: SD between clients; worst_clients: who was the worst, replicate by replicate;
    seen: mean over clients that took part in training, where others were held out; unseen: held-out clients,
    which are in none of the other numbers;
    num_values, num_skipped, num_infinite: over all replicates.
    """

    label: str
    clients: Mapping[str, Spread]
    estimates: Mapping[str, ClientEstimate]
    mean: Spread
    sd_between: Spread
    worst: Spread
    weighted: Spread
    worst_clients: Sequence[str]
    seen: Spread | None
    unseen: Mapping[str, Spread]
    num_replicates: int
    num_values: int
    num_skipped: int
    num_infinite: int


def summarise_row(row: RowScores, metric: str, clients: Sequence[str]) -> RowSummary:
    """Client by client, then over clients, then over seeds and folds."""
    parts = row.scores(metric)
    overall = [summarise_clients(part, metric) for part in parts]
    seen = [summarise_clients(r.seen[metric], metric) for r in row.replicates.values() if r.seen.get(metric)]
    unseen = [r.unseen[metric] for r in row.replicates.values() if r.unseen.get(metric)]
    infinite = sum(entry.num_infinite for entry in overall)
    worst = [entry.worst for entry in overall if entry.worst is not None]
    out = {
        name: summarise_client(unseen, name)
        for name in sorted({key.client for part in unseen for key in part})
    }
    means = {name: summarise_client(parts, name) for name in clients}
    return RowSummary(
        label=row.label,
        clients=means,
        estimates=estimate_clients(row, metric, {**out, **means}) if clients else {},
        mean=to_spread([entry.mean for entry in overall], infinite),
        sd_between=to_spread([sd_between(entry) for entry in overall], infinite),
        worst=to_spread([entry.value for entry in worst], infinite),
        weighted=to_spread([entry.weighted_mean for entry in overall], infinite),
        worst_clients=[entry.client for entry in worst],
        seen=to_spread([e.mean for e in seen], sum(e.num_infinite for e in seen)) if seen else None,
        unseen=out,
        num_replicates=len(parts),
        num_values=sum(len(part) for part in parts),
        num_skipped=sum(entry.num_skipped for entry in overall),
        num_infinite=infinite,
    )


def summarise_client(parts: Sequence[Scores], name: str) -> Spread:
    """One client's mean, over replicates."""
    found = [summarise([value for key, value in part.items() if key.client == name]) for part in parts]
    return to_spread([entry.mean for entry in found], sum(entry.num_infinite for entry in found))


def estimate_clients(row: RowScores, metric: str, means: Mapping[str, Spread]) -> dict[str, ClientEstimate]:
    """Of every client's mean: over seeds and cases, or by Student's t over the cases of a single seed."""
    seeds: dict[int, dict[CaseKey, float]] = {}
    for seed in sorted({seed for seed, _ in row.replicates}):
        parts = [r for (own, _), r in row.replicates.items() if own == seed]
        seeds[seed] = average([{**r.scores.get(metric, {}), **r.unseen.get(metric, {})} for r in parts])
    return {name: estimate_client(list(seeds.values()), metric, name, means[name].mean) for name in means}


def estimate_client(seeds: Sequence[Scores], metric: str, name: str, mean: float) -> ClientEstimate:
    own = [{key: value for key, value in scores.items() if key.client == name} for scores in seeds]
    cases: dict[str, list[float]] = {}
    for scores in own:
        for key, value in scores.items():
            if math.isfinite(value):
                cases.setdefault(key.case, []).append(value)
    found = summarise([summarise(values).mean for values in cases.values()])
    interval = find_interval(replace(found, mean=mean), metric)
    if sum(bool(scores) for scores in own) > 1 and math.isfinite(mean):
        interval = bound_interval(*estimate_mean(own).interval(mean), metric)
    return ClientEstimate(len(cases), interval)


def summarise_clients(scores: Scores, metric: str) -> ClientsSummary:
    values: dict[str, list[float]] = {}
    for key, value in scores.items():
        values.setdefault(key.client, []).append(value)
    summaries = {client: summarise(values[client]) for client in sorted(values)}
    return across_clients(summaries, best=METRICS[metric].best)


def metric_loss(metric: str) -> Callable[[float], float]:
    """What the best value of a metric has least of."""
    return distance_to_best(METRICS[metric].best, METRICS[metric].higher_is_better)


def to_spread(values: Sequence[float], num_infinite: int = 0) -> Spread:
    """Mean and SD over replicates; a replicate without a value is left out, an infinite one shows."""
    known = [value for value in values if not math.isnan(value)]
    summary = summarise(known, "all")
    return Spread(summary.mean, summary.sd if len(known) > 1 else None, num_infinite=num_infinite)


# Tests


@dataclass(frozen=True)
class RowStatistics:
    """One row against the reference. test: None for the reference itself, or where `why_not` says so."""

    label: str
    mean: float
    interval: Interval
    test: PairedTest | None
    why_not: str = ""


@dataclass(frozen=True)
class Statistics:
    """All rows of one metric against one reference. num_tests: how many p-values Holm corrected."""

    metric: str
    reference: str
    rows: Sequence[RowStatistics]
    num_tests: int
    resamples: int = RESAMPLES
    seed: int = SEED

    def row(self, label: str) -> RowStatistics:
        return find_row(label, self.rows)


def compute_statistics(sheet: Sheet, metric: str) -> Statistics:
    """Every row against the reference, p-values corrected together."""
    reference = sheet.row(sheet.reference)
    rows = [compare_row(row, reference, metric) for row in sheet.rows]
    tests = [row.test for row in rows if row.test is not None]
    corrected = iter(holm([test.p for test in tests]))
    rows = [
        row if row.test is None else replace(row, test=replace(row.test, p_holm=next(corrected)))
        for row in rows
    ]
    return Statistics(metric, sheet.reference, rows, len(tests))


def compare_row(row: RowScores, reference: RowScores, metric: str) -> RowStatistics:
    mean = summarise_row(row, metric, ()).mean.mean  # that of the score table
    why_not, test = "", None
    if row.label == reference.label:
        why_not = f"reference, {row.why_empty}" if row.why_empty else "reference"
    elif row.why_empty:
        why_not = row.why_empty
    elif reference.why_empty:
        why_not = f"reference: {reference.why_empty}"
    elif row.data != reference.data:
        why_not = "other data"
    else:
        shared = [key for key in row.replicates if key in reference.replicates]
        ours, theirs = (side.by_seed(metric, shared) for side in (row, reference))
        best, higher_is_better = METRICS[metric].best, METRICS[metric].higher_is_better
        test = compare_seeds(ours, theirs, best=best, higher_is_better=higher_is_better)
        why_not = "" if test is not None else "no case in common"
    return RowStatistics(row.label, mean, estimate_row(row, metric, mean), test, why_not)


def estimate_row(row: RowScores, metric: str, mean: float) -> Interval:
    """Of a row's mean: over seeds and cases, or over the cases of a single seed."""
    seeds = list(row.by_seed(metric).values())
    if len(seeds) < 2:
        return bootstrap(average(seeds, finite=True))
    if not math.isfinite(mean):
        return Interval(math.nan, math.nan)
    return bound_interval(*estimate_mean(seeds).interval(mean), metric)
