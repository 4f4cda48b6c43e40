"""The organiser's connection to the running server, over FLARE's admin interface: submit, query, stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wardround.errors import ConfigError, WardroundError

CONNECT_SECONDS = 15.0
COMMAND_SECONDS = 10.0
DONE = "FINISHED"


class Session:
    """An open connection; close it, or use it in a `with` block. Opening takes a second or two: keep it."""

    def __init__(self, kit: Path, seconds: float = CONNECT_SECONDS) -> None:
        self.kit = kit
        folder = kit / "admin"
        file = folder / "startup" / "fed_admin.json"
        if not file.is_file():
            raise ConfigError(f"{kit} has no admin folder. Give the organiser's kit.")
        settings = json.loads(file.read_text())["admin"]
        self._where = f"{settings['host']}:{settings['port']}"
        with _explained(self._where), _quiet():
            from nvflare.fuel.flare_api.flare_api import new_secure_session

            self._session: Any = new_secure_session(
                settings["username"],
                str(folder),
                timeout=seconds,
                command_timeout=COMMAND_SECONDS,
                auto_login_max_tries=3,
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception), _quiet():
            self._session.close()

    def submit(self, job: Path) -> str:
        """Submit a job folder to the server; returns the job's id."""
        with _explained(self._where):
            return str(self._session.submit_job(str(job.resolve())))

    def job_state(self, job: str) -> str:
        """FLARE's word for it: SUBMITTED, DISPATCHED, RUNNING, FINISHED:COMPLETED and so on."""
        with _explained(self._where):
            return str(self._session.get_job_meta(job).get("status", "unknown"))

    def command(self, job: str, topic: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask the run itself; topic: "status" or "stop"."""
        with _explained(self._where):
            return dict(self._session.do_app_command(job, f"wardround.{topic}", dict(data or {}) or None))

    def abort(self, job: str) -> None:
        """End a job at once; `command(job, "stop")` lets it finish its round."""
        with _explained(self._where):
            self._session.abort_job(job)

    def connected(self) -> dict[str, float]:
        """Hospitals the server knows, with the seconds since each was last heard from."""
        with _explained(self._where):
            clients = self._session.get_connected_client_list()
        now = time.time()
        return {client.name: max(0.0, now - float(client.last_connect_time or 0)) for client in clients}


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn FLARE's errors into our messages."""
    try:
        yield
    except WardroundError:
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "NoConnection":
            text = f"no organiser's server answers at {where}. Start it: wardround server KIT"
        elif kind in ("AuthenticationError", "AuthorizationError"):
            text = f"the server at {where} does not accept this kit. Is it the kit of another project?"
        elif kind in ("JobNotRunning", "JobNotFound"):
            text = f"no such run is in progress at {where} ({error})."
        else:
            text = f"the server at {where} reported an error: {kind}: {error}"
        raise WardroundError(text) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what FLARE prints while it connects."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
            yield
    finally:
        logging.disable(level)
