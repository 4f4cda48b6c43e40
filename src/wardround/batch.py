"""Several runs, some of them side by side: each process does one after the other (`batch_process`)."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import yaml

from wardround.api import Result
from wardround.child_process import ChildProcess, Line
from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.outcome import read_status
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.files import try_lock, write_text
from wardround.gpu_service import VISIBLE_GPUS, GpuService
from wardround.machine import RUNS_AT_ONCE, describe_exit, was_killed

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
# A resumed run may change these.
MAY_DIFFER = ("output", "name", "compute", "deadline", "absent_after", "retries", "checkpoint")

Stage = Literal["new", "unfinished", "done"]
Runs = Mapping[str, Mapping[str, Any]]


class BatchListener(Protocol):
    """Receives the progress of each run."""

    def on_rounds(self, name: str, done: int, rounds: int) -> None: ...


class Engine(Protocol):
    """Where runs are done: `Processes` of this machine, or jobs on a cluster."""

    @property
    def running(self) -> Sized:
        """The runs that have begun and not ended."""

    def begin(self, name: str, request: Mapping[str, Any], compute: str) -> None:
        """Start a run; request: see `batch_process.do_run`; compute: its settings, in JSON."""

    def receive(self) -> Iterator[tuple[str, Line]]:
        """The lines that have come, each with the run it is about; `end` is the last of a run."""

    def stop_idle(self) -> None:
        """No more runs will begin."""

    def kill(self) -> None:
        """End all runs; their completed rounds are kept."""


def run_all(
    runs: Runs,
    folder: Path,
    *,
    jobs: int = 2,
    watch: BatchListener | None = None,
    resume: bool = False,
) -> dict[str, Result]:
    """Train every named configuration into `folder/<name>`, `jobs` at a time.

    The first failure stops all. resume: finished runs are not run again, interrupted ones continue.
    """
    for _, error in run_each(runs, folder, jobs=jobs, watch=watch, resume=resume):
        if error is not None:
            raise error
    return {name: Result.load(folder / name) for name in runs}


def run_each(
    runs: Runs,
    folder: Path,
    *,
    jobs: int = 2,
    watch: BatchListener | None = None,
    resume: bool = False,
    engine: Engine | None = None,
) -> Generator[tuple[str, WardroundError | None], None, None]:
    """As `run_all`, yielding each run when it ends: its name, and its error if it failed.

    All settings are checked before the first run starts. Closing the iterator kills the running ones;
    their completed rounds are kept. engine: where they run; None: processes of this machine.
    """
    configs = {name: load_config(settings) for name, settings in runs.items()}
    waiting, blocked = list(runs), set[str]()
    is_alone = jobs == 1 and engine is None
    engine = engine or open_processes(configs.values(), min(jobs, len(runs)))
    try:
        while waiting or engine.running:
            for name in list(waiting):
                if len(engine.running) >= jobs:
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
                    path = write_settings(runs[name], folder, name)
                    # together they fill the machine, so none starts workers of its own unless configured
                    is_free = is_alone or configs[name].compute.workers != "auto"
                    overrides = [] if is_free else ["compute.workers=1"]
                    request = {"config": str(path), "overrides": overrides, "resume": stage == "unfinished"}
                    engine.begin(name, request, in_json(resolve(configs[name])["compute"]))
            if not waiting:
                engine.stop_idle()
            time.sleep(POLL_SECONDS)
            for name, line in engine.receive():
                if "end" in line:
                    reason = line["end"]
                    yield name, None if reason is None else WardroundError(f"run '{name}' failed: {reason}")
                elif watch is not None:
                    watch.on_rounds(name, line["rounds"], configs[name].rounds)
    finally:
        engine.kill()


# Processes


class RunProcess:
    """A process that does runs, one after the other.

    compute: settings that all its runs have in common; gpu: the one it sees, None for all; environment:
    variables beside our own; name: the run it does now, None while it is idle.
    """

    def __init__(
        self, compute: str, gpu: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.compute = compute
        self.gpu = gpu
        self.name: str | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        # waiting threads must sleep, not spin: runs share the cores
        variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"), **(environment or {})}
        if gpu is not None:
            variables[VISIBLE_GPUS] = gpu
        self._child = ChildProcess("wardround.batch_process", variables, log=self._errors)

    def begin(self, name: str, request: Mapping[str, Any]) -> None:
        self.name = name
        self._errors.seek(0)
        self._errors.truncate()  # what it wrote during the last run
        self._child.send(request)

    def receive(self) -> Line | None:
        """What it has told since the last call; the end of the run, where the process has ended."""
        try:
            line = self._child.receive(time.monotonic())
        except TimeoutError:
            return None
        return {"end": self._describe_exit(), "reusable": False} if line is None else line

    def kill(self) -> None:
        self._child.kill()
        self._child.stop()
        self._errors.close()

    def _describe_exit(self) -> str:
        """Why the process ended, by its exit code and the last it wrote."""
        code = self._child.exit_code()
        how = describe_exit(code)
        advice = " Memory may be short: run fewer at a time (--jobs)." if was_killed(code) else ""
        self._errors.seek(0)
        written = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its process {how}{': ' + written[-1] if written else ''}.{advice}"


class Processes:
    """The processes of a batch. One is used again for runs with the same compute settings; after a failure a
    fresh one takes the next run. gpus: dealt out in turn, if there are any to deal; at_once: runs at a time;
    service: lets them compute on one GPU side by side."""

    def __init__(self, gpus: Sequence[str] = (), at_once: int = 1, service: GpuService | None = None) -> None:
        self._processes: list[RunProcess] = []
        self._gpus = gpus
        self._environment = {RUNS_AT_ONCE: str(-(-at_once // max(1, len(gpus))))}
        self._service = service

    @property
    def running(self) -> list[RunProcess]:
        return [process for process in self._processes if process.name is not None]

    def begin(self, name: str, request: Mapping[str, Any], compute: str) -> None:
        """Start a run in an idle process, or in a new one."""
        idle = [process for process in self._processes if process.name is None]
        chosen = next((process for process in idle if process.compute == compute), None)
        if chosen is None:
            self.stop_idle()
            taken = [process.gpu for process in self._processes]
            gpu = min(self._gpus, key=taken.count, default=None)
            more = {} if self._service is None else self._service.start()
            chosen = RunProcess(compute, gpu, {**self._environment, **more})
            self._processes.append(chosen)
        chosen.begin(name, request)

    def receive(self) -> Iterator[tuple[str, Line]]:
        """The lines that have come, each with the run it is about; `end` is the last of a run."""
        for process in self.running:
            name = process.name
            assert name is not None
            while (line := process.receive()) is not None:
                if "end" in line:
                    process.name = None
                    if not line["reusable"]:
                        self._processes.remove(process)
                        process.kill()
                yield name, line
                if "end" in line:
                    break

    def stop_idle(self) -> None:
        """End the processes that have nothing to do, and give back their memory."""
        for process in [process for process in self._processes if process.name is None]:
            self._processes.remove(process)
            process.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes.clear()
        if self._service is not None:
            self._service.stop()


def open_processes(configs: Collection[Config], at_once: int) -> Processes:
    """Processes of this machine that share its GPUs."""
    if at_once < 2:
        return Processes()
    return Processes(list_gpus(configs), at_once, GpuService() if share_one_gpu(configs) else None)


def list_gpus(configs: Iterable[Config]) -> list[str]:
    """GPUs that processes share evenly, as CUDA names them; none if there is one, or a run names its own."""
    devices = {config.compute.device for config in configs}
    count = torch.cuda.device_count()
    if count < 2 or not devices <= {"auto", "cuda"}:
        return []
    visible = os.environ.get(VISIBLE_GPUS)
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def share_one_gpu(configs: Iterable[Config]) -> bool:
    """Whether the runs compute on the only GPU of this machine, one of NVIDIA's."""
    is_nvidia = torch.version.hip is None and torch.cuda.device_count() == 1
    return is_nvidia and any(config.compute.device not in ("cpu", "mps") for config in configs)


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


def is_in_use(folder: Path) -> bool:
    """Whether a process is training in this folder."""
    try:
        with (folder / ".lock").open("r") as lock:
            return not try_lock(lock)
    except FileNotFoundError:
        return False


def write_settings(settings: Mapping[str, Any], folder: Path, name: str) -> Path:
    """The configuration of a run, as a file that can also be run by hand."""
    path = folder / f"{name}.yaml"
    try:
        write_text(path, yaml.safe_dump({**settings, "output": str(folder / name)}, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written: {error.strerror}.") from None
    return path


def count_rounds(folder: Path) -> int:
    try:
        return (folder / "records.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
