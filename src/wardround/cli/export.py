"""export: a run's model for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, Quiet, app, configure_logging, err, out
from wardround.text import format_bytes, format_size


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")],
    to: Annotated[str, typer.Option("--to", help="onnx, bundle (MONAI) or torch.", metavar="KIND")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.", metavar="OUT")],
    client: Annotated[
        str | None, typer.Option("--client", metavar="NAME", help="The personal model of this client.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Number the sites and omit the run's name.")
    ] = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as an ONNX graph, a MONAI bundle or a PyTorch folder, with its model card."""
    configure_logging(debug, quiet=quiet or json_)
    from wardround.exporting import export as write

    def show(text: str) -> None:
        if not (quiet or json_):
            err.print(f"{text} ...")

    done = write(run, to, output, client=client, overwrite=overwrite, anonymous=anonymous, say=show)
    if json_:
        out.print_json(json.dumps(done.as_dict()))
        return
    for warning in done.warnings:
        err.print(f"[yellow]warning[/] {escape(warning)}")
    out.print(f"Exported to [bold]{escape(str(done.folder))}[/]")
    for file in done.files:
        out.print(f"  {escape(str(file.relative_to(done.folder)))} ({format_bytes(file.stat().st_size)})")
    for entry in done.differences:
        shape = format_size(entry.shape)
        out.print(
            f"Against PyTorch at {shape}: probabilities differ by at most {entry.probabilities:.1e}, "
            f"logits by {entry.logits:.1e} (limit {entry.limit:g})"
        )
    out.print("Read MODEL_CARD.md and fill in its TODO lines before you share the model.")
