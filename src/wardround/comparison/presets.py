"""A paper's table as a comparison: its rows, its seeds, and the printed numbers beside ours."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.comparison.grid import Row, check_settings
from wardround.comparison.sweep import list_dotted
from wardround.comparison.tables import MEAN, WEIGHTED
from wardround.errors import ConfigError
from wardround.metrics import METRICS, PX
from wardround.papers import presets as papers
from wardround.tables import Spread
from wardround.text import suggest
from wardround.yaml_file import apply_override, read_yaml

log = logging.getLogger(__name__)

SHARES = ("share", "percent")  # what can stand beside our numbers, which are shares
NAMES = ("method.name", "objective.name", "model.name")
OURS = {"merged test set": WEIGHTED}  # all test cases pooled: every case counts the same


def find_preset(source: Any) -> str | None:
    """The preset a name (`safcf-table2`) or its file stands for, if it does."""
    if not isinstance(source, str | Path):
        return None
    path = Path(source)
    if not path.exists():
        return str(source) if str(source) in papers.list_names() else None
    if path.stem in papers.list_names() and path.is_file() and {"about", "datasets"} <= set(read_yaml(path)):
        return path.stem
    return None


def list_preset_rows(
    preset: papers.PaperPreset, overrides: Sequence[str], only: Sequence[str] | None = None
) -> tuple[list[Row], list[int], list[str]]:
    """The rows this version can run on the data that the overrides name, the paper's seeds, and notes."""
    chosen, rest = choose_federation(preset, overrides)
    if not any(override.partition("=")[0].strip().split(".")[0] == "data" for override in rest):
        raise ConfigError(
            f"{preset.name} needs data: its sets ({', '.join(preset.datasets[chosen].clients)}) do not come "
            "with wardround. Name yours with --set data.federation=federation.yaml, or try synthetic data "
            f"with --set data.phantom.dimensions={preset.datasets[chosen].dimensions}."
        )
    labels = [cell.label for cell in preset.list_runs()]
    for label in only or ():
        if label not in labels:
            raise ConfigError(
                f"{preset.name} has no row '{label}'.{suggest(label, labels)} Rows: {', '.join(labels)}."
            )
    rows, notes = [], []
    for cell in preset.list_runs():
        if cell.datasets != chosen or (only is not None and cell.label not in only):
            continue
        settings = copy.deepcopy(cell.settings)
        for override in rest:
            apply_override(settings, override)
        lacking = find_obstacle(settings)
        if lacking:
            notes.append(f"Not run: {cell.label} ({lacking.rstrip('.')}).")
        else:
            rows.append(Row(relabel(cell, settings), settings, dict(cell.changes)))
    if not rows:
        raise ConfigError(f"{preset.name}: nothing can be run. {' '.join(notes[:1])}".strip())
    for note in notes:
        log.warning("%s", note)
    return rows, list(preset.datasets[chosen].seeds), notes


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


def list_printed_values(preset: papers.PaperPreset, lengths: str) -> dict[str, dict[str, dict[str, Spread]]]:
    """label -> metric -> our column -> the printed number, in our unit; other units are left out.

    lengths: what our distances are in.
    """
    published = preset.published
    found: dict[str, dict[str, dict[str, Spread]]] = {}
    for label, columns in published.rows.items():
        for column, entries in columns.items():
            for metric in entries:
                value = published.comparable(label, column, metric)
                if value is None or metric not in METRICS or not has_our_unit(published, metric, lengths):
                    continue
                place = found.setdefault(label, {}).setdefault(metric, {})
                place[OURS.get(column, column)] = Spread(value.mean, value.sd)
    return found


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
    known = {MEAN, WEIGHTED, *clients}
    printed = dict.fromkeys(column for label in labels for column in preset.published.rows.get(label, {}))
    unmatched = [name for name in printed if OURS.get(name, name) not in known]
    sentences = [f"Published: {preset.paper}, {preset.table}."]
    if unmatched:
        sentences.append(f"Printed for other clients than ours and left out: {', '.join(unmatched)}.")
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
            sentences.append(f"Published {names} in pixels of {shapes} images.")
    return sentences
