"""join, provision, preflight: kits of a federation, and taking part with one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, app, configure_logging, err, out, print_table
from wardround.cli.hospitals import leaving_on_signals, log_to_kit, make_speaker, prepare
from wardround.deploy import require
from wardround.deploy.kits.kit import DATA, ORGANISER, Kit, open_kit
from wardround.deploy.ledger import NAME
from wardround.deploy.preflight import Check, CheckFailed, PreflightContext, TrustFailed
from wardround.deploy.processes import end_with_input
from wardround.errors import ConfigError
from wardround.tables import Table

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not reached": "dim"}
LEAVE_SECONDS = 4.0  # for a hospital to end what it started, before that is done for it


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The hospital's kit.", metavar="KIT")],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="federation.yaml; default: what site.yaml says.", metavar="FEDERATION"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Take part as a hospital: connect to the organiser and answer what site.yaml allows."""
    prepare(debug, False)
    from wardround.deploy.joining import Joining
    from wardround.deploy.proxy import find_proxy

    opened = open_kit(kit, "hospital")
    if opened.next_key.exists() and opened.answer.exists():
        from wardround.deploy.kits.enrolment import install

        install(opened)
    environment = {} if data is None else {DATA: str(data.absolute())}
    say = make_speaker(False)
    if warning := check_trust(opened):
        say(f"warning: {warning}")
    log_to_kit(opened, "join")
    end_with_input()
    with leaving_on_signals(LEAVE_SECONDS), Joining(opened, environment, say) as hospital:
        say(hospital.check())
        proxy = find_proxy(opened)
        way = "" if proxy is None else f" through the proxy {proxy}"
        say(f"'{opened.name}' connects to {opened.server}:{opened.port}{way}, outbound only. Ctrl-C ends.")
        show_ledger(opened.state / NAME, say)
        hospital.serve()


def check_trust(kit: Kit) -> str:
    """A kit that is broken, expired or of another project would be refused for ever: say so and end.

    A server that does not run yet is no reason to end. Returns a warning where the certificate expires soon.
    """
    from wardround.deploy.preflight.connection import check_tls
    from wardround.deploy.preflight.kit import refuse_broken

    warning = refuse_broken(kit)
    try:
        check_tls(PreflightContext(kit))
    except TrustFailed:
        raise
    except CheckFailed:
        pass
    return warning


def show_ledger(path: Path, say: Callable[[str], None]) -> None:
    """Say a line for every message that leaves, from a thread of its own."""

    def watch() -> None:
        for lines in watch_ledger(path):
            for line in lines:
                say(line)
            time.sleep(1.0)

    threading.Thread(target=watch, name="wardround-ledger", daemon=True).start()


def watch_ledger(path: Path) -> Iterator[list[str]]:
    """Yield a line for every message that left since the last time, as the ledger has it."""
    offset = path.stat().st_size if path.exists() else 0
    rest = b""
    while True:
        found = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                found = file.read()
        offset += len(found)
        *lines, rest = (rest + found).split(b"\n")
        yield [describe_line(json.loads(line)) for line in lines]


def describe_line(line: dict[str, Any]) -> str:
    trouble = line.get("refused") or line.get("failure")
    what = f"answered with: {trouble}" if trouble else f"{len(line['tensors'])} tensors"
    if line["scalars"].get("decision") == "waiting":
        what = "a proposal waits for you (wardround confirm KIT)"
    return f"{line['task']}, round {line['round']}: {what}, {line['bytes']:,} bytes left"


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
    from wardround.deploy.kits import project as projects

    if example:
        out.print(projects.render_template(), markup=False, end="")
        return
    if project is None:
        raise ConfigError(
            "give a project.yaml. Start from one with: wardround provision --example > project.yaml"
        )
    asked = projects.load_project(project)
    require()
    from wardround.deploy.kits import authority, provisioning

    before = {path.parent.name for path in output.glob("*/kit.json")}
    kits = provisioning.provision(asked, output, renew=renew or ())
    here = {kit.name for kit in kits}
    issuer, issued = authority.read_issued(output)
    fingerprint = authority.format_fingerprint(issuer)
    rows = [
        [kit.name, kit.role, "kept" if kit.name in before else "new", str(output / kit.name)] for kit in kits
    ]
    members = [ORGANISER, *(hospital.name for hospital in asked.hospitals)]
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
    require()
    run_preflight(kit, data, json_)


def run_preflight(kit: Path, data: Path | None = None, json_: bool = False) -> None:
    """Show every check; one that fails ends the command."""
    from wardround.deploy.preflight.sequence import find_failed
    from wardround.deploy.preflight.sequence import preflight as look

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
