"""Runs to export, each trained once: pictures made up in memory, and volumes in files that need preparing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import run

from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings

HERE = {**os.environ, "OMP_NUM_THREADS": "1"}


def process(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Another Python process, as somebody who received the export would start it."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=HERE, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def in_process() -> Any:
    return process


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2D, two classes, plain probabilities."""
    folder = tmp_path_factory.mktemp("pictures") / "run"
    run(folder)
    return folder


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3D, three classes, evidence; turned, resampled and normalised; the training data are gone since."""
    folder = tmp_path_factory.mktemp("volumes")
    made = PhantomSettings(hospitals=2, dimensions=3, size=16, cases=6, num_classes=3)
    phantom_files.write(made, folder / "data", "nifti", seed=1)
    federation = {
        "sources": [{"path": "data"}],
        "labels": {"rim": [1], "core": [2]},
        "prepare": {"spacing": [10.0, 11.0, 12.0], "normalise": "zscore", "orientation": "RAS"},
    }
    (folder / "federation.yaml").write_text(yaml.safe_dump(federation, sort_keys=False))
    run(
        folder / "run",
        data={"federation": str(folder / "federation.yaml")},
        model={"name": "unet3d", "base_filters": 2, "levels": 2},
        objective={"name": "evidential"},
        batch_size=2,
    )
    (folder / "data").rename(folder / "scans")  # no longer where the run would look
    return folder / "run"
