"""Forward passes of a network: as written, or compiled by inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wardround.losses.objective import run_as_written
from wardround.models.base import Output, Segmenter


class Passes:
    """Forward passes as written, or compiled for batches of the usual size.

    usual: cases of a full batch; the last, smaller one of an epoch is not worth kernels of its own.
    """

    def __init__(self, *, inductor: bool = False) -> None:
        self.usual = 0
        self._compiled: dict[str, Any] = {}
        if inductor:
            functions = (_logits, _with_bottleneck, _features, _bottleneck)
            self._compiled = {f.__name__: torch.compile(f, dynamic=False) for f in functions}

    def run(self, model: nn.Module, image: Tensor, with_features: bool, *, decoder: bool = True) -> Output:
        """decoder: whether its features are wanted; their gradients take time even where nobody uses them."""
        if not self._compiled or len(image) != self.usual or not isinstance(model, Segmenter):
            return run_as_written(model, image, with_features)
        if not with_features:
            return Output(self._compiled["_logits"](model, image))
        return Output(*self._compiled["_features" if decoder else "_with_bottleneck"](model, image))

    def encode(self, model: Segmenter, image: Tensor) -> Tensor:
        if not self._compiled or len(image) != self.usual:
            return model.encode(image)
        features: Tensor = self._compiled["_bottleneck"](model, image)
        return features

    def compiled(self, function: Callable[..., Any], logits: Tensor) -> Callable[..., Any]:
        """A function of tensors as written, or compiled; one for each name, whatever its settings."""
        if not self._compiled or len(logits) != self.usual:
            return function
        plain = getattr(function, "func", getattr(function, "__func__", function))
        key = plain.__qualname__
        if key not in self._compiled:
            self._compiled[key] = torch.compile(function, dynamic=False)
        found: Callable[..., Any] = self._compiled[key]
        return found


def _logits(model: Segmenter, image: Tensor) -> Tensor:
    logits: Tensor = model(image)
    return logits


def _with_bottleneck(model: Segmenter, image: Tensor) -> tuple[Tensor, Tensor | None]:
    output = model.forward_features(image)
    return output.logits, output.bottleneck


def _features(
    model: Segmenter, image: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Tensor, ...]]:
    output = model.forward_features(image)
    return output.logits, output.bottleneck, output.decoder, output.stages


def _bottleneck(model: Segmenter, image: Tensor) -> Tensor:
    return model.encode(image)
