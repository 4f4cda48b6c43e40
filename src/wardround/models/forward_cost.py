"""About what a forward pass costs, quickly: for what is decided at the start of every run.

`models.measure` counts exactly; its first use takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wardround.models.base import Segmenter


def forward_cost(model: Segmenter, shape: Sequence[int]) -> tuple[float, float]:
    """About what one case costs in a forward pass: operations of convolutions and linear layers, and bytes
    of what all layers put out. Counted on a small image and scaled.
    """
    small = [min(side, max(2 * model.divisor, 16)) for side in shape]
    operations, kept = 0.0, 0.0

    def count(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal operations, kept
        kept += output.nbytes if isinstance(output, torch.Tensor) else 0
        if isinstance(layer, _ConvNd | nn.Linear):
            weight = layer.weight
            places = inputs[0].numel() if isinstance(layer, _ConvTransposeNd) else output.numel()
            operations += 2 * (weight.numel() / len(weight)) * places

    leaves = [layer for layer in model.modules() if not any(True for _ in layer.children())]
    handles = [layer.register_forward_hook(count) for layer in leaves]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, model.in_channels, *small))
    except Exception:  # a network for one size only: every fourth weight at every voxel
        weights = sum(parameter.numel() for parameter in model.parameters())
        return 2 * weights / 4 * math.prod(shape), 0.0
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    scale = math.prod(model.padded_size(shape)) / math.prod(model.padded_size(small))
    return operations * scale, kept * scale
