"""Several runs in parallel, each in a process of its own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from wardround.api import Result
from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.engine.checkpoint import Checkpoints
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.files import try_lock, write_text

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# A resumed run may change these.
MAY_DIFFER = ("output", "name", "compute", "deadline", "retries", "checkpoint")

Stage = Literal["new", "unfinished", "done"]
Runs = Mapping[str, Mapping[str, Any]]


class BatchListener(Protocol):
    """Receives the progress of each run."""

    def on_rounds(self, name: str, done: int, rounds: int) -> None: ...


def run_all(
    runs: Runs,
    folder: Path,
    *,
    jobs: int = 2,
    watch: BatchListener | None = None,
    keep_going: bool = False,
    resume: bool = False,
) -> dict[str, Result]:
    """Train every named configuration into `folder/<name>`, `jobs` at a time.

    The first failure stops all, unless keep_going: then it is logged and the run is left out.
    resume: finished runs are not run again, interrupted ones continue.
    """
    failed: set[str] = set()
    for name, error in run_each(runs, folder, jobs=jobs, watch=watch, resume=resume):
        if error is None:
            continue
        if not keep_going:
            raise error
        log.error("%s", error)
        failed.add(name)
    return {name: Result.load(folder / name) for name in runs if name not in failed}


def run_each(
    runs: Runs, folder: Path, *, jobs: int = 2, watch: BatchListener | None = None, resume: bool = False
) -> Generator[tuple[str, WardroundError | None], None, None]:
    """As `run_all`, yielding each run when it ends: its name, and its error if it failed.

    All settings are checked before the first run starts. Closing the iterator kills the running ones;
    their completed rounds are kept.
    """
    configs = {name: load_config(settings) for name, settings in runs.items()}
    waiting, blocked = list(runs), set[str]()
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        while waiting or running:
            for name in list(waiting):
                if len(running) >= jobs:
                    break
                if resume and is_in_use(folder / name):  # by a run that outlived its parent; it will end
                    if name not in blocked:
                        log.warning("%s is in use by another process; waiting for it.", folder / name)
                        blocked.add(name)
                    continue
                waiting.remove(name)
                stage = find_stage(folder / name, configs[name]) if resume else "new"
                if stage == "done":
                    yield name, None
                else:
                    # together they fill the machine, so none starts workers of its own unless configured
                    alone = jobs == 1 or configs[name].compute.workers != "auto"
                    options = [] if alone else ["--set", "compute.workers=1"]
                    running[name] = start_run(
                        runs[name], folder, name, resume=stage == "unfinished", options=options
                    )
            time.sleep(POLL_SECONDS)
            for name, process in list(running.items()):
                if watch is not None:
                    watch.on_rounds(name, count_rounds(folder / name), configs[name].rounds)
                if process.poll() is not None:
                    yield name, read_problem(name, running.pop(name))
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


# One run


def find_stage(folder: Path, config: Config) -> Stage:
    """The stage of a run folder; one with another configuration is refused."""
    path = folder / "config.yaml"
    if not path.exists():
        return "new"
    before, now = resolve(load_config(path)), resolve(config)
    for key in now:
        if key not in MAY_DIFFER and in_json(before[key]) != in_json(now[key]):
            raise CheckpointError(
                f"{folder} was run with other settings: '{key}' was {before[key]!r} and is {now[key]!r} now. "
                "Add --overwrite to rerun it, or choose another output folder."
            )
    if read_status(folder) == "done":
        return "done"
    return "unfinished" if Checkpoints(folder / "checkpoints").exists() else "new"


def in_json(value: Any) -> str:
    return json.dumps(value, default=str)


def read_status(folder: Path) -> str | None:
    """The status in result.json: done, stopped, or None where there is no result."""
    try:
        status = json.loads((folder / "result.json").read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError):
        return None
    return str(status)


def is_in_use(folder: Path) -> bool:
    """Whether a process is training in this folder."""
    try:
        with (folder / ".lock").open("r") as lock:
            return not try_lock(lock)
    except FileNotFoundError:
        return False


def start_run(
    settings: Mapping[str, Any], folder: Path, name: str, *, resume: bool = False, options: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `wardround train` on a file that can also be run by hand.

    It stays in our process group, so that killing the group kills everything.
    """
    path = folder / f"{name}.yaml"
    try:
        write_text(path, yaml.safe_dump({**settings, "output": str(folder / name)}, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written: {error.strerror}.") from None
    if not resume:
        earlier = folder / name / "records.jsonl"
        earlier.unlink(missing_ok=True)  # its rounds are not those of the new run
    command = [sys.executable, "-m", "wardround", "train", str(path), "--quiet", "--no-report"]
    command.append("--resume" if resume else "--overwrite")
    return launch([*command, *options])


def launch(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def count_rounds(folder: Path) -> int:
    try:
        return (folder / "records.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def read_problem(name: str, process: subprocess.Popen[str]) -> WardroundError | None:
    """The error of a run that ended, or None."""
    _, errors = process.communicate()
    if not process.returncode:
        return None
    last = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}"
    return WardroundError(f"run '{name}' failed: {last.removeprefix('error ')}")
