"""The command line: parses, calls, prints.

Exit codes: 0 done, 2 the user's input is wrong, 130 stopped by Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from wardround import __version__
from wardround.errors import WardroundError

# Threads that wait must sleep, not spin: on a busy machine spinning makes training many times slower.
# It counts only if it is set before torch starts its threads, so here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    name="wardround",
    help="One segmentation model, every hospital: federated training of medical image segmentation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(name="data", help="Make and look at data.", no_args_is_help=True)
app.add_typer(data_app)
papers_app = typer.Typer(name="papers", invoke_without_command=True)
app.add_typer(papers_app)

out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
err = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a setting; may be repeated.")
]


def main() -> None:
    """Run the command line; an error of the user's becomes one sentence and exit code 2."""
    try:
        app()
    except WardroundError as error:
        if "--debug" in sys.argv:
            err.print_exception()
        err.print(f"[bold red]error[/] {escape(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            leave_quietly()
        if "--debug" in sys.argv:
            err.print_exception()
        where = f"{error.filename}: " if error.filename else ""
        err.print(f"[bold red]error[/] {escape(where + str(error.strerror or error))}.")
        sys.exit(1)


def leave_quietly() -> None:
    """The reader of our output went away, as with `| head`: that is no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"wardround {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True)] = False,
) -> None:
    """One segmentation model, every hospital."""


# Runs


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML file, or the folder of a run to resume.")],
    set_: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train one model across all clients and test it at each of them."""
    configure_logging(debug, quiet or json_)
    from wardround.api import Result
    from wardround.config import load_config
    from wardround.engine.experiment import Experiment

    overrides = list(set_ or [])
    source = config
    if config.is_dir():  # a run folder, wherever it lies by now
        source = config / "config.yaml"
        overrides.insert(0, f"output={json.dumps(str(config))}")
    checked = load_config(source, overrides)
    with live(quiet or json_) as screen:
        experiment = Experiment(checked, listener=screen)
        with stopping_at_a_round_end(lambda: setattr(experiment, "stop_requested", True)):
            outcome = experiment.run(resume=resume, overwrite=overwrite)
    result = Result(checked, outcome)
    if json_:
        out.print_json(json.dumps(result.summary))
    elif outcome.status == "done":
        show_result(result)
    if outcome.status == "stopped":
        err.print(
            f"Stopped after round {outcome.state.round} of {checked.rounds}; nothing is lost. Continue with: "
            f"wardround train {escape(str(checked.folder))} --resume"
        )
        raise typer.Exit(130)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the runs go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="One seed for data and training.")] = 42,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Three made-up hospitals: each alone, together, with all data in one place, and four papers' methods."""
    configure_logging(debug, quiet or json_)
    from wardround.demo import run_demo

    try:
        with live(quiet or json_) as screen:
            shown = run_demo(output, seed=seed, watch=screen)
    except KeyboardInterrupt:
        err.print("Stopped. The demo starts from the beginning when you call it again.")
        raise typer.Exit(130) from None
    if json_:
        out.print_json(json.dumps(shown.facts))
        return
    print_table(shown.references)
    out.print(f"\n{escape(shown.sentence)}\n")
    print_table(shown.papers)
    out.print()
    out.print(f"Pictures: [bold]{escape(str(shown.picture))}[/]   Runs: {escape(str(output))}")


def show_result(result: Any) -> None:
    config, outcome = result.config, result.outcome
    print_table(result.table)
    summary = result.summary
    out.print(
        f"\nBest round {outcome.progress.best_round} of {config.rounds} (chosen on validation cases); "
        f"{summary['num_refused']} replies refused, {summary['num_lost']} lost; "
        f"{outcome.progress.seconds:.1f} s in rounds."
    )
    out.print(f"Final parameters: sha256 {summary['params_sha256'][:16]}...")
    out.print(f"Everything is in [bold]{escape(str(config.folder))}[/]; pictures in overlays.png")


# Catalogues


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show the card of one method.")] = None,
    json_: Json = False,
) -> None:
    """List the methods, or show one with its settings."""
    from wardround.methods import METHODS
    from wardround.reporting.catalogue import method_card, method_list

    catalogue(name, json_, METHODS, method_list, method_card, "method")


@app.command()
def objectives(
    name: Annotated[str | None, typer.Argument(help="Show one objective.")] = None, json_: Json = False
) -> None:
    """List what clients can minimise, or show one objective with its settings."""
    from wardround.methods import OBJECTIVES
    from wardround.reporting.catalogue import objective_card, objective_list

    catalogue(name, json_, OBJECTIVES, objective_list, objective_card, "objective")


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="Show one network.")] = None, json_: Json = False
) -> None:
    """List the networks."""
    from wardround.models import MODELS
    from wardround.reporting.catalogue import model_card, model_list

    catalogue(name, json_, MODELS, model_list, model_card, "model")


def catalogue(
    name: str | None,
    as_json: bool,
    registry: Mapping[str, Any],
    list_all: Callable[[], Any],
    show_one: Callable[[str], Any],
    kind: str,
) -> None:
    from wardround.config import suggestion
    from wardround.errors import ConfigError

    if name is not None and name not in registry:
        raise ConfigError(
            f"'{name}' is not a {kind}.{suggestion(name, registry)} List all: wardround {kind}s"
        )
    print_rows(list_all() if name is None else show_one(name), as_json)


def print_rows(table: Any, as_json: bool) -> None:
    """A table, or its rows as JSON objects."""
    if as_json:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        out.print_json(json.dumps(rows))
    else:
        print_table(table)


# Papers


@papers_app.callback()
def papers(context: typer.Context, json_: Json = False) -> None:
    """List the tables of the papers that can be run as presets, or show one."""
    if context.invoked_subcommand is not None:
        return
    configure_logging(debug=False, quiet=True)
    from wardround.papers import preset_list

    print_rows(preset_list(), json_)


@papers_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A preset, such as safcf-table2.")],
    json_: Json = False,
) -> None:
    """Show what a preset runs, what it still needs, and what was published."""
    configure_logging(debug=False, quiet=True)
    from wardround import papers

    preset = papers.load(name)
    if json_:
        out.print_json(json.dumps(papers.as_dict(preset)))
        return
    out.print(f"[bold]{escape(preset.name)}[/]  {escape(preset.paper)}, {escape(preset.table)}")
    out.print(escape(preset.about))
    out.print(f"\n{escape(papers.settings_text(preset))}")
    for table in papers.tables(preset):
        out.print(f"\n[bold]{escape(table.title)}[/]\n")
        print_table(dataclasses.replace(table, title=""))
    for heading, sentences in papers.remarks(preset).items():
        out.print(f"\n[bold]{escape(heading)}[/]")
        for sentence in sentences:
            out.print(f"- {escape(sentence)}")


# Data


@data_app.command()
def phantom(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    hospitals: Annotated[int, typer.Option(help="How many hospitals.")] = 3,
    dimensions: Annotated[int, typer.Option(help="2 for images, 3 for volumes.")] = 2,
    file_format: Annotated[str, typer.Option("--format", help="nifti or png.")] = "nifti",
    seed: Annotated[int, typer.Option(help="Same seed, same files.")] = 42,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Write made-up hospitals as folders of images and labels."""
    configure_logging(debug, False)
    from wardround.config import apply_override, parse
    from wardround.data.phantom_files import write
    from wardround.errors import ConfigError

    if file_format not in ("nifti", "png"):
        raise ConfigError(f"--format is '{file_format}'; use nifti or png.")
    settings: dict[str, Any] = {"hospitals": hospitals, "dimensions": dimensions}
    for override in set_ or []:
        apply_override(settings, override)
    checked = parse({"data": {"phantom": settings}, "model": {"name": f"unet{dimensions}d"}}).data.phantom
    chosen: Literal["nifti", "png"] = "nifti" if file_format == "nifti" else "png"
    write(checked, folder, chosen, seed)
    out.print(
        f"Wrote {checked.hospitals} hospitals to [bold]{escape(str(folder))}[/] (index.csv lists the cases)."
    )


# Screen


class Screen:
    """Progress on a terminal: one bar for the rounds, one line for the client at work."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rounds: TaskID | None = None
        self._clients: dict[str, TaskID] = {}

    def on_start(self, config: Any, first_round: int) -> None:
        if self._rounds is not None:
            self._progress.remove_task(self._rounds)
        self._rounds = self._progress.add_task(
            escape(config.name), total=config.rounds, completed=first_round, note=""
        )

    def on_round(self, round: int, present: Sequence[str]) -> None:
        for task in self._clients.values():
            self._progress.remove_task(task)
        self._clients = {}

    def on_progress(self, client: str, step: int, steps: int) -> None:
        if client not in self._clients:
            self._clients[client] = self._progress.add_task(
                f"  {escape(client)}", total=steps, note="training"
            )
        note = "" if step == steps else "training"
        self._progress.update(self._clients[client], completed=step, total=steps, note=note)

    def on_record(self, record: Mapping[str, Any]) -> None:
        assert self._rounds is not None
        self._progress.update(self._rounds, completed=record["round"], note=running_note(record))

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        """One bar for each of several runs."""
        if name not in self._clients:
            self._clients[name] = self._progress.add_task(escape(name), total=rounds, note="rounds")
        self._progress.update(self._clients[name], completed=done)


class Lines:
    """Progress in a pipe or a log file: one plain line a round."""

    def __init__(self) -> None:
        self._title = ""
        self._rounds = 0
        self._shown: dict[str, int] = {}

    def on_start(self, config: Any, first_round: int) -> None:
        self._title = f"{config.name}: "
        self._rounds = config.rounds

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None:
        text = f"{self._title}round {record['round']}/{self._rounds} {running_note(record)}"
        err.print(escape(text), markup=True)

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        if done and self._shown.get(name) != done and (done == rounds or done % 10 == 0):
            self._shown[name] = done
            err.print(f"{name}: round {done} of {rounds}")


def running_note(record: Mapping[str, Any]) -> str:
    """What a round's line says: validation Dice, time, and trouble if any."""
    parts = []
    for metric, entry in record.get("validation", {}).items():
        if metric != "loss":
            parts.append(f"validation {metric} {entry['mean']:.3f}")
            break
    parts.append(f"{record['seconds']:.1f} s")
    trouble = len(record["refused"]) + len(record["lost"])
    if trouble:
        parts.append(f"{trouble} replies refused or lost")
    return ", ".join(parts)


@contextmanager
def live(hidden: bool) -> Iterator[Any]:
    """Somebody who shows progress, suited to where the output goes."""
    if hidden:
        yield None
    elif not err.is_terminal:
        yield Lines()
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=err, transient=False) as progress:
            yield Screen(progress)


@contextmanager
def stopping_at_a_round_end(request: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C once: finish the round, write a checkpoint, say how to go on. Twice: stop now."""

    def handle(number: int, frame: FrameType | None) -> None:
        request()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        err.print(
            "Finishing this round, then stopping with a checkpoint. Press Ctrl-C again to stop at once."
        )

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped at once; the last whole round is safe. Continue with --resume.")
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGINT, before)


def configure_logging(debug: bool, quiet: bool) -> None:
    level = logging.DEBUG if debug else logging.ERROR if quiet else logging.WARNING
    handler = RichHandler(console=err, show_time=False, show_path=debug, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("wardround").setLevel(level)


def print_table(table: Any) -> None:
    if not out.is_terminal:
        out.print(table.markdown(), markup=False)
        return
    shown = RichTable(
        title=escape(table.title) or None, title_justify="left", caption=escape(table.caption) or None
    )
    for number, column in enumerate(table.columns):
        numeric = bool(table.rows) and all(isinstance(row[number], int | float) for row in table.rows)
        shown.add_column(escape(column), justify="right" if numeric else "left", overflow="fold")
    for row in table.cells():
        shown.add_row(*(escape(cell) for cell in row))
    out.print(shown)


if __name__ == "__main__":
    main()
