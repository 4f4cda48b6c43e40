"""The folder of a run: what lies in it, who may write there, and where the run took place."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.data.federation import Federation
from wardround.data.federation_file import ClientPartition
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.checksums import read_object
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.postprocessing import POSTPROCESS
from wardround.engine.judging.result_tables import read_test, read_units
from wardround.engine.memory_store import open_stores
from wardround.engine.outcome import Outcome, Progress
from wardround.engine.records import keep_lines, read_lines
from wardround.engine.run_log import RUN_LOG
from wardround.engine.transports.placement import Placement
from wardround.errors import CheckpointError, ConfigError
from wardround.files import try_lock, write_json, write_text
from wardround.messages import ServerState
from wardround.objects import split_name
from wardround.training.device import Compute, choose_device
from wardround.version import __version__
from wardround.yaml_file import read_yaml

MAY_DIFFER = (
    "output", "name", "compute", "deadline", "absent_after", "retries", "checkpoint", "trackers",
    "min_clients", "limits", "without",
)  # fmt: skip
PLAN = "plan.yaml"  # of a run that was planned from its data
LOCK = ".lock"  # in every folder of a run
TESTED = "tested/round-{}.csv"  # the test of a round that `evaluate.test_after` names
RUN_ENTRIES = (
    "config.yaml", PLAN, "environment.json", "preparation.json", "setup.json", "left_out.json",
    "records.jsonl", "egress.jsonl", RUN_LOG, "cases.csv", "aggregates.json", "tested", "calibration.json",
    "start_weights.json",
    POSTPROCESS, "result.json", "overlays.png", "report.html", "dossier.html", "tensorboard", "mlflow.json",
    "checkpoints", "clients", "exchange",
)  # fmt: skip


class RunFolder:
    """The folder of one run, and the files in it that are not the clients'.

    files: name -> text of files that a new run begins with; warnings: what a reader of the result should know
    of how it goes on.
    """

    def __init__(self, config: Config, files: Mapping[str, str] | None = None) -> None:
        self.config = config
        self._files = files or {}
        self.path = config.folder
        self.checkpoints = Checkpoints(self.path / "checkpoints", keep=config.checkpoint.keep)
        self.clients = self.path / "clients"
        self.exchange = self.path / "exchange"
        self.records = self.path / "records.jsonl"
        self.egress = self.path / "egress.jsonl"
        self.warnings: list[str] = []

    def open(self, *, resume: bool, overwrite: bool) -> None:
        """Make the folder ready for a new run, or check that this run can go on in it."""
        check_folder(self.config, resume, overwrite)
        if resume:
            self.warnings = describe_more_rounds(self.config)
            left_out = {*load_config(self.path / "config.yaml").without, *self.config.without}
            self.config = self.config.model_copy(update={"without": tuple(sorted(left_out))})
            self._write_config()  # worker processes read it; compute settings may have changed
            return
        if (self.path / "config.yaml").exists():
            clear_run(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._write_config()
            for name, text in self._files.items():
                write_text(self.path / name, text)
        except OSError as error:
            raise ConfigError(f"output folder {self.path} cannot be written: {error.strerror}.") from None

    def _write_config(self) -> None:
        text = yaml.safe_dump(resolve(self.config), sort_keys=False, allow_unicode=True)
        write_text(self.path / "config.yaml", text)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Two processes must not write one run."""
        with (self.path / LOCK).open("w") as lock:
            if not try_lock(lock):
                raise ConfigError(f"{self.path} is in use by another process.")
            yield

    def start_records(self) -> None:
        for path in (self.records, self.egress):
            write_text(path, self._files.get(path.name, ""))

    def rewind(self, done: int) -> None:
        """Drop what came after so many rounds: checkpoints, memories of clients here, lines of records.

        The pointer to the checkpoint is first: a crash after it leaves a run that resumes from there.
        """
        self.checkpoints.rewind(done)
        for store in open_stores(self.clients):
            store.rewind(done)
        if done < self.config.rounds:
            for name in ("result.json", POSTPROCESS):  # of a run that was done, or stopped
                (self.path / name).unlink(missing_ok=True)
        keep_lines(self.records, lambda line: line["round"] <= done)
        keep_lines(self.egress, lambda line: line["round"] <= done and line["phase"] == "round")

    def clear_exchange(self) -> Path:
        """An empty folder for messages on their way."""
        shutil.rmtree(self.exchange, ignore_errors=True)
        self.exchange.mkdir(parents=True)
        return self.exchange

    def remove_exchange(self) -> None:
        shutil.rmtree(self.exchange, ignore_errors=True)

    def read_method_choice(self) -> dict[str, Any]:
        """Which methods were tried before the run and what they scored, as plan.yaml has it; or nothing."""
        path = self.path / PLAN
        found = read_yaml(path).get("methods") if path.exists() else None
        return {"method_choice": found} if isinstance(found, dict) else {}

    def write_preparation(self, federation: Federation) -> None:
        """preparation.json: how a scan became what the network sees, so that the model can go elsewhere."""
        drops = bool(self.config.augmentation.drop_channels)
        Preparation.of(federation, drops_channels=drops).save(self.path / PREPARATION)

    def write_environment(self, placement: Placement, compute: Compute) -> None:
        write_json(self.path / "environment.json", describe_environment(self.config, placement, compute))

    def write_left_out(self, federation: Federation) -> None:
        """left_out.json: cases that could not be used, each with its reason; no file when there are none."""
        found = {name: dict(federation.left_out(name)) for name in federation.names}
        if any(found.values()):
            write_json(self.path / "left_out.json", {name: cases for name, cases in found.items() if cases})

    def write_result(self, outcome: Outcome) -> dict[str, Any]:
        """result.json, and what it says."""
        progress, test = outcome.progress, outcome.test
        records = read_lines(self.records)
        result = {
            "status": outcome.status,
            "name": self.config.name,
            "method": self.config.method.get("name", "fedavg"),
            "rounds": outcome.state.round,
            "params_sha256": outcome.state.params.sha256(),
            "best_round": progress.best_round,
            "best_validation": progress.best_value,
            "tested_model": self.config.evaluate.model,
            "test": test.as_dict() if test is not None else None,
            "held_out": list(test.held_out) if test is not None else [],
            "units": outcome.units,
            **({"partition": vars(outcome.partition)} if outcome.partition is not None else {}),
            **({"unlabelled": outcome.unlabelled} if outcome.unlabelled else {}),
            **({"lacks": outcome.lacks} if outcome.lacks else {}),
            "cross_site": {name: entry.as_dict() for name, entry in outcome.cross_site.items()},
            "num_refused": sum(len(record["refused"]) for record in records),
            "num_lost": sum(len(record["lost"]) for record in records),
            "test_troubles": outcome.troubles,
            "seconds": progress.seconds,
        }
        write_json(self.path / "result.json", result)
        return result

    def load_outcome(self) -> Outcome:
        """What `write_result`, cases.csv and the last checkpoint say."""
        path = self.path / "result.json"
        result = read_object(path)
        facts, params, memory = self.checkpoints.load()
        state = ServerState(params, memory, facts["round"])
        records = read_lines(self.records)
        try:
            test = read_test(result, records, self.config.participation, self.path / "cases.csv")
            crossed = {name: Evaluation.from_dict(entry) for name, entry in result["cross_site"].items()}
            made = ClientPartition(**result["partition"]) if "partition" in result else None
            status, lacks = str(result["status"]), dict(result.get("lacks", {}))
            unlabelled = dict(result.get("unlabelled", {}))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from None
        progress = Progress.from_dict(facts)
        return Outcome(
            status,
            state,
            progress,
            test,
            crossed,
            units=read_units(result),
            partition=made,
            unlabelled=unlabelled,
            lacks=lacks,
        )


def clear_run(folder: Path) -> None:
    """Remove what belongs to a run."""
    for entry in RUN_ENTRIES:
        path = folder / entry
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_folder(config: Config, resume: bool, overwrite: bool) -> None:
    """Refuse to resume what is not there, and to replace what is."""
    checkpoints = Checkpoints(config.folder / "checkpoints")
    exists = checkpoints.exists()
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it; give one of them.")
    if resume and not checkpoints.kept():
        raise CheckpointError(f"{config.folder} has no checkpoint to resume. Leave --resume out.")
    if resume:
        check_same(config, config.folder / "config.yaml")
    if exists and not resume and not overwrite:  # what failed before its first checkpoint is no loss
        raise ConfigError(
            f"{config.folder} already holds a run. Add --resume to continue it, --overwrite to replace "
            "it, or --set output=... to write elsewhere."
        )
    if resume or overwrite or (config.folder / LOCK).exists():
        return
    foreign = next((name for name in RUN_ENTRIES if (config.folder / name).exists()), None)
    if foreign is not None:
        raise ConfigError(
            f"{config.folder / foreign} is not of a run, and a run would replace it. Write elsewhere with "
            "--set output=..., or add --overwrite."
        )


def check_same(config: Config, path: Path) -> None:
    """A resumed run must be the same run."""
    before, now = resolve(load_config(path)), resolve(config)
    if before["data"]["in_memory"] is True:  # an older run, which did not write down what it was given
        now["data"]["in_memory"] = bool(now["data"]["in_memory"])
    if now["rounds"] < before["rounds"]:
        raise CheckpointError(
            f"{path}: rounds was {before['rounds']} and is {now['rounds']} now. A run that is resumed may "
            "get more rounds, not fewer."
        )
    for key in now:
        if key in MAY_DIFFER or key == "rounds":
            continue
        if (found := find_difference(before[key], now[key], key)) is not None:
            name, was, is_now = found
            advice = "Resume with the same settings, or start a new run with another output."
            if name in config.objects:
                advice = (
                    "What is handed over in Python must be the same; the digits after @ change with its "
                    "source or its values. Hand over what it was, or start a new run with another output."
                )
            raise CheckpointError(
                f"{path}: '{name}' was {was!r} when the run began and is {is_now!r} now. {advice}"
            )


def check_objects(config: Config, path: Path) -> None:
    """Refuse objects of a loaded run that are not those it was trained with."""
    stored = read_yaml(path)
    for key, name in config.objects.items():
        section, _, setting = key.partition(".")
        was = stored[section].get(setting) if section != "data" else name
        if was != name:
            raise CheckpointError(
                f"{path}: '{key}' was {was!r} when the run began, but what is handed over is {name!r}; the "
                "digits after @ change with its source or its values."
            )


def describe_more_rounds(config: Config) -> list[str]:
    """A sentence where a run that is resumed gets more rounds than it began with; else nothing."""
    before = load_config(config.folder / "config.yaml").rounds
    if before == config.rounds:
        return []
    schedule = config.optimizer.schedule.name
    follows = "What follows the number of rounds, as some methods and objectives do,"
    if schedule in ("polynomial", "cosine"):
        follows = f"The {schedule} learning rate"
    return [
        f"rounds was raised from {before} to {config.rounds} when the run was resumed. {follows} was laid "
        f"out for {before} until then: a run of {config.rounds} rounds from the start may differ."
    ]


def find_difference(before: Any, now: Any, name: str) -> tuple[str, Any, Any] | None:
    """The first setting that differs, by its dotted name, with both values."""
    if json.dumps(before, default=str) == json.dumps(now, default=str):
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            found = find_difference(before.get(key), now.get(key), f"{name}.{key}")
            if found is not None:
                return found
    digits = split_name(str(before))[1]
    if digits and digits == split_name(str(now))[1]:  # an object that lies in another module now
        return None
    return name, before, now


def describe_environment(config: Config, placement: Placement, compute: Compute) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    device = choose_device(config.compute)
    return {
        "wardround": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cores": os.cpu_count(),
        **placement.as_dict(),
        "compute": compute.as_dict(),
        "commit": git_commit(),
        "seed": config.seed,
        **({"objects": config.objects} if config.objects else {}),
    }


def git_commit() -> str | None:
    """The commit of a source checkout, or None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
