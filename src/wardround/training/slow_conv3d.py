"""3D convolutions of one small volume, as quick as of several.

On a CPU, PyTorch gives a batch of one small volume to `slow_conv3d`, larger batches to oneDNN, which took two
volumes in less time than the other took one. Slices along depth are a batch too: with the slices that a
kernel reaches as channels, the same products and sums are a 2D convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LARGEST = 20_480  # channels * depth * height for which PyTorch leaves oneDNN aside


class AvoidSlowConv3d(TorchFunctionMode):
    """Inside this context, convolutions that PyTorch would give to `slow_conv3d` go to oneDNN."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv3d and not kwargs and is_slow(*args):
            return convolve_slices(*args)
        return func(*args, **(kwargs or {}))


def is_slow(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether this is a convolution of one small volume on a CPU, as a layer of a network calls it."""
    by_axis = all(isinstance(value, tuple) for value in (stride, padding, dilation))
    if not by_axis or x.dim() != 5 or not x.is_cpu:
        return False
    return len(x) == 1 and x.shape[:4].numel() <= LARGEST and dilation[0] == groups == 1


def convolve_slices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """`torch.conv3d` of one volume by `torch.conv2d` of its slices."""
    depth = weight.shape[2]
    padded = F.pad(x[0], (0, 0, 0, 0, padding[0], padding[0]))
    slices = padded.unfold(1, depth, stride[0])  # (C, D, H, W) -> (C, D', H, W, depth)
    slices = slices.permute(1, 0, 4, 2, 3).flatten(1, 2)  # -> (D', C * depth, H, W)
    found = F.conv2d(slices, weight.flatten(1, 2), bias, stride[1:], padding[1:], dilation[1:])
    return found.transpose(0, 1).unsqueeze(0)
