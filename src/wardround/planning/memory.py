"""How much memory training takes, by parts, before anything is trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from wardround.engine.optimizers import OptimizerSettings
from wardround.models.base import Segmenter

PROCESS_BYTES = 300 * 2**20  # Python and torch; on a GPU, about what CUDA takes
HALF = 0.6  # what autocast leaves of the activations: norms and losses stay in float32
LOSS_COPIES = 4  # of the logits: probabilities, targets, their gradients
ROOM = 0.9  # of the free memory that may be filled


@dataclass(frozen=True)
class Memory:
    """Of one device (or, on processors, of the whole machine).

    parts: bytes of one process by what they are for; processes: how many share the device; server: bytes of
    the process that leads them, if it is another; free: bytes; measured: the peak of one process in the
    rehearsal, on a GPU.
    """

    device: str
    parts: Mapping[str, int | None]
    processes: int
    free: int
    server: int = 0
    measured: int | None = None

    @property
    def known(self) -> int:
        """Bytes of one process, without the parts nobody could tell."""
        return sum(part for part in self.parts.values() if part is not None)

    @property
    def total(self) -> int:
        """Of all processes on this device; what was measured counts where it is more."""
        one = max(self.known, (self.measured or 0) + (self.parts["process"] or 0))
        return self.processes * one + self.server

    @property
    def fits(self) -> bool:
        return self.total <= ROOM * self.free


def activation_bytes(model: Segmenter, batch_shape: Sequence[int], *, checkpointing: bool) -> int | None:
    """What the backward pass keeps of one batch, counted without computing; None if the network resists."""
    try:
        ghost = copy.deepcopy(model).to("meta").train()
        ghost.checkpointing = checkpointing
        own = {address(tensor) for tensor in (*ghost.parameters(), *ghost.buffers())}
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if address(tensor) not in own:
                sizes[address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = ghost(torch.empty(tuple(batch_shape), device="meta"))
    except Exception:  # some networks look at values, which a ghost has none of
        return None
    return sum(sizes.values()) + LOSS_COPIES * int(logits.nbytes)


def address(tensor: Tensor) -> int:
    """Which storage a tensor lies in; views share one."""
    return int(tensor.untyped_storage()._cdata)


def optimizer_bytes(settings: OptimizerSettings, trainable: int) -> int:
    """Moments of the optimizer: two of Adam, one of SGD with momentum."""
    slots = (1 if settings.momentum else 0) if settings.name == "sgd" else 2
    return slots * trainable


def case_bytes(channels: int, shape: Sequence[int]) -> int:
    """One case in memory: image in float32, label in eight bytes."""
    return (4 * channels + 8) * math.prod(shape)
