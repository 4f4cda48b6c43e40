"""Showing a run that another process conducts, from the files of its run folder.

The server writes live.json and records.jsonl (one line a round); `follow` reads them, so that `rehearse` and
`submit` show what `train` shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wardround.config import Config
from wardround.deploy.live_file import FINAL, describe_waiting, is_past_registering, read_live
from wardround.engine.outcome import Listener
from wardround.engine.records import read_lines
from wardround.errors import WardroundError

LOOK_SECONDS = 0.3


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
        if mine is not None and mine["state"] not in ("starting", "failed") and is_past_registering(mine):
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
            if mine["state"] == "failed":
                raise RunFailed(str(mine.get("reason", "the run failed")))
            if mine["state"] in FINAL:
                return str(mine["state"])
        reason = ended()
        if reason is not None:
            raise RunFailed(reason)
        time.sleep(LOOK_SECONDS)
