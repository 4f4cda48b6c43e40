"""provision, preflight: the kits of a federation, and whether a machine is ready to use its kit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, app, configure_logging, err, out, print_table

if TYPE_CHECKING:
    from wardround.deploy.nvflare.preflight.checks import Check

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not reached": "dim"}


@app.command()
def provision(
    project: Annotated[
        Path | None, typer.Argument(help="Who takes part: a project.yaml.", metavar="PROJECT")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the kits.", metavar="KITS")
    ] = Path("kits"),
    renew: Annotated[
        list[str] | None,
        typer.Option("--renew", metavar="NAME", help="Make this kit again (lost, expired); may be repeated."),
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a project.yaml to start from.")] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Make keys and start-up kits: one for each hospital and one for the organiser."""
    configure_logging(debug, quiet=json_)
    from wardround.deploy import project as projects
    from wardround.deploy.nvflare import require
    from wardround.errors import ConfigError
    from wardround.tables import Table

    if example:
        out.print(projects.render_template(), markup=False, end="")
        return
    if project is None:
        raise ConfigError(
            "give a project.yaml. Start from one with: wardround provision --example > project.yaml"
        )
    asked = projects.load_project(project)
    require()
    from wardround.deploy.nvflare import authority, provisioning

    before = {path.parent.name for path in output.glob("*/kit.json")}
    kits = provisioning.provision(asked, output, renew=renew or ())
    here = {kit.name for kit in kits}
    issuer, issued = authority.read_issued(output)
    fingerprint = authority.format_fingerprint(issuer)
    rows = [
        [kit.name, kit.role, "kept" if kit.name in before else "new", str(output / kit.name)] for kit in kits
    ]
    members = [provisioning.ORGANISER, *(hospital.name for hospital in asked.hospitals)]
    rows += [[name, "", "made before, not here", ""] for name in members if name not in here]
    left = "no longer in the project; its kit still works until it expires"
    rows += [[name, "", left, ""] for name in issued if name not in members]
    if json_:
        made = [dict(zip(("name", "role", "state", "folder"), row, strict=True)) for row in rows]
        out.print_json(json.dumps({"project": asked.project, "authority": fingerprint, "kits": made}))
        return
    print_table(Table(f"Kits of {asked.project}", ("name", "role", "state", "folder"), rows))
    out.print(next_steps(output, fingerprint, asked.organiser.host, asked.organiser.port), markup=False)


def next_steps(output: Path, fingerprint: str, host: str, port: int) -> str:
    return f"""
What to do next
- {output / "organiser"} goes to {host} and stays there. Open TCP port {port} on it.
- Send each hospital its own folder and no other, in a way that nobody else can read (an encrypted archive,
  its password by telephone). Then delete your copy: whoever has a kit can take part as that hospital.
- Compare the authority's fingerprint with each hospital by telephone: {fingerprint}
  `wardround preflight KIT` shows it there.
- {output / ".authority"} signs new kits. Keep it, and a copy, off the network; it is in no kit.
- One more hospital later: add it to the project file and run this again; kits that exist stay as they are."""


@app.command()
def preflight(
    kit: Annotated[Path, typer.Argument(help="The folder of your kit.", metavar="KIT")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The hospital's federation.yaml.", metavar="FEDERATION")
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Check that this machine is ready for its kit; name the first thing that is wrong and what to do."""
    configure_logging(debug, quiet=json_)
    from wardround.deploy.nvflare import require

    require()
    from wardround.deploy.nvflare.preflight.sequence import find_failed
    from wardround.deploy.nvflare.preflight.sequence import preflight as look

    checks = look(kit, data=data)
    wrong = find_failed(checks)
    if json_:
        out.print_json(json.dumps({"ok": wrong is None, "checks": [vars(check) for check in checks]}))
    else:
        show(checks)
    if wrong is not None:
        if not json_:
            err.print(f"[bold red]error[/] {escape(f'{wrong.name}: {wrong.found} {wrong.todo}'.strip())}")
        raise typer.Exit(2)


def show(checks: list[Check]) -> None:
    for check in checks:
        colour = COLOURS[check.state]
        found = check.found if check.state != "wrong" else ""
        out.print(f"[{colour}]{check.state:<11}[/] {check.name:<11} {escape(found)}".rstrip())
        if check.state == "warning" and check.todo:
            out.print(f"{'':<23} {escape(check.todo)}")
