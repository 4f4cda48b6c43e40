"""Runs that were submitted to the organiser's server, as files in its kit.

    state/queue/<job>.json       the arguments of a run, as `submit` wrote them
                <job>.running    while its process runs
                <job>.stop       end it after this round
                <job>.abort      end it now
    state/server.json            which hospitals were heard from, and when; how far their transfers are; when
                                 their certificates expire

Whoever may write into the kit is the organiser: there is no port for commands.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from wardround.deploy.kits.kit import Kit
from wardround.errors import ConfigError, WardroundError
from wardround.files import try_lock, write_parts

LOCK = "process.lock"  # in state/: held by the server, or by join
JOB = re.compile(r"[0-9]{14}-[0-9a-f]{8}")
JobState = Literal["waiting", "running", "ended"]
NOTHING: dict[str, Any] = {"heard": {}, "transfers": {}, "expires": {}, "revoked": 0}
START_SECONDS = 10.0  # for a server that was just started to say who is there


@dataclass(frozen=True)
class JobQueue:
    """The queue of an organiser's kit."""

    kit: Kit

    @property
    def folder(self) -> Path:
        return self.kit.state / "queue"

    # The organiser's commands

    @staticmethod
    def make_id() -> str:
        """An id for a job; ids sort by time."""
        return f"{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"

    def submit(self, job: str, arguments: Mapping[str, Any]) -> None:
        """Queue a run; arguments: plain JSON."""
        try:
            text = json.dumps(dict(arguments), indent=2)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the run's arguments are not plain JSON ({error}).") from None
        write_parts(self.folder / f"{job}.json", [text.encode()])

    def find_state(self, job: str) -> JobState:
        if (self.folder / f"{job}.running").exists():
            return "running"
        return "waiting" if (self.folder / f"{job}.json").exists() else "ended"

    def ask(self, job: str, what: Literal["stop", "abort"]) -> None:
        """Have a run end after its round, or at once."""
        if self.find_state(job) == "ended":
            raise WardroundError(f"no such run is in progress on the server of {self.kit.folder}.")
        (self.folder / f"{job}.{what}").touch()

    def connected(self) -> dict[str, float]:
        """Hospitals the server knows, with the seconds since each was last heard from."""
        now = time.time()
        return {name: max(0.0, now - heard) for name, heard in self.read_server()["heard"].items()}

    def read_server(self) -> dict[str, Any]:
        """What the server says of itself and the hospitals; raises where none runs."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.require_server()
            try:
                facts = json.loads((self.kit.state / "server.json").read_text(encoding="utf-8"))
                return {**NOTHING, **facts}
            except (OSError, ValueError):
                if time.monotonic() > deadline:
                    return NOTHING
                time.sleep(0.2)

    def require_server(self) -> None:
        """Raise where no server of this kit runs."""
        if not self.is_server_running():
            raise WardroundError(
                "no server of this kit is running on this machine. Start it: wardround server "
                f"{self.kit.folder}"
            )

    def is_server_running(self) -> bool:
        try:
            with (self.kit.state / LOCK).open("a") as file:
                return not try_lock(file)
        except OSError:
            return False

    # The server

    def clear(self) -> None:
        """Forget runs that had begun under a server that is gone: they are resumed by name; others wait."""
        waiting = {f"{job}.json" for job in self.list_waiting()}
        for path in self.folder.glob("*"):
            if path.name not in waiting:
                path.unlink()
        (self.kit.state / "server.json").unlink(missing_ok=True)

    def list_waiting(self) -> list[str]:
        """Jobs that have not begun, the oldest first."""
        found = sorted(path.stem for path in self.folder.glob("*.json"))
        return [job for job in found if JOB.fullmatch(job) and self.find_state(job) == "waiting"]

    def begin(self, job: str) -> Path:
        """Mark a job as running; returns the file of its arguments."""
        (self.folder / f"{job}.running").touch()
        return self.folder / f"{job}.json"

    def find_folder(self, job: str) -> Path | None:
        """The run folder of a job, as `submit` wrote it."""
        try:
            arguments = json.loads((self.folder / f"{job}.json").read_text(encoding="utf-8"))
            return Path(arguments["config"]["output"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def is_asked(self, job: str, what: Literal["stop", "abort"]) -> bool:
        return (self.folder / f"{job}.{what}").exists()

    def finish(self, job: str) -> None:
        for end in ("stop", "abort", "json", "running"):
            (self.folder / f"{job}.{end}").unlink(missing_ok=True)

    def publish(
        self,
        alive: Mapping[str, float],
        transfers: Mapping[str, str] | None = None,
        expires: Mapping[str, datetime] | None = None,
        revoked: int = 0,
    ) -> None:
        """Say which hospitals were heard from (alive: seconds since) and how far their transfers are.

        expires: when their certificates do; revoked: the number of the list in force.
        """
        now = time.time()
        heard = {name: now - seconds for name, seconds in alive.items()}
        ends = {name: moment.isoformat() for name, moment in (expires or {}).items()}
        facts = {"heard": heard, "transfers": dict(transfers or {}), "expires": ends, "revoked": revoked}
        text = json.dumps(facts)
        write_parts(self.kit.state / "server.json", [text.encode()], durable=False)
