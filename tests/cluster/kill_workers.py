"""Start a comparison on a cluster of this machine, kill the process of one cell and the worker of another.

    python kill_workers.py JOBS_FOLDER COMMAND...

JOBS_FOLDER: the `jobs` folder of the comparison; the exit code is that of the command.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def read_lines(path: Path) -> list[dict[str, Any]]:
    whole = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines(keepends=True) if line.endswith("\n")]


def find_running(folder: Path, hit: list[str]) -> tuple[str, int] | None:
    """A first attempt with completed rounds: its name, and the process that does it."""
    for path in sorted(folder.glob("*-1.jsonl")):
        lines = read_lines(path)
        if path.stem not in hit and lines and lines[-1].get("rounds", 0) >= 3:
            return path.stem, lines[0]["pid"]
    return None


def main() -> None:
    folder = Path(sys.argv[1])
    with subprocess.Popen(sys.argv[2:]) as command:
        hit: list[str] = []
        while command.poll() is None:
            found = find_running(folder, hit) if len(hit) < 2 else None
            if found is not None:
                victim = psutil.Process(found[1])
                if hit:
                    victim = victim.parent()
                print(f"killed: {' '.join(victim.cmdline())[:60]} of {found[0]}", file=sys.stderr)  # noqa: T201
                os.kill(victim.pid, signal.SIGKILL)
                hit.append(found[0])
            time.sleep(0.05)
    sys.exit(command.returncode)


if __name__ == "__main__":
    main()
