"""How many cells run side by side: `--jobs auto`.

- cores: one cell for each core that is free, as far as memory goes;
- a GPU: a small network leaves it idle while the host launches kernels, aggregates and scores, so several
  cells share it, as far as its memory and the cores go; a large one fills it alone;
- several GPUs: as many cells on each.

Results are the same bytes for any number with the same `compute.threads`, on a CPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from wardround.config import Config
from wardround.data.opening import open_federation
from wardround.engine.networks import network_for
from wardround.errors import WardroundError
from wardround.gpu_service import VISIBLE_GPUS
from wardround.machine import cores, free_memory
from wardround.models.base import forward_cost
from wardround.params import Params
from wardround.planning.costs import PROCESS_BYTES, ROOM, case_bytes, estimate_shape
from wardround.text import format_bytes
from wardround.training.device import FLOPS_A_SECOND, LAUNCH_BOUND_SECONDS, choose_device

log = logging.getLogger(__name__)

CORES_A_CELL = 2  # on a GPU: one launches kernels, one scores and writes
GPU_PROCESS_BYTES = 2**30  # what CUDA and its libraries take
QUERY = ("nvidia-smi", "--query-gpu=memory.free,compute_mode", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20.0
MODEL_COPIES = 8  # params, gradients, two moments, two references, two messages


@dataclass(frozen=True)
class CellCost:
    """What one cell takes, estimated.

    num_bytes: memory of its device; gpu_share: of a GPU's time, 1 where it fills it.
    """

    num_bytes: int
    gpu_share: float = 1.0


@dataclass(frozen=True)
class Room:
    """What a device has left. is_exclusive: it serves one process at a time."""

    free: int
    is_exclusive: bool = False


def choose_jobs(configs: Iterable[Config], num_cells: int) -> tuple[int, str]:
    """Cells at a time on this machine, and why; configs: one of every kind of cell."""
    configs = list(configs)
    compute = configs[0].compute
    device = choose_device(compute)
    cost = estimate_largest(configs)
    if device.type == "cuda":
        gpus = 1 if device.index is not None else torch.cuda.device_count()
        jobs, why = count_jobs_on_gpus(cost, find_room(device), gpus, cores())
    else:
        workers = 1 if compute.workers == "auto" else compute.workers
        most = cores() // (workers * (compute.threads or 1))
        jobs, why = count_jobs_on_cores(cost, Room(free_memory()), most)
    return (jobs, why) if jobs <= num_cells else (num_cells, "all of them")


def count_jobs_on_cores(cost: CellCost | None, room: Room, most: int) -> tuple[int, str]:
    """One cell for each core, fewer where memory is short; most: cells that the cores have room for.

    >>> count_jobs_on_cores(CellCost(2 * 10**9), Room(64 * 10**9), 8)
    (8, 'one for each core that is free')
    """
    if cost is not None and (fitting := count_fitting(cost, room)) < most:
        return fitting, describe_memory(cost, room, "memory")
    return max(1, most), "one for each core that is free"


def count_jobs_on_gpus(cost: CellCost | None, room: Room, gpus: int, cores: int) -> tuple[int, str]:
    """As many as fill the GPUs, fewer where memory or cores are short."""
    on_each = "" if gpus == 1 else f" on each of {gpus} GPUs"
    if cost is None:
        return gpus, f"one{on_each or ' on the GPU'}, since what a cell needs is not known"
    if room.is_exclusive:
        return gpus, f"one{on_each or ' on the GPU'}, since it serves one process at a time (compute mode)"
    bounds = {
        f"a cell is estimated to fill {100 * cost.gpu_share:.0f} % of a GPU": int(1 / cost.gpu_share),
        f"{cores} cores, {CORES_A_CELL} for each": cores // (CORES_A_CELL * gpus),
        describe_memory(cost, room, "GPU memory"): count_fitting(cost, room),
    }
    why = min(bounds, key=lambda reason: bounds[reason])
    return gpus * max(1, bounds[why]), why + on_each


def count_fitting(cost: CellCost, room: Room) -> int:
    return max(1, int(ROOM * room.free / max(1, cost.num_bytes)))


def describe_memory(cost: CellCost, room: Room, what: str) -> str:
    return f"about {format_bytes(cost.num_bytes)} of {what} for each, {format_bytes(room.free)} are free"


def find_room(device: torch.device) -> Room:
    """What a GPU has left, or the fullest of several.

    Asking CUDA would make this process a user of it, so the driver's tool is asked where it is installed.
    """
    visible = os.environ.get(VISIBLE_GPUS)
    command = [*QUERY, *(["-i", visible] if visible else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
        rows = [line.split(",") for line in done.stdout.splitlines()]
        rows = rows if device.index is None else [rows[device.index]]
        free = min(int(row[0]) for row in rows) * 2**20
        return Room(free, any("exclusive" in row[1].lower() for row in rows))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return Room(torch.cuda.mem_get_info(device)[0])


# One cell


def estimate_largest(configs: Iterable[Config]) -> CellCost | None:
    """The most that any cell takes; None where it cannot be estimated."""
    try:
        costs = [estimate_cell(config) for config in configs]
    except WardroundError as error:  # each cell will say so itself
        log.debug("what a cell takes is not known: %s", error)
        return None
    return CellCost(max(cost.num_bytes for cost in costs), max(cost.gpu_share for cost in costs))


def estimate_cell(config: Config) -> CellCost:
    """By the sizes of its network, batch and cases; nothing is prepared for it."""
    federation = open_federation(config.data, config.seed)
    model = network_for(config, federation)
    shape, _ = estimate_shape(config, federation)
    operations, kept = forward_cost(model, shape)
    batch = min(config.compute.micro_batch or config.batch_size, config.batch_size)
    cases = case_bytes(federation.in_channels, shape) * sum(federation.counts.values())
    num_bytes = MODEL_COPIES * Params(model.state_dict()).num_bytes + int(batch * kept) + cases
    if choose_device(config.compute).type != "cuda":
        return CellCost(PROCESS_BYTES + num_bytes)
    seconds = 3 * config.batch_size * operations / FLOPS_A_SECOND  # backward costs twice the forward
    share = min(1.0, max(0.01, seconds / LAUNCH_BOUND_SECONDS))
    return CellCost(GPU_PROCESS_BYTES + num_bytes, share)
