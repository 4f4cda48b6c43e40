"""provision: keys, certificates and start-up kits, made offline from a project.yaml.

    kits = provision(load_project(Path("project.yaml")), Path("kits"))

The project's authority, the key that signs every certificate, stays in kits/.authority/ on the organiser's
machine. Provisioning again with one more hospital makes that kit and leaves all others as they are.

What a kit allows:
- Connections go from hospitals to the organiser's one port, with mutual TLS; a certificate says whether its
  owner may serve or only connect, so that no hospital can pose as the organiser.
- The organiser's own commands have a port of their own that listens on the organiser's machine alone.
- No code travels: a job may name our controller and our executor and no other class, and one that brings
  code is refused. The organiser may submit, watch and stop runs; what a hospital's machine does
  otherwise (shut down, show files, send logs) is the hospital's.
- Log files are written into the kit and are never sent.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import ipaddress
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Participant
from nvflare.lighter.entity import Project as FlareProject
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from wardround.deploy.kits import Kit, check_private, read_kit
from wardround.deploy.nvflare.job import CONTROLLER, EXECUTOR
from wardround.deploy.project import Hospital, Project
from wardround.errors import ConfigError
from wardround.files import write_bytes, write_json, write_text
from wardround.version import __version__

log = logging.getLogger(__name__)

ADMIN = "organiser@wardround.internal"  # the engine wants its administrator's name to look like an address
SCHEME = "http"  # websockets over TLS
LOCAL = "127.0.0.1"
ORGANISER = "organiser"
MANIFEST_SCHEMA = "wardround-manifest-1"
AUTHORITY_DAYS = 3650
BACKDATED = timedelta(hours=1)  # a hospital's clock may be a little behind

# The server's own components beside the engine's.
SERVER_COMPONENTS: list[dict[str, Any]] = [
    {"id": "returning", "path": "wardround.deploy.nvflare.rejoin.Returning", "args": {}},
]
# Components of the engine that send a hospital's log files to the organiser.
NOT_WANTED = ("log_receiver", "site_log_streamer")
# What a run may be made of; anything else is refused by server and hospitals.
ALLOWED_CLASSES = [CONTROLLER, EXECUTOR]
# A run that waits for hospitals is tried again soon, and never given up.
SCHEDULER = {
    "max_jobs": 4,
    "max_schedule_count": 1_000_000,
    "min_schedule_interval": 1.0,
    "max_schedule_interval": 10.0,
}
# GPUs are wardround's to choose (site.yaml), so the engine accepts every run.
PASSTHROUGH = {
    "resource_manager": "nvflare.app_common.resource_managers.passthrough_resource_manager."
    "PassthroughResourceManager",
    "resource_consumer": "nvflare.app_common.resource_consumers.passthrough_resource_consumer."
    "PassthroughResourceConsumer",
}
# Rights that are not named are not given.
RIGHTS = {
    "organiser": ("submit_job", "manage_job", "view", "operate", "app_command"),
    "hospital": ("submit_job", "manage_job", "view"),
}
DENIED = ("byoc", "shell_commands", "download_job", "clone_job")

LOG_BYTES, LOG_FILES = 5_000_000, 3
LOG_HANDLERS = ("logFileHandler", "errorFileHandler")


def provision(
    project: Project, folder: Path, *, bind: str | None = None, renew: Collection[str] = ()
) -> list[Kit]:
    """Make the kits that are missing, and give those of the project that are in the folder.

    bind: "127.0.0.1" lets the server listen on this machine alone, as in a rehearsal. renew: names whose
    kit was lost or ran out and is made anew; the old folder must have been moved away. A kit that was made
    before is otherwise never made again, whether it still lies here or was sent.
    """
    checked_bind(bind)
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
    make_folder(folder)
    authority = Authority.open(folder / ".authority", project, bind)
    for name in renew:
        authority.issued.pop(name, None)
    missing = [name for name in wanted if name not in authority.issued]
    refuse_to_replace(folder, missing)
    if missing:
        with quiet_workspaces(project, authority) as workspaces:
            for name in missing:
                make_kit(project, authority, name, workspaces, folder / name)
    return [read_kit((folder / name).absolute()) for name in wanted if (folder / name / "kit.json").exists()]


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be the folder for the kits ({error.strerror}). Give another with -o."
        ) from None


def refuse_to_replace(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} exists already, and nothing is overwritten. Move it away, "
                "then provision again."
            )


def issued_by(folder: Path) -> tuple[x509.Certificate, list[str]]:
    """The authority that made the kits of a folder, and everybody it ever made one for."""
    known = json.loads((folder / ".authority" / "project.json").read_text(encoding="utf-8"))
    return x509.load_pem_x509_certificate((folder / ".authority" / "ca.pem").read_bytes()), list(
        known["issued"]
    )


def checked_bind(bind: str | None) -> None:
    """The engine listens either on every address of a machine or on loopback."""
    try:
        if bind is None or ipaddress.ip_address(bind).is_loopback:
            return
    except ValueError:
        pass
    raise ConfigError(
        f"bind is '{bind}'; the server listens on 127.0.0.1 or, without bind, on all addresses."
    )


# The authority


@dataclass
class Authority:
    """The project's own certificate authority and what it has issued: name -> serial number."""

    folder: Path
    project_id: str
    certificate: x509.Certificate
    key: rsa.RSAPrivateKey
    facts: dict[str, Any]
    issued: dict[str, str]

    @classmethod
    def open(cls, folder: Path, project: Project, bind: str | None) -> Authority:
        """The one that is there, if it is of the same project and place; else a new one."""
        facts = {
            "project": project.project,
            "host": project.organiser.host,
            "port": project.organiser.port,
            "admin_port": project.organiser.local_port,
            "bind": bind,
        }
        if not folder.exists():
            return cls.create(folder, facts)
        try:
            known = json.loads((folder / "project.json").read_text(encoding="utf-8"))
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            issued, project_id = dict(known["issued"]), str(known["project_id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder} is not a readable authority ({error}). Restore it from a copy, or provision into "
                "another folder: kits of a new authority do not work with kits of the old one."
            ) from None
        assert isinstance(key, rsa.RSAPrivateKey)
        for name, value in facts.items():
            if known.get(name) != value:
                raise ConfigError(
                    f"{folder.parent} holds the kits of a project whose {name} is {known.get(name)!r}; "
                    f"project.yaml says {value!r}. Kits that are out there would no longer fit: put it back, "
                    "or provision into another folder and send every kit anew."
                )
        return cls(folder, project_id, certificate, key, facts, issued)

    @classmethod
    def create(cls, folder: Path, facts: dict[str, Any]) -> Authority:
        folder.mkdir(mode=0o700)
        key = rsa.generate_private_key(65537, 3072)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, facts["project"])])
        uses = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        certificate = (
            builder(name, name, key.public_key(), key, timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(uses, critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(folder, secrets.token_hex(16), certificate, key, facts, {})
        write_private(folder / "ca.key", as_pem(key))
        write_private(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
        made.save()
        return made

    def save(self) -> None:
        plain = {"project_id": self.project_id, **self.facts, "issued": self.issued}
        write_private(self.folder / "project.json", json.dumps(plain, indent=2).encode() + b"\n")

    def issue(
        self,
        name: str,
        organisation: str,
        *,
        use: Literal["server", "client"],
        valid: timedelta,
        hosts: Iterable[str] = (),
        role: str | None = None,
        start: datetime | None = None,
    ) -> tuple[x509.Certificate, rsa.RSAPrivateKey]:
        """A key and its certificate; use: whether its owner may serve, or only connect."""
        key = rsa.generate_private_key(65537, 2048)
        parts = {NameOID.COMMON_NAME: name, NameOID.ORGANIZATION_NAME: organisation}
        if role is not None:
            parts[NameOID.UNSTRUCTURED_NAME] = role  # where the engine looks for it
        subject = x509.Name([x509.NameAttribute(kind, text) for kind, text in parts.items()])
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if use == "server":
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        uses = x509.KeyUsage(True, False, True, False, False, False, False, False, False)
        names = [alternative(host) for host in (tuple(hosts) or (name,))]
        certificate = (
            builder(subject, self.certificate.subject, key.public_key(), self.key, valid, start)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return certificate, key

    def sign(self, content: bytes) -> str:
        return base64.b64encode(self.key.sign(content, SIGNATURE, hashes.SHA256())).decode()


SIGNATURE = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


def builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: rsa.RSAPublicKey,
    signer: rsa.RSAPrivateKey,
    valid: timedelta,
    start: datetime | None = None,
) -> x509.CertificateBuilder:
    """What every certificate says."""
    start = start or datetime.now(UTC) - BACKDATED
    ids = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(ids, critical=False)
    )


def alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def as_pem(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def fingerprint(certificate: x509.Certificate) -> str:
    """Eight groups of an authority's SHA-256, short enough to compare over the telephone."""
    digest = certificate.fingerprint(hashes.SHA256()).hex()[:32]
    return " ".join(digest[start : start + 4] for start in range(0, 32, 4))


def authority_of(kit: Kit) -> x509.Certificate:
    """The certificate of the project's authority, as the kit has it."""
    return x509.load_pem_x509_certificate((kit.startup / "rootCA.pem").read_bytes())


def write_private(path: Path, content: bytes) -> None:
    """A file for its owner alone, never readable by others even for a moment."""
    old = os.umask(0o077)
    try:
        write_bytes(path, content)
    finally:
        os.umask(old)


# The kits


def make_kit(
    project: Project, authority: Authority, name: str, workspaces: Mapping[str, Path], target: Path
) -> None:
    """One kit, built in the authority's closed folder and moved into place whole."""
    organiser = name == ORGANISER
    kit = Kit(
        folder=Path(tempfile.mkdtemp(prefix="making-", dir=authority.folder)),
        name=name,
        role="organiser" if organiser else "hospital",
        project=project.project,
        project_id=authority.project_id,
        server=project.organiser.host,
        port=project.organiser.port,
        version=__version__,
        admin_port=project.organiser.local_port if organiser else None,
    )
    try:
        if organiser:
            fill_organiser(kit, project, authority, workspaces)
        else:
            hospital = next(hospital for hospital in project.hospitals if hospital.name == name)
            fill_hospital(kit, hospital, project, authority, workspaces)
        kit.state.mkdir()
        write_json(kit.folder / "kit.json", kit.as_json())
        write_manifest(kit, authority)
        close(kit.folder)
        check_private(kit)
        kit.folder.rename(target)
    except BaseException:
        shutil.rmtree(kit.folder, ignore_errors=True)
        raise
    authority.save()


def fill_organiser(kit: Kit, project: Project, authority: Authority, workspaces: Mapping[str, Path]) -> None:
    """The server's workspace, the administrator's, and a place for runs."""
    where, organisation = project.organiser, project.organiser.organisation
    valid = timedelta(days=project.valid_days) + BACKDATED
    put_workspace(kit.flare, workspaces["server"], server_local(workspaces["server"]), "organiser")
    change_json(
        kit.startup / "fed_server.json", place_server(where.host, where.port, where.local_port, authority)
    )
    hosts = dict.fromkeys((where.host, "localhost", LOCAL))
    issued = authority.issue(where.host, organisation, use="server", valid=valid, hosts=hosts)
    put_certificate(kit.startup, "server", *issued, authority)
    authority.issued[kit.name] = str(issued[0].serial_number)

    put_workspace(kit.admin, workspaces["admin"], {}, None)
    change_json(kit.admin / "startup" / "fed_admin.json", place_admin(where.local_port))
    admin = authority.issue(ADMIN, organisation, use="client", valid=valid, role="project_admin")
    put_certificate(kit.admin / "startup", "client", *admin, authority)
    kit.runs.mkdir()
    write_text(kit.folder / "README.txt", organiser_text(kit))


def fill_hospital(
    kit: Kit, hospital: Hospital, project: Project, authority: Authority, workspaces: Mapping[str, Path]
) -> None:
    """The client's workspace and the hospital's own rules."""
    from wardround.deploy.rules import template

    put_workspace(kit.flare, workspaces[kit.name], client_local(workspaces[kit.name]), "hospital")
    issued = authority.issue(
        kit.name,
        hospital.certified_organisation,
        use="client",
        valid=timedelta(days=project.valid_days) + BACKDATED,
    )
    put_certificate(kit.startup, "client", *issued, authority)
    authority.issued[kit.name] = str(issued[0].serial_number)
    write_text(kit.site_file, template(kit.name))
    write_text(kit.folder / "README.txt", hospital_text(kit))


def put_workspace(
    folder: Path, made: Path, local: Mapping[str, Any], rights: Literal["organiser", "hospital"] | None
) -> None:
    """The engine's folders: its own start-up file, our settings in local/, none of its shell scripts."""
    for name in ("startup", "local", "transfer"):
        (folder / name).mkdir(parents=True)
    for file in sorted((made / "startup").glob("fed_*.json")):
        shutil.copyfile(file, folder / "startup" / file.name)
    if rights is None:
        shutil.copyfile(made / "local" / "resources.json.default", folder / "local" / "resources.json")
        return
    permissions = dict.fromkeys(RIGHTS[rights], "any") | dict.fromkeys(DENIED, "none")
    policy = {"format_version": "1.0", "permissions": {"project_admin": permissions}}
    write_json(folder / "local" / "authorization.json", policy)
    write_json(
        folder / "local" / "log_config.json", quiet_log(read_json(made / "local" / "log_config.json.default"))
    )
    write_json(folder / "local" / "resources.json", local)


def put_certificate(
    folder: Path, base: str, certificate: x509.Certificate, key: rsa.RSAPrivateKey, authority: Authority
) -> None:
    write_private(folder / f"{base}.key", as_pem(key))
    write_bytes(folder / f"{base}.crt", certificate.public_bytes(serialization.Encoding.PEM))
    write_bytes(folder / "rootCA.pem", authority.certificate.public_bytes(serialization.Encoding.PEM))


def write_manifest(kit: Kit, authority: Authority) -> None:
    """Checksums of all that must not change, signed; keys are held against their certificates instead."""
    own = (kit.site_file, kit.folder / "manifest.json")
    files = {
        path.relative_to(kit.folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(kit.folder.rglob("*"))
        if path.is_file() and path.suffix != ".key" and path not in own
    }
    signature = authority.sign(manifest_text(kit.project_id, kit.name, files))
    manifest = {"schema": MANIFEST_SCHEMA, "files": files, "signature": signature}
    write_json(kit.folder / "manifest.json", manifest)


def manifest_text(project_id: str, name: str, files: Mapping[str, str]) -> bytes:
    """What is signed: the checksums, and whose kit they are of."""
    plain = {"schema": MANIFEST_SCHEMA, "project_id": project_id, "name": name, "files": dict(files)}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def close(folder: Path) -> None:
    """Folders 0700, files 0600."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


# The engine's settings


@contextlib.contextmanager
def quiet_workspaces(project: Project, authority: Authority) -> Iterator[dict[str, Path]]:
    """What the engine itself would give each participant, without certificates and without a word."""
    where = project.organiser
    participants = [
        Participant(
            "server",
            where.host,
            where.organisation,
            {"fed_learn_port": where.port, "admin_port": where.local_port},
        ),
        Participant("admin", ADMIN, where.organisation, {"role": "project_admin"}),
    ]
    participants += [
        Participant("client", hospital.name, hospital.certified_organisation)
        for hospital in project.hospitals
    ]
    with tempfile.TemporaryDirectory(prefix="making-", dir=authority.folder) as scratch:
        engine = Provisioner(scratch, [WorkspaceBuilder(), StaticFileBuilder("config", scheme=SCHEME)])
        spoken = io.StringIO()
        with contextlib.redirect_stdout(spoken), contextlib.redirect_stderr(spoken):
            made = engine.provision(FlareProject(project.project, "", participants), logger=log_of_engine())
        if made.get(CtxKey.BUILD_ERROR) or not made.get_result_location():
            log.debug(spoken.getvalue())
            raise ConfigError(f"NVIDIA FLARE could not make its part of the kits: {made.get_errors()}")
        place = Path(made.get_result_location())
        names = {"server": where.host, "admin": ADMIN} | {h.name: h.name for h in project.hospitals}
        yield {role: place / name for role, name in names.items()}


def log_of_engine() -> logging.Logger:
    """The engine's own words, for those who ask with --debug."""
    spoken = logging.getLogger(f"{__name__}.engine")
    spoken.setLevel(logging.WARNING)
    return spoken


def place_server(host: str, port: int, admin_port: int, authority: Authority) -> dict[str, Any]:
    listens = authority.facts["bind"] or host
    return {
        "service": {"target": f"{listens}:{port}", "scheme": SCHEME},
        "admin_host": LOCAL,
        "admin_port": admin_port,
    }


def place_admin(admin_port: int) -> dict[str, Any]:
    return {"host": LOCAL, "port": admin_port}


def server_local(made: Path) -> dict[str, Any]:
    """resources.json of the server: what it stores goes into the kit, wherever that is when it starts."""
    values = read_json(made / "local" / "resources.json.default")
    values["class_allow_list"] = ALLOWED_CLASSES
    values["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = "{$WARDROUND_KIT}/flare/snapshots"
    components = {item["id"]: item for item in values["components"] if item["id"] not in NOT_WANTED}
    components["job_scheduler"]["args"] = SCHEDULER
    components["job_manager"]["args"]["uri_root"] = "{$WARDROUND_KIT}/flare/jobs"
    values["components"] = [*components.values(), *SERVER_COMPONENTS]
    return values


def client_local(made: Path) -> dict[str, Any]:
    """resources.json of a hospital: logs stay, GPUs are not the engine's business."""
    values = read_json(made / "local" / "resources.json.default")
    values["class_allow_list"] = ALLOWED_CLASSES
    values["allow_log_streaming"] = False
    components = {item["id"]: item for item in values["components"] if item["id"] not in NOT_WANTED}
    for name, path in PASSTHROUGH.items():
        components[name] = {"id": name, "path": path, "args": {}}
    values["components"] = list(components.values())
    return values


def quiet_log(values: dict[str, Any]) -> dict[str, Any]:
    """Two small files in the workspace, nothing on the terminal."""
    handlers = {name: values["handlers"][name] for name in LOG_HANDLERS}
    for handler in handlers.values():
        handler.update(maxBytes=LOG_BYTES, backupCount=LOG_FILES)
    values["handlers"] = handlers
    values["loggers"]["root"]["handlers"] = list(handlers)
    return values


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def change_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Lay values over the one server (or administrator) a start-up file of the engine describes."""
    values = read_json(path)
    place = values["servers"][0] if "servers" in values else values["admin"]
    place.update(changes)
    write_json(path, values)


# What a person finds in the kit


def hospital_text(kit: Kit) -> str:
    return f"""\
This is the kit of hospital '{kit.name}' in the project '{kit.project}'.

It holds a private key: whoever has it can take part as '{kit.name}'. Keep the folder on one machine, readable
by the one account that runs wardround, and tell the organiser at once if it was lost or copied.

  1. pip install 'wardround[nvflare]=={kit.version}'
  2. Read site.yaml and change it to your rules. It is never sent.
  3. wardround preflight . --data federation.yaml
  4. wardround join . --data federation.yaml

Connections: outbound TCP to {kit.server}, port {kit.port} (TLS, both sides prove who they are). Nothing
connects to this machine. What left it is listed in state/egress.jsonl: wardround egress show .
"""


def organiser_text(kit: Kit) -> str:
    return f"""\
This is the organiser's kit of the project '{kit.project}'. It runs on {kit.server}.

  1. pip install 'wardround[nvflare]=={kit.version}'
  2. wardround preflight .
  3. wardround server .
  4. wardround submit run.yaml

Open TCP port {kit.port} for the hospitals. Port {kit.admin_port} is for your own commands and listens on this
machine alone. It holds private keys; keep it readable by the account that runs wardround alone.
"""
