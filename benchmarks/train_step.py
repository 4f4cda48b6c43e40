"""What `wardround train` gets out of a GPU, against a plain loop written for speed.

The plain loop has all that is known to help: cases on the device, bfloat16, channels-last, a network
compiled by inductor, a fused optimizer, no look at a loss. `wardround` does the same training through
`wardround.run`; seconds a step are those of its training tasks, without validation. Both run in one
process, one after the other, and the ratio of their throughputs counts. Cases are noise with a ball in
it: what they show does not change the time.

    python benchmarks/train_step.py                      # 3D U-Net at 128³ and 2D U-Net at 384², GPU
    python benchmarks/train_step.py --objectives         # a CFSL and a CLSL epoch against a Dice epoch
    python benchmarks/train_step.py --modes              # what each compute setting is worth
    python benchmarks/train_step.py --clients            # GPU memory with 4 clients and with 16
    python benchmarks/train_step.py --small              # a few steps of a tiny network, also on the CPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import wardround as wr
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.phantom import cases as phantom
from wardround.data.phantom.cases import PhantomSettings
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.losses.segmentation import dice_loss

PLAIN_AUGMENTATION = {"flip": 0, "intensity": 0}
AUGMENTATION = {"flip": 0.5, "intensity": 0.1}


@dataclass(frozen=True)
class Job:
    """One network on images of one size."""

    title: str
    model: dict[str, Any]
    dimensions: int
    size: int
    batch_size: int = 8
    batches: int = 2  # an epoch
    epochs: int = 10
    hospitals: int = 1

    def settings(self, folder: Path, **changes: Any) -> dict[str, Any]:
        return {
            "name": "step",
            "output": str(folder),
            "rounds": 2,
            "local_epochs": self.epochs,
            "batch_size": self.batch_size,
            "data": {
                "phantom": {
                    "hospitals": self.hospitals,
                    "cases": self.batches * self.batch_size,
                    "dimensions": self.dimensions,
                    "size": self.size,
                    "seed": 1,
                }
            },
            "model": self.model,
            "objective": {"name": "dice"},
            "augmentation": PLAIN_AUGMENTATION,
            "evaluate": {"every": 1000, "metrics": ["dice"], "overlays": 0, "calibrate": False},
            **changes,
        }


LARGE = [
    Job("3D U-Net, 19 M, 128³", {"name": "unet3d"}, 3, 128, epochs=10),
    Job("2D U-Net, 31 M, 384²", {"name": "unet2d"}, 2, 384, batches=4, epochs=40),
]
SMALL = [Job("2D U-Net, tiny, 32²", {"name": "unet2d", "base_filters": 4, "levels": 3}, 2, 32, 4, epochs=2)]


def quick_client(settings: PhantomSettings, name: str, seed: int) -> ClientData:
    """Noise with a ball in it; all cases train, and two more each are for validation and test."""
    draw = torch.Generator().manual_seed(seed)
    grid = torch.meshgrid(*[torch.linspace(-1, 1, side) for side in settings.shape], indexing="ij")
    ball = (torch.stack(grid).square().sum(0) < 0.2).long()

    def split(kind: str, number: int) -> TensorSplit:
        images = torch.randn(number, 1, *settings.shape, generator=draw) + ball
        names = [f"{kind}{n}" for n in range(number)]
        return TensorSplit(names, images, ball.expand(number, *ball.shape), [(1.0,) * ball.ndim] * number)

    return ClientData(split("train", settings.cases), split("val", 2), split("test", 2))


def plain_seconds(job: Job, folder: Path, compiled: bool) -> float:
    """Seconds a step of the plain loop, the median over epochs after a warm-up."""
    config = wr.load_config(job.settings(folder))
    host = Host(config, folder / "clients", ["north"])
    device, split = host.bench.device, host.client("north").data.train
    on_gpu = device.type == "cuda"
    layout = torch.channels_last_3d if job.dimensions == 3 else torch.channels_last
    model = build_model(config).to(device).train()
    if on_gpu:
        model = model.to(memory_format=layout)
    network = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    seconds = []
    for epoch in range(job.epochs + 1):
        wait(device)
        started = time.perf_counter()
        order = torch.randperm(len(split), device=device)
        steps = 0
        for indices in order.split(job.batch_size):
            if len(indices) < job.batch_size:
                break
            batch = split.batch(indices)
            image = batch.image.contiguous(memory_format=layout) if on_gpu else batch.image
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
                logits = network(image)
            dice_loss(logits.float(), batch.label).backward()
            optimizer.step()
            steps += 1
        wait(device)
        if epoch:
            seconds.append((time.perf_counter() - started) / steps)
    return statistics.median(seconds)


def our_seconds(job: Job, folder: Path, **changes: Any) -> tuple[float, float]:
    """Seconds a step of the last round through `wardround.run`, and the peak of GPU memory in GB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    result = wr.run(job.settings(folder, **changes))
    exchange = next(e for e in result.records[-1]["exchanges"] if e["task"] == "train")
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    seconds = next(iter(exchange["seconds"].values()))
    return seconds / (job.batches * job.epochs), peak


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def against_plain(jobs: list[Job], root: Path, compile: str) -> list[dict[str, Any]]:
    rows = []
    for number, job in enumerate(jobs):
        on_gpu = torch.cuda.is_available()
        plain = plain_seconds(job, root / f"plain{number}", compiled=on_gpu)
        how = {"compile": compile} if on_gpu else {}
        ours, peak = our_seconds(job, root / f"ours{number}", compute=how)
        rows.append(
            {
                "job": job.title,
                "plain_ms": plain * 1000,
                "wardround_ms": ours * 1000,
                "plain_samples_s": job.batch_size / plain,
                "wardround_samples_s": job.batch_size / ours,
                "peak_gb": peak,
                "ratio": plain / ours,
            }
        )
        print_row(rows[-1])
    return rows


PIPELINES = {"deterministic": PLAIN_AUGMENTATION, "augmented": AUGMENTATION}


def objectives(job: Job, root: Path, compile: str, pipelines: list[str]) -> list[dict[str, Any]]:
    """Epochs of CFSL and CLSL as multiples of a Dice epoch, the same pipeline each time."""
    rows = []
    for pipeline in pipelines:
        times = {}
        for name in ("dice", "cfsl", "clsl"):
            folder = root / f"{pipeline}-{name}"
            times[name], _ = our_seconds(
                job,
                folder,
                rounds=3,  # the previous model counts from the second round on, and its first use is slow
                objective={"name": name},
                augmentation=PIPELINES[pipeline],
                compute={"compile": compile},
            )
        row = {"job": job.title, "pipeline": pipeline, "epochs": job.epochs, "dice_ms": times["dice"] * 1000}
        row |= {f"{name}_ratio": times[name] / times["dice"] for name in ("cfsl", "clsl")}
        rows.append(row)
        print_row(row)
    return rows


MODES: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32", "memory_format": "contiguous", "compile": "off"},
    "tf32": {"precision": "tf32", "memory_format": "contiguous", "compile": "off"},
    "bfloat16": {"precision": "bfloat16", "memory_format": "contiguous", "compile": "off"},
    "+ channels_last": {"precision": "bfloat16", "compile": "off"},
    "+ graphs": {"precision": "bfloat16", "compile": "graphs"},
    "+ inductor": {"precision": "bfloat16", "compile": "inductor"},
    "+ both": {"precision": "bfloat16", "compile": "full"},
    "checkpointing": {"precision": "bfloat16", "compile": "off", "checkpointing": True},
    "auto": {},
}


def modes(jobs: list[Job], root: Path, chosen: list[str]) -> list[dict[str, Any]]:
    rows = []
    for number, job in enumerate(jobs):
        for name in chosen:
            started = time.perf_counter()
            ours, peak = our_seconds(job, root / f"{number}-{len(rows)}", compute=MODES[name])
            rows.append(
                {
                    "job": job.title,
                    "mode": name,
                    "ms": ours * 1000,
                    "samples_s": job.batch_size / ours,
                    "peak_gb": peak,
                    "whole_run_s": time.perf_counter() - started,
                }
            )
            print_row(rows[-1])
    return rows


def clients(job: Job, root: Path) -> list[dict[str, Any]]:
    """The peak of GPU memory: one model and one optimizer serve all clients, who share the same cases."""
    rows = []
    for number in (4, 16):
        shared = replace(job, hospitals=number, batches=16 // number, epochs=1)
        _, peak = our_seconds(shared, root / str(number))
        rows.append({"job": job.title, "clients": number, "peak_gb": peak})
        print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    shown = [f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()]
    print("   ".join(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny network, for a quick look or the CPU")
    parser.add_argument("--objectives", action="store_true")
    parser.add_argument("--clients", action="store_true")
    parser.add_argument("--compile", help="compute.compile; default inductor, of --objectives off")
    parser.add_argument("--modes", nargs="*", metavar="MODE", help=f"all, or some of: {', '.join(MODES)}")
    parser.add_argument("--only", choices=["2d", "3d"])
    parser.add_argument("--epochs", type=int, help="local epochs of a round")
    parser.add_argument("--pipelines", nargs="*", default=["deterministic", "augmented"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    phantom.make_client = quick_client
    jobs = SMALL if options.small else LARGE
    jobs = [job for job in jobs if options.only in (None, f"{job.dimensions}d")]
    if options.epochs:
        jobs = [replace(job, epochs=options.epochs) for job in jobs]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.objectives:
            rows = [
                row
                for n, job in enumerate(jobs)
                for row in objectives(job, root / str(n), options.compile or "off", options.pipelines)
            ]
            ratio = max(max(row["cfsl_ratio"], row["clsl_ratio"]) for row in rows)
        elif options.clients:
            rows = clients(jobs[-1], root)
            ratio = rows[1]["peak_gb"] / max(rows[0]["peak_gb"], 1e-9)
        elif options.modes is not None:
            rows = modes(jobs, root, options.modes or list(MODES))
            ratio = max(row["ms"] for row in rows) / min(row["ms"] for row in rows)
        else:
            rows = against_plain(jobs, root, options.compile or "inductor")
            ratio = min(row["ratio"] for row in rows)
    if options.json:
        print(json.dumps({"ratio": ratio, "rows": rows}))


if __name__ == "__main__":
    main()
