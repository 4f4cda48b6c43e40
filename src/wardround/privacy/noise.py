"""Clipping and Gaussian noise.

Noise comes from the operating system's random numbers alone, never from the run's seed: whoever knows the
seed could take it off again. So a run with privacy cannot be repeated bit by bit, and a task that is done
twice draws fresh noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor


def draw_uniform(count: int) -> np.ndarray:
    """Numbers strictly between 0 and 1, with 53 random bits each."""
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def draw_gaussian(like: Tensor) -> Tensor:
    """Standard normal numbers of this shape, in double precision."""
    drawn = torch.from_numpy(ndtri(draw_uniform(like.numel())))
    return drawn.reshape(like.shape).to(like.device)


def clip_factor(tensors: Sequence[Tensor], clip: float) -> float:
    """What brings the norm of all tensors together to at most `clip`; 0 where they are not finite."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
    if not math.isfinite(norm):
        return 0.0
    return min(1.0, clip / norm) if norm else 1.0


def add_noise(tensor: Tensor, deviation: float) -> Tensor:
    """The tensor with independent noise of this standard deviation on every number, rounded once."""
    if not deviation:
        return tensor
    return (tensor.double() + deviation * draw_gaussian(tensor)).to(tensor.dtype)
