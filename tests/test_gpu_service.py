import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from helpers import settings
from pytest import MonkeyPatch, fixture, mark

from wardround import batch, gpu_service
from wardround.gpu_service import LOGS, PIPES, SWITCH, VISIBLE_GPUS, GpuService
from wardround.machine import RUNS_AT_ONCE, runs_at_once

CONTROL = """#!/bin/sh
[ "$1" = "-d" ] && word=start || read word
echo "$word $(stat -c %a $(dirname $CUDA_MPS_PIPE_DIRECTORY))" >> "$CALLS"
[ "$word" != "$BROKEN" ]
"""


@fixture
def calls(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A service that notes what it is told, first on the PATH."""
    program = tmp_path / "bin" / gpu_service.CONTROL
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    for name in (PIPES, LOGS, VISIBLE_GPUS, SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("BROKEN", "nothing")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(gpu_service, "PROBE", "")
    return tmp_path / "calls"


def folders(calls: Path) -> list[Path]:
    return list(calls.parent.glob("wardround-mps-*"))


def test_the_service_is_started_once_and_ends_with_the_batch(calls: Path) -> None:
    service = GpuService()
    environment = service.start()
    assert environment.keys() == {PIPES, LOGS} and service.start() is environment
    assert all(Path(path).is_dir() for path in environment.values())
    service.stop()
    assert calls.read_text().splitlines() == ["start 700", "get_server_list 700", "quit 700"]
    assert folders(calls) == []


def test_it_ends_when_the_batch_is_killed(calls: Path) -> None:
    code = (
        "import os, wardround.gpu_service as g; g.PROBE = ''; g.GpuService().start(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    deadline = time.monotonic() + 30
    while folders(calls) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert calls.read_text().splitlines()[-1] == "quit 700"


@mark.parametrize("broken", ["start", "get_server_list"])
def test_runs_go_on_without_a_service_that_fails(
    calls: Path, monkeypatch: MonkeyPatch, broken: str, caplog: object
) -> None:
    monkeypatch.setenv("BROKEN", broken)
    assert GpuService().start() == {}
    assert "take turns" in caplog.text  # type: ignore[attr-defined]
    assert folders(calls) == []


def test_runs_go_on_where_a_process_cannot_use_the_gpu_through_it(
    calls: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_service, "PROBE", "raise SystemExit(1)")
    assert GpuService().start() == {}
    assert calls.read_text().splitlines()[-1] == "quit 700"


def test_it_is_not_started_where_it_is_off_or_the_user_has_one(calls: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    assert GpuService().start() == {}
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv(PIPES, "/somewhere")
    assert GpuService().start() == {}
    monkeypatch.delenv(PIPES)
    monkeypatch.setenv("PATH", "")
    assert GpuService().start() == {}
    assert not calls.exists()


def test_a_gpu_that_was_named_is_the_first_that_the_service_has(
    calls: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_GPUS, "3")
    service = GpuService()
    assert service.start()[VISIBLE_GPUS] == "0"
    service.stop()


def test_runs_that_share_one_gpu_share_the_service_and_the_memory(
    calls: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []
    begin = batch.RunProcess.__init__

    def note(self: batch.RunProcess, compute: str, gpu: str | None, environment: dict[str, str]) -> None:
        started.append(environment)
        begin(self, compute, gpu, environment)

    monkeypatch.setattr(batch.RunProcess, "__init__", note)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    runs = {name: settings(tmp_path / name, rounds=1) for name in ("one", "two")}
    found = batch.run_all(runs, tmp_path / "runs", jobs=2)
    assert found.keys() == runs.keys()
    assert [entry[RUNS_AT_ONCE] for entry in started] == ["2", "2"]
    assert len({entry[PIPES] for entry in started}) == 1
    assert calls.read_text().splitlines()[-1] == "quit 700"


def test_runs_at_once_is_one_unless_somebody_says_otherwise(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv(RUNS_AT_ONCE, raising=False)
    assert runs_at_once() == 1
    monkeypatch.setenv(RUNS_AT_ONCE, "8")
    assert runs_at_once() == 8
