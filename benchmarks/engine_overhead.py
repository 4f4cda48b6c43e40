"""What the engine costs beyond the training itself, and what worker processes win back.

The same training in one run: as a plain PyTorch loop with a state-dict average, and through
`wardround train` with everything it does besides (gate, ledger, records, checkpoints). Same model, same
data, same batches a client, no validation in either. Rounds of the two alternate in blocks, so that a
noisy machine disturbs both alike; the ratio of the medians counts.

Start: seconds from the start of the command to the first training step. Memory: the highest sum over all
processes of their proportional set size (PSS: pages that several processes share are counted once, in parts).

    python benchmarks/engine_overhead.py                    # 1.9 M parameters, 4 clients, 10 rounds, 1 worker
    python benchmarks/engine_overhead.py --workers auto     # as many worker processes as pay for themselves
    python benchmarks/engine_overhead.py --large            # 20 M parameters, one batch a client
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# As the command line does, for both: on a busy machine waiting threads that spin slow everybody down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import yaml

import wardround as wr
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.losses.segmentation import dice_bce_loss

NAMES = ["east", "north", "south", "west"]


def settings(
    folder: Path, large: bool, rounds: int, threads: int | None, workers: int | str
) -> dict[str, Any]:
    # 60 % of the cases train: 40 a client (5 batches of 8), or 8 (one batch) for the large model
    return {
        "name": "overhead",
        "output": str(folder),
        "rounds": rounds,
        "batch_size": 8,
        "data": {"phantom": {"hospitals": 4, "size": 64, "cases": 14 if large else 67}},
        "model": {"name": "unet2d", "base_filters": 51 if large else 16, "levels": 5},
        "augmentation": {"flip": 0, "intensity": 0},
        "evaluate": {"every": 1000, "metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"threads": threads, "device": "cpu", "workers": workers},
    }


def plain_rounds(config: wr.Config, host: Host, rounds: int) -> list[float]:
    """Federated averaging as one would write it in an afternoon."""
    model = build_model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.learning_rate)
    params = copy.deepcopy(model.state_dict())
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        states, sizes = [], []
        for name in host.names:
            split = host.client(name).data.train
            model.load_state_dict(params)
            optimizer.state.clear()
            model.train()
            for indices in torch.randperm(len(split)).split(config.batch_size):
                batch = split.batch(indices)
                optimizer.zero_grad()
                dice_bce_loss(model(batch.image), batch.label).backward()
                optimizer.step()
            states.append({key: value.clone() for key, value in model.state_dict().items()})
            sizes.append(len(split))
        total = sum(sizes)
        params = {
            key: sum(n / total * state[key] for n, state in zip(sizes, states, strict=True)) for key in params
        }
        seconds.append(time.perf_counter() - started)
    return seconds


# The run, as a person starts it


class Run:
    """`wardround train` in a process of its own, watched from outside.

    start: seconds until the first training step; seconds: of each round but the first and the last, which
    is followed by a validation; pss: bytes of all its processes at their highest.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        folder = Path(values["output"])
        path = folder.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(values))
        self.pss = 0
        started = time.time()
        script = WATCHED.format(path=str(path), log=str(folder.with_suffix(".log")))
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
        watch = threading.Thread(target=self._watch, args=(process,))
        watch.start()
        code = process.wait()
        watch.join()
        if code:
            raise SystemExit(f"the run failed with exit code {code}")
        times = json.loads(folder.with_suffix(".log").read_text())
        self.start = times["first_step"] - started
        self.seconds = [
            after - before for before, after in zip(times["rounds"][:-2], times["rounds"][1:-1], strict=True)
        ]
        self.environment = json.loads((folder / "environment.json").read_text())

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            self.pss = max(self.pss, sum(pss(pid) for pid in family(process.pid)))
            time.sleep(0.25)


WATCHED = """
import json, time
from pathlib import Path
times = {{"rounds": []}}
class Clock:
    def on_start(self, config, first_round): ...
    def on_round(self, round, present): ...
    def on_progress(self, client, step, steps): times.setdefault("first_step", time.time())
    def on_record(self, record): times["rounds"].append(time.time())
from wardround.config_file import load_config
from wardround.engine.experiment import Experiment
Experiment(load_config({path!r}), listener=Clock()).run()
Path({log!r}).write_text(json.dumps(times))
"""


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 when the process is gone or its memory may not be looked at."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def number_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="20 M parameters, one batch a client")
    parser.add_argument("--workers", type=number_or_auto, default=1, help="a number, or auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--threads", type=int, default=2, help="of the plain loop, and of one worker")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    plain: list[float] = []
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # with one worker both have the same threads; with more, the cores are shared among them
        threads = options.threads if options.workers == 1 else None

        def make(block: str) -> dict[str, Any]:
            return settings(folder / block, options.large, options.rounds, threads, options.workers)

        config = wr.load_config({**make("plain"), "compute": {"device": "cpu", "workers": 1}})
        host = Host(config, folder / "clients", NAMES)
        for client in NAMES:
            host.client(client)
        plain_rounds(config, host, 1)  # warm up
        for block in range(options.blocks):
            plain += plain_rounds(config, host, options.rounds)[1:]
            runs.append(Run(make(str(block))))
        parameters = sum(p.numel() for p in build_model(config).parameters())
    ours = [seconds for run in runs for seconds in run.seconds]
    facts = runs[0].environment
    result = {
        "parameters": parameters,
        "clients": len(NAMES),
        "rounds": options.rounds * options.blocks,
        "batches_a_client": -(-len(host.client("north").data.train) // 8),
        "workers": facts["workers"],
        "threads": facts["threads"],
        "plain_seconds_a_round": statistics.median(plain),
        "wardround_seconds_a_round": statistics.median(ours),
        "start_seconds": min(run.start for run in runs),
        "pss_bytes": max(run.pss for run in runs),
        "ratio": statistics.median(ours) / statistics.median(plain),
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"U-Net, {parameters:,} parameters, 4 clients, {result['batches_a_client']} batches each, 64x64")
    print(f"plain loop   {result['plain_seconds_a_round']:.3f} s a round, {options.threads} threads")
    how = f"{result['workers']} workers, {result['threads']} threads each"
    print(f"wardround    {result['wardround_seconds_a_round']:.3f} s a round, {how}")
    print(f"ratio        {result['ratio']:.3f}")
    print(
        f"start        {result['start_seconds']:.1f} s to the first training step (best of {options.blocks})"
    )
    print(f"memory       {result['pss_bytes'] / 2**20:.0f} MB PSS of all processes")


if __name__ == "__main__":
    main()
