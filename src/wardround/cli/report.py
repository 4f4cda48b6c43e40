"""report and watch: the page of a run or comparison, written to a file or live."""

from __future__ import annotations

import json
import math
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from wardround.cli.common import Debug, Json, app, configure_logging, err, out, show_wait
from wardround.errors import WardroundError
from wardround.tables import one_line
from wardround.text import describe_round

BARS = "▁▂▃▄▅▆▇█"
POLL_SECONDS = 1.0


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs or comparisons.", metavar="FOLDER...")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the page goes; default FOLDER/report.html.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page about runs and comparisons; it opens offline from a double click."""
    configure_logging(debug, quiet=json_)
    with show_wait("Reading the runs and drawing the page", json_):
        from wardround.reporting import write_report

        path = write_report(folders, output)
    size = path.stat().st_size
    if json_:
        out.print_json(json.dumps({"path": str(path), "bytes": size}))
    else:
        out.print(f"Report: [bold]{escape(str(path))}[/] ({size / 1e6:.1f} MB)")
    if open_:
        webbrowser.open(path.resolve().as_uri())


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or comparison.")],
    terminal: Annotated[bool, typer.Option("--terminal", help="Here, instead of in the browser.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    debug: Debug = False,
) -> None:
    """Live view of a run or comparison: its page at a local address, or a table in the terminal."""
    configure_logging(debug, quiet=False)
    from wardround.reporting import open_source
    from wardround.reporting.live_view import serve

    source = open_source(folder)  # an error here comes before the server starts
    try:
        if terminal:
            follow(source)
            return
        with serve(folder, open_browser=open_) as page:
            out.print(f"Watching {escape(str(folder))} at [bold]{page.url}[/]")
            err.print("Only this machine can open it. Ctrl-C ends the live view, never the run.")
            page.wait()
        out.print(f"The run is done. The page as a file: wardround report {escape(str(folder))}")
    except KeyboardInterrupt:
        err.print("The live view has ended; the run continues.")
        raise typer.Exit(130) from None


# In the terminal


def follow(source: Any) -> None:
    """A table that updates as the run goes; in a pipe one line for each round."""
    from wardround.reporting.live_view import is_done

    if not err.is_terminal:
        shown = 0
        while True:
            done = is_done(source)
            lines = list_lines(source)
            for line in lines[shown:]:
                out.print(line, markup=False)
            shown = len(lines)
            if done:
                return
            time.sleep(POLL_SECONDS)
    with Live(console=err, get_renderable=lambda: draw_source(source), refresh_per_second=1):
        while not is_done(source):
            time.sleep(POLL_SECONDS)


def list_lines(source: Any) -> list[str]:
    from wardround.comparison.runs import read_run

    if source.kind == "comparison":
        return [f"{cell.title}: done" for cell in load_comparison(source).cells if cell.is_done]
    run = read_run(source.folder)
    start = f"{run.label}: round "
    return [
        f"{start}{int(at)}/{run.rounds} {describe_round(record)}" for at, record in run.records.numbered()
    ]


def load_comparison(source: Any) -> Any:
    from wardround.comparison import Comparison

    return Comparison.load(source.folder)


def draw_source(source: Any) -> RenderableType:
    """How far it is, with a small curve for every client (or row)."""
    try:
        return draw_cells(source) if source.kind == "comparison" else draw_run(source)
    except (WardroundError, OSError) as error:  # a file that is being written
        return Text(str(error))


def draw_cells(source: Any) -> RichTable:
    from wardround.batch import count_rounds

    found = load_comparison(source)
    done = sum(cell.is_done for cell in found.cells)
    shown = RichTable(title=f"{escape(found.name)}: {done} of {len(found.cells)} cells", title_justify="left")
    for head in ("cell", "rounds", ""):
        shown.add_column(head)
    for cell in found.cells:
        state = "done" if cell.is_done else "failed" if cell.name in found.failures else ""
        shown.add_row(escape(cell.title), str(count_rounds(cell.folder)), state)
    return shown


def draw_run(source: Any) -> RenderableType:
    from wardround.comparison.runs import read_run
    from wardround.reporting.charts import format_number

    run = read_run(source.folder)
    metric = next(iter(run.records.validation_metrics()), "dice")
    curves, weights = run.records.validation(metric), run.records.series("weights")
    losses = run.records.losses().get("total", {})
    title = f"{escape(one_line(run.label, 60))}: round {len(run.records)} of {run.rounds}"
    shown = RichTable(title=title, title_justify="left")
    for head in ("client", f"validation {metric}", "", "weight", "loss"):
        shown.add_column(head, justify="left" if head in ("client", "") else "right")
    for client in run.clients:
        values = [value for _, value in curves.get(client, [])]
        shown.add_row(
            escape(one_line(client, 40)),
            format_number(values[-1]) if values else "",
            sparkline(values),
            *(format_number(part[client][-1][1]) if part.get(client) else "" for part in (weights, losses)),
        )
    said = [f"{who} refused in round {at}: {why}" for at, who, why in run.records.trouble("refused")[-3:]]
    last = [describe_round(run.records[-1])] if run.records else []
    return Group(shown, *(Text(one_line(text, 160)) for text in [*last, *said, *run.records.warnings()]))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """
    >>> sparkline([0.1, 0.5, 0.9])
    '▁▅█'
    """
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in finite)
