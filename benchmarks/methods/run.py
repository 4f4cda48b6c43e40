"""Every method at one budget: Dice of each client, mean, worst, seconds a round, bytes against FedAvg.

    python benchmarks/methods/run.py phantom                       # synthetic hospitals, CPU, minutes
    python benchmarks/methods/run.py polyp4 --data DATA            # four sources of polyps, a GPU

Each method trains with its own default settings and objective from the same seed: this table shows that
all of them run and what they cost, not which is best. A method whose parameters equal FedAvg's to the last
byte is marked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wardround.api import Result
from wardround.batch import run_all
from wardround.data.federation_file import FederationFile, Source, write
from wardround.methods import METHODS

PHANTOM = {
    "rounds": 12,
    "batch_size": 8,
    "data": {"phantom": {"hospitals": 4, "size": 48, "cases": [30, 24, 16, 10]}, "proxy": "west"},
    "model": {"name": "unet2d", "base_filters": 8, "levels": 3, "norm": "batch"},
    "optimizer": {"learning_rate": 3e-3},
    "evaluate": {"metrics": ["dice"], "overlays": 0, "model": "last"},
    "compute": {"threads": 1},
}


def federation(folder: Path, out: Path) -> str:
    """A federation.yaml over the folder of a set, whose index.csv fixes the split."""
    path = out / f"{folder.name}.yaml"
    sources = (Source(path=folder.resolve()),)
    write(FederationFile(sources=sources, labels={"polyp": (1,)}), path, overwrite=True)
    return str(path)


def polyp4(data: Path, out: Path, rounds: int, side: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "local_epochs": 1,
        "batch_size": 8,
        "data": {
            "federation": federation(data / "polyp4", out),
            "prepare": {"size": [side, side], "normalise": "maximum"},
        },
        "model": {"name": "unet2d_fedevi", "norm": "batch"},
        "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.99], "weight_decay": 1e-5},
        "augmentation": {"flip": 0.5, "intensity": 0.0},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "model": "last", "every": rounds},
        "compute": {"threads": 1, "precision": "tf32"},
    }


def settings_of(name: str, polyps: bool) -> dict[str, Any]:
    """Defaults, but for what a method cannot do without."""
    settings: dict[str, Any] = {"name": name}
    if name == "fedlaw" and polyps:
        settings["proxy"] = "clients"  # no cases at the server in this set
    return settings


class Lines:
    def __init__(self) -> None:
        self.done: set[str] = set()

    def on_rounds(self, name: str, done: int, rounds: int) -> None:
        if done == rounds and name not in self.done:
            self.done.add(name)
            print(name, flush=True)


def row(name: str, result: Result, plain: Result | None) -> dict[str, Any]:
    test = result.summary["test"]["dice"]
    exchanges = [entry for record in result.records for entry in record["exchanges"]]
    total = sum(sum(e["bytes_down"].values()) + sum(e["bytes_up"].values()) for e in exchanges)
    return {
        "method": METHODS[name].title,
        "name": name,
        **{client: entry["mean"] for client, entry in test["clients"].items()},
        "mean": test["mean"],
        "worst": min(entry["mean"] for entry in test["clients"].values()),
        "seconds": sum(record["seconds"] for record in result.records) / len(result.records),
        "bytes": total,
        "same": plain is not None and name != "fedavg" and result.params_sha256 == plain.params_sha256,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=["phantom", "polyp4"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--only", help="names of methods, with commas; default all")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    polyps = options.set == "polyp4"
    base = polyp4(options.data, options.out, options.rounds or 12, options.side) if polyps else dict(PHANTOM)
    if options.rounds:
        base["rounds"] = options.rounds
    names = options.only.split(",") if options.only else list(METHODS)
    runs = {
        name: {**base, "name": name, "seed": options.seed, "method": settings_of(name, polyps)}
        for name in names
    }
    results = run_all(runs, options.out / options.set, jobs=options.jobs, watch=Lines(), keep_going=True)
    plain = results.get("fedavg")
    rows = [row(name, result, plain) for name, result in results.items()]
    if options.json:
        print(json.dumps(rows))
        return
    unit = next((entry["bytes"] for entry in rows if entry["name"] == "fedavg"), 0)
    clients = [
        key for key in rows[0] if key not in ("method", "name", "mean", "worst", "seconds", "bytes", "same")
    ]
    print("| method | " + " | ".join(clients) + " | mean | worst | s a round | bytes, FedAvg = 1 |")
    print("|---|" + "---:|" * (len(clients) + 4))
    for entry in rows:
        dice = " | ".join(f"{entry[key]:.3f}" for key in [*clients, "mean", "worst"])
        traffic = f"{entry['bytes'] / unit:.2f}" if unit else "-"
        mark = " (the same bytes as FedAvg)" if entry["same"] else ""
        print(f"| {entry['method']}{mark} | {dice} | {entry['seconds']:.2f} | {traffic} |")
    for name in set(names) - set(results):
        print(f"{name} failed")


if __name__ == "__main__":
    main()
