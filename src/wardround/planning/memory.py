"""Memory: what training needs on each device, by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from wardround.config import Config, OptimizerSettings
from wardround.data.federation import Federation
from wardround.data.serving.resident import DEVICE_SHARE
from wardround.engine.transports.placement import Placement, deal
from wardround.machine import free_memory
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.models.measure import kept_bytes
from wardround.models.probe import meta_copy
from wardround.params import Params
from wardround.planning.cases import ClientPlan
from wardround.planning.dry_run import DryRun
from wardround.training.device import Compute

PROCESS_BYTES = 300 * 2**20  # Python and torch; on a GPU, about what CUDA takes
HALF = 0.6  # what autocast leaves of the activations: norms and losses stay in float32
LOSS_COPIES = 4  # of the logits: probabilities, targets, their gradients
ROOM = 0.9  # of the free memory that may be filled


@dataclass(frozen=True)
class Memory:
    """Memory of one device; on the CPU, of the machine.

    parts: bytes of one process by use, None where unknown; processes: how many share the device; server:
    bytes of a server process beside them; measured: peak bytes of one process in the dry run, on a GPU.
    """

    device: str
    parts: Mapping[str, int | None]
    processes: int
    free: int
    server: int = 0
    measured: int | None = None

    @property
    def known(self) -> int:
        """Bytes of one process, unknown parts left out."""
        return sum(part for part in self.parts.values() if part is not None)

    @property
    def total(self) -> int:
        """Bytes of all processes on this device; the measured peak counts where it is higher."""
        one = max(self.known, (self.measured or 0) + (self.parts["process"] or 0))
        return self.processes * one + self.server

    @property
    def fits(self) -> bool:
        return self.total <= ROOM * self.free


def activation_bytes(model: Segmenter, batch_shape: Sequence[int], *, checkpointing: bool) -> int | None:
    """What the backward pass keeps of one batch, counted without computing; None if it cannot be counted."""
    ghost = meta_copy(model)
    for part in ghost.modules():  # a stem has its backbone inside
        if isinstance(part, Segmenter):
            part.checkpointing = checkpointing
    try:
        kept = kept_bytes(ghost, torch.empty(tuple(batch_shape), device="meta"))
    except Exception:  # some networks read values, which a meta tensor does not have
        return None
    logits = batch_shape[0] * model.num_outputs * math.prod(batch_shape[2:]) * torch.float32.itemsize
    return kept + LOSS_COPIES * logits


def optimizer_bytes(settings: OptimizerSettings, trainable: int) -> int:
    """Moments of the optimizer: two of Adam, one of SGD with momentum."""
    slots = (1 if settings.momentum else 0) if settings.name == "sgd" else 2
    return slots * trainable


def case_bytes(channels: int, shape: Sequence[int]) -> int:
    """One case in memory: image in float32, label in eight bytes."""
    return (4 * channels + 8) * math.prod(shape)


def estimate_memory(
    config: Config,
    federation: Federation,
    model: Segmenter,
    shape: Sequence[int],
    clients: Sequence[ClientPlan],
    placement: Placement,
    compute: Compute,
    dry_run: DryRun | None,
) -> list[Memory]:
    """Memory of each device; of its processes, the one with most cases counts."""
    parameters = tensor_bytes(model.state_dict())
    trainable = tensor_bytes(Params.trainable(model))
    needs = build_method(config).needs | build_objective(config).needs
    size = largest_batch(config, clients)
    kept = activation_bytes(
        model, (size, model.in_channels, *shape), checkpointing=config.compute.checkpointing
    )
    if kept is not None and compute.autocast is not None:
        kept = int(HALF * kept)
    one = case_bytes(federation.in_channels, shape)
    cases = {client.name: client.train + client.val + client.test for client in clients}
    hands = deal(federation.sizes(list(cases)), placement.workers)
    found = []
    for device in dict.fromkeys(placement.devices):
        on_gpu = device != "cpu"
        free = torch.cuda.mem_get_info(torch.device(device))[0] if on_gpu else free_memory()
        here = [hand for hand, where in zip(hands, placement.devices, strict=False) if where == device]
        held = [one * sum(cases[name] for name in hand) for hand in here]
        data = max(held, default=0)
        if on_gpu and config.compute.resident != "device":  # a client's cases move only if they fit
            data = sum(min(one * cases[n], int(DEVICE_SHARE * free)) for n in max(here, key=len, default=[]))
            data = 0 if config.compute.resident in ("host", "disk") else data
        parts: dict[str, int | None] = {
            "process": PROCESS_BYTES,
            "parameters": parameters,
            "gradients": trainable,
            "optimizer": optimizer_bytes(config.optimizer, trainable),
            "references": parameters * len(needs & {"global", "previous"}),
            "messages": 2 * parameters,
            "activations": kept,
            "cases": data,
        }
        peak = dry_run.peak if dry_run is not None and on_gpu else None
        server = PROCESS_BYTES + 3 * parameters if placement.workers > 1 and not on_gpu else 0
        found.append(Memory(device, parts, max(1, len(here)), free, server, peak))
    return found


def largest_batch(config: Config, clients: Sequence[ClientPlan]) -> int:
    """Most cases that pass through the network at once."""
    whole = min(config.batch_size, max((client.train for client in clients), default=1))
    return max(1, min(config.compute.micro_batch or whole, whole))


def tensor_bytes(tensors: Mapping[str, torch.Tensor] | Params) -> int:
    return sum(tensors[name].nbytes for name in tensors)


def shared_bytes(config: Config, model: Segmenter) -> int:
    """Bytes of the tensors that clients send."""
    travelling = set(build_method(config).shared(model)) - set(build_objective(config).local_names(model))
    return sum(tensor.nbytes for name, tensor in model.state_dict().items() if name in travelling)
