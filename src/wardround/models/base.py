"""Segmenter: what every network promises, ours or a wrapped one.

A subclass writes two short functions, `_output` and `_bottleneck`, and may trust that the sides
it is given divide by `divisor`: padding and cropping happen here, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.checkpoint import checkpoint

from wardround.errors import ConfigError
from wardround.models.norm import frozen_statistics, state_names
from wardround.models.start_weights import Match


@dataclass
class Output:
    """What one forward pass gives.

    logits: (B, num_outputs, *spatial), the size of the input.
    bottleneck: the deepest encoder level after its last activation, before any dropout.
    decoder: the last decoder map before the head and its dropout, the size of the input.
    stages: every decoder stage's output, coarse to fine; the last one is `decoder`.
    deep: logits of coarser decoder stages, fine to coarse, in training with deep supervision.

    A padded input leaves its padding in the coarse maps; the maps of full size are cropped.
    """

    logits: Tensor
    bottleneck: Tensor | None = None
    decoder: Tensor | None = None
    stages: tuple[Tensor, ...] = ()
    deep: tuple[Tensor, ...] = ()


class Segmenter(nn.Module):
    """A network from (B, in_channels, *spatial) to logits (B, num_outputs, *spatial), any size.

    divisor: sides are padded up to a multiple of it, or of what `divisors` has for each axis.
    has_features: whether `forward_features` fills more than the logits.
    checkpointing: whether parts run through `block` are computed again instead of kept.
    needs_two: whether the bottleneck must keep two voxels, because one alone cannot be normalised.
    start_weights: what of a file its first weights came from; None if it had none.
    is_deep: whether passes in training have logits of coarser stages too (deep supervision).
    """

    has_features: bool = True
    checkpointing: bool = False
    needs_two: bool = False
    start_weights: Match | None = None
    is_deep: bool = False
    _deep: tuple[Tensor, ...] | None = None  # the last pass's, where somebody waits for them

    def __init__(self, *, in_channels: int, num_outputs: int, dimensions: int, divisor: int) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_outputs = num_outputs
        self.dimensions = dimensions
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        """The logits alone."""
        return self.forward_features(x).logits

    def forward_features(self, x: Tensor) -> Output:
        """Logits and features of one pass."""
        size = x.shape[2:]
        output = self._output(self._pad(x))
        output.logits = crop(output.logits, size)
        if output.decoder is not None:
            output.decoder = crop(output.decoder, size)
            output.stages = (*output.stages[:-1], output.decoder)
        if self._deep is not None:
            self._deep = output.deep
        return output

    def with_deep_logits(self, run: Callable[[], Output]) -> Output:
        """What a pass gives, its coarser logits too, even if it was compiled for others alone."""
        self._deep = ()
        try:
            output = run()
            output.deep = self._deep
        finally:
            self._deep = None
        return output

    def supervise_deeply(self) -> None:
        """Add a head to decoder stages below the image's resolution, the coarsest left out (nnU-Net)."""
        raise ConfigError(
            f"model.deep_supervision: {type(self).__name__} shows no decoder stages to supervise. Choose a "
            "U-Net of ours or monai:DynUNet, or leave it out."
        )

    def encode(self, x: Tensor) -> Tensor:
        """The bottleneck alone, without the decoder's cost; exactly `forward_features(x).bottleneck`."""
        return self._bottleneck(self._pad(x))

    def start_fit(self) -> None:
        """Called when local training starts, after the received params were loaded; default nothing."""

    def extra_losses(self, num_examples: int) -> dict[str, Tensor]:
        """Loss terms of the network itself, by name, after a forward pass in training; default none.

        num_examples: training cases of the client, for terms that count once a pass over its data.
        """
        return {}

    def notes(self) -> dict[str, Tensor]:
        """Numbers about the last forward pass in training for the records, by name; default none."""
        return {}

    def block(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        """Run a part of the network; with `checkpointing` it runs again in the backward pass instead of
        keeping its activations. Running statistics move once."""
        if not (self.checkpointing and self.training and torch.is_grad_enabled()):
            result: Tensor = module(*inputs)
            return result
        again = partial(_twice, module)
        kept: Tensor = checkpoint(module, *inputs, use_reentrant=False, context_fn=again)
        return kept

    def output_layer(self) -> nn.Module:
        """The layer that makes the logits."""
        return last_layer(self, self.num_outputs)

    @property
    def divisors(self) -> tuple[int, ...]:
        """Of each axis, where they differ."""
        return (self.divisor,) * self.dimensions

    def padded_size(self, size: Sequence[int]) -> list[int]:
        """The sides the network sees for an image of this size."""
        steps = self.divisors if len(self.divisors) == len(size) else (self.divisor,) * len(size)
        sides = [-(-side // step) * step for side, step in zip(size, steps, strict=True)]
        if self.needs_two and tuple(sides) == steps:
            sides[-1] *= 2
        return sides

    def _pad(self, x: Tensor) -> Tensor:
        return pad(x, self.padded_size(x.shape[2:]))

    def _output(self, x: Tensor) -> Output:
        """What a subclass computes from an image whose sides fit its poolings."""
        raise TypeError(f"{type(self).__name__} must write _output")

    def _bottleneck(self, x: Tensor) -> Tensor:
        """The deepest features alone; a network without features has none to give."""
        raise TypeError(f"{type(self).__name__} offers no features")


def _twice(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the first and the second run of a checkpointed part."""
    return nullcontext(), frozen_statistics(module)


def pad(x: Tensor, size: Sequence[int]) -> Tensor:
    """Repeat the last row, column or slice until the spatial sides are `size`.

    Repeated voxels draw no false edge and hardly move a norm layer's statistics; zeros would do both,
    since the background of a z-scored scan is not zero. Written with `cat`, because the backward
    pass of PyTorch's own replication padding is not deterministic on a GPU.
    """
    for axis, side in enumerate(size, start=2):
        missing = side - x.shape[axis]
        if missing:
            edge = x.narrow(axis, x.shape[axis] - 1, 1)
            repeats = [missing if a == axis else -1 for a in range(x.dim())]
            x = torch.cat([x, edge.expand(repeats)], dim=axis)
    return x


def crop(x: Tensor, size: Sequence[int]) -> Tensor:
    """The first `size` voxels of every spatial axis."""
    for axis, side in enumerate(size, start=2):
        if x.shape[axis] != side:
            x = x.narrow(axis, 0, side)
    return x


def head_names(model: nn.Module) -> list[str]:
    """State-dict names of the output layer.

    A network we did not write is searched by type: its last convolution or linear layer, of those
    that give `num_outputs` channels where that is known.
    """
    layer = model.output_layer() if isinstance(model, Segmenter) else last_layer(model)
    return state_names(model, layer)


def last_layer(model: nn.Module, num_outputs: int | None = None) -> nn.Module:
    """The convolution or linear layer registered last, of those with `num_outputs` outputs if any."""
    layers: dict[nn.Module, int] = {}
    for module in model.modules():
        if isinstance(module, _ConvNd):
            layers[module] = module.out_channels
        elif isinstance(module, nn.Linear):
            layers[module] = module.out_features
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no convolution or linear layer, so no output layer.")
    fitting = [layer for layer, width in layers.items() if width == num_outputs]
    return fitting[-1] if fitting else list(layers)[-1]


def forward_cost(model: Segmenter, shape: Sequence[int]) -> tuple[float, float]:
    """About what one case costs in a forward pass: operations of convolutions and linear layers, and bytes
    of what all layers put out. Counted on a small image and scaled, because it is wanted at the start of
    every run; `models.measure` counts exactly, and its first use takes a second.
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
