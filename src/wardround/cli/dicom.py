"""data import-dicom: what comes out of a clinic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Quiet, configure_logging, out
from wardround.cli.data import data_app, print_list


@data_app.command("import-dicom")
def import_dicom(
    source: Annotated[Path, typer.Argument(help="A folder of DICOM series.")],
    target: Annotated[Path, typer.Argument(help="The folder of a centre to write.")],
    keep_descriptions: Annotated[
        bool,
        typer.Option(
            "--keep-descriptions", help="Keep series descriptions, which may hold names, dates and diagnoses."
        ),
    ] = False,
    structure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=CLASS",
            help="A structure of SEG or RTSTRUCT and its class; may be repeated. Others are then left out.",
        ),
    ] = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    r"""Convert DICOM series and the masks drawn on them to a centre's folder; needs wardround\[dicom]."""
    configure_logging(debug, quiet)
    from wardround.data.readers.dicom import import_dicom as convert
    from wardround.data.readers.patient_map import MAP
    from wardround.errors import ConfigError

    structures = {}
    for given in structure or []:
        name, mark, own = given.rpartition("=")
        if not mark or not name.strip() or not own.strip():
            raise ConfigError(f"--structure is {given!r}; write NAME=CLASS, such as 'GTV 1=tumour'.")
        structures[name] = own.strip()
    done = convert(source, target, keep_descriptions=keep_descriptions, structures=structures)
    print_list(done.notes)
    out.print(f"Wrote {len(done.written)} files to [bold]{escape(str(target))}[/].")
    out.print(f"{escape(str(target / MAP))} says which file is whose: keep it here, and never pass it on.")
