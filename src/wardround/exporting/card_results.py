"""The part of a model card that says how good the model is: results, calibration, known failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from wardround.comparison.runs import mapping, number
from wardround.comparison.statistics import Scores, bootstrap, client_mean
from wardround.exporting.package import Package
from wardround.methods.base import Method
from wardround.metrics import METRICS
from wardround.tables import Interval, Table, escaped, shown

WORST_CASES = 5
MOST_LINES = 10


def results(package: Package) -> Iterator[str]:
    run = package.run
    if run.test is None or not run.cases:
        yield "The run has no test cases, so the quality of this model is unknown."
        return
    for metric in run.metrics:
        if metric in run.cases and metric in run.test.clients:
            yield from metric_results(package, metric)
    yield (
        "Intervals hold 95 % of the means over resampled test cases of each site (bootstrap). They show how "
        "much the mean depends on the test cases, not how another site would do. Infinite distances (one "
        "mask is empty) are counted and left out of the means."
    )
    yield from whose_results(package)


def metric_results(package: Package, metric: str) -> Iterator[str]:
    run, names, entry = package.run, package.names, METRICS[metric]
    assert run.test is not None
    scores, overall = run.cases[metric], run.test.overall[metric]
    rows: list[list[Any]] = []
    for client, summary in run.test.clients[metric].items():
        own = select_client(scores, client)
        rows.append(
            [names.get(client, client), summary.mean, bootstrap(own), summary.num, summary.num_infinite]
        )
    rows.append(["mean over sites", overall.mean, bootstrap(scores), overall.num_cases, overall.num_infinite])
    if overall.worst is not None:
        worst = overall.worst
        rows.append(
            [
                f"worst site: {names.get(worst.client, worst.client)}",
                worst.value,
                bootstrap(select_client(scores, worst.client)),
                run.test.clients[metric][worst.client].num,
                run.test.clients[metric][worst.client].num_infinite,
            ]
        )
    better = {True: "higher is better", False: "lower is better", None: f"{entry.best:g} is best"}
    yield f"### {entry.title_in(run.lengths)}, {better[entry.higher_is_better]}"
    heads = ["site", "mean", "95 % interval", "values", "infinite"]
    yield Table("", heads, [plain(row) for row in rows]).markdown()


def whose_results(package: Package) -> Iterator[str]:
    """A note where sites were tested with personal models."""
    trained, method = package.trained, package.trained.method
    if type(method).personal is Method.personal and not trained.warnings and trained.client is None:
        return
    if trained.client is not None:
        name = escaped(package.names[trained.client])
        yield f"Each site was tested with its own model: only the row of {name} is about this one."
    elif type(method).personal is not Method.personal or method.kind == "personal":
        yield "Each site was tested with its own personal model; the one exported here is the common one."


def select_client(scores: Scores, client: str) -> Scores:
    return {key: value for key, value in scores.items() if key.client == client}


# Calibration


def uncertainty(package: Package) -> Iterator[str]:
    known = package.trained.calibration
    if known is None:
        yield "The run has no calibration.json: its calibration was not measured."
        return
    temperature = package.temperature
    yield (
        f"Temperature {temperature:.4g}, fitted on validation cases. Probabilities are after it, "
        "logits before it."
        if temperature != 1
        else "No temperature is applied (it is 1)."
    )
    if known.get("temperature_note"):
        yield f"Note: {escaped(str(known['temperature_note']))}."
    overall = mapping(known.get("overall"))
    before, after = mapping(overall.get("before")), mapping(overall.get("after"))
    labels = {
        "ece": "ECE",
        "adaptive_ece": "adaptive ECE",
        "brier": "Brier score",
        "nll": "negative log-likelihood",
    }
    rows = [
        [label, number(before.get(key)), number(after.get(key))]
        for key, label in labels.items()
        if key in before or key in after
    ]
    if rows:
        yield Table(
            "", ["test voxels, all sites", "before", "after temperature"], plain_rows(rows)
        ).markdown()
    sites = [
        [
            package.names.get(name, name),
            *(number(mapping(mapping(entry).get(w)).get("ece")) for w in ("before", "after")),
        ]
        for name, entry in mapping(known.get("clients")).items()
    ]
    if sites:
        yield Table("", ["ECE by site", "before", "after temperature"], plain_rows(sites)).markdown()
    told = {
        "spearman": "rank correlation of a case's uncertainty with its Dice",
        "aurc": "area under the risk-coverage curve (cases)",
        "aurc_chance": "the same for random uncertainty",
        "error_overlap": "overlap of uncertain and wrong voxels",
    }
    lines = [
        f"- {text}: {shown(number(overall[key]))}"
        for key, text in told.items()
        if overall.get(key) is not None
    ]
    if lines:
        yield "\n".join(lines)


# Where it fails


def failures(package: Package) -> Iterator[str]:
    yield from worst_cases(package)
    yield from weak_sites(package)
    run = package.run
    for kind, title in (("refused", "refused by the server's checks"), ("lost", "lost")):
        found = run.records.trouble(kind)
        if found:
            what = Counter(package.anonymise(who.rpartition("/")[2]) for _, who, _ in found)
            told = ", ".join(f"{escaped(who)} {count}" for who, count in what.items())
            yield f"Replies {title}: {len(found)} ({told})."
        else:
            yield f"Replies {title}: 0."
    warnings = [
        f"{text} (rounds {rounds[0]} to {rounds[-1]})" if len(rounds) > 1 else f"{text} (round {rounds[0]})"
        for text, rounds in run.records.warnings().items()
    ] + list(package.trained.warnings)
    if warnings:
        listed = [f"- {escaped(package.anonymise(text))}" for text in warnings[:MOST_LINES]]
        more = len(warnings) - len(listed)
        yield "Warnings of the run:\n\n" + "\n".join(listed + ([f"- and {more} more"] if more > 0 else []))
    yield "**TODO** Add what you have seen go wrong in use."


def worst_cases(package: Package) -> Iterator[str]:
    """The worst values, without names of cases."""
    run = package.run
    for metric in run.metrics:
        scores = {key: v for key, v in run.cases.get(metric, {}).items() if not math.isnan(v)}
        if scores:
            title = METRICS[metric].title_in(run.lengths)
            ranked = sorted(scores.items(), key=lambda item: -badness(metric, item[1]))[:WORST_CASES]
            rows = [[package.names.get(k.client, k.client), k.region, value] for k, value in ranked]
            yield f"The {len(rows)} worst test values of {title}:"
            yield Table("", ["site", "structure", title], plain_rows(rows)).markdown()


def weak_sites(package: Package) -> Iterator[str]:
    """Sites whose whole interval is on the bad side of the mean over sites."""
    run = package.run
    for metric in run.metrics:
        scores = run.cases.get(metric, {})
        mean = client_mean(scores)
        for client in package.names:
            own = select_client(scores, client)
            interval = bootstrap(own)
            if own and not math.isnan(mean) and is_worse(metric, interval, mean):
                here = f"{shown(client_mean(own))} {shown(interval)}"
                yield (
                    f"{escaped(package.names[client])} lies far from the mean over sites in "
                    f"{METRICS[metric].label}: {here}, all of the interval on the bad side of {shown(mean)}."
                )


def is_worse(metric: str, interval: Interval, mean: float) -> bool:
    higher = METRICS[metric].higher_is_better
    if higher is None or math.isnan(interval.low):
        return False
    return interval.high < mean if higher else interval.low > mean


def badness(metric: str, value: float) -> float:
    entry = METRICS[metric]
    if entry.higher_is_better is None:
        return abs(value - entry.best)
    return -value if entry.higher_is_better else value


# Cells


def plain(row: Sequence[Any]) -> list[Any]:
    """Whole numbers as text, so that the table does not give them decimals."""
    return [str(value) if isinstance(value, int) else value for value in row]


def plain_rows(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [plain(row) for row in rows]
