"""Rounds are written in order, two behind at most; a failure stops the writing and reaches the run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from helpers import run, settings
from pytest import fixture, mark, raises

import wardround as wr
from wardround.engine.write_behind import BackgroundWriter


@fixture
def writer() -> BackgroundWriter:
    return BackgroundWriter()


def test_jobs_are_written_in_order_and_a_third_waits_for_the_first(writer: BackgroundWriter) -> None:
    written: list[int] = []
    gate = threading.Event()
    writer.submit([gate.wait, lambda: written.append(1)])
    writer.submit([lambda: written.append(2)])
    assert writer.is_busy() and not written

    threading.Timer(0.05, gate.set).start()
    writer.submit([lambda: written.append(3)])
    assert written[0] == 1
    writer.flush()
    assert written == [1, 2, 3] and not writer.is_busy()
    writer.close()


def test_after_a_failure_nothing_is_written_and_the_run_hears_of_it(writer: BackgroundWriter) -> None:
    written: list[int] = []

    def fail() -> None:
        raise OSError(28, "No space left on device", "round-00003.safetensors")

    writer.submit([fail, lambda: written.append(1)])
    writer.submit([lambda: written.append(2)])
    with raises(OSError, match="No space left"):
        writer.submit([lambda: written.append(3)])
    writer.close()
    assert not written


# Killed at any moment, or out of disk for a while

METHOD: dict[str, Any] = {
    "rounds": 10,
    "method": {"name": "fedevi"},  # two exchanges a round
    "optimizer": {"name": "adam", "learning_rate": 1e-3, "state": "keep"},
}
CHILD = """
import json, os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import wardround as wr
from pathlib import Path
config, resume, delay = json.loads(sys.argv[1]), sys.argv[2] == "resume", float(sys.argv[3])
def kill():
    while not (Path(config["output"]) / "checkpoints/latest.json").exists():
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)
if delay >= 0:
    threading.Thread(target=kill, daemon=True).start()
wr.run(config, resume=resume)
"""


def call(config: dict[str, Any], how: str, delay: float = -1.0) -> subprocess.CompletedProcess[str]:
    script = CHILD.format(tests=str(Path(__file__).parents[1]))
    command = [sys.executable, "-c", script, json.dumps(config), how, str(delay)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@mark.slow
def test_killed_at_twenty_random_moments_a_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    started = time.perf_counter()
    whole = run(tmp_path / "whole", **METHOD)
    length = time.perf_counter() - started
    moments = random.Random(19)
    resumed, same = 0, 0
    for number in range(20):
        broken = settings(tmp_path / f"broken-{number}", **METHOD)
        killed = call(broken, "new", moments.uniform(0, 0.9 * length))
        resumed += killed.returncode == -signal.SIGKILL
        result = wr.run(broken, resume=True)
        same += result.params_sha256 == whole.params_sha256
        cases = [(tmp_path / name / "cases.csv").read_text() for name in (f"broken-{number}", "whole")]
        assert cases[0] == cases[1]
    assert same == 20 and resumed >= 15  # a few may end before their moment


@mark.slow
@mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_full_for_ten_seconds_costs_one_sentence_and_no_run(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **METHOD)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=True)
    try:
        broken = settings(disk / "run", **METHOD)
        stop = threading.Event()

        def fill() -> None:
            while not (disk / "run/checkpoints/latest.json").exists() and not stop.wait(0.01):
                pass
            filler = disk / "filler"
            with filler.open("wb") as file:
                try:
                    while not stop.is_set():
                        file.write(b"0" * 2**16)
                        file.flush()
                except OSError:
                    pass
            stop.wait(10)
            filler.unlink()

        thread = threading.Thread(target=fill)
        thread.start()
        ended = call(broken, "new")
        told = ended.stderr.strip().splitlines()[-1] if ended.returncode else ""
        thread.join(timeout=30)
        stop.set()
        assert ended.returncode == 0 or "No space left on device" in told
        assert wr.run(broken, resume=True).params_sha256 == whole.params_sha256
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
