"""join, provision, preflight: kits of a federation, whether a machine is ready for its kit, and taking part.

join runs on NVIDIA FLARE, at a hospital.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, app, configure_logging, err, out, print_table
from wardround.cli.hospitals import leaving_on_signals, make_speaker, prepare
from wardround.deploy import require
from wardround.deploy.kits import DATA, Kit, open_kit
from wardround.deploy.ledger import NAME
from wardround.deploy.preflight import Check, CheckFailed, PreflightContext, TrustFailed
from wardround.deploy.processes import Processes
from wardround.errors import ConfigError
from wardround.tables import Table

COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red", "not reached": "dim"}


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
    from wardround.deploy.site import choose_device, describe_data, read_site_of

    opened = open_kit(kit, "hospital")
    if data is not None:
        os.environ[DATA] = str(data.absolute())
    say = make_speaker(False)
    rules = read_site_of(opened)
    choose_device(rules)
    say(describe_data(rules, opened.name))
    check_trust(opened)
    with leaving_on_signals(), Processes(opened.folder, "client", again=True, say=say) as processes:
        say(f"'{opened.name}' connects to {opened.server}:{opened.port}, outbound only. Ctrl-C ends.")
        line = ConnectionWatch(opened)
        news = watch_ledger(opened.state / NAME)
        while True:
            for text in (*line.news(processes.child.pid if processes.child else None), *next(news)):
                say(text)
            time.sleep(1.0)


def check_trust(kit: Kit) -> None:
    """A kit that is broken, expired or of another project would be refused for ever: say so and end.

    A server that does not run yet is no reason to end.
    """
    from wardround.deploy.preflight.connection import check_tls
    from wardround.deploy.preflight.kit import refuse_broken

    refuse_broken(kit)
    try:
        check_tls(PreflightContext(kit))
    except TrustFailed as wrong:
        raise ConfigError(f"{wrong.found} {wrong.todo}") from None
    except CheckFailed:
        return


class ConnectionWatch:
    """Reports when the connection to the organiser is made or lost; a single observation does not count."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._where = f"{kit.server}:{kit.port}"
        self._said: bool | None = None
        self._last = False
        self._same = self._looks = 0  # looks that saw the same in a row; looks in all

    def news(self, process: int | None) -> list[str]:
        """Called every second; process: the one that holds the connection."""
        here = process is not None and is_connected(process, self._kit.port)
        self._same = self._same + 1 if here == self._last else 1
        self._last = here
        self._looks += 1
        is_sure = self._same >= 3 and (here or self._said is not None)
        is_late = not here and self._said is None and self._looks >= 10  # or it is refused again and again
        if here == self._said or not (is_sure or is_late):
            return []
        first, self._said = self._said is None, here
        if here:
            return [f"connected to {self._where}"]
        no = "no connection yet" if first else "connection lost"
        return [f"{no} to {self._where}; retrying. Why: wardround preflight {self._kit.folder}"]


def is_connected(process: int, port: int) -> bool:
    """Whether a process has an open connection to this port somewhere; sends nothing."""
    import psutil

    try:
        found = psutil.Process(process).net_connections("tcp")
    except (psutil.Error, OSError):
        return False
    return any(one.status == "ESTABLISHED" and one.raddr and one.raddr.port == port for one in found)


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
    from wardround.deploy import project as projects

    if example:
        out.print(projects.render_template(), markup=False, end="")
        return
    if project is None:
        raise ConfigError(
            "give a project.yaml. Start from one with: wardround provision --example > project.yaml"
        )
    asked = projects.load_project(project)
    require()
    from wardround.deploy import authority, provisioning

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
    require()
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
