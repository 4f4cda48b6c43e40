"""A case-level training step against the plain one, as a ratio, in one process on one thread.

    python benchmarks/privacy/step.py

Both take the steps of one task, alternately, on the same cases; a private step draws as many on average. The
median over the repetitions counts. Noise is calibrated before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from wardround.config_file import load_config
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.params import Params

SIZES = {  # network, filters, levels, dimensions, size, batch
    "2D 64, batch 8": ("unet2d", 16, 4, 2, 64, 8),
    "2D 128, batch 8": ("unet2d", 16, 4, 2, 128, 8),
    "2D 128, batch 16": ("unet2d", 32, 4, 2, 128, 16),
    "3D 32, batch 2": ("unet3d", 8, 4, 3, 32, 2),
}


def measure(name: str, steps: int, repeats: int) -> float:
    network, filters, levels, dimensions, size, batch = SIZES[name]
    seconds: dict[str, list[float]] = {"none": [], "case": []}
    with tempfile.TemporaryDirectory() as folder:
        hosts = {}
        for level in seconds:
            config = load_config(
                {
                    "rounds": 10**4,
                    "local_steps": steps,
                    "batch_size": batch,
                    "data": {
                        "phantom": {
                            "hospitals": 1,
                            "dimensions": dimensions,
                            "size": size,
                            "cases": 4 * batch,
                        }
                    },
                    "model": {"name": network, "base_filters": filters, "levels": levels},
                    "compute": {"threads": 1, "workers": 1, "device": "cpu"},
                    "privacy": {"level": level},
                }
            )
            hosts[level] = Host(config, Path(folder) / level / "clients", ["north"])
        for repeat in range(repeats + 1):
            for level, host in hosts.items():
                message = Message(params=Params.of(host.bench.model))
                client = host.client("north")
                if client.guard is not None:  # the search for noise is once a run, not once a step
                    charged = client.guard.charge_steps(0)
                    client.guard.charge_steps = lambda round, charged=charged: charged  # type: ignore[method-assign]
                started = time.perf_counter()
                answer = host.run("north", "train", repeat, message)
                if repeat:
                    seconds[level].append(time.perf_counter() - started)
                assert answer.failure is None, answer.failure
    plain, private = (statistics.median(seconds[level]) / steps for level in ("none", "case"))
    print(f"| {name} | {1000 * plain:.0f} ms | {1000 * private:.0f} ms | {private / plain:.2f} |", flush=True)
    return private / plain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| step | plain | case level | ratio |\n|---|---|---|---|")
    for name in options.only:
        measure(name, options.steps, options.repeats)


if __name__ == "__main__":
    main()
