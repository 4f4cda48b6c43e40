"""Resident memory must not grow with the number of rounds.

One run in one process, tiny, with validation and checkpoints every round, for several kinds of method: one
that keeps nothing, one whose clients keep their last model, one with server memory. After every round the
resident size of the process is noted; growth is the largest size in the last tenth of the rounds over the one
after round 10.

    python benchmarks/growth.py
    python benchmarks/growth.py --methods fedavg --rounds 300
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTLED = 10  # rounds, after which nothing new should be kept


class Scale:
    """Notes the resident size after each round."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_start(self, config: Any, first_round: int) -> None: ...

    def on_round(self, round: int, present: Any) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Any) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        self.bytes.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")))


def one_run(method: str, rounds: int) -> None:
    import wardround as wr

    scale = Scale()
    with tempfile.TemporaryDirectory() as folder:
        wr.run(
            {
                "name": "growth",
                "output": str(Path(folder) / "run"),
                "rounds": rounds,
                "batch_size": 4,
                "data": {"phantom": {"hospitals": 3, "size": 32, "cases": 10}},
                "model": {"name": "unet2d", "base_filters": 4, "levels": 3},
                "method": {"name": method},
                "evaluate": {"metrics": ["dice", "hd95"], "select": "dice", "overlays": 0},
                "compute": {"threads": 1, "device": "cpu"},
            },
            listener=scale,
        )
    print(json.dumps(scale.bytes))


def growth(sizes: list[int]) -> float:
    """By how much the last tenth of the rounds lies above the size after round 10."""
    last = max(sizes[-max(1, len(sizes) // 10) :])
    return last / sizes[min(SETTLED, len(sizes)) - 1] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "safcf", "scaffold"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_run(options.one, options.rounds)
        return
    found = {}
    for method in options.methods:
        command = [sys.executable, __file__, "--one", method, "--rounds", str(options.rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[method] = json.loads(done.stdout.splitlines()[-1])
    grown = {method: growth(sizes) for method, sizes in found.items()}
    if options.json:
        print(json.dumps({"ratio": 1 + max(grown.values()), "growth": grown, "bytes": found}))
        return
    print(f"{options.rounds} rounds in one process, resident MiB after a round")
    print(f"{'method':14s}{'1':>8s}{'10':>8s}{'middle':>8s}{'last':>8s}{'growth':>9s}")
    for method, sizes in found.items():
        marks = sizes[0], sizes[min(SETTLED, len(sizes)) - 1], statistics.median(sizes), sizes[-1]
        print(f"{method:14s}" + "".join(f"{mark / 2**20:8.1f}" for mark in marks) + f"{grown[method]:9.2%}")


if __name__ == "__main__":
    main()
