"""data, datasets: create, check and prepare folders of scans; the published data sets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

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
from wardround.cli.progress import show_cases
from wardround.errors import ConfigError, DataError
from wardround.files import write_json, writing
from wardround.machine import cores
from wardround.tables import Table
from wardround.yaml_file import apply_override

data_app = typer.Typer(name="data", help="Create, check and prepare data.", no_args_is_help=True)
app.add_typer(data_app)
datasets_app = typer.Typer(name="datasets", invoke_without_command=True)
app.add_typer(datasets_app)


@data_app.command()
def phantom(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    hospitals: Annotated[int, typer.Option(help="How many hospitals.")] = 3,
    dimensions: Annotated[int, typer.Option(help="2 for images, 3 for volumes.")] = 2,
    file_format: Annotated[
        str, typer.Option("--format", "--to", help="nifti, png, or dicom with masks.")
    ] = "nifti",
    organs: Annotated[
        str | None,
        typer.Option(help="Classes in place of the lesion, for example skull,nuclei,ventricles,lesion."),
    ] = None,
    annotates: Annotated[
        list[str] | None,
        typer.Option(help="What a hospital annotates, for example north=skull,nuclei; may be repeated."),
    ] = None,
    channels: Annotated[int, typer.Option(help="Sequences of each scan: channel_0, channel_1 ...")] = 1,
    lacks: Annotated[
        list[str] | None,
        typer.Option(help="What scans of a hospital do not have, for example north=channel_1; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same files.")] = 42,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Write synthetic hospitals as folders of images and labels."""
    configure_logging(debug, False)
    from wardround.config_file import parse
    from wardround.data.phantom.files import write

    if file_format not in ("nifti", "png", "dicom"):
        raise ConfigError(f"--format is '{file_format}'; use nifti, png or dicom.")
    settings: dict[str, Any] = {"hospitals": hospitals, "dimensions": dimensions, "channels": channels}
    if organs:
        settings["organs"] = organs.split(",")
    asked = [("annotates", given, "CLASS,CLASS such as north=lesion") for given in annotates or []]
    asked += [("lacks", given, "CHANNEL,CHANNEL such as north=channel_1") for given in lacks or []]
    for option, given, form in asked:
        hospital, sign, names = given.partition("=")
        if not sign or not names:
            raise ConfigError(f"--{option} is '{given}'; give HOSPITAL={form}.")
        settings.setdefault(option, {})[hospital] = names.split(",")
    for override in set_ or []:
        apply_override(settings, override.removeprefix("data.phantom."))
    checked = parse({"data": {"phantom": settings}, "model": {"name": f"unet{dimensions}d"}}).data.phantom
    write(checked, folder, cast(Literal["nifti", "png", "dicom"], file_format), seed)
    made = "1 hospital" if checked.hospitals == 1 else f"{checked.hospitals} hospitals"
    out.print(f"Wrote {made} to [bold]{escape(str(folder))}[/] (index.csv lists the cases).")


File = Annotated[Path, typer.Argument(help="A federation.yaml, as `wardround data init` writes it.")]
Picture = Annotated[Path | None, typer.Option("--picture", help="Also plot it, as a PNG.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes; default all cores.")]


@data_app.command()
def init(
    folders: Annotated[list[Path], typer.Argument(help="Folders or lists (CSV) of scans, one or several.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "federation.yaml"
    ),
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="A published data set; see `wardround datasets`.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", help="Of a list: NEED=COLUMN, such as image=scan or label=contour."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Inspect folders of scans and write a federation.yaml, ready to train."""
    configure_logging(debug, quiet)
    from wardround.data import datasets
    from wardround.data.federation_file import write
    from wardround.data.proposing.proposal import describe, propose

    if dataset is None:
        proposal = propose(folders, columns=read_columns(column), watch=lambda what: None)
        file, sentences, proposed = proposal.file, describe(proposal), proposal.proposed
    elif len(folders) == 1:
        file, proposed = datasets.make_federation_file(dataset, folders[0]), {}
        sentences = [f"The data set {dataset} as published; its card: wardround datasets show {dataset}"]
    else:
        raise ConfigError("--dataset needs exactly one folder, the one with the whole data set.")
    with writing(output):
        write(file, output, notes=sentences, proposed=proposed, overwrite=overwrite)
    if not quiet:
        print_list(sentences)
    suggest_check(output)


@data_app.command()
def check(
    file: File,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 2 if any case is unusable, not only if all are.")
    ] = False,
    jobs: Jobs = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Open every scan; list those that cannot be used, and how the clients differ."""
    configure_logging(debug, quiet or json_)
    _, report = check_file(file, jobs or cores(), hidden=quiet or json_)
    if json_:
        out.print_json(json.dumps(report.as_dict()))
    else:
        print_list([*report.notes, *report.sentences()])
        print_table(report.table())
    if not report.usable or (strict and not report.ok):
        raise typer.Exit(2)


@data_app.command()
def prepare(
    file: File, set_: Set = None, json_: Json = False, quiet: Quiet = False, debug: Debug = False
) -> None:
    """Orient, resample, crop and normalise every case once, into the cache beside the file."""
    configure_logging(debug, quiet or json_)
    from wardround.data.serving.loading import RealData

    data = RealData(file, read_settings(file, set_))
    with show_cases("preparing", quiet or json_) as watch:
        ready = data.prepare(watch=watch)
    left_out = {name: [list(pair) for pair in found.left_out] for name, found in ready.items()}
    if json_:
        cases = {name: len(found.paths) for name, found in ready.items()}
        out.print_json(json.dumps({"cache": str(data.cache.folder), "prepared": cases, "left_out": left_out}))
        return
    rows = [[name, len(found.paths), len(found.left_out)] for name, found in ready.items()]
    print_table(Table("Prepared", ["client", "cases", "left out"], rows))
    print_list([reason for found in ready.values() for _, reason in found.left_out[:3]])
    out.print(f"\nThe cache is in [bold]{escape(str(data.cache.folder))}[/].")


@data_app.command()
def split(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("splits.json"),
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Write the train, val and test split, to be edited; splits: {by: file, file: ...} uses it."""
    configure_logging(debug, False)
    from wardround.data.federation_file import SplitSettings, load
    from wardround.data.partitions import summarise
    from wardround.data.sources import list_cases
    from wardround.data.splits import assign, write_splits

    settings = load(file)
    chosen = settings.splits.model_dump()
    for override in set_ or []:
        apply_override(chosen, override.removeprefix("data.").removeprefix("splits."))
    checked = SplitSettings.read(chosen, "splits.")
    cases = list_cases(settings, file.parent).entries
    entries = assign(cases, checked, file.parent, held_out=settings.held_out)
    if output.exists():
        raise ConfigError(f"{output} exists; choose another name with -o, or remove it.")
    with writing(output):
        write_splits(entries, output)
    print_table(summarise(entries))
    out.print(f"\nWrote [bold]{escape(str(output))}[/].")


@data_app.command()
def partition(
    file: File, picture: Picture = None, set_: Set = None, json_: JsonRows = False, debug: Debug = False
) -> None:
    """Show which client gets which cases: its own, or as `partition:` in the file assigns them."""
    configure_logging(debug, json_)
    from wardround.data import partitions
    from wardround.data.serving.loading import RealData

    data = RealData(file, read_settings(file, set_))
    table = partitions.summarise(data.listing.entries, data.describe)
    print_rows(table, json_)
    if picture is not None:
        with writing(picture):
            partitions.draw(data.listing.entries, data.describe, picture)
        if not json_:
            out.print(f"\nPicture: [bold]{escape(str(picture))}[/]")


@data_app.command()
def fingerprint(
    file: File,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A JSON file to write.")] = None,
    picture: Picture = None,
    minimum: Annotated[int, typer.Option(help="Fewest patients of a client to show numbers of.")] = 5,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Statistics that a hospital may share before training, and how different the hospitals are."""
    configure_logging(debug, json_)
    from wardround.data.fingerprint.distance import compare, save_picture
    from wardround.data.fingerprint.measure import measure_clients
    from wardround.data.readers.image_files import read_image
    from wardround.data.readers.label_files import read_case_label

    listing, report = check_file(file, cores(), hidden=json_)
    if not report.usable:
        raise DataError(f"{file}: no case is usable. {report.sentences()[0]}")

    def read(entry: Any) -> Any:
        return read_image(entry.images), read_case_label(entry)

    labels = listing.labels or None
    told = measure_clients(report.usable, read, minimum=minimum, labels=labels, jobs=cores())
    found = compare(told)
    if output is not None:
        with writing(output):
            write_json(output, found.as_dict())
    if picture is not None:
        with writing(picture):
            save_picture(found, picture)
    if json_:
        out.print_json(json.dumps(found.as_dict()))
        return
    print_table(found.as_table())  # with the verdict below it
    if report.left_out:
        count = len(report.left_out)
        cases = "1 case is" if count == 1 else f"{count} cases are"
        out.print(f"\n{cases} left out; reasons: wardround data check {escape(shlex.quote(str(file)))}")
    for path in (output, picture):
        if path is not None:
            out.print(f"Wrote [bold]{escape(str(path))}[/].")


@data_app.command()
def slices(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder, for slices and their file.")],
    along: Annotated[
        Literal["R", "A", "S"], typer.Option(help="The axis to cut along; S gives axial slices.")
    ] = "S",
    keep: Annotated[
        Literal["labelled", "all"], typer.Option(help="Slices with an annotation, or all.")
    ] = "labelled",
    clip: Annotated[
        float | None, typer.Option(help="Clip values above this percentile of a volume, such as 99.")
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Cut volumes into slices for a 2D network, with their geometry; patients stay together."""
    configure_logging(debug, quiet or json_)
    from wardround.data.slices.cutting import cut

    with show_cases("cutting", quiet or json_) as watch:
        done = cut(file, output, along=along, keep=keep, clip=clip, watch=watch)
    if json_:
        facts = {"federation": str(done.path), "volumes": done.volumes, "slices": done.slices}
        out.print_json(json.dumps({**facts, "left_out": done.left_out, "notes": done.notes}))
        return
    rows: list[list[Any]] = [[name, done.volumes[name], number] for name, number in done.slices.items()]
    print_table(Table("Cut", ["client", "volumes", "slices"], rows))
    print_list([*(f"left out: {reason}" for reason in done.left_out), *done.notes])
    suggest_check(done.path)


# Published data sets


@datasets_app.callback()
def list_datasets(context: typer.Context, json_: JsonRows = False) -> None:
    """List published data sets that can be read as they are, or show one."""
    if context.invoked_subcommand is None:
        from wardround.data.datasets.page import list_datasets

        print_rows(list_datasets(), json_)


@datasets_app.command("show")
def show_dataset(
    name: Annotated[str, typer.Argument(help="A data set, such as polyp.")], json_: JsonRows = False
) -> None:
    """Show how to get a data set, its folder layout, its labels, and what to cite."""
    from wardround.data.datasets.page import describe_dataset

    print_rows(describe_dataset(name), json_)


@datasets_app.command("labels")
def write_dataset_labels(
    name: Annotated[str, typer.Argument(help="A data set with several masks per image, or grey masks.")],
    folder: Annotated[Path, typer.Argument(help="Its folder, as published.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for labels and a list.")],
    debug: Debug = False,
) -> None:
    """Write one label file per image for a data set with several masks per image, or grey masks."""
    configure_logging(debug, False)
    from wardround.data.datasets import write_labels

    done = write_labels(name, folder, output)
    print_list(done.notes)
    out.print(
        f"Wrote labels of {done.num_cases} cases to [bold]{escape(str(done.path))}[/]. Next: "
        f"wardround data init {escape(str(output))} --dataset {escape(name)}"
    )


# Helpers


def print_list(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        out.print(f"- {escape(sentence)}")


def read_columns(said: list[str] | None) -> dict[str, str] | None:
    """What a list needs -> the column that has it, from NEED=COLUMN."""
    for text in said or []:
        if not all(part.strip() for part in text.partition("=")):
            raise ConfigError(
                f"--column is '{text}'; write NEED=COLUMN, such as image=scan or label=contour."
            )
    return {
        need.strip(): head.strip() for need, _, head in (text.partition("=") for text in said or [])
    } or None


def suggest_check(path: Path) -> None:
    following = escape(f"wardround data check {shlex.quote(str(path))}")
    out.print(f"\nWrote [bold]{escape(str(path))}[/]. Next: {following}")


def check_file(file: Path, jobs: int, *, hidden: bool) -> tuple[Any, Any]:
    """The cases of a federation.yaml, and the report of their check."""
    from wardround.data.checking.check import check as check_all
    from wardround.data.federation_file import load
    from wardround.data.sources import list_cases

    settings = load(file)
    listing = list_cases(settings, file.parent)
    with show_cases("checking", hidden) as watch:
        return listing, check_all(listing, settings, base=file.parent, jobs=jobs, watch=watch)


def read_settings(file: Path, overrides: list[str] | None) -> Any:
    """The `data:` section that names this file, with overrides such as prepare.size=[96,96] on top."""
    from wardround.data.settings import DataSettings

    values: dict[str, Any] = {"federation": str(file)}
    for override in overrides or []:
        key = override.removeprefix("data.")  # as one writes it for `wardround train`
        if key.startswith("partition"):
            raise ConfigError(
                f"--set {override}: the partition is set in {file}, so that all runs share it; "
                "write it there under partition."
            )
        apply_override(values, key)
    return DataSettings.read(values, "data.")
