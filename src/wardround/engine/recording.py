"""Faster passes on a GPU: networks compiled by inductor, and training steps recorded as CUDA graphs.

A small network spends most of a step on launching its kernels one by one. A recorded step is launched
at once: forward pass, loss and gradients; the optimizer follows as usual. Recording needs fixed places in
memory, so batches are copied to where the recording reads them, and it needs a loss that does the same
every time (`Objective.constants`). Passes of evaluation are recorded as well.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
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
SMALL_NETWORK = 32 * 2**20  # bytes of gradients that every recording of another batch size may hold
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
    """One recorded pass: where it reads, where it leaves gradients and values.

    given, seen: for each frozen model, where the batch's features are read or left, if so.
    """

    graph: torch.cuda.CUDAGraph
    batch: Batch
    second: Tensor | None
    given: list[Tensor | None]
    seen: list[Tensor | None]
    gradients: list[Tensor | None]
    value: Tensor
    terms: dict[str, Tensor]
    state: dict[str, Tensor]


@dataclass
class Prediction:
    """One recorded pass of evaluation."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    logits: Tensor


class Recorder:
    """Records gradients of training steps and passes of evaluation once for each size, then repeats them."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._parameters = [p for p in bench.model.parameters() if p.requires_grad]
        self._small = sum(p.nbytes for p in self._parameters) <= SMALL_NETWORK
        self._recordings: dict[Key, Recording] = {}
        self._seen: dict[object, int] = {}
        self._names: set[str] = set()  # of tensors the objective keeps
        self._pool: Any = None
        self._stream = torch.cuda.Stream(bench.device)  # type: ignore[no-untyped-call]
        self._own_terms = type(bench.model).extra_losses is not Segmenter.extra_losses
        self._predictions: dict[tuple[int, ...], Prediction] = {}
        self._seen_in_evaluation: dict[tuple[int, ...], int] = {}
        self._tensors: dict[str, Tensor] = {}  # the model under evaluation
        self._under_evaluation: object = None
        self.gave_up = False
        self.gave_up_evaluation = False

    def backward(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        """Fresh gradients of the loss on a batch, and its value."""
        key = self._key(batch, context)
        if key is None or not self._names <= context.memory.keys():
            return self._as_written(batch, context, loss)  # a client's first step makes its state
        kept = [reference.kept() for reference in self._bench.references]
        key = *key, tuple(features is not None for features in kept)
        recording = self._recordings.get(key)
        if recording is None:
            shape = (tuple(batch.image.shape), bool(context.has_previous))
            self._seen[shape] = self._seen.get(shape, 0) + 1
            if self._seen[shape] <= WARM_UP_STEPS:
                return self._warm_up(batch, context, loss)
            recording = self._record(batch, context, loss, kept)
            if recording is None:
                return self._as_written(batch, context, loss)
            self._recordings[key] = recording
            only_newest(self._recordings)
        return self._repeat(recording, batch, context, kept)

    def evaluation(self, tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor] | None:
        """Logits of images by the model with these tensors; None where they are better computed as written.

        One place holds the tensors; a second model that is evaluated in between takes it over and gives it
        back with the next image.
        """
        model = self._bench.model
        ordinary = not any(module.training or "forward" in vars(module) for module in model.modules())
        if self.gave_up_evaluation or self._own_terms or not ordinary:
            return None  # draws are sampled, or another pass than the usual one is wanted
        if not self._tensors:
            self._tensors = {name: torch.empty_like(home) for name, home in model.state_dict().items()}
        if tensors.keys() != self._tensors.keys():
            return None
        me = object()

        def forward(image: Tensor) -> Tensor:
            if self._under_evaluation is not me:
                for name, home in self._tensors.items():
                    home.copy_(tensors[name])
                self._under_evaluation = me
            return self._predicted(image)

        return forward

    def forget(self) -> None:
        """Drop all recordings."""
        self._recordings.clear()
        self._predictions.clear()
        self._pool = None

    def _predicted(self, image: Tensor) -> Tensor:
        shape = tuple(image.shape)
        found = self._predictions.get(shape)
        if found is None:
            self._seen_in_evaluation[shape] = self._seen_in_evaluation.get(shape, 0) + 1
            if len(self._seen_in_evaluation) > MOST_RECORDINGS:  # cases of many shapes
                self.gave_up_evaluation = True
                self._predictions.clear()
            if self.gave_up_evaluation or self._seen_in_evaluation[shape] <= WARM_UP_STEPS:
                with self._aside():
                    return self._logits(image)
            found = self._record_prediction(image)
            if found is None:
                return self._logits(image)
            self._predictions[shape] = found
            only_newest(self._predictions)
        found.image.copy_(image)
        found.graph.replay()
        return found.logits.clone()

    def _logits(self, image: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(self._bench.model, self._tensors, (image,))
        return logits

    def _record_prediction(self, image: Tensor) -> Prediction | None:
        held, logits = image.clone(), None

        def work() -> None:
            nonlocal logits
            logits = self._logits(held)

        graph = self._captured(work, "passes of evaluation")
        if graph is None or logits is None:
            self.gave_up_evaluation = True
            return None
        return Prediction(graph, held, logits)

    def _key(self, batch: Batch, context: Context) -> Key | None:
        constants = self._bench.objective.constants(context)
        if self.gave_up or constants is None:
            return None
        if not self._small and len(batch) != self._bench.passes.usual:
            return None  # an epoch's last batch, of another size at every client, would cost memory
        shapes = tuple(batch.image.shape), tuple(batch.label.shape), batch.label.dtype
        return *shapes, constants, context.num_examples if self._own_terms else None

    def _as_written(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        self._bench.optimizer.zero_grad(set_to_none=True)
        return self._bench.backward(batch, context, loss)

    def _warm_up(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        with self._aside():
            value = self._as_written(batch, context, loss)
        self._names |= {name for name, kept in context.memory.items() if isinstance(kept, Tensor)}
        return value

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """As written, on the stream that recordings are made on."""
        here = torch.cuda.current_stream(self._bench.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def _captured(self, work: Callable[[], None], what: str) -> torch.cuda.CUDAGraph | None:
        """Record what `work` launches; nothing is computed by it. None where it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            torch.cuda.synchronize(self._bench.device)
            # other threads may use the GPU meanwhile: the ledger reads the last client's reply
            how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **how):
                work()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            log.warning("%s cannot be recorded (%s); they run as written", what, str(error).split("\n")[0])
            return None
        return graph

    def _record(
        self, batch: Batch, context: Context, loss: Loss, kept: list[Tensor | None]
    ) -> Recording | None:
        """Record a step's gradients; None, once and for all, where that is not possible."""
        bench, references = self._bench, self._bench.references
        bench.optimizer.zero_grad(set_to_none=True)
        held = Batch(batch.image.clone(), batch.label.clone())
        second = None if context.second_view is None else context.second_view.clone()
        given = [None if features is None else features.clone() for features in kept]
        terms, view = context.terms, context.second_view
        context.terms, context.second_view = {}, second
        context.output = Output(held.image)  # lets go of the last pass, whose streams differ
        for reference, features in zip(references, given, strict=True):
            reference.given = None if features is None else (held.image, features)
        value = torch.empty(0)

        def work() -> None:
            nonlocal value
            value = bench.backward(held, context, loss)

        try:
            graph = self._captured(work, "training steps")
            found = context.terms
        finally:
            context.terms, context.second_view = terms, view
            seen = [reference.seen for reference in references]
            for reference in references:
                reference.given = reference.seen = None
        if graph is None:
            self.gave_up = True
            return None
        return Recording(
            graph,
            held,
            second,
            given,
            [
                features[1] if features is not None and features[0] is held.image else None
                for features in seen
            ],
            [parameter.grad for parameter in self._parameters],
            value,
            found,
            {name: state for name, state in context.memory.items() if isinstance(state, Tensor)},
        )

    def _repeat(
        self, recording: Recording, batch: Batch, context: Context, kept: list[Tensor | None]
    ) -> Tensor:
        for name, home in recording.state.items():
            if context.memory[name] is not home:
                context.memory[name] = home.copy_(context.memory[name])
        recording.batch.image.copy_(batch.image)
        recording.batch.label.copy_(batch.label)
        if recording.second is not None and context.second_view is not None:
            recording.second.copy_(context.second_view)
        for place, features in zip(recording.given, kept, strict=True):
            if place is not None and features is not None:
                place.copy_(features)
        recording.graph.replay()
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        for reference, features in zip(self._bench.references, recording.seen, strict=True):
            if features is not None and reference.expects:
                reference.keep(features.clone())
        for name, value in recording.terms.items():
            context.note(name, value.clone() if name not in context.terms else value)
        return recording.value.clone()


def only_newest(recordings: dict[Any, Any]) -> None:
    while len(recordings) > MOST_RECORDINGS:
        recordings.pop(next(iter(recordings)))
