"""What each upload option saves in bytes and costs in Dice: the same federated run, once for each option.

Phantom hospitals and a small U-Net under FedAvg (or another method), trained from the same seed with every
`traffic.upload` and `traffic.compress`. Bytes are what all hospitals together send in a round of training;
Dice is the mean over hospitals of the test cases, and its difference to full uploads is paired by seed. The
spread of full uploads over seeds says which differences mean anything. Lossless options must end with the
same parameters as full ones, to the bit; the last column tells.

    python benchmarks/traffic.py                                  # 3 hospitals, 10 rounds, 1 seed
    python benchmarks/traffic.py --seeds 3 --optimizer sgd
    python benchmarks/traffic.py --rounds 2 --cases 12 --size 16 --filters 4 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import wardround as wr
from wardround.tables import Table

UPLOADS = ["full", "delta", "float16", "delta_float16"]
COMPRESSIONS = ["none", "zlib"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam", "learning_rate": 5e-3},
    "sgd": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9},
}


def settings(options: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    return {
        "name": "traffic",
        "output": str(folder),
        "seed": seed,
        "rounds": options.rounds,
        "local_epochs": options.epochs,
        "batch_size": 4,
        "data": {"phantom": {"hospitals": options.hospitals, "size": options.size, "cases": options.cases}},
        "model": {"name": "unet2d", "base_filters": options.filters, "levels": options.levels},
        "method": {"name": options.method},
        "optimizer": OPTIMIZERS[options.optimizer],
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"workers": 1},
    }


def one_run(options: argparse.Namespace, upload: str, compress: str, seed: int) -> dict[str, Any]:
    """Bytes up in a round, Dice, seconds and the final parameters' SHA-256."""
    with tempfile.TemporaryDirectory() as folder:
        config = wr.load_config(
            settings(options, Path(folder) / "run", seed),
            [f"traffic.upload={upload}", f"traffic.compress={compress}"],
        )
        started = time.perf_counter()
        result = wr.run(config)
        seconds = time.perf_counter() - started
        assert result.test is not None
        return {
            "bytes": statistics.fmean(bytes_up(record) for record in result.records),
            "dice": result.test.value("dice"),
            "seconds": seconds,
            "sha256": result.params_sha256,
        }


def bytes_up(record: dict[str, Any]) -> int:
    """What all hospitals sent in a round, as replies to "train"."""
    exchanges = (entry for entry in record["exchanges"] if entry["task"] == "train")
    return sum(sum(entry["bytes_up"].values()) for entry in exchanges)


def summary(
    upload: str, compress: str, runs: list[dict[str, Any]], full: list[dict[str, Any]]
) -> dict[str, Any]:
    """An option over all seeds, beside full uploads of the same seeds."""
    differences = [run["dice"] - other["dice"] for run, other in zip(runs, full, strict=True)]
    bytes_full = statistics.fmean(run["bytes"] for run in full)
    mean_bytes = statistics.fmean(run["bytes"] for run in runs)
    return {
        "upload": upload,
        "compress": compress,
        "bytes up a round": round(mean_bytes),
        "of full": mean_bytes / bytes_full,
        "Dice": statistics.fmean(run["dice"] for run in runs),
        "difference to full": statistics.fmean(differences),
        "largest difference": max(differences, key=abs),
        "seconds": statistics.median(run["seconds"] for run in runs),
        "same parameters": all(a["sha256"] == b["sha256"] for a, b in zip(runs, full, strict=True)),
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All options; those of one seed follow each other, so that a noisy machine disturbs them alike."""
    choices = [(upload, compress) for upload in UPLOADS for compress in COMPRESSIONS]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {choice: [] for choice in choices}
    one_run(
        argparse.Namespace(**{**vars(options), "rounds": 1}), "full", "none", seed=0
    )  # warms everything up
    for seed in range(options.seeds):
        for choice in choices:
            runs[choice].append(one_run(options, *choice, seed=seed))
    full = runs["full", "none"]
    rows = [summary(*choice, runs[choice], full) for choice in choices]
    scores = [run["dice"] for run in full]
    return {
        "ratio": min(row["of full"] for row in rows if row["same parameters"]),
        "spread of full over seeds": statistics.stdev(scores) if len(scores) > 1 else None,
        "options": rows,
    }


def table(result: dict[str, Any], options: argparse.Namespace) -> Table:
    rows = result["options"]
    cells = [
        [
            row["upload"],
            row["compress"],
            f"{row['bytes up a round']:,}",
            f"{row['of full']:.3f}",
            f"{row['Dice']:.4f}",
            f"{row['difference to full']:+.5f}",
            f"{row['largest difference']:+.5f}",
            f"{row['seconds']:.1f}",
            "yes" if row["same parameters"] else "no",
        ]
        for row in rows
    ]
    title = (
        f"{options.method}, {options.optimizer}, {options.hospitals} hospitals, {options.rounds} rounds, "
        f"seeds 0 to {options.seeds - 1}"
    )
    spread = result["spread of full over seeds"]
    caption = "" if spread is None else f"Dice of full uploads over seeds: standard deviation {spread:.4f}."
    return Table(title, list(rows[0]), cells, caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hospitals", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2, help="local epochs of a round")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", type=int, default=40, help="of each hospital; 60 %% train")
    parser.add_argument("--size", type=int, default=32, help="pixels a side")
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--optimizer", default="adam", choices=list(OPTIMIZERS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measured(options)
    if options.json:
        print(json.dumps(result))
        return
    shown = table(result, options)
    print(f"{shown.title}\n\n{shown.markdown()}\n\n{shown.caption}".strip())


if __name__ == "__main__":
    main()
