"""What all commands share: the app, its two consoles, common options, tables and logging."""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from typer.core import TyperGroup

from wardround.cli.terminal_table import draw_table

PANELS = {
    "First steps": ("demo", "train", "report"),
    "Data": ("data", "datasets"),
    "Train and compare": ("configure", "plan", "compare", "watch", "papers"),
    "Use a model": ("predict", "evaluate", "export"),
    "Real hospitals": (
        "rehearse", "organiser", "hospital", "sign", "server", "join", "survey", "confirm", "submit",
        "status", "stop", "egress", "privacy", "dossier", "preflight", "enrol", "revoke", "provision",
        "flare-job",
    ),
    "Look things up": ("configs", "methods", "objectives", "models", "cache"),
}  # fmt: skip


class PanelGroup(TyperGroup):
    """The commands in the order and under the titles of PANELS."""

    def list_commands(self, ctx: Any) -> list[str]:
        placed = [name for names in PANELS.values() for name in names if name in self.commands]
        return [*placed, *(name for name in self.commands if name not in placed)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        panel = next((title for title, names in PANELS.items() if cmd_name in names), None)
        if command is not None and panel is not None:
            command.rich_help_panel = panel
        return command


app = typer.Typer(
    name="wardround",
    cls=PanelGroup,
    help="One segmentation model, every hospital: federated training of medical image segmentation.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

# No emoji: a hospital may be named `a:heart:b`.
out = Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())
err = Console(stderr=True, emoji=False, highlight=False, soft_wrap=not sys.stderr.isatty())

SILENT_SECONDS = 2.5  # nobody waits longer without a word

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
JsonRows = Annotated[bool, typer.Option("--json", help="Print a JSON array, one object for each row.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a setting; may be repeated.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")]
FromRound = Annotated[
    int | None, typer.Option("--from-round", help="With --resume: continue after this earlier round.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run.")]
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="CLIENT", help="With --resume: go on without it; may be repeated."),
]


def leave_out(names: list[str] | None) -> list[str]:
    """The override that leaves clients out of a run that is resumed."""
    return [f"without={json.dumps(names)}"] if names else []


def configure_logging(debug: bool, quiet: bool) -> None:
    """What is shown; run.log has the rest too."""
    level = logging.DEBUG if debug else logging.ERROR if quiet else logging.WARNING
    handler = RichHandler(level, console=err, show_time=False, show_path=debug, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("wardround").setLevel(min(level, logging.INFO))


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector: imports free hardly any objects, and collecting takes 0.2 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def print_table(table: Any) -> None:
    """Print a table; Markdown in a pipe."""
    if out.is_terminal:
        draw_table(out, table)
    else:
        out.print(table.markdown(), markup=False)


@contextmanager
def show_wait(text: str, hidden: bool = False) -> Iterator[None]:
    """Say what takes a while: a spinner on a terminal; a line in a pipe, once it has taken long."""
    if hidden:
        yield
    elif err.is_terminal:
        with err.status(escape(text)):
            yield
    else:
        later = Timer(SILENT_SECONDS, err.print, [escape(f"{text} ...")])
        later.daemon = True
        later.start()
        try:
            yield
        finally:
            later.cancel()


def print_rows(table: Any, as_json: bool) -> None:
    """A table, or its rows as JSON objects."""
    if as_json:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        out.print_json(json.dumps(rows))
    else:
        print_table(table)
