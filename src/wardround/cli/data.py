"""data: make, look at, check and prepare folders of scans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Set, app, configure_logging, out

data_app = typer.Typer(name="data", help="Make and look at data.", no_args_is_help=True)
app.add_typer(data_app)


@data_app.command()
def phantom(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    hospitals: Annotated[int, typer.Option(help="How many hospitals.")] = 3,
    dimensions: Annotated[int, typer.Option(help="2 for images, 3 for volumes.")] = 2,
    file_format: Annotated[str, typer.Option("--format", help="nifti or png.")] = "nifti",
    seed: Annotated[int, typer.Option(help="Same seed, same files.")] = 42,
    set_: Set = None,
    debug: Debug = False,
) -> None:
    """Write made-up hospitals as folders of images and labels."""
    configure_logging(debug, False)
    from wardround.config import apply_override, parse
    from wardround.data.phantom_files import write
    from wardround.errors import ConfigError

    if file_format not in ("nifti", "png"):
        raise ConfigError(f"--format is '{file_format}'; use nifti or png.")
    settings: dict[str, Any] = {"hospitals": hospitals, "dimensions": dimensions}
    for override in set_ or []:
        apply_override(settings, override)
    checked = parse({"data": {"phantom": settings}, "model": {"name": f"unet{dimensions}d"}}).data.phantom
    chosen: Literal["nifti", "png"] = "nifti" if file_format == "nifti" else "png"
    write(checked, folder, chosen, seed)
    out.print(
        f"Wrote {checked.hospitals} hospitals to [bold]{escape(str(folder))}[/] (index.csv lists the cases)."
    )
