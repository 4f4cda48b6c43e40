"""What a whole run takes alone on its machine, ours beside nnU-Net's, from a few of its steps.

    python benchmarks/autopilot/seconds.py --data DATA --out runs/seconds    # writes seconds.json
    python benchmarks/autopilot/summarise.py benchmarks/autopilot --write

One run at a time, with the plan of the whole run. From the start of the program to the scores of all test
cases it is measured as it is; the steps, and our validations, that were left out are added at the pace of
those that were not, without the first, in which libraries choose their algorithms. Our seconds hold the
preparation of the cases, nnU-Net's do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import yaml
from run import QUICKER, STEPS, Runner, count_clients, describe_device, find_commit

from wardround.files import write_json

FOUND = Path(__file__).parent / "seconds.json"
SHORT = 200  # steps of all clients together; nnU-Net makes 20 epochs of them
WARM_UP_ROUNDS = 3


def time_ours(runner: Runner, name: str) -> dict[str, float] | None:
    """The federated run: fewer rounds, two of them with a validation."""
    folder = runner.work(name)
    plan = yaml.safe_load((folder / "run.yaml").read_text())
    clients = count_clients(folder / f"{name}.yaml")
    of_round = plan["local_steps"] * clients
    rounds = max(2 * WARM_UP_ROUNDS, round(SHORT / of_round))
    told = (
        *("compute.workers=1", f"output={folder / 'short'}", *QUICKER, *runner.options.set),
        *(f"rounds={rounds}", f"evaluate.every={rounds // 2}"),
    )
    words = [word for setting in told for word in ("--set", setting)]
    line = ["train", str(folder / "run.yaml"), *words, "--overwrite", "--no-report", "--quiet"]
    started = time.perf_counter()
    if runner.call(name, "short", "wardround", *line) is None:
        return None
    measured = time.perf_counter() - started
    records = [json.loads(line) for line in (folder / "short" / "records.jsonl").read_text().splitlines()]
    later = records[WARM_UP_ROUNDS:]
    plain = statistics.fmean(entry["seconds"] for entry in later if not entry.get("validation"))
    checked = statistics.fmean(entry["seconds"] for entry in later if entry.get("validation"))
    validations = plan["rounds"] // plan["evaluate"]["every"] - 2
    left = (plan["rounds"] - rounds) * plain + validations * (checked - plain)
    return {
        "steps": plan["rounds"] * of_round,
        "measured_steps": rounds * of_round,
        "step_seconds": plain / of_round,
        "measured_seconds": measured,
        "seconds": measured + left,
    }


def time_peer(runner: Runner, name: str, steps: int) -> dict[str, float] | None:
    started = time.perf_counter()
    found = runner.peer(name, "nnunet-short", "train", runner.loading, "--steps", str(SHORT))
    measured = time.perf_counter() - started
    if found is None:
        return None
    epochs = found["seconds"]["epochs"]
    step = statistics.fmean(epochs[1:]) / (found["steps"] / len(epochs))  # its validation included
    return {
        "steps": steps,
        "measured_steps": found["steps"],
        "step_seconds": step,
        "measured_seconds": measured,
        "seconds": measured + (steps - found["steps"]) * step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/seconds"))
    parser.add_argument("--results", type=Path, default=FOUND, help="default %(default)s")
    parser.add_argument("--sets", default=",".join(STEPS), help="with commas")
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything")
    parser.add_argument("--set", action="append", default=[], help="a setting of wardround's runs")
    parser.add_argument("--most", type=int, help="test cases that nnU-Net predicts, for a trial; default all")
    options = parser.parse_args()
    vars(options).update(parts=["federated", "nnunet"], steps=STEPS, jobs=1)
    place = {"device": describe_device(), "commit": find_commit()}
    results: Path = options.results.resolve()
    options.results = None
    runner = Runner(options)
    found: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    for name in options.sets.split(","):
        runner.set_up(name)
        for part in options.parts:
            took = time_peer(runner, name, STEPS[name]) if part == "nnunet" else time_ours(runner, name)
            if took is not None:  # in place of what was measured before
                found = [entry for entry in found if (entry["set"], entry["part"]) != (name, part)]
                found.append({"set": name, "part": part, **took, **place})
                print(f"{name} {part}: {took['seconds']:.0f} s", flush=True)
            write_json(results, found)


if __name__ == "__main__":
    main()
