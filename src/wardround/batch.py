"""Several runs side by side, each in a process of its own."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from wardround.api import Result
from wardround.config import load_config
from wardround.errors import ConfigError, WardroundError
from wardround.storage import write_text

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2


class Watch(Protocol):
    """Who wants to see how far the runs are."""

    def on_rounds(self, name: str, done: int, rounds: int) -> None: ...


def run_all(
    runs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    jobs: int = 2,
    watch: Watch | None = None,
    keep_going: bool = False,
) -> dict[str, Result]:
    """Train every named configuration into `folder/<name>`, `jobs` at a time.

    The first failure stops all, unless keep_going: then it is logged and the run is left out.
    """
    failed: set[str] = set()
    waiting = list(runs)
    running: dict[str, subprocess.Popen[str]] = {}
    rounds = {name: load_config(runs[name]).rounds for name in runs}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[name] = start(runs[name], folder, name)
            time.sleep(POLL_SECONDS)
            for name, process in list(running.items()):
                if watch is not None:
                    watch.on_rounds(name, rounds_done(folder / name), rounds[name])
                if process.poll() is not None:
                    try:
                        finish(name, running.pop(name))
                    except WardroundError as error:
                        if not keep_going:
                            raise
                        log.error("%s", error)
                        failed.add(name)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    return {name: Result.load(folder / name) for name in runs if name not in failed}


def start(settings: Mapping[str, Any], folder: Path, name: str) -> subprocess.Popen[str]:
    """`wardround train` on a file that can be run again by hand."""
    path = folder / f"{name}.yaml"
    try:
        write_text(path, yaml.safe_dump({**settings, "output": str(folder / name)}, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written: {error.strerror}.") from None
    (folder / name / "records.jsonl").unlink(missing_ok=True)  # an earlier run's rounds are not this one's
    command: Sequence[str] = [sys.executable, "-m", "wardround", "train", str(path), "--quiet", "--overwrite"]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def rounds_done(folder: Path) -> int:
    try:
        return (folder / "records.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def finish(name: str, process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        last = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}"
        raise WardroundError(f"run '{name}' failed: {last.removeprefix('error ')}")
