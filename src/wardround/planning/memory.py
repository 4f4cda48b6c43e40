"""How much memory training takes, by parts, before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from wardround.config import OptimizerSettings
from wardround.models.base import Segmenter
from wardround.models.measure import kept_bytes
from wardround.models.probe import meta_copy

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
    ghost = meta_copy(model)
    for part in ghost.modules():  # a stem has its backbone inside
        if isinstance(part, Segmenter):
            part.checkpointing = checkpointing
    try:
        kept = kept_bytes(ghost, torch.empty(tuple(batch_shape), device="meta"))
    except Exception:  # some networks look at values, which a ghost has none of
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
