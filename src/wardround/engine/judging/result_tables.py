"""Tables of what runs gave: by client, by method, case by case; and the units of their distances."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.data.federation import Federation
from wardround.data.readers.image_files import WITH_GEOMETRY
from wardround.data.roles import NOT_HOSPITALS
from wardround.engine.judging.aggregates import AGGREGATES, as_json, read_aggregates
from wardround.engine.judging.evaluation import Evaluation
from wardround.files import write_json, write_text
from wardround.metrics import BOTH, METRICS, MM, MM_OR_PX, PX, ClientsSummary, Summary, combine_units
from wardround.tables import Interval, Table, formula_read


def client_table(
    evaluation: Evaluation, metrics: Sequence[str], title: str, units: str = MM, notes: Sequence[str] = ()
) -> Table:
    """One row a client, then mean, SD between clients, weighted mean and worst; last who was held out.

    Several structures: the same again for each of them. units: of distances; notes: for the caption.
    """
    regions = evaluation.regions
    parts = {"": evaluation}
    if len(regions) > 1:
        parts = {name_all(regions): evaluation, **{name: evaluation.of_region(name) for name in regions}}
    rows = [
        [row[0], *([structure] if structure else []), *row[1:]]
        for structure, part in parts.items()
        for row in list_rows(part, metrics)
    ]
    titles = [METRICS[metric].title_in(units) for metric in metrics]
    columns = ["client", *(["structure"] if len(regions) > 1 else []), *titles]
    caption = counts(evaluation, metrics)
    if metrics:
        main, place = METRICS[metrics[0]].label, columns.index(titles[0]) + 1
        columns[place:place] = [f"95 % interval ({main})", "n"]
        caption += f" n: cases behind {main}; the interval is by Student's t over them."
    if len(regions) > 1:
        caption += f" {ALL_STRUCTURES}{describe_unscored(evaluation)}"
    if evaluation.held_out:
        caption += f" {HELD_OUT}"
    caption += describe_sums(evaluation)
    if units == MM_OR_PX and any(METRICS[metric].unit for metric in metrics):
        caption += f" {BOTH}"
    return Table(title, columns, rows, " ".join([caption, *notes]))


def list_rows(evaluation: Evaluation, metrics: Sequence[str]) -> list[list[Any]]:
    """The rows of one structure: a name, the main metric with its interval and n, the other metrics."""
    found, held_out = evaluation.clients, evaluation.held_out
    main = metrics[:1]

    def fill(name: str, values: Sequence[float], sure: Sequence[Any] = ("", "")) -> list[Any]:
        return [name, *values[:1], *(sure if main else ()), *values[1:]]

    def of_client(name: str, shown: str) -> list[Any]:
        sure: list[Any] = []
        for metric in main:
            own = evaluation.summarise_means(metric, name)
            sure = [find_interval(replace(own, mean=found[metric][name].mean), metric), own.num]
        return fill(shown, [found[metric][name].mean for metric in metrics], sure)

    overall = [evaluation.overall[metric] for metric in metrics]
    names = [name for name in next(iter(found.values()), {}) if name not in held_out]
    rows = [of_client(name, name) for name in names]
    rows.append(fill("mean", [entry.mean for entry in overall]))
    rows.append(fill("SD between clients", [sd_between(entry) for entry in overall]))
    rows.append(fill("weighted mean", [entry.weighted_mean for entry in overall]))
    rows.append(fill("worst client", [worst_value(entry) for entry in overall]))
    rows += [of_client(name, mark_held_out(name)) for name in held_out]
    if len(held_out) > 1:
        rows.append(fill(HELD_OUT_MEAN, [evaluation.unseen[metric].mean for metric in metrics]))
    return rows


def name_all(regions: Sequence[str]) -> str:
    """What all structures together are called."""
    return "all" if "all" not in regions else "all together"


OWN_GRID = (
    "Scores are on each scan's own grid; a run's own test is on the prepared one, so the two can differ."
)
SUMS_ONLY = "sent sums over cases, no row of a case: mean, SD and interval are from these."


def describe_sums(evaluation: Evaluation) -> str:
    """Who sent sums alone, and what too few cases were behind."""
    if not evaluation.aggregates:
        return ""
    told = f" {', '.join(sorted(evaluation.aggregates))} {SUMS_ONLY}"
    withheld = {name: one.list_withheld() for name, one in sorted(evaluation.aggregates.items())}
    few = "; ".join(f"{name}: {', '.join(found)}" for name, found in withheld.items() if found)
    return told + (f" Withheld, for too few cases are behind a number: {few}." if few else "")


ALL_STRUCTURES = "All: every case counts once for each of its structures."


def describe_unscored(evaluation: Evaluation) -> str:
    """Who annotates some structures alone, so that means over clients are over different ones."""
    every, found = evaluation.regions, evaluation.regions_of
    few = {name: ", ".join(own) or "nothing" for name, own in found.items() if len(own) < len(every)}
    partial = [f"{name} {told}" for name, told in sorted(few.items())]
    if not partial:
        return ""
    told = f"Clients are scored in what they annotate alone ({'; '.join(partial)})"
    return f" {told}, so compare them structure by structure."


def find_interval(summary: Summary, metric: str) -> Interval:
    """Of the mean of a client's cases, by Student's t."""
    if summary.num < 2 or not math.isfinite(summary.mean):
        return Interval(math.nan, math.nan)
    from scipy.special import stdtrit  # late: only tables need it

    half = float(stdtrit(summary.num - 1, 0.975)) * summary.sd / math.sqrt(summary.num)
    return bound_interval(summary.mean - half, summary.mean + half, metric)


def bound_interval(low: float, high: float, metric: str) -> Interval:
    """An interval that stays where scores can be."""
    entry = METRICS[metric]
    if entry.higher_is_better is None or math.isnan(low):
        return Interval(low, high)
    return Interval(max(0.0, low), min(entry.best, high) if entry.higher_is_better else high)


HELD_OUT_MEAN = "mean of held-out clients"
HELD_OUT = "Held-out clients took no part in training and are in none of the sums over clients."


def mark_held_out(name: str) -> str:
    return f"{name} (held out)"


def sd_between(entry: ClientsSummary) -> float:
    """The SD between clients; one client has none."""
    return entry.sd if entry.num_clients > 1 else math.nan


def worst_value(entry: Any) -> float:
    return float(entry.worst.value) if entry.worst is not None else math.nan


def counts(evaluation: Evaluation, metrics: Sequence[str]) -> str:
    """How many values stand behind the means, and how many could not."""
    parts = []
    for metric in metrics:
        entry = evaluation.overall[metric]
        notes = [f"{entry.num_cases} values"]
        if entry.num_skipped:
            notes.append(f"{entry.num_skipped} undefined")
        if entry.num_infinite:
            notes.append(f"{entry.num_infinite} infinite, left out of the mean")
        parts.append(f"{METRICS[metric].label}: {', '.join(notes)}")
    return "; ".join(parts) + "."


def method_table(
    results: Mapping[str, Evaluation],
    metric: str,
    title: str,
    extra: Mapping[str, Sequence[Any]] | None = None,
    objectives: Sequence[str] = (),
) -> Table:
    """Rows methods, columns mean, worst, what is given as extra, and each client's test set.

    objectives: of each row; they stand beside the methods where they differ.
    """
    differ = len(set(objectives)) > 1
    clients = sorted({name for result in results.values() for name in result.clients[metric]})
    extra = extra or {}
    rows: list[list[Any]] = []
    for label, result in results.items():
        summaries = result.clients[metric]
        values = [summaries[name].mean if name in summaries else math.nan for name in clients]
        overall = result.overall[metric]
        start = [label, *([objectives[len(rows)]] if differ else [])]
        rows.append(
            [*start, overall.mean, worst_value(overall), *(extra[key][len(rows)] for key in extra), *values]
        )
    caption = ""
    for result in list(results.values())[:1]:
        found = {name: result.summarise_means(metric, name).num for name in result.clients[metric]}
        counted = ", ".join(f"{name} {number}" for name, number in found.items())
        caption = f"Test cases: {counted}. The report has each hospital's 95 % interval."
    heads = ["method", *(["objective"] if differ else []), "mean", "worst"]
    return Table(title, [*heads, *extra, *clients], rows, caption)


def case_rows(evaluation: Evaluation, metrics: Sequence[str]) -> Table:
    """One row a case and region, for cases.csv."""
    rows = [
        [client, row["case"], region, *(scores[metric] for metric in metrics)]
        for client, cases in evaluation.cases.items()
        for row in cases
        for region, scores in row["regions"].items()
    ]
    return Table("cases", ["client", "case", "region", *metrics], rows)


def write_cases(folder: Path, evaluation: Evaluation, metrics: Sequence[str]) -> None:
    """cases.csv, and aggregates.json for clients that sent sums alone."""
    write_text(folder / "cases.csv", case_rows(evaluation, metrics).csv())
    if evaluation.aggregates:
        write_json(folder / AGGREGATES, as_json(evaluation.aggregates))


def read_case_rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What `case_rows` wrote, by client; nothing where there is no such file, or it is damaged."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file)
            metrics = next(lines)[3:]
            for line in lines:
                client, case, region = map(formula_read, line[:3])
                row = found.setdefault(client, {}).setdefault(case, {"case": case, "regions": {}})
                row["regions"][region] = dict(zip(metrics, map(float, line[3:]), strict=True))
    except (OSError, ValueError, StopIteration):
        return {}
    return {client: list(rows.values()) for client, rows in found.items()}


def read_test(
    result: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    participation: float | Sequence[str],
    cases: Path | None = None,
) -> Evaluation | None:
    """The test in result.json, or None. cases: the run's cases.csv.

    Older files do not say who was held out: those whom no round asked to train, unless rounds chose a share
    of the clients or trained on everybody's cases in one place.
    """
    if not result.get("test"):
        return None
    test = Evaluation.from_dict(result["test"])
    if cases is not None:
        test = replace(
            test, cases=read_case_rows(cases), aggregates=read_aggregates(cases.with_name(AGGREGATES))
        )
    if "held_out" in result or (isinstance(participation, float) and participation < 1):
        return test
    trained = {name for record in records for name in record.get("clients", ())}
    if not trained or trained & NOT_HOSPITALS:
        return test
    return test.set_apart({name for found in test.clients.values() for name in found} - trained)


# Units of distances: millimetres where files have a spacing, pixels where they do not. A picture has none,
# and a pixel of it counts as 1; so does a voxel of a NumPy array. Hospitals send the spacing, not the files:
# there, images of 1 x 1 may be either.


def detect_units(federation: Federation) -> str:
    """mm, px, or either; synthetic cases have a spacing in mm."""
    if federation.first_images is not None:
        images = federation.first_images()
        return combine_units(MM if path.name.lower().endswith(WITH_GEOMETRY) else PX for path in images)
    if federation.units is not None:
        return federation.units
    seen = None if federation.summarise_scans is None else federation.summarise_scans().spacing
    if seen is None or federation.dimensions == 3 or any(side != 1 for sides in seen for side in sides):
        return MM
    return MM_OR_PX


def read_units(result: Mapping[str, Any]) -> str:
    """What result.json says; older files call it lengths, and the oldest, in mm, say nothing."""
    found = result.get("units", result.get("lengths"))
    return found if found in (MM, PX, MM_OR_PX) else MM
