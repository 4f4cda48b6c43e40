"""A rehearsal with real processes, small enough for every day; the long ones are scripts in real/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from helpers import run, settings
from pytest import importorskip

importorskip("nvflare")

from wardround.deploy.nvflare.processes import _of_kit


def test_a_rehearsal_gives_the_bytes_of_train_and_leaves_no_process(tmp_path: Path) -> None:
    small = {
        "data": {"phantom": {"hospitals": 2, "size": 16, "cases": 6}},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
    }
    alone = run(tmp_path / "train", **small)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings(tmp_path / "run", **small, deadline=60.0)))
    done = subprocess.run(
        [sys.executable, "-m", "wardround", "rehearse", str(config), "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["params_sha256"] == alone.params_sha256
    kits = tmp_path / "run" / "rehearsal" / "kits"
    assert [kit.name for kit in sorted(kits.iterdir()) if _of_kit(kit)] == []
    lines = (kits / "north" / "state" / "egress.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines][:3] == ["register", "train", "evaluate"]
