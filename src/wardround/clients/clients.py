"""Client: one hospital. Clients: the server's view of all of them, with one verb, `ask`.

A method file sees only these two. Where the clients run (in this process, in worker processes, at
hospitals behind a federated engine) is the business of a `Transport`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from wardround.clients.gate import (
    Registration,
    complaint,
    content_complaint,
    count_complaint,
    names_complaint,
    variance_complaint,
)
from wardround.clients.sync_state import SyncState
from wardround.config import Config, OptimizerSettings
from wardround.data.cases import Batch, ClientData, Split
from wardround.errors import ClientError, TooFewClients
from wardround.losses.objective import Context, Objective
from wardround.losses.segmentation import mask_dice
from wardround.messages import Message, Reply
from wardround.params import Params
from wardround.seeding import generator
from wardround.seeds import derive
from wardround.training.device import is_out_of_memory
from wardround.training.learner import Loss, Step
from wardround.training.workbench import FitHooks, FitSettings, Fitted, Workbench, read_in_order

log = logging.getLogger(__name__)

T = TypeVar("T")


class BeginAnew(Exception):
    """Memory ran out in a task: it begins anew, so that nothing of the first attempt counts."""


def to_the_end(attempt: Callable[[], T]) -> T:
    """What an attempt gives that was not cut short."""
    while True:
        with contextlib.suppress(BeginAnew):
            return attempt()


class Client:
    """One hospital: its cases, its memory, and the process's model to train with.

    memory: what it remembers between tasks; it never leaves. round: the round of the present task.
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
        self._bench = bench
        self._config = config
        self._needs = needs | bench.objective.needs

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

    @property
    def local_epochs(self) -> int:
        return self._config.local_epochs

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
        """Train from `start` for this round's epochs and return the result; nothing is sent.

        loss replaces the objective, add comes on top of it; on_batch changes a batch before the
        forward pass; after_backward may edit gradients; step takes the whole optimizer step apart.
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
            batch_size=config.batch_size,
            augmentation=config.augmentation,
            own=None if second else memory.get("own"),
            optimizer_state=memory.get(moments, {}),
        )
        hooks = FitHooks(loss, add, on_batch, after_backward, step, self.on_progress)
        fitted = self._fitting(self.data.train if split is None else split, start, second, settings, hooks)
        if config.optimizer.state == "keep":
            memory[moments] = Params(bench.optimizer_state())
        if second:
            return fitted
        if bench.own_names:
            memory["own"] = bench.own()
        if "previous" in self._needs:
            memory["previous"] = fitted.params
        self.fitted = fitted
        return fitted

    def _fitting(
        self, split: Split, start: Params, second: bool, settings: FitSettings, hooks: FitHooks
    ) -> Fitted:
        """Fit; where memory runs out, the whole task begins anew with half as many cases at a time."""
        bench = self._bench
        least = bench.objective.least_together
        try:
            if "global" in self._needs and bench.device.type != "cpu":
                start = start.to(bench.device)  # model and reference both take it from there
            return bench.fit(split, start, self._context(start, second), settings, hooks)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            together = min(bench.micro_batch or settings.batch_size, settings.batch_size)
        if together <= least:
            few = (
                "one case alone does" if together == 1 else f"{together} cases, which this loss compares, do"
            )
            raise ClientError(
                f"{settings.where}: {few} not fit into the memory of {bench.device}. "
                "Try compute.checkpointing: true, a smaller patch or image, or a smaller network."
            )
        bench.micro_batch = max(least, -(-together // 2))
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
        validation cases the training cases serve if `fallback`; with none at all the answer is None.
        """
        split = self.data.val
        if not len(split) and fallback:
            log.info("client '%s' has no validation cases; its training cases serve", self.name)
            split = self.data.train
        if not len(split):
            return None
        value = function or (lambda logits, batch: self._bench.objective.sample_losses(logits, batch.label))
        totals = [value(logits, batch).double().sum() for logits, batch in self.predictions(split, params)]
        return float(torch.stack(totals).sum()) / len(split)

    def dice(self, params: Params) -> float | None:
        """The mean Dice of predicted masks over validation cases (training cases if there are none)."""
        predict = self.objective.predict
        return self.evaluate(
            params, lambda logits, batch: mask_dice(predict(logits), batch.label, logits.shape[1])
        )

    def predictions(self, split: Split, params: Params | None = None) -> Iterator[tuple[Tensor, Batch]]:
        """Logits of a split, batch by batch, by these params (default: the model as it stands)."""
        return self._bench.predictions(
            read_in_order(split, self._config.evaluate.batch_size), params, self.memory.get("own")
        )

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
        previous = None if second else self.memory.get("previous")
        return Context(
            round=self.round,
            rounds=self.rounds,
            num_examples=self.num_examples,
            memory=self.memory.setdefault("objective_second" if second else "objective", {}),
            generator=generator(self._config.seed, "objective", self.name, self.round),
            with_features="features" in needs,
            global_=bench.reference("global", start) if "global" in needs else None,
            previous=bench.reference("previous", previous or start) if "previous" in needs else None,
            has_previous=previous is not None,
            run=partial(bench.passes.run, decoder="decoder" in needs),
            compiled=bench.passes.compiled,
        )


@dataclass(frozen=True)
class Answer:
    """What came back from a client, not yet checked; or why nothing did (`failure`).

    refused: why it may not be used, found on its way; num_bytes: what travelled, where that is not just the
    message.
    """

    client: str
    message: Message = field(default_factory=Message)
    num_examples: Any = 0
    num_steps: Any = 0
    seconds: float = 0.0
    loss: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    refused: str | None = None
    num_bytes: int | None = None


class Transport(Protocol):
    """Where the clients are: in this process, in worker processes, or at hospitals."""

    def register(self) -> list[Registration]:
        """What every client says of itself before anything else."""
        ...

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: SyncState
    ) -> Iterator[Answer]:
        """Carry one request to each named client; answers may come in any order."""
        ...

    def settle(self) -> None:
        """Return when what clients remember would survive a power cut."""
        ...

    def strays(self) -> list[tuple[str, str]]:
        """Replies nobody waited for since the last call (late, twice, foreign): who, and what was wrong."""
        ...

    def pictures(self, name: str) -> Path | None:
        """Where a client's pictures are, if they are on this machine."""
        ...

    def close(self) -> None: ...


@dataclass
class Exchange:
    """What the records tell about one `ask`."""

    task: str
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    loss: dict[str, Mapping[str, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


class Clients:
    """The server's view of the hospitals.

    names: everyone who registered, sorted; present: who takes part in this round; taking_part: who ever
    does, None for everybody; sizes: training cases of each who does; tasks: the method's, and what a reply
    to them may hold beside the model; most_steps: how many a round so many cases make at most; judge: the
    method's own complaint about a reply, if any; sync_state: goes with every request.
    """

    def __init__(
        self,
        transport: Transport,
        registrations: Sequence[Registration],
        *,
        rounds: int,
        min_clients: int,
        taking_part: Collection[str] | None = None,
        tasks: Mapping[str, frozenset[str]] | None = None,
        most_steps: Callable[[int], int] | None = None,
        judge: Callable[[str, Message, Registration], str | None] | None = None,
        on_reply: Callable[[str, Reply], None] | None = None,
    ) -> None:
        self.registered = {entry.client: entry for entry in sorted(registrations, key=lambda e: e.client)}
        self.rounds = rounds
        self.round = 0
        self.sync_state = SyncState()
        self._taking_part = taking_part
        self.present: list[str] = self.trainable
        self.exchanges: list[Exchange] = []
        self._transport = transport
        self._min_clients = min_clients
        self._tasks = tasks or {}
        self._most_steps = most_steps
        self._judge = judge
        self._on_reply = on_reply

    @property
    def names(self) -> list[str]:
        return list(self.registered)

    @property
    def trainable(self) -> list[str]:
        """Clients with at least one training case that take part; one that is held out adds to nothing."""
        able = [name for name, entry in self.registered.items() if entry.num_train > 0]
        return able if self._taking_part is None else [name for name in able if name in self._taking_part]

    @property
    def num_total(self) -> int:
        return len(self.trainable)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: self.registered[name].num_train for name in self.trainable}

    def begin_round(self, round: int, present: Sequence[str]) -> None:
        self.round = round
        self.present = sorted(present)
        self.exchanges = []

    def ask(
        self,
        task: str,
        message: Message | None = None,
        *,
        each: Mapping[str, Message] | None = None,
        to: Sequence[str] | None = None,
    ) -> list[Reply]:
        """Ask clients to do a task and return the good replies, in the order of client names.

        each: what single clients get beyond (or instead of) the common message;
        to: whom to ask, by default everyone present; only then `min_clients` must answer.
        """
        asked = self.present if to is None else sorted(to)
        common = message or Message()
        messages = {name: common.merged((each or {}).get(name)) for name in asked}
        exchange = Exchange(task)
        self.exchanges.append(exchange)
        sizes: dict[int, int] = {}  # the common message is measured once
        for name, sent in messages.items():
            exchange.bytes_down[name] = sizes.setdefault(id(sent), sent.num_bytes)
        replies = {}
        for answer in self._transport.deliver(task, self.round, messages, self.sync_state):
            reply = self._admitted(task, answer, exchange)
            if reply is not None:
                replies[reply.client] = reply
        good = [replies[name] for name in asked if name in replies]
        if to is None and len(good) < self._min_clients:
            raise TooFewClients(self._shortage(task, len(good), exchange))
        return good

    def _admitted(self, task: str, answer: Answer, exchange: Exchange) -> Reply | None:
        """The gate: a checked reply, or None with the reason logged and counted."""
        name = answer.client
        exchange.seconds[name] = answer.seconds
        if answer.failure is not None:
            exchange.lost[name] = answer.failure
            log.warning("round %d, client '%s', %s: lost: %s", self.round + 1, name, task, answer.failure)
            return None
        message = answer.message
        exchange.bytes_up[name] = message.num_bytes if answer.num_bytes is None else answer.num_bytes
        reason = answer.refused or self._complaint(task, answer)
        if reason is not None:
            exchange.refused[name] = reason
            log.warning("round %d, client '%s', %s: reply refused: %s", self.round + 1, name, task, reason)
            return None
        reply = Reply(
            message.params,
            message.extras,
            message.scalars,
            client=name,
            num_examples=answer.num_examples,
            num_steps=answer.num_steps,
            seconds=answer.seconds,
            loss=answer.loss,
        )
        exchange.loss[name] = dict(answer.loss)
        if self._on_reply is not None:
            self._on_reply(task, reply)
        return reply

    def _complaint(self, task: str, answer: Answer) -> str | None:
        registration = self.registered.get(answer.client)
        if registration is None:
            return "the client never registered"
        if task == "evaluate":  # surface distances may rightly be infinite
            return None
        if task == "train":
            most = None if self._most_steps is None else self._most_steps(registration.num_train)
            reason = complaint(registration, answer.message, answer.num_examples, answer.num_steps, most)
        elif task == "norm_stats":
            reason = count_complaint("num_examples", answer.num_examples, 0, registration.num_train)
            reason = reason or variance_complaint(answer.message.extras.get("stats"))
        else:
            reason = count_complaint("num_examples", answer.num_examples, 0, None)
        reason = reason or content_complaint(answer.message)
        if reason is not None or task not in self._tasks:
            return reason
        return names_complaint(self._tasks[task], answer.message) or self._judged(task, answer, registration)

    def _judged(self, task: str, answer: Answer, registration: Registration) -> str | None:
        """The method's own complaint; a reply it cannot even look at is bad too."""
        if self._judge is None:
            return None
        try:
            return self._judge(task, answer.message, registration)
        except Exception as error:
            return f"its content cannot be checked ({type(error).__name__}: {error})"

    def _shortage(self, task: str, num_good: int, exchange: Exchange) -> str:
        problems = exchange.lost | exchange.refused
        nobody = "No other was asked." if exchange.bytes_down else "None was asked."
        details = "; ".join(f"'{name}': {reason}" for name, reason in problems.items()) or nobody
        return (
            f"round {self.round + 1}, {task}: {num_good} clients gave a usable answer, min_clients is "
            f"{self._min_clients}. {details}"
        )
