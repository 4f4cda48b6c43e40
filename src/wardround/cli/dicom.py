"""data import-dicom, data fetch: what comes out of a clinic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Quiet, configure_logging, out
from wardround.cli.data import data_app, print_list
from wardround.cli.progress import show_cases
from wardround.errors import ConfigError

Target = Annotated[Path, typer.Argument(help="The folder of a centre to write.")]
KeepDescriptions = Annotated[
    bool,
    typer.Option(
        "--keep-descriptions", help="Keep series descriptions, which may hold names, dates and diagnoses."
    ),
]
Structure = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=CLASS",
        help="A structure of SEG or RTSTRUCT and its class; may be repeated. Others are then left out.",
    ),
]
BurnedIn = Annotated[
    bool, typer.Option("--burned-in", help="Also pictures marked to have text in them, which you looked at.")
]
Login = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file of yours alone with user:password or a token; or set WARDROUND_DICOMWEB_LOGIN.",
    ),
]


@data_app.command("import-dicom")
def import_dicom(
    source: Annotated[Path, typer.Argument(help="A folder of DICOM series.")],
    target: Target,
    keep_descriptions: KeepDescriptions = False,
    structure: Structure = None,
    burned_in: BurnedIn = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    r"""Convert DICOM series and the masks drawn on them to a centre's folder; needs wardround\[dicom]."""
    configure_logging(debug, quiet)
    from wardround.data.dicom.importing import import_dicom as convert

    structures = read_pairs(structure, "--structure", "NAME=CLASS, such as 'GTV 1=tumour'")
    with show_cases("importing", quiet) as watch:
        done = convert(
            source,
            target,
            keep_descriptions=keep_descriptions,
            structures=structures,
            burned_in=burned_in,
            watch=watch or ignore,
        )
    show_import(done, target)


@data_app.command()
def fetch(
    archive: Annotated[
        str, typer.Argument(metavar="URL", help="A DICOMweb archive, such as https://pacs.example/dicom-web.")
    ],
    target: Target,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEYWORD=VALUE",
            help="Of studies, such as PatientID=4711 or StudyDate=20240101-20240331; may be repeated.",
        ),
    ] = None,
    modality: Annotated[
        str | None, typer.Option(help="Images of this modality alone, such as CT, and masks drawn on them.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Refuse to fetch more studies than this.")] = 100,
    login: Login = None,
    keep_descriptions: KeepDescriptions = False,
    structure: Structure = None,
    burned_in: BurnedIn = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    r"""Fetch studies from a DICOMweb archive, and import them as import-dicom; needs wardround\[dicomweb]."""
    configure_logging(debug, quiet)
    from wardround.data.dicom.web import fetch_studies, open_archive

    wanted = read_pairs(match, "--match", "KEYWORD=VALUE, such as PatientID=4711")
    structures = read_pairs(structure, "--structure", "NAME=CLASS, such as 'GTV 1=tumour'")
    opened = open_archive(archive, login)
    with show_cases("fetching", quiet) as watch:
        done = fetch_studies(
            opened,
            wanted,
            target,
            modality=modality,
            most=limit,
            structures=structures,
            keep_descriptions=keep_descriptions,
            burned_in=burned_in,
            watch=watch or ignore,
        )
    show_import(done, target)


def ignore(number: int, total: int, name: str) -> None:
    """Progress that nobody sees."""


def read_pairs(given: list[str] | None, option: str, example: str) -> dict[str, str]:
    pairs = {}
    for text in given or []:
        name, mark, value = text.rpartition("=")
        if not mark or not name.strip() or not value.strip():
            raise ConfigError(f"{option} is {text!r}; write {example}.")
        pairs[name] = value.strip()
    return pairs


def show_import(done: Any, target: Path) -> None:
    from wardround.data.dicom.patient_map import MAP

    print_list(done.notes)
    out.print(f"Wrote {len(done.written)} files to [bold]{escape(str(target))}[/].")
    out.print(f"{escape(str(target / MAP))} says which file is whose: keep it here, and never pass it on.")
