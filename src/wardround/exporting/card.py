"""MODEL_CARD.md: what a model is for, what it was made from, what it reached and where it fails.

Everything is read from the run folder. What a run cannot know (licence of the data, who is responsible for
the model) is a line that starts with TODO. The card has no name of a case, no path and no picture.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.comparison.runs import mapping, number
from wardround.comparison.statistics import distance_to_best
from wardround.exporting.card_results import results, site_values, table
from wardround.exporting.package import Package
from wardround.files import compute_sha256, write_text
from wardround.methods import METHODS, OBJECTIVES
from wardround.metrics import METRICS, PX
from wardround.models import MODELS
from wardround.models.foreign_networks import MONAI_PREFIX
from wardround.privacy.words import describe_privacy
from wardround.tables import Interval, escaped, shown
from wardround.text import format_size
from wardround.version import __version__

WORST_CASES = 5
MOST_LINES = 10


def write_card(path: Path, package: Package, *, kind: str, files: Mapping[str, Path]) -> None:
    """files: name on the card -> exported file, for their hashes."""
    write_text(path, card(package, kind=kind, files=files))


def card(package: Package, *, kind: str, files: Mapping[str, Path]) -> str:
    sections = [
        ("", opening(package, kind)),
        ("Intended use", intended_use(package)),
        ("Data", data(package)),
        ("Results", results(package)),
        ("Uncertainty and calibration", uncertainty(package)),
        ("Known failures and limits", failures(package)),
        ("How it was trained", training(package)),
        ("Methods and citations", citations(package)),
        ("Licence", licence()),
        ("Hashes", hashes(package, files)),
    ]
    parts = ["\n\n".join([*([f"## {title}"] if title else []), *lines]) for title, lines in sections]
    return "\n\n".join(parts) + "\n"


# Purpose


def opening(package: Package, kind: str) -> Iterator[str]:
    trained = package.trained
    whose = ""
    if trained.client is not None:
        whose = f" It is the personal model of {escaped(package.names[trained.client])}."
    yield f"# Model card: {escaped(package.name)}"
    method = package.run.method
    title = METHODS[method].title if method in METHODS else method
    sites = len(package.run.num_trained) or len(package.run.clients)
    yield (
        f"A segmentation network trained across {sites} sites with {title}"
        f", exported as {kind} by wardround {__version__} from the records of its run.{whose} "
        "Lines that start with **TODO** are for you to fill in: they are not known to the run."
    )


def intended_use(package: Package) -> Iterator[str]:
    preparation = package.preparation
    prepare, window = preparation.prepare, preparation.window
    classes = zip(preparation.values, preparation.classes, strict=True)
    what = ", ".join(preparation.classes[1:]) or "nothing"
    image = "2D images" if preparation.dimensions == 2 else "3D scans"
    channels = ", ".join(preparation.channels) or f"{preparation.in_channels} without names"
    yield "**Research use only. This is not a medical device.**"
    rows = [
        ("task", f"segments {what} in {image}"),
        ("channels", f"{channels}; a scan may lack some" if preparation.lacking else channels),
        ("values in a mask", ", ".join(f"{value} {name}" for value, name in classes)),
        *((f"preparation, {key}", value) for key, value in describe_preparation(prepare).items()),
        *([("preparation, orientation", "as stored")] if prepare.get("orientation") is None else []),
        *([("slices", package.orientation_note)] if preparation.settings.slices is not None else []),
        ("input size", "whole image" if window is None else f"{format_size(window)} voxels"),
    ]
    if preparation.spacing is not None and package.run.lengths != PX:
        low, high = (" x ".join(f"{side:.3g}" for side in sides) for sides in preparation.spacing)
        rows.append(("voxels of the training scans", f"{low} to {high} mm"))
    yield listed(rows)
    yield (
        "Not for: diagnosis, treatment or any decision about a patient; scans of other body parts, "
        "modalities or channels than those above; use without a person who reviews every mask. It was "
        "tested at the sites below and nowhere else."
    )
    yield "**TODO** Name who is responsible for this model, and the question it was made for."


def describe_preparation(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that have an effect."""
    normalise = settings.get("normalise")
    unused = {"percentiles": "percentile", "window": "window", "intensities": "ct"}
    return {
        key: str(value)
        for key, value in settings.items()
        if value is not None and key != "slices" and unused.get(key, normalise) == normalise
    }


# Data


def data(package: Package) -> Iterator[str]:
    run, names = package.run, package.names
    validation = count_validation(run.records)
    tested = {
        client: len({key.case for key in next(iter(run.cases.values()), {}) if key.client == client})
        for client in names
    }
    rows: list[list[Any]] = [
        [names[client], run.num_trained.get(client, 0), validation.get(client, 0), tested[client]]
        for client in names
    ]
    rows.append(["all", *(sum(row[column] for row in rows) for column in (1, 2, 3))])
    yield table(["site", "training", "validation", "test"], rows)
    yield "Numbers of cases; nothing else about them is exported."
    if run.unlabelled:
        counts = ", ".join(f"{names.get(name, name)} {count}" for name, count in run.unlabelled.items())
        yield f"Training cases without a label: {counts}; they are in no score."
    if run.partition is not None:  # a card names no folder
        yield f"**{escaped(replace(run.partition, of='one collection of cases').sentence)}**"
    left_out = count_left_out(package)
    if left_out:
        yield "Cases left out because they could not be used: " + ", ".join(left_out) + "."
    if mapping(run.config.get("data")).get("federation") is None:
        yield "The cases are synthetic phantoms, not patients."
    else:
        yield "**TODO** Say where the cases come from: population, scanners, years, labels, consent."


def count_validation(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Validation cases of each client: as many as it has losses in the last round that has some."""
    for record in reversed(records):
        clients = mapping(mapping(mapping(record.get("validation")).get("loss")).get("clients"))
        if clients:
            keys = ("num", "num_skipped", "num_infinite")
            return {name: sum(int(entry.get(key, 0)) for key in keys) for name, entry in clients.items()}
    return {}


def count_left_out(package: Package) -> list[str]:
    path = package.run.folder / "left_out.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    return [f"{escaped(package.names.get(name, name))} {len(cases)}" for name, cases in found.items()]


# Training


def training(package: Package) -> Iterator[str]:
    config, run = package.trained.config, package.run
    best = run.result.get("best_round")
    is_last = config.evaluate.model == "last" or best is None
    tested = "the last" if is_last else f"round {best}, best on validation"
    optimizer = config.optimizer.model_dump(mode="json")
    work = ("local epochs, batch size", f"{config.local_epochs}, {config.batch_size}")
    if config.local_steps is not None:
        work = ("local steps, batch size", f"{config.local_steps}, {config.batch_size}")
    rows = [
        ("network", config.model.name),
        ("parameters", f"{sum(tensor.numel() for tensor in package.network.parameters()):,}"),
        ("method", run.method),
        ("objective", run.objective),
        ("rounds", f"{run.result.get('rounds')} (exported: {tested})"),
        work,
        ("optimizer", f"{optimizer.get('name')}, learning rate {optimizer.get('learning_rate')}"),
        ("seed", str(config.seed)),
        ("seconds in rounds", shown(number(run.result.get("seconds")))),
    ]
    for key, value in run.environment.items():
        if key != "seed":
            rows.append((key, "not known" if value is None else str(value)))
    yield listed(rows)
    private = describe_privacy(run.records, {name: escaped(called) for name, called in package.names.items()})
    if private is not None:
        yield private
    weights = list(mapping(run.records[-1].get("weights")).items()) if run.records else []
    if weights:
        told = ", ".join(f"{escaped(package.names.get(n, n))} {shown(number(w))}" for n, w in weights)
        yield f"Weights of the sites in the last round: {told}."


def citations(package: Package) -> Iterator[str]:
    run, config = package.run, package.trained.config
    items = []
    method = METHODS.get(run.method)
    if method is not None:
        paper = " ".join(filter(None, [method.paper, str(method.year) if method.year else ""]))
        said = paper or ("a reference, no paper" if method.kind == "reference" else "no paper named")
        items.append(f"- Method: {method.title}. {said}." + (f" <{method.link}>" if method.link else ""))
    objective = OBJECTIVES.get(run.objective)
    if objective is not None:
        items.append(f"- Objective: {objective.title}." + (f" {objective.paper}." if objective.paper else ""))
    info = MODELS.get(config.model.name)
    if info is not None:
        items.append(f"- Network: {info.title}. {info.paper}.")
    elif not config.model.name.startswith(MONAI_PREFIX):
        items.append(f"- Network: {config.model.name}, of the user's own.")
    else:
        items.append(f"- Network: {config.model.name}, of MONAI (Cardoso et al., 2022). <https://monai.io>")
    items.append(f"- Software: wardround {run.environment.get('wardround', __version__)}.")
    yield "\n".join(items)


def licence() -> Iterator[str]:
    lines = [
        "- Code (wardround and what it wrote here): Apache-2.0.",
        "- **TODO** Licence of these weights: wardround cannot know it; the data's terms may limit it.",
        "- **TODO** Licence of the training data, site by site.",
    ]
    yield "\n".join(lines)


def hashes(package: Package, files: Mapping[str, Path]) -> Iterator[str]:
    run = package.run
    config = run.folder / "config.yaml"
    rows = [
        ("exported parameters", package.params.sha256()),
        ("parameters after the last round", str(run.result.get("params_sha256"))),
        ("config.yaml of the run", compute_sha256(config) if config.exists() else "not known"),
        *((name, compute_sha256(path)) for name, path in files.items()),
    ]
    yield "SHA-256:\n\n" + listed(rows)


def listed(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {escaped(key)}: {escaped(value)}" for key, value in rows)


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
        yield table(["test voxels, all sites", "before", "after temperature"], rows)
    sites = [
        [
            package.names.get(name, name),
            *(number(mapping(mapping(entry).get(w)).get("ece")) for w in ("before", "after")),
        ]
        for name, entry in mapping(known.get("clients")).items()
    ]
    if sites:
        yield table(["ECE by site", "before", "after temperature"], sites)
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
            badness = distance_to_best(METRICS[metric].best, METRICS[metric].higher_is_better)
            ranked = sorted(scores.items(), key=lambda item: -badness(item[1]))[:WORST_CASES]
            rows = [[package.names.get(k.client, k.client), k.region, value] for k, value in ranked]
            yield f"The {len(rows)} worst test values of {title}:"
            yield table(["site", "structure", title], rows)


def weak_sites(package: Package) -> Iterator[str]:
    """Sites whose whole interval is on the bad side of the mean over sites."""
    run = package.run
    for metric in run.metrics:
        if run.test is None or metric not in run.test.clients:
            continue
        mean = run.test.overall[metric].mean
        for client in (name for name in package.names if name in run.test.clients[metric]):
            value, interval, *_ = site_values(run.test, metric, client)
            if not math.isnan(mean) and is_worse(metric, interval, mean):
                here = f"{shown(value)} {shown(interval)}"
                yield (
                    f"{escaped(package.names[client])} lies far from the mean over sites in "
                    f"{METRICS[metric].label}: {here}, all of the interval on the bad side of {shown(mean)}."
                )


def is_worse(metric: str, interval: Interval, mean: float) -> bool:
    higher = METRICS[metric].higher_is_better
    if higher is None or math.isnan(interval.low):
        return False
    return interval.high < mean if higher else interval.low > mean
