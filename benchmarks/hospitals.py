"""What a round at hospitals costs beyond the training: `wardround rehearse`, real processes, mutual TLS.

Overhead of a round: its wall time (from one line of records.jsonl to the next, checkpoint included) less
the longest time that a hospital worked, summed over the exchanges in the records. The validation has no
times of its own in the records, so all of it counts as overhead; images are small to keep it short. Medians
over the rounds from the third on, but the last, which the test follows.

Memory: the highest resident memory of the server's job process less what it had while hospitals registered,
when it held no model yet, in models. Pages of files it reads (replies on the disk) are told apart: the
system takes them back when it needs room.

    python benchmarks/hospitals.py            # 1.9 M parameters, 4 hospitals; the goal is 4 s a round
    python benchmarks/hospitals.py --big      # 100 M parameters (400 MB), 2 hospitals; 20 s and 4 models
    python benchmarks/hospitals.py --secure   # a round with secure summation against one without, in turns
    python benchmarks/hospitals.py --secure --filters 50   # the same with 19 M parameters
    python benchmarks/hospitals.py --secure --flare   # the same over a provisioned NVIDIA FLARE federation
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

GOALS = {False: 4.0, True: 20.0}  # seconds of overhead a round; True: the big model
MODELS_IN_MEMORY = 4.0
WATCH_SECONDS = 0.02


def settings(options: argparse.Namespace, folder: Path, rounds: int, secure: bool) -> dict[str, Any]:
    big = options.big
    return {
        "name": "hospitals",
        "output": str(folder),
        "rounds": rounds,
        "batch_size": 8,
        "min_clients": 2 if big else 4,
        "data": {"phantom": {"hospitals": 2 if big else 4, "size": 32, "cases": 14}},
        "model": {"name": "unet2d", "base_filters": options.filters or (115 if big else 16), "levels": 5},
        "method": {"name": options.method},
        "privacy": {"secure_sum": secure},
        "augmentation": {"flip": 0, "intensity": 0},
        "evaluate": {"every": options.every, "metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"device": "cpu", "threads": 1},
        "deadline": 300,
    }


# What is seen from outside


@dataclass
class Memory:
    """Bytes of the server's job process; base: while hospitals registered."""

    base: int = 0
    peak: int = 0
    peak_private: int = 0  # without pages of files
    base_private: int = 0

    def look(self, pid: int, registering: bool) -> None:
        sizes = resident(pid)
        if not sizes:
            return
        if registering:
            self.base, self.base_private = sizes["VmRSS"], sizes["RssAnon"]
        self.peak = max(self.peak, sizes["VmHWM"])
        self.peak_private = max(self.peak_private, sizes["RssAnon"])


@dataclass
class Watch:
    """The run folder and the server's process while the run goes on."""

    folder: Path
    memory: Memory = field(default_factory=Memory)
    ends: list[float] = field(default_factory=list)  # when each round's line came
    registered: float = 0.0  # when the hospitals were first asked
    loads: list[float] = field(default_factory=list)
    work: list[dict[str, float]] = field(default_factory=list)  # processor seconds by kit at each round's end
    _job: int | None = None

    def until(self, process: subprocess.Popen[bytes]) -> None:
        records, live = self.folder / "records.jsonl", self.folder / "live.json"
        next_look = 0.0
        while process.poll() is None:
            now = time.time()
            lines = records.read_bytes().count(b"\n") if records.exists() else 0
            if lines > len(self.ends):
                self.ends += [now] * (lines - len(self.ends))
                self.work += [processor(self.folder / "rehearsal" / "kits")] * (lines - len(self.work))
            if now >= next_look:
                next_look = now + 0.1
                self.look(live, now)
            time.sleep(WATCH_SECONDS)

    def look(self, live: Path, now: float) -> None:
        if not live.exists():
            return
        if self._job is None:
            found = list_processes(self.folder / "rehearsal" / "kits")
            self._job = next((int(entry.name) for name, entry in found if name == "job"), None)
        facts = json.loads(live.read_text())
        registering = facts["state"] == "waiting" and str(facts.get("task")).startswith("register")
        if registering and not self.registered:
            self.registered = now
        if self._job is not None:
            self.memory.look(self._job, registering)
        self.loads.append(os.getloadavg()[0])


def list_processes(kits: Path) -> Iterator[tuple[str, Path]]:
    """Names and folders in /proc of all that work for a kit; job: the server's process of the run.

    `wardround server` and `join` name their kit in the command, as FLARE's processes do; those that ours
    start have it in the environment.
    """
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit():
                continue
            command = (entry / "cmdline").read_bytes()
            marks = [*command.split(b"\0"), *(entry / "environ").read_bytes().split(b"\0")]
        except OSError:  # somebody else's, or just gone
            continue
        paths = (mark.removeprefix(b"WARDROUND_KIT=").decode(errors="replace") for mark in marks)
        kit = next((Path(path) for path in paths if path.startswith(f"{kits}/")), None)
        if kit is not None:
            is_job = b"deploy.run_process" in command or b"server.runner_process" in command
            yield "job" if is_job else kit.relative_to(kits).parts[0], entry


def processor(kits: Path) -> dict[str, float]:
    """Seconds of processor time that each kit's processes have used."""
    spent: dict[str, float] = {}
    for name, entry in list_processes(kits):
        try:
            times = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
        spent[name] = spent.get(name, 0.0) + seconds
    return spent


def resident(pid: int) -> dict[str, int]:
    """Bytes by kind; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    found = (line.split() for line in lines if line.startswith(("VmRSS", "RssAnon", "VmHWM")))
    return {name.rstrip(":"): int(count) * 1024 for name, count, _ in found}


# One run


def measured(options: argparse.Namespace, folder: Path, rounds: int, secure: bool = False) -> dict[str, Any]:
    values = settings(options, folder, rounds, secure)
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(values))
    started = time.time()
    said = folder.with_suffix(".txt")
    flare = Path(__file__).with_name("flare.py")
    words = [flare, config] if options.flare else ["-m", "wardround", "rehearse", config, "--json"]
    with said.open("wb") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file)
        watch = Watch(folder)
        watching = threading.Thread(target=watch.until, args=(process,))
        watching.start()
        code = process.wait()
        watching.join()
    if code:
        raise SystemExit(f"the rehearsal failed with exit code {code}:\n{said.read_text()[-2000:]}")
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return facts_of(watch, records, started, time.time())


def facts_of(watch: Watch, records: list[dict[str, Any]], started: float, ended: float) -> dict[str, Any]:
    training = [worked(record) for record in records]
    walls = [after - before for before, after in zip(watch.ends[:-1], watch.ends[1:], strict=True)]
    steady = range(2, len(records) - 1)  # rounds 3 to the last but one
    memory, model = watch.memory, next(iter(records[-1]["exchanges"][0]["bytes_down"].values()))
    return {
        "model_bytes": model,
        "hospitals": len(records[-1]["clients"]),
        "rounds": len(records),
        "start_seconds": watch.registered - started,
        "first_round_seconds": watch.ends[0] - watch.registered,
        "whole_seconds": ended - started,
        "training_seconds": statistics.median(training[number] for number in steady),
        "round_seconds": statistics.median(walls[number - 1] for number in steady),
        "overhead_seconds": statistics.median(walls[number - 1] - training[number] for number in steady),
        "worst_overhead_seconds": max(walls[number - 1] - training[number] for number in steady),
        "overhead_before_checkpoint_seconds": statistics.median(
            records[number]["seconds"] - training[number] for number in steady
        ),
        "processor_seconds": {
            name: statistics.median(
                watch.work[number].get(name, 0.0) - watch.work[number - 1].get(name, 0.0) for number in steady
            )
            for name in sorted(watch.work[-1])
        },
        "server_base_bytes": memory.base,
        "server_peak_bytes": memory.peak,
        "server_models": (memory.peak - memory.base) / model,
        "server_models_without_files": (memory.peak_private - memory.base_private) / model,
        "load": [round(min(watch.loads), 1), round(max(watch.loads), 1)],
    }


def worked(record: dict[str, Any]) -> float:
    """Seconds that the slowest hospital worked in each exchange, together."""
    return sum(float(max(exchange["seconds"].values())) for exchange in record["exchanges"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--big", action="store_true", help="a model of 400 MB, two hospitals")
    parser.add_argument("--rounds", type=int, help="default: 12, and 7 with --big")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--every", type=int, default=1, help="rounds between validations")
    parser.add_argument("--filters", type=int, help="of the first level; default: 16, and 115 with --big")
    parser.add_argument("--secure", action="store_true", help="secure summation against none")
    parser.add_argument("--flare", action="store_true", help="over NVIDIA FLARE's processes, not ours")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds or (7 if options.big else 12)
    if rounds < 4:
        parser.error("at least 4 rounds: the first two and the last do not count")
    if options.secure:
        sys.exit(compare_secure(options, rounds))
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        facts = measured(options, Path(name) / "run", rounds)
    facts |= {"load_before": round(before, 1), "method": options.method, "goal_seconds": GOALS[options.big]}
    good = facts["overhead_seconds"] <= facts["goal_seconds"]
    good = good and (not options.big or facts["server_models"] <= MODELS_IN_MEMORY)
    if options.json:
        print(json.dumps(facts | {"good": good}))
    else:
        show(facts, options.big)
    sys.exit(0 if good else 1)


def compare_secure(options: argparse.Namespace, rounds: int) -> int:
    """Print what secure summation makes of a round: two runs of each kind, in turns."""
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        for number, secure in enumerate((False, True, True, False)):
            found[secure].append(measured(options, Path(name) / f"run-{number}", rounds, secure))
    seconds = {kind: statistics.fmean(run["round_seconds"] for run in runs) for kind, runs in found.items()}
    processor = {
        kind: statistics.fmean(sum(run["processor_seconds"].values()) for run in runs)
        for kind, runs in found.items()
    }
    ratio = seconds[True] / seconds[False]
    facts = {
        "ratio": ratio,
        "plain_processor_seconds": processor[False],
        "secure_processor_seconds": processor[True],
        "plain_seconds": seconds[False],
        "secure_seconds": seconds[True],
        "model_bytes": found[False][0]["model_bytes"],
        "hospitals": found[False][0]["hospitals"],
        "load": [run["load"] for runs in found.values() for run in runs],
    }
    if options.json:
        print(json.dumps(facts))
    else:
        print(
            f"model of {facts['model_bytes'] / 1e6:.0f} MB, {facts['hospitals']} hospitals, {rounds} rounds"
        )
        print(
            f"round        {seconds[False]:.2f} s, with secure sums {seconds[True]:.2f} s: {ratio:.2f} times"
        )
        print(
            f"processor    {processor[False]:.2f} s and {processor[True]:.2f} s of all processes together, "
            "which a busy machine changes less"
        )
        print(f"load         {facts['load']}")
    return 0


def show(facts: dict[str, Any], big: bool) -> None:
    size, base = facts["model_bytes"] / 1e6, facts["server_base_bytes"] / 1e6
    print(
        f"{facts['method']}, model of {size:.0f} MB, {facts['hospitals']} hospitals, {facts['rounds']} rounds"
    )
    print(f"load         {facts['load_before']} before, {facts['load'][0]} to {facts['load'][1]} meanwhile")
    print(f"start        {facts['start_seconds']:.1f} s until hospitals register")
    print(f"             {facts['first_round_seconds']:.1f} s more until the first round is done")
    print(f"round        {facts['round_seconds']:.2f} s, of which {facts['training_seconds']:.2f} s training")
    print(
        f"overhead     {facts['overhead_seconds']:.2f} s a round (goal {facts['goal_seconds']:g}), worst "
        f"{facts['worst_overhead_seconds']:.2f}; {facts['overhead_before_checkpoint_seconds']:.2f} s of it "
        "before the checkpoint"
    )
    spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in facts["processor_seconds"].items())
    print(f"processor    seconds a round, training included: {spent}")
    goal = f" (goal {MODELS_IN_MEMORY:g})" if big else ""
    print(
        f"memory       {facts['server_models']:.2f} models above {base:.0f} MB{goal}; "
        f"{facts['server_models_without_files']:.2f} without pages of files"
    )


if __name__ == "__main__":
    main()
