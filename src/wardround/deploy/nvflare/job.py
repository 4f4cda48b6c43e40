"""The job that FLARE carries to the hospitals: names of classes and settings, never code."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.errors import ConfigError
from wardround.files import file_name, write_json, write_text

CONTROLLER = "wardround.deploy.nvflare.controller.WardroundController"
EXECUTOR = "wardround.deploy.nvflare.executor.WardroundExecutor"
REJOIN = "wardround.deploy.nvflare.rejoin.RejoinMonitor"  # part of the server, not of a job
TASK = "wardround"  # the only task name FLARE sees; ours stands in the parcel's header
POLL_SECONDS = 0.1
ARGUMENTS = "run.json"
CHUNK_BYTES = 16 * 2**20  # arrays are fetched in pieces of about this size
SLOT = "wardround.slot"  # a hospital asks before it sends a large reply


def write_job(folder: Path, *, name: str, args: Mapping[str, Any]) -> Path:
    """A job folder for FLARE: for every connected hospital; one is enough to start.

    args: what the run needs on the server (names, resume, the configuration), plain JSON. They stay beside
    the job, on the organiser's machine; the job, which goes to every hospital, has only their number.
    """
    try:
        text = json.dumps(dict(args), indent=2)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"job '{name}': its arguments are not plain JSON ({error}).") from None
    number = secrets.token_hex(8)
    write_text(folder / f"{number}.json", text)
    job = folder / number
    meta = {"min_clients": 1, "resource_spec": {}, "deploy_map": {"app": ["@ALL"]}}
    write_json(job / "meta.json", {"name": file_name(name), **meta})
    write_json(job / "app" / "config" / "config_fed_server.json", make_server_config())
    write_json(job / "app" / "config" / "config_fed_client.json", make_client_config())
    write_json(job / "app" / "config" / ARGUMENTS, {"number": number})
    return job


def read_arguments(app: Path, folder: Path) -> dict[str, Any]:
    """The arguments of a job. app: where FLARE unpacked it; folder: where the organiser wrote it."""
    number = str(json.loads((app / "config" / ARGUMENTS).read_text())["number"])
    if not re.fullmatch("[0-9a-f]{16}", number):
        raise ConfigError("this job was not written by wardround submit.")
    values: dict[str, Any] = json.loads((folder / f"{number}.json").read_text())
    return values


def jobs_folder(kit: Path) -> Path:
    """Where the organiser writes jobs."""
    return kit / "state" / "jobs"


def make_server_config() -> dict[str, Any]:
    return {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": POLL_SECONDS},
        "np_download_chunk_size": CHUNK_BYTES,
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "workflows": [{"id": "wardround", "path": CONTROLLER, "args": {}}],
    }


def make_client_config() -> dict[str, Any]:
    return {
        "format_version": 2,
        "executors": [{"tasks": [TASK], "executor": {"id": "wardround", "path": EXECUTOR, "args": {}}}],
        "task_data_filters": [],
        "task_result_filters": [],
        "components": [],
        "np_download_chunk_size": CHUNK_BYTES,
        # seconds; read by FLARE's client runner
        "default_task_fetch_interval": 0.2,
        "job_heartbeat_interval": 2.0,
        "task_check_interval": 1.0,
    }
