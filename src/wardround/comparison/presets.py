"""A paper's table as a comparison: its rows, its seeds, and the printed numbers beside ours."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.comparison.departures import Departures, describe_overrides
from wardround.comparison.grid import Grid, HoldOut, Row, build_grid, check_settings
from wardround.comparison.statistics import mean
from wardround.comparison.sweep import list_dotted, parse_seeds
from wardround.comparison.tables import MEAN, WEIGHTED
from wardround.errors import ConfigError
from wardround.metrics import METRICS, PX
from wardround.papers import presets as papers
from wardround.papers.data import SEED, PaperData, prepare_data
from wardround.papers.scaling import WHOLE, Scale
from wardround.tables import Spread
from wardround.text import suggest
from wardround.yaml_file import apply_override, read_yaml

log = logging.getLogger(__name__)

SHARES = ("share", "percent")  # what can stand beside our numbers, which are shares
NAMES = ("method.name", "objective.name", "model.name")
OURS = {  # printed columns over clients
    "mean": MEAN,
    "weighted mean": WEIGHTED,
    "merged test set": WEIGHTED,  # all test cases pooled: every case counts the same
    "all clients": MEAN,  # the averaging is not said
}


def find_preset(source: Any) -> str | None:
    """The preset a name (`safcf-table2`) or its file stands for, if it does."""
    if not isinstance(source, str | Path):
        return None
    path = Path(source)
    if not path.exists():
        return str(source) if str(source) in papers.list_names() else None
    if path.stem in papers.list_names() and path.is_file():
        keys = set(read_yaml(path))
        return path.stem if "about" in keys and keys & {"datasets", "like"} else None
    return None


@dataclasses.dataclass(frozen=True)
class PaperPlan:
    """The data and the reduction of a paper's table. federations: those that can be run, on disk."""

    federations: Mapping[str, PaperData]
    scale: Scale = WHOLE
    notes: Sequence[str] = ()


def list_preset_rows(
    preset: papers.PaperPreset,
    overrides: Sequence[str],
    only: Sequence[str] | None = None,
    plan: PaperPlan | None = None,
) -> tuple[list[Row], list[int], list[str]]:
    """The rows this version can run, the paper's seeds, and notes.

    Without a plan, on the data that the overrides name, for one federation of the table. only: labels, or
    rows, which stand for all their points of the grid.
    """
    chosen, rest = choose_federation(preset, overrides)
    if plan is None:
        plan = plan_named_data(preset, chosen, rest)
    labels = list(dict.fromkeys(name for cell in preset.list_runs() for name in (cell.row, cell.label)))
    only = join_labels(only or (), labels)
    for label in only:
        if label not in labels:
            raise ConfigError(
                f"{preset.name} has no row '{label}'.{suggest(label, labels)} Rows: {'; '.join(labels)}."
            )
    rows, notes = [], []
    departures = Departures()
    for cell in preset.list_runs():
        if cell.datasets not in plan.federations or (only and not {cell.label, cell.row} & set(only)):
            continue
        federation = preset.datasets[cell.datasets]
        small = dataclasses.replace(cell, settings=plan.scale.settings(cell.settings))
        settings = copy.deepcopy(small.settings)
        apply_federation(settings, federation, plan.federations[cell.datasets])
        for override in rest:
            apply_override(settings, override)
        lacking = find_obstacle(settings)
        if lacking:
            notes.append(f"Not run: {cell.label} ({lacking.rstrip('.')}).")
        else:
            rows.append(Row(relabel(small, settings), settings, dict(cell.changes)))
            departures.add(cell.settings, federation, settings)
    if not rows:
        raise ConfigError(f"{preset.name}: nothing can be run. {' '.join(notes[:1])}".strip())
    for note in notes:
        log.warning("%s", note)
    rows = share_runs(rows)
    if any(row.run_of is not None for row in rows):
        notes.append("Rows that differ in rounds alone are of one run, tested after each of them.")
    seeds = list(preset.datasets[next(iter(plan.federations))].seeds)
    kept = seeds[: plan.scale.count("seeds", len(seeds))]
    notes += [*plan.notes, *departures.sentences(plan.scale), *describe_overrides(rest)]
    return rows, kept, notes


def join_labels(names: Sequence[str], labels: Collection[str]) -> list[str]:
    """Names that were split at commas, put together again where a label has one.

    >>> join_labels(["FedAvg", "No FL", "T1"], ["FedAvg", "No FL, T1"])
    ['FedAvg', 'No FL, T1']
    """
    joined = []
    rest = list(names)
    while rest:
        ends = range(len(rest), 0, -1)
        count = next((end for end in ends if ", ".join(rest[:end]) in labels), 1)
        joined.append(", ".join(rest[:count]))
        del rest[:count]
    return joined


def plan_named_data(preset: papers.PaperPreset, chosen: str, overrides: Sequence[str]) -> PaperPlan:
    """The data that --set names; the paper's size and split are laid over a federation.yaml."""
    named = [override.partition("=")[0].strip() for override in overrides]
    if not any(name.split(".")[0] == "data" for name in named):
        raise ConfigError(
            f"{preset.name} needs data: its sets ({', '.join(preset.datasets[chosen].clients)}) do not come "
            f"with wardround. Give their folder: wardround papers run {preset.name} --data FOLDER; or name "
            "yours with --set data.federation=federation.yaml, or try synthetic data with --set "
            f"data.phantom.dimensions={preset.datasets[chosen].dimensions}."
        )
    path = next((o.partition("=")[2].strip() for o in overrides if o.startswith("data.federation=")), None)
    return PaperPlan({chosen: PaperData(None if path is None else Path(path), preset.datasets[chosen].size)})


def apply_federation(settings: dict[str, Any], federation: papers.PaperFederation, data: PaperData) -> None:
    """The data of a run: the file, with the paper's size, normalisation and random splits."""
    if data.path is None:
        return
    prepare: dict[str, Any] = {"normalise": federation.normalise}
    if data.size is not None:
        prepare["size"] = list(data.size)
    splits = {"by": "repeated", "ratios": list(federation.split), "seed": SEED}
    settings["data"] = {"federation": str(data.path), "prepare": prepare, "splits": splits}


def plan_paper(
    preset: papers.PaperPreset,
    places: Sequence[str],
    folder: Path,
    *,
    scale: Scale = WHOLE,
    only: Sequence[str] | None = None,
    seeds: Any = None,
    overrides: Sequence[str] = (),
) -> Grid:
    """A table from data folders: all its federations, with the paper's sizes, splits and clients.

    places: folders, files federation.yaml, or `synthetic`; folder: of the comparison, which gets the lists.
    """
    names = choose_federations(preset, overrides)
    federations, notes = prepare_data(preset, names, places, folder / "data", scale)
    notes += dict.fromkeys(note for data in federations.values() for note in data.notes)
    plan = PaperPlan(federations, scale, notes)
    rows, own_seeds, notes = list_preset_rows(preset, overrides, only, plan)
    chosen = own_seeds if seeds is None else parse_seeds(seeds, own_seeds[0])
    printed = preset.datasets[names[0]].seeds
    if len(chosen) != len(printed):
        notes.append(f"Seeds, each with a split of its own: {len(chosen)} instead of {len(printed)}.")
    return build_grid(
        rows,
        name=preset.name,
        seeds=chosen,
        hold_out=HoldOut(),
        preset=preset.name,
        notes=notes,
    )


def share_runs(rows: Sequence[Row]) -> list[Row]:
    """Rows that differ in `rounds` alone, read off the longest run, which is tested after each of them.

    A run that tests its best round, or whose learning rate depends on the number of rounds, is not shared.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        settings = {key: value for key, value in row.settings.items() if key not in ("rounds", "name")}
        alike = papers.get_dotted(settings, "evaluate.model") == "last"
        alike = alike and papers.get_dotted(settings, "optimizer.schedule") is None
        key = json.dumps(settings, sort_keys=True, default=str)
        groups.setdefault(key if alike else row.label, []).append(row)
    shared: dict[str, Row] = {}
    for group in groups.values():
        rounds = sorted({int(row.settings.get("rounds", 0)) for row in group})
        longest = next(row for row in group if row.settings.get("rounds", 0) == rounds[-1])
        for row in group:
            own = int(row.settings.get("rounds", 0))
            after = None if own == rounds[-1] else own
            shared[row.label] = dataclasses.replace(row, run_of=longest.label, after=after)
        if len(rounds) > 1:
            settings = copy.deepcopy(dict(longest.settings))
            papers.set_dotted(settings, "evaluate.test_after", rounds[:-1])
            longest = dataclasses.replace(longest, settings=settings)
        shared[longest.label] = longest
    return [shared[row.label] for row in rows]


def relabel(cell: papers.PresetRun, settings: Mapping[str, Any]) -> str:
    """The paper's label; where --set changed what the row stands for, with what is run instead.

    Such a row has no printed numbers: those are found by the paper's label.
    """
    stands_for = dict.fromkeys([*NAMES, *list_dotted(cell.changes)])
    now = {key: papers.get_dotted(settings, key) for key in stands_for}
    changed = {key: value for key, value in now.items() if value != papers.get_dotted(cell.settings, key)}
    shown = {
        key: "default" if value is None else value
        for key, value in changed.items()
        if value is not None or f"{key.partition('.')[0]}.name" not in changed  # settings of the old name
    }
    return f"{cell.label} ({papers.format_changes(shown)})" if shown else cell.label


def find_obstacle(settings: dict[str, Any]) -> str:
    """Why this version cannot run a row, or nothing."""
    unknown = papers.find_unknown_parts(settings)
    if unknown:
        parts = " and ".join(f"{section} '{name}'" for section, name in unknown.items())
        return f"{parts} needs a later version"
    try:
        check_settings(settings, "")
    except ConfigError as error:
        return str(error)
    return ""


def choose_federations(preset: papers.PaperPreset, overrides: Sequence[str]) -> list[str]:
    """All federations of a table, or the one that `--set datasets=NAME` names."""
    named = [override for override in overrides if override.partition("=")[0].strip() == "datasets"]
    return [choose_federation(preset, named)[0]] if named else list(preset.datasets)


def choose_federation(preset: papers.PaperPreset, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Which federation is compared (`--set datasets=NAME`, else the first), and the other overrides."""
    chosen = next(iter(preset.datasets))
    rest = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "datasets":
            chosen = value.strip()
        else:
            rest.append(override)
    if chosen not in preset.datasets:
        raise ConfigError(
            f"datasets is '{chosen}'.{suggest(chosen, preset.datasets)} "
            f"{preset.name} has: {', '.join(preset.datasets)}."
        )
    return chosen, rest


def match_columns(preset: papers.PaperPreset, clients: Iterable[str]) -> dict[str, str]:
    """Printed column -> ours. Our clients are called as in the paper, or as their data set's card does."""
    known = {name.casefold(): name for name in clients}
    matched = dict(OURS)
    for federation in preset.datasets.values():
        for label, source in federation.clients.items():
            for name in (label, source.client or source.dataset):
                if name.casefold() in known:
                    matched.setdefault(label, known[name.casefold()])
    return matched


def list_printed_values(
    preset: papers.PaperPreset, clients: Iterable[str], lengths: str
) -> dict[str, dict[str, dict[str, Spread]]]:
    """label -> metric -> our column -> the printed number, in our unit; others are left out.

    clients: ours; lengths: what our distances are in.
    """
    published, matched = preset.published, match_columns(preset, clients)
    found: dict[str, dict[str, dict[str, Spread]]] = {}
    for label, columns in published.rows.items():
        for column, entries in columns.items():
            for metric in entries:
                value = published.comparable(label, column, metric)
                if value is None or metric not in METRICS or not has_our_unit(published, metric, lengths):
                    continue
                place = found.setdefault(label, {}).setdefault(metric, {})
                place[matched.get(column, column)] = Spread(value.mean, value.sd)
    ours = {*matched.values()}
    return {
        label: {metric: keep_comparable(values, ours) for metric, values in metrics.items()}
        for label, metrics in found.items()
    }


def keep_comparable(printed: Mapping[str, Spread], ours: Collection[str]) -> dict[str, Spread]:
    """What is printed of our columns; where that is nothing, the mean over the paper's clients.

    >>> keep_comparable({"Kvasir": Spread(0.8), "ETIS": Spread(0.6)}, ["north", "mean"])
    {'mean': Spread(mean=0.7, sd=None, rank=0, num_infinite=0)}
    """
    kept = {column: value for column, value in printed.items() if column in ours}
    return kept or {MEAN: Spread(mean([value.mean for value in printed.values()]))}


def has_our_unit(published: papers.PublishedTable, metric: str, lengths: str) -> bool:
    return published.unit[metric] in (*SHARES, METRICS[metric].unit_in(lengths))


def describe_published(
    preset: papers.PaperPreset,
    labels: Sequence[str],
    clients: Sequence[str],
    lengths: str,
    synthetic: bool,
) -> str:
    """What the caption says of the printed numbers: where they are from, and what to beware of.

    labels, clients: rows and clients of ours.
    """
    matched = match_columns(preset, clients)
    printed = dict.fromkeys(column for label in labels for column in preset.published.rows.get(label, {}))
    unmatched = [name for name in printed if name not in matched]
    sentences = [f"Published: {preset.paper}, {preset.table}."]
    if unmatched:
        some = set(printed) & set(matched)
        instead = "left out" if some else "their mean stands beside that of ours"
        sentences.append(f"Printed for other clients than ours, {instead}: {', '.join(unmatched)}.")
    if "all clients" in printed:
        sentences.append("One printed number for all clients is read as their mean.")
    sentences += describe_distances(preset, lengths)
    if preset.published.cases != "test":
        sentences.append(f"Published numbers are of {preset.published.cases} cases, ours of test cases.")
    if synthetic:
        sentences.append("Ours are on synthetic hospitals: the two cannot be compared.")
    return " ".join(sentences)


def describe_distances(preset: papers.PaperPreset, lengths: str) -> list[str]:
    """Which printed distances stand beside ours and in what, and why others do not."""
    groups: dict[str, list[str]] = {}
    for metric, unit in preset.published.unit.items():
        if metric in METRICS and METRICS[metric].unit:
            groups.setdefault(unit, []).append(metric)
    sentences = []
    for unit, metrics in groups.items():
        names = " and ".join(METRICS[metric].label for metric in metrics)
        if unit == "not said":
            sentences.append(f"Published {names} left out: the paper does not give a unit.")
        elif not has_our_unit(preset.published, metrics[0], lengths):
            sentences.append(f"Published {names} left out: in {unit}, ours in {lengths}.")
        elif unit == PX:
            sizes = {federation.size for federation in preset.datasets.values() if federation.size}
            shapes = " or ".join(" x ".join(map(str, size)) for size in sorted(sizes))
            sentences.append(
                f"Published {names} in pixels of {shapes} images, ours in pixels of the files: compare the "
                "order alone."
            )
    return sentences
