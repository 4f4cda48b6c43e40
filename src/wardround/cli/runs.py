"""train and demo."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import (
    Debug,
    FromRound,
    Json,
    Overwrite,
    Quiet,
    Resume,
    Set,
    Without,
    app,
    configure_logging,
    err,
    leave_out,
    out,
    pause_gc,
    print_table,
    show_wait,
)
from wardround.cli.configure import BudgetOption, prepare_planned, read_config, recognise, refuse_budget
from wardround.cli.progress import show_rounds, stop_at_round_end


@app.command()
def train(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Folders or lists (CSV) of scans, or a federation.yaml: no configuration is needed. Or a "
            "configuration, its name (`wardround configs`), or the folder of a run to resume."
        ),
    ],
    budget: BudgetOption = None,
    set_: Set = None,
    resume: Resume = False,
    from_round: FromRound = None,
    without: Without = None,
    overwrite: Overwrite = False,
    open_: Annotated[bool, typer.Option("--open", help="Live view of the run in the browser.")] = False,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html at the end.")] = True,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train one model across all clients and test it at each of them.

    Given a federation.yaml or folders of scans, it measures the data and chooses every setting itself.
    """
    configure_logging(debug, quiet or json_)
    hidden, set_ = quiet or json_, [*(set_ or []), *leave_out(without)]
    files: Mapping[str, str] = {}
    with pause_gc():
        from wardround.api import Result
        from wardround.engine.experiment import Experiment

        given = recognise(paths)
        if given in ("configuration", "run"):
            refuse_budget(budget, paths[0])
        is_configured = given == "configuration" or (given == "run" and (paths[0] / "config.yaml").exists())
        if is_configured:
            checked = read_config(paths[0], set_)  # imports the methods
    if not is_configured:  # with the collector on: a Ctrl-C in a long collection at the end would be lost
        checked, files = prepare_planned(
            paths, budget, set_, resume=resume, overwrite=overwrite, hidden=hidden
        )
        resume = resume and not files
    with show_live_view(checked.folder, open_), show_rounds(hidden) as screen:
        experiment = Experiment(checked, listener=screen, files=files)
        with stop_at_round_end(lambda: setattr(experiment, "stop_requested", True)):
            outcome = experiment.run(resume=resume, overwrite=overwrite, from_round=from_round)
    result = Result(checked, outcome)
    if outcome.status == "done" and page:
        write_page(checked.folder, hidden)
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
    """Three synthetic hospitals: each alone, together, with all data pooled, and four papers' methods."""
    configure_logging(debug, quiet or json_)
    from wardround.demo import PAPERS, REFERENCES, run_demo

    try:
        with show_rounds(quiet or json_, waiting={**REFERENCES, **PAPERS}) as screen:
            shown = run_demo(output, seed=seed, watch=screen)
    except KeyboardInterrupt:
        err.print("Stopped. The demo starts from the beginning when you run it again.")
        raise typer.Exit(130) from None
    if json_:
        out.print_json(json.dumps(shown.facts))
        return
    print_table(shown.references)
    out.print(f"\n{escape(shown.sentence)}\n")
    print_table(shown.papers)
    out.print()
    out.print(f"Report: [bold]{escape(str(shown.report))}[/]   Runs: {escape(str(output))}")


def show_result(result: Any) -> None:
    config, outcome = result.config, result.outcome
    if not config.data.test:
        out.print(f"Nothing was tested (data.test is false). Everything is in {escape(str(config.folder))}.")
        return
    print_table(result.table)
    summary = result.summary
    best = outcome.progress.best_round
    chosen = f"The model of round {config.rounds}"
    if config.evaluate.model == "best":
        chosen += ": there was no validation case to choose a better one"
        if best is not None:
            chosen = f"Best round {best} of {config.rounds} (chosen on validation cases)"
    out.print(
        f"\n{chosen}; "
        f"{summary['num_refused']} replies refused, {summary['num_lost']} lost; "
        f"{outcome.progress.seconds:.1f} s in rounds."
    )
    for where, reason in summary["test_troubles"].items():
        out.print(f"Not in the test: {escape(where)}: {escape(reason)}")
    out.print(f"Final parameters: sha256 {summary['params_sha256'][:16]}...")
    out.print(f"Everything is in [bold]{escape(str(config.folder))}[/]; open report.html first.")


def write_page(folder: Path, hidden: bool) -> None:
    """Write the report; a page that cannot be drawn does not fail a run that went well."""
    try:
        with show_wait("Drawing the report", hidden):
            from wardround.reporting import write_report

            write_report([folder])
    except Exception as error:
        err.print(f"The report could not be written: {escape(str(error))}. Try: wardround report {folder}")


@contextmanager
def show_live_view(folder: Path, wanted: bool) -> Iterator[None]:
    """Serve the live view during a run, if wanted."""
    if not wanted:
        yield
        return
    from wardround.reporting.live_view import serve

    with serve(folder, open_browser=True, until_done=False) as page:
        err.print(f"Live view: {page.url}")
        yield
