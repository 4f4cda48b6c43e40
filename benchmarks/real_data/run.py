"""The four papers' methods on real multi-centre data, with fixed splits.

    python benchmarks/real_data/run.py polyp4 --data DATA --out runs/real     # 2D, four sources of polyps
    python benchmarks/real_data/run.py lgg3d --data DATA --out runs/real      # 3D, four hospitals, glioma

DATA holds one folder for each set, with its index.csv. Protocol of polyp4: FedEvi's
(16-filter U-Net, Adam 1e-3, 0.99 a round, optimizer state kept, two local epochs, batch 8, flips), 160x160.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from wardround.batch import run_all
from wardround.data.federation_file import FederationFile, Source, write

RELEASED = {"name": "evidential", "cap": 80.0, "cap_kind": "hard", "dice_mode": "plug_in"}

RUNS: dict[str, dict[str, Any]] = {
    "fedavg-dice": {"method": {"name": "fedavg"}, "objective": {"name": "dice"}},
    "fedavg-evidential": {"method": {"name": "fedavg"}, "objective": {"name": "evidential"}},
    "fedevi": {"method": {"name": "fedevi"}},
    "fedevi-as-released": {
        "method": {"name": "fedevi", "reliability": "ratio", "floor_renormalise": False},
        "objective": RELEASED,
    },
    "fedavg-released-objective": {"method": {"name": "fedavg"}, "objective": RELEASED},
    "fedevi-released-objective": {"method": {"name": "fedevi"}, "objective": RELEASED},
    "fedevi-ratio": {"method": {"name": "fedevi", "reliability": "ratio"}},
    "fedevi-plug-in": {
        "method": {"name": "fedevi"},
        "objective": {"name": "evidential", "dice_mode": "plug_in"},
    },
    "aaw": {"method": {"name": "aaw"}},
    "safcf": {"method": {"name": "safcf"}},
    "fsf3a": {"method": {"name": "fsf3a"}},
    "safcf-guarded": {"method": {"name": "safcf"}, "objective": {"contrast": "guarded"}},
    "safcf-literal": {"method": {"name": "safcf"}, "objective": {"contrast": "literal"}},
    "safcf-dice": {"method": {"name": "safcf"}, "objective": {"name": "dice"}},
    "fedavg-cfsl": {"method": {"name": "fedavg"}, "objective": {"name": "cfsl"}},
    "local": {"method": {"name": "local"}, "objective": {"name": "dice"}},
    "centralised": {"method": {"name": "centralised"}, "objective": {"name": "dice"}},
}


def federation(folder: Path, out: Path) -> str:
    """A federation.yaml over the folder of a set, whose index.csv fixes the split."""
    path = out / f"{folder.name}.yaml"
    sources = (Source(path=folder.resolve()),)
    write(FederationFile(sources=sources, labels={"lesion": (1,)}), path, overwrite=True)
    return str(path)


def polyp4(data: Path, out: Path, rounds: int, side: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "local_epochs": 2,
        "batch_size": 8,
        "data": {
            "federation": federation(data / "polyp4", out),
            "prepare": {"size": [side, side], "normalise": "maximum"},
        },
        "model": {"name": "unet2d_fedevi"},
        "optimizer": {
            "learning_rate": 1e-3,
            "betas": [0.9, 0.99],
            "weight_decay": 1e-5,
            "schedule": {"name": "exponential", "gamma": 0.99},
            "state": "keep",
        },
        "augmentation": {"flip": 0.5, "intensity": 0.0},
    }


def lgg3d(data: Path, out: Path, rounds: int, side: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "local_epochs": 2,
        "batch_size": 4,
        "data": {
            "federation": federation(data / "lgg3d", out),
            "prepare": {"size": [side, side, 2 * side // 3], "orientation": None},
        },
        "model": {"name": "unet3d", "base_filters": 16},
        "optimizer": {
            "learning_rate": 1e-3,
            "schedule": {"name": "polynomial"},
            "state": "keep",
        },
        "augmentation": {"flip": 0.5, "intensity": 0.1},
    }


SETS = {"polyp4": (polyp4, 20, 160), "lgg3d": (lgg3d, 20, 96)}


class Lines:
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        if done != self.seen.get(name) and done % 5 == 0:
            self.seen[name] = done
            print(f"{name}: {done} of {rounds}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--only", help="names of runs, with commas; default all")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--side", type=int)
    parser.add_argument("--seeds", default="1", help="with commas")
    parser.add_argument("--model", default="best", choices=["best", "last"], help="which round is tested")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    build, rounds, side = SETS[options.set]
    base = build(options.data, options.out, options.rounds or rounds, options.side or side)
    chosen = options.only.split(",") if options.only else list(RUNS)
    runs = {
        f"{options.set}-{name}-seed{seed}": {
            **base,
            **RUNS[name],
            "name": f"{name}-seed{seed}" if "," in options.seeds else name,
            "seed": int(seed),
            "evaluate": {"metrics": ["dice", "hd95"], "overlays": 2, "model": options.model},
            "compute": {"precision": options.precision, "threads": options.threads},
        }
        for name in chosen
        for seed in options.seeds.split(",")
    }
    results = run_all(runs, options.out, jobs=options.jobs, watch=Lines(), keep_going=True)
    tables = {}
    for name, result in results.items():
        test = result.summary["test"]
        tables[result.config.name] = {
            metric: {c: e["mean"] for c, e in test[metric]["clients"].items()}
            | {"mean": test[metric]["mean"]}
            for metric in ("dice", "hd95")
        } | {
            "best_round": result.summary["best_round"],
            "seconds_a_round": round_seconds(result),
            "run": name,
        }
    if options.json:
        print(json.dumps(tables))
        return
    for metric in ("dice", "hd95"):
        columns = list(next(iter(tables.values()))[metric])
        print(f"\n| {options.set}, {metric} | " + " | ".join(columns) + " | s a round |")
        print("|---" * (len(columns) + 2) + "|")
        for name, row in tables.items():
            cells = [
                f"{row[metric][c]:.4f}" if metric == "dice" else f"{row[metric][c]:.2f}" for c in columns
            ]
            print(f"| {name} | " + " | ".join(cells) + f" | {row['seconds_a_round']:.1f} |")


def round_seconds(result: Any) -> float:
    seconds = sorted(record["seconds"] for record in result.records)
    return float(seconds[len(seconds) // 2])


if __name__ == "__main__":
    main()
