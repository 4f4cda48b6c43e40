"""Training steps and forward passes of evaluation as CUDA graphs.

A small network spends most of a step on launching its kernels one by one. A captured step is launched at
once: forward pass, loss and gradients; the optimizer follows as usual. A graph reads and writes fixed
addresses, so batches are copied into the tensors it was captured with, and it needs a loss that does the
same every time (`Objective.constants`); what a method adds is a `ParameterTerm`, whose tensors are copied in.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wardround.data.cases import Batch
from wardround.losses.objective import Context
from wardround.models.base import Segmenter
from wardround.training.device import is_out_of_memory
from wardround.training.learner import Learner, Loss, ParameterTerm

log = logging.getLogger(__name__)

MOST_GRAPHS = 12
SMALL_NETWORK = 32 * 2**20  # bytes of gradients that the graph of each batch size may hold,
SHARE_OF_GRADIENTS = 200  # or this part of the free memory
WARM_UP_STEPS = 2  # eager ones, in which libraries choose their algorithms and inductor compiles

Key = tuple[object, ...]
Shape = tuple[int, ...]


class GraphCapture:
    """Where graphs are captured: one side stream, and a memory pool that all of them share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run eagerly, on the stream that graphs are captured on."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)

    def capture(self, work: Callable[[], None], what: str) -> torch.cuda.CUDAGraph | None:
        """The graph of what `work` launches, which is not run; None where it cannot be captured."""
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
            if is_out_of_memory(error):
                raise
            log.warning(
                "%s cannot be captured in a CUDA graph (%s); they run eagerly",
                what, str(error).split("\n")[0],
            )  # fmt: skip
            return None
        return graph

    def release(self) -> None:
        """Release the memory pool; all graphs must be gone."""
        self._pool = None


@dataclass
class CapturedStep:
    """The graph of one step: the tensors it reads, and those it leaves gradients and values in.

    given, seen: for each frozen model, where the batch's features are read or left, if so; numbers: where
    those of the objective are read.
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
    numbers: dict[str, Tensor]


class StepGraphs:
    """Gradients of training steps, captured once for each batch size, then replayed."""

    def __init__(self, learner: Learner, capture: GraphCapture) -> None:
        self.gave_up = False
        self._learner = learner
        self._capture = capture
        self._parameters = [p for p in learner.model.parameters() if p.requires_grad]
        room = max(SMALL_NETWORK, torch.cuda.mem_get_info(learner.device)[0] // SHARE_OF_GRADIENTS)
        self._small = sum(p.nbytes for p in self._parameters) <= room
        self._captured: dict[Key, CapturedStep] = {}
        self._times: dict[Key, int] = {}  # each kind of step was taken
        self._names: set[str] = set()  # of tensors the objective keeps
        self._fixed: dict[Key, dict[str, Tensor]] = {}  # where graphs read the tensors of each kind of term
        self._filled: dict[Key, ParameterTerm] = {}  # whose tensors these are

    def backward(
        self, batch: Batch, context: Context, loss: Loss, term: ParameterTerm | None = None
    ) -> Tensor:
        """Fresh gradients of the loss on a batch, and its value; term: the part of it that a method adds."""
        key = self._key(batch, context)
        if key is None or not self._names <= context.memory.keys():
            return self._run_eagerly(batch, context, loss)  # a client's first step makes its state
        kept = [reference.kept() for reference in self._learner.references]
        added = () if term is None else (term.function, term.factor, *term.tensors)
        key = *key, tuple(features is not None for features in kept), added
        captured = self._captured.get(key)
        if captured is None:
            shape = tuple(batch.image.shape)
            kind = key if self._learner.compute.inductor else (shape, context.has_previous, added)
            self._times[kind] = self._times.get(kind, 0) + 1
            if self._times[kind] <= WARM_UP_STEPS:
                return self._warm_up(batch, context, loss)
            context.fixed = None if term is None else self._hold(added, term)
            captured = self._capture_step(batch, context, loss, kept)
            context.fixed = None
            if captured is None:
                return self._run_eagerly(batch, context, loss)
            self._captured[key] = captured
            drop_oldest(self._captured)
        if term is not None and self._filled.get(added) is not term:
            self._hold(added, term)
        return self._replay(captured, batch, context, kept)

    def clear(self) -> None:
        self._captured.clear()
        self._fixed.clear()
        self._filled.clear()

    def _hold(self, kind: Key, term: ParameterTerm) -> dict[str, Tensor]:
        """A term's tensors where graphs of its kind read them."""
        if kind not in self._fixed:
            self._fixed[kind] = {name: tensor.clone() for name, tensor in term.tensors.items()}
        homes, given = self._fixed[kind], list(term.tensors.values())
        torch._foreach_copy_(list(homes.values()), given)
        self._filled[kind] = term
        return homes

    def _key(self, batch: Batch, context: Context) -> Key | None:
        constants = self._learner.objective.constants(context)
        if self.gave_up or constants is None:
            return None
        if not self._small and len(batch) != self._learner.passes.usual:
            return None  # an epoch's last batch, of another size at every client, would cost memory
        shapes = tuple(batch.image.shape), tuple(batch.label.shape), batch.label.dtype
        own = context.num_examples if has_own_terms(self._learner.model) else None
        return *shapes, constants, own, context.annotation

    def _run_eagerly(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        self._learner.optimizer.zero_grad(set_to_none=True)
        return self._learner.backward(batch, context, loss)

    def _warm_up(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        with self._capture.side_stream():
            value = self._run_eagerly(batch, context, loss)
        self._names |= {name for name, kept in context.memory.items() if isinstance(kept, Tensor)}
        return value

    def _capture_step(
        self, batch: Batch, context: Context, loss: Loss, kept: list[Tensor | None]
    ) -> CapturedStep | None:
        """Capture a step's gradients; None, once and for all, where that is not possible."""
        learner, references = self._learner, self._learner.references
        learner.optimizer.zero_grad(set_to_none=True)
        held = Batch(batch.image.clone(), batch.label.clone())
        second = None if context.second_view is None else context.second_view.clone()
        given = [None if features is None else features.clone() for features in kept]
        numbers = {
            name: torch.tensor(value, dtype=torch.float32, device=learner.device)
            for name, value in learner.objective.numbers(context).items()
        }
        terms, view = context.terms, context.second_view
        context.terms, context.second_view, context.numbers = {}, second, numbers
        context.make_again()
        for reference, features in zip(references, given, strict=True):
            reference.given = None if features is None else (held.image, features)
        value = torch.empty(0)

        def work() -> None:
            nonlocal value
            value = learner.backward(held, context, loss)

        try:
            graph = self._capture.capture(work, "training steps")
            found = context.terms
        finally:
            context.make_again()
            context.terms, context.second_view, context.numbers = terms, view, {}
            seen = [reference.seen for reference in references]
            for reference in references:
                reference.given = reference.seen = None
        if graph is None:
            self.gave_up = True
            return None
        features_left = [p[1] if p is not None and p[0] is held.image else None for p in seen]
        gradients = [parameter.grad for parameter in self._parameters]
        state = {name: tensor for name, tensor in context.memory.items() if isinstance(tensor, Tensor)}
        return CapturedStep(
            graph, held, second, given, features_left, gradients, value, found, state, numbers
        )

    def _replay(
        self, captured: CapturedStep, batch: Batch, context: Context, kept: list[Tensor | None]
    ) -> Tensor:
        for name, home in captured.state.items():
            if context.memory[name] is not home:
                context.memory[name] = home.copy_(context.memory[name])
        captured.batch.image.copy_(batch.image)
        captured.batch.label.copy_(batch.label)
        if captured.second is not None and context.second_view is not None:
            captured.second.copy_(context.second_view)
        for place, features in zip(captured.given, kept, strict=True):
            if place is not None and features is not None:
                place.copy_(features)
        for name, number in self._learner.objective.numbers(context).items():
            captured.numbers[name].fill_(number)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        for reference, features in zip(self._learner.references, captured.seen, strict=True):
            if features is not None and reference.expects:
                reference.keep(features.clone())
        for name, value in captured.terms.items():
            context.note(name, value.clone() if name not in context.terms else value)
        return captured.value.clone()


@dataclass
class CapturedForward:
    """The graph of one forward pass of evaluation."""

    graph: torch.cuda.CUDAGraph
    image: Tensor
    logits: Tensor


class ForwardGraphs:
    """Forward passes of evaluation, captured once for each batch size, then replayed.

    The graphs read one set of tensors, those of the model under evaluation; a second model evaluated in
    between copies its own in, and the first copies them back with its next image.
    """

    def __init__(self, model: Segmenter, capture: GraphCapture) -> None:
        self.gave_up = False
        self._model = model
        self._capture = capture
        self._captured: dict[Shape, CapturedForward] = {}
        self._times: dict[Shape, int] = {}  # each batch size was seen
        self._tensors: dict[str, Tensor] = {}
        self._loaded: object = None  # whose tensors these are

    def make_forward(self, tensors: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor] | None:
        """From images to logits by the model with these tensors; None where it should run eagerly."""
        model = self._model
        ordinary = not any(module.training or "forward" in vars(module) for module in model.modules())
        if self.gave_up or has_own_terms(model) or not ordinary:
            return None  # weights are sampled, or a forward pass other than the usual one is wanted
        if not self._tensors:
            self._tensors = {name: torch.empty_like(home) for name, home in model.state_dict().items()}
        if tensors.keys() != self._tensors.keys():
            return None
        me = object()

        def forward(image: Tensor) -> Tensor:
            if self._loaded is not me:
                for name, home in self._tensors.items():
                    home.copy_(tensors[name])
                self._loaded = me
            return self._compute_logits(image)

        return forward

    def clear(self) -> None:
        self._captured.clear()

    def _compute_logits(self, image: Tensor) -> Tensor:
        shape = tuple(image.shape)
        captured = self._captured.get(shape)
        if captured is None:
            self._times[shape] = self._times.get(shape, 0) + 1
            if len(self._times) > MOST_GRAPHS:  # cases of many shapes
                self.gave_up = True
                self._captured.clear()
            if self.gave_up or self._times[shape] <= WARM_UP_STEPS:
                with self._capture.side_stream():
                    return self._run_eagerly(image)
            captured = self._capture_forward(image)
            if captured is None:
                return self._run_eagerly(image)
            self._captured[shape] = captured
            drop_oldest(self._captured)
        captured.image.copy_(image)
        captured.graph.replay()
        return captured.logits.clone()

    def _run_eagerly(self, image: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(self._model, self._tensors, (image,))
        return logits

    def _capture_forward(self, image: Tensor) -> CapturedForward | None:
        held, logits = image.clone(), None

        def work() -> None:
            nonlocal logits
            logits = self._run_eagerly(held)

        graph = self._capture.capture(work, "forward passes of evaluation")
        if graph is None or logits is None:
            self.gave_up = True
            return None
        return CapturedForward(graph, held, logits)


class GraphRunner:
    """The CUDA graphs of one learner, for training steps and for evaluation."""

    def __init__(self, learner: Learner) -> None:
        self._capture = GraphCapture(learner.device)
        self.steps = StepGraphs(learner, self._capture)
        self.forwards = ForwardGraphs(learner.model, self._capture)

    def clear(self) -> None:
        """Drop all graphs and the memory they hold."""
        self.steps.clear()
        self.forwards.clear()
        self._capture.release()


def has_own_terms(model: Segmenter) -> bool:
    """Whether the network adds to the loss itself, as one with sampled weights does."""
    return type(model).extra_losses is not Segmenter.extra_losses


def drop_oldest(graphs: dict[Any, Any]) -> None:
    while len(graphs) > MOST_GRAPHS:
        graphs.pop(next(iter(graphs)))
