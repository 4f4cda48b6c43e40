"""enrol, sign, revoke: keys that hospitals make themselves, and their end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, app, out
from wardround.cli.hospitals import prepare
from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import ORGANISER, Kit, open_kit
from wardround.errors import ConfigError

KitsOption = Annotated[
    Path, typer.Option("--kits", help="The folder with the project's authority.", metavar="KITS")
]
Passphrase = Annotated[
    bool, typer.Option("--passphrase", help="Protect the new key with a passphrase; it is asked for.")
]
IN_FORCE_SECONDS = 10.0  # for the server to have read a new list


@app.command()
def enrol(
    place: Annotated[Path, typer.Argument(help="An invitation, or your kit.", metavar="INVITATION|KIT")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the new kit.", metavar="KIT")
    ] = None,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make a new key and ask for its certificate.")
    ] = False,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", help="The organiser's answer, if it is not beside the kit."),
    ] = None,
    passphrase: Passphrase = False,
    debug: Debug = False,
) -> None:
    """Make a hospital's key here and ask the organiser to sign it; put the answer into the kit."""
    prepare(debug, False)
    from wardround.deploy.kits import enrolment

    if place.is_file() and place.name != "kit.json":
        from wardround.deploy.site_file import render_template

        secret = ask_passphrase(passphrase, output or place)
        kit = enrolment.accept(place, render_template, output, secret)
        say_request(kit)
        return
    kit = open_kit(place, "hospital")
    if renew:
        enrolment.request_certificate(kit, ask_passphrase(passphrase, kit.own_key))
        say_request(kit)
        return
    enrolment.install(kit, certificate)
    out.print(escape(f"The certificate is in {kit.folder}. Start wardround join again to use it."))


def ask_passphrase(wanted: bool, path: Path) -> bytes | None:
    from wardround.deploy.kits.private_key import ask_new_passphrase

    return ask_new_passphrase(path) if wanted else None


def say_request(kit: Kit) -> None:
    from wardround.deploy.kits.enrolment import describe_authority

    out.print(
        f"The key was made in {kit.folder} and stays there.\n"
        f"- Compare the authority's fingerprint with the organiser by telephone: {describe_authority(kit)}\n"
        f"- Send {kit.request} to the organiser; it is not secret.\n"
        f"- Put the answer here: {kit.answer}\n"
        f"  then: wardround enrol {kit.folder}, or wardround join, which takes it too.",
        markup=False,
    )


@app.command()
def sign(
    requests: Annotated[
        list[Path], typer.Argument(help="Signing requests of hospitals.", metavar="REQUEST...")
    ],
    kits: KitsOption = Path("kits"),
    again: Annotated[
        bool, typer.Option("--again", help="Even for a hospital that has a certificate already.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Sign requests of hospitals with the project's authority, after a telephone call."""
    prepare(debug, False)
    from wardround.deploy.kits import enrolment
    from wardround.deploy.kits.authority import Authority

    authority = Authority.load(kits / ".authority")
    for request in requests:
        answer, name = enrolment.sign(authority, request, again=again)
        out.print(escape(f"Signed for '{name}'. Send it {answer}; it is not secret."))


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The hospital.", metavar="NAME")],
    kits: KitsOption = Path("kits"),
    debug: Debug = False,
) -> None:
    """End a hospital's kit at once; the others are not touched."""
    prepare(debug, False)
    from wardround.deploy.kits import enrolment
    from wardround.deploy.kits.revocation import LIST, Revocations

    placed = enrolment.revoke(kits, name)
    again = "It can come back with a new request: wardround enrol KIT --renew there, wardround sign here."
    if placed is None:
        out.print(
            f"'{name}' is on the list {kits / '.authority' / LIST}. Copy it into state/ of the organiser's "
            "kit.",
            markup=False,
        )
        return
    kit = open_kit(kits / ORGANISER, "organiser")
    queue, listed, began = JobQueue(kit), Revocations(kit), time.monotonic()
    listed.refresh()
    if not queue.is_server_running():
        out.print(escape(f"'{name}' is revoked; no server runs now, and the next one will know. {again}"))
        return
    while queue.read_server()["revoked"] < listed.number:
        if time.monotonic() - began > IN_FORCE_SECONDS:
            raise ConfigError(f"the server of {kit.folder} has not read {placed} yet; see its log.")
        time.sleep(0.1)
    seconds = time.monotonic() - began
    out.print(escape(f"'{name}' is revoked, and the server refuses it ({seconds:.1f} s). {again}"))
