"""Run a comparison: plan it, do what is not done yet, write the tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from wardround.batch import Stage, find_stage, in_use, run_each
from wardround.comparison.grid import Grid, HoldOut, Row, build_grid, checked, rows_of, unheard
from wardround.comparison.outcome import Comparison, describe
from wardround.comparison.presets import preset_name, preset_rows
from wardround.comparison.sweep import read_sweep
from wardround.config import Config
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.files import file_name, try_lock, write_json
from wardround.machine import cores
from wardround.papers import presets as papers
from wardround.text import suggest
from wardround.training.device import choose_device
from wardround.yaml_file import apply_override, read_yaml

Source = str | Path | Mapping[str, Any] | Config


class Watch(Protocol):
    """Who shows how a comparison goes; the command line draws a table that fills in."""

    def on_plan(self, grid: Grid, stages: Mapping[str, Stage]) -> None:
        """Once, before the first run."""

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        """Now and then, for every cell under way."""

    def on_end(self, name: str, value: float | None, error: str | None) -> None:
        """A cell ended: its mean over clients of the first metric, or why it failed."""


class Silent:
    """Shows nothing."""

    def on_plan(self, grid: Grid, stages: Mapping[str, Stage]) -> None: ...

    def on_rounds(self, name: str, done: int, rounds: int) -> None: ...

    def on_end(self, name: str, value: float | None, error: str | None) -> None: ...


def compare(
    config: Source,
    *,
    methods: Sequence[Any] | None = None,
    objectives: Sequence[Any] | None = None,
    models: Sequence[Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    folds: int | None = None,
    reference: str | None = None,
    hold_out: Sequence[str] = (),
    leave_one_out: bool = False,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Run every cell of a grid that is not done yet, and write the tables.

    config: a run configuration, with a `sweep` section or without, or the name of a paper's preset;
    seeds: how many, or which; hold_out: clients that are only ever tested; leave_one_out: each in turn;
    jobs: cells at a time, default as many as the cores bear; overwrite: cells with other settings are
    run anew. A cell that fails is in `.failures`; it does not stop the others.
    """
    options = {
        "methods": methods,
        "objectives": objectives,
        "models": models,
        "seeds": seeds,
        "folds": folds,
        "reference": reference,
    }
    grid, folder = plan(config, options, HoldOut(tuple(hold_out), leave_one_out), overrides, output)
    return run_grid(grid, folder, jobs=jobs, overwrite=overwrite, watch=watch)


# Planning


def plan(
    source: Source,
    options: Mapping[str, Any],
    hold_out: HoldOut,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
) -> tuple[Grid, Path]:
    """The grid, every cell of it checked, and the folder it belongs into."""
    refuse_unknown(source)
    name = preset_name(source)
    if name is not None:
        preset = papers.load(name)
        refuse_axes(name, options)
        rows, seeds, notes = preset_rows(preset, overrides, options["methods"])
        grid = build_grid(
            rows,
            name=name,
            seeds=seeds if options["seeds"] is None else options["seeds"],
            folds=options["folds"],
            reference=options["reference"],
            hold_out=hold_out,
            preset=name,
            notes=notes,
        )
        return grid, folder_of(rows, output, name)
    path = str(source) if isinstance(source, str | Path) else ""
    try:
        sweep = read_sweep(settings_of(source, overrides), options, settings_of({}, overrides))
        rows = rows_of(sweep)
        grid = build_grid(
            rows, seeds=sweep.seeds, folds=sweep.folds, reference=sweep.reference, hold_out=hold_out
        )
    except ConfigError as error:
        named = not path or str(error).startswith(path)
        raise ConfigError(str(error) if named else f"{path}: {error}") from None
    return grid, folder_of(rows, output, grid.name)


def settings_of(source: Source, overrides: Sequence[str]) -> dict[str, Any]:
    """A configuration as plain values, its `sweep` included."""
    if isinstance(source, Config):
        values = source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        values = json.loads(json.dumps(dict(source), default=str))
    else:
        values = read_yaml(Path(source))
    for override in overrides:
        apply_override(values, override)
    return values


def refuse_unknown(source: Source) -> None:
    """A word that is neither a file nor a preset; what looks like a path is left to reading it."""
    if not isinstance(source, str) or Path(source).suffix or Path(source).name != source:
        return
    known = papers.list_names()
    if source not in known and not Path(source).exists():
        raise ConfigError(
            f"'{source}' is neither a file nor a paper's preset.{suggest(source.lower(), known)} "
            "List all presets: wardround papers"
        )


def refuse_axes(name: str, options: Mapping[str, Any]) -> None:
    for key in ("objectives", "models"):
        if options[key] is not None:
            raise ConfigError(f"{name} has rows of its own; choose among them with --methods, not --{key}.")


def folder_of(rows: Sequence[Row], output: str | Path | None, name: str) -> Path:
    """Where the comparison goes: what was asked for, the configuration's output, or runs/<name>."""
    given = output if output is not None else rows[0].settings.get("output")
    folder = Path(given) if given is not None else Path("runs") / file_name(name)
    if (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} holds a single run. Write the comparison elsewhere with -o FOLDER.")
    return folder


# Running


def run_grid(
    grid: Grid,
    folder: Path,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> Comparison:
    """Do what is not done yet. Killed at any moment, the same call goes on where it was."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1.")
    watch = watch or Silent()
    jobs = jobs or default_jobs(grid)
    cells_folder = folder / "cells"
    with locked(folder):
        with unheard(True):
            stages = find_stages(grid, cells_folder, overwrite)
        write_json(folder / "comparison.json", describe(grid, {}))
        watch.on_plan(grid, stages)
        runs = {cell.name: side_by_side(cell.settings, jobs) for cell in in_turn(grid)}
        failures: dict[str, str] = {}
        with (
            unheard(True),
            closing(run_each(runs, cells_folder, jobs=jobs, watch=watch, resume=True)) as ending,
        ):
            for name, error in ending:
                told = None if error is None else str(error).removeprefix(f"run '{name}' failed: ")
                if told is not None:
                    failures[name] = told
                watch.on_end(
                    name, headline(cells_folder / name, grid.metrics[0]) if error is None else None, told
                )
        write_json(folder / "comparison.json", describe(grid, failures))
        comparison = Comparison.load(folder)
        if comparison.results:
            comparison.write()
    return comparison


def find_stages(grid: Grid, folder: Path, overwrite: bool) -> dict[str, Stage]:
    """How far every cell is; one that was run with other settings is refused, or cleared away."""
    found: dict[str, Stage] = {}
    for cell in grid.cells:
        path = folder / cell.name
        try:
            found[cell.name] = find_stage(path, checked(cell.settings, ""))
        except (ConfigError, CheckpointError) as error:
            if not overwrite:
                raise CheckpointError(f"cell '{cell.title}': {error}") from None
            if in_use(path):
                raise CheckpointError(f"cell '{cell.title}': {path} is in use by another process.") from None
            shutil.rmtree(path)
            found[cell.name] = "new"
    return found


def in_turn(grid: Grid) -> list[Any]:
    """All rows with the first seed, then with the second: the table fills evenly."""
    places = {row.label: number for number, row in enumerate(grid.rows)}
    seeds = {seed: number for number, seed in enumerate(grid.seeds)}
    return sorted(grid.cells, key=lambda c: (seeds[c.seed], c.fold or 0, c.held_out, places[c.row]))


def side_by_side(settings: Mapping[str, Any], jobs: int) -> Mapping[str, Any]:
    """Cells that share the machine take a core each, unless the configuration says how many."""
    compute = dict(settings.get("compute") or {})
    if jobs == 1 or compute.get("threads") is not None:
        return settings
    return {**settings, "compute": {**compute, "threads": 1}}


def default_jobs(grid: Grid) -> int:
    """As many cells as the cores bear; one on a GPU."""
    compute = checked(grid.cells[0].settings, "").compute
    if choose_device(compute).type != "cpu":
        return 1
    workers = 1 if compute.workers == "auto" else compute.workers
    return max(1, cores() // (workers * (compute.threads or 1)))


def headline(folder: Path, metric: str) -> float | None:
    """A finished run's mean over clients."""
    try:
        value = json.loads((folder / "result.json").read_text(encoding="utf-8"))["test"][metric]["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Two comparisons must not write one folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written: {error.strerror}.") from None
    with file:
        if not try_lock(file):
            raise WardroundError(f"{folder} is in use by another comparison.")
        yield
