"""provision: keys, certificates and start-up kits, made offline from a project.yaml.

    kits = provision(load_project(Path("project.yaml")), Path("kits"))

The project's authority, the key that signs every certificate, stays in kits/.authority/ on the organiser's
machine. Provisioning again with one more hospital makes that kit and leaves all others as they are.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from wardround.deploy.authority import BACKDATED, Authority, as_pem, write_manifest, write_private
from wardround.deploy.kits import EVERYWHERE, LOOPBACK, Kit, check_private, read_kit
from wardround.deploy.project import Project
from wardround.deploy.site_file import render_template
from wardround.errors import ConfigError
from wardround.files import write_bytes, write_json, write_text
from wardround.version import __version__

ORGANISER = "organiser"


def provision(
    project: Project, folder: Path, *, bind: str | None = None, renew: Collection[str] = ()
) -> list[Kit]:
    """Make the kits that are missing, and return those of the project that are in the folder.

    bind: "127.0.0.1" lets the server listen on this machine alone, as in a rehearsal. renew: names whose
    kit was lost or expired and is made again; the old folder must have been moved away. A kit that was made
    before is otherwise never made again, whether it is still here or was sent.
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
    authority = Authority.open(folder / ".authority", project, bind)
    for name in renew:
        authority.issued.pop(name, None)
    missing = [name for name in wanted if name not in authority.issued]
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


def make_kit(project: Project, authority: Authority, name: str, target: Path) -> None:
    """One kit, built in the authority's private folder and moved into place when complete."""
    is_organiser = name == ORGANISER
    kit = Kit(
        folder=Path(tempfile.mkdtemp(prefix="making-", dir=authority.folder)),
        name=name,
        role="organiser" if is_organiser else "hospital",
        project=project.project,
        project_id=authority.project_id,
        server=project.organiser.host,
        port=project.organiser.port,
        version=__version__,
        listen=choose_address(project, authority) if is_organiser else None,
    )
    try:
        put_certificate(kit, *issue_certificate(kit, project, authority), authority)
        for folder in (kit.state, kit.logs, *([kit.runs] if is_organiser else [])):
            folder.mkdir()
        if not is_organiser:
            write_text(kit.site_file, render_template(kit.name))
        readme = render_organiser_readme(kit) if is_organiser else render_hospital_readme(kit)
        write_text(kit.folder / "README.txt", readme)
        write_json(kit.folder / "kit.json", kit.as_dict())
        write_manifest(kit, authority)
        make_private(kit.folder)
        check_private(kit)
        kit.folder.rename(target)
    except BaseException:
        shutil.rmtree(kit.folder, ignore_errors=True)
        raise
    authority.save()


def issue_certificate(
    kit: Kit, project: Project, authority: Authority
) -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
    """The organiser's is for its host, a hospital's for its name."""
    valid = timedelta(days=project.valid_days) + BACKDATED
    if kit.role == "organiser":
        organisation = project.organiser.organisation
        issued = authority.issue(kit.server, organisation, role="organiser", valid=valid, host=kit.server)
    else:
        hospital = next(hospital for hospital in project.hospitals if hospital.name == kit.name)
        issued = authority.issue(kit.name, hospital.certified_organisation, role="hospital", valid=valid)
    authority.issued[kit.name] = str(issued[0].serial_number)
    return issued


def put_certificate(
    kit: Kit, certificate: x509.Certificate, key: rsa.RSAPrivateKey, authority: Authority
) -> None:
    write_private(kit.own_key, as_pem(key))
    write_bytes(kit.own_certificate, certificate.public_bytes(serialization.Encoding.PEM))
    write_bytes(kit.authority, authority.certificate.public_bytes(serialization.Encoding.PEM))


def make_private(folder: Path) -> None:
    """Folders 0700, files 0600."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def render_hospital_readme(kit: Kit) -> str:
    return f"""\
This is the kit of hospital '{kit.name}' in the project '{kit.project}'.

It holds a private key: whoever has it can take part as '{kit.name}'. Keep the folder on one machine, readable
by the one account that runs wardround, and tell the organiser at once if it was lost or copied.

  1. pip install 'wardround[hospitals]=={kit.version}'
  2. Read site.yaml and change it to your rules. It is never sent.
  3. cd ..   (wardround runs outside its kit)
  4. wardround preflight {kit.name} --data federation.yaml
  5. wardround join {kit.name} --data federation.yaml

Keep no other file in this folder: a kit with an added or changed file is refused.
Connections: outbound TCP to {kit.server}, port {kit.port} (TLS, both sides prove who they are). Nothing
connects to this machine. What left it is listed in state/egress.jsonl: wardround egress show {kit.name}
"""


def render_organiser_readme(kit: Kit) -> str:
    return f"""\
This is the organiser's kit of the project '{kit.project}'. It runs on {kit.server}.

  1. pip install 'wardround[hospitals]=={kit.version}'
  2. cd ..   (wardround runs outside its kit)
  3. wardround preflight {kit.name}
  4. wardround server {kit.name}
  5. wardround submit run.yaml

Open TCP port {kit.port} for the hospitals; no other port is used. Your own commands go through files in
this folder. It holds a private key: keep it readable by the account that runs wardround alone, and keep no
other file in it: a kit with an added or changed file is refused.
"""
