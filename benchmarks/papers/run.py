"""Tables of the papers on real data at a reduced budget, through `wardround papers run`.

    python benchmarks/papers/run.py --data DATA --out runs/papers --minutes 12 --jobs 14
    python benchmarks/papers/summarise.py runs/papers/papers.json > benchmarks/papers/README.md

DATA holds the folders polyp4 (four sources of polyps) and lgg3d (glioma, four hospitals). Two lanes run side
by side, one for each set, a table after the other. A table that uses up its share of the minutes is stopped;
its finished runs count, one split after the other, and the same command goes on with the others. Everything
the README needs is in OUT/papers.json.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.comparison import Comparison
from wardround.errors import WardroundError
from wardround.files import jsonable

# FedEvi prints 200 rounds on 384x384 images; SAFCF 100 rounds of 40 epochs at 1e-5 on 128x128x128, of which
# nothing is learnt in a hundredth of the steps: hence the higher rate.
POLYP = ["--scale", "rounds=0.1,size=0.42", "--set", "compute.precision=tf32"]
BRAIN = [
    *("--scale", "rounds=0.1,epochs=0.1,size=0.5,filters=0.5,clients=0.5"),
    *("--set", "optimizer.learning_rate=1e-3", "--set", "compute.precision=tf32"),
]
PANCREAS = [
    *("--scale", "rounds=0.1,size=0.25", "--set", "datasets=T1", "--seeds", "42,43,44"),
    *("--set", "optimizer.learning_rate=1e-3", "--set", "compute.precision=tf32"),
]


@dataclass(frozen=True)
class Job:
    """One table. share: of the minutes of its lane."""

    preset: str
    folder: str
    options: list[str]
    share: float


LANES = (
    [
        Job("fedevi-table1", "polyp4", POLYP, 6),
        Job("fedevi-table4", "polyp4", [*POLYP, "--set", "datasets=polyp"], 2.5),
        Job("fedevi-table5", "polyp4", [*POLYP, "--set", "datasets=polyp"], 1),
    ],
    [
        Job("safcf-table2", "lgg3d", BRAIN, 2),
        Job("safcf-table1", "lgg3d", BRAIN, 4),
        Job("safcf-table4", "lgg3d", BRAIN, 2),
        Job("safcf-table3", "lgg3d", BRAIN, 2),
        Job("safcf-table6", "lgg3d", BRAIN, 3),
        Job("aaw-table2", "lgg3d", PANCREAS, 2),
    ],
)


def run_lane(lane: list[Job], jobs: int, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """The tables of a lane, each for at most its share of the time that is left."""
    end = time.monotonic() + 60 * options.minutes
    for number, job in enumerate(lane):
        left = sum(other.share for other in lane[number:])
        limit = max(1.0, (end - time.monotonic()) * job.share / left)
        words = ["wardround", "papers", "run", job.preset, *job.options, *options.more]
        place = ["--data", str(options.data / job.folder), "-o", str(options.out / job.preset)]
        started = time.monotonic()
        with (options.out / f"{job.preset}.log").open("w") as log:
            line = [sys.executable, "-m", *words, *place, "--jobs", str(jobs)]
            process = subprocess.Popen(line, stdout=log, stderr=log)
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                process.wait()
        seconds = time.monotonic() - started
        shown = [*words, "--data", job.folder]
        facts[job.preset] = {"command": shown, "seconds": seconds, "status": process.returncode}
        print(f"{job.preset}: {seconds:.0f} s, exit code {process.returncode}", flush=True)


def pack(folder: Path) -> dict[str, Any]:
    """What the README needs of a comparison, as plain values."""
    try:
        found = Comparison.load(folder)
        done = sum(cell.is_done for cell in found.cells)
        numbers = {metric: found.numbers(metric) for metric in found.metrics} if done else {}
    except WardroundError as error:
        return {"problem": str(error)}
    facts = {"cells": len(found.cells), "done": done, "failures": found.failures, "metrics": numbers}
    return {**facts, "notes": found.facts["notes"], "seeds": found.facts["seeds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--minutes", type=float, default=12.0, help="for all tables together")
    parser.add_argument("--jobs", type=int, default=14, help="runs side by side, both lanes together")
    parser.add_argument("--only", help="presets, with commas; default all")
    parser.add_argument("more", nargs="*", help="further options of `papers run`, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.only.split(",") if options.only else [job.preset for lane in LANES for job in lane]
    lanes = [[job for job in lane if job.preset in wanted] for lane in LANES]
    lanes = [lane for lane in lanes if lane]
    jobs = max(1, options.jobs // max(1, len(lanes)))
    facts: dict[str, Any] = {}
    threads = [threading.Thread(target=run_lane, args=(lane, jobs, options, facts)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    packed = {name: {**facts[name], **pack(options.out / name)} for name in wanted if name in facts}
    text = json.dumps(jsonable(packed), indent=1)
    (options.out / "papers.json").write_text(text, encoding="utf-8")
    print(f"{options.out / 'papers.json'}: {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
