"""SLURM as submitit speaks to it, with stand-ins for its commands."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import submitit
from pytest import MonkeyPatch, fixture, mark, raises

from wardround.cluster import slurm
from wardround.cluster.slurm import SlurmCluster
from wardround.errors import ConfigError

COMMANDS = {
    "srun": "",
    "sbatch": 'cp "$1" {folder}/script; env | grep ^SLURM_ > {folder}/variables; echo "Submitted batch job 42"',
    "sacct": 'echo "JobID|State|NodeList"; echo "42|$(cat {folder}/state)|n1"',
    "scancel": 'echo "$@" > {folder}/cancelled',
}


@fixture
def folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A folder of commands that stand in for SLURM's, and of what they were told."""
    for name, text in COMMANDS.items():
        install(tmp_path, name, text)
    (tmp_path / "state").write_text("PENDING")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm, "ASK_SECONDS", 0.0)
    return tmp_path


def install(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text.format(folder=folder)}\n")
    path.chmod(0o755)


def submit(folder: Path, **options: str) -> tuple[SlurmCluster, Any]:
    cluster = SlurmCluster(submitit, options)
    return cluster, cluster.submit("fedavg-seed42", folder / "request.json", folder)


def test_a_job_has_the_options_of_sbatch_and_no_limit_of_submitits_own(folder: Path) -> None:
    submit(folder, partition="gpu", gres="gpu:1", **{"cpus-per-task": "4"})
    lines = (folder / "script").read_text().splitlines()

    for line in ("partition=gpu", "gres=gpu:1", "cpus-per-task=4", "job-name=wardround-fedavg-seed42"):
        assert f"#SBATCH --{line}" in lines
    assert not [line for line in lines if "--time" in line]
    submit(folder, time="1-12:00:00")
    assert "#SBATCH --time=1-12:00:00" in (folder / "script").read_text().splitlines()


@mark.parametrize(
    ("state", "end"),
    [("PENDING", None), ("RUNNING", None), ("NODE_FAIL", "node_fail"), ("PREEMPTED", "preempted"),
     ("TIMEOUT", "timeout"), ("CANCELLED by 7", "cancelled by 7")],
)  # fmt: skip
def test_how_a_job_ended_is_what_sacct_says(state: str, end: str | None, folder: Path) -> None:
    submitit.SlurmJob.watcher.clear()
    cluster, job = submit(folder)
    (folder / "state").write_text(state)
    time.sleep(0.002)  # submitit asks once a millisecond

    assert cluster.find_end(job) == end
    assert cluster.describe(job).startswith("SLURM job 42 (log: ")


def test_cancelling_is_scancel(folder: Path) -> None:
    cluster, job = submit(folder)
    cluster.cancel(job)

    assert (folder / "cancelled").read_text().strip() == "42"


def test_a_job_that_submits_jobs_does_not_pass_its_own_limits_on(
    folder: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    submit(folder)

    assert (folder / "variables").read_text() == ""


def test_what_sbatch_refuses_is_one_sentence(folder: Path) -> None:
    install(folder, "sbatch", "echo 'sbatch: error: invalid partition specified: gpo' >&2; exit 1")

    with raises(ConfigError, match="SLURM refuses the job of 'fedavg-seed42': .*invalid partition") as caught:
        submit(folder, partition="gpo")
    assert "\n" not in str(caught.value)


def test_without_slurm_a_sentence_says_where_to_start(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with raises(ConfigError, match="srun is not installed here: start this on a login node"):
        SlurmCluster(submitit, {})


def test_on_this_machine_a_job_is_the_command_of_its_request(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def command(request: str) -> list[str]:
        return [sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", request]

    monkeypatch.setattr(slurm, "cell_command", command)
    cluster = SlurmCluster(submitit, {"executor": "local"})
    job = cluster.submit("a", tmp_path / "request.json", tmp_path)
    assert cluster.find_end(job) is None
    assert isinstance(job._process, subprocess.Popen) and job._process.wait(timeout=60) == 0

    assert cluster.find_end(job) == "finished" and (tmp_path / "request.json").exists()
