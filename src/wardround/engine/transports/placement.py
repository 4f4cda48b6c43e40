"""Who takes part in a round, how many worker processes share the clients, and which device each takes.

A worker takes seconds to start, hundreds of megabytes, and exchanges files with the server. So one process
does small runs, and `auto` starts more only where they save more than they cost:

- cores: as many as make the rounds shortest, given how evenly the clients can be dealt out;
- one GPU: a single process, which fills it;
- several GPUs: a worker for each.

Results are the same bytes for any number of workers with the same threads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wardround.config import ComputeSettings, Config
from wardround.data.federation import Federation
from wardround.data.roles import NOT_HOSPITALS, POOLED
from wardround.engine.networks import TRAIN_SHARE, network_for, training_shape
from wardround.errors import ConfigError
from wardround.machine import cores, runs_at_once, total_memory
from wardround.methods.base import Method
from wardround.models.base import forward_cost
from wardround.seeding import generator
from wardround.text import format_bytes, suggest
from wardround.training.device import choose_device, threads_for

log = logging.getLogger(__name__)

ROOM_ON_HOST = 48 * 2**20
START_SECONDS = 4.0  # what a worker must save before it is started; starting one takes 2 to 3
WORKER_BYTES = 350 * 2**20  # Python and torch, before model and cases
MEMORY_SHARE = 0.5  # of the machine's, for all workers together
EXCHANGE_BYTES_A_SECOND = 500e6  # messages are files, written and read
FLOPS_A_SECOND = 50e9  # of one core in float32, training; small networks reach half of it
THREADS_POWER = 0.5  # n threads are about sqrt(n) times as fast as one


@dataclass(frozen=True)
class Placement:
    """Where the clients' work is done.

    devices: of each worker; threads: of each process; why: what `auto` weighed, in words; room: bytes of
    replies and memories that stay where they were computed, if that is this process.
    """

    devices: tuple[str, ...]
    threads: int
    why: str = ""
    room: int = 0

    @property
    def workers(self) -> int:
        return len(self.devices)

    def as_dict(self) -> dict[str, Any]:
        """For environment.json."""
        return {
            "workers": self.workers,
            "workers_why": self.why,
            "devices": list(self.devices),
            "threads": self.threads,
            "memory": self.describe_room(),
        }

    def describe_room(self) -> str:
        """Where messages between server and clients, and clients' memories, are during the run."""
        if self.workers > 1:
            return "messages and memories are files between the processes"
        return f"up to {format_bytes(self.room)} of messages and memories stay in memory, the rest on disk"


@dataclass(frozen=True)
class Work:
    """What lies ahead, estimated.

    sizes: cases of each client that trains; seconds: of all rounds on one core; num_bytes: of the model;
    training_bytes: what one worker needs to train it.
    """

    sizes: Mapping[str, int]
    seconds: float = 0.0
    num_bytes: int = 0
    training_bytes: int = 0
    rounds: int = 1


def place(config: Config, federation: Federation, names: Sequence[str]) -> Placement:
    """What `compute.workers`, `device` and `threads` come to on this machine, for this run."""
    settings = config.compute
    device, gpus = settings.device, torch.cuda.device_count()
    chosen = choose_device(settings).type
    on_gpu = chosen == "cuda"
    if config.data.in_memory or config.objects:
        workers, why = 1, "what is handed over in Python stays in this process"
        if settings.workers not in ("auto", 1):
            log.warning("compute.workers is %s, but %s: 1 is used.", settings.workers, why)
    elif settings.workers != "auto":
        workers, why = min(settings.workers, len(names)), "as asked"
    elif chosen == "mps":
        workers, why = 1, "one process fills the GPU"
    elif on_gpu:
        workers, why = count_workers_on_gpus(device, gpus, len(present_sizes(config, federation, names)))
    else:
        work = estimate_work(config, federation, names)
        workers, why = count_workers_on_cores(work, cores(), settings.threads, total_memory())
    log.info("%d worker%s: %s", workers, "" if workers == 1 else "s", why)
    devices = choose_devices(device if on_gpu else chosen, workers, gpus)
    room = choose_room(settings) if workers == 1 else 0
    return Placement(devices, threads_for(settings, workers), why, room)


def choose_room(settings: ComputeSettings) -> int:
    """Bytes of replies and memories that stay where they were computed, as asked or as free memory allows.

    On a GPU a quarter of what is free, shared among runs side by side. On cores a step takes far longer than
    a file, so little stays, and memory does not grow with the number of clients.
    """
    if settings.memory != "auto":
        return settings.memory
    device = choose_device(settings)
    if device.type != "cuda":
        return ROOM_ON_HOST
    return torch.cuda.mem_get_info(device)[0] // 4 // runs_at_once()


def choose_devices(device: str, workers: int, gpus: int) -> tuple[str, ...]:
    """The device of each worker: GPUs in turn, unless one is named.

    >>> choose_devices("auto", 3, 2)
    ('cuda:0', 'cuda:1', 'cuda:0')
    >>> choose_devices("cuda:1", 2, 2), choose_devices("cpu", 2, 2), choose_devices("cuda", 1, 4)
    (('cuda:1', 'cuda:1'), ('cpu', 'cpu'), ('cuda',))
    """
    if device in ("cpu", "mps") or ":" in device:
        return (device,) * workers
    if workers == 1:
        return ("cuda",)
    return tuple(f"cuda:{number % max(gpus, 1)}" for number in range(workers))


def count_workers_on_gpus(device: str, gpus: int, clients: int) -> tuple[int, str]:
    """A worker for each GPU, as far as there are clients to train."""
    if ":" in device:
        return 1, f"{device} is named, and one process fills a GPU"
    if gpus <= 1:
        return 1, "one process fills a GPU"
    if clients <= 1:
        return 1, "one client trains"
    return min(gpus, clients), f"{gpus} GPUs, {clients} clients that train"


def count_workers_on_cores(work: Work, cores: int, threads: int | None, memory: int) -> tuple[int, str]:
    """As many workers as make the run shortest; one unless others save more than they cost."""
    if len(work.sizes) <= 1:
        return 1, "one client trains"
    most = min(len(work.sizes), cores if threads is None else cores // threads)
    if most <= 1:
        return 1, "no core is left for a second one"
    room = int(MEMORY_SHARE * memory / (WORKER_BYTES + work.training_bytes))
    if room <= 1:
        return 1, "memory is short"
    seconds = {n: estimate_seconds(work, n, cores, threads) for n in range(1, min(most, room) + 1)}
    best = min(seconds, key=lambda count: (seconds[count], count))
    saved = seconds[1] - seconds[best]
    if best == 1 or saved <= START_SECONDS:
        return 1, f"about {seconds[1]:.0f} s of training: more would not pay for their start"
    return best, f"about {seconds[1] / seconds[best]:.1f} times as fast as one"


def deal(sizes: Mapping[str, int], workers: int) -> list[list[str]]:
    """Clients for each worker: the largest first, each to the worker with least to do.

    >>> deal({"a": 5, "b": 3, "c": 2}, 2)
    [['a'], ['b', 'c']]
    """
    hands: list[list[str]] = [[] for _ in range(min(workers, len(sizes)))]
    loads = [0] * len(hands)
    for name in sorted(sizes, key=lambda client: (-sizes[client], client)):
        lightest = loads.index(min(loads))
        hands[lightest].append(name)
        loads[lightest] += max(sizes[name], 1)
    return hands


def estimate_seconds(work: Work, workers: int, cores: int, threads: int | None) -> float:
    """Of all rounds with so many workers: the busiest one decides, and messages take their time."""
    hands = deal(work.sizes, workers)
    longest = max(sum(max(work.sizes[name], 1) for name in hand) for hand in hands)
    share = longest / sum(max(size, 1) for size in work.sizes.values())
    speed = float(threads or max(1, cores // workers)) ** THREADS_POWER
    files = work.rounds * (1 + len(work.sizes)) * work.num_bytes if workers > 1 else 0
    return float(work.seconds * share / speed + files / EXCHANGE_BYTES_A_SECOND)


# The work ahead


def present_sizes(config: Config, federation: Federation, names: Sequence[str]) -> dict[str, int]:
    """Cases of the clients that train in a usual round."""
    sizes = federation.sizes(names)
    if POOLED in sizes:
        return {POOLED: sizes[POOLED]}
    sizes = {name: size for name, size in sizes.items() if name not in NOT_HOSPITALS and size}
    share = config.participation
    if not isinstance(share, float):
        return {name: size for name, size in sizes.items() if name in share}
    count = count_present(config, share, len(sizes))
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:count])


def estimate_work(config: Config, federation: Federation, names: Sequence[str]) -> Work:
    """The clients that train and how long one core would take, from operations and a usual rate."""
    sizes = present_sizes(config, federation, names)
    shape = training_shape(config, federation) if len(sizes) > 1 and cores() > 1 else None
    if shape is None:
        return Work(sizes, rounds=config.rounds)
    model = network_for(config, federation)
    num_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    work = Work(sizes, 0.0, num_bytes, 5 * num_bytes, config.rounds)
    cases = TRAIN_SHARE * sum(sizes.values()) * config.local_epochs * config.rounds
    if config.local_steps is not None:
        cases = config.local_steps * config.batch_size * len(sizes) * config.rounds
    most = 6 * sum(p.numel() for p in model.parameters()) * math.prod(model.padded_size(shape)) * cases
    if most / FLOPS_A_SECOND <= START_SECONDS:  # every weight at every voxel: no need to look closer
        return replace(work, seconds=most / FLOPS_A_SECOND)
    flops, kept = forward_cost(model, shape)
    batch = min(config.compute.micro_batch or config.batch_size, config.batch_size)
    return replace(
        work,
        seconds=3 * flops * cases / FLOPS_A_SECOND,  # backward costs twice the forward
        training_bytes=work.training_bytes + int(batch * kept),
    )


def check_participation(config: Config, method: Method, federation: Federation, names: Sequence[str]) -> None:
    """Refuse settings that no round could meet; names: everyone who can be asked."""
    share = config.participation
    if not isinstance(share, float):
        if method.pooled:
            raise ConfigError(
                f"participation names clients, but {method.title} trains on everybody's cases. "
                "Leave participation out."
            )
        for name in share:
            if name not in federation.names:
                raise ConfigError(
                    f"participation names '{name}', which is not a client.{suggest(name, federation.names)}"
                )
        if config.min_clients > len(set(share)):
            raise ConfigError(
                f"min_clients is {config.min_clients}, but participation names only {len(set(share))}."
            )
    if config.min_clients > len(names):
        raise ConfigError(f"min_clients is {config.min_clients}, but there are only {len(names)} clients.")


def choose_present(config: Config, method: Method, able: Sequence[str], round: int) -> list[str]:
    """Of the clients that can train, the named ones, or a random share chosen for this round."""
    share = config.participation
    if not isinstance(share, float):
        return [name for name in able if name in share]
    if method.pooled or share == 1.0:
        return list(able)
    order = torch.randperm(len(able), generator=generator(config.seed, "participation", round))
    return sorted(able[index] for index in order[: count_present(config, share, len(able))].tolist())


def count_present(config: Config, share: float, num_able: int) -> int:
    """How many clients a share comes to: rounded half up, at least min_clients."""
    return min(num_able, max(1, config.min_clients, math.floor(share * num_able + 0.5)))
