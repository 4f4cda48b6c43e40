"""live.json: what a run is doing now, and until when it waits. The server writes it, `status` reads it.

`follow` reads records.jsonl too (one line a round), so that `rehearse` and `submit` show what `train` shows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.deploy.kits.kit import Kit
from wardround.engine.records import read_lines
from wardround.errors import ConfigError, WardroundError
from wardround.files import file_name, jsonable, parse_json, write_parts
from wardround.tables import one_line

if TYPE_CHECKING:  # `status` must stay quick: these need torch
    from wardround.config import Config
    from wardround.engine.outcome import Listener

LOOK_SECONDS = 0.3
RESUME_SECONDS = 15.0  # for a run that is being resumed to reach the server
FINAL = ("done", "stopped", "failed")
UNBEGUN = ("queued", "starting", "failed")  # of these no round is shown


def read_live(folder: Path) -> dict[str, Any] | None:
    """What live.json says, None where there is none yet."""
    try:
        facts = parse_json((folder / "live.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def find_running(
    kit: Kit, name: str | None = None, is_known: Callable[[str], bool] = lambda job: True
) -> tuple[str, dict[str, Any]]:
    """The run in progress, and what live.json says of it.

    is_known: whether the server has this job. A run that is not done may just be resumed, which takes a
    command some seconds: it is waited for that long.
    """
    deadline = time.monotonic() + RESUME_SECONDS
    while True:
        runs = {path.parent.name: read_live(path.parent) for path in sorted(kit.runs.glob("*/live.json"))}
        mine = {
            key: facts
            for key, facts in runs.items()
            if facts is not None and (name is None or key == file_name(name))
        }
        going = {
            key: facts
            for key, facts in mine.items()
            if facts["state"] not in FINAL and is_known(str(facts.get("job")))
        }
        may_come = any(facts["state"] != "done" for facts in mine.values())
        if going or not may_come or time.monotonic() >= deadline:
            break
        time.sleep(LOOK_SECONDS)
    if not going:
        what = "no run is" if name is None else f"run '{name}' is not"
        raise WardroundError(f"{what} in progress.")
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
        self.facts |= {**facts, "updated": datetime.now(UTC).isoformat(timespec="seconds")}
        text = json.dumps(jsonable(self.facts), indent=2, ensure_ascii=False) + "\n"
        write_parts(self._path, [text.encode()], durable=False)  # it speaks of this moment alone

    def wait(self, task: str, round: int, names: Sequence[str], deadline: float) -> None:
        """deadline: of time.monotonic, as a time of day."""
        left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        until = (datetime.now(UTC) + left).isoformat(timespec="seconds")
        self.say(state="waiting", task=task, round=round, waiting_for=sorted(names), until=until)


@contextmanager
def announcing(live: Live) -> Iterator[Live]:
    """Say in live.json how it ended: done, or as the state says by then; or that it failed, and why."""
    try:
        yield live
    except BaseException as error:
        reason = str(error) if isinstance(error, WardroundError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk must not hide the reason
            live.say(state="failed", reason=one_line(reason), waiting_for=[], until=None)
        raise
    ended = live.facts["state"] if live.facts["state"] in FINAL else "done"
    live.say(state=ended, waiting_for=[], until=None)


class RunFailed(WardroundError):
    """The run ended on the organiser's machine with this reason."""


def follow(
    config: Config,
    job: str,
    listener: Listener | None,
    *,
    ended: Callable[[], str | None],
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Show a run until it is done or stopped, and return which of them; a failed one raises its reason.

    ended: why the run cannot continue (its process is gone), None while it can; asked now and then.
    """
    folder, shown, started, told = config.folder, 0, False, ""
    while True:
        facts = read_live(folder)
        mine = facts if facts is not None and facts.get("job") == job else None
        if mine is not None and mine["state"] not in UNBEGUN and is_past_registering(mine):
            records = read_lines(folder / "records.jsonl")
            if not started and listener is not None:
                shown = max(0, min(len(records), int(mine.get("first_round") or 0)))
                listener.on_start(config, shown)
            started = True
            for record in records[shown:]:
                if listener is not None:
                    listener.on_record(record)
            shown = max(shown, len(records))
        if mine is not None:
            line = describe_waiting(mine)
            if line and line != told and "connect" in str(mine.get("task")):
                say(line)
                told = line
            if mine["state"] == "failed" or (mine["state"] == "stopped" and mine["round"] is None):
                raise RunFailed(str(mine.get("reason", "the run failed")))
            if mine["state"] in FINAL:
                return str(mine["state"])
        reason = ended()
        if reason is not None:
            raise RunFailed(reason)
        time.sleep(LOOK_SECONDS)
