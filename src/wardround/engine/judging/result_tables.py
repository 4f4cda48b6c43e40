"""Tables of what runs gave: by client, by method, case by case; and the units of their distances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wardround.data.federation import Federation
from wardround.data.readers.image_files import WITH_GEOMETRY
from wardround.data.roles import NOT_HOSPITALS
from wardround.engine.judging.evaluation import Evaluation
from wardround.metrics import BOTH, METRICS, MM, MM_OR_PX, PX, ClientsSummary, Summary, combine_units
from wardround.tables import Interval, Table


def client_table(evaluation: Evaluation, metrics: Sequence[str], title: str, units: str = MM) -> Table:
    """One row a client, then mean, SD between clients, weighted mean and worst; last who was held out.

    units: of distances.
    """
    found, held_out = evaluation.clients, evaluation.held_out
    names = [name for name in next(iter(found.values()), {}) if name not in held_out]
    rows: list[list[Any]] = [[name, *(found[metric][name].mean for metric in metrics)] for name in names]
    overall = [evaluation.overall[metric] for metric in metrics]
    rows.append(["mean", *(entry.mean for entry in overall)])
    rows.append(["SD between clients", *(sd_between(entry) for entry in overall)])
    rows.append(["weighted mean", *(entry.weighted_mean for entry in overall)])
    rows.append(["worst client", *(worst_value(entry) for entry in overall)])
    rows += [[mark_held_out(name), *(found[metric][name].mean for metric in metrics)] for name in held_out]
    if len(held_out) > 1:
        rows.append([HELD_OUT_MEAN, *(evaluation.unseen[metric].mean for metric in metrics)])
    columns = ["client", *(METRICS[m].title_in(units) for m in metrics)]
    caption = counts(evaluation, metrics)
    for main in metrics[:1]:
        for row, name in zip(rows, [*names, *[""] * 4, *held_out, ""], strict=False):
            own = found[main].get(name)
            row += ["", ""] if own is None else [own.num, find_interval(own, main)]
        columns += ["n", f"95 % interval ({METRICS[main].label})"]
        caption += f" n and interval: of the values behind {METRICS[main].label}."
    if held_out:
        caption += f" {HELD_OUT}"
    if units == MM_OR_PX and any(METRICS[metric].unit for metric in metrics):
        caption += f" {BOTH}"
    return Table(title, columns, rows, caption)


def find_interval(summary: Summary, metric: str) -> Interval:
    """Of a client's mean, by Student's t over its values; regions of a case count as values of their own."""
    if summary.num < 2 or not math.isfinite(summary.mean):
        return Interval(math.nan, math.nan)
    from scipy.special import stdtrit  # late: only tables need it

    half = float(stdtrit(summary.num - 1, 0.975)) * summary.sd / math.sqrt(summary.num)
    low, high = summary.mean - half, summary.mean + half
    entry = METRICS[metric]
    if entry.higher_is_better is None:
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
) -> Table:
    """Rows methods, columns each client's test set, mean and worst."""
    clients = sorted({name for result in results.values() for name in result.clients[metric]})
    extra = extra or {}
    rows: list[list[Any]] = []
    for label, result in results.items():
        summaries = result.clients[metric]
        values = [summaries[name].mean if name in summaries else math.nan for name in clients]
        overall = result.overall[metric]
        rows.append(
            [label, *values, overall.mean, worst_value(overall), *(extra[key][len(rows)] for key in extra)]
        )
    return Table(title, ["method", *clients, "mean", "worst", *extra], rows)


def case_rows(evaluation: Evaluation, metrics: Sequence[str]) -> Table:
    """One row a case and region, for cases.csv."""
    rows = [
        [client, row["case"], region, *(scores[metric] for metric in metrics)]
        for client, cases in evaluation.cases.items()
        for row in cases
        for region, scores in row["regions"].items()
    ]
    return Table("cases", ["client", "case", "region", *metrics], rows)


def read_test(
    result: Mapping[str, Any], records: Iterable[Mapping[str, Any]], participation: float | Sequence[str]
) -> Evaluation | None:
    """The test in result.json, or None.

    Older files do not say who was held out: those whom no round asked to train, unless rounds chose a share
    of the clients or trained on everybody's cases in one place.
    """
    if not result.get("test"):
        return None
    test = Evaluation.from_dict(result["test"])
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
