"""Faster passes on a GPU: networks compiled by inductor, and training steps recorded as CUDA graphs.

A small network spends most of a step on launching its kernels one by one. A recorded step is launched
at once: forward pass, loss and gradients; the optimizer follows as usual. Recording needs fixed places in
memory, so batches are copied to where the recording reads them, and it needs a loss that does the same
every time (`Objective.constants`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wardround.data.cases import Batch
from wardround.losses.objective import Context, run_as_written
from wardround.models.base import Output, Segmenter

if TYPE_CHECKING:
    from wardround.engine.training import Workbench

log = logging.getLogger(__name__)

MOST_RECORDINGS = 12
WARM_UP_STEPS = 2  # ordinary ones, in which libraries choose their algorithms

Key = tuple[object, ...]
Loss = Callable[[nn.Module, Batch, Context], Tensor]


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


@dataclass
class Recording:
    """One recorded pass: where it reads, where it leaves gradients and values."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    second: Tensor | None
    gradients: list[Tensor | None]
    value: Tensor
    terms: dict[str, Tensor]
    state: dict[str, Tensor]


class Recorder:
    """Records the gradients of a training step once for each size of batch, then repeats them."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._parameters = [p for p in bench.model.parameters() if p.requires_grad]
        self._recordings: dict[Key, Recording] = {}
        self._seen: dict[object, int] = {}
        self._names: set[str] = set()  # of tensors the objective keeps
        self._pool: Any = None
        self._stream = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
        self._own_terms = type(bench.model).extra_losses is not Segmenter.extra_losses
        self.gave_up = False

    def backward(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        """Fresh gradients of the loss on a batch, and its value."""
        key = self._key(batch, context)
        if key is None or not self._names <= context.memory.keys():
            return self._as_written(batch, context, loss)  # a client's first step makes its state
        recording = self._recordings.get(key)
        if recording is None:
            shape = (tuple(batch.image.shape), bool(context.has_previous))
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] <= WARM_UP_STEPS:
                return self._warm_up(batch, context, loss)
            recording = self._record(batch, context, loss)
            if recording is None:
                return self._as_written(batch, context, loss)
            self._recordings[key] = recording
            while len(self._recordings) > MOST_RECORDINGS:
                self._recordings.pop(next(iter(self._recordings)))
        return self._repeat(recording, batch, context)

    def forget(self) -> None:
        """Drop all recordings."""
        self._recordings.clear()
        self._pool = None

    def _key(self, batch: Batch, context: Context) -> Key | None:
        constants = self._bench.objective.constants(context)
        if self.gave_up or constants is None:
            return None
        shapes = tuple(batch.image.shape), tuple(batch.label.shape), batch.label.dtype
        return *shapes, constants, context.num_examples if self._own_terms else None

    def _as_written(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        self._bench.optimizer.zero_grad(set_to_none=True)
        return self._bench.backward(batch, context, loss)

    def _warm_up(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        """As written, on the stream that recordings are made on."""
        here = torch.cuda.current_stream(self._bench.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            value = self._as_written(batch, context, loss)
        here.wait_stream(self._stream)
        self._names |= {name for name, kept in context.memory.items() if isinstance(kept, Tensor)}
        return value

    def _record(self, batch: Batch, context: Context, loss: Loss) -> Recording | None:
        """Record a pass; nothing is computed by it. None, once and for all, where it cannot be recorded."""
        bench = self._bench
        bench.optimizer.zero_grad(set_to_none=True)
        held = Batch(batch.image.clone(), batch.label.clone())
        second = None if context.second_view is None else context.second_view.clone()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        terms, view = context.terms, context.second_view
        context.terms, context.second_view = {}, second
        context.output = Output(held.image)  # lets go of the last pass, whose streams differ
        try:
            torch.cuda.synchronize(bench.device)
            # other threads may use the GPU meanwhile: the ledger reads the last client's reply
            how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **how):
                value = bench.backward(held, context, loss)
            gradients = [parameter.grad for parameter in self._parameters]
            state = {name: kept for name, kept in context.memory.items() if isinstance(kept, Tensor)}
            recorded = Recording(graph, held, second, gradients, value, context.terms, state)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            log.warning(
                "training steps cannot be recorded (%s); they run as written", str(error).split("\n")[0]
            )
            self.gave_up = True
            return None
        finally:
            context.terms, context.second_view = terms, view
        return recorded

    def _repeat(self, recording: Recording, batch: Batch, context: Context) -> Tensor:
        for name, home in recording.state.items():
            if context.memory[name] is not home:
                context.memory[name] = home.copy_(context.memory[name])
        recording.batch.image.copy_(batch.image)
        recording.batch.label.copy_(batch.label)
        if recording.second is not None and context.second_view is not None:
            recording.second.copy_(context.second_view)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        for name, value in recording.terms.items():
            context.note(name, value.clone() if name not in context.terms else value)
        return recording.value.clone()
