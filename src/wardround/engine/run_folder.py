"""The folder of a run: what lies in it, who may write there, and where the run took place."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.transports.placement import Placement
from wardround.errors import CheckpointError, ConfigError
from wardround.training.device import Compute, choose_device
from wardround.version import __version__

LOCK = ".lock"  # in every folder of a run
RUN_ENTRIES = (
    "config.yaml",
    "environment.json",
    "preparation.json",
    "setup.json",
    "left_out.json",
    "records.jsonl",
    "egress.jsonl",
    "cases.csv",
    "calibration.json",
    "start_weights.json",
    "result.json",
    "overlays.png",
    "report.html",
    "tensorboard",
    "mlflow.json",
    "checkpoints",
    "clients",
    "exchange",
)


def check_folder(config: Config, resume: bool, overwrite: bool) -> None:
    """Refuse to resume what is not there, and to replace what is."""
    exists = Checkpoints(config.folder / "checkpoints").exists()
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite replaces it; give one of them.")
    if resume and not exists:
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
    for key in now:
        if key in ("output", "name", "compute", "deadline", "retries", "trackers", "min_clients"):
            continue
        if (found := difference(before[key], now[key], key)) is not None:
            name, was, is_now = found
            raise CheckpointError(
                f"{path}: '{name}' was {was!r} when the run began and is {is_now!r} now. "
                "Resume with the same settings, or start a new run with another output."
            )


def difference(before: Any, now: Any, name: str) -> tuple[str, Any, Any] | None:
    """The first setting that differs, by its dotted name, with both values."""
    if json.dumps(before, default=str) == json.dumps(now, default=str):
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            found = difference(before.get(key), now.get(key), f"{name}.{key}")
            if found is not None:
                return found
    return name, before, now


def environment(config: Config, placement: Placement, compute: Compute) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    device = choose_device(config.compute)
    return {
        "wardround": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": os.cpu_count(),
        **placement.facts(),
        "compute": compute.as_dict(),
        "commit": git_commit(),
        "seed": config.seed,
    }


def git_commit() -> str | None:
    """The commit of a source checkout, or None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
