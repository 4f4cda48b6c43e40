"""Dice against epsilon: what differential privacy costs, at client and case level.

    python benchmarks/privacy/dice.py phantom --out DIR
    python benchmarks/privacy/dice.py polyp --data DATA --out DIR      # DATA holds polyp4 with its index.csv
    python benchmarks/privacy/dice.py phantom --levels shared --epsilons inf 8 --out DIR

Every cell is a FedAvg run of four hospitals; `inf` is the same run without privacy. `shared` is the client
level with secure summation, where the sum of the updates has the noise once. The model of the last round is
scored on the test cases of all hospitals: the mean over hospitals of the mean Dice of their cases.
Finished cells are kept in DIR, so that a run that was stopped goes on; the table is printed from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from wardround.config_file import load_config
from wardround.data.federation_file import FederationFile, Source, write
from wardround.engine.experiment import Experiment
from wardround.files import write_json
from wardround.privacy.words import MEASURED

EPSILONS = ("inf", "16", "8", "4", "1")
LEVELS = ("case", "client", "shared")
TITLES = {"phantom": "phantoms of 16 x 16", "polyp": "colonoscopy frames of 32 x 32"}


def describe_run(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The settings that all cells share."""
    data: dict[str, Any] = {
        "phantom": {"hospitals": 4, "size": options.size, "cases": options.cases, "seed": 1}
    }
    if options.set == "polyp":
        sources = (Source(path=(options.data / "polyp4").resolve()),)
        write(FederationFile(sources=sources, labels={"polyp": (1,)}), out / "federation.yaml")
        data = {"federation": str(out / "federation.yaml"), "prepare": {"size": [options.size] * 2}}
    return {
        "name": "privacy",
        "rounds": options.rounds,
        "local_steps": options.steps,
        "batch_size": options.batch,
        "objective": {"name": options.objective},
        "data": data,
        "model": {"name": "unet2d", "base_filters": options.filters, "levels": options.depth},
        "evaluate": {
            "every": options.rounds,
            "calibrate": False,
            "overlays": 0,
            "metrics": ["dice"],
            "model": "last",
        },
        "compute": {"threads": 1, "workers": 1, "device": "cpu"},
    }


def run_cell(options: argparse.Namespace, level: str, epsilon: str, seed: int) -> dict[str, Any]:
    """One run; Dice, what it spent, and how long it took."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = describe_run(options, Path(folder))
        settings |= {"seed": seed, "output": str(Path(folder) / "run")}
        settings["privacy"] = {"secure_sum": level == "shared"}
        if epsilon != "inf":
            settings["privacy"] |= {
                "level": "case" if level == "case" else "client",
                "epsilon": float(epsilon),
                "scores": "show",
                "clip": options.case_clip if level == "case" else options.client_clip,
            }
        private = level == "case" and epsilon != "inf"
        settings["optimizer"] = {
            "name": options.optimizer,
            "learning_rate": options.private_rate if private else options.rate,
            "momentum": 0.9 if options.optimizer == "sgd" else 0.0,
        }
        outcome = Experiment(load_config(settings)).run()
        record = json.loads((Path(folder) / "run" / "records.jsonl").read_text().splitlines()[-1])
    assert outcome.test is not None
    told = record.get("privacy", {})
    return {
        "dice": outcome.test.value("dice"),
        "spent": max((entry["epsilon"] for entry in told.values()), default=None),
        "seconds": round(time.perf_counter() - started, 1),
    }


def name_cell(level: str, epsilon: str) -> str:
    """Without privacy the levels are the same run, but for the secure sum."""
    return f"{level if epsilon != 'inf' or level == 'shared' else 'none'}/{epsilon}"


def print_table(found: dict[str, dict[str, Any]], seeds: list[int]) -> None:
    print(
        "| epsilon | " + " | ".join(f"{level} level" for level in LEVELS) + " |\n|---|" + "---|" * len(LEVELS)
    )
    for epsilon in EPSILONS:
        cells = []
        for level in LEVELS:
            keys = [f"{name_cell(level, epsilon)}/{seed}" for seed in seeds]
            dice = [found[key]["dice"] for key in keys if key in found]
            spread = statistics.stdev(dice) if len(dice) > 1 else 0.0
            cells.append(f"{statistics.mean(dice):.3f} ± {spread:.3f} ({len(dice)})" if dice else "")
        print(f"| {epsilon} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=("phantom", "polyp"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epsilons", nargs="+", default=EPSILONS)
    parser.add_argument("--levels", nargs="+", default=LEVELS)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--filters", type=int, default=4)
    parser.add_argument("--levels-of-unet", dest="depth", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--objective", default="dice")
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--private-rate", type=float, default=0.03)
    parser.add_argument("--case-clip", type=float, default=0.2)
    parser.add_argument("--client-clip", type=float, default=0.1)
    parser.add_argument("--write", action="store_true", help="put the means where wardround plan finds them")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / f"{options.set}.json"
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for seed in options.seeds:
        for epsilon in options.epsilons:
            for level in options.levels:
                key = f"{name_cell(level, epsilon)}/{seed}"
                if key not in found:
                    found[key] = run_cell(options, level, epsilon, seed)
                    kept.write_text(json.dumps(found, indent=1) + "\n")
                    print(key, found[key], flush=True)
    print_table(found, options.seeds)
    if options.write:
        write_measured(options, found)


def write_measured(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Put means, and how many runs are behind each, into the file that `wardround plan` reads."""
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    table: dict[str, dict[str, Any]] = known.get(TITLES[options.set], {})
    for level in ("none", *LEVELS):
        for epsilon in EPSILONS:
            dice = [cell["dice"] for key, cell in found.items() if key.startswith(f"{level}/{epsilon}/")]
            if dice:
                cell = {"dice": round(statistics.mean(dice), 3), "runs": len(dice)}
                table.setdefault(level, {})[epsilon] = cell
    write_json(MEASURED, known | {TITLES[options.set]: table})


if __name__ == "__main__":
    main()
