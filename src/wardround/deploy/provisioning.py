"""provision: keys, certificates and start-up kits, made offline from a project.yaml.

    kits = provision(load_project(Path("project.yaml")), Path("kits"))

The project's authority, the key that signs every certificate, stays in kits/.authority/ on the organiser's
machine. Provisioning again with one more hospital makes that kit and leaves all others as they are.

The engine's part of a kit is its workspace folder with our settings:
- Connections go from hospitals to the organiser's one port, with mutual TLS.
- The organiser's own commands have a port of their own that listens on the organiser's machine alone.
- No code travels: a job may name our controller and our executor and no other class, and one that brings
  code is refused. The organiser may submit, watch and stop runs; anything else on a hospital's machine (shut
  down, show files, send logs) is up to the hospital.
- Log files are written into the kit and are never sent.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Participant
from nvflare.lighter.entity import Project as FlareProject
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from wardround.deploy.authority import (
    ADMIN,
    BACKDATED,
    Authority,
    as_pem,
    write_manifest,
    write_private,
)
from wardround.deploy.kits import Kit, check_private, read_kit
from wardround.deploy.nvflare.job import CONTROLLER, EXECUTOR, REJOIN
from wardround.deploy.project import Hospital, Project
from wardround.deploy.site_file import render_template
from wardround.errors import ConfigError
from wardround.files import write_bytes, write_json, write_text
from wardround.version import __version__

log = logging.getLogger(__name__)
engine_log = log.getChild("engine")  # its own messages, shown with --debug
engine_log.setLevel(logging.WARNING)
SCHEME = "http"  # websockets over TLS
LOCAL = "127.0.0.1"
# The server's own components beside the engine's.
SERVER_COMPONENTS: list[dict[str, Any]] = [{"id": "rejoin", "path": REJOIN, "args": {}}]
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
ORGANISER = "organiser"


def provision(
    project: Project, folder: Path, *, bind: str | None = None, renew: Collection[str] = ()
) -> list[Kit]:
    """Make the kits that are missing, and return those of the project that are in the folder.

    bind: "127.0.0.1" lets the server listen on this machine alone, as in a rehearsal. renew: names whose
    kit was lost or expired and is made again; the old folder must have been moved away. A kit that was made
    before is otherwise never made again, whether it is still here or was sent.
    """
    check_bind(bind)
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
    authority = Authority.open(folder / ".authority", project, bind)
    for name in renew:
        authority.issued.pop(name, None)
    missing = [name for name in wanted if name not in authority.issued]
    refuse_to_replace(folder, missing)
    if missing:
        with build_workspaces(project, authority) as workspaces:
            for name in missing:
                make_kit(project, authority, name, workspaces, folder / name)
    return [read_kit((folder / name).absolute()) for name in wanted if (folder / name / "kit.json").exists()]


def refuse_to_replace(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} exists already, and nothing is overwritten. Move it away, "
                "then provision again."
            )


def check_bind(bind: str | None) -> None:
    """The engine listens either on every address of a machine or on loopback."""
    try:
        if bind is None or ipaddress.ip_address(bind).is_loopback:
            return
    except ValueError:
        pass
    raise ConfigError(
        f"bind is '{bind}'; the server listens on 127.0.0.1 or, without bind, on all addresses."
    )


def make_kit(
    project: Project, authority: Authority, name: str, workspaces: Mapping[str, Path], target: Path
) -> None:
    """One kit, built in the authority's private folder and moved into place when complete."""
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
        write_json(kit.folder / "kit.json", kit.as_dict())
        write_manifest(kit, authority)
        make_private(kit.folder)
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
    put_workspace(kit.flare, workspaces["server"], make_server_resources(workspaces["server"]), "organiser")
    listens = authority.facts["bind"] or where.host
    service = {"target": f"{listens}:{where.port}", "scheme": SCHEME}
    addresses = {"service": service, "admin_host": LOCAL, "admin_port": where.local_port}
    change_json(kit.startup / "fed_server.json", addresses)
    hosts = dict.fromkeys((where.host, "localhost", LOCAL))
    issued = authority.issue(where.host, organisation, use="server", valid=valid, hosts=hosts)
    put_certificate(kit.startup, "server", *issued, authority)
    authority.issued[kit.name] = str(issued[0].serial_number)

    put_workspace(kit.admin, workspaces["admin"], {}, None)
    change_json(kit.admin / "startup" / "fed_admin.json", {"host": LOCAL, "port": where.local_port})
    admin = authority.issue(ADMIN, organisation, use="client", valid=valid, role="project_admin")
    put_certificate(kit.admin / "startup", "client", *admin, authority)
    kit.runs.mkdir()
    write_text(kit.folder / "README.txt", render_organiser_readme(kit))


def fill_hospital(
    kit: Kit, hospital: Hospital, project: Project, authority: Authority, workspaces: Mapping[str, Path]
) -> None:
    """The client's workspace and the hospital's own rules."""
    put_workspace(kit.flare, workspaces[kit.name], make_hospital_resources(workspaces[kit.name]), "hospital")
    valid = timedelta(days=project.valid_days) + BACKDATED
    issued = authority.issue(kit.name, hospital.certified_organisation, use="client", valid=valid)
    put_certificate(kit.startup, "client", *issued, authority)
    authority.issued[kit.name] = str(issued[0].serial_number)
    write_text(kit.site_file, render_template(kit.name))
    write_text(kit.folder / "README.txt", render_hospital_readme(kit))


def put_certificate(
    folder: Path, base: str, certificate: x509.Certificate, key: rsa.RSAPrivateKey, authority: Authority
) -> None:
    write_private(folder / f"{base}.key", as_pem(key))
    write_bytes(folder / f"{base}.crt", certificate.public_bytes(serialization.Encoding.PEM))
    write_bytes(folder / "rootCA.pem", authority.certificate.public_bytes(serialization.Encoding.PEM))


def make_private(folder: Path) -> None:
    """Folders 0700, files 0600."""
    folder.chmod(0o700)
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


# The engine's part of a kit


@contextlib.contextmanager
def build_workspaces(project: Project, authority: Authority) -> Iterator[dict[str, Path]]:
    """Build what the engine itself would give each participant, without certificates and without output."""
    where = project.organiser
    ports = {"fed_learn_port": where.port, "admin_port": where.local_port}
    participants = [
        Participant("server", where.host, where.organisation, ports),
        Participant("admin", ADMIN, where.organisation, {"role": "project_admin"}),
        *(Participant("client", each.name, each.certified_organisation) for each in project.hospitals),
    ]
    with tempfile.TemporaryDirectory(prefix="making-", dir=authority.folder) as scratch:
        engine = Provisioner(scratch, [WorkspaceBuilder(), StaticFileBuilder("config", scheme=SCHEME)])
        spoken = io.StringIO()
        with contextlib.redirect_stdout(spoken), contextlib.redirect_stderr(spoken):
            made = engine.provision(FlareProject(project.project, "", participants), logger=engine_log)
        if made.get(CtxKey.BUILD_ERROR) or not made.get_result_location():
            log.debug(spoken.getvalue())
            raise ConfigError(f"NVIDIA FLARE could not make its part of the kits: {made.get_errors()}")
        place = Path(made.get_result_location())
        names = {"server": where.host, "admin": ADMIN} | {h.name: h.name for h in project.hospitals}
        yield {role: place / name for role, name in names.items()}


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
    logs = limit_logs(read_json(made / "local" / "log_config.json.default"))
    write_json(folder / "local" / "log_config.json", logs)
    write_json(folder / "local" / "resources.json", local)


def make_server_resources(made: Path) -> dict[str, Any]:
    """resources.json of the server: what it stores goes into the kit, wherever that is when it starts."""
    values = read_json(made / "local" / "resources.json.default")
    values["class_allow_list"] = ALLOWED_CLASSES
    values["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = "{$WARDROUND_KIT}/flare/snapshots"
    components = {item["id"]: item for item in values["components"] if item["id"] not in NOT_WANTED}
    components["job_scheduler"]["args"] = SCHEDULER
    components["job_manager"]["args"]["uri_root"] = "{$WARDROUND_KIT}/flare/jobs"
    values["components"] = [*components.values(), *SERVER_COMPONENTS]
    return values


def make_hospital_resources(made: Path) -> dict[str, Any]:
    """resources.json of a hospital: logs stay, GPUs are not the engine's to assign."""
    values = read_json(made / "local" / "resources.json.default")
    values["class_allow_list"] = ALLOWED_CLASSES
    values["allow_log_streaming"] = False
    components = {item["id"]: item for item in values["components"] if item["id"] not in NOT_WANTED}
    for name, path in PASSTHROUGH.items():
        components[name] = {"id": name, "path": path, "args": {}}
    values["components"] = list(components.values())
    return values


def limit_logs(values: dict[str, Any]) -> dict[str, Any]:
    """Log into two small files in the workspace, nothing on the terminal."""
    handlers = {name: values["handlers"][name] for name in LOG_HANDLERS}
    for handler in handlers.values():
        handler.update(maxBytes=LOG_BYTES, backupCount=LOG_FILES)
    values["handlers"] = handlers
    values["loggers"]["root"]["handlers"] = list(handlers)
    return values


def read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def change_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Override values of the server (or administrator) in one of the engine's start-up files."""
    values = read_json(path)
    place = values["servers"][0] if "servers" in values else values["admin"]
    place.update(changes)
    write_json(path, values)


def render_hospital_readme(kit: Kit) -> str:
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


def render_organiser_readme(kit: Kit) -> str:
    return f"""\
This is the organiser's kit of the project '{kit.project}'. It runs on {kit.server}.

  1. pip install 'wardround[nvflare]=={kit.version}'
  2. wardround preflight .
  3. wardround server .
  4. wardround submit run.yaml

Open TCP port {kit.port} for the hospitals. Port {kit.admin_port} is for your own commands and listens on this
machine alone. It holds private keys; keep it readable by the account that runs wardround alone.
"""
