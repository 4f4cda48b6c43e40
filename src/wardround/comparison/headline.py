"""The result of a comparison in words: the best row, what cannot be told apart from it, who is weak.

The sentences are written once, as parts: the report makes HTML of them, the terminal plain text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from wardround.comparison.scores import (
    RowSummary,
    Sheet,
    Statistics,
    compute_statistics,
    metric_loss,
    summarise_row,
)
from wardround.comparison.statistics import PairedTest
from wardround.comparison.tables import group_by_data
from wardround.methods import METHODS
from wardround.metrics import METRICS
from wardround.tables import Interval, PValue, one_line, shown

MOST_ALIKE = 5  # rows that are named
MIXED = " Clients are scored in different structures, so compare them structure by structure."
NAME_WIDTH = 48


class Name(str):
    """A part that is a name from elsewhere: of a row or a client."""

    __slots__ = ()


class Strong(str):
    """The part to read first."""

    __slots__ = ()


def as_text(parts: Sequence[str]) -> str:
    """The sentences for a terminal."""
    return "".join(one_line(part, NAME_WIDTH) if isinstance(part, Name) else part for part in parts).strip()


@dataclass(frozen=True)
class Headline:
    """What can be said in a sentence.

    best: the best federated row (the only row, if there is one); num_rows: how many it is the best of;
    test: against the reference; references: rows that are not federated methods (local, centralised); alike:
    rows that cannot be told apart from the best, each tested against it; wins: other metrics by which another
    row is the best, and that row; elsewhere: the best rows on other data.
    """

    best: RowSummary
    num_rows: int
    test: PairedTest | None = None
    references: Sequence[RowSummary] = ()
    alike: Sequence[str] = ()
    wins: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Sequence[RowSummary] = ()


def find_headline(sheet: Sheet, statistics: Statistics, methods: Mapping[str, str]) -> Headline:
    """methods: the method of each row, to tell references from federated methods."""
    metric = statistics.metric
    clients = sheet.clients(metric)
    groups = group_by_data([row for row in sheet.rows if row.replicates])
    main = max(groups, key=lambda rows: (len(rows) > 1, statistics.reference in {r.label for r in rows}))
    found = [[summarise_row(row, metric, clients) for row in rows] for rows in groups if rows is not main]
    elsewhere = [find_best(list_federated(other, methods) or other, metric) for other in found]
    summaries = [summarise_row(row, metric, clients) for row in main]
    federated = list_federated(summaries, methods)
    rivals = federated or summaries
    best = find_best(rivals, metric)
    references = [summary for summary in summaries if federated and summary not in federated]
    test = statistics.row(best.label).test
    if len(rivals) < 2:
        return Headline(best, len(summaries), test, references, elsewhere=elsewhere)
    rows = [sheet.row(summary.label) for summary in rivals]
    against = compute_statistics(dataclasses.replace(sheet, rows=rows, reference=best.label), metric)
    alike = [row.label for row in against.rows if row.test is not None and row.test.p_holm >= 0.05]
    winners = {
        other: find_best([summarise_row(row, other, ()) for row in rows], other).label
        for other in sheet.metrics
        if other != metric
    }
    wins = {other: label for other, label in winners.items() if label != best.label}
    return Headline(best, len(summaries), test, references, alike, wins, elsewhere)


def list_federated(summaries: Sequence[RowSummary], methods: Mapping[str, str]) -> list[RowSummary]:
    return [summary for summary in summaries if not is_reference(methods.get(summary.label, ""))]


def find_best(summaries: Sequence[RowSummary], metric: str) -> RowSummary:
    """The row with the fewest infinite values and, of these, the best mean; unknown values come last."""

    def loss(summary: RowSummary) -> tuple[int, float]:
        mean = summary.mean.mean
        return summary.num_infinite, math.inf if math.isnan(mean) else metric_loss(metric)(mean)

    return min(summaries, key=loss)


def is_reference(method: str) -> bool:
    return method in METHODS and METHODS[method].kind == "reference"


# In words


def describe_headline(
    sheet: Sheet, statistics: Statistics, methods: Mapping[str, str], tested: str = "test "
) -> list[str]:
    """The best row, how it compares to the reference, its weakest client, and what `local` reaches.

    methods: the method of each row; tested: the word before the name of the score. Of parts, `Name` and
    `Strong` among them.
    """
    metric, found = statistics.metric, find_headline(sheet, statistics, methods)
    entry, best = METRICS[metric], found.best
    unit = entry.unit_in(sheet.lengths)
    value = [Strong(shown(best.mean)), f" {unit}" if unit else ""]
    mixed = [MIXED] if sheet.is_mixed(best.label, metric) else []
    if found.num_rows == 1:
        num_clients = len(sheet.clients(metric))
        over = "the only client" if num_clients == 1 else f"{num_clients} clients"
        weakest = describe_weakest(best, " The weakest is ") if num_clients > 1 else []
        return [
            f"Mean {tested}{entry.label} over {over}: ", *value, ".", *weakest, *mixed,
            *describe_held_out(best), *(f" {sentence}" for sentence in sheet.partition),
        ]  # fmt: skip
    extreme = "highest" if entry.higher_is_better else "lowest" if entry.higher_is_better is False else "best"
    return [
        "Of the federated methods, " if found.references else "",
        Name(best.label), f" has the {extreme} mean {tested}{entry.label}: ", *value,
        f" over {sheet.expected} {sheet.over}" if best.mean.sd is not None else "", ".",
        *describe_alike(found), *describe_wins(found),
        *describe_test(found, statistics.reference),
        *describe_weakest(best, " Its weakest client is "), *mixed, *describe_held_out(best),
        *describe_references(found.references), *describe_elsewhere(found.elsewhere),
        *(f" {sentence}" for sentence in sheet.partition),
    ]  # fmt: skip


def list_parts(entries: Sequence[Sequence[str]]) -> Iterator[str]:
    """Entries of several parts each, with commas between them."""
    for place, entry in enumerate(entries):
        if place:
            yield ", "
        yield from entry


def describe_test(found: Headline, reference: str) -> list[str]:
    """The paired test against the reference, and whether the two can be told apart."""
    test = found.test
    if test is None:
        return []
    p = PValue(test.p_holm)
    text = shown(p).replace("<", "< ") if shown(p).startswith("<") else f"= {shown(p)}"
    differ = ", with signs that differ between seeds" if test.signs_differ else ""
    return [
        " Against ", Name(reference), ", case by case, it differs by ",
        ("+" if test.difference > 0 else "") + shown(test.difference), " ", shown(test.interval),
        f" (p {text} after Holm's correction)", differ,
        describe_evidence(p, test.interval), ".",
    ]  # fmt: skip


def describe_alike(found: Headline) -> list[str]:
    """The rows that may be as good as the best one."""
    if not found.alike:
        return []
    known = list_parts([[Name(label)] for label in found.alike[:MOST_ALIKE]])
    more = f" and {len(found.alike) - MOST_ALIKE} more" if len(found.alike) > MOST_ALIKE else ""
    return [" It cannot be told apart from ", *known, more, " (p at least 0.05 after Holm's correction)."]


def describe_wins(found: Headline) -> list[str]:
    """The metrics that say another row is the best."""
    if not found.wins:
        return []
    entries = [[Name(label), f" by {METRICS[metric].label}"] for metric, label in found.wins.items()]
    return [" Another row is the best by another metric: ", *list_parts(entries), "."]


def describe_evidence(p: float, interval: Interval) -> str:
    """What p-value and interval say together; neither is quoted against the other."""
    if p < 0.05:
        return ""
    if interval.low <= 0 <= interval.high:
        return ": on these cases the two cannot be told apart"
    return ": the interval of the mean and the corrected test disagree, so do not rely on it"


def describe_weakest(summary: RowSummary, start: str) -> list[str]:
    """The worst client, where all replicates agree on it; else only its score."""
    found = list(dict.fromkeys(summary.worst_clients))
    if not found:
        return []
    return [
        start,
        Name(found[0]) if len(found) == 1 else "not always the same",
        ", ",
        shown(summary.worst),
        ".",
    ]


def describe_held_out(summary: RowSummary) -> list[str]:
    """Clients that took no part in training, which are not in the mean."""
    if not summary.unseen:
        return []
    if len(summary.unseen) > 3:
        return [f" {len(summary.unseen)} clients were held out of training and are not in the mean."]
    scores = [[Name(client), " ", shown(score)] for client, score in summary.unseen.items()]
    return [" Held out of training, and not in the mean: ", *list_parts(scores), "."]


def describe_references(references: Sequence[RowSummary]) -> list[str]:
    """Rows that are not federated methods: each client alone, all cases in one place."""
    if not references:
        return []
    scores = [[Name(summary.label), " ", shown(summary.mean)] for summary in references]
    return [" For reference: ", *list_parts(scores), "."]


def describe_elsewhere(best: Sequence[RowSummary]) -> list[str]:
    """The best rows on other data, whose scores cannot be ranked beside these."""
    if not best:
        return []
    return [
        " On other data the best is ",
        *list_parts([[Name(s.label), " ", shown(s.mean)] for s in best]),
        ".",
    ]
