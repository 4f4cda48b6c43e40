"""The deployment under attack, and what is looked at after every attack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from common import Checks, Deployment, since

NAMES = ["east", "north", "south", "west"]
ROGUE = "hospital-05"
SECONDS = 5.0  # in which others must have been heard from, whatever is attempted
# of the organiser's kit, while runs go on
MOVING = ("state/exchange", "state/queue", "state/server", "state/process", "logs", "runs")


class LogTail:
    """What a log file has gained since a moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0

    def lines(self, *words: str) -> list[str]:
        content = self._path.read_bytes()[self._start :] if self._path.exists() else b""
        lines = content.decode(errors="replace").splitlines()
        return [line for line in lines if all(word in line for word in words)]


def files_of(folder: Path, *but: str) -> dict[str, tuple[int, int]]:
    """Every file with its size and time, except in these subfolders."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(but):
            facts = path.stat()
            found[name] = (facts.st_size, facts.st_mtime_ns)
    return found


class Stage:
    """The deployment, and what is looked at after every attack."""

    def __init__(self, checks: Checks, hospitals: Deployment) -> None:
        self.checks, self.hospitals = checks, hospitals
        self.organiser = hospitals.kit("organiser")
        self.rogue = hospitals.kit(ROGUE)
        self.calls = hospitals.organiser / "logs" / "server-calls.log"
        self.mark = hospitals.folder / "code-ran"

    def server(self) -> psutil.Process:
        return psutil.Process(self.hospitals.server.process.pid)

    @contextmanager
    def attack(self, name: str, logged: int = 1, *words: str) -> Iterator[dict[str, Any]]:
        """One line: what was refused, the log lines with the sender's name, the others' last sign of life."""
        tail, began, facts = LogTail(self.calls), time.monotonic(), dict[str, Any]()
        kept = files_of(self.hospitals.organiser, *MOVING)
        yield facts
        good = bool(facts.pop("ok"))
        lines = tail.lines(ROGUE, *words)
        heard = max(age for who, age in self.hospitals.heard().items() if who in NAMES)
        same = kept == files_of(self.hospitals.organiser, *MOVING)
        if not same:
            facts["changed"] = "files of the organiser's kit"
        if self.mark.exists():
            facts["code"] = "RAN"
        holds = good and len(lines) >= logged and heard < SECONDS and same and not self.mark.exists()
        facts |= {"logged": len(lines), "others_heard": round(heard, 1), "seconds": since(began)}
        self.checks.check(holds, name, **facts)
