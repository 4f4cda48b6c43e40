"""dossier: what a data protection officer asks for, from the records of a run or of a hospital."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, app, configure_logging, err, out, show_wait


@app.command()
def dossier(
    place: Annotated[
        Path, typer.Argument(help="The folder of a run, or a hospital's kit.", metavar="RUN")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o",
            help="The page; default RUN/dossier.html, of a kit dossier-NAME.html in this folder.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Of a kit: only this run, by name or pattern.", metavar="NAME")
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Write one document for a data protection officer: what left, by which rules, GDPR and HIPAA answered.

    Exit code 1 if the hospital's ledger is not as it was written; the document says so too.
    """
    configure_logging(debug, quiet=json_)
    with show_wait("Reading the records", json_):
        from wardround.deploy.dossier import read_facts, write_dossier

        facts = read_facts(place, run)
        usual = Path(f"dossier-{facts.name}.html") if facts.kind == "hospital" else place / "dossier.html"
        path = output or usual
        write_dossier(facts, path)
    verdict = facts.verdict
    if json_:
        told = {"path": str(path), "kind": facts.kind, "messages": len(facts.sent)}
        out.print_json(json.dumps({**told, "verified": None if verdict is None else verdict.ok}))
    else:
        out.print(f"Dossier: [bold]{escape(str(path))}[/]")
        out.print("Fill in what is marked as yours, and read it before you pass it on.")
    if verdict is not None and not verdict.ok:
        err.print(f"[bold red]broken[/] {escape(f'the ledger: {verdict.sentence}')}")
        raise typer.Exit(1)
