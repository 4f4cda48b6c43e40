"""A rehearsal with real processes, small enough for every day; the long ones are scripts in real/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import yaml
from helpers import call, config, run, settings
from pytest import CaptureFixture, MonkeyPatch, importorskip

importorskip("grpc")

from wardround.deploy.rehearsal import claim_folder, render_site
from wardround.deploy.resources import Resources
from wardround.deploy.site_file import load_site


def test_a_rehearsal_gives_the_bytes_of_train_and_leaves_no_process(tmp_path: Path) -> None:
    small = {
        "data": {"phantom": {"hospitals": 2, "size": 16, "cases": 6}},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
    }
    alone = run(tmp_path / "train", **small)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(tmp_path / "run", **small, deadline=60.0)))
    done = subprocess.run(
        [sys.executable, "-m", "wardround", "rehearse", str(file), "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["params_sha256"] == alone.params_sha256
    kits = tmp_path / "run" / "rehearsal" / "kits"
    assert find_processes(kits) == []
    lines = (kits / "north" / "state" / "egress.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines][:3] == ["register", "train", "evaluate"]


def find_processes(folder: Path) -> list[int]:
    """Processes that work for a kit in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("WARDROUND_KIT", "")]
        except (psutil.Error, OSError):
            continue
        if process.status() != psutil.STATUS_ZOMBIE and any(word.startswith(str(folder)) for word in words):
            found.append(process.pid)
    return found


def test_a_rehearsed_hospital_allows_everything_and_splits_as_the_run_does(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    data = {"federation": "scans/federation.yaml", "splits": {"by": "kfold", "fold": 1}}
    path.write_text(render_site(config(tmp_path / "run", data=data), "north"))
    site = load_site(path)
    assert site.splits is not None and (site.splits.by, site.splits.fold) == ("kfold", 1)
    assert (site.min_cases, site.min_batch, site.resources) == (0, 1, Resources.unlimited())


def test_a_second_rehearsal_in_a_folder_leaves_the_first_alone(
    mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path / "run")))
    kept = tmp_path / "run" / "rehearsal" / "kits" / "north" / "kit.json"
    with claim_folder(tmp_path / "run"):
        kept.parent.mkdir(parents=True)
        kept.write_text("of the first")

        code, _, err = call(monkeypatch, capsys, "rehearse", str(tmp_path / "run.yaml"))

    assert code == 2 and "a rehearsal is already running in" in err and kept.read_text() == "of the first"


def test_a_rehearsal_cannot_be_written_into_a_file(
    mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("mine")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path / "run")))

    code, _, err = call(monkeypatch, capsys, "rehearse", str(tmp_path / "run.yaml"))

    assert code == 2 and ".lock cannot be written" in err and (tmp_path / "run").read_text() == "mine"
