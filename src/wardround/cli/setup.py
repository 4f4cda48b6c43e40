"""organiser setup, hospital setup: everything before the first run, asked for and checked."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from wardround.cli import hospitals as organising
from wardround.cli import kits as taking_part
from wardround.cli.common import Debug, app, err, out, show_wait
from wardround.cli.enrolment import ask_passphrase
from wardround.deploy.kits.kit import ORGANISER, Kit, open_kit
from wardround.errors import ConfigError

if TYPE_CHECKING:
    from wardround.deploy.kits.project import Project

hospital_app = typer.Typer(name="hospital", help="Set up a hospital's machine.", no_args_is_help=True)
organiser_app = typer.Typer(name="organiser", help="Set up the organiser's machine.", no_args_is_help=True)
app.add_typer(hospital_app)
app.add_typer(organiser_app)
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Take the proposed answer to every question.")]
UNFINISHED_SECONDS = 3.0  # in which a file that is being copied may still be incomplete


@organiser_app.command("setup")
def set_up_organiser(
    project: Annotated[str | None, typer.Option(help="A name for the project.")] = None,
    host: Annotated[str | None, typer.Option(help="This machine, as hospitals reach it.")] = None,
    port: Annotated[int | None, typer.Option(help="The port to open; 443 passes most firewalls.")] = None,
    hospitals: Annotated[str | None, typer.Option(help="Who takes part.", metavar="A,B")] = None,
    file: Annotated[
        Path, typer.Option("--file", help="Written, or read if it is there.", metavar="PROJECT")
    ] = Path("project.yaml"),
    kits: Annotated[Path, typer.Option("--kits", help="The folder to make.", metavar="KITS")] = Path("kits"),
    passphrase: Annotated[bool | None, typer.Option(help="Protect the authority's key.")] = None,
    start: Annotated[bool | None, typer.Option(help="Start the server at the end.")] = None,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Make the project, its authority, the server's kit and an invitation for each hospital."""
    organising.prepare(debug, False)
    from wardround.deploy.kits.authority import format_fingerprint, load_authority
    from wardround.deploy.kits.provisioning import provision
    from wardround.deploy.unit import write_unit

    asked = find_project(file, project, host, port, hospitals, yes)
    secret = None
    if not (kits / ".authority").exists() and confirm("Protect the authority's key?", passphrase, False, yes):
        secret = ask_passphrase(True, kits / ".authority" / "ca.key")
    provision(asked, kits, invites=True, passphrase=secret)
    kit = open_kit(kits / ORGANISER, "organiser")
    unit = write_unit(kit)
    taking_part.run_preflight(kit.folder)
    fingerprint = format_fingerprint(load_authority(kit))
    lines = [f"  {kits / f'{one.name}.invitation.json'}" for one in asked.hospitals]
    where = "" if kits == Path("kits") else f" --kits {kits}"
    out.print(
        "\nSend each hospital its invitation; none of them is secret:\n"
        + "\n".join(lines)
        + f"\nThe authority's fingerprint, to compare by telephone:\n  {fingerprint}\n"
        f"When their requests come: wardround sign REQUEST...{where}\n"
        f"Open TCP port {kit.port}. As a service (systemd): {unit}\n"
        f"{kits / '.authority'} signs; keep a copy of it off the network.",
        markup=False,
    )
    if confirm("Start the server now?", start, True, yes):
        organising.server(kit.folder, debug=debug)


def find_project(
    file: Path, project: str | None, host: str | None, port: int | None, hospitals: str | None, yes: bool
) -> Project:
    """The project file; written from answers where there is none."""
    from wardround.deploy.kits.project import load_project
    from wardround.deploy.organising import parse_hospitals
    from wardround.deploy.setup import write_project

    if file.exists():
        if (project, host, port, hospitals) != (None,) * 4:
            raise ConfigError(f"{file} exists already. Change it there, and leave out what it says.")
        return load_project(file)
    name = ask("Name of the project", "--project", project, "my-project", yes)
    place = ask("This machine, as hospitals reach it", "--host", host, socket.getfqdn(), yes)
    number = ask("Port to open", "--port", None if port is None else str(port), "8002", yes)
    if not number.isdecimal():
        raise ConfigError(f"'{number}' is not a port; give a number such as 8002 or 443.")
    members = ask("Hospitals, with commas", "--hospitals", hospitals, None, yes)
    return write_project(file, name, place, int(number), parse_hospitals(members))


@hospital_app.command("setup")
def set_up_hospital(
    place: Annotated[Path, typer.Argument(help="The invitation, or your kit.", metavar="INVITATION|KIT")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder of your scans, or a federation.yaml.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="The authority's, as the organiser told it by telephone.")
    ] = None,
    proxy: Annotated[
        str | None, typer.Option(help="HTTP proxy on the way out; none: past every one.")
    ] = None,
    passphrase: Annotated[bool | None, typer.Option(help="Protect the key with a passphrase.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the organiser's answer.")] = True,
    join: Annotated[bool | None, typer.Option(help="Take part at the end.")] = None,
    yes: Yes = False,
    debug: Debug = False,
) -> None:
    """Make the key, ask for its certificate, describe the cases, check everything, and take part."""
    organising.prepare(debug, False)
    from wardround.deploy import setup
    from wardround.deploy.kits import enrolment
    from wardround.deploy.site_file import render_template
    from wardround.deploy.unit import write_unit

    if place.is_file() and place.name != "kit.json":
        wants = confirm("Protect the key with a passphrase?", passphrase, False, yes)
        kit = enrolment.accept(place, render_template, None, ask_passphrase(wants, place))
    else:
        kit = open_kit(place, "hospital")
    compare_fingerprint(enrolment.describe_authority(kit), fingerprint, yes)
    known = setup.find_cases(kit)
    source = ask(
        "Folder of your scans, or a federation.yaml",
        "--data",
        None if data is None else str(data),
        known,
        yes,
    )
    with show_wait("looking at the scans"):
        file, said = setup.describe_cases(Path(source), kit)
    way = ask("Proxy on the way to the organiser", "--proxy", proxy, "as the environment says", yes)
    settings = {"data": str(file)} | ({} if way == "as the environment says" else {"proxy": way})
    setup.change_site(kit, settings)
    for line in [*said, *setup.check_here(kit)]:
        out.print(escape(f"- {line}"))
    unit = write_unit(kit)
    out.print(escape(f"Your rules: {kit.site_file}, never sent. As a service (systemd): {unit}"))
    if not kit.own_certificate.exists() and not await_certificate(kit, wait):
        return
    taking_part.run_preflight(kit.folder)
    if confirm("Take part now?", join, True, yes):
        taking_part.join(kit.folder, debug=debug)


def compare_fingerprint(own: str, told: str | None, yes: bool) -> None:
    """Whom this kit trusts is the organiser, not somebody who changed the mail."""
    if told is not None:
        if told.replace(" ", "").lower() != own.replace(" ", ""):
            raise ConfigError(
                f"the invitation's authority has the fingerprint {own}, not the one you were told. Do not "
                "use it; ask the organiser."
            )
        return
    out.print(escape(f"Fingerprint of the project's authority: {own}"))
    if yes or not sys.stdin.isatty():
        err.print("It was not compared. Call the organiser, and compare it before you take part.")
    elif not typer.confirm("Is it the one the organiser told you by telephone?", err=True):
        raise ConfigError(
            "the fingerprint was not confirmed. Call the organiser, then start again with the kit."
        )


def await_certificate(kit: Kit, wait: bool) -> bool:
    """Until the organiser's answer lies beside the kit, and is in it."""
    from wardround.deploy.kits import enrolment

    out.print(
        f"Send {kit.request} to the organiser; it is not secret. Put the answer here: {kit.answer}",
        markup=False,
    )
    if not wait:
        out.print(escape(f"Then: wardround join {kit.folder}"))
        return False
    with show_wait(
        "waiting for the organiser's answer (Ctrl-C: continue later with wardround hospital setup)"
    ):
        while True:
            if kit.answer.exists():
                try:
                    enrolment.install(kit)
                    return True
                except ConfigError:
                    if time.time() - kit.answer.stat().st_mtime > UNFINISHED_SECONDS:
                        raise
            time.sleep(0.5)


def ask(question: str, flag: str, given: str | None, proposed: str | None, yes: bool) -> str:
    """An answer from the command line, or from the person; `proposed` without one."""
    if given is not None:
        return given
    if not yes and sys.stdin.isatty():
        return str(typer.prompt(question, default=proposed, err=True))
    if proposed is None:
        raise ConfigError(f"{question}: give it with {flag}.")
    out.print(escape(f"{question}: {proposed}"))
    return proposed


def confirm(question: str, given: bool | None, proposed: bool, yes: bool) -> bool:
    if given is not None:
        return given
    return proposed if yes or not sys.stdin.isatty() else typer.confirm(question, default=proposed, err=True)
