"""compare: a grid of runs, a table that fills in, statistics at the end."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from wardround.cli.common import Debug, Json, Quiet, Set, app, configure_logging, err, out, show_wait
from wardround.cli.runs import write_page
from wardround.cli.terminal_table import STRUCTURE, draw_table
from wardround.errors import ConfigError
from wardround.files import jsonable
from wardround.progress import RoundProgress

MOST_COLUMNS = 6  # seeds and folds shown side by side while the runs go on; more become a count
MOST_ROWS = 40  # on a terminal, of a table with several structures
SECONDS_BETWEEN_LINES = 30.0

Names = Annotated[str | None, typer.Option(metavar="a,b", help="Names, or labels of the file's own entries.")]
Seeds = Annotated[str | None, typer.Option(metavar="3|1,2,3", help="How many, or which.")]
Jobs = Annotated[
    str, typer.Option(metavar="N|auto", help="Cells at a time; auto: by cores, memory and GPUs.")
]
On = Annotated[str, typer.Option("--on", metavar="local|slurm|ray", help="Where cells run.")]
OnOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="a=b,c=d", help="For SLURM those of sbatch: partition=gpu,time=4:00:00,gpus=1."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Output folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Rerun cells whose settings changed.")]


@app.command()
def compare(
    config: Annotated[
        str,
        typer.Argument(
            help="A YAML file, with or without a sweep section; or a name of `wardround configs`."
        ),
    ],
    methods: Names = None,
    objectives: Names = None,
    models: Names = None,
    seeds: Seeds = None,
    folds: Annotated[int | None, typer.Option(help="Cross-validation with this many folds.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The row others are tested against; default FedAvg.")
    ] = None,
    same_objective: Annotated[
        bool, typer.Option("--same-objective", help="Give all rows the objective of the reference.")
    ] = False,
    hold_out: Annotated[
        list[str] | None, typer.Option(metavar="CLIENT", help="Only tested, never trained; may be repeated.")
    ] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Hold out each client in turn.")
    ] = False,
    jobs: Jobs = "auto",
    on: On = "local",
    on_options: OnOptions = None,
    set_: Set = None,
    output: Output = None,
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run methods, objectives, models and seeds side by side, and test the differences.

    Finished cells are not run again: after Ctrl-C or a crash, run the same command.
    """
    configure_logging(debug, quiet or json_)
    options: Any = {
        "methods": parse_names("methods", methods),
        "objectives": parse_names("objectives", objectives),
        "models": parse_names("models", models),
        "seeds": parse_seeds(seeds),
        "folds": folds,
        "reference": reference,
        "same_objective": same_objective,
        "hold_out": hold_out or (),
        "leave_one_out": leave_one_out,
        "overrides": set_ or (),
    }
    hidden, at_once = quiet or json_, parse_jobs(jobs)
    with show_wait("Checking every cell", hidden):
        from wardround.comparison.run import plan_comparison

        grid, folder = plan_comparison(config, options, output)
    found = run_shown(grid, folder, at_once, overwrite, on, on_options, hidden=hidden)
    show_result(found, as_json=json_, hidden=hidden)


def show_result(found: Any, *, as_json: bool, hidden: bool) -> None:
    """Print the tables, write the page; exit code 1 if a cell failed."""
    if as_json:
        out.print_json(json.dumps(as_dict(found)))
    else:
        show(found)
    write_page(found.folder, hidden)
    if found.failures:
        raise typer.Exit(1)


def run_shown(
    grid: Any,
    folder: Path,
    jobs: int | None,
    overwrite: bool,
    on: str,
    on_options: list[str] | None,
    *,
    hidden: bool,
) -> Any:
    """Run the comparison with its progress shown; Ctrl-C and SIGTERM end the running cells."""
    from wardround.cluster.options import open_cluster, parse_options
    from wardround.comparison.run import run_grid

    cluster = open_cluster(on, parse_options(",".join(on_options or ())))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with show_progress(hidden) as watch:
            return run_grid(grid, folder, jobs=jobs, overwrite=overwrite, watch=watch, cluster=cluster)
    except KeyboardInterrupt:
        err.print(
            f"Stopped. Finished cells and all completed rounds are kept in {escape(str(folder))}; "
            "run the same command to continue."
        )
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def split_list(text: str | None) -> list[str] | None:
    """
    >>> split_list("fedavg, fedevi"), split_list(None)
    (['fedavg', 'fedevi'], None)
    """
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def parse_names(option: str, text: str | None) -> list[str] | None:
    names = split_list(text)
    if names == []:
        raise ConfigError(f"--{option} is empty; give names like a,b. List all: wardround {option}")
    return names


def parse_seeds(text: str | None) -> int | list[int] | None:
    """
    >>> parse_seeds("3"), parse_seeds("1,2"), parse_seeds("7,")
    (3, [1, 2], [7])
    """
    if text is None:
        return None
    try:
        return [int(part) for part in split_list(text) or []] if "," in text else int(text)
    except ValueError:
        raise ConfigError(f"--seeds is '{text}'; give a number (3) or a list (1,2,3).") from None


def parse_jobs(text: str) -> int | None:
    """
    >>> parse_jobs("8"), parse_jobs("auto")
    (8, None)
    """
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise ConfigError(f"--jobs is '{text}'; give a number, or auto.") from None


# While it runs


@contextmanager
def show_progress(hidden: bool) -> Iterator[Any]:
    """A listener that shows the cells: a table on a terminal, lines in a pipe, or None."""
    if hidden:
        yield None
    elif not err.is_terminal:
        yield CellLines()
    else:
        screen = CellScreen()
        with Live(console=err, get_renderable=screen.draw, refresh_per_second=4):
            yield screen


class Cells:
    """What is known of every cell while the comparison runs."""

    def __init__(self) -> None:
        self.grid: Any = None
        self.titles: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.progress = RoundProgress()
        self.started = time.monotonic()

    def on_plan(self, grid: Any, stages: Mapping[str, str]) -> None:
        self.grid = grid
        self.titles = {cell.name: cell.title for cell in grid.cells}
        self.progress.waiting = {name for name in self.titles if stages.get(name) != "done"}

    def on_jobs(self, jobs: int, why: str) -> None: ...

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        self.progress.note(name, done, rounds)

    def on_end(self, name: str, value: float | None, error: str | None) -> None:
        self.progress.end(name)
        if error is not None:
            self.errors[name] = error
        else:
            self.values[name] = math.nan if value is None else value

    def count_ended(self) -> str:
        return f"{len(self.values) + len(self.errors)} of {len(self.titles)}"

    def describe(self) -> str:
        """How far all cells are, in one line."""
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        rounds, left = self.progress.describe_rounds(), self.progress.describe_left()
        running = f"{self.count_ended()} cells done, {len(self.progress.running)} running"
        return f"{running}{rounds}, {minutes}:{seconds:02d}{left}"


class CellLines(Cells):
    """In a pipe or a log file: one plain line for each cell, and one now and then between them."""

    shown = 0.0

    def on_plan(self, grid: Any, stages: Mapping[str, str]) -> None:
        super().on_plan(grid, stages)
        done = sum(value == "done" for value in stages.values())
        begun = sum(value == "unfinished" for value in stages.values())
        text = f"{grid.name}: {len(grid.cells)} cells"
        self.show(text + (f", {done} done, {begun} to resume" if done or begun else ""))

    def on_jobs(self, jobs: int, why: str) -> None:
        if self.progress.waiting:
            self.show(f"{jobs} at a time: {why}")

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        super().on_rounds(name, done, rounds)
        if time.monotonic() - self.shown > SECONDS_BETWEEN_LINES:
            self.show(self.describe())

    def on_end(self, name: str, value: float | None, error: str | None) -> None:
        super().on_end(name, value, error)
        result = (
            f"failed: {error}" if error is not None else f"{self.grid.metrics[0]} {self.values[name]:.3f}"
        )
        self.show(f"{self.titles[name]}: {result} ({self.count_ended()}{self.progress.describe_left()})")

    def show(self, text: str) -> None:
        self.shown = time.monotonic()
        err.print(escape(text))


class CellScreen(Cells):
    """On a terminal: a table that fills in."""

    why = ""

    def on_jobs(self, jobs: int, why: str) -> None:
        self.why = f"{jobs} at a time: {why}" if self.progress.waiting else ""

    def draw(self) -> Group:
        below = [Text(line) for line in (self.describe(), self.why) if line]
        return Group(*([] if self.grid is None else [self.draw_table()]), *below)

    def draw_table(self) -> RichTable:
        over = "held-out clients" if self.grid.held_out else "clients"
        shown = RichTable(title=f"{self.grid.metrics[0]}, mean over {over}", title_justify="left")
        shown.add_column(overflow="fold")
        columns = self.list_columns()
        for title in columns or ["cells"]:
            shown.add_column(escape(title), justify="right")
        if len(columns) != 1:
            shown.add_column("mean", justify="right")
        for row in (row for row in self.grid.rows if row.run_of is None):
            shown.add_row(escape(row.label), *self.draw_row(row.label, columns))
        return shown

    def list_columns(self) -> list[str]:
        """Headings for seeds, folds and held-out clients; none if they are too many to show."""
        titles = list(dict.fromkeys(title_replicate(cell) for cell in self.grid.cells))
        labels = max((len(row.label) for row in self.grid.rows), default=0)
        width = labels + sum(max(len(title), len("waiting")) + 3 for title in (*titles, "mean")) + 4
        return titles if len(titles) <= MOST_COLUMNS and width <= err.width else []

    def draw_row(self, label: str, columns: Sequence[str]) -> list[str]:
        cells = [cell for cell in self.grid.cells if cell.row == label]
        values = [self.values[cell.name] for cell in cells if cell.name in self.values]
        mean = f"{sum(values) / len(values):.3f}" if values else ""
        if not columns:
            failed = sum(cell.name in self.errors for cell in cells)
            note = f", [red]{failed} failed[/]" if failed else ""
            return [f"{len(values)} of {len(cells)}{note}", mean]
        states = [self.draw_state(cell.name) for cell in cells]
        return states if len(columns) == 1 else [*states, mean]

    def draw_state(self, name: str) -> str:
        if name in self.errors:
            return "[red]failed[/]"
        if name in self.values:
            return f"{self.values[name]:.3f}"
        return f"[dim]{self.progress.describe_run(name)}[/]"


def title_replicate(cell: Any) -> str:
    """What tells a row's cells apart: seed, fold, who is held out."""
    return str(dataclasses.replace(cell, row="").title).removeprefix(", ")


# The result


def show(found: Any) -> None:
    """The tables of every metric, the result in words, and where everything is."""
    if len(found.results):
        for metric in found.metrics:
            show_metric(found, metric)
        print_marked(found.cost(), f"table-cost.md in {found.folder} has them.")
        out.print()
        show_headline(found)
        out.print(f"Report, tables, statistics and all runs: [bold]{escape(str(found.folder))}[/]")
    titles = {cell.name: cell.title for cell in found.cells}
    if found.failures:
        err.print(f"[bold red]{len(found.failures)} of {len(found.cells)} cells failed[/]")
    for name, reason in found.failures.items():
        err.print(f"- {escape(titles[name])}: {escape(reason)}")


def show_metric(found: Any, metric: str) -> None:
    tables = {f"table-{metric}": found.table(metric), f"clients-{metric}": found.hospitals(metric)}
    if len(found.rows) > 1:
        tables[f"table-{metric} "] = found.significance(metric)
    tables |= {
        f"published-{metric}": found.published(metric),
        f"cross-site-{metric}": found.cross_site(metric),
    }
    for name, table in tables.items():
        if table is not None:
            where = f"{name.strip()}.md in {found.folder}"
            print_marked(shorten(table, where), f"{where} has them.")
            out.print()


def shorten(table: Any, where: str) -> Any:
    """A long table on a terminal: rows of all structures together; where: the file with the others."""
    if not out.is_terminal or len(table.rows) <= MOST_ROWS or STRUCTURE not in table.columns:
        return table
    place = list(table.columns).index(STRUCTURE)
    rows = [row for row in table.rows if row[place] == table.rows[0][place]]
    caption = f"{table.caption} {len(table.rows) - len(rows)} rows of single structures: {where}."
    return dataclasses.replace(table, rows=rows, caption=caption)


def show_headline(found: Any) -> None:
    from wardround.comparison.headline import as_text

    out.print(f"{as_text(found.headline())}\n", markup=False)


def print_marked(table: Any, where: str) -> None:
    """A table with the best bold and the second underlined; Markdown with its title in a pipe."""
    if out.is_terminal:
        draw_table(out, table, where=where)
    else:
        out.print(f"{table.title}\n\n{table.markdown()}", markup=False)


def as_dict(found: Any) -> Any:
    from wardround.comparison.headline import as_text

    done = bool(len(found.results))
    return jsonable(
        {
            "folder": found.folder,
            "name": found.name,
            "reference": found.reference,
            "cells": len(found.cells),
            "done": len(found.results),
            "failures": found.failures,
            "headline": as_text(found.headline()) if done else "",
            "metrics": {metric: found.numbers(metric) for metric in found.metrics} if done else {},
        }
    )
