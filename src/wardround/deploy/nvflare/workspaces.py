"""The engine's part of a kit: its workspace folder with our settings.

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
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nvflare.lighter.constants import CtxKey
from nvflare.lighter.entity import Participant
from nvflare.lighter.entity import Project as FlareProject
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner

from wardround.deploy.nvflare.authority import ADMIN, Authority
from wardround.deploy.nvflare.job import CONTROLLER, EXECUTOR, REJOIN
from wardround.deploy.project import Project
from wardround.errors import ConfigError
from wardround.files import write_json

log = logging.getLogger(__name__)
engine_log = log.getChild("engine")  # its own messages, shown with --debug
engine_log.setLevel(logging.WARNING)
SCHEME = "http"  # websockets over TLS
LOCAL = "127.0.0.1"
# The server's own components beside the engine's.
SERVER_COMPONENTS: list[dict[str, Any]] = [
    {"id": "rejoin", "path": REJOIN, "args": {}},
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


@contextlib.contextmanager
def build_workspaces(project: Project, authority: Authority) -> Iterator[dict[str, Path]]:
    """Build what the engine itself would give each participant, without certificates and without output."""
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
    write_json(
        folder / "local" / "log_config.json",
        limit_logs(read_json(made / "local" / "log_config.json.default")),
    )
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
