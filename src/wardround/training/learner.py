"""Learner: a network, its objective, optimizer and forward passes. Step: one optimizer step, for methods."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import OptimizerSettings
from wardround.data.cases import Batch
from wardround.losses.objective import Context, Objective, run_as_written
from wardround.losses.reference import Reference
from wardround.models.base import Output, Segmenter
from wardround.models.instance_norm import keep_layout
from wardround.models.norm import frozen_statistics
from wardround.seeding import random_state, restore_random_state
from wardround.training import kernel_cache, optimizers
from wardround.training.device import Compute

Loss = Callable[[nn.Module, Batch, Context], Tensor]


@dataclass(frozen=True, eq=False)
class ParameterTerm:
    """A loss term of the parameters and fixed tensors alone: factor * function(model, tensors).

    name: in the records. A CUDA graph of a step can hold it, whichever tensors it is given; another `Loss`
    may inspect values, so steps with one run eagerly.
    """

    name: str
    factor: float
    function: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
    tensors: Mapping[str, Tensor]

    def __call__(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        value = self.factor * self.function(model, self.tensors if context.fixed is None else context.fixed)
        context.note(self.name, value)
        return value


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


class Learner:
    """A network on its device, its objective and optimizer, and frozen reference models when they are needed.

    micro_batch: cases that go through the network at once, None: all of a batch.
    """

    def __init__(
        self, model: Segmenter, objective: Objective, settings: OptimizerSettings, compute: Compute
    ) -> None:
        self.compute = compute
        self.device = compute.device
        self.model = model.to(self.device)
        if compute.channels_last or self.device.type == "cuda":
            keep_layout(self.model)
        if compute.channels_last:
            for parameter in self.model.parameters():
                parameter.data = to_channels_last(parameter.data)
        for module in self.model.modules():  # a stem has its backbone inside
            if isinstance(module, Segmenter):
                module.checkpointing = compute.checkpointing
        self.micro_batch = compute.micro_batch
        self.objective = objective
        self.settings = settings
        self.optimizer = optimizers.build(settings, self.model)
        self.passes = Passes(inductor=compute.inductor)
        self._references: dict[str, Reference] = {}
        self._untimed = compute.network if compute.inductor else None  # until its first full batch

    @property
    def references(self) -> list[Reference]:
        return list(self._references.values())

    def lay_out(self, tensor: Tensor) -> Tensor:
        """In the memory layout this network computes in."""
        return to_channels_last(tensor) if self.compute.channels_last else tensor

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute.autocast)

    def backward(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        """Add the gradients of the loss, the whole batch at once or piece by piece; its value.

        Pieces count by their cases: for losses that are means over cases the gradient is the same.
        """
        size, started = len(batch), time.perf_counter()
        piece = self.micro_batch or size
        second, total = context.second_view, None
        for first in range(0, size, piece):
            cut = slice(first, first + piece)
            part = batch if piece >= size else replace(batch, image=batch.image[cut], label=batch.label[cut])
            context.share = 1.0 if piece >= size else len(part) / size
            if second is not None and piece < size:
                context.second_view = second[cut]
            with self.autocast():
                value = loss(self.model, part, context)
            if context.share != 1:
                value = value * context.share
            value.backward()  # type: ignore[no-untyped-call]
            value = value.detach()
            total = value if total is None else total + value
        context.share, context.second_view = 1.0, second
        assert total is not None, "a batch has cases"
        if self._untimed is not None and min(piece, size) == self.passes.usual:
            kernel_cache.record_seconds(self._untimed, time.perf_counter() - started)
            self._untimed = None
        return total

    def move(self) -> None:
        """One step of the optimizer along the gradients that are there."""
        limit = self.settings.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)
        optimizers.complete_momentum(self.optimizer)
        self.optimizer.step()


class Step:
    """One optimizer step, for methods that take it apart (sharpness-aware, episodic).

    captured: computes the gradients of an ordinary pass as a CUDA graph, where there is one.
    """

    def __init__(
        self,
        learner: Learner,
        batch: Batch,
        context: Context,
        loss: Loss,
        *,
        taken_apart: bool,
        captured: Callable[[Batch, Context], Tensor] | None = None,
    ) -> None:
        self.model = learner.model
        self.optimizer = learner.optimizer
        self.batch = batch
        self.context = context
        self.value: Tensor | None = None
        self._learner = learner
        self._loss = loss
        self._captured = captured
        self._random = random_state(learner.device) if taken_apart else None

    def backward(
        self, batch: Batch | None = None, *, add: Loss | None = None, accumulate: bool = False
    ) -> Tensor:
        """Gradients of the loss (plus `add`) on this step's batch, or another; the first value is kept.

        accumulate: on top of the gradients that are there, instead of fresh.
        """
        self.context.output = Output(self.batch.image)  # releases the last pass, whose stream may differ
        if self._captured is not None and batch is None and add is None and not accumulate:
            loss = self._captured(self.batch, self.context)
        else:
            if not accumulate:
                self.optimizer.zero_grad(set_to_none=True)
            batch = self.batch if batch is None else batch
            loss = self._learner.backward(batch, self.context, with_added(self._loss, add))
        if self.value is None:
            self.value = loss
        return loss

    @contextlib.contextmanager
    def shifted(self, offsets: Mapping[str, Tensor]) -> Iterator[None]:
        """Run passes at shifted parameters, then come back to the exact bytes; gradients stay.

        The same dropout mask as in the first pass; running statistics and noted terms are left alone.
        """
        before = {name: p.detach().clone() for name, p in self.model.named_parameters() if name in offsets}
        terms, after = dict(self.context.terms), random_state(self._learner.device)
        captured, self._captured = self._captured, None  # statistics move in the graph of an ordinary pass
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in offsets:
                    parameter.add_(offsets[name])
        restore_random_state(self._learner.device, self._random)
        try:
            with frozen_statistics(self.model):
                yield
        finally:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if name in before:
                        parameter.copy_(before[name])
            self.context.terms, self._captured = terms, captured
            restore_random_state(self._learner.device, after)

    def apply(self) -> None:
        """Clip if asked, then let the optimizer move."""
        self._learner.move()


def with_added(loss: Loss, add: Loss | None) -> Loss:
    """The sum of two losses."""
    if add is None:
        return loss
    return lambda model, batch, context: loss(model, batch, context) + add(model, batch, context)


def to_channels_last(tensor: Tensor) -> Tensor:
    """Channels last, for images, volumes and the weights of convolutions over them."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return tensor
    layout = formats[tensor.dim()]
    if tensor.shape[1] == 1 and tensor.is_contiguous():
        # one channel fits both layouts; only the strides tell convolutions which one is meant
        strides = torch.empty(tensor.shape, device="meta").to(memory_format=layout).stride()
        return tensor.as_strided(tensor.shape, strides)
    return tensor.contiguous(memory_format=layout)
