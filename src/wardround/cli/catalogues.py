"""methods, objectives and papers: what there is to choose from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import (
    Debug,
    Json,
    JsonRows,
    Quiet,
    Set,
    app,
    configure_logging,
    out,
    print_rows,
    print_table,
)
from wardround.cli.compare import (
    Jobs,
    Names,
    On,
    OnOptions,
    Output,
    Overwrite,
    Seeds,
    parse_jobs,
    parse_names,
    parse_seeds,
    run_shown,
    show_result,
)
from wardround.errors import ConfigError
from wardround.files import write_text
from wardround.text import suggest

papers_app = typer.Typer(name="papers", invoke_without_command=True)
app.add_typer(papers_app)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show the card of one method.")] = None,
    json_: JsonRows = False,
) -> None:
    """List the methods, or show one with its settings."""
    from wardround.methods import METHODS
    from wardround.reporting.catalogue import method_card, method_list

    catalogue(name, json_, METHODS, method_list, method_card, "method")


@app.command()
def objectives(
    name: Annotated[str | None, typer.Argument(help="Show one objective.")] = None, json_: JsonRows = False
) -> None:
    """List what clients can minimise, or show one objective with its settings."""
    from wardround.methods import OBJECTIVES
    from wardround.reporting.catalogue import objective_card, objective_list

    catalogue(name, json_, OBJECTIVES, objective_list, objective_card, "objective")


def catalogue(
    name: str | None,
    as_json: bool,
    registry: Mapping[str, Any],
    list_all: Callable[[], Any],
    show_one: Callable[[str], Any],
    kind: str,
) -> None:
    if name is not None and name not in registry:
        raise ConfigError(f"'{name}' is not a {kind}.{suggest(name, registry)} List all: wardround {kind}s")
    print_rows(list_all() if name is None else show_one(name), as_json)


# Papers


@papers_app.callback()
def papers(context: typer.Context, json_: JsonRows = False) -> None:
    """List the tables of the papers that can be run as presets, or show one."""
    if context.invoked_subcommand is not None:
        return
    configure_logging(debug=False, quiet=True)
    from wardround.papers.cards import list_presets

    print_rows(list_presets(), json_)


@papers_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A preset, such as safcf-table2.")], json_: Json = False
) -> None:
    """Show what a preset runs, what it still needs, and what was published."""
    configure_logging(debug=False, quiet=True)
    from wardround.papers import cards
    from wardround.papers.presets import load

    preset = load(name)
    if json_:
        out.print_json(json.dumps(preset.as_dict()))
        return
    out.print(f"[bold]{escape(preset.name)}[/]  {escape(preset.paper)}, {escape(preset.table)}")
    out.print(escape(preset.about))
    out.print(f"\n{escape(cards.format_settings(preset))}")
    for table in cards.list_tables(preset):
        out.print(f"\n[bold]{escape(table.title)}[/]\n")
        print_table(dataclasses.replace(table, title=""))
    for heading, sentences in cards.list_remarks(preset).items():
        out.print(f"\n[bold]{escape(heading)}[/]")
        for sentence in sentences:
            out.print(f"- {escape(sentence)}")


@papers_app.command()
def run(
    name: Annotated[str, typer.Argument(help="A preset, such as fedevi-table1.")],
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FOLDER",
            help="Where its data sets are, as published; or a federation.yaml of yours; or synthetic. "
            "May be repeated.",
        ),
    ],
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="0.1|rounds=0.1,size=0.5",
            help="Reduce size, cases, rounds, epochs, filters, clients and seeds, or some of them.",
        ),
    ] = None,
    methods: Names = None,
    seeds: Seeds = None,
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
    """Run a table of a paper from a data folder to a report, printed numbers beside measured ones.

    The paper's clients, image size, splits and seeds are applied; what differs is in the captions.
    """
    configure_logging(debug, quiet or json_)
    from wardround.comparison.presets import plan_paper
    from wardround.comparison.run import check_folder
    from wardround.papers.presets import load
    from wardround.papers.scaling import WHOLE, Scale

    preset, folder = load(name), output or Path("runs") / name
    reduced = WHOLE if scale is None else Scale.parse(scale)
    check_folder(folder)
    if not preset.list_runs():
        print_rows(count_data(preset, data, folder, reduced, set_ or ()), json_)
        return
    grid = plan_paper(
        preset,
        data,
        folder,
        scale=reduced,
        only=parse_names("methods", methods),
        seeds=parse_seeds(seeds),
        overrides=set_ or (),
    )
    hidden = quiet or json_
    found = run_shown(grid, folder, parse_jobs(jobs), overwrite, on, on_options, hidden=hidden)
    show_result(found, as_json=json_, hidden=hidden)


def count_data(preset: Any, places: list[str], folder: Path, scale: Any, overrides: Sequence[str]) -> Any:
    """A table that counts data, printed and counted, written as Markdown and CSV too."""
    from wardround.comparison.presets import choose_federations
    from wardround.papers.cards import count_table
    from wardround.papers.data import prepare_data

    names = choose_federations(preset, overrides)
    table = count_table(preset, *prepare_data(preset, names, places, folder / "data", scale))
    write_text(folder / "table-images.md", table.markdown() + "\n")
    write_text(folder / "table-images.csv", table.csv())
    return table
