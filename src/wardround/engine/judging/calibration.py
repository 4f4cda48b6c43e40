"""Calibration of a finished run: what clients are asked for, and how the server puts it together.

Two exchanges, after the test. First every client that chose the best round sends the sums a common
temperature is fitted from (validation cases). Then, with that temperature, every client sends accuracy by
confidence, before and after scaling (test cases, sums over bins), one row a test case as the case table has
them, and a histogram of case uncertainty (validation cases).

Of validation cases nothing leaves but sums and counts; of test cases one number each beside their scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.clients import Client, Clients
from wardround.config import EvaluateSettings
from wardround.data.annotation import Annotation, find_errors
from wardround.data.cases import Batch, Split
from wardround.engine.judging.evaluation import Regions, mean_dice
from wardround.engine.judging.postprocessing import postprocess_labels
from wardround.losses.partial import merge_logits
from wardround.messages import Message, Reply
from wardround.params import Params
from wardround.training.inference import evaluated_as
from wardround.uncertainty import temperature
from wardround.uncertainty.calibration import Tally, around, log_probabilities
from wardround.uncertainty.histogram import NUM_BINS, bin_of, counted, dense, quantiles, sparse
from wardround.uncertainty.maps import (
    Accumulator,
    Part,
    Predicted,
    case_mean,
    case_uncertainty,
    sampling,
    scores,
    sources,
)
from wardround.uncertainty.quality import (
    area,
    aurc,
    best_aurc,
    curve,
    error_overlap,
    risk_coverage,
    spearman,
    voxel_groups,
)

PARTS: tuple[Part, ...] = ("total", "epistemic")
ROW = ("dice", "uncertainty", "epistemic", "overlap")
MOST_POINTS = 60  # of a curve in calibration.json


# Client


def calibrate(
    client: Client, params: Params, message: Message, regions: Regions, settings: EvaluateSettings
) -> Message:
    """The task "calibrate": `step` says which of the two exchanges it is."""
    judged = (client.model, client.objective, settings.window, settings.tta, client.mirror_axes)
    with evaluated_as(*judged):
        if message.scalars["step"] == "temperature":
            return Message(scalars=temperature_sums(client, params))
        fitted = float(message.scalars["temperature"])
        answer: dict[str, Any] = {}
        if message.scalars["with_validation"]:
            answer["validation"] = validation_histograms(client, params, fitted, settings.passes)
        answer.update(quality_sums(client, params, fitted, regions, settings))
        return Message(scalars=answer)


def iterate_cases(client: Client, split: Split, params: Params) -> Iterator[tuple[int, Tensor, Batch]]:
    """Every case by itself: its place, logits (num_outputs, *spatial), and batch of one."""
    place = 0
    for logits, batch in client.predictions(split, params):
        for number in range(len(batch)):
            one = slice(number, number + 1)
            yield place, logits[number], Batch(batch.image[one], batch.label[one])
            place += 1


def is_usable(logits: Tensor) -> bool:
    """A case whose logits are not numbers says nothing; it is counted and left out."""
    return bool(torch.isfinite(logits).all())


def temperature_sums(client: Client, params: Params) -> dict[str, Any]:
    """Slopes of the likelihood; a client whose labels do not tell all classes apart has none to offer."""
    sums = np.zeros((len(temperature.NAMES), temperature.POINTS))
    cases = voxels = left_out = 0
    annotation = client.data.annotation
    if annotation is not None and annotation.num_groups < len(annotation.groups):
        return {**temperature.scalars(sums), "cases": 0, "voxels": 0, "left_out": len(client.data.val)}
    for _, logits, batch in iterate_cases(client, client.data.val, params):
        truth = batch.label[0]
        if not is_usable(logits) or is_ignored(truth, annotation):
            left_out += 1
            continue
        box = around(truth, client.objective.predict(logits[None])[0])
        counts = find_counted(truth[box], annotation)
        s = scores(client.objective, logits[(None, slice(None), *box)])[0].flatten(1)[:, counts]
        sums += temperature.slopes(s, truth[box].flatten()[counts], temperature.grid())
        cases, voxels = cases + 1, voxels + s.shape[1]
    return {**temperature.scalars(sums), "cases": cases, "voxels": voxels, "left_out": left_out}


def validation_histograms(client: Client, params: Params, fitted: float, passes: int) -> dict[str, Any]:
    """Kind -> name -> histogram of one number a case; kinds are those this model offers."""
    objective, split = client.objective, client.data.val
    numbers: dict[str, dict[str, list[float]]] = {}

    def keep(predicted: Predicted) -> None:
        found = numbers.setdefault(predicted.kind, {})
        found.setdefault("case", []).append(case_uncertainty(predicted))
        epistemic = case_mean(predicted, "epistemic")
        if epistemic is not None:
            found.setdefault("epistemic", []).append(epistemic)

    for _, logits, _ in iterate_cases(client, split, params):
        if is_usable(logits):
            keep(predict_once(client, logits, fitted))
    for kind in sources(client.model, objective):
        if kind in ("samples", "dropout"):
            for predicted in predict_sampled(client, params, kind, fitted, passes):
                keep(predicted)
    return {
        kind: {name: sparse(counted(values)) for name, values in found.items()}
        for kind, found in numbers.items()
    }


def predict_once(client: Client, logits: Tensor, fitted: float) -> Predicted:
    scan = Accumulator(client.objective, temperature=fitted)
    scan.add(logits)
    return scan.result()


def predict_sampled(
    client: Client, params: Params, kind: str, fitted: float, passes: int
) -> Iterator[Predicted]:
    """Every validation case after several passes."""
    repeated = Repeated(client.data.val, passes)
    scan = Accumulator(client.objective, temperature=fitted, kind=kind)
    good = True
    with sampling(client.model, kind):
        for place, logits, _ in iterate_cases(client, repeated, params):
            good = good and is_usable(logits)
            if good:
                scan.add(logits)
            if place % passes == passes - 1:
                if good:
                    yield scan.result()
                scan = Accumulator(client.objective, temperature=fitted, kind=kind)
                good = True


class Repeated:
    """Each case of a split several times in a row, one at a time, so that each is a pass of its own."""

    one_shape = False
    draws = False

    def __init__(self, split: Split, times: int) -> None:
        self._split, self._times = split, times
        self.names = [name for name in split.names for _ in range(times)]

    def __len__(self) -> int:
        return len(self.names)

    def spacing(self, index: int) -> tuple[float, ...]:
        return self._split.spacing(index // self._times)

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        return self._split.batch([int(index) // self._times for index in indices], draw)

    def to(self, device: torch.device) -> Repeated:
        return Repeated(self._split.to(device), self._times)


def quality_sums(
    client: Client, params: Params, fitted: float, regions: Regions, settings: EvaluateSettings
) -> dict[str, Any]:
    """Tallies before and after, voxels and errors by uncertainty, and one row a test case."""
    objective, split = client.objective, client.data.test
    before, after = Tally.empty(), Tally.empty()
    groups = {part: np.zeros((2, NUM_BINS)) for part in PARTS}
    rows: list[dict[str, Any]] = []
    annotation = client.data.annotation
    for place, logits, batch in iterate_cases(client, split, params):
        truth = batch.label[0]
        if not is_usable(logits) or is_ignored(truth, annotation):
            rows.append({"case": split.names[place], **dict.fromkeys(ROW)})
            continue
        predicted = predict_once(client, logits, fitted)
        box = around(truth, predicted.label)
        counts = find_counted(truth[box], annotation)
        s = scores(objective, logits[(None, slice(None), *box)])[0].flatten(1)[:, counts]
        true, label = truth[box].flatten()[counts], predicted.label[box].flatten()[counts]
        before += tally(log_probabilities(s), true, label, annotation)
        after += tally(log_probabilities(s, fitted), true, label, annotation)
        wrong = find_errors(label, true, annotation)
        for part in PARTS:
            values = predicted.part(part)
            if values is not None:
                groups[part] += np.stack(voxel_groups(bin_of(values[box].flatten()[counts]), wrong, NUM_BINS))
        rows.append(
            {
                "case": split.names[place],
                "dice": case_dice(
                    predicted.label, truth, split.spacing(place), regions, settings, annotation
                ),
                "uncertainty": case_uncertainty(predicted),
                "epistemic": case_mean(predicted, "epistemic"),
                "overlap": error_overlap(predicted.total[box].flatten()[counts], wrong),
            }
        )
    return {
        "before": before.scalars(),
        "after": after.scalars(),
        "errors": {part: sparse(*sums) for part, sums in groups.items() if sums.any()},
        "cases": rows,
    }


def is_ignored(truth: Tensor, annotation: Annotation | None) -> bool:
    """Whether every voxel of a label is to be ignored."""
    return annotation is not None and annotation.ignores and bool((truth == annotation.ignored).all())


def find_counted(truth: Tensor, annotation: Annotation | None) -> Tensor | slice:
    """The voxels of a label, row by row, that are not to be ignored."""
    if annotation is None or not annotation.ignores:
        return slice(None)
    return (truth != annotation.ignored).flatten()


def tally(log_p: Tensor, truth: Tensor, predicted: Tensor, annotation: Annotation | None) -> Tally:
    """Of all classes, or of the groups that the client's labels tell apart."""
    if annotation is None:
        return Tally.of(log_p, truth, predicted)
    merged = merge_logits(log_p[None], annotation)[0]
    return Tally.of(merged, annotation.to_groups(truth), annotation.to_groups(predicted))


def case_dice(
    label: Tensor,
    truth: Tensor,
    spacing: Sequence[float],
    regions: Regions,
    settings: EvaluateSettings,
    annotation: Annotation | None = None,
) -> float | None:
    """The mean over regions, as the case table has it; None where it is not defined."""
    predicted = torch.from_numpy(postprocess_labels(label.cpu().numpy(), settings.postprocess))
    if annotation is not None:
        predicted, truth = annotation.drop_ignored(predicted, truth.cpu())
    return finite(mean_dice(predicted.numpy(), truth.cpu().numpy(), regions, spacing, settings.empty_policy))


# Server


def measure_calibration(
    clients: Clients,
    params: Params,
    chosen: Mapping[str, Any],
    *,
    judges: Sequence[str],
    hospitals: Sequence[str],
    passes: int,
) -> dict[str, Any]:
    """What calibration.json says. judges: whose validation cases count; hospitals: who is tested."""
    ask = Message(params=params, scalars={**chosen, "step": "temperature"})
    first = clients.ask("calibrate", ask, to=judges)
    fitted = fit_temperature(first)
    ask = Message(
        params=params,
        scalars={**chosen, "step": "quality", "temperature": fitted.value, "with_validation": False},
    )
    each = {name: Message(scalars={"with_validation": True}) for name in judges}
    replies = clients.ask("calibrate", ask, each=each, to=hospitals)
    return {
        "temperature": fitted.value,
        "temperature_note": fitted.reason,
        "passes": passes,
        "validation_cases": {reply.client: reply.scalars["cases"] for reply in first},
        "quantiles": pooled_quantiles([reply for reply in replies if "validation" in reply.scalars]),
        **summarise_test(replies),
        "missing": sorted(set(hospitals) - {reply.client for reply in replies}),
    }


def fit_temperature(replies: Sequence[Reply]) -> temperature.Temperature:
    sums = [temperature.from_scalars(reply.scalars) for reply in replies if reply.scalars["voxels"]]
    if not sums:
        return temperature.Temperature(
            1.0, "no client has a validation case, with every class annotated, to fit it on"
        )
    return temperature.fit(np.sum(sums, axis=0))


def pooled_quantiles(replies: Sequence[Reply]) -> dict[str, Any]:
    """Kind -> name -> quantiles over the validation cases of all clients."""
    totals: dict[str, dict[str, Any]] = {}
    for reply in replies:
        for kind, found in reply.scalars["validation"].items():
            for name, rows in found.items():
                kept = totals.setdefault(kind, {})
                kept[name] = kept.get(name, 0) + dense(rows)[0]
    return {kind: {name: quantiles(sums) for name, sums in found.items()} for kind, found in totals.items()}


def summarise_test(replies: Sequence[Reply]) -> dict[str, Any]:
    """The part about test cases: overall, and each client by itself."""
    tallies = {
        when: {reply.client: Tally.from_scalars(reply.scalars[when]) for reply in replies}
        for when in ("before", "after")
    }
    groups: dict[str, dict[str, Any]] = {
        reply.client: {part: dense(rows, 2) for part, rows in reply.scalars["errors"].items()}
        for reply in replies
    }
    rows = {reply.client: list(reply.scalars["cases"]) for reply in replies}
    every = [row for found in rows.values() for row in found]
    overall = {when: sum(found.values(), Tally.empty()) for when, found in tallies.items()}
    parts = [part for part in PARTS if any(part in found for found in groups.values())]
    pooled: dict[str, Any] = {
        part: np.sum([found[part] for found in groups.values() if part in found], axis=0) for part in parts
    }
    return {
        "overall": summarise_quality(overall["before"], overall["after"], pooled, every),
        "clients": {
            name: summarise_quality(tallies["before"][name], tallies["after"][name], groups[name], rows[name])
            for name in rows
        },
        "reliability": {when: tally.reliability() for when, tally in overall.items()},
        "risk_coverage": {"cases": case_curve(every)}
        | {part: thin(*curve(*sums)) for part, sums in pooled.items()},
        "cases": [{"client": name, **row} for name, found in rows.items() for row in found],
    }


def summarise_quality(
    before: Tally, after: Tally, groups: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    known = [row for row in rows if row["dice"] is not None]
    risk = [1 - row["dice"] for row in known]
    overlaps = [row["overlap"] for row in rows if row["overlap"] is not None]
    unsure, total = [row["uncertainty"] for row in known], groups.get("total")
    return {
        "before": before.summary(),
        "after": after.summary(),
        "error_overlap": finite(np.mean(overlaps)) if overlaps else None,
        "voxel_aurc": {part: finite(area(*sums)) for part, sums in groups.items()},
        "voxel_error": None if total is None else finite(total[1].sum() / total[0].sum()),
        "aurc": finite(aurc(unsure, risk)),
        "aurc_best": finite(best_aurc(risk)),
        "aurc_chance": finite(np.mean(risk)) if risk else None,
        "spearman": spearman(unsure, [row["dice"] for row in known]),
        "num_cases": len(known),
        "num_left_out": sum(row["uncertainty"] is None for row in rows),
    }


def finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def case_curve(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    known = [row for row in rows if row["dice"] is not None]
    if not known:
        return []
    found = risk_coverage([row["uncertainty"] for row in known], [1 - row["dice"] for row in known])
    return thin(*found)


def thin(coverage: Any, risk: Any) -> list[list[float]]:
    """Pairs [coverage, risk], no more than a chart can show; the last, which is everything, stays."""
    step = max(1, math.ceil(len(coverage) / MOST_POINTS))
    chosen = [*range(0, len(coverage) - 1, step), len(coverage) - 1] if len(coverage) else []
    return [[float(coverage[place]), float(risk[place])] for place in chosen]
