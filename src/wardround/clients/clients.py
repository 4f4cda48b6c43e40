"""Clients: the server's view of all participants, with one verb, `ask`.

Where the clients run (in this process, in worker processes, at hospitals behind a federated engine) is the
business of a `Transport`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from wardround.aggregation.weights import normalise
from wardround.clients.bounds import Bounds, Change, measure_change
from wardround.clients.gate import (
    Registration,
    complaint,
    content_complaint,
    count_complaint,
    facts_complaint,
    names_complaint,
    scores_complaint,
    variance_complaint,
)
from wardround.clients.secure_sum import MODEL, SumSession, Terms
from wardround.errors import TooFewClients
from wardround.messages import Message, Reply, ServerState
from wardround.privacy import PrivacySettings

log = logging.getLogger(__name__)

Messages = Mapping[str, Message]  # client -> what it gets


@dataclass(frozen=True)
class SyncState:
    """What every request says about the run, so that a client's memory follows the server's.

    rewinds: rounds that were restarted, in the order in which that happened; what a client remembers of
    them since then does not count. best: the round (from 0) of the best model so far.
    """

    rewinds: tuple[int, ...] = ()
    best: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"rewinds": list(self.rewinds), "best": self.best}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> SyncState:
        best = facts["best"]
        return cls(tuple(int(round) for round in facts["rewinds"]), None if best is None else int(best))


@dataclass(frozen=True)
class Answer:
    """A client's answer, not yet checked; or why there is none (`failure`).

    num_trained: cases that the training of this task went through, 0 if there was none; refused: why it may
    not be used, found by the transport; num_bytes: what travelled, unless that is the message as it is;
    privacy: what was done to it under differential privacy, and what was spent.
    """

    client: str
    message: Message = field(default_factory=Message)
    num_examples: Any = 0
    num_steps: Any = 0
    num_trained: int = 0
    seconds: float = 0.0
    loss: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    refused: str | None = None
    num_bytes: int | None = None
    privacy: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON, without the message."""
        return {key: value for key, value in vars(self).items() if key != "message"}


class Snapshot(NamedTuple):
    """Something as it is now, to be written by another thread. num_bytes: of tensors that are written."""

    num_bytes: int
    write: Callable[[], None]

    @classmethod
    def joined(cls, parts: Sequence[Snapshot]) -> Snapshot:
        """All of them, written in this order."""

        def write() -> None:
            for part in parts:
                part.write()

        return cls(sum(part.num_bytes for part in parts), write)


class Transport(Protocol):
    """Where the clients are: in this process, in worker processes, or at hospitals."""

    def register(self) -> list[Registration]:
        """What every client registers before anything else."""

    def deliver(self, task: str, round: int, messages: Messages, sync_state: SyncState) -> Iterator[Answer]:
        """Carry one request to each named client; answers may come in any order."""

    def snapshot(self, round: int) -> Snapshot:
        """What clients remember after so many rounds; once written, it survives a power cut."""

    def strays(self) -> list[tuple[str, str]]:
        """Unexpected replies since the last call (late, duplicate, foreign): client and reason."""

    def pictures(self, name: str) -> Path | None:
        """Where a client's pictures are, if they are on this machine."""

    def close(self) -> None: ...


@dataclass
class Exchange:
    """What the records say about one `ask`."""

    task: str
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    loss: dict[str, Mapping[str, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    privacy: dict[str, Mapping[str, Any]] = field(default_factory=dict)


class Clients:
    """The server's view of its clients.

    names: everyone who registered, sorted; present: who takes part in this round; taking_part: who ever
    does, None for everybody; sizes: training cases of each who does; tasks: the method's, and what a reply
    to them may hold beside the model; most_steps: how many a round so many cases make at most; judge: the
    method's own complaint about a reply, if any; bounds: the same for a round's updates, beside each other;
    counts: of clients that registered more cases than count; privacy: that the run asks for, with secure_sum
    only sums over clients are to be had of what a method's tasks answer; sync_state: goes with every request.
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
        bounds: Bounds | None = None,
        counts: Mapping[str, int] | None = None,
        privacy: PrivacySettings | None = None,
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
        self.bounds = bounds
        self._counts = counts or {}
        self._secure_sum = privacy is not None and privacy.secure_sum
        self._terms = Terms() if privacy is None else Terms.of(privacy, rounds)
        self.sums: list[dict[str, Any]] = []  # what the records say of the round's secure sums
        self._excluded: dict[str, str] = {}  # clients that spoilt a sum of this round
        self._summed: set[str] | None = None  # those with whom alone it can be repeated

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
        return {name: self._count(name, self.registered[name].num_train) for name in self.trainable}

    def _count(self, name: str, num_cases: int) -> int:
        """As many of a client's cases as count."""
        return min(num_cases, self._counts.get(name, num_cases))

    def begin_round(self, round: int, present: Sequence[str]) -> None:
        if round != self.round:
            self._excluded, self._summed = {}, None
        self.round = round
        repeated = set(present) if self._summed is None else self._summed.intersection(present)
        self.present = sorted(repeated - set(self._excluded))
        self.exchanges, self.sums = [], []
        if self.bounds is not None:
            self.bounds.begin(round)

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
        session = self._open_sum(task, messages) if self._secure_sum and task in self._tasks else None
        good = self._exchange(task, messages, session)
        if to is None and len(good) < self._min_clients:
            raise TooFewClients(self._describe_shortage(task, len(good), self.exchanges[-1]))
        return good

    def _exchange(
        self, task: str, messages: Mapping[str, Message], session: SumSession | None = None
    ) -> list[Reply]:
        """Send each client its message; the good replies in this order."""
        exchange = Exchange(task)
        self.exchanges.append(exchange)
        messages = messages if session is None else session.requests
        sizes: dict[int, int] = {}  # the common message is measured once
        for name, sent in messages.items():
            exchange.bytes_down[name] = sizes.setdefault(id(sent), sent.num_bytes)
        replies: dict[str, Reply] = {}
        changes: dict[str, Change] = {}
        for answer in self._transport.deliver(task, self.round, messages, self.sync_state):
            reply = self._admit(task, answer, exchange, session)
            if reply is None:
                continue
            replies[reply.client] = reply
            if self.bounds is not None and self.bounds.are_on and task in self._tasks and session is None:
                changes[reply.client] = self._measure(reply, messages[reply.client])
        if self.bounds is not None and changes:
            for name, reason in self.bounds.judge(self.round, replies, messages, changes).items():
                self._refuse(task, name, reason, exchange)
                del replies[name]
        return [replies[name] for name in messages if name in replies]

    def _open_sum(self, task: str, messages: Mapping[str, Message]) -> SumSession:
        """The answers to a task that clients will withhold."""

        def keep(names: Sequence[str]) -> None:
            self._summed = set(names)

        def exclude(name: str, reason: str) -> None:
            log.warning("round %d, client '%s': left out of the round: %s", self.round + 1, name, reason)
            self._excluded[name] = reason

        learned = next(iter(self.registered.values())).trainable
        return SumSession(
            task,
            self.round,
            messages,
            self._min_clients,
            learned,
            ask=self._exchange,
            refuse=lambda task, name, reason: self._refuse(task, name, reason, self.exchanges[-1]),
            exclude=exclude,
            keep=keep,
            judge=lambda norm, start: (
                None if self.bounds is None else self.bounds.judge_sum(self.round, norm, start)
            ),
            note=self.sums.append,
            terms=self._terms,
        )

    def describe_sums(self, state: ServerState) -> ServerState:
        """The state after a round, whose notes say what was summed, and weigh those alone that were."""
        if not self.sums or not isinstance(state, ServerState):
            return state
        lost = {name for told in self.sums if told["group"] == MODEL for name in told["lost"]}
        weights = {name: w for name, w in state.notes.get("weights", {}).items() if name not in lost}
        known = (
            {"weights": dict(zip(weights, normalise(list(weights.values())), strict=True))} if lost else {}
        )
        return replace(state, notes={**state.notes, **known, "secure_sum": self.sums})

    def _measure(self, reply: Reply, sent: Message) -> Change:
        registered = self.registered[reply.client]
        return measure_change(
            reply, sent, registered.trainable, self._count(reply.client, registered.num_train)
        )

    def _refuse(self, task: str, name: str, reason: str, exchange: Exchange) -> None:
        exchange.refused[name] = reason
        exchange.loss.pop(name, None)
        log.warning("round %d, client '%s', %s: reply refused: %s", self.round + 1, name, task, reason)

    def _admit(
        self, task: str, answer: Answer, exchange: Exchange, session: SumSession | None
    ) -> Reply | None:
        """The gate: a checked reply, or None with the reason logged and counted."""
        name = answer.client
        wrong = facts_complaint(answer.seconds, answer.loss)
        exchange.seconds[name] = 0.0 if wrong else answer.seconds
        if answer.failure is not None:
            exchange.lost[name] = answer.failure
            log.warning("round %d, client '%s', %s: lost: %s", self.round + 1, name, task, answer.failure)
            return None
        sent = answer.message
        exchange.bytes_up[name] = sent.num_bytes if answer.num_bytes is None else answer.num_bytes
        reason = answer.refused or wrong
        if session is not None and reason is None:
            try:
                answer = replace(answer, message=session.open(name, sent))
            except ValueError as error:
                reason = str(error)
        reason = reason or self._complaint(task, answer)
        if reason is not None:
            self._refuse(task, name, reason, exchange)
            return None
        exchange.loss[name] = dict(answer.loss)
        if answer.privacy:
            exchange.privacy[name] = dict(answer.privacy)
        if self._on_reply is not None:
            self._on_reply(task, self._make_reply(answer, sent))
        return self._make_reply(answer, answer.message)

    def _make_reply(self, answer: Answer, message: Message) -> Reply:
        return Reply(
            message.params,
            message.extras,
            message.scalars,
            client=answer.client,
            num_examples=self._count(answer.client, answer.num_examples),
            num_steps=answer.num_steps,
            seconds=answer.seconds,
            loss=answer.loss,
            annotates=self.registered[answer.client].annotates,
        )

    def _complaint(self, task: str, answer: Answer) -> str | None:
        known = self.registered.get(answer.client)
        if known is None:
            return "the client never registered"
        if task == "evaluate":  # surface distances may rightly be infinite
            return scores_complaint(answer.message, max(known.num_train, known.num_val, known.num_test))
        if task == "train":
            most = None if self._most_steps is None else self._most_steps(known.num_train)
            reason = complaint(known, answer.message, answer.num_examples, answer.num_steps, most)
        elif task == "norm_stats":
            reason = count_complaint("num_examples", answer.num_examples, 0, known.num_train)
            reason = reason or variance_complaint(answer.message.extras.get("stats"))
        else:
            reason = count_complaint("num_examples", answer.num_examples, 0, None)
        reason = reason or content_complaint(answer.message)
        if reason is not None or task not in self._tasks:
            return reason
        return names_complaint(self._tasks[task], answer.message) or self._ask_method(task, answer, known)

    def _ask_method(self, task: str, answer: Answer, registration: Registration) -> str | None:
        """The method's own complaint; a reply it cannot even inspect is bad too."""
        if self._judge is None:
            return None
        try:
            return self._judge(task, answer.message, registration)
        except Exception as error:
            return f"its content cannot be checked ({type(error).__name__}: {error})"

    def _describe_shortage(self, task: str, num_good: int, exchange: Exchange) -> str:
        problems = exchange.lost | exchange.refused
        none = "No other was asked." if exchange.bytes_down else "None was asked."
        details = "; ".join(f"'{name}': {reason.rstrip('.')}" for name, reason in problems.items())
        return (
            f"round {self.round + 1}, {task}: {num_good} clients gave a usable answer, min_clients is "
            f"{self._min_clients}. {details + '.' if details else none}"
        )
