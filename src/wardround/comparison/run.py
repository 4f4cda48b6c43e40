"""Run a comparison: plan it, do what is not done yet, write the tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from wardround.batch import Stage, find_stage, is_in_use, run_each
from wardround.builtin_configs import find_comparison, find_config, list_paths
from wardround.cluster.jobs import Cluster, ClusterJobs
from wardround.cluster.options import open_cluster
from wardround.comparison.grid import (
    Cell,
    Grid,
    HoldOut,
    Row,
    build_grid,
    check_settings,
    list_rows,
    quiet_config_warnings,
)
from wardround.comparison.jobs import choose_jobs
from wardround.comparison.outcome import Comparison, write_comparison
from wardround.comparison.presets import find_preset, list_preset_rows
from wardround.comparison.same_objective import give_one_objective
from wardround.comparison.sweep import SECTIONS, SHORTHANDS, read_sweep
from wardround.config import Config
from wardround.config_file import find_federation
from wardround.engine.checkpoint import keep_models
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.files import file_name, try_lock
from wardround.papers import presets as papers
from wardround.text import suggest
from wardround.yaml_file import apply_override, read_yaml

ConfigSource = str | Path | Mapping[str, Any] | Config
LOCK = ".lock"  # stays, so that a folder is known to be a comparison's
ENTRIES = ("report.html", "statistics.json", "figures")


class ComparisonOptions(TypedDict, total=False):
    """What is compared; an option that is absent or None leaves it to the configuration.

    methods, objectives, models: names, or labels of the file's own entries; seeds: how many, or which;
    folds: how many; reference: the row all others are tested against; same_objective: give all rows the
    objective of the reference; hold_out: clients that are only ever tested, leave_one_out: each client in
    turn; overrides: settings as `a.b=c`.
    """

    methods: Sequence[Any] | None
    objectives: Sequence[Any] | None
    models: Sequence[Any] | None
    seeds: int | Sequence[int] | None
    folds: int | None
    reference: str | None
    same_objective: bool
    hold_out: Sequence[str]
    leave_one_out: bool
    overrides: Sequence[str]


class ComparisonListener:
    """Sees how a comparison goes, and shows nothing; override what you want to show."""

    def on_plan(self, grid: Grid, stages: Mapping[str, Stage]) -> None:
        """Once, before the first run."""

    def on_jobs(self, jobs: int, why: str) -> None:
        """Then: how many cells run at a time, and why."""

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        """A cell has begun, or has done another round."""

    def on_end(self, name: str, value: float | None, error: str | None) -> None:
        """A cell ended: its mean over clients, or held-out ones, of the first metric; or why it failed."""


def compare(
    config: ConfigSource,
    *,
    output: str | Path | None = None,
    jobs: int | None = None,
    overwrite: bool = False,
    watch: ComparisonListener | None = None,
    on: str = "local",
    on_options: Mapping[str, Any] | None = None,
    **options: Unpack[ComparisonOptions],
) -> Comparison:
    """Run every cell of a grid that is not done yet, and write the tables.

    config: a run configuration, with or without a `sweep` section, or a name of `wardround configs`;
    jobs: cells at a time, by default what memory, cores and GPUs have room for; overwrite: rerun cells whose
    settings changed; on: where cells run, local, slurm or ray, with on_options as `--on-options` has them;
    options: see `ComparisonOptions`. A cell that fails is in `.failures`; it does not stop the others.
    """
    grid, folder = plan_comparison(config, options, output)
    cluster = open_cluster(on, on_options or {})
    return run_grid(grid, folder, jobs=jobs, overwrite=overwrite, watch=watch, cluster=cluster)


# Planning


def plan_comparison(
    source: ConfigSource, options: ComparisonOptions, output: str | Path | None = None
) -> tuple[Grid, Path]:
    """The grid, every cell of it check_settings, and the folder it belongs into."""
    unknown = sorted(options.keys() - ComparisonOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"compare() got an unexpected keyword argument '{unknown[0]}'")
    refuse_unknown(source)
    hold_out = HoldOut(tuple(options.get("hold_out", ())), options.get("leave_one_out", False))
    overrides = options.get("overrides", ())
    name = find_preset(source)
    if name is not None:
        refuse_axes(name, options)
        rows, seeds, notes = list_preset_rows(papers.load(name), overrides, options.get("methods"))
        rows, said = unify(rows, options, options.get("reference"))
        chosen = options.get("seeds")
        grid = build_grid(
            rows,
            name=name,
            seeds=seeds if chosen is None else chosen,
            folds=options.get("folds"),
            reference=options.get("reference"),
            hold_out=hold_out,
            preset=name,
            notes=[*notes, *said],
        )
        return grid, choose_folder(rows, output, name)
    path = str(source) if isinstance(source, str | Path) else ""
    axes = {key: value for key, value in options.items() if key in SHORTHANDS}
    if isinstance(source, str | Path) and all(axes.get(key) is None for key in SECTIONS):
        source = find_comparison(source)
    try:
        sweep = read_sweep(read_settings(source, overrides), axes, read_settings({}, overrides))
        several = any(axis.name == "objectives" and len(axis.points) > 1 for axis in sweep.axes)
        rows, said = unify(list_rows(sweep), options, sweep.reference, several)
        grid = build_grid(
            rows,
            seeds=sweep.seeds,
            folds=sweep.folds,
            reference=sweep.reference,
            hold_out=hold_out,
            notes=said,
        )
    except ConfigError as error:
        named = not path or str(error).startswith(path)
        raise ConfigError(str(error) if named else f"{path}: {error}") from None
    return grid, choose_folder(rows, output, grid.name)


def unify(
    rows: list[Row], options: ComparisonOptions, reference: str | None, several: bool = False
) -> tuple[list[Row], list[str]]:
    """The rows with one objective where that is asked for, and what to say of it.

    several: objectives are what is compared.
    """
    if not options.get("same_objective"):
        return rows, []
    if several:
        raise ConfigError("choose --same-objective or several objectives, not both.")
    found, sentence = give_one_objective(rows, reference)
    return found, [sentence]


def read_settings(source: ConfigSource, overrides: Sequence[str]) -> dict[str, Any]:
    """A configuration as plain values, its `sweep` included."""
    if isinstance(source, Config):
        values = source.model_dump(mode="json")
    elif isinstance(source, Mapping):
        values = json.loads(json.dumps(dict(source), default=str))
    else:
        path = find_config(source)
        values = find_federation(read_yaml(path), path)
    for override in overrides:
        apply_override(values, override)
    return values


def refuse_unknown(source: ConfigSource) -> None:
    """Refuse a word that is neither a file nor a preset; what looks like a path is left to the reader."""
    if not isinstance(source, str) or Path(source).suffix or Path(source).name != source:
        return
    if not find_config(source).exists():
        raise ConfigError(
            f"'{source}' is neither a file nor the name of a configuration."
            f"{suggest(source.lower(), list_paths())} List all: wardround configs"
        )


def refuse_axes(name: str, options: ComparisonOptions) -> None:
    for key in ("objectives", "models"):
        if options.get(key) is not None:
            raise ConfigError(f"{name} has rows of its own; choose among them with --methods, not --{key}.")


def choose_folder(rows: Sequence[Row], output: str | Path | None, name: str) -> Path:
    """Where the comparison goes: what was asked for, the configuration's output, or runs/<name>."""
    given = output if output is not None else rows[0].settings.get("output")
    folder = Path(given) if given is not None else Path("runs") / file_name(name)
    check_folder(folder)
    return folder


def check_folder(folder: Path) -> None:
    """Refuse to write among the files of a single run, or over files that are no comparison's."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Write the comparison elsewhere with -o FOLDER.")
    if (folder / "config.yaml").exists():
        raise ConfigError(f"{folder} contains a single run. Write the comparison elsewhere with -o FOLDER.")
    if (folder / LOCK).exists() or (folder / "comparison.json").exists():
        return
    foreign = next((name for name in ENTRIES if (folder / name).exists()), None)
    if foreign is not None:
        raise ConfigError(
            f"{folder / foreign} is not of a comparison, which would replace it. Write elsewhere with "
            "-o FOLDER."
        )


# Running


def run_grid(
    grid: Grid,
    folder: Path,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    watch: ComparisonListener | None = None,
    cluster: Cluster | None = None,
) -> Comparison:
    """Run what is not done yet, on this machine or a cluster. Killed at any moment, the same call resumes."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1.")
    watch = watch or ComparisonListener()
    cells_folder = folder / "cells"
    with lock_folder(folder):
        with quiet_config_warnings(True):
            stages = find_stages(grid, cells_folder, overwrite)
        write_comparison(folder, grid, {})
        watch.on_plan(grid, stages)
        left = [cell for cell in grid.cells if stages[cell.name] != "done"]
        jobs, why = (jobs, "as asked") if jobs is not None else choose_jobs_for(left, cluster)
        watch.on_jobs(jobs, why)
        alone = jobs == 1 and cluster is None
        runs = {
            cell.name: cell.settings if alone else limit_threads(cell.settings) for cell in order_cells(grid)
        }
        engine = None if cluster is None else ClusterJobs(cluster, folder / "jobs")
        batch = run_each(runs, cells_folder, jobs=jobs, watch=watch, resume=True, engine=engine)
        failures: dict[str, str] = {}
        with quiet_config_warnings(True), closing(batch) as ending:
            for name, error in ending:
                reason = None if error is None else str(error).removeprefix(f"run '{name}' failed: ")
                if reason is None:
                    keep_models(cells_folder / name)
                else:
                    failures[name] = reason
                score = None
                if error is None:
                    score = read_score(cells_folder / name, grid.metrics[0], bool(grid.held_out))
                watch.on_end(name, score, reason)
        write_comparison(folder, grid, failures)
        comparison = Comparison.load(folder)
        if comparison.results:
            comparison.write()
    return comparison


def find_stages(grid: Grid, folder: Path, overwrite: bool) -> dict[str, Stage]:
    """How far every cell is; one that ran with other settings is refused, or removed."""
    found: dict[str, Stage] = {}
    for cell in grid.cells:
        path = folder / cell.name
        try:
            found[cell.name] = find_stage(path, check_settings(cell.settings, ""))
        except (ConfigError, CheckpointError) as error:
            if not overwrite:
                raise CheckpointError(f"cell '{cell.title}': {error}") from None
            if is_in_use(path):
                raise CheckpointError(f"cell '{cell.title}': {path} is in use by another process.") from None
            shutil.rmtree(path)
            found[cell.name] = "new"
    return found


def order_cells(grid: Grid) -> list[Cell]:
    """All rows with the first seed, then with the second: the table fills evenly."""
    places = {row.label: number for number, row in enumerate(grid.rows)}
    seeds = {seed: number for number, seed in enumerate(grid.seeds)}
    return sorted(grid.cells, key=lambda c: (seeds[c.seed], c.fold or 0, c.held_out, places[c.row]))


def limit_threads(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Cells that share a machine take a core each, unless the configuration says how many."""
    compute = dict(settings.get("compute") or {})
    if compute.get("threads") is not None:
        return settings
    return {**settings, "compute": {**compute, "threads": 1}}


def choose_jobs_for(cells: Sequence[Cell], cluster: Cluster | None = None) -> tuple[int, str]:
    """How many of these run at a time, and why."""
    if not cells:
        return 1, "all are done"
    if cluster is not None:
        return len(cells), f"{cluster.name} decides when each begins"
    kinds: dict[str, Config] = {}
    for cell in cells:
        config = check_settings(cell.settings, "")
        kinds.setdefault(f"{config.model} {config.batch_size} {config.data} {config.compute}", config)
    return choose_jobs(kinds.values(), len(cells))


def read_score(folder: Path, metric: str, held_out: bool = False) -> float | None:
    """A finished run's mean over clients, or over those that were held out."""
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))["test"][metric]
        value = (found["held_out"] if held_out else found)["mean"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Two comparisons must not write one folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written: {error.strerror}.") from None
    with file:
        if not try_lock(file):
            raise WardroundError(f"{folder} is in use by another comparison.")
        yield
