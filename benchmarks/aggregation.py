"""What an aggregation rule costs when the clients' models lie on disk.

Writes one model a client, all different, and lets rules aggregate them as a server would: through
`run_round`, from stored replies. Time is held against reading every model once from the page cache, memory
against the size of a model. Each rule's memory is measured in a process of its own, as the peak over what was
resident before; times are medians over turns in which reading and the rules alternate.

    python benchmarks/aggregation.py                                      # 80 clients, 19 million parameters
    python benchmarks/aggregation.py --clients 8 --rules fedavg safcf median krum

"reading" is `Path.read_bytes` for one model after the other; "reading in place" reads them into one buffer
that is used again, which spares the system the fresh memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from wardround import models
from wardround.messages import Message, Reply
from wardround.methods import METHODS
from wardround.models import ModelSettings
from wardround.params import Params

PARAMETERS_OF_ONE_FILTER = 75_300  # a 3D U-Net of five levels has about this times filters²


class Server:
    """Clients that have answered already."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = list(replies)

    def ask(self, task: str, message: Message) -> list[Reply]:
        return list(self._replies)


def network(parameters: int) -> torch.nn.Module:
    filters = max(1, round((parameters / PARAMETERS_OF_ONE_FILTER) ** 0.5))
    settings = ModelSettings(name="unet3d", base_filters=filters, levels=5)
    return models.build(settings, in_channels=1, num_outputs=2, dimensions=3)


def write_replies(folder: Path, clients: int, start: Params) -> None:
    """A model a client, each moved a little at random."""
    for client in range(clients):
        draw = torch.Generator().manual_seed(client)
        moved = start.map(lambda t: t + 0.01 * torch.randn(t.shape, generator=draw))  # noqa: B023
        Message(params=moved).save(folder / f"reply-{client:04d}.safetensors", durable=False)


def open_server(folder: Path) -> Server:
    paths = sorted(folder.glob("*.safetensors"))
    return Server(
        [
            Reply(Message.load(path).params, client=path.stem, num_examples=10 + number)
            for number, path in enumerate(paths)
        ]
    )


def rule(name: str, folder: Path, parameters: int) -> Callable[[], Params]:
    """A function that aggregates all replies once."""
    method, server = METHODS[name](), open_server(folder)
    state = method.start(network(parameters))
    return lambda: method.run_round(state, server).params  # type: ignore[arg-type]


def read_all(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        path.read_bytes()


def read_in_place(folder: Path) -> None:
    buffer = bytearray(next(folder.glob("*.safetensors")).stat().st_size)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            file.readinto(buffer)


def resident(field: str) -> int:
    """Bytes this process has in memory ("VmRSS") or had at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(name: str, folder: Path, parameters: int) -> None:
    """Prints the peak of one aggregation over what was resident before it."""
    aggregate = rule(name, folder, parameters)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    aggregate()
    print(json.dumps({"extra_bytes": resident("VmHWM") - before}))


def measure_times(names: Sequence[str], folder: Path, parameters: int, turns: int) -> dict[str, list[float]]:
    work: dict[str, Callable[[], Any]] = {
        "reading": lambda: read_all(folder),
        "reading in place": lambda: read_in_place(folder),
        **{name: rule(name, folder, parameters) for name in names},
    }
    read_in_place(folder)  # into the page cache
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, function in work.items():
            started = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def refuse_too_large(folder: Path, num_bytes: int) -> None:
    """Replies must fit the disk, and the memory as page cache."""
    free_disk = shutil.disk_usage(folder).free
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_memory = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    for place, free in (("disk", free_disk), ("memory", free_memory)):
        if free < 1.2 * num_bytes:
            sys.exit(
                f"{num_bytes / 2**30:.1f} GiB of models do not fit into the {free / 2**30:.1f} GiB of free "
                f"{place}. Take fewer --clients or --parameters."
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=80)
    parser.add_argument("--parameters", type=int, default=19_250_000, help="of a model, about")
    parser.add_argument("--rules", nargs="+", default=["fedavg", "safcf"], metavar="METHOD")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory-of", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        measure_memory(options.memory_of[0], Path(options.memory_of[1]), options.parameters)
        return

    start = Params.of(network(options.parameters))
    size = start.num_bytes
    with tempfile.TemporaryDirectory(prefix="wardround-aggregation-") as name:
        folder = Path(name)
        refuse_too_large(folder, options.clients * size)
        write_replies(folder, options.clients, start)
        del start
        extra = {}
        for method in options.rules:
            command = [sys.executable, __file__, "--memory-of", method, name]
            command += ["--parameters", str(options.parameters), "--threads", str(options.threads)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            extra[method] = json.loads(done.stdout.splitlines()[-1])["extra_bytes"] / size
        seconds = measure_times(options.rules, folder, options.parameters, options.turns)
    medians = {work: statistics.median(values) for work, values in seconds.items()}
    judged = "safcf" if "safcf" in options.rules else options.rules[0]
    result = {
        "clients": options.clients,
        "parameters": size // 4,
        "threads": options.threads,
        "model_bytes": size,
        "seconds": medians,
        "all_seconds": seconds,
        "extra_models": extra,
        "judged": judged,
        "ratio": medians[judged] / medians["reading"],
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{options.clients} stored models of {size // 4:,} parameters ({size / 2**20:.0f} MiB), ", end="")
    print(f"{options.threads} threads, median of {options.turns}")
    print(f"{'':20s}{'seconds':>9s}{'x reading':>11s}{'x in place':>12s}{'peak, models':>14s}")
    for work, median in medians.items():
        ratios = median / medians["reading"], median / medians["reading in place"]
        peak = f"{extra[work]:14.2f}" if work in extra else ""
        print(f"{work:20s}{median:9.2f}{ratios[0]:11.2f}{ratios[1]:12.2f}{peak}")


if __name__ == "__main__":
    main()
