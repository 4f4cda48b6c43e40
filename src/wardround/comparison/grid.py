"""The grid: every row with every seed, fold and held-out client is one cell, an ordinary run.

    Grid
      rows: Row      the rows of the tables
      cells: Cell    the runs: row x seed x fold x held-out clients

Everything is checked here, before anything runs; an error names the cell it is in.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from wardround.comparison.sweep import (
    Point,
    Sweep,
    SweepAxis,
    apply_changes,
    describe_side_changes,
    parse_folds,
    parse_seeds,
)
from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.opening import open_federation
from wardround.engine.experiment import Experiment
from wardround.engine.networks import build_model
from wardround.errors import ConfigError, WardroundError
from wardround.files import file_name
from wardround.methods import build_method
from wardround.papers.presets import get_dotted, set_dotted
from wardround.seeds import derive
from wardround.tables import one_line
from wardround.text import suggest

log = logging.getLogger(__name__)

MOST_CELLS = 5000


@dataclass(frozen=True)
class Row:
    """One row of the tables. settings: its configuration, before seed, fold and held-out clients.

    run_of: the row whose runs it is read off, where it has none of its own; after: at which round, None for
    the end.
    """

    label: str
    settings: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    run_of: str | None = None
    after: int | None = None

    @property
    def method(self) -> str:
        section = self.settings.get("method")
        return str(section.get("name", "fedavg")) if isinstance(section, Mapping) else "fedavg"


@dataclass(frozen=True)
class Cell:
    """One run. name: its folder under cells/; held_out: clients that take no part in training."""

    name: str
    row: str
    seed: int
    fold: int | None
    held_out: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def title(self) -> str:
        return cell_title(self.row, self.seed, self.fold, self.held_out)

    def as_dict(self) -> dict[str, Any]:
        place = {"name": self.name, "folder": f"cells/{self.name}", "row": self.row}
        return {**place, "seed": self.seed, "fold": self.fold, "held_out": list(self.held_out)}


@dataclass(frozen=True)
class Grid:
    """A planned comparison. preset: the paper's table it follows; notes: for the captions."""

    name: str
    rows: Sequence[Row]
    cells: Sequence[Cell]
    reference: str
    metrics: Sequence[str]
    select: str
    seeds: Sequence[int]
    folds: Sequence[int]
    held_out: Sequence[tuple[str, ...]]
    preset: str | None = None
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, Any]:
        """What comparison.json says of it."""
        return {
            "name": self.name,
            "reference": self.reference,
            "metrics": list(self.metrics),
            "select": self.select,
            "preset": self.preset,
            "notes": list(self.notes),
            "seeds": list(self.seeds),
            "folds": list(self.folds),
            "held_out": [list(group) for group in self.held_out],
            "rows": [
                {
                    "label": row.label,
                    "method": row.method,
                    "changes": dict(row.changes),
                    "run_of": row.run_of,
                    "after": row.after,
                }
                for row in self.rows
            ],
            "cells": [cell.as_dict() for cell in self.cells],
        }


@dataclass(frozen=True)
class HoldOut:
    """Clients that are only ever tested: these together, or each client in turn."""

    names: Sequence[str] = ()
    each: bool = False


# Rows


def list_rows(sweep: Sweep) -> list[Row]:
    """Every combination of the axes; an axis with one value is not in the labels."""
    rows = []
    for points in itertools.product(*(axis.points for axis in sweep.axes)):
        settings = dict(sweep.settings)
        label = label_row(sweep.axes, points) or Row("", settings).method
        changes: dict[str, Any] = {}
        for point in points:
            settings = apply_changes(settings, point.changes, f"row '{one_line(label, 60)}'")
            changes.update(point.changes)
        rows.append(Row(label, settings, changes))
    return rows


def label_row(axes: Sequence[SweepAxis], points: Sequence[Point]) -> str:
    several = [point.label for axis, point in zip(axes, points, strict=True) if len(axis.points) > 1]
    return ", ".join(several) or (points[0].label if points else "")


def note_side_changes(rows: Sequence[Row]) -> list[str]:
    """For the captions: which rows change more than the table compares."""
    found = describe_side_changes({row.label: (row.settings, row.changes) for row in rows})
    for sentence in found:
        log.warning("%s", sentence)
    return found


def find_reference(rows: Sequence[Row], wanted: str | None) -> str:
    """The row all others are tested against: by label or method, else FedAvg, else the first."""
    labels = [row.label for row in rows]
    if wanted is None:
        return next((row.label for row in rows if row.method == "fedavg"), labels[0])
    if wanted in labels:
        return wanted
    for row in rows:
        if row.method == wanted:
            return row.label
    raise ConfigError(
        f"reference is '{one_line(wanted, 60)}', which is not a row.{suggest(wanted, labels)} "
        f"Rows: {', '.join(one_line(label, 60) for label in labels)}."
    )


# Cells


def build_grid(
    rows: Sequence[Row],
    *,
    name: str = "",
    seeds: Any = None,
    folds: Any = None,
    reference: str | None = None,
    hold_out: HoldOut | None = None,
    preset: str | None = None,
    notes: Sequence[str] = (),
) -> Grid:
    """All cells, checked."""
    if not rows:
        raise ConfigError("there is nothing to compare: no row is left.")
    configs = [check_settings(row.settings, f"row '{one_line(row.label, 60)}'") for row in rows]
    first = configs[0]
    chosen_seeds = parse_seeds(seeds, first.seed)
    num_folds = parse_folds(folds)
    chosen_folds: list[int | None] = [None] if num_folds is None else list(range(num_folds))
    hold_out = hold_out or HoldOut()
    left_out = list_held_out(first, hold_out)
    trained = [row for row in rows if row.run_of is None]
    number = len(trained) * len(chosen_seeds) * len(chosen_folds) * len(left_out)
    if number > MOST_CELLS:
        raise ConfigError(f"the comparison has {number} cells; the maximum is {MOST_CELLS}.")

    cells = []
    for row in trained:
        pinned = fix_patients(row.settings, first.seed)
        for seed, fold, held_out in itertools.product(chosen_seeds, chosen_folds, left_out):
            settings = copy.deepcopy(pinned)
            settings.pop("output", None)
            title = cell_title(row.label, seed, fold, held_out)
            settings.update(name=one_line(title, 200), seed=seed)
            if fold is not None:
                for key, value in (("by", "kfold"), ("folds", num_folds), ("fold", fold)):
                    set_dotted(settings, f"data.splits.{key}", value)
            draw_split(settings, chosen_seeds.index(seed))
            if held_out:
                settings = hold_out_clients(settings, held_out, title)
            cells.append(
                Cell(cell_name(row.label, seed, fold, held_out), row.label, seed, fold, held_out, settings)
            )
    check_cells(cells)
    return Grid(
        name=name or first.name,
        rows=rows,
        cells=cells,
        reference=find_reference(rows, reference),
        metrics=[
            m for m in first.evaluate.metrics if all(m in config.evaluate.metrics for config in configs)
        ],
        select=first.evaluate.select,
        seeds=chosen_seeds,
        folds=[fold for fold in chosen_folds if fold is not None],
        held_out=[group for group in left_out if group],
        preset=preset,
        notes=[*notes, *note_side_changes(rows)],
    )


def cell_title(row: str, seed: int, fold: int | None, held_out: Sequence[str]) -> str:
    parts = [row, f"seed {seed}"]
    if fold is not None:
        parts.append(f"fold {fold}")
    if held_out:
        parts.append(f"without {' and '.join(held_out)}")
    return ", ".join(parts)


def cell_name(row: str, seed: int, fold: int | None, held_out: Sequence[str]) -> str:
    """A readable folder name; different cells never share one.

    >>> cell_name("fedavg", 42, None, ["north"])
    'fedavg-seed42-without-north'
    """
    parts = [file_name(row), f"seed{seed}"]
    if fold is not None:
        parts.append(f"fold{fold}")
    if held_out:
        parts.append(f"without-{file_name(held_out[0] if len(held_out) == 1 else repr(tuple(held_out)))}")
    return "-".join(parts)


def fix_patients(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Synthetic patients stay the same for all seeds: seeds vary the training, and cases can be paired."""
    result = copy.deepcopy(dict(settings))
    data = check_settings(settings, "").data
    if data.phantom.seed is None and data.federation is None:
        set_dotted(result, "data.phantom.seed", derive(seed, "data"))
    return result


def draw_split(settings: dict[str, Any], number: int) -> None:
    """Repeated splits: every seed has a split of its own, unless the settings choose one."""
    splits = get_dotted(settings, "data.splits")
    if isinstance(splits, Mapping) and splits.get("by") == "repeated" and "repeat" not in splits:
        set_dotted(settings, "data.splits.repeat", number)


# Held-out clients


def list_held_out(config: Config, hold_out: HoldOut) -> list[tuple[str, ...]]:
    """The clients held out of each run; one empty group where none is."""
    if not hold_out.names and not hold_out.each:
        return [()]
    if hold_out.names and hold_out.each:
        raise ConfigError("choose --leave-one-out or --hold-out, not both.")
    names = open_federation(config.data, config.seed).names
    for name in hold_out.names:
        if name not in names:
            raise ConfigError(
                f"hold-out names '{one_line(name, 60)}', which is not a client.{suggest(name, names)} "
                f"Clients: {', '.join(one_line(known, 60) for known in names)}."
            )
    if len(names) <= len(set(hold_out.names)) or len(names) < 2:
        raise ConfigError(f"no client is left to train: there are {len(names)} clients in all.")
    return [(name,) for name in names] if hold_out.each else [tuple(sorted(set(hold_out.names)))]


def hold_out_clients(settings: Mapping[str, Any], held_out: Sequence[str], title: str) -> dict[str, Any]:
    """The settings with some clients only tested; they do not choose the best round either."""
    where = f"cell '{one_line(title, 80)}'"
    result = copy.deepcopy(dict(settings))
    config = check_settings(settings, where)
    method = build_method(config)
    if method.pooled or not method.shared(build_model(config)):
        what = "trains on all clients' cases" if method.pooled else "has no common model for a new client"
        raise ConfigError(
            f"{where}: method '{config.method.get('name')}' {what}, so it cannot be tested at unseen clients."
        )
    if isinstance(config.participation, float):
        if config.participation != 1.0:
            raise ConfigError(
                f"{where}: participation is {config.participation}; with held-out clients it must be 1.0, or "
                "names."
            )
        able = list(open_federation(config.data, config.seed).names)
    else:
        able = list(config.participation)
    result["participation"] = [name for name in able if name not in held_out]
    if not result["participation"]:
        raise ConfigError(f"{where}: no client is left to train.")
    return result


# Checking


def check_cells(cells: Sequence[Cell]) -> None:
    """Raise the first error, naming the cell; data and network are checked once for each row."""
    checked = set()
    for cell in cells:
        where = f"cell '{one_line(cell.title, 80)}'"
        config = check_settings(cell.settings, where, quiet=True)
        if (cell.row, cell.fold, cell.held_out) not in checked:
            checked.add((cell.row, cell.fold, cell.held_out))
            try:
                Experiment(config)
            except WardroundError as error:
                raise ConfigError(f"{where}: {error}") from None
    names = Counter(cell.name for cell in cells)
    for cell in cells:
        if names[cell.name] > 1:
            raise ConfigError(f"two rows are called '{one_line(cell.row, 60)}'. Give one another label.")


def check_settings(settings: Mapping[str, Any], where: str, quiet: bool = False) -> Config:
    try:
        with quiet_config_warnings(quiet or not where):
            return load_config(settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from None


@contextmanager
def quiet_config_warnings(hidden: bool) -> Iterator[None]:
    """A warning about a row is logged once, not for each of its cells."""
    log = logging.getLogger("wardround.config")
    before = log.level
    if hidden:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
