"""A round of FedEvi at the size of its authors' script: seconds a round, and what quick arithmetic costs.

polyp4 at 160x160, 16-filter U-Net, batch 8, 4 clients, 2 epochs a round, validation after every round. The
authors' script takes 10 to 12 s a round on an H200. Here the same run is done with several compute settings.
Seconds are medians after the first rounds, scoring and validation included; Dice is the last round's, on
validation cases. One run's Dice says little: the same seed ends 0.01 higher or lower, since a GPU adds up in
any order. So with several seeds the mean difference of the first and the last mode is shown.

    python benchmarks/fedevi_round.py --data DATA/polyp4        # GPU, about two minutes
    python benchmarks/fedevi_round.py --data DATA/polyp4 --modes full float32-graphs --seeds 1 2 3 4 5 6
    python benchmarks/fedevi_round.py --small                   # synthetic hospitals, also on the CPU
    python benchmarks/fedevi_round.py --data DATA/polyp4 --modes auto full --profile

With --profile three steady rounds of each mode are watched by torch.profiler and three more by cProfile:
where the host spends its time, what the GPU runs, and how often the host waits for it. Both slow a round
down, so the seconds of such a run are not those of the table.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import wardround as wr
from wardround.data.federation_file import FederationFile, Source, write
from wardround.engine.outcome import SilentListener

STEADY = 11  # the KL's weight rises for ten rounds
WATCHED = 3  # rounds of each profile


def federation(folder: Path, out: Path) -> str:
    """A federation.yaml over the folder of a set, whose index.csv fixes the split."""
    path = out / f"{folder.name}.yaml"
    sources = (Source(path=folder.resolve()),)
    write(FederationFile(sources=sources, labels={"polyp": (1,)}), path, overwrite=True)
    return str(path)


def settings(folder: Path, options: argparse.Namespace, seed: int, compute: dict[str, Any]) -> dict[str, Any]:
    small = options.small
    data: dict[str, Any] = {"phantom": {"hospitals": 4, "cases": 10, "size": 32}}
    if not small:
        prepare = {"size": [160, 160], "normalise": "maximum"}
        data = {"federation": federation(options.data, folder.parent), "prepare": prepare}
    return {
        "name": "fedevi",
        "seed": seed,
        "output": str(folder),
        "rounds": options.rounds,
        "local_epochs": 2,
        "batch_size": 8,
        "data": data,
        "model": {"name": "unet2d_fedevi", "base_filters": 4 if small else 16, "levels": 3 if small else 5},
        "method": {"name": "fedevi"},
        "optimizer": {"name": "adam", "learning_rate": 1e-3},
        "evaluate": {"every": 1, "metrics": ["dice"], "overlays": 0, "calibrate": False, "batch_size": 64},
        "compute": compute,
    }


def measured(
    folder: Path, options: argparse.Namespace, seed: int, compute: dict[str, Any]
) -> dict[str, float]:
    watch = Profile(min(STEADY, options.rounds - 2 * WATCHED)) if options.profile else SilentListener()
    result = wr.run(settings(folder, options, seed, compute), listener=watch)
    records = result.records
    steady = records[min(STEADY, len(records) - 2) :]

    def spent(task: str) -> float:
        exchanges = [[e for e in record["exchanges"] if e["task"] == task] for record in steady]
        return statistics.median(sum(sum(e["seconds"].values()) for e in found) for found in exchanges)

    return {
        "seconds_a_round": statistics.median(record["seconds"] for record in steady),
        "first_round_s": records[0]["seconds"],
        "train_s": spent("train"),
        "score_s": spent("score"),
        "dice": records[-1]["validation"]["dice"]["mean"],
    }


class Profile(SilentListener):
    """Watches rounds `first + 1` and after: three by torch.profiler, then three by cProfile."""

    def __init__(self, first: int) -> None:
        self._first = first
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._torch = profile(activities=activities)
        self._python = cProfile.Profile()
        self._started = 0.0

    def on_record(self, record: Mapping[str, Any]) -> None:
        done = record["round"] - self._first
        if done == 0:
            self._torch.start()
        elif done == WATCHED:
            self._wait()
            seconds = time.perf_counter() - self._started
            self._torch.stop()
            self._print_events(seconds)
            self._python.enable()
        elif done == 2 * WATCHED:
            self._python.disable()
            print(f"cProfile of {WATCHED} rounds, {time.perf_counter() - self._started:.3f} s")
            table = pstats.Stats(self._python).strip_dirs()
            table.sort_stats("tottime").print_stats(35)
            table.sort_stats("cumulative").print_stats(45)
        if done in (0, WATCHED):
            self._wait()
            self._started = time.perf_counter()

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _print_events(self, seconds: float) -> None:
        found = self._torch.key_averages()
        busy = sum(event.self_device_time_total for event in found) / 1e6
        print(f"torch.profiler of {WATCHED} rounds: {seconds:.3f} s, kernels {busy:.3f} s of it")
        on_gpu = torch.cuda.is_available()
        for order in ["self_cpu_time_total", *(["self_device_time_total"] if on_gpu else [])]:
            print(found.table(sort_by=order, row_limit=30, max_name_column_width=60))
        print("where the host may wait for the device, calls a round:")
        for event in sorted(found, key=lambda event: -event.self_cpu_time_total):
            if event.key in WAITS or event.key.startswith("cudaMalloc"):
                each, spent = event.count / WATCHED, event.self_cpu_time_total / WATCHED / 1000
                print(f"  {event.key:30} {each:8.1f} calls {spent:8.1f} ms")


WAITS = {
    "aten::_local_scalar_dense",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaGraphLaunch",
    "cudaLaunchKernel",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of polyp4")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--modes", nargs="*", default=["auto", "full", "float32"])
    parser.add_argument("--profile", action="store_true", help="show where steady rounds spend their time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.data is None and not options.small:
        parser.error("give --data, or --small")
    modes: dict[str, dict[str, Any]] = {
        "auto": {},
        "full": {"compile": "full"},
        "graphs": {"compile": "graphs"},
        "eager": {"compile": "off"},
        "float32": {"precision": "float32", "compile": "off", "memory_format": "contiguous"},
        "float32-graphs": {"precision": "float32", "compile": "graphs", "memory_format": "contiguous"},
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.modes}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for name in options.modes:
                row = measured(Path(folder) / f"{name}-{seed}", options, seed, modes[name])
                rows[name].append(row)
                print(name, seed, {key: round(value, 3) for key, value in row.items()}, flush=True)
    fast, exact = rows[options.modes[0]], rows[options.modes[-1]]
    apart = [one["dice"] - other["dice"] for one, other in zip(fast, exact, strict=True)]
    if len(apart) > 1 and len(options.modes) > 1:
        error = statistics.stdev(apart) / len(apart) ** 0.5
        print(
            f"Dice, {options.modes[0]} less {options.modes[-1]}: {statistics.mean(apart):+.4f} ± {error:.4f}"
        )
    if options.json:
        ratio = statistics.median(row["seconds_a_round"] for row in fast) / statistics.median(
            row["seconds_a_round"] for row in exact
        )
        print(json.dumps({"ratio": ratio, "dice_apart": apart, "rows": rows}))


if __name__ == "__main__":
    main()
