"""A comparison of many short runs: seconds from the command to its end, a cell, and to the first round.

Six made-up hospitals, 460 training images of 160x160 in all; a U-Net with 16 filters, 40 rounds, 7 methods
with 6 seeds: 42 cells. The cases are prepared before the clock starts. `--own-processes` first runs the same
cells as `wardround train` does, each in a process of its own, one after the other. Python's bytecode is kept
in a folder, as pip leaves it beside packages that it installs.

    python benchmarks/many_cells.py                       # GPU
    python benchmarks/many_cells.py --jobs 4 8 16 --json  # several numbers of cells at a time
    python benchmarks/many_cells.py --small               # tiny, also on the CPU
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from wardround.data.federation_file import FederationFile, Source, write

METHODS = ["fedavg", "fedprox", "scaffold", "fednova", "feddyn", "ditto", "fedevi"]
TRAINING = [160, 110, 80, 50, 35, 25]  # images of each hospital, 460 in all


def make_hospitals(folder: Path, training: list[int], side: int) -> Path:
    """Bright ellipses on noise, darker from hospital to hospital; with an index of the splits."""
    draw = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side] / side
    index = ["centre,stem,split"]
    for number, count in enumerate(training):
        images, labels = (folder / f"hospital{number}" / kind for kind in ("images", "labels"))
        images.mkdir(parents=True)
        labels.mkdir()
        kept = max(2, count // 8)  # for validation, and as many for the test
        for case in range(count + 2 * kept):
            y, x, height, width = draw.uniform([0.3, 0.3, 0.08, 0.08], [0.7, 0.7, 0.25, 0.25])
            inside = ((rows - y) / height) ** 2 + ((columns - x) / width) ** 2 < 1
            image = draw.normal(110 - 8 * number, 25, (side, side, 3)) + 45 * inside[..., None]
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(images / f"{case}.png")
            Image.fromarray(inside.astype(np.uint8)).save(labels / f"{case}.png")
            split = "train" if case < count else "val" if case < count + kept else "test"
            index.append(f"hospital{number},{case},{split}")
    (folder / "index.csv").write_text("\n".join(index) + "\n")
    path = folder / "federation.yaml"
    write(FederationFile(sources=(Source(path=folder),), labels={"polyp": (1,)}), path)
    return path


def settings(federation: Path, options: argparse.Namespace) -> dict[str, Any]:
    small = options.small
    return {
        "name": "many-cells",
        "rounds": options.rounds or (2 if small else 40),
        "local_epochs": options.epochs,
        "batch_size": 8,
        "data": {"federation": str(federation)},
        "model": {"name": "unet2d", "base_filters": 4 if small else 16, "levels": 3 if small else 5},
        "optimizer": {"name": "adam", "learning_rate": 1e-3},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
        "sweep": {"methods": METHODS[: options.methods], "seeds": options.seeds},
    }


def call(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "wardround", *map(str, arguments)]


def measure(config: Path, folder: Path, jobs: str) -> dict[str, Any]:
    """`wardround compare` from its start to its end."""
    began = time.perf_counter()
    first = None
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        process = subprocess.Popen(
            call("compare", config, "-o", folder, "--jobs", jobs), stdout=subprocess.DEVNULL, stderr=log
        )
        while process.poll() is None:
            if first is None and any(path.stat().st_size for path in folder.glob("cells/*/records.jsonl")):
                first = time.perf_counter() - began
            time.sleep(0.02)
        seconds = time.perf_counter() - began
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        raise SystemExit("\n".join(["wardround compare failed:", *lines[-5:]]))
    cells = json.loads((folder / "comparison.json").read_text())["cells"]
    return {
        "jobs": next((line for line in lines if " at a time: " in line), jobs),
        "seconds": seconds,
        "cells": len(cells),
        "seconds_a_cell": seconds / len(cells),
        "first_round_s": first,
    }


def measure_own_processes(folder: Path) -> float:
    """The cells of a comparison again, each as `wardround train` does it."""
    began = time.perf_counter()
    for path in sorted(folder.glob("cells/*.yaml")):
        command = call("train", path, "--quiet", "--no-report", "--overwrite")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="32x32, 60 images, 2 rounds, 3 methods, 2 seeds")
    parser.add_argument("--jobs", nargs="+", default=["auto"])
    parser.add_argument("--methods", type=int, help="how many of the seven")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--own-processes", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.methods = options.methods or (3 if options.small else 7)
    options.seeds = options.seeds or (2 if options.small else 6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
        subprocess.run([sys.executable, "-c", "import wardround.api, wardround.comparison.run"], check=True)
        small = [14, 13, 12, 9, 7, 5]
        federation = make_hospitals(
            folder / "data", small if options.small else TRAINING, 32 if options.small else 160
        )
        began = time.perf_counter()
        subprocess.run(call("data", "prepare", federation), check=True, stdout=subprocess.DEVNULL)
        print(f"prepared in {time.perf_counter() - began:.1f} s", flush=True)
        config = folder / "sweep.yaml"
        config.write_text(yaml.safe_dump(settings(federation, options)))
        rows = []
        for jobs in options.jobs:
            rows.append(measure(config, folder / f"jobs-{jobs}", jobs))
            print(
                {key: round(v, 2) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True
            )
        found: dict[str, Any] = {"rows": rows}
        if options.own_processes:
            alone = measure_own_processes(folder / f"jobs-{options.jobs[0]}")
            found |= {"own_processes_s": alone, "ratio": rows[0]["seconds"] / alone}
            print(f"each in a process of its own, one at a time: {alone:.1f} s", flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
