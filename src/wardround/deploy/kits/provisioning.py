"""provision: keys, certificates and start-up kits, made offline from a project.yaml.

    kits = provision(load_project(Path("project.yaml")), Path("kits"))

With `invite`, hospitals get invitations instead, make their keys themselves (enrolment.py) and keep them.

The project's authority, the key that signs every certificate, stays in kits/.authority/ on the organiser's
machine. Provisioning again with one more hospital makes that kit and leaves all others as they are.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from wardround.deploy.kits.authority import BACKDATED, Authority, write_manifest
from wardround.deploy.kits.enrolment import invite, note_terms
from wardround.deploy.kits.kit import (
    EVERYWHERE,
    LOOPBACK,
    ORGANISER,
    Kit,
    check_private,
    make_private,
    read_kit,
)
from wardround.deploy.kits.private_key import encode_key
from wardround.deploy.kits.project import Project
from wardround.deploy.kits.readme import render_readme
from wardround.deploy.site_file import render_template
from wardround.errors import ConfigError
from wardround.files import write_bytes, write_json, write_private, write_text
from wardround.version import __version__


def provision(
    project: Project,
    folder: Path,
    *,
    bind: str | None = None,
    renew: Collection[str] = (),
    invites: bool = False,
    passphrase: bytes | None = None,
) -> list[Kit]:
    """Make the kits that are missing, and return those of the project that are in the folder.

    bind: "127.0.0.1" lets the server listen on this machine alone, as in a rehearsal. renew: names whose
    kit was lost or expired and is made again; the old folder must have been moved away. A kit that was made
    before is otherwise never made again, whether it is still here or was sent. invites: hospitals get an
    invitation in the place of a kit. passphrase: of a new authority's key.
    """
    if bind not in (None, LOOPBACK):
        raise ConfigError(
            f"bind is '{bind}'; the server listens on {LOOPBACK} or, without bind, on all addresses."
        )
    wanted = [ORGANISER, *(hospital.name for hospital in project.hospitals)]
    for name in renew:
        if name not in wanted:
            raise ConfigError(f"'{name}' is not in the project; its members are {', '.join(wanted)}.")
    if not (folder / ".authority").exists():
        if renew:
            raise ConfigError(
                f"{folder} has no authority (.authority), so nothing can be renewed there. Give the folder "
                "where the first kits were made: kits of a new authority do not work with them."
            )
        refuse_to_replace(folder, wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be the folder for the kits ({error.strerror}). Give another with -o."
        ) from None
    find_kits(folder, wanted)  # one of an older version is an error before anything is made
    authority = Authority.open(folder / ".authority", project, bind, passphrase)
    missing = [name for name in wanted if name not in authority.issued or name in renew]
    if invites:
        for name in set(missing) - {ORGANISER}:
            invite(authority, describe_kit(project, authority, name), project)
        missing = [name for name in missing if name == ORGANISER]
    refuse_to_replace(folder, missing)
    for name in missing:
        make_kit(project, authority, name, folder / name)
    return find_kits(folder, wanted)


def find_kits(folder: Path, names: Iterable[str]) -> list[Kit]:
    return [read_kit((folder / name).absolute()) for name in names if (folder / name / "kit.json").exists()]


def refuse_to_replace(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} exists already, and nothing is overwritten. Move it away, "
                "then provision again."
            )


def choose_address(project: Project, authority: Authority) -> str:
    """Where the server listens: a host that only this machine reaches needs no other address."""
    return LOOPBACK if authority.facts["bind"] or project.organiser.host == LOOPBACK else EVERYWHERE


def describe_kit(project: Project, authority: Authority, name: str) -> Kit:
    """What kit.json will say; it has no folder yet."""
    is_organiser = name == ORGANISER
    return Kit(
        folder=Path(),
        name=name,
        role="organiser" if is_organiser else "hospital",
        project=project.project,
        project_id=authority.project_id,
        server=project.organiser.host,
        port=project.organiser.port,
        version=__version__,
        listen=choose_address(project, authority) if is_organiser else None,
    )


def make_kit(project: Project, authority: Authority, name: str, target: Path) -> None:
    """One kit, built in the authority's private folder and moved into place when complete."""
    folder = Path(tempfile.mkdtemp(prefix="making-", dir=authority.folder))
    kit = replace(describe_kit(project, authority, name), folder=folder)
    is_organiser = kit.role == "organiser"
    try:
        certificate, key = issue_certificate(kit, project, authority)
        put_certificate(kit, certificate, key, authority)
        for part in (kit.state, kit.logs, *([kit.runs] if is_organiser else [])):
            part.mkdir()
        if not is_organiser:
            write_text(kit.site_file, render_template(kit.name))
            note_terms(authority, kit, project)
        write_text(kit.folder / "README.txt", render_readme(kit))
        write_json(kit.folder / "kit.json", kit.as_dict())
        write_manifest(kit, authority)
        make_private(kit.folder)
        check_private(kit)
        kit.folder.rename(target)
    except BaseException:
        shutil.rmtree(kit.folder, ignore_errors=True)
        raise
    authority.note(kit.name, certificate)


def issue_certificate(
    kit: Kit, project: Project, authority: Authority
) -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
    """The organiser's is for its host, a hospital's for its name."""
    valid = timedelta(days=project.valid_days) + BACKDATED
    if kit.role == "organiser":
        organisation = project.organiser.organisation
        return authority.issue(kit.server, organisation, role="organiser", valid=valid, host=kit.server)
    return authority.issue(kit.name, project.find_organisation(kit.name), role="hospital", valid=valid)


def put_certificate(
    kit: Kit, certificate: x509.Certificate, key: rsa.RSAPrivateKey, authority: Authority
) -> None:
    write_private(kit.own_key, encode_key(key))
    write_bytes(kit.own_certificate, certificate.public_bytes(serialization.Encoding.PEM))
    write_bytes(kit.authority, authority.certificate.public_bytes(serialization.Encoding.PEM))
