"""The tables of a comparison: scores, tests against a reference, and the cross-site matrix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wardround.comparison.scores import (
    ClientEstimate,
    RowScores,
    RowStatistics,
    RowSummary,
    Sheet,
    Statistics,
    metric_loss,
    summarise_row,
    to_spread,
)
from wardround.comparison.statistics import PairedTest
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.result_tables import ALL_STRUCTURES, HELD_OUT, mark_held_out, name_all
from wardround.metrics import BOTH, METRICS, MM, MM_OR_PX, Summary
from wardround.tables import Flagged, Interval, PValue, Spread, Table
from wardround.text import format_count

MOST_CLIENTS = 20  # with a column of their own
WIDTH = 40  # names longer than this are cut in the middle where people read them
DECIMALS = 3

SEEDS_TEST = "two-sided, of signed ranks, seeds and cases both random,"
MEAN, SD, WORST = "mean", "SD between clients", "worst client"
WEIGHTED, SEEN = "weighted mean", "seen clients"

EMPTY = {
    "defined": "two empty masks count as a perfect match, one empty mask as a complete miss",
    "nan": "scores that empty masks leave undefined are skipped",
    "smooth": "Dice is smoothed by 1e-5, so two empty masks give 1",
}
FLATTERS = "†: infinite values are left out, which flatters."
TESTED = {"best": "the round that was best on validation cases", "last": "the last round"}


# Scores


def score_table(sheet: Sheet, metric: str) -> Table:
    """One row a method: mean, SD between clients, worst client, weighted mean, each client.

    Several structures: the same again for each of them. The objective stands beside the method where rows
    differ in it.
    """
    columns, structures = score_columns(sheet, metric), summarise_structures(sheet, metric)
    loss = metric_loss(metric)
    rows: list[list[Any]] = []
    for structure, every in structures.items():
        summaries = [summary for summary in every if is_measured(summary)]
        marked = [
            rank_rows(sheet, {s.label: value_of(s) for s in summaries}, abs if heading == SD else loss)
            for heading, value_of in columns
        ]
        for number, summary in enumerate(summaries):
            start = [*name_row(sheet, summary.label), *([structure] if structure else [])]
            rows.append([*start, *(values[number] for values in marked)])
    heads = [*list_heads(sheet, metric), *(heading for heading, _ in columns)]
    caption = score_caption(sheet, metric, next(iter(structures.values())))
    return Table(title_scores(sheet, metric), heads, rows, caption, WIDTH)


def title_scores(sheet: Sheet, metric: str) -> str:
    title = f"{sheet.title}: test {METRICS[metric].title_in(sheet.lengths)}"
    return title + (" at clients that took no part" if sheet.held_out else "")


def summarise_structures(sheet: Sheet, metric: str) -> dict[str, list[RowSummary]]:
    """All rows, for all structures together and for each; a single structure has no name."""
    clients, regions = sheet.clients(metric), sheet.regions(metric)
    whole = [summarise_row(row, metric, clients) for row in sheet.rows]
    if len(regions) < 2:
        return {"": whole}
    return {name_all(regions): whole} | {
        region: [summarise_row(row.of_region(region), metric, clients) for row in sheet.rows]
        for region in regions
    }


def is_measured(summary: RowSummary) -> bool:
    """Whether a row has cases of a structure, or is not finished; data of other rows may not contain it."""
    return bool(summary.num_values or summary.unseen or not summary.num_replicates)


def name_row(sheet: Sheet, label: str) -> list[str]:
    """The first cells of a row: the method, and its objective where rows differ in it."""
    return [label, *([sheet.objectives[label]] if sheet.objectives else [])]


def list_heads(sheet: Sheet, metric: str) -> list[str]:
    """The heads above what tells rows apart."""
    several = len(sheet.regions(metric)) > 1
    return ["method", *(["objective"] if sheet.objectives else []), *(["structure"] if several else [])]


def hospital_table(sheet: Sheet, metric: str) -> Table:
    """One row a client and method, with the number of cases and the 95 % interval beside each score."""
    rows: list[list[Any]] = []
    unseen = sheet.unseen_clients(metric)
    absent = {row.label: list_absent(sheet, row, metric) for row in sheet.rows}
    for structure, every in summarise_structures(sheet, metric).items():
        for client in [*sheet.clients(metric), *unseen]:
            summaries = [s for s in every if is_measured(s) and client not in absent[s.label]]
            spreads = [s.clients.get(client) or s.unseen.get(client, Spread(math.nan)) for s in summaries]
            found = {  # without SD: the interval says it
                s.label: dataclasses.replace(v, sd=None) for s, v in zip(summaries, spreads, strict=True)
            }
            shown = mark_held_out(client) if client in unseen else client
            ranked = rank_rows(sheet, found, metric_loss(metric))
            for summary, value in zip(summaries, ranked, strict=True):
                sure = summary.estimates.get(client, ClientEstimate(0, Interval(math.nan, math.nan)))
                start = [*name_row(sheet, summary.label), *([structure] if structure else [])]
                rows.append([shown, *start, value, sure.interval, sure.num])
    heads = ["client", *list_heads(sheet, metric), METRICS[metric].title_in(sheet.lengths)]
    several = any(len({seed for seed, _ in row.replicates}) > 1 for row in sheet.rows)
    how = "seeds and cases both random" if several else "by Student's t over the cases"
    caption = " ".join([f"n: cases that have a value. Intervals: of the mean, {how}.", *sheet.partition])
    return Table(
        f"{title_scores(sheet, metric)} by client", [*heads, "95 % interval", "n"], rows, caption, WIDTH
    )


def list_absent(sheet: Sheet, row: RowScores, metric: str) -> set[str]:
    """Clients of other rows that are not in the data of a finished row."""
    if not row.replicates:
        return set()
    own = {key.client for part in row.scores(metric) for key in part}
    own |= {key.client for r in row.replicates.values() for key in r.unseen.get(metric, {})}
    return {*sheet.clients(metric), *sheet.unseen_clients(metric)} - own


Column = tuple[str, Callable[[RowSummary], Spread]]  # heading, and what a row has there


def score_columns(sheet: Sheet, metric: str) -> list[Column]:
    """Sums over clients first, as the edge of a screen hides what is last; then clients, if they are few.

    A client may be named "mean".
    """
    columns: list[Column] = [
        (MEAN, lambda summary: summary.mean),
        (SD, lambda summary: summary.sd_between),
        (WORST, lambda summary: summary.worst),
        (WEIGHTED, lambda summary: summary.weighted),
    ]
    if sheet.held_out:
        columns.append((SEEN, lambda summary: summary.seen or Spread(math.nan)))
    clients = sheet.clients(metric)
    columns += [
        (name, lambda summary, name=name: summary.clients[name])  # type: ignore[misc]
        for name in (clients if len(clients) <= MOST_CLIENTS else ())
    ]
    unseen = sheet.unseen_clients(metric)
    columns += [
        (mark_held_out(name), lambda summary, name=name: summary.unseen.get(name, Spread(math.nan)))  # type: ignore[misc]
        for name in (unseen if len(unseen) <= MOST_CLIENTS else ())
    ]
    return columns


def group_rows(rows: Sequence[RowScores], key: Callable[[RowScores], str]) -> list[list[RowScores]]:
    """Rows whose order means something; all, where each has a key of its own (5 to 80 clients)."""
    groups: dict[str, list[RowScores]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values()) if len(groups) < len(rows) else [list(rows)]


def group_by_data(rows: Sequence[RowScores]) -> list[list[RowScores]]:
    return group_rows(rows, lambda row: row.data)


def rank_rows(sheet: Sheet, values: Mapping[str, Spread], loss: Callable[[float], float]) -> list[Spread]:
    """Mark the best two of the rows with the same data."""
    marked = dict(values)
    for group in group_by_data(sheet.rows):
        labels = [row.label for row in group if row.label in values]
        ranked = rank_values([values[label] for label in labels], loss)
        marked.update(zip(labels, ranked, strict=True))
    return list(marked.values())


def rank_values(values: Sequence[Spread], loss: Callable[[float], float]) -> list[Spread]:
    """Mark the best and the second best; values that look equal share their mark. One value gets none.

    A mean that leaves infinite values out flatters: only rows that leave out the fewest are marked.
    """
    if sum(value.num_infinite > 0 or not math.isnan(value.mean) for value in values) < 2:
        return list(values)
    fewest = min((value.num_infinite for value in values if math.isfinite(value.mean)), default=0)
    losses = [
        math.nan if value.num_infinite > fewest else round(loss(value.mean), DECIMALS) for value in values
    ]
    best = sorted({entry for entry in losses if math.isfinite(entry)})[:2]
    places = {entry: place for place, entry in enumerate(best, start=1)}
    return [
        dataclasses.replace(value, rank=places.get(entry, 0))
        for value, entry in zip(values, losses, strict=True)
    ]


def score_caption(sheet: Sheet, metric: str, summaries: Sequence[RowSummary]) -> str:
    """What a reader must know to use the numbers."""
    label = METRICS[metric].label
    keys = {key for row in sheet.rows for part in row.scores(metric) for key in part}
    cases = len({(key.client, key.case) for key in keys})
    regions, clients = len({key.region for key in keys}), len(sheet.clients(metric))
    sentences = [
        f"{label} on {format_count(cases, 'test case')} of {format_count(clients, 'client')}"
        + (f", {format_count(regions, 'structure')}" if regions > 1 else "")
        + (f"; mean ± SD over {sheet.expected} {sheet.over}." if sheet.expected > 1 else ".")
    ]
    if regions > 1:
        sentences.append(ALL_STRUCTURES)
    if sheet.objectives:
        hint = "" if sheet.print_notes else "; --same-objective gives all of them one"  # not what a paper ran
        sentences.append(f"Rows differ in the objective too{hint}.")
    if clients > MOST_CLIENTS:
        sentences.append("Columns of single clients are left out; statistics.json has them.")
    if sheet.held_out:
        sentences.append(
            "Every client's column is from runs in which it took no part in training; "
            "'seen clients' is the mean over those that did."
        )
    if sheet.unseen_clients(metric):
        sentences.append(f"{HELD_OUT} They are in no test either.")
    short = [s for s in summaries if s.num_replicates < sheet.expected]
    if short:
        parts = ", ".join(f"{s.label} {s.num_replicates} of {sheet.expected}" for s in short)
        sentences.append(f"Not complete: {parts}.")
    sentences.append(describe_missing(summaries))
    policies = {row.label: row.empty_policy for row in sheet.rows}
    sentences.append(describe_choices("Empty masks", EMPTY, policies))
    sentences.append(describe_choices("Tested", TESTED, {row.label: row.tested for row in sheet.rows}))
    if sheet.lengths == MM_OR_PX and METRICS[metric].unit:
        sentences.append(BOTH)
    infinite = any(summary.num_infinite for summary in summaries)
    if infinite:
        sentences.append(FLATTERS)
    if len(sheet.rows) > 1:
        of_rows = ", of rows with the fewest infinite values" if infinite else ""
        of_rows += ", among rows with the same data" if len(group_by_data(sheet.rows)) > 1 else ""
        sentences.append(f"Best bold, second underlined{of_rows}.")
    return " ".join([*sentences, *sheet.partition, *sheet.notes])


def describe_missing(summaries: Sequence[RowSummary]) -> str:
    """How many values are not in the means."""
    total = max((summary.num_values for summary in summaries), default=0)
    parts = []
    for what, number in (("undefined", "num_skipped"), ("infinite", "num_infinite")):
        rows = [f"{s.label} {getattr(s, number)}" for s in summaries if getattr(s, number)]
        parts.append(f"{what} {', '.join(rows) if rows else 'none'}")
    return f"Left out of the means, of {format_count(total, 'value')} a row: {'; '.join(parts)}."


def describe_choices(what: str, meanings: Mapping[str, str], choices: Mapping[str, str]) -> str:
    """One sentence if all rows chose the same, else who chose what."""
    groups: dict[str, list[str]] = {}
    for label, choice in choices.items():
        groups.setdefault(choice, []).append(label)
    if len(groups) == 1:
        return f"{what}: {meanings[next(iter(groups))]}."
    parts = "; ".join(f"{meanings[choice]} ({', '.join(labels)})" for choice, labels in groups.items())
    return f"{what}: {parts}."


# Tests


def significance_table(sheet: Sheet, statistics: Statistics) -> Table:
    """One row a method: interval of the mean, difference from the reference, p-values, effect size."""
    entry = METRICS[statistics.metric]
    columns = [
        "difference", "95 % interval of difference", "p (Holm)", "better with", "mean", "95 % interval", "p",
        "effect", "better", "worse", "equal",
    ]  # fmt: skip
    rows = [significance_row(row) for row in statistics.rows]
    if not any(row.test is not None and row.test.seed_gains for row in statistics.rows):
        place = columns.index("better with")
        columns, rows = drop(columns, place), [drop(cells, place) for cells in rows]
    columns = ["method", *(["objective"] if sheet.objectives else []), *columns]
    rows = [[*name_row(sheet, row.label), *cells] for cells, row in zip(rows, statistics.rows, strict=True)]
    title = f"{sheet.title}: {entry.label} against {statistics.reference}"
    return Table(title, columns, rows, significance_caption(sheet, statistics), WIDTH)


def significance_row(row: RowStatistics) -> list[Any]:
    test = row.test
    if test is None:
        return [row.why_not, "", "", "", row.mean, row.interval, "", "", "", "", ""]
    difference = Flagged(test.difference) if test.signs_differ else test.difference
    return [
        difference, test.interval, PValue(test.p_holm), describe_seeds(test), row.mean, row.interval,
        PValue(test.p), test.rank_biserial, test.num_better, test.num_worse, test.num_zero,
    ]  # fmt: skip


def drop(values: Sequence[Any], place: int) -> list[Any]:
    return [*values[:place], *values[place + 1 :]]


def describe_seeds(test: PairedTest | None) -> str:
    """With how many seeds a row was better than the reference; flagged where seeds disagree."""
    if test is None or not test.seed_gains:
        return ""
    known = [gain for gain in test.seed_gains if not math.isnan(gain)]
    found = f"{test.num_seeds_better} of {format_count(len(known), 'seed')}"
    return f"{found}: signs differ" if test.signs_differ else found


def significance_caption(sheet: Sheet, statistics: Statistics) -> str:
    entry = METRICS[statistics.metric]
    tests = [row.test for row in statistics.rows if row.test is not None]
    pairs = sorted({test.num_pairs for test in tests})
    of_seeds = [test for test in tests if test.seed_gains]
    averaged = f", averaged over {sheet.over} first" if sheet.expected > 1 and not of_seeds else ""
    signed = ", of the distances from the best value" if entry.higher_is_better is None else ""
    sentences = [
        f"Intervals: {statistics.resamples} bootstrap samples of the mean over clients, cases resampled "
        "within each client."
    ]
    if of_seeds:
        sentences = ["Intervals: of the mean over clients, seeds and cases both random (Hillis 2007)."]
    if tests:
        number = str(pairs[0]) if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
        sentences.append(
            f"Test: {'two-sided Wilcoxon signed-rank' if not of_seeds else SEEDS_TEST} over {number} pairs "
            f"(client, case and structure{averaged}) "
            f"against {statistics.reference}; equal pairs dropped; Holm's correction over "
            f"{format_count(statistics.num_tests, 'row')}."
        )
        sentences.append(
            f"Difference: mean over pairs, method minus reference{signed}; "
            "effect: matched-pairs rank-biserial correlation, above 0 if better than the reference."
        )
        if of_seeds and len(of_seeds) < len(tests):
            sentences.append("Rows with a single seed in common: Wilcoxon over cases and bootstrap.")
        if any(len(test.seed_gains) == 2 for test in tests):
            sentences.append("Two seeds are too few to know how seeds vary; take three or more.")
        if any(test.signs_differ for test in tests):
            sentences.append("‡ Signs differ: better than the reference with some seeds, worse with others.")
        if not of_seeds:
            sentences.append("One seed: this is about these trained models; another seed may turn it round.")
        skipped, infinite = (max(getattr(t, name) for t in tests) for name in ("num_skipped", "num_infinite"))
        if skipped:
            sentences.append(f"Up to {format_count(skipped, 'pair')} undefined and skipped.")
        if infinite:
            sentences.append(
                f"Up to {format_count(infinite, 'pair')} with an infinite value: ranked as the worst, left "
                "out of differences and intervals, so a difference is not that of the means."
            )
    return " ".join(sentences)


def join_tables(scores: Table, tests: Table) -> Table:
    """Scores and tests side by side, for CSV; tests are of all structures together."""
    places = [
        place for place, head in enumerate(tests.columns) if head not in ("method", "objective", "mean")
    ]
    extra = [tests.columns[place] for place in places]
    left = {row[0]: [row[place] for place in places] for row in tests.rows}
    rows = [[*row, *left.pop(row[0], [""] * len(extra))] for row in scores.rows]
    return Table(scores.title, [*scores.columns, *extra], rows, scores.caption, scores.width)


# Cross-site


def cross_site_table(
    runs: Mapping[str, Sequence[Mapping[str, Evaluation]]],
    metric: str,
    title: str = "Cross-site",
    lengths: str = MM,
) -> Table:
    """The model of each client (row) on the test cases of each client (column).

    runs: row label -> for every seed, client -> evaluation of its model at all clients.
    elsewhere: the mean over the other clients, each counting the same.
    """
    sites = sorted(
        {site for seeds in runs.values() for run in seeds for e in run.values() for site in e.clients[metric]}
    )
    rows: list[list[Any]] = []
    for label, seeds in runs.items():
        for owner in sorted({name for run in seeds for name in run}):
            found = [run[owner].clients[metric] for run in seeds if owner in run]
            values = [average_runs([entry[site] for entry in found if site in entry]) for site in sites]
            away = [[e[site] for site in sites if site in e and site != owner] for e in found]
            infinite = sum(entry.num_infinite for entries in away for entry in entries)
            elsewhere = to_spread([average_runs(entries).mean for entries in away], infinite)
            rows.append([label, owner, *values, elsewhere])
    most = max((len(seeds) for seeds in runs.values()), default=1)
    over = f" Mean ± SD over {most} seeds." if most > 1 else ""
    caption = f"Row: whose model; column: whose test cases; elsewhere: mean over the other clients.{over}"
    if any(isinstance(value, Spread) and value.num_infinite for row in rows for value in row):
        caption += f" {FLATTERS}"
    columns = ["method", "model of", *(f"at {site}" for site in sites), "elsewhere"]
    return Table(f"{title}: {METRICS[metric].title_in(lengths)}", columns, rows, caption, WIDTH)


def average_runs(found: Sequence[Summary]) -> Spread:
    """The mean of some means, with the infinite values none of them has."""
    return to_spread([entry.mean for entry in found], sum(entry.num_infinite for entry in found))
