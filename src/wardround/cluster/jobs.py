"""Runs as jobs of a cluster: an engine of `batch`.

    FOLDER/<run>-<n>.json     the n-th request for a run: configuration, overrides, working directory
    FOLDER/<run>-<n>.jsonl    what its process tells: where it runs, rounds, the end

A job that ends without telling the end of its run was lost: killed, preempted, out of time. It is submitted
again, and the run continues after its last round. One that was lost three times without a new round, or
cancelled by hand, has failed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from wardround.child_process import Line
from wardround.errors import ConfigError
from wardround.files import write_json, write_text

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
LATE_SECONDS = 5.0  # how much later than the end of a job its last line may be seen
MOST_LOST = 2  # jobs in a row for the same rounds


class Cluster(Protocol):
    """Starts jobs on nodes. name: as a user calls it; only strings go to a node."""

    name: str

    def submit(self, name: str, request: Path, folder: Path) -> Any:
        """A job that does `request`; name: of its run; folder: for what the cluster writes."""

    def find_end(self, job: Any) -> str | None:
        """How a job ended, in a few words, `cancelled` first if it was; None as long as it waits or runs."""

    def describe(self, job: Any) -> str:
        """What to call it, so that a user finds it."""

    def cancel(self, job: Any) -> None: ...

    def close(self) -> None: ...


def cell_command(request: str) -> list[str]:
    """What runs on a node, with the Python of whoever asks."""
    return [sys.executable, "-P", "-m", "wardround.cluster.cell", request]


@dataclass
class CellJob:
    """A run that was submitted. read: bytes of its answers; first: rounds that were done when it began, -1 if
    it did not; ended: when the cluster said that it has ended; lost: jobs before it, in a row, that began
    after no more rounds than `reached`."""

    name: str
    request: Path
    job: Any
    read: int = 0
    first: int = -1
    ended: float | None = None
    lost: int = 0
    reached: int = -1


class ClusterJobs:
    """The jobs of a batch. folder: for requests and answers, where every node sees it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.running: list[CellJob] = []
        self._cluster = cluster
        self._folder = folder.absolute()
        self._looked = 0.0
        self._is_heard = False  # whether any job has told anything

    def begin(self, name: str, request: Mapping[str, Any], compute: str) -> None:
        """Submit a run; what it has done by then, its process finds out."""
        number = next(n for n in count(1) if not self._place(name, n).exists())
        path = self._place(name, number)
        here = {"working_directory": os.getcwd(), "next": str(self._place(name, number + 1))}  # noqa: PTH109
        write_text(path.with_suffix(".jsonl"), "")  # here already: nodes cache what is absent
        write_json(path, {**request, **here})
        self.running.append(CellJob(name, path, self._cluster.submit(name, path, self._folder)))

    def receive(self) -> Iterator[tuple[str, Line]]:
        if time.monotonic() - self._looked < POLL_SECONDS:
            return
        self._looked = time.monotonic()
        for cell in list(self.running):
            lines = self._read(cell)
            yield from ((cell.name, line) for line in lines)
            if lines and "end" in lines[-1]:
                self.running.remove(cell)
            elif (why := self._find_loss(cell)) is not None:
                yield from self._submit_again(cell, why)

    def stop_idle(self) -> None:
        """Jobs end by themselves."""

    def kill(self) -> None:
        for cell in self.running:
            self._cluster.cancel(cell.job)
        self.running.clear()
        self._cluster.close()

    def _place(self, name: str, number: int) -> Path:
        return self._folder / f"{name}-{number}.json"

    def _read(self, cell: CellJob) -> list[Line]:
        """Rounds and the end that a process has told since the last call."""
        with cell.request.with_suffix(".jsonl").open("rb") as file:
            file.seek(cell.read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        cell.read += len(whole)
        lines: list[Line] = [json.loads(line) for line in whole.splitlines()]
        self._is_heard = self._is_heard or bool(lines)
        told = [line for line in lines if "rounds" in line or "end" in line]
        if cell.first < 0 and told:
            cell.first = told[0].get("rounds", -1)
        return told

    def _find_loss(self, cell: CellJob) -> str | None:
        """How a job ended whose run did not."""
        why = self._cluster.find_end(cell.job)
        if why is None:
            cell.ended = None
            return None
        cell.ended = cell.ended or time.monotonic()
        return why if time.monotonic() - cell.ended >= LATE_SECONDS else None

    def _submit_again(self, cell: CellJob, why: str) -> Iterator[tuple[str, Line]]:
        """Go on with a run whose job was lost; without hope, its end."""
        job = self._cluster.describe(cell.job)
        if not self._is_heard:
            raise ConfigError(
                f"{job} ended ({why}) and wrote nothing into {self._folder}. Every node must see this folder "
                f"and {sys.executable} under the same path, and may write there."
            )
        self.running.remove(cell)
        lost = 1 if cell.first > cell.reached else cell.lost + 1
        if lost > MOST_LOST or why.startswith("cancelled"):
            yield cell.name, {"end": f"{job} ended without a result ({why})."}
            return
        log.warning("%s: %s ended without a result (%s); it is submitted again.", cell.name, job, why)
        request = json.loads(cell.request.read_text(encoding="utf-8"))
        self.begin(cell.name, request, "")
        self.running[-1].lost, self.running[-1].reached = lost, max(cell.first, cell.reached)
