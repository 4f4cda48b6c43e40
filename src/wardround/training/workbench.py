"""fit(): the only local training loop.

One `Workbench` serves all clients of a process: one model, one optimizer, and frozen reference
models when somebody needs them. Parameters are loaded in, trained, copied out.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import OptimizerSettings
from wardround.data.cases import Batch, Split
from wardround.data.serving.augment import Augmentation
from wardround.errors import ClientError
from wardround.losses.objective import Context, Objective, Reference
from wardround.machine import free_memory
from wardround.models.base import Segmenter
from wardround.models.instance_norm import keep_layout
from wardround.models.norm import from_moments, frozen_statistics, reestimate, running_stats, to_moments
from wardround.params import Params
from wardround.seeding import generator, random_state, restore_random_state, seed_everything
from wardround.training import optimizers
from wardround.training.cuda_graphs import Recorder
from wardround.training.device import Compute, out_of_memory
from wardround.training.passes import Passes

log = logging.getLogger(__name__)

Loss = Callable[[nn.Module, Batch, Context], Tensor]


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


class Step:
    """One optimizer step, for methods that take it apart (sharpness-aware, episodic)."""

    def __init__(
        self, bench: Workbench, batch: Batch, context: Context, loss: Loss, *, taken_apart: bool
    ) -> None:
        self.model = bench.model
        self.optimizer = bench.optimizer
        self.batch = batch
        self.context = context
        self.value: Tensor | None = None
        self._bench = bench
        self._loss = loss
        self._random = random_state(bench.device) if taken_apart else None

    def backward(
        self, batch: Batch | None = None, *, add: Loss | None = None, accumulate: bool = False
    ) -> Tensor:
        """Gradients of the loss (plus `add`) on this step's batch, or another; the first value is recorded.

        accumulate: on top of the gradients that are there, instead of fresh.
        """
        if not accumulate:
            self.optimizer.zero_grad(set_to_none=True)
        batch = self.batch if batch is None else batch
        loss = self._bench.backward(batch, self.context, with_added(self._loss, add))
        if self.value is None:
            self.value = loss
        return loss

    @contextlib.contextmanager
    def shifted(self, offsets: Mapping[str, Tensor]) -> Iterator[None]:
        """Run passes at shifted parameters, then come back to the exact bytes; gradients stay.

        The same dropout mask as in the first pass; running statistics and noted terms are left alone.
        """
        before = {name: p.detach().clone() for name, p in self.model.named_parameters() if name in offsets}
        terms, after = dict(self.context.terms), random_state(self._bench.device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in offsets:
                    parameter.add_(offsets[name])
        restore_random_state(self._bench.device, self._random)
        try:
            with frozen_statistics(self.model):
                yield
        finally:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if name in before:
                        parameter.copy_(before[name])
            self.context.terms = terms
            restore_random_state(self._bench.device, after)

    def apply(self) -> None:
        """Clip if asked, then let the optimizer move."""
        self._bench.move()


class Workbench:
    """Model, optimizer and references of one process, reused for every client and round.

    micro_batch: cases that go through the network at once, None: all of a batch.
    """

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
        self.compute = compute or Compute(device or torch.device("cpu"))
        self.device = self.compute.device
        self.model = model.to(self.device)
        if self.compute.channels_last or self.device.type == "cuda":
            keep_layout(self.model)
        if self.compute.channels_last:
            for parameter in self.model.parameters():
                parameter.data = in_layout(parameter.data)
        for module in self.model.modules():  # a stem has its backbone inside
            if isinstance(module, Segmenter):
                module.checkpointing = self.compute.checkpointing
        self.micro_batch = self.compute.micro_batch
        self.objective = objective
        self.settings = settings
        self.optimizer = optimizers.build(settings, self.model)
        self.bn_stats = bn_stats
        self.stats = running_stats(self.model)
        everything = list(self.model.state_dict())
        travelling = set(everything if shared is None else shared) - set(objective.local_names(self.model))
        if bn_stats == "local":
            travelling -= {name for pair in self.stats for name in pair}
        self.own_names = [name for name in everything if name not in travelling]
        self.passes = Passes(inductor=self.compute.inductor)
        self._judged_at_once: int | None = None  # cases, where memory ran out in evaluation
        self._references: dict[str, Reference] = {}
        self._recorder = Recorder(self) if self.compute.record else None

    # Tensors in and out

    def load(self, params: Params, own: Params | None = None) -> None:
        """Put received params into the model; the client's own tensors go on top."""
        if self.bn_stats == "pooled":
            params = Params(from_moments(params, self.stats))
        params.load_into(self.model)
        if own is not None:
            own.load_into(self.model)

    def export(self) -> Params:
        """A copy of the model as it travels."""
        params = Params.of(self.model)
        return Params(to_moments(params, self.stats)) if self.bn_stats == "pooled" else params

    def as_sent(self, tensors: Params) -> Params:
        """Tensors of the network as they travel, running statistics among them."""
        return Params(to_moments(tensors, self.stats)) if self.bn_stats == "pooled" else tensors

    def with_own(self, params: Params, memory: Mapping[str, Any]) -> Params:
        """A client's personal model as it would travel; its own tensors are kept as the network has them."""
        own: Mapping[str, Tensor] = memory.get("own", {})
        if self.bn_stats != "pooled" or not own:
            return params
        return Params(to_moments(Params(from_moments(params, self.stats)).updated(own), self.stats))

    def own(self) -> Params:
        """What stays at the client: local statistics and heads, and what the method does not share."""
        return Params.of(self.model).only(self.own_names)

    def optimizer_state(self) -> dict[str, Tensor]:
        return optimizers.export_state(self.optimizer)

    def predictions(
        self, batches: Iterable[Batch], params: Params | None, own: Params | None = None
    ) -> Iterator[tuple[Tensor, Batch]]:
        """Logits of each batch in evaluation mode; the model keeps its own tensors throughout."""
        tensors: dict[str, Tensor] = {}
        if params is not None:
            if self.bn_stats == "pooled":
                params = Params(from_moments(params, self.stats))
            tensors = {name: params[name] for name in params}
        if own is not None:
            tensors |= {name: own[name] for name in own}
        was_training = self.model.training
        self.model.eval()
        try:
            forward = self._recorder.predictions.of(tensors) if self._recorder is not None else None
            if forward is None:
                there = {name: self._laid_out(tensor.to(self.device)) for name, tensor in tensors.items()}
                forward = partial(torch.func.functional_call, self.model, there)
            for batch in batches:
                yield from self._in_pieces(forward, batch)
        finally:
            self.model.train(was_training)

    def _in_pieces(self, forward: Callable[[Tensor], Tensor], batch: Batch) -> Iterator[tuple[Tensor, Batch]]:
        """The logits of a batch; where memory runs out, of half as many cases at a time from then on."""
        done = 0
        while done < len(batch):
            piece = min(self._judged_at_once or len(batch), len(batch))
            part = batch if piece == len(batch) else batch.part(done, done + piece)
            try:
                with torch.no_grad(), self.autocast():
                    logits = forward(self._laid_out(part.image)).float().contiguous()
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if piece == 1:
                    raise ClientError(
                        f"evaluation: one case alone does not fit into the memory of {self.device}. Try a "
                        "smaller image or network, or compute.resident: host."
                    ) from None
            else:
                done += len(part)
                yield logits, part
                continue
            self._judged_at_once = -(-piece // 2)
            self._free_recordings()
            log.warning(
                "evaluation: out of memory on %s; from here on %d cases at a time",
                self.device, self._judged_at_once,
            )  # fmt: skip

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute.autocast)

    def reference(self, role: str, params: Params) -> Reference:
        """A frozen model with these params; the object is kept for the next client."""
        if role not in self._references:
            frozen = copy.deepcopy(self.model).requires_grad_(False).eval()
            self._references[role] = Reference(frozen, self.passes.encode)
        reference = self._references[role]
        if self.bn_stats == "pooled":
            params = Params(from_moments(params, self.stats))
        params.load_into(reference.model)
        reference.forget()
        return reference

    @property
    def references(self) -> list[Reference]:
        return list(self._references.values())

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """In the memory layout the network likes."""
        return in_layout(tensor) if self.compute.channels_last else tensor

    # Training

    def fit(
        self,
        split: Split,
        start: Params,
        *,
        where: str,
        seed: int,
        stream: tuple[object, ...],
        context: Context,
        rate: float,
        epochs: int,
        batch_size: int,
        augmentation: Augmentation,
        own: Params | None = None,
        optimizer_state: dict[str, Tensor] | None = None,
        loss: Loss | None = None,
        add: Loss | None = None,
        on_batch: Callable[[Batch, Context], Batch] | None = None,
        after_backward: Callable[[nn.Module], None] | None = None,
        step: Callable[[Step], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Fitted:
        """Train the model from `start` on a split; see `Client.fit` for the hooks."""
        self.load(start, own)
        self.model.start_fit()
        optimizers.import_state(self.optimizer, optimizer_state or {})
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        objective_loss = loss or self.objective.loss
        hooked = any(hook is not None for hook in (loss, add, after_backward, step))
        recorder = None if hooked or self.micro_batch is not None else self._recorder

        def total_loss(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            value = objective_loss(model, batch, context)
            if add is not None:
                value = value + add(model, batch, context)
            for term, extra in self.model.extra_losses(context.num_examples).items():
                context.note(term, extra)
                value = value + extra
            for term, number in self.model.notes().items():
                context.note(term, number)
            return value

        def plain_step(this: Step) -> None:
            if recorder is not None:
                this.value = recorder.steps.backward(this.batch, context, total_loss)
            else:
                this.backward()
            if after_backward is not None:
                after_backward(this.model)
            this.apply()

        seed_everything(seed, *stream, "torch")
        self.model.train()
        take = step or plain_step
        values: list[Tensor] = []
        num_steps = 0
        steps_an_epoch = -(-len(split) // batch_size)
        self.passes.usual = min(self.micro_batch or batch_size, batch_size, len(split))
        views = 2 if "two_views" in self.objective.needs else 1
        references = self.references
        comes_back = epochs > 1 and on_batch is None and not split.draws
        comes_back = comes_back and self.micro_batch is None and augmentation.changes_nothing
        context.memory.update(
            {k: v.to(self.device).clone() for k, v in context.memory.items() if isinstance(v, Tensor)}
        )
        for reference in references:
            reference.room = kept_room(self.device, len(references)) if comes_back else 0
        for epoch in range(epochs):
            context.epoch = epoch
            self.objective.start_epoch(self.model, context)
            for indices in shuffled(len(split), batch_size, seed, *stream, "order", epoch):
                draw = generator(seed, *stream, "patch", epoch, context.step) if split.draws else None
                batch = split.batch(indices, draw)
                batch, context.second_view = augmentation(
                    batch, seed, (*stream, "augment", epoch, context.step), views
                )
                if on_batch is not None:
                    batch = on_batch(batch, context)
                batch = replace(batch, image=self._laid_out(batch.image))
                for reference in references:
                    reference.expect(batch.image if comes_back else None, indices.tolist())
                this = Step(self, batch, context, total_loss, taken_apart=step is not None)
                take(this)
                if this.value is not None:
                    values.append(this.value)
                num_steps += 1
                context.step += 1
                if on_progress is not None:
                    on_progress(num_steps, epochs * steps_an_epoch)
            refuse_non_finite(values, where, rate)
        self.model.eval()
        for reference in references:
            reference.forget()
        context.memory.update({k: v.clone() for k, v in context.memory.items() if isinstance(v, Tensor)})
        losses = {"total": float(torch.stack(values).double().mean())} if values else {}
        losses |= {term: float(value) / num_steps for term, value in context.terms.items()}
        return Fitted(self.export(), num_steps, len(split), rate * num_steps, losses)

    def backward(self, batch: Batch, context: Context, loss: Loss) -> Tensor:
        """Add the gradients of the loss, the whole batch at once or piece by piece; its value.

        Pieces count by their cases: for losses that are means over cases the gradient is the same.
        """
        size = len(batch)
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
        return total

    def move(self) -> None:
        """One step of the optimizer along the gradients that are there."""
        limit = self.settings.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)
        optimizers.complete_momentum(self.optimizer)
        self.optimizer.step()

    def free_memory(self) -> None:
        """Let go of what a failed step left behind."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self._free_recordings()

    def _free_recordings(self) -> None:
        if self._recorder is not None:
            self._recorder.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Let go of recordings and references; they and the bench know each other."""
        if self._recorder is not None:
            self._recorder.forget()
            self._recorder = None
        self._references.clear()

    def reestimate_statistics(self, split: Split, params: Params, batch_size: int) -> Params:
        """Running statistics of a model on a split, from one pass without gradients."""
        self.load(params)
        reestimate(self.model, (self._laid_out(batch.image) for batch in in_order(split, batch_size)))
        return Params.of(self.model).only({name for pair in self.stats for name in pair})


def with_added(loss: Loss, add: Loss | None) -> Loss:
    """The sum of two losses."""
    if add is None:
        return loss
    return lambda model, batch, context: loss(model, batch, context) + add(model, batch, context)


def in_layout(tensor: Tensor) -> Tensor:
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


def kept_room(device: torch.device, models: int) -> int:
    """Bytes that each frozen model's features may take: a tenth of what is free, shared."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return free // 10 // max(models, 1)


def shuffled(count: int, batch_size: int, seed: int, *stream: object) -> Iterator[Tensor]:
    """Index batches in random order; the last one may be smaller."""
    order = torch.randperm(count, generator=generator(seed, *stream))
    for start in range(0, count, batch_size):
        yield order[start : start + batch_size]


def in_order(split: Split, batch_size: int) -> Iterator[Batch]:
    """Whole cases, one after the other; those of different shapes one at a time."""
    batch_size = batch_size if split.one_shape else 1
    for start in range(0, len(split), batch_size):
        yield split.batch(range(start, min(start + batch_size, len(split))))


def refuse_non_finite(values: list[Tensor], where: str, rate: float) -> None:
    """One look at all losses an epoch: no synchronisation inside it."""
    if not values:
        return
    finite = torch.isfinite(torch.stack(values))
    if not bool(finite.all()):
        step = int((~finite).nonzero()[0]) + 1
        raise ClientError(
            f"{where}: the loss became NaN or infinite at step {step}. "
            f"Last learning_rate {rate:g}; try a smaller one."
        )
