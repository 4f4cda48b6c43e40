"""The job that a consortium submits to its own FLARE: names of classes and settings, never code.

FOLDER/meta.json                           which app goes where
FOLDER/server/config/run.json              the run, which hospitals do not get
FOLDER/server/config/config_fed_server.json
FOLDER/client/config/config_fed_client.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wardround.config import Config
from wardround.config_file import resolve
from wardround.data.settings import TRAVELLING
from wardround.deploy.conducting import check_names, refuse_pooled
from wardround.errors import ConfigError
from wardround.files import file_name, write_json

CONTROLLER = "wardround.deploy.nvflare.controller.WardroundController"
EXECUTOR = "wardround.deploy.nvflare.executor.WardroundExecutor"
SERVER = "server"  # as FLARE calls it
CLIENT = "client"
TASK = "wardround"  # the only task name FLARE sees; ours stands in the parcel's header
POLL_SECONDS = 0.1  # between questions for a letter, where they are not held
TASK_SECONDS = 0.001  # from a task to the next question, which FLARE does not let be nothing
ARGUMENTS = "run.json"
CHUNK_BYTES = 16 * 2**20  # arrays are fetched in pieces of about this size
SLOT = "wardround.slot"  # a hospital asks before it sends a large reply
LETTER = "wardround.letter"  # and waits for a letter before it asks for its task


def write_job(folder: Path, config: Config, names: Sequence[str], *, resume: bool = False) -> None:
    """Write the job of a run. names: the sites that take part, as FLARE calls them.

    The sites are named one by one because FLARE allows no second app beside one for all sites.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already, and nothing is overwritten. Give another with -o.")
    refuse_pooled(config)
    check_names(names)
    if SERVER in names:
        raise ConfigError(f"'{SERVER}' is FLARE's name for the server; it cannot be a hospital.")
    if len(names) < config.min_clients:
        raise ConfigError(f"min_clients is {config.min_clients}, but {len(names)} hospitals are named.")
    meta = {
        "name": file_name(config.name),
        "min_clients": config.min_clients,
        "resource_spec": {},
        "deploy_map": {SERVER: [SERVER], CLIENT: list(names)},
    }
    write_json(folder / SERVER / "config" / "config_fed_server.json", make_server_config())
    arguments = {"config": resolve(config), "names": list(names), "resume": resume}
    write_json(folder / SERVER / "config" / ARGUMENTS, arguments)
    write_json(folder / CLIENT / "config" / "config_fed_client.json", make_client_config())
    write_json(folder / "meta.json", meta)


def read_arguments(app: Path) -> dict[str, Any]:
    """What `write_job` put into the server's app; app: where FLARE unpacked it."""
    file = app / "config" / ARGUMENTS
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names, resume, config = values["names"], values["resume"], values["config"]
        is_sound = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_sound or not isinstance(resume, bool) or not isinstance(config, dict):
            raise ValueError("a value has the wrong type")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{file} cannot be used ({error}). Write the job with: wardround flare-job"
        ) from None
    return values


def place_on_server(config: Config, output: Path | None) -> Config:
    """The run as the server's machine sees it: its paths are there, cases are at the hospitals."""
    data, output = config.data, output or config.output
    if data.federation is not None and data.proxy is None:
        kept = data.model_dump(mode="json", include={"splits", *TRAVELLING})
        data = type(data).model_validate({"hospitals": True, **kept})
    if output is None:
        raise ConfigError("the run needs a folder on the FLARE server's machine. Name it with --output.")
    paths = {"output": output, "data.federation": data.federation, "model.weights": config.model.weights}
    for key, path in paths.items():
        if path is not None and not path.is_absolute():
            raise ConfigError(
                f"{key} is '{path}', but FLARE's processes start in folders of their own. Give the whole "
                "path on the FLARE server's machine, from /."
            )
    return config.model_copy(update={"data": data, "output": output})


def make_server_config() -> dict[str, Any]:
    return {
        "format_version": 2,
        "server": {"heart_beat_timeout": 600, "task_request_interval": TASK_SECONDS},
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
