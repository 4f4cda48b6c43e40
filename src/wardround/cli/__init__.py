"""The command line: parses, calls, prints. One file for each family of commands.

Exit codes: 0 done, 2 the user's input is wrong, 130 stopped by Ctrl-C, 1 anything else.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.markup import escape

# Waiting threads must sleep, not spin: on a busy machine spinning makes training many times slower.
# It only has an effect if set before torch starts its threads, so here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from wardround.cli import (  # noqa: F401, each adds its commands to the app
    cache,
    catalogues,
    compare,
    configs,
    configure,
    data,
    dicom,
    dossier,
    egress,
    enrolment,
    export,
    flare,
    hospitals,
    kits,
    models,
    plan,
    predict,
    privacy,
    report,
    runs,
    setup,
    survey,
)
from wardround.cli.common import app, err, out
from wardround.errors import WardroundError, explain
from wardround.machine import write_utf8
from wardround.tables import one_line
from wardround.version import __version__

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; a user error becomes one sentence and exit code 2."""
    write_utf8(sys.stdout, sys.stderr)
    try:
        app()
    except WardroundError as error:
        if "--debug" in sys.argv:
            err.print_exception()
        lines = [one_line(line) for line in str(error).splitlines()]  # it may quote what came from elsewhere
        err.print(f"[bold red]error[/] {escape(chr(10).join(lines))}")
        sys.exit(error.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            leave_quietly()
        if "--debug" in sys.argv:
            err.print_exception()
        err.print(f"[bold red]error[/] {escape(explain(error))}")
        sys.exit(1)
    except SystemExit as ending:
        if isinstance(getattr(ending.__context__, "__cause__", None), KeyboardInterrupt):
            err.print("Stopped; what was finished is kept.")  # for commands without a message of their own
        raise


def leave_quietly() -> None:
    """The reader of our output has closed the pipe, as with `| head`: not an error."""
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
