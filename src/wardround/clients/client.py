"""Client: one participant, as a method's client side sees it."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wardround.config import Config, OptimizerSettings
from wardround.data.cases import Batch, ClientData, Split
from wardround.errors import ClientError
from wardround.losses.objective import Context, Objective, told_losses
from wardround.losses.segmentation import mask_dice
from wardround.params import Params
from wardround.privacy import Guard
from wardround.seeding import generator
from wardround.seeds import derive
from wardround.training.device import is_out_of_memory
from wardround.training.learner import Loss, Step
from wardround.training.private_loop import PrivateLoop, check_hooks
from wardround.training.workbench import FitHooks, FitSettings, Fitted, Workbench, read_in_order

log = logging.getLogger(__name__)

T = TypeVar("T")


class BeginAnew(Exception):
    """Memory ran out in a task: restart it, so that nothing of the first attempt counts."""


def run_to_completion(attempt: Callable[[], T]) -> T:
    """The result of the first attempt that does not run out of memory."""
    while True:
        with contextlib.suppress(BeginAnew):
            return attempt()


class Client:
    """One hospital: its cases, its memory, and the process's model to train with.

    memory: what it remembers between tasks; it never leaves. round: the round of the present task.
    window: voxels of the sliding windows it evaluates images in, None for whole images; mirror_axes: of the
    mirror images it tests with, None for all. guard: of its answers, where they are private.
    """

    def __init__(
        self, name: str, data: ClientData, bench: Workbench, config: Config, needs: frozenset[str]
    ) -> None:
        self.name = name
        self.data = data
        self.memory: dict[str, Any] = {}
        self.round = 0
        self.on_progress: Callable[[int, int], None] | None = None
        self.fitted: Fitted | None = None
        self.guard: Guard | None = None
        self.window = config.evaluate.window
        self.mirror_axes = config.augmentation.mirror_axes
        self._bench = bench
        self._config = config
        self._needs = needs | bench.objective.needs
        self._has_teacher = "teacher" in self._needs and data.num_unlabelled > 0

    # What a method may read

    @property
    def rounds(self) -> int:
        return self._config.rounds

    @property
    def model(self) -> nn.Module:
        return self._bench.model

    @property
    def objective(self) -> Objective:
        """The chosen objective: how logits become probabilities, and the loss of a case."""
        return self._bench.objective

    @property
    def device(self) -> torch.device:
        return self._bench.device

    @property
    def num_examples(self) -> int:
        return len(self.data.train)

    def is_last_pass(self, context: Context) -> bool:
        """Whether this step belongs to the round's last pass over the training cases."""
        config, count = self._config, self.num_examples
        return context.step >= config.count_steps(count) - config.count_batches(count)

    @property
    def optimizer(self) -> OptimizerSettings:
        return self._config.optimizer

    @property
    def learning_rate(self) -> float:
        """The rate of the present round."""
        optimizer = self._config.optimizer
        return optimizer.learning_rate * optimizer.schedule.factor(self.round, self.rounds)

    def generator(self, *purpose: object) -> torch.Generator:
        """Random numbers of this client, round and purpose alone."""
        return generator(self._config.seed, "method", self.name, self.round, *purpose)

    def seed(self, *purpose: object) -> int:
        return derive(self._config.seed, "method", self.name, self.round, *purpose)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        """The chosen objective on one batch."""
        return self._bench.objective.loss(model, batch, context)

    # What a method may do

    def fit(
        self,
        start: Params,
        *,
        loss: Loss | None = None,
        add: Loss | None = None,
        on_batch: Callable[[Batch, Context], Batch] | None = None,
        after_backward: Callable[[nn.Module], None] | None = None,
        step: Callable[[Step], None] | None = None,
        epochs: int | None = None,
        split: Split | None = None,
        second: bool = False,
    ) -> Fitted:
        """Train from `start` for this round's epochs or steps and return the result; nothing is sent.

        loss replaces the objective, add comes on top of it: a `ParameterTerm` goes into a CUDA graph of the
        step, any other function makes steps run eagerly. on_batch changes a batch before the forward pass;
        after_backward may edit gradients; step takes the whole optimizer step apart.
        epochs: other than the configured work of a round; such a method says so in `most_steps`.
        split: other cases than the client's training cases. second: a further model trained in the same
        task (a personal one), with random streams and optimizer state of its own, which starts from
        `start` alone and is not reported as the round's training.
        """
        config, bench, memory = self._config, self._bench, self.memory
        moments = "optimizer_second" if second else "optimizer"
        settings = FitSettings(
            where=f"round {self.round + 1}, client '{self.name}', train",
            seed=config.seed,
            stream=("train", self.name, self.round, *(["second"] if second else [])),
            learning_rate=self.learning_rate,
            epochs=config.local_epochs if epochs is None else epochs,
            steps=config.local_steps if epochs is None else None,
            batch_size=config.batch_size,
            augmentation=config.augmentation.for_channels(lacking=self.data.lacking),
            own=None if second else memory.get("own"),
            optimizer_state=memory.get(moments, {}),
        )
        hooks = FitHooks(loss, add, on_batch, after_backward, step, self.on_progress)
        charged = None if self.guard is None else self.guard.charge_steps(self.round)
        if charged is not None:
            check_hooks(hooks)
            hooks = replace(hooks, loop=partial(PrivateLoop, charged))
            settings = replace(settings, seed=secrets.randbits(63))
        fitted = self._fitting(self.data.train if split is None else split, start, second, settings, hooks)
        if config.optimizer.state == "keep":
            memory[moments] = Params(bench.optimizer_state())
        if second:
            return fitted
        if bench.own_names:
            memory["own"] = bench.own()
        if "previous" in self._needs:
            memory["previous"] = fitted.params
        if self._has_teacher:
            memory["teacher"] = bench.export_reference("teacher")
        self.fitted = fitted
        return fitted

    def _fitting(
        self, split: Split, start: Params, second: bool, settings: FitSettings, hooks: FitHooks
    ) -> Fitted:
        """Fit; where memory runs out, the whole task restarts with half as many cases at a time."""
        bench = self._bench
        least = bench.objective.least_together
        try:
            if "global" in self._needs and bench.device.type != "cpu":
                start = start.to(bench.device)  # model and reference both take it from there
            return bench.fit(split, start, self._context(start, second), settings, hooks)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tried = min(bench.micro_batch or settings.batch_size, settings.batch_size)
        if tried <= least:
            few = "one case alone does" if tried == 1 else f"{tried} cases, which this loss compares, do"
            raise ClientError(
                f"{settings.where}: {few} not fit into the memory of {bench.device}. "
                "Try compute.checkpointing: true, a smaller patch or image, or a smaller network."
            )
        bench.micro_batch = max(least, -(-tried // 2))
        bench.free_memory()
        log.warning(
            "%s: out of memory on %s; from here on %d cases at a time, their gradients added up",
            settings.where, bench.device, bench.micro_batch,
        )  # fmt: skip
        raise BeginAnew

    def evaluate(
        self,
        params: Params | None = None,
        function: Callable[[Tensor, Batch], Tensor] | None = None,
        *,
        fallback: bool = True,
    ) -> float | None:
        """The mean over validation cases of `function(logits, batch)` (B,), by default the objective's loss.

        Evaluation mode, no augmentation; model, statistics and random streams stay untouched. Without
        validation cases the training cases serve if `fallback` and all have labels; otherwise the answer is
        None: a client without labels has no score.
        """
        split = self.data.val
        if not len(split) and fallback and not self.data.num_unlabelled:
            log.info("client '%s' has no validation cases; its training cases serve", self.name)
            split = self.data.train
        if not len(split):
            return None
        annotation = self.data.annotation
        value = function or (
            lambda logits, batch: told_losses(self.objective, logits, batch.label, annotation)
        )
        totals = [value(logits, batch).double().sum() for logits, batch in self.predictions(split, params)]
        return float(torch.stack(totals).sum()) / len(split)

    def dice(self, params: Params) -> float | None:
        """The mean Dice of predicted masks over validation cases (training cases if there are none)."""
        objective, annotation = self.objective, self.data.annotation

        def score(logits: Tensor, batch: Batch) -> Tensor:
            outputs = logits.shape[1]
            predicted, label = objective.predict(logits), batch.label
            if annotation is not None:
                predicted, label = map(annotation.to_groups, annotation.drop_ignored(predicted, label))
                return mask_dice(predicted, label, annotation.num_groups)
            classes = objective.count_classes(outputs) if outputs > 1 else outputs
            return mask_dice(predicted, label, classes)

        return self.evaluate(params, score)

    def predictions(self, split: Split, params: Params | None = None) -> Iterator[tuple[Tensor, Batch]]:
        """Logits of a split, batch by batch, by these params (default: the model as it stands).

        Images larger than `evaluate.window` go through it as sliding windows.
        """
        batches = read_in_order(split, self._config.evaluate.batch_size)
        return self._bench.predictions(batches, params, self.memory.get("own"), self.window)

    def kept_model(self) -> Params | None:
        """The whole model of a client that shares none of it, as models travel; None before its first."""
        own = self.memory.get("own")
        return None if own is None else self._bench.as_sent(own)  # kept as the network has it

    def with_own_statistics(self, params: Params) -> Params:
        """The params with running statistics measured on this client's training images, without labels."""
        measured = self._bench.reestimate_statistics(self.data.train, params, self._config.batch_size)
        return params.updated(self._bench.as_sent(measured))

    def _context(self, start: Params, second: bool) -> Context:
        bench, needs = self._bench, self._needs
        previous, teacher = (None if second else self.memory.get(name) for name in ("previous", "teacher"))
        return Context(
            round=self.round,
            rounds=self.rounds,
            num_examples=self.num_examples if self.guard is None else self.guard.cases,
            memory=self.memory.setdefault("objective_second" if second else "objective", {}),
            generator=generator(self._config.seed, "objective", self.name, self.round),
            with_features="features" in needs,
            global_=bench.reference("global", start) if "global" in needs else None,
            previous=bench.reference("previous", previous or start) if "previous" in needs else None,
            has_previous=previous is not None,
            has_unlabelled=self.data.num_unlabelled > 0,
            teacher=bench.reference("teacher", teacher or start).model if self._has_teacher else None,
            run=partial(bench.passes.run, decoder="decoder" in needs),
            compiled=bench.passes.compiled,
            annotation=self.data.annotation,
            restrict=bench.objective.restrict,
            exclusion=self._config.exclusion,
        )
