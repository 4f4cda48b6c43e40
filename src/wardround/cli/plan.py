"""plan: what a run will take, before it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, Quiet, Set, app, configure_logging, err, out, print_table
from wardround.tables import Table
from wardround.text import format_bytes, format_duration, format_size

if TYPE_CHECKING:
    from wardround.planning.plan import Plan

MOST_CLIENTS = 12  # shown one by one; more are summed up

PARTS = {
    "process": "Python and torch",
    "parameters": "network",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "references": "frozen references",
    "messages": "models received and sent",
    "activations": "activations of a batch",
    "cases": "cases",
}


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file or a name, as for train.")],
    set_: Set = None,
    calibration: Annotated[
        bool,
        typer.Option("--calibration/--no-calibration", help="Measure time and traffic in a short dry run."),
    ] = True,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Estimate what a run will take: memory, traffic, disk, steps and time, and what does not fit."""
    configure_logging(debug, quiet or json_)
    from wardround.config_file import load_config
    from wardround.planning.plan import make_plan

    source = config / "config.yaml" if config.is_dir() else config
    checked = load_config(source, set_ or [])
    if json_ or quiet or not calibration or not err.is_terminal:
        made = make_plan(checked, measure=calibration)
    else:
        with err.status("Dry run with random cases ..."):
            made = make_plan(checked, measure=calibration)
    if json_:
        out.print_json(json.dumps(made.as_dict()))
    else:
        show_plan(made)


def show_plan(made: Plan) -> None:
    for table in (summary_table(made), clients_table(made), memory_table(made)):
        print_table(table)
        out.print()
    for note in made.notes:
        out.print(escape(note))
    if not made.problems:
        out.print("Everything fits.")
    for problem in made.problems:
        out.print(
            f"[bold red]Does not fit:[/] {escape(problem.what)}. Suggestion: {escape(problem.suggestion)}."
        )


def summary_table(made: Plan) -> Table:
    config, placement, compute, traffic = made.config, made.placement, made.compute, made.traffic
    sides = format_size(made.shape)
    workers = f"{placement.workers} ({placement.why}), {placement.threads} threads each"
    channels = "last" if compute.channels_last else "first"
    about = "" if traffic.measured else "about "
    rows = [
        ["network", f"{config.model.name}, {made.parameters:,} parameters, {format_bytes(made.model_bytes)}"],
        ["rounds", f"{config.rounds}, {made.present} clients each"],
        ["steps", f"{made.steps:,} of {config.batch_size} cases, {sides}"],
        ["device", ", ".join(placement.devices if placement.workers > 1 else [str(compute.device)])],
        ["workers", workers],
        ["precision", f"{compute.precision}, channels {channels}, compile {compute.compile}"],
        ["down and up per round", f"{about}{format_bytes(traffic.down)} and {format_bytes(traffic.up)}"],
        ["total traffic", f"{about}{format_bytes(traffic.total)}"],
        ["disk", f"about {format_bytes(made.disk_bytes)} of {format_bytes(made.disk_free)} free"],
    ]
    if made.time is not None:
        rows += [
            ["one step", f"{1000 * made.time.step:.0f} ms"],
            ["one round", f"about {format_duration(made.time.round)}"],
            ["total", f"about {format_duration(made.time.total)}"],
        ]
    return Table(f"{config.name}: {made.title}", ["what", "plan"], rows)


def clients_table(made: Plan) -> Table:
    rows: list[list[Any]] = [[c.name, c.train, c.val, c.test, c.steps] for c in made.clients]
    if len(rows) > MOST_CLIENTS:
        rest = rows[MOST_CLIENTS - 1 :]
        sums = [sum(row[column] for row in rest) for column in range(1, 5)]
        rows = [*rows[: MOST_CLIENTS - 1], [f"{len(rest)} more", *sums]]
    return Table("Clients", ["client", "train", "val", "test", "steps per round"], rows)


def memory_table(made: Plan) -> Table:
    columns = ["memory", *(entry.device for entry in made.memory)]
    rows = [
        [title, *(format_part(entry.parts[part]) for entry in made.memory)]
        for part, title in PARTS.items()
        if any(entry.parts[part] != 0 for entry in made.memory)
    ]
    if any(entry.processes > 1 for entry in made.memory):
        rows.append(["processes", *(str(entry.processes) for entry in made.memory)])
    if any(entry.server for entry in made.memory):
        rows.append(["server process", *(format_bytes(entry.server) for entry in made.memory)])
    if any(entry.measured is not None for entry in made.memory):
        rows.append(["peak in the dry run", *(format_part(entry.measured) for entry in made.memory)])
    rows.append(["total, about", *(format_bytes(entry.total) for entry in made.memory)])
    rows.append(["free", *(format_bytes(entry.free) for entry in made.memory)])
    return Table("Memory", columns, rows)


def format_part(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)
