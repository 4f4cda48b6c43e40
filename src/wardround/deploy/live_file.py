"""live.json: what a run is doing now, and until when it waits. The server writes it, `status` reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from wardround.deploy.kits import Kit
from wardround.errors import ConfigError, WardroundError
from wardround.files import file_name, jsonable, write_parts

FINAL = ("done", "stopped", "failed")


def read_live(folder: Path) -> dict[str, Any] | None:
    """What live.json says, None where there is none yet."""
    try:
        facts: dict[str, Any] = json.loads((folder / "live.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts


def find_running(kit: Kit, name: str | None = None) -> tuple[str, dict[str, Any]]:
    """The run in progress, and what live.json says of it."""
    going = {
        path.parent.name: facts
        for path in sorted(kit.runs.glob("*/live.json"))
        if (facts := read_live(path.parent)) is not None and facts["state"] not in FINAL
    }
    if name is not None:
        going = {key: facts for key, facts in going.items() if key == file_name(name)}
    if not going:
        raise WardroundError(
            "no run is in progress." if name is None else f"run '{name}' is not in progress."
        )
    if len(going) > 1:
        raise ConfigError(f"several runs are in progress: {', '.join(going)}. Name one.")
    return next(iter(going.items()))


def is_past_registering(facts: Mapping[str, Any]) -> bool:
    """Before that, the folder may still hold the records of a run that is about to be replaced."""
    return facts["state"] in FINAL or not str(facts.get("task") or "register").startswith("register")


def describe_waiting(facts: Mapping[str, Any]) -> str:
    """What the run waits for and until when, in words; empty where it waits for nothing."""
    if facts.get("state") != "waiting" or not facts.get("waiting_for"):
        return ""
    until = datetime.fromisoformat(facts["until"]).astimezone().strftime("%H:%M:%S")
    where = f"round {facts['round']}, {facts['task']}" if facts.get("round") else str(facts["task"])
    return f"{where}: waiting for {', '.join(facts['waiting_for'])} until {until}"


class Live:
    """live.json: what the run is doing at this moment, for `status` and for whoever watches."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path = path
        self.facts: dict[str, Any] = {
            "state": "starting",
            "task": None,
            "round": None,
            "waiting_for": [],
            "until": None,
            "away": {},
            "stray": 0,
            **facts,
        }

    def say(self, **facts: Any) -> None:
        self.facts |= {**facts, "updated": now().isoformat(timespec="seconds")}
        text = json.dumps(jsonable(self.facts), indent=2, ensure_ascii=False) + "\n"
        write_parts(self._path, [text.encode()], durable=False)  # it speaks of this moment alone

    def wait(self, task: str, round: int, names: Sequence[str], deadline: float) -> None:
        """deadline: of time.monotonic, as a time of day."""
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        until = (now() + left).isoformat(timespec="seconds")
        self.say(state="waiting", task=task, round=round, waiting_for=sorted(names), until=until)


def now() -> datetime:
    return datetime.now(UTC)
