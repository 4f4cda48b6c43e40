"""The result in a few sentences, which say no more than the tests bear."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wardround.comparison.scores import RowSummary, Sheet, Statistics, summarise_row
from wardround.methods import METHODS
from wardround.metrics import METRICS
from wardround.reporting.html import Html, join, name, tag
from wardround.reporting.sections import badness
from wardround.tables import Interval, PValue, Spread, shown


def in_words(sheet: Sheet, statistics: Statistics, methods: Mapping[str, str], tested: str = "test ") -> Html:
    """The best federated row, how it stands to the reference, its weakest client, and what `local` reaches.

    methods: the method of each row; references (local, centralised) are told apart from the others;
    tested: what goes before the name of the score.
    """
    metric = statistics.metric
    clients = sheet.clients(metric)
    summaries = [summarise_row(row, metric, clients) for row in sheet.rows if row.replicates]
    if len(summaries) == 1:
        return one_row(summaries[0], sheet, metric, tested)
    federated = [summary for summary in summaries if not is_reference(methods.get(summary.label, ""))]
    best = min(
        federated or summaries, key=lambda summary: (summary.num_infinite, value_loss(metric, summary.mean))
    )
    aside = [summary for summary in summaries if federated and summary not in federated]
    entry = METRICS[metric]
    extreme = "highest" if entry.higher_is_better else "lowest" if entry.higher_is_better is False else "best"
    whom = "Of the federated methods, " if aside else ""
    over = f" over {sheet.expected} {sheet.over}" if best.mean.sd is not None else ""
    return join(
        whom, name(best.label), f" has the {extreme} mean {tested}{entry.label}: ",
        tag("strong", shown(best.mean)), unit(metric, sheet), over, ".",
        against_reference(statistics, best.label),
        weakest(best, " Its weakest client is "),
        beside(aside),
    )  # fmt: skip


def is_reference(method: str) -> bool:
    return method in METHODS and METHODS[method].kind == "reference"


def one_row(summary: RowSummary, sheet: Sheet, metric: str, tested: str) -> Html:
    num_clients = len(sheet.clients(metric))
    over = "the only client" if num_clients == 1 else f"{num_clients} clients"
    value = join(tag("strong", shown(summary.mean)), unit(metric, sheet))
    last = weakest(summary, " The weakest is ") if num_clients > 1 else None
    return join(f"Mean {tested}{METRICS[metric].label} over {over}: ", value, ".", last)


def against_reference(statistics: Statistics, label: str) -> Html | None:
    """The paired test of one row, and whether the two can be told apart."""
    test = statistics.row(label).test
    if test is None:
        return None
    p = PValue(test.p_holm)
    said = shown(p).replace("<", "< ") if shown(p).startswith("<") else f"= {shown(p)}"
    return join(
        " Against ", name(statistics.reference), ", case by case, it differs by ",
        ("+" if test.difference > 0 else "") + shown(test.difference), " ", shown(test.interval),
        f" (p {said} after Holm's correction)",
        how_sure(p, test.interval), ".",
    )  # fmt: skip


def how_sure(p: float, interval: Interval) -> str:
    """What the two say together; neither is quoted against the other."""
    if p < 0.05:
        return ""
    if interval.low <= 0 <= interval.high:
        return ": on these cases the two cannot be told apart"
    return ": the interval of the mean and the corrected test disagree, so do not build on it"


def weakest(summary: RowSummary, start: str) -> Html | None:
    """The client that does worst, where all replicates agree on it; else how badly the worst does."""
    found = list(dict.fromkeys(summary.worst_clients))
    if not found:
        return None
    who = [name(found[0])] if len(found) == 1 else ["not always the same"]
    return join(start, who, ", ", shown(summary.worst), ".")


def beside(aside: Sequence[RowSummary]) -> Html | None:
    """References, which are no federated methods: each client alone, all cases in one place."""
    if not aside:
        return None
    told = [join(name(summary.label), " ", shown(summary.mean)) for summary in aside]
    listed = [part for entry in told for part in (", ", entry)][1:]
    return join(" For reference: ", listed, ".")


def unit(metric: str, sheet: Sheet) -> str:
    found = METRICS[metric].unit_in(sheet.lengths)
    return f" {found}" if found else ""


def value_loss(metric: str, value: Spread) -> float:
    """How bad a mean is; what is unknown comes last."""
    return math.inf if math.isnan(value.mean) else badness(metric)(value.mean)
