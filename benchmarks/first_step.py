"""From the start of a run to its first training step, with an empty kernel cache and with the one it leaves.

The same run is started in fresh processes: first with no compiled kernels (`cold`), then twice with those of
the first (`warm`). Each line says after how many seconds Python had imported everything, the run had opened
its data and its device, the first step was done, and the first round. With `auto`, the second run may choose
to compile where the first did not; the third then has those kernels too.

Python's bytecode is kept in a folder that an unmeasured first run fills. pip leaves bytecode beside what it
installs; a machine whose packages came another way would compile PyTorch's sources in every process, which
takes 3.6 s and is not what a user sees.

    python benchmarks/first_step.py --data DATA/polyp4      # GPU, about four minutes
    python benchmarks/first_step.py --modes auto --rounds 1 # synthetic hospitals, 90 s; also on the CPU
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

import yaml
from fedevi_round import federation

RUN = """
import json, sys, time
times = {"python": time.time()}
class Clock:
    def on_start(self, config, first_round): times["ready"] = time.time()
    def on_round(self, round, present): ...
    def on_progress(self, client, step, steps): times.setdefault("first_step", time.time())
    def on_record(self, record): times.setdefault("first_round", time.time())
import wardround.cli
from wardround.cli.common import pause_gc
with pause_gc():
    from wardround.api import Result
    from wardround.config_file import load_config
    from wardround.engine.experiment import Experiment
    config = load_config(sys.argv[1])
times["imported"] = time.time()
Experiment(config, listener=Clock()).run(overwrite=True)
times["end"] = time.time()
print(json.dumps(times))
"""
EVENTS = ("imported", "ready", "first_step", "first_round", "end")


def settings(folder: Path, options: argparse.Namespace, compile: str) -> dict[str, Any]:
    data: dict[str, Any] = {"phantom": {"hospitals": 4, "cases": 14, "size": 64}}
    if options.data is not None:
        prepare = {"size": [160, 160], "normalise": "maximum"}
        data = {"federation": federation(options.data, folder), "prepare": prepare}
    return {
        "name": "first-step",
        "output": str(folder / "run"),
        "rounds": options.rounds,
        "local_epochs": 2,
        "data": data,
        "model": {"name": "unet2d_fedevi", "base_filters": 16},
        "method": {"name": "fedevi"},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"compile": compile, "device": options.device},
    }


def start(values: dict[str, Any], cache: Path, bytecode: Path) -> dict[str, Any]:
    """One run in a process of its own: seconds from its start to each event, and how it computed."""
    folder = Path(values["output"])
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    hidden = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        env={**environment, "WARDROUND_CACHE": str(cache), "PYTHONPYCACHEPREFIX": str(bytecode)},
        stdout=subprocess.PIPE,
        check=True,
    )
    times = json.loads(done.stdout.splitlines()[-1])
    chosen = json.loads((folder / "environment.json").read_text())["compute"]
    seconds = {event: round(times[event] - started, 2) for event in EVENTS}
    return {**seconds, "compile": chosen["compile"], "why": chosen["why"], "device": chosen["device"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of polyp4; without it, synthetic hospitals")
    parser.add_argument("--modes", nargs="+", default=["auto", "graphs", "full"], help="of compute.compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = settings(folder, options, "off") | {"rounds": 1}
        bytecode = folder / "bytecode"
        start(prepared, folder / "unused", bytecode)  # cases are prepared, bytecode written, files read
        for mode in options.modes:
            values = settings(folder, options, mode)
            rows[mode] = [start(values, folder / f"cache-{mode}", bytecode) for _ in range(3)]
            for kernels, row in zip(("cold", "warm", "warm"), rows[mode], strict=True):
                times = ", ".join(f"{event.replace('_', ' ')} {row[event]:.1f} s" for event in EVENTS)
                print(f"{mode:7} {kernels}  {times}  ({row['compile']}: {row['why']})", flush=True)
    if options.json:
        first = rows[options.modes[0]]
        print(json.dumps({"ratio": first[-1]["first_step"] / first[0]["first_step"], "rows": rows}))


if __name__ == "__main__":
    main()
