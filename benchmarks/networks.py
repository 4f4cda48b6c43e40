"""Networks of the papers on real volumes: lgg3d, four hospitals train, under FedAvg and AAW.

    python benchmarks/networks.py --data DATA --out runs/networks        # GPU, about two minutes
    python benchmarks/networks.py --small                               # synthetic hospitals, also on the CPU

DATA holds `lgg3d` with its index.csv. The budget is the same for all: 10 rounds of two
epochs, batch 4, volumes of 64x64x42, one seed, what `auto` computes with. Dice is that of the test cases with
the best round's model; seconds a round are medians, validation included; memory is the device's peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import wardround as wr
from wardround.data.federation_file import FederationFile, Source, write
from wardround.engine.networks import build_model

NETWORKS: dict[str, dict[str, Any]] = {
    "unet3d": {"name": "unet3d", "base_filters": 16},
    "synergynet": {"name": "synergynet"},
    "autoencoder": {"name": "autoencoder", "base_filters": 16},
}
METHODS = ("fedavg", "aaw")


def federation(folder: Path, out: Path) -> str:
    """A federation.yaml over the folder of a set, whose index.csv fixes the split."""
    path = out / f"{folder.name}.yaml"
    sources = (Source(path=folder.resolve()),)
    write(FederationFile(sources=sources, labels={"tumour": (1,)}), path, overwrite=True)
    return str(path)


def settings(options: argparse.Namespace, folder: Path, network: str, method: str) -> dict[str, Any]:
    side = options.side
    model = NETWORKS[network]
    data: dict[str, Any]
    if options.small:
        data = {"phantom": {"hospitals": 2, "cases": 6, "dimensions": 3, "size": 16}}
        model = {**model, "base_filters": 4, "levels": 2}
    else:
        prepare = {"size": [side, side, 2 * side // 3], "orientation": None}
        data = {"federation": federation(options.data, folder), "prepare": prepare}
    return {
        "name": f"{network}-{method}",
        "output": str(folder / f"{network}-{method}"),
        "rounds": options.rounds,
        "local_epochs": 2,
        "batch_size": 4,
        "data": data,
        "model": model,
        "method": {"name": method},
        "objective": {"name": "dice_bce"},
        "optimizer": {"learning_rate": 1e-3, "state": "keep", "schedule": {"name": "polynomial"}},
        "augmentation": {"flip": 0.5, "intensity": 0.1},
        "evaluate": {"metrics": ["dice", "hd95"], "overlays": 0},
    }


def measured(options: argparse.Namespace, folder: Path, network: str, method: str) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    result = wr.run(settings(options, folder, network, method), overwrite=True)
    test = result.summary["test"]
    return {
        "network": network,
        "parameters": sum(p.numel() for p in build_model(result.config).parameters()),
        "method": method,
        "dice": test["dice"]["mean"],
        "worst": test["dice"]["worst"][1],
        "hd95": test["hd95"]["mean"],
        "best_round": result.summary["best_round"],
        "seconds_a_round": statistics.median(r["seconds"] for r in result.records[1:]),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of lgg3d")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.data is None and not options.small:
        parser.error("give --data, or --small")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for network in NETWORKS:
            for method in METHODS:
                row = measured(options, options.out or Path(folder), network, method)
                rows.append(row)
                shown = [f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
                print("   ".join(shown), flush=True)
    if options.json:
        quickest, slowest = (f(row["seconds_a_round"] for row in rows) for f in (min, max))
        print(json.dumps({"ratio": slowest / quickest, "rows": rows}))


if __name__ == "__main__":
    main()
