"""flare-job: a run as a job for a FLARE federation that a consortium already has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Resume, Set, app, configure_logging, out, pause_gc


@app.command("flare-job")
def flare_job(
    config: Annotated[Path, typer.Argument(help="A YAML file.", metavar="CONFIG")],
    folder: Annotated[Path, typer.Option("--job", "-o", help="The job's new folder.", metavar="FOLDER")],
    hospitals: Annotated[
        str, typer.Option("--hospitals", metavar="A,B", help="Who takes part: names of FLARE's client sites.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The run's folder on the FLARE server's machine; default: `output`."),
    ] = None,
    set_: Set = None,
    resume: Resume = False,
    debug: Debug = False,
) -> None:
    """Write a job for your own NVIDIA FLARE federation; submit it with FLARE's tools."""
    configure_logging(debug, False)
    from wardround.deploy.nvflare import require

    require()
    with pause_gc():
        from wardround.config_file import load_config
        from wardround.deploy.nvflare.job import place_on_server, write_job

    names = sorted({name.strip() for name in hospitals.split(",")} - {""})
    checked = place_on_server(load_config(config, set_ or []), output)
    write_job(folder, checked, names, resume=resume)
    out.print(f"Job of run '{escape(checked.name)}' for {escape(', '.join(names))}: {escape(str(folder))}")
    out.print(f"Its files will be in {escape(str(checked.folder))} on the FLARE server's machine.")
    out.print(f"Submit it: nvflare job submit -j {escape(str(folder))}")
