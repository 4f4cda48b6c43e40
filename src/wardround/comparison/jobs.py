"""How many cells run side by side: `--jobs auto`.

- cores: one cell for each core that is free, as far as memory goes;
- a GPU: a small network leaves it idle while the host launches kernels, aggregates and scores, so several
  cells share it, as far as its memory and the cores go; a large one fills it alone;
- several GPUs: as many cells on each.

Results do not depend on it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from wardround.config import Config
from wardround.data.opening import open_federation
from wardround.engine.networks import network_for
from wardround.errors import WardroundError
from wardround.machine import cores, free_memory
from wardround.models.base import forward_cost
from wardround.params import Params
from wardround.planning.costs import PROCESS_BYTES, ROOM, case_bytes, estimate_shape
from wardround.text import format_bytes
from wardround.training.device import FLOPS_A_SECOND, LAUNCH_BOUND_SECONDS, choose_device

log = logging.getLogger(__name__)

CORES_A_CELL = 2  # on a GPU: one launches kernels, one scores and writes
GPU_PROCESS_BYTES = 2**30  # what CUDA and its libraries take
MODEL_COPIES = 8  # params, gradients, two moments, two references, two messages


@dataclass(frozen=True)
class CellCost:
    """What one cell takes, estimated.

    num_bytes, free: memory of its device, needed and free; gpu_share: of a GPU's time, 1 where it is filled.
    """

    num_bytes: int
    free: int
    gpu_share: float = 1.0


def choose_jobs(configs: Iterable[Config], num_cells: int) -> tuple[int, str]:
    """Cells at a time on this machine, and why; configs: one of every kind of cell."""
    configs = list(configs)
    compute = configs[0].compute
    on_gpu = choose_device(compute).type == "cuda"
    cost = estimate_largest(configs)
    if on_gpu:
        gpus = 1 if ":" in compute.device else torch.cuda.device_count()
        jobs, why = count_jobs_on_gpus(cost, gpus, cores())
    else:
        workers = 1 if compute.workers == "auto" else compute.workers
        jobs, why = count_jobs_on_cores(cost, cores() // (workers * (compute.threads or 1)))
    return (jobs, why) if jobs <= num_cells else (num_cells, "all of them")


def count_jobs_on_cores(cost: CellCost | None, room: int) -> tuple[int, str]:
    """One cell for each core, fewer where memory is short; room: cells that the cores have room for.

    >>> count_jobs_on_cores(CellCost(2 * 10**9, 64 * 10**9), 8)
    (8, 'one for each core that is free')
    """
    if cost is not None and (fitting := count_fitting(cost)) < room:
        return fitting, describe_memory(cost, "memory")
    return max(1, room), "one for each core that is free"


def count_jobs_on_gpus(cost: CellCost | None, gpus: int, cores: int) -> tuple[int, str]:
    """As many as fill the GPUs, fewer where memory or cores are short."""
    on_each = "" if gpus == 1 else f" on each of {gpus} GPUs"
    if cost is None:
        return gpus, f"one{on_each or ' on the GPU'}: what a cell needs is not known"
    bounds = {
        f"a cell is estimated to fill {100 * cost.gpu_share:.0f} % of a GPU": int(1 / cost.gpu_share),
        f"{cores} cores, {CORES_A_CELL} for each": cores // (CORES_A_CELL * gpus),
        describe_memory(cost, "GPU memory"): count_fitting(cost),
    }
    why = min(bounds, key=lambda reason: bounds[reason])
    return gpus * max(1, bounds[why]), why + on_each


def count_fitting(cost: CellCost) -> int:
    return max(1, int(ROOM * cost.free / max(1, cost.num_bytes)))


def describe_memory(cost: CellCost, what: str) -> str:
    return f"about {format_bytes(cost.num_bytes)} of {what} for each, {format_bytes(cost.free)} are free"


# One cell


def estimate_largest(configs: Iterable[Config]) -> CellCost | None:
    """The most that any cell takes; None where it cannot be estimated."""
    try:
        costs = [estimate_cell(config) for config in configs]
    except WardroundError as error:  # each cell will say so itself
        log.debug("what a cell takes is not known: %s", error)
        return None
    return CellCost(
        max(cost.num_bytes for cost in costs),
        min(cost.free for cost in costs),
        max(cost.gpu_share for cost in costs),
    )


def estimate_cell(config: Config) -> CellCost:
    """By the sizes of its network, batch and cases; nothing is prepared for it."""
    federation = open_federation(config.data, config.seed)
    model = network_for(config, federation)
    shape, _ = estimate_shape(config, federation)
    operations, kept = forward_cost(model, shape)
    batch = min(config.compute.micro_batch or config.batch_size, config.batch_size)
    cases = case_bytes(federation.in_channels, shape) * sum(federation.counts.values())
    num_bytes = MODEL_COPIES * Params(model.state_dict()).num_bytes + int(batch * kept) + cases
    device = choose_device(config.compute)
    if device.type != "cuda":
        return CellCost(PROCESS_BYTES + num_bytes, free_memory())
    seconds = 3 * config.batch_size * operations / FLOPS_A_SECOND  # backward costs twice the forward
    share = min(1.0, max(0.01, seconds / LAUNCH_BOUND_SECONDS))
    return CellCost(GPU_PROCESS_BYTES + num_bytes, torch.cuda.mem_get_info(device)[0], share)
