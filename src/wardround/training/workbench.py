"""fit(): the only local training loop.

One `Workbench` serves all clients of a process: one model, one optimizer, and frozen reference
models when they are needed. Parameters are loaded in, trained, copied out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import OptimizerSettings
from wardround.data.cases import Batch, Split
from wardround.data.serving.augment import Augmentation
from wardround.errors import ClientError
from wardround.losses.objective import Context, Objective
from wardround.losses.reference import Reference
from wardround.machine import free_memory, runs_at_once
from wardround.models.base import Segmenter
from wardround.models.norm import from_moments, reestimate, running_stats, to_moments
from wardround.params import Params
from wardround.precision import widen
from wardround.seeding import generator, seed_everything
from wardround.training import optimizers
from wardround.training.batches import draw_full_batches, shuffle_indices
from wardround.training.cuda_graphs import GraphRunner, StepGraphs
from wardround.training.device import Compute, is_out_of_memory
from wardround.training.inference import run_in_windows
from wardround.training.learner import Learner, Loss, ParameterTerm, Step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitSettings:
    """How long and from what state a client trains.

    where: round and client, for messages; stream: what the random draws are derived from, beside the seed;
    epochs: passes over the cases; steps: so many full batches instead, drawn pass after pass;
    own: tensors that stay at the client; optimizer_state: moments of its last training, none to start afresh.
    """

    where: str
    seed: int
    stream: tuple[object, ...]
    learning_rate: float
    epochs: int
    batch_size: int
    augmentation: Augmentation
    own: Params | None = None
    optimizer_state: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int | None = None

    def full_batch(self, num_cases: int) -> int:
        """Cases of a full batch, where there are so many."""
        return self.batch_size if self.steps is not None else min(self.batch_size, num_cases)

    def repeats(self, num_cases: int) -> bool:
        """Whether cases come more than once."""
        return self.epochs > 1 if self.steps is None else self.steps * self.batch_size > num_cases

    def count_steps(self, num_cases: int) -> int:
        return self.epochs * -(-num_cases // self.batch_size) if self.steps is None else self.steps


@dataclass(frozen=True)
class FitHooks:
    """What a method changes in the training loop; `Client.fit` says what each does."""

    loss: Loss | None = None
    add: Loss | None = None
    on_batch: Callable[[Batch, Context], Batch] | None = None
    after_backward: Callable[[nn.Module], None] | None = None
    step: Callable[[Step], None] | None = None
    on_progress: Callable[[int, int], None] | None = None
    loop: Callable[..., TrainingLoop] | None = None  # in place of the usual one

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold the loss: the objective, and at most a term of the parameters."""
        return self.loss is None and (self.add is None or isinstance(self.add, ParameterTerm))


@dataclass(frozen=True)
class Fitted:
    """What local training gave.

    loss: means over all steps of the round, the total and every noted term;
    sum_learning_rates: the rates actually used, added over the steps.
    """

    params: Params
    num_steps: int
    num_examples: int
    sum_learning_rates: float
    loss: dict[str, float] = field(default_factory=dict)


class Workbench(Learner):
    """Model, optimizer and references of one process, reused for every client and round."""

    def __init__(
        self,
        model: Segmenter,
        objective: Objective,
        settings: OptimizerSettings,
        *,
        device: torch.device | None = None,
        shared: Iterable[str] | None = None,
        bn_stats: str = "average",
        compute: Compute | None = None,
    ) -> None:
        super().__init__(model, objective, settings, compute or Compute(device or torch.device("cpu")))
        self.bn_stats = bn_stats
        self.stats = running_stats(self.model)
        everything = list(self.model.state_dict())
        travelling = set(everything if shared is None else shared) - set(objective.local_names(self.model))
        if bn_stats == "local":
            travelling -= {name for pair in self.stats for name in pair}
        self.own_names = [name for name in everything if name not in travelling]
        self._evaluated_at_once: int | None = None  # cases, where memory ran out in evaluation
        self._graphs = GraphRunner(self) if self.compute.cuda_graphs else None

    # Tensors in and out

    def load(self, params: Params, own: Params | None = None) -> None:
        """Put received params into the model; the client's own tensors go on top."""
        self._from_sent(params).load_into(self.model)
        if own is not None:
            own.load_into(self.model)

    def export(self) -> Params:
        """A copy of the model as it travels."""
        return self.as_sent(Params.of(self.model))

    def as_sent(self, tensors: Params) -> Params:
        """Tensors of the network as they travel, running statistics among them."""
        return Params(to_moments(tensors, self.stats)) if self.bn_stats == "pooled" else tensors

    def _from_sent(self, params: Params) -> Params:
        return Params(from_moments(params, self.stats)) if self.bn_stats == "pooled" else params

    def with_own(self, params: Params, memory: Mapping[str, Any]) -> Params:
        """A client's personal model as it would travel; its own tensors are kept as the network has them."""
        own: Mapping[str, Tensor] = memory.get("own", {})
        if self.bn_stats != "pooled" or not own:
            return params
        return self.as_sent(self._from_sent(params).updated(own))

    def own(self) -> Params:
        """What stays at the client: local statistics and heads, and what the method does not share."""
        return Params.of(self.model).only(self.own_names)

    def optimizer_state(self) -> dict[str, Tensor]:
        return optimizers.export_state(self.optimizer)

    def reference(self, role: str, params: Params) -> Reference:
        """A frozen model with these params; the object is kept for the next client."""
        if role not in self._references:
            frozen = copy.deepcopy(self.model).requires_grad_(False).eval()
            self._references[role] = Reference(frozen, self.passes.encode)
        reference = self._references[role]
        self._from_sent(params).load_into(reference.model)
        reference.forget()
        return reference

    def export_reference(self, role: str) -> Params:
        """A copy of a frozen model, as models travel."""
        return self.as_sent(Params.of(self._references[role].model))

    # Evaluation

    def predictions(
        self,
        batches: Iterable[Batch],
        params: Params | None,
        own: Params | None = None,
        window: Sequence[int] | None = None,
    ) -> Iterator[tuple[Tensor, Batch]]:
        """Logits of each batch in evaluation mode; the model keeps its own tensors throughout.

        window: voxels of the sliding windows that larger images go through.
        """
        tensors: dict[str, Tensor] = dict(self._from_sent(params)) if params is not None else {}
        if own is not None:
            tensors |= own
        was_training = self.model.training
        changes = any(module.training for module in self.model.modules())  # eval() takes its time
        if changes:
            self.model.eval()
        try:
            graphs = self._graphs if window is None else None
            forward = graphs.forwards.make_forward(tensors) if graphs is not None else None
            if forward is None:
                there = {name: self.lay_out(tensor.to(self.device)) for name, tensor in tensors.items()}
                forward = partial(torch.func.functional_call, self.model, there)
            if window is not None:
                forward = partial(run_in_windows, forward, window=window)
            for batch in batches:
                yield from self._in_pieces(forward, batch)
        finally:
            if changes:
                self.model.train(was_training)

    def _in_pieces(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """The logits of a batch; where memory runs out, of half as many cases at a time from then on."""
        done = 0
        while done < len(batch):
            piece = min(self._evaluated_at_once or len(batch), len(batch))
            part = batch if piece == len(batch) else batch.part(done, done + piece)
            try:
                with torch.no_grad(), self.autocast():
                    logits = forward(self.lay_out(part.image)).float().contiguous()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if piece == 1:
                    raise ClientError(
                        f"evaluation: one case alone does not fit into the memory of {self.device}. Try a "
                        "smaller image or network, evaluate.window, or compute.resident: host."
                    ) from None
            else:
                done += len(part)
                yield self._hand_out(logits, part)
                continue
            self._evaluated_at_once = -(-piece // 2)
            self._free_graphs()
            log.warning(
                "evaluation: out of memory on %s; from here on %d cases at a time",
                self.device, self._evaluated_at_once,
            )  # fmt: skip

    def _hand_out(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """Where scores are formed: on the device, unless it has no float64."""
        if self.device.type != "mps":
            return logits, batch
        return logits.cpu(), Batch(batch.image.cpu(), batch.label.cpu())

    def reestimate_statistics(self, split: Split, params: Params, batch_size: int) -> Params:
        """Running statistics of a model on a split, from one pass without gradients."""
        self.load(params)
        reestimate(self.model, (self.lay_out(batch.image) for batch in read_in_order(split, batch_size)))
        return Params.of(self.model).only({name for pair in self.stats for name in pair})

    # Training

    def fit(
        self, split: Split, start: Params, context: Context, settings: FitSettings, hooks: FitHooks
    ) -> Fitted:
        """Train the model from `start` on a split."""
        self.load(start, settings.own)
        self.model.start_fit()
        optimizers.import_state(self.optimizer, settings.optimizer_state)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        seed_everything(settings.seed, *settings.stream, "torch")
        self.model.train()
        full = settings.full_batch(len(split))
        self.passes.usual = min(self.micro_batch or full, full)
        clone_tensors(context.memory, self.device)
        graphs = self._graphs if hooks.can_be_captured and self.micro_batch is None else None
        loop = (hooks.loop or TrainingLoop)(self, split, context, settings, hooks, graphs)
        loop.run()
        self.model.eval()
        for reference in self.references:
            reference.forget()
        clone_tensors(context.memory)
        params, num_steps = self.export(), loop.num_steps  # before the wait for the last step's loss
        losses = {} if not loop.values else {"total": float(widen(loop.finite_losses()).mean())}
        losses |= {term: float(value) / num_steps for term, value in context.terms.items()}
        return Fitted(params, num_steps, len(split), settings.learning_rate * num_steps, losses)

    def free_memory(self) -> None:
        """Release what a failed step left behind."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self._free_graphs()

    def _free_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Release CUDA graphs and references; they and the bench refer to each other."""
        if self._graphs is not None:
            self._graphs.clear()
            self._graphs = None
        self._references.clear()


class TrainingLoop:
    """The steps of one `fit`: batches, optimizer steps, and the loss of each step in `values`."""

    def __init__(
        self,
        learner: Learner,
        split: Split,
        context: Context,
        settings: FitSettings,
        hooks: FitHooks,
        graphs: GraphRunner | None,
    ) -> None:
        self.values: list[Tensor] = []
        self.num_steps = 0
        self._learner = learner
        self._split = split
        self._context = context
        self._settings = settings
        self._hooks = hooks
        self._graphs = graphs
        self._references = learner.references
        self._comes_back = (  # the same images every epoch
            settings.repeats(len(split))
            and hooks.on_batch is None
            and not split.draws
            and learner.micro_batch is None
            and settings.augmentation.changes_nothing
        )

    def run(self) -> None:
        """Train for the epochs or steps asked for; a loss that is not finite ends it before another epoch."""
        learner, context, settings, hooks = self._learner, self._context, self._settings, self._hooks
        take = hooks.step or self._take
        expected = settings.count_steps(len(self._split))
        # Not kept in `self`: the cycle would hold the last pass, on another stream than the next client's.
        captured = None if self._graphs is None else partial(self._run_captured, self._graphs.steps)
        for reference in self._references:
            room = room_for_features(learner.device, len(self._references)) if self._comes_back else 0
            reference.room = room
        epoch = -1
        for pass_, indices in self._draw_indices():
            if pass_ != epoch:
                if self.values and settings.steps is None:  # passes over few cases would wait at every step
                    self.finite_losses()
                context.epoch = epoch = pass_
                learner.objective.start_epoch(learner.model, context)
            batch = self._read_batch(indices)
            apart = hooks.step is not None
            step = Step(learner, batch, context, self._loss, taken_apart=apart, captured=captured)
            take(step)
            if step.value is not None:
                self.values.append(step.value)
            self.num_steps += 1
            context.step += 1
            if hooks.on_progress is not None:
                hooks.on_progress(self.num_steps, expected)

    def finite_losses(self) -> Tensor:
        """The losses of all steps so far, on the host: one wait for all of them."""
        losses = torch.stack(self.values).cpu()
        finite = torch.isfinite(losses)
        if not bool(finite.all()):
            step = int((~finite).nonzero()[0]) + 1
            raise ClientError(
                f"{self._settings.where}: the loss became NaN or infinite at step {step}. "
                f"Last learning_rate {self._settings.learning_rate:g}; try a smaller one."
            )
        return losses

    def _draw_indices(self) -> Iterator[tuple[int, Tensor]]:
        """Which cases come, batch after batch, and in which epoch each batch begins."""
        settings, count = self._settings, len(self._split)
        size, seed, stream = settings.batch_size, settings.seed, (*settings.stream, "order")
        if settings.steps is not None:
            yield from draw_full_batches(count, size, settings.steps, seed, *stream)
            return
        for epoch in range(settings.epochs):
            for indices in shuffle_indices(count, size, seed, *stream, epoch):
                yield epoch, indices

    def _read_batch(self, indices: Tensor) -> Batch:
        """These cases, augmented and laid out; references are told which cases come."""
        learner, split, context, settings = self._learner, self._split, self._context, self._settings
        seed, stream, place = settings.seed, settings.stream, (context.epoch, context.step)
        views = 2 if "two_views" in learner.objective.needs else 1
        draw = generator(seed, *stream, "patch", *place) if split.draws else None
        batch, context.second_view = settings.augmentation(
            split.batch(indices, draw), seed, (*stream, "augment", *place), views
        )
        if self._hooks.on_batch is not None:
            batch = self._hooks.on_batch(batch, context)
        batch = replace(batch, image=learner.lay_out(batch.image))
        for reference in self._references:
            reference.expect(batch.image if self._comes_back else None, indices.tolist())
        return batch

    def _loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """The objective or what replaces it, a method's term, and the network's own."""
        hooks, network = self._hooks, self._learner.model
        value = (hooks.loss or self._learner.objective.loss)(model, batch, context)
        if not context.has_supervised:
            raise ClientError(
                "The objective or the method takes no losses of coarser logits (Context.supervise). Set "
                "model.deep_supervision: false, or choose others."
            )
        if hooks.add is not None:
            value = value + hooks.add(model, batch, context)
        if context.exclusion and context.annotation is not None:
            exclusion = context.exclude(self._learner.objective.probabilities, batch.label)
            context.note("exclusion", exclusion)
            value = value + exclusion
        for term, extra in network.extra_losses(context.num_examples).items():
            context.note(term, extra)
            value = value + extra
        for term, number in network.notes().items():
            context.note(term, number)
        return value

    def _run_captured(self, steps: StepGraphs, batch: Batch, context: Context) -> Tensor:
        term = self._hooks.add
        return steps.backward(batch, context, self._loss, term if isinstance(term, ParameterTerm) else None)

    def _take(self, step: Step) -> None:
        """An ordinary step."""
        step.backward()
        if self._hooks.after_backward is not None:
            self._hooks.after_backward(step.model)
        step.apply()


def clone_tensors(memory: dict[str, Any], device: torch.device | None = None) -> None:
    """Replace the tensors in a memory by copies of their own, on the device if one is given."""
    memory.update({k: v.to(device or v.device).clone() for k, v in memory.items() if isinstance(v, Tensor)})


def room_for_features(device: torch.device, models: int) -> int:
    """Bytes that each frozen model's features may take: a tenth of what is free, shared."""
    free = torch.cuda.mem_get_info(device)[0] // runs_at_once() if device.type == "cuda" else free_memory()
    return free // 10 // max(models, 1)


def read_in_order(split: Split, batch_size: int) -> Iterator[Batch]:
    """Whole cases, one after the other; those of different shapes one at a time."""
    batch_size = batch_size if split.one_shape else 1
    for start in range(0, len(split), batch_size):
        yield split.batch(range(start, min(start + batch_size, len(split))))
