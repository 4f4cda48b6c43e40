"""float64 where a device has it: Apple's GPUs (mps) have none, and take float32 there.

Sums and differences that float32 would spoil are formed in float64 everywhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor


def widest(device: torch.device) -> torch.dtype:
    """The widest type of real numbers on a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def widen(tensor: Tensor) -> Tensor:
    """The tensor in the widest type of its device."""
    return tensor.to(widest(tensor.device))
