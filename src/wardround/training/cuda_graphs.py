"""Training steps and passes of evaluation, recorded as CUDA graphs.

A small network spends most of a step on launching its kernels one by one. A recorded step is launched
at once: forward pass, loss and gradients; the optimizer follows as usual. Recording needs fixed places in
memory, so batches are copied to where the recording reads them, and it needs a loss that does the same
every time (`Objective.constants`).
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
from wardround.losses.objective import Context
from wardround.models.base import Output, Segmenter
from wardround.training.device import out_of_memory

if TYPE_CHECKING:
    from wardround.training.workbench import Workbench

log = logging.getLogger(__name__)

MOST_RECORDINGS = 12
SMALL_NETWORK = 32 * 2**20  # bytes of gradients that every recording of another batch size may hold
WARM_UP_STEPS = 2  # ordinary ones, in which libraries choose their algorithms and inductor compiles

Key = tuple[object, ...]
Shape = tuple[int, ...]
Loss = Callable[[nn.Module, Batch, Context], Tensor]


class Tape:
    """Where recordings are made: one stream, and memory that all of them share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As written, on the stream that recordings are made on."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)

    def record(self, work: Callable[[], None], what: str) -> torch.cuda.CUDAGraph | None:
        """Record what `work` launches; nothing is computed by it. None where it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            torch.cuda.synchronize(self._device)
            # other threads may use the GPU meanwhile: the ledger reads the last client's reply
            how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            here = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(here), torch.cuda.graph(graph, **how):  # back here, even if it fails
                work()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            log.warning("%s cannot be recorded (%s); they run as written", what, str(error).split("\n")[0])
            return None
        return graph

    def forget(self) -> None:
        """Let go of the memory; all recordings must be gone."""
        self._pool = None


@dataclass
class Recording:
    """One recorded step: where it reads, where it leaves gradients and values.

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


class RecordedSteps:
    """Gradients of training steps, recorded once for each size of batch, then repeated."""

    def __init__(self, bench: Workbench, tape: Tape) -> None:
        self.gave_up = False
        self._bench = bench
        self._tape = tape
        self._parameters = [p for p in bench.model.parameters() if p.requires_grad]
        self._small = sum(p.nbytes for p in self._parameters) <= SMALL_NETWORK
        self._recordings: dict[Key, Recording] = {}
        self._times: dict[Key, int] = {}  # each kind of step was taken
        self._names: set[str] = set()  # of tensors the objective keeps

    def backward(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        """Fresh gradients of the loss on a batch, and its value."""
        context.output = Output(batch.image)  # lets go of the last pass, whose stream may differ
        key = self._key(batch, context)
        if key is None or not self._names <= context.memory.keys():
            return self._as_written(batch, context, loss)  # a client's first step makes its state
        kept = [reference.kept() for reference in self._bench.references]
        key = *key, tuple(features is not None for features in kept)
        recording = self._recordings.get(key)
        if recording is None:
            kind = key if self._bench.compute.inductor else (tuple(batch.image.shape), context.has_previous)
            self._times[kind] = self._times.get(kind, 0) + 1
            if self._times[kind] <= WARM_UP_STEPS:
                return self._warm_up(batch, context, loss)
            recording = self._record(batch, context, loss, kept)
            if recording is None:
                return self._as_written(batch, context, loss)
            self._recordings[key] = recording
            only_newest(self._recordings)
        return self._repeat(recording, batch, context, kept)

    def forget(self) -> None:
        self._recordings.clear()

    def _key(self, batch: Batch, context: Context) -> Key | None:
        constants = self._bench.objective.constants(context)
        if self.gave_up or constants is None:
            return None
        if not self._small and len(batch) != self._bench.passes.usual:
            return None  # an epoch's last batch, of another size at every client, would cost memory
        shapes = tuple(batch.image.shape), tuple(batch.label.shape), batch.label.dtype
        return *shapes, constants, context.num_examples if has_own_terms(self._bench.model) else None

    def _as_written(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        self._bench.optimizer.zero_grad(set_to_none=True)
        return self._bench.backward(batch, context, loss)

    def _warm_up(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        with self._tape.aside():
            value = self._as_written(batch, context, loss)
        self._names |= {name for name, kept in context.memory.items() if isinstance(kept, Tensor)}
        return value

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
        context.make_again()
        for reference, features in zip(references, given, strict=True):
            reference.given = None if features is None else (held.image, features)
        value = torch.empty(0)

        def work() -> None:
            nonlocal value
            value = bench.backward(held, context, loss)

        try:
            graph = self._tape.record(work, "training steps")
            found = context.terms
        finally:
            context.make_again()
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


@dataclass
class Prediction:
    """One recorded pass of evaluation."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    logits: Tensor


class RecordedPredictions:
    """Passes of evaluation, recorded once for each size of batch, then repeated.

    One place holds the tensors of the model that is evaluated; a second one that is evaluated in between
    takes it over and gives it back with the next image.
    """

    def __init__(self, model: Segmenter, tape: Tape) -> None:
        self.gave_up = False
        self._model = model
        self._tape = tape
        self._predictions: dict[Shape, Prediction] = {}
        self._times: dict[Shape, int] = {}  # each size of batch was seen
        self._tensors: dict[str, Tensor] = {}
        self._whose: object = None

    def of(self, tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor] | None:
        """Logits of images by the model with these tensors; None where they are better not recorded."""
        model = self._model
        ordinary = not any(module.training or "forward" in vars(module) for module in model.modules())
        if self.gave_up or has_own_terms(model) or not ordinary:
            return None  # draws are sampled, or another pass than the usual one is wanted
        if not self._tensors:
            self._tensors = {name: torch.empty_like(home) for name, home in model.state_dict().items()}
        if tensors.keys() != self._tensors.keys():
            return None
        me = object()

        def forward(image: Tensor) -> Tensor:
            if self._whose is not me:
                for name, home in self._tensors.items():
                    home.copy_(tensors[name])
                self._whose = me
            return self._logits_of(image)

        return forward

    def forget(self) -> None:
        self._predictions.clear()

    def _logits_of(self, image: Tensor) -> Tensor:
        shape = tuple(image.shape)
        found = self._predictions.get(shape)
        if found is None:
            self._times[shape] = self._times.get(shape, 0) + 1
            if len(self._times) > MOST_RECORDINGS:  # cases of many shapes
                self.gave_up = True
                self._predictions.clear()
            if self.gave_up or self._times[shape] <= WARM_UP_STEPS:
                with self._tape.aside():
                    return self._as_written(image)
            found = self._record(image)
            if found is None:
                return self._as_written(image)
            self._predictions[shape] = found
            only_newest(self._predictions)
        found.image.copy_(image)
        found.graph.replay()
        return found.logits.clone()

    def _as_written(self, image: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(self._model, self._tensors, (image,))
        return logits

    def _record(self, image: Tensor) -> Prediction | None:
        held, logits = image.clone(), None

        def work() -> None:
            nonlocal logits
            logits = self._as_written(held)

        graph = self._tape.record(work, "passes of evaluation")
        if graph is None or logits is None:
            self.gave_up = True
            return None
        return Prediction(graph, held, logits)


class Recorder:
    """Both kinds of recordings of one workbench."""

    def __init__(self, bench: Workbench) -> None:
        self._tape = Tape(bench.device)
        self.steps = RecordedSteps(bench, self._tape)
        self.predictions = RecordedPredictions(bench.model, self._tape)

    def forget(self) -> None:
        """Drop all recordings and the memory they hold."""
        self.steps.forget()
        self.predictions.forget()
        self._tape.forget()


def has_own_terms(model: Segmenter) -> bool:
    """Whether the network adds to the loss itself, as one with sampled weights does."""
    return type(model).extra_losses is not Segmenter.extra_losses


def only_newest(recordings: dict[Any, Any]) -> None:
    while len(recordings) > MOST_RECORDINGS:
        recordings.pop(next(iter(recordings)))
