"""egress: what left a hospital, and whether that list is complete."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, app, configure_logging, err, out, print_table
from wardround.deploy import ledger
from wardround.tables import Table
from wardround.text import format_bytes

egress_app = typer.Typer(name="egress", help="What left a hospital.", no_args_is_help=True)
app.add_typer(egress_app)

Place = Annotated[
    Path, typer.Argument(help="A kit, its state folder, a run folder, or an egress.jsonl.", metavar="PLACE")
]

LONGEST_CELL = 60


@egress_app.command()
def show(
    path: Place,
    run: Annotated[
        str | None, typer.Option("--run", help="Only this run: its id, name, or a pattern.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only this task, such as train.")] = None,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Only the last N.")] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """List every message that left: when, for which run, what it held."""
    configure_logging(debug, json_)
    place = ledger.find(path)
    wanted = (line for line in ledger.read(place) if is_wanted(line, run, task))
    lines = list(wanted if last is None else deque(wanted, maxlen=last))
    if json_:
        out.print_json(json.dumps(lines))
    elif lines:
        try:
            table = build_table(lines)
        except (AttributeError, TypeError, ValueError):  # edited by hand, and still JSON
            raise ledger.LedgerError(
                f"{place} has a line that wardround did not write. See: wardround egress verify {place}"
            ) from None
        print_table(table)
    else:
        out.print("No message matches." if run or task else "Nothing has left yet.")


def is_wanted(line: Mapping[str, Any], run: str | None, task: str | None) -> bool:
    names = [str(line[key]) for key in ("run", "name") if key in line]
    is_of_run = run is None or any(fnmatchcase(name, run) for name in names)
    return is_of_run and (task is None or line.get("task") == task)


def build_table(lines: Iterable[Mapping[str, Any]]) -> Any:
    rows = [
        [
            str(line.get("time", "-"))[:19].replace("T", " "),
            str(line.get("name") or line.get("run") or line.get("client", "-")),
            str(line.get("round", "-")),
            str(line.get("task", "-")),
            len(line.get("tensors") or {}),
            format_bytes(int(line.get("bytes") or 0)),
            summarise(line),
        ]
        for line in lines
    ]
    chained = all("hash" in line for line in lines)
    columns = ["time (UTC)", "run" if chained else "client", "round", "task", "tensors", "size", "scalars"]
    return Table("", columns, rows, width=LONGEST_CELL)


def summarise(line: Mapping[str, Any]) -> str:
    """The numbers of a message in a few words, or the sentence that left instead of an answer."""
    for key in ("refused", "failure"):
        if line.get(key):
            return f"{key}: {line[key]}"
    scalars = line.get("scalars") or {}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in scalars.items()
    )


@egress_app.command()
def verify(path: Place, json_: Json = False, debug: Debug = False) -> None:
    """Check that no line was changed, removed, inserted, moved or cut off. Exit code 1 if one was."""
    configure_logging(debug, json_)
    place = ledger.find(path)
    verdict = ledger.verify(place)
    if json_:
        out.print_json(json.dumps({"path": str(place), **asdict(verdict)}))
    elif verdict.ok:
        out.print(f"{escape(str(place))}: {verdict.sentence}")
        if verdict.hash is not None:
            out.print(f"Last hash {verdict.hash}; note it elsewhere to tell a new chain from this one.")
    else:
        err.print(f"[bold red]broken[/] {escape(f'{place}: {verdict.sentence}')}")
    if not verdict.ok:
        raise typer.Exit(1)
