"""The organiser's process for one run: the experiment, with the hospitals at the other end of a pipe.

`wardround server` starts it. It has no network of its own: requests and replies are files in the kit, which
the server streams to and from hospitals.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from wardround.child_process import Line, connect, listen
from wardround.config_file import load_config
from wardround.deploy import limits
from wardround.deploy.conducting import conduct, find_rehearsed_pictures
from wardround.deploy.evaluating import conduct_evaluation
from wardround.deploy.mailbox import are_absent
from wardround.deploy.parcel_file import find_numbers, read_parcel, write_parcel
from wardround.deploy.remote import NUMBERS_ONLY
from wardround.deploy.rules import SURVEY
from wardround.deploy.survey.conducting import conduct_survey
from wardround.deploy.wire import Parcel, ParcelError
from wardround.files import compute_sha256
from wardround.reporting import write_report

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5


class PipeChannel:
    """Parcels by way of the server's process. folder: where both keep them; send: a line to the server."""

    def __init__(self, folder: Path, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._folder = folder
        self._send = send
        self._lock = threading.Lock()
        self._arrived: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._heard: dict[str, float] = {}
        self._moving: set[str] = set()  # hospitals with a message on its way
        self._strays: list[tuple[str, str]] = []

    def take(self, line: Line) -> None:
        """A line from the server: who is alive, what was not wanted, or a reply."""
        now = time.monotonic()
        with self._lock:
            if "alive" in line:
                self._heard = {name: now - seconds for name, seconds in line["alive"].items()}
                self._moving = set(line.get("moving", ()))
            self._strays += [(str(name), str(why)) for name, why in line.get("strays", [])]
        if "letter" in line:
            self._arrived.put(line)

    def alive(self) -> dict[str, float]:
        now = time.monotonic()
        with self._lock:
            return {name: now - heard for name, heard in self._heard.items()}

    def strays(self) -> list[tuple[str, str]]:
        with self._lock:
            found, self._strays = self._strays, []
        return found

    def exchange(
        self, requests: Mapping[str, Parcel], deadline: float, absent_after: float = math.inf
    ) -> Iterator[tuple[str, Parcel]]:
        """Send each hospital its parcel; yield (hospital, reply) as they come, until all answered, the
        deadline (of time.monotonic) passes or nobody else is there. What is left then is cancelled.

        A message on its way at the deadline is waited for as long again: on a thin link a second try would
        take no less.
        """
        latest = 2 * deadline - time.monotonic()
        waiting = {secrets.token_hex(16): hospital for hospital in requests}
        letters = list(waiting)
        try:
            for letter, hospital in waiting.items():
                self._post(letter, hospital, requests[hospital], deadline)
            while waiting and (line := self._next(waiting.values(), deadline, latest, absent_after)):
                hospital_or_none = waiting.pop(str(line["letter"]), None)
                parcel = self._read(hospital_or_none, line)
                if hospital_or_none is not None and parcel is not None:
                    yield hospital_or_none, parcel
                    del parcel
        finally:
            self._send({"close": letters})
            for letter in letters:
                (self._folder / f"{letter}.request").unlink(missing_ok=True)

    def _post(self, letter: str, hospital: str, parcel: Parcel, deadline: float) -> None:
        path = self._folder / f"{letter}.request"
        write_parcel(path, parcel)
        seconds = deadline - time.monotonic()
        task = parcel.header["task"]
        limit = 2 * limits.HEADER_CHARACTERS if task in NUMBERS_ONLY else limits.REPLY_BYTES
        limit = 2 * limits.SURVEY_BYTES if task in SURVEY else limit
        head = find_numbers(path)
        facts = {"hospital": hospital, "letter": letter, "path": str(path), "limit": limit, "head": head}
        self._send({"post": {**facts, "sha256": compute_sha256(path, head), "seconds": seconds}})

    def _next(
        self, waiting: Collection[str], deadline: float, latest: float, absent_after: float
    ) -> Line | None:
        """The next reply, or None where none is to be waited for."""
        while True:
            now = time.monotonic()
            is_late = now >= (latest if self._moving & set(waiting) else deadline)
            try:
                seconds = min(LOOK_SECONDS, max(0.0, deadline - now) or LOOK_SECONDS)
                return self._arrived.get(timeout=0.0 if is_late else seconds)
            except queue.Empty:
                if is_late or are_absent(waiting, self.alive(), absent_after):
                    return None

    def _read(self, hospital: str | None, line: Line) -> Parcel | None:
        """A reply; one that cannot be read, or that belongs to an exchange that was given up, is a stray."""
        if line.get("path") is None:
            return None  # the server has said why
        path = Path(line["path"])
        try:
            if hospital is not None:
                return read_parcel(path, limits.REPLY_BYTES)
            self._note_stray(str(line["hospital"]), "late: its reply came when the exchange was over")
        except ParcelError as error:
            self._note_stray(str(hospital), f"unreadable: {error}")
        finally:
            path.unlink(missing_ok=True)  # a memory map keeps its content
        return None

    def _note_stray(self, hospital: str, why: str) -> None:
        log.warning("%s: %s", hospital, why)
        with self._lock:
            self._strays.append((hospital, why))


class ConductedRun:
    """One run; what the server sends goes to its channel, or stops it."""

    def __init__(self, first: Line, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.job = str(first["job"])
        self.channel = PipeChannel(Path(first["exchange"]), send)
        self._arguments: dict[str, Any] = json.loads(Path(first["arguments"]).read_text(encoding="utf-8"))
        self._experiment: Any = None
        self._is_stopping = False

    def take(self, line: Line) -> None:
        if "stop" in line:
            self._is_stopping = True
            self._begin(self._experiment)
        else:
            self.channel.take(line)

    def conduct(self) -> None:
        arguments = self._arguments
        config, kits = load_config(arguments["config"]), arguments.get("kits")
        if arguments.get("kind") == "survey":
            conduct_survey(self.channel, config, names=arguments["names"], job=self.job)
            return
        if arguments.get("kind") == "evaluation":
            conduct_evaluation(
                self.channel,
                config,
                names=arguments["names"],
                model=Path(arguments["model"]),
                split=arguments["split"],
                proposals=arguments.get("proposals"),
                job=self.job,
            )
            return
        conduct(
            self.channel,
            config,
            names=arguments["names"],
            resume=arguments.get("resume", False),
            overwrite=arguments.get("overwrite", False),
            from_round=arguments.get("from_round"),
            proposals=arguments.get("proposals"),
            job=self.job,
            pictures_at=partial(find_rehearsed_pictures, Path(kits), config.folder) if kits else None,
            on_experiment=self._begin,
            on_done=write_run_report,
        )

    def _begin(self, experiment: Any) -> None:
        self._experiment = experiment
        if self._is_stopping and experiment is not None:
            experiment.stop_requested = True


def write_run_report(folder: Path) -> None:
    """Write report.html; a run that is done stays done if that fails."""
    try:
        write_report([folder])
    except Exception:  # the run is done and safe; the reason is logged in full
        log.warning("the report could not be written; try: wardround report %s", folder, exc_info=True)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    requests, send = connect()
    run = ConductedRun(next(requests), send)
    listen(requests, run.take)
    run.conduct()
    return 0


if __name__ == "__main__":
    sys.exit(main())
