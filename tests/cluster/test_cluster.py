"""A grid on a cluster of this machine: a cell's process and a worker are killed, and nothing is lost by it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from helpers import settings
from pytest import fixture, mark, skip

KILL = [sys.executable, str(Path(__file__).with_name("kill_workers.py"))]
# Ray listens on every interface, so it gets a network that has none but loopback; its processes end with it.
ALONE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
START = """
set -e
ip link set lo up
ray() { "$PYTHON" -m ray.scripts.scripts start --node-ip-address 127.0.0.1 --num-cpus 1 --disable-usage-stats \\
    --object-store-memory 80000000 "$@" > "$RAY_FOLDER/start.log" 2>&1; }
ray --head --port 6399 --include-dashboard false --temp-dir "$RAY_FOLDER"
ray --address 127.0.0.1:6399
"$@"
"""


@fixture
def grid(tmp_path: Path) -> Path:
    # so long that an orphaned cell notices, within a second, before its last round
    values = {**settings(Path("unused"), rounds=60), "sweep": {"methods": ["fedavg", "local"], "seeds": 2}}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def compare(grid: Path, output: str, *options: str) -> list[str]:
    chosen = ["compare", str(grid), "-o", str(grid.parent / output), "--jobs", "2", "-q", *options]
    return [sys.executable, "-m", "wardround", *chosen]


def assert_same_after_kills(grid: Path, output: str, told: str) -> None:
    """Both killed cells went on after a round that was on disk, and the tables are those of this machine."""
    subprocess.run(compare(grid, "local"), check=True, capture_output=True)
    folder = grid.parent / output
    assert told.count("killed: ") == 2
    again = sorted((folder / "jobs").glob("*-2.jsonl"))
    assert len(again) == 2
    for path in again:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[1]["rounds"] >= 1 and lines[-1]["end"] is None
    for name in ("comparison.json", "table-dice.md", "table-dice.csv", "statistics.json"):
        assert (folder / name).read_bytes() == (grid.parent / "local" / name).read_bytes(), name


@mark.slow
def test_cells_killed_on_submitits_local_executor_go_on_and_give_the_same_bytes(grid: Path) -> None:
    command = compare(grid, "there", "--on", "slurm", "--on-options", "executor=local")
    done = subprocess.run(
        [*KILL, str(grid.parent / "there/jobs"), *command], capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    assert_same_after_kills(grid, "there", done.stderr)


@mark.slow
def test_cells_killed_on_two_nodes_of_ray_go_on_and_give_the_same_bytes(grid: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        skip("Ray is not installed: pip install 'wardround[ray]'")
    if shutil.which("ip") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        skip("this machine does not give a process a network of its own")
    folder = Path("/tmp") / f"wardround-ray-{os.getpid()}"  # sockets have short names
    folder.mkdir()
    variables = {**os.environ, "PYTHON": sys.executable, "RAY_FOLDER": str(folder)}
    kill = [*KILL, str(tmp_path / "there/jobs"), *compare(grid, "there", "--on", "ray")]
    try:
        done = subprocess.run(
            [*ALONE, "bash", "-c", START, "start", *kill],
            capture_output=True, text=True, timeout=600, env=variables,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + (folder / "start.log").read_text()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert_same_after_kills(grid, "there", done.stderr)
