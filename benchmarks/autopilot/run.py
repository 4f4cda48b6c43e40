"""wardround without a configuration file, federated, pooled and local, beside nnU-Net on the pooled cases.

    python benchmarks/autopilot/run.py --data DATA --out runs/autopilot --results benchmarks/autopilot/results
    python benchmarks/autopilot/summarise.py benchmarks/autopilot --write

DATA holds the folders hippocampus, lgg3d, fundus_odoc and polyp4, each with its index.csv, whose split all
parts keep. Each set is described by `wardround data init` and configured by `wardround configure`; nothing is
written by hand. All parts take the same number of optimizer steps in all: of K clients each takes a K-th,
also where they train alone. A run that ends leaves RESULTS/<set>-<part>-<seed>.json at once, and the same
command does what is missing, which --list shows with an estimate. Where --minutes are over, our runs go on
from their last checkpoint the next time; those of nnU-Net begin again. Seconds mean something only with
--jobs 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from wardround.files import write_json
from wardround.gpu_service import GpuService

HERE = Path(__file__).parent
STEPS = {
    "polyp4": 2400,
    "hippocampus": 4000,
    "lgg3d": 2400,
    "fundus_odoc": 3000,
}  # of the results that are there
METHODS = {"federated": None, "pooled": "centralised", "local": "local"}
PARTS = (*METHODS, "nnunet")
QUICKER = (  # the same Dice; nnU-Net writes no checkpoint at all
    "evaluate.metrics=[dice]", "evaluate.overlays=0", "evaluate.calibrate=false", "checkpoint.every=10",
    "checkpoint.keep=1",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training. steps: of all clients together."""

    set: str
    part: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.set}-{self.part}-{self.seed}"


class Runner:
    """Does runs, each in processes of its own, until the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: Path = options.data.resolve()
        self.out: Path = options.out.resolve()
        self.results: Path = (options.results or options.out / "results").resolve()
        self.end = time.monotonic() + 60 * options.minutes
        cores = os.cpu_count() or 1
        self.threads = max(1, cores // options.jobs)
        peers = max(1, options.jobs // len(options.parts))  # runs of nnU-Net at a time
        self.loading = max(1, cores // 2 if options.jobs > 1 else cores - 2) // peers or 1

    def result(self, run: Run) -> Path:
        return self.results / f"{run.name}.json"

    def read_result(self, run: Run) -> dict[str, Any] | None:
        """The result, if there is one; other steps than asked for cannot stand beside the others."""
        path = self.result(run)
        found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        if found is not None and found["asked_steps"] != run.steps:
            raise SystemExit(f"{path} is of {found['asked_steps']} steps, not {run.steps}: see --steps")
        return found

    def list_missing(self, runs: list[Run]) -> list[Run]:
        """The runs without a result, each printed with what it may take by those that have one."""
        done = [(run, found) for run in runs if (found := self.read_result(run)) is not None]
        missing, total = [run for run in runs if not self.result(run).exists()], 0.0
        for run in missing:
            alike = [found for other, found in done if (other.set, other.part) == (run.set, run.part)]
            alike = alike or [found for other, found in done if other.set == run.set]
            paces = [
                found["total_seconds"] / found["asked_steps"] for found in alike or [own for _, own in done]
            ]
            seconds, known = (
                max(paces, default=0.0) * run.steps,
                "" if alike else " or more: none of the set ended",
            )
            total += seconds
            print(f"missing: {run.name}, about {seconds / 60:.0f} min{known}", flush=True)
        hours = total / 3600 / self.options.jobs
        print(f"{len(missing)} of {len(runs)} runs are missing, about {hours:.1f} h", flush=True)
        return missing

    # Before training

    def set_up(self, name: str) -> None:
        """Describe and configure a set; plan and preprocess it with nnU-Net."""
        self.work(name).mkdir(parents=True, exist_ok=True)
        file = self.work(name) / f"{name}.yaml"
        made = {"commit": find_commit(), "steps": self.options.steps[name], "set": self.options.set}
        record = self.work(name) / "made.json"
        if (
            not record.exists() or json.loads(record.read_text()) != made
        ):  # never a plan of other code or steps
            for path in (file, *self.work(name).glob("run.yaml"), *self.work(name).glob(f"{name}-*")):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            write_json(record, made)
        if set(METHODS) & set(self.options.parts) and not (self.work(name) / "run.yaml").exists():
            if not file.exists():
                self.call(name, "init", "wardround", "data", "init", str(self.data / name), "-o", str(file))
            budget = str(self.options.steps[name] // count_clients(file))
            told = ["--budget", budget, "-o", str(self.work(name) / "run.yaml")]
            self.call(name, "configure", "wardround", "configure", str(file), *told)
        if "nnunet" in self.options.parts and not (self.work(name) / "nnunet" / "prepared.json").exists():
            self.peer(name, "prepare", "prepare", self.loading)

    def work(self, name: str) -> Path:
        return self.out / "work" / name

    # Training

    def do(self, run: Run) -> None:
        """Train and test; leave the result."""
        if time.monotonic() > self.end:
            return
        started = time.perf_counter()
        found = self.train_peer(run) if run.part == "nnunet" else self.train_ours(run)
        spent = self.work(run.set) / f"{run.name}-seconds.json"  # of parts that were cut short
        before = json.loads(spent.read_text()) if spent.exists() and run.part != "nnunet" else 0.0
        total = before + time.perf_counter() - started
        write_json(spent, total)
        if found is None:
            return
        facts = {"set": run.set, "part": run.part, "seed": run.seed, "asked_steps": run.steps}
        place = {"jobs": self.options.jobs, "device": describe_device(), "commit": find_commit()}
        write_json(self.result(run), {**facts, **place, "total_seconds": round(total, 1), **found})
        dice = [case["dice"] for case in found["cases"]]
        print(f"{run.name}: Dice {sum(dice) / len(dice):.4f}, {total:.0f} s", flush=True)

    def train_ours(self, run: Run) -> dict[str, Any] | None:
        folder = self.work(run.set) / run.name
        alone = ["compute.workers=1", f"compute.threads={self.threads}"]
        settings = [f"seed={run.seed}", f"output={folder}", *alone, *QUICKER, *self.options.set]
        method = METHODS[run.part]
        if method is not None:
            settings += [f"method={{name: {method}}}", "min_clients=1"]  # all cases together are one client
        words = [word for setting in settings for word in ("--set", setting)]
        planned = str(self.work(run.set) / "run.yaml")
        begun = (folder / "checkpoints" / "latest.json").exists()
        what = [str(folder), "--resume"] if begun else [planned, *words, "--overwrite"]
        line = ["wardround", "train", *what, "--no-report", "--quiet"]
        if self.call(run.set, run.name, *line) is None:
            return None
        result = json.loads((folder / "result.json").read_text())
        config = yaml.safe_load((folder / "config.yaml").read_text())
        clients = count_clients(self.work(run.set) / f"{run.set}.yaml")
        return {
            "cases": read_cases(folder / "cases.csv", self.data / run.set),
            "steps": config["rounds"] * config["local_steps"] * clients,
            "batch_size": config["batch_size"],
            "seconds": {"rounds": result["seconds"]},
            "params_sha256": result["params_sha256"],
        }

    def train_peer(self, run: Run) -> dict[str, Any] | None:
        told = ["--steps", str(run.steps), "--seed", str(run.seed)]
        return self.peer(run.set, run.name, "train", self.loading, *told)

    def peer(self, name: str, log: str, what: str, processes: int, *more: str) -> dict[str, Any] | None:
        places = ["--data", str(self.data / name), "--work", str(self.work(name) / "nnunet")]
        device = "cuda" if has_gpu() else "cpu"
        most = ["--most", str(self.options.most)] if self.options.most else []
        told = ["--processes", str(processes), "--device", device, *most, *more]
        line = [str(HERE / "nnunet_train.py"), what, *places, *told]
        text = self.call(name, f"nnunet-{log}" if what == "prepare" else log, *line)
        return None if text is None else dict(json.loads(text.strip().splitlines()[-1]))

    def call(self, name: str, log: str, program: str, *words: str) -> str | None:
        """The output of a program of ours; None, and a line, where it fails or the time is over."""
        folder = self.out / "logs" / name
        folder.mkdir(parents=True, exist_ok=True)
        start = ["-m", program] if not program.endswith(".py") else [program]
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        with (folder / f"{log}.out").open("w") as out, (folder / f"{log}.err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, *start, *words],
                stdout=out,
                stderr=err,
                env=os.environ | threads,
                start_new_session=True,
            )
            try:
                status = process.wait(max(1.0, self.end - time.monotonic()))
            except subprocess.TimeoutExpired:
                end_group(process)
                status = -1
        if status == 0:
            return (folder / f"{log}.out").read_text()
        why = "out of time" if status == -1 else last_line(folder / f"{log}.err")
        print(f"{name} {log}: {why}", flush=True)
        return None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a program and the processes it started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(5)
        except (subprocess.TimeoutExpired, ProcessLookupError):
            continue


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "failed without a word"


def count_clients(federation: Path) -> int:
    """Clients that train."""
    told = yaml.safe_load(federation.read_text())
    return len(told["clients"]) if told["partition"]["kind"] == "natural" else told["partition"]["clients"]


def read_cases(path: Path, data: Path) -> list[dict[str, Any]]:
    """Dice of every test case, mean over its classes, of centres that train."""
    with (data / "index.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    idle = {row["centre"] for row in rows} - {row["centre"] for row in rows if row["split"] == "train"}
    scores: dict[tuple[str, str], list[float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["client"] not in idle:
                scores.setdefault((row["client"], row["case"]), []).append(float(row["dice"]))
    return [
        {"client": client, "case": case, "dice": sum(own) / len(own)}
        for (client, case), own in scores.items()
    ]


@contextmanager
def shared_gpu(jobs: int) -> Iterator[None]:
    """CUDA's multi-process service, so that kernels of several runs overlap; without it where it fails."""
    service = GpuService()
    environment = service.start() if jobs > 1 else {}
    os.environ |= environment
    try:
        yield
    finally:
        for name in environment:
            os.environ.pop(name, None)
        service.stop()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def describe_device() -> str:
    import torch

    device = torch.cuda.get_device_name() if has_gpu() else f"{os.cpu_count()} cores"
    return f"{device}, torch {torch.__version__}, Python {platform.python_version()}"


def find_commit() -> str:
    """As COMMIT says where a copy of the sources was sent to another machine, else git's."""
    line = ["git", "rev-parse", "--short", "HEAD"]
    told = subprocess.run(line, cwd=HERE, capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or told.stdout.strip() or "unknown"


def read_steps(text: str, sets: list[str]) -> dict[str, int]:
    """
    >>> read_steps("5000", ["a"]), read_steps("a=1,b=2", ["b"])
    ({'a': 5000}, {'b': 2})
    """
    told = dict(part.split("=") for part in text.split(",")) if "=" in text else dict.fromkeys(sets, text)
    return {name: int(told[name]) for name in sets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/autopilot"))
    parser.add_argument("--results", type=Path, help="where results go; default OUT/results")
    parser.add_argument("--sets", default=",".join(STEPS), help="with commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas")
    parser.add_argument("--seeds", default="1,2,3", help="with commas")
    parser.add_argument(
        "--steps",
        default=",".join(f"{name}={steps}" for name, steps in STEPS.items()),
        help="of all clients together: 5000, or polyp4=4000,lgg3d=2000; default %(default)s",
    )
    parser.add_argument("--list", action="store_true", help="show what is missing, and train nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--minutes", type=float, default=600.0, help="for everything")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of wardround's runs, for a trial"
    )
    parser.add_argument("--most", type=int, help="test cases that nnU-Net predicts, for a trial; default all")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    sets, seeds = options.sets.split(","), [int(seed) for seed in options.seeds.split(",")]
    options.steps = read_steps(options.steps, sets)
    runner = Runner(options)
    runner.results.mkdir(parents=True, exist_ok=True)
    runs = [
        Run(name, part, seed, options.steps[name])
        for seed in seeds
        for name in sets
        for part in reversed(options.parts)  # nnU-Net takes longest
    ]
    missing = runner.list_missing(runs)
    if options.list:
        return
    with shared_gpu(options.jobs), ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(runner.set_up, dict.fromkeys(run.set for run in missing)))
        list(pool.map(runner.do, missing))
    done = sum(runner.result(run).exists() for run in runs)
    print(f"{done} of {len(runs)} runs are in {runner.results}", flush=True)


if __name__ == "__main__":
    main()
