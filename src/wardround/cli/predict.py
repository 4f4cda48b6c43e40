"""predict and evaluate: a run's model on new scans, and on labelled ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import Progress

from wardround.cli.common import Debug, Json, Quiet, app, configure_logging, err, out, print_table
from wardround.cli.dicom import Login
from wardround.cli.progress import show_cases
from wardround.progress import TimeLeftColumn, bar_columns
from wardround.tables import Table

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/quickstart.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")]
Client = Annotated[str | None, typer.Option(help="Use this client's personal model.")]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN", help="Another run for an ensemble; may be repeated. all: every client's model."
    ),
]
Tta = Annotated[
    bool | None,
    typer.Option("--tta/--no-tta", help="Average over mirror images; default: as the run was tested."),
]
Slices = Annotated[
    Literal["R", "A", "S"] | None,
    typer.Option(help="Axis along which a 2D network goes through volumes; default: as trained."),
]
Channels = Annotated[
    str | None, typer.Option(help="What the files hold, in their order, where they lack channels: t1,flair.")
]
Probabilities = Annotated[bool, typer.Option("--probabilities", help="Write the probability of every class.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
Kind = Literal["auto", "entropy", "evidential", "samples", "dropout", "ensemble"]
Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="Scans, folders or zips of scans or DICOM series, lists (.txt), https://ARCHIVE/studies/UID.",
    ),
]
Store = Annotated[
    str | None, typer.Option(metavar="URL", help="Also send DICOM masks to this DICOMweb archive.")
]
MOST_SHOWN = 200


@app.command()
def predict(
    run: Run,
    inputs: Inputs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the masks.")],
    to: Annotated[
        Literal["nifti", "nrrd", "dicom-seg", "rtstruct"] | None,
        typer.Option(help="Format of the masks; default: each scan's own. The last two are for DICOM scans."),
    ] = None,
    store: Store = None,
    login: Login = None,
    probabilities: Probabilities = False,
    uncertainty: Annotated[
        Kind | None, typer.Option(help="Write uncertainty maps; auto: the best kind the model offers.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Passes, for samples and dropout; default: as in the run.")
    ] = None,
    client: Client = None,
    ensemble: Ensemble = None,
    tta: Tta = None,
    slices: Slices = None,
    channels: Channels = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Segment scans with a run's model; masks keep each scan's shape, position and name."""
    configure_logging(debug, quiet or json_)
    from wardround.prediction.predicting import Predictor
    from wardround.prediction.session import load_models, predict_into

    predictor = Predictor(
        load_models(run, client=client, ensemble=ensemble or [], device=device),
        uncertainty=uncertainty,
        samples=samples,
        tta=tta,
        probabilities=probabilities,
        slices=slices,
        channels=channels.split(",") if channels else (),
    )
    with show_progress(quiet or json_) as watch:
        done = predict_into(
            predictor, inputs, output, to=to, overwrite=overwrite, watch=watch, store_in=store, login=login
        )
    if json_:
        out.print_json(json.dumps(done.as_dict()))
    else:
        unit = "slice" if predictor.preparation.settings.slices else "case"
        show_predictions(done, predictor.summarise_test_cases(), unit)
    if done.problems:
        raise typer.Exit(2)


@app.command()
def evaluate(
    run: Run,
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A federation.yaml, or a folder of images and labels.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder; default: runs/<run>-on-<data>.")
    ] = None,
    split: Annotated[
        Literal["auto", "all", "train", "val", "test"],
        typer.Option(help="Which cases; auto: the test cases of the run's own data, all of any other."),
    ] = "auto",
    client: Client = None,
    ensemble: Ensemble = None,
    tta: Tta = None,
    slices: Slices = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Evaluate a run's model on any labelled set, case by case; nothing is trained."""
    configure_logging(debug, quiet or json_)
    from wardround.prediction import evaluating

    with show_cases("evaluating", quiet or json_) as watch:
        report = evaluating.evaluate(
            run,
            data,
            output=output,
            split=split,
            client=client,
            ensemble=ensemble or [],
            tta=tta,
            slices=slices,
            device=device,
            overwrite=overwrite,
            report=page,
            watch=watch,
        )
    if json_:
        out.print_json(json.dumps(report.as_dict()))
    else:
        print_table(report.table)
        show_problems(report.problems, report.notes)
        out.print(f"\n{report.num_cases} cases evaluated, {len(report.problems)} failed.")
        out.print(f"Results are in [bold]{escape(str(report.folder))}[/].")
    if report.problems:
        raise typer.Exit(2)


# What is shown


def show_predictions(done: Any, tested: tuple[int, float, float] | None, unit: str) -> None:
    """tested: number, mean uncertainty and mean Dice of the run's test cases (or slices), if known."""
    if done.done:
        rows = [row for name, facts in done.done.items() for row in make_rows(name, facts)]
        note = (
            "Uncertainty of a structure: how little the mask overlaps the model's own probabilities, to rank "
            "scans by; it does not estimate Dice. Mean and maximum: nats per voxel."
        )
        if tested is not None:
            number, doubt, dice = tested
            note += (
                f" Mean over the run's {number} test {unit}{'s' if number > 1 else ''}: uncertainty "
                f"{doubt:.3f}, Dice {dice:.3f}."
            )
        if len(rows) > MOST_SHOWN:
            note += f" {len(rows) - MOST_SHOWN} more rows are in predictions.json."
        heads = ["mask", "structure", "size", "uncertainty", "mean", "maximum"]
        print_table(Table("", heads, rows[:MOST_SHOWN], note))
        for name, facts in done.done.items():
            for warning in facts["warnings"]:
                err.print(f"[yellow]{escape(name)}[/] {escape(warning)}.")
    show_problems(done.problems, done.notes)
    where = f" Masks and predictions.json are in [bold]{escape(str(done.folder))}[/]." if done.done else ""
    stored = sum("stored" in facts for facts in done.done.values())
    sent = f" {stored} stored in the archive." if stored else ""
    out.print(f"\n{len(done.done)} predicted, {len(done.problems)} failed.{where}{sent}")


def make_rows(name: str, facts: Mapping[str, Any]) -> Iterator[list[Any]]:
    scan = facts["uncertainty"]
    for number, (structure, found) in enumerate(facts["classes"].items()):
        mask, whole = "", ["", ""]
        if number == 0:
            mask, whole = name, [round(scan["mean"], 4), round(scan["maximum"], 4)]
        yield [mask, structure, format_volume(found), round(found["uncertainty"], 4), *whole]


def format_volume(found: Mapping[str, float]) -> str:
    if "ml" in found:
        return f"{found['ml']:.3f} ml"
    return f"{found['mm2']:.1f} mm²" if "mm2" in found else f"{found['voxels']} pixels"


def show_problems(problems: Any, notes: Any) -> None:
    for note in notes:
        err.print(f"[yellow]note[/] {escape(note)}")
    for problem in problems:
        err.print(f"[bold red]error[/] {escape(problem.reason)}")


@contextmanager
def show_progress(hidden: bool) -> Iterator[Callable[[str, int, int, int, int], None] | None]:
    """Progress over scans and their windows: a bar on a terminal, one line per scan in a pipe."""
    if hidden:
        yield None
        return
    if not err.is_terminal:
        begun: set[int] = set()

        def line(where: str, number: int, total: int, done: int, windows: int) -> None:
            if number not in begun:
                begun.add(number)
                err.print(f"scan {number} of {total}: {where}", markup=False)

        yield line
        return
    with Progress(*bar_columns(err), TimeLeftColumn(), console=err, transient=True) as bars:
        scans, parts = bars.add_task("scans", total=None), bars.add_task("", total=None)

        def bar(where: str, number: int, total: int, done: int, windows: int) -> None:
            bars.update(scans, completed=number - 1 + done / windows, total=total)
            bars.update(parts, description=escape(Path(where).name), completed=done, total=windows)

        yield bar
