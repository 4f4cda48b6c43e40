"""cache: compiled kernels that runs on a GPU keep."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Json, app, out
from wardround.text import format_bytes


@app.command()
def cache(
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove all kernels; runs compile them anew.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show where runs on a GPU keep compiled kernels and how large they are, or remove them."""
    from wardround.training import kernel_cache

    folder = kernel_cache.locate()
    before = kernel_cache.measure(folder)
    if clear:
        kernel_cache.clear(folder)
    files, size = kernel_cache.measure(folder)
    elsewhere = {name: os.environ[name] for name in kernel_cache.VARIABLES if os.environ.get(name)}
    if json_:
        facts = {"kernels": str(folder), "files": files, "bytes": size, "elsewhere": elsewhere}
        out.print_json(json.dumps(facts))
        return
    out.print(f"Compiled kernels: [bold]{escape(str(folder))}[/], files: {files}, {format_bytes(size)}")
    if clear:
        out.print(f"Files removed: {before[0] - files}, {format_bytes(before[1] - size)}.")
    for name, place in elsewhere.items():
        out.print(f"{name} is set: those kernels are in {escape(place)} instead, which is yours to clear.")
