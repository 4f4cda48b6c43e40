"""AAW: Adaptive Aggregation Weights for Federated Segmentation of Pancreas MRI.

Pan et al., arXiv 2024. https://arxiv.org/abs/2410.22530

FedAvg whose weights move each round: a client on whose validation cases the global model does worse than
the client's own gains weight, one that wins from the federation loses some. Adapted from FedDG-GA.

Symbols: w^t global model, w_i^t client model; a_i aggregation weight; P_i, Q_i loss of client model and of
global model on the client's validation cases, G_i = Q_i - P_i the gap; s_t step, T rounds, t round from 0.
What leaves a client: w_i, P_i and Q_i.

Differs: Q_i is the loss of w^{t+1}, the model after aggregation; the paper prints w^t, with which G_i would
measure what local training gains (`gap_reference: previous_global`, A1).
Differs: weights are clipped to [0, 1]; line 15 of Algorithm 1 as printed gives 0 for every client (A2).
Differs: with no gap at all (A3), or all weights clipped to 0 (A4), the weights stay; the paper divides by 0.
Differs: the loss is measured on validation cases, which the paper does not have (A6).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from wardround.aggregation.weights import (
    add_newcomers,
    by_class,
    collect,
    normalise,
    recall_weights,
    redistribute,
)
from wardround.clients import Client, Clients
from wardround.losses.objective import told_losses
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.params import Params

log = logging.getLogger(__name__)

TOO_LARGE = 1e300  # beyond it, sums of gaps may overflow


@dataclass(frozen=True)
class AAW(Method):
    """Moves weights towards clients that lose from aggregation.

    step0: the first step, which falls linearly to 0 at the last round; 0 gives FedAvg. step_scale: 1/K
    divides it by the number of clients, as FedDG-GA does. gap_reference: the model made of this round's
    replies, or the one the round started from (the letter of the paper). q_eval: whether its loss comes
    with the next round's reply or in an exchange of its own. validation: the cases P and Q are measured on.
    """

    title = "FedAvg + AAW"
    paper = "Pan et al., arXiv"
    year = 2024
    link = "https://arxiv.org/abs/2410.22530"
    sends = "two validation losses (P, Q)"
    needs = frozenset({"validation"})
    tasks = ("train", "score")
    up = frozenset({"P", "Q"})

    step0: Annotated[float, Field(ge=0, le=1)] = 0.1
    step_scale: Literal["none", "1/K"] = "none"
    gap_reference: Literal["new_global", "previous_global"] = "new_global"
    q_eval: Literal["piggyback", "separate"] = "piggyback"
    validation: Literal["holdout", "train"] = "holdout"

    @property
    def waits(self) -> bool:
        """Whether a round's gap is known only when the next round's replies are there."""
        return self.gap_reference == "new_global" and self.q_eval == "piggyback"

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        p, q = collect(replies, "P"), collect(replies, "Q")
        a = add_newcomers(state.memory.get("weights", {}), self.first_weights(clients))  # Eq. 5

        if self.waits:  # Q of the model these clients received, P of those it was made of
            gaps, step = differences(q, state.memory.get("P", {})), self.step(state.round - 1, clients)
            a = adapt(a, gaps, step)
        state = replace(state, memory={"weights": a, "P": p})
        weights = self.weigh(state, replies)
        params = self.average(state, replies, weights)  # Eq. 4

        if not self.waits:
            if self.gap_reference == "new_global":
                trained = [reply.client for reply in replies]
                q = collect(clients.ask("score", Message(params=params), to=trained), "Q")
            gaps, step = differences(q, p), self.step(state.round, clients)
            state = replace(state, memory={"weights": adapt(a, gaps, step)})
        warnings = self.sampling_warnings(state.round, clients)
        notes = self.notes(replies, weights, P=p, Q=q, gap=gaps, step=step if gaps else 0.0)
        return state.next(params=params, notes=notes | ({"warnings": warnings} if warnings else {}))

    def first_weights(self, clients: Clients) -> dict[str, float]:
        """a^0 = n_i / Σn, Eq. 5."""
        return dict(zip(clients.sizes, normalise(list(clients.sizes.values())), strict=True))

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return by_class(recall_weights(state.memory["weights"], replies), replies)

    def step(self, round: int, clients: Clients) -> float:
        """s_t = step0 (1 - t/T), by choice over K (A5)."""
        scale = 1 / clients.num_total if self.step_scale == "1/K" else 1.0
        return self.step0 * (1 - round / clients.rounds) * scale

    def sampling_warnings(self, round: int, clients: Clients) -> list[str]:
        """Once: with client sampling, a gap needs a client that is drawn twice in a row."""
        if round or not self.waits or len(clients.present) == clients.num_total:
            return []
        warning = (
            "AAW: only clients drawn in two rounds in a row move their weight. "
            "With participation below 1, choose method.q_eval=separate."
        )
        log.warning(warning)
        return [warning]

    # Client

    def train(self, client: Client, message: Message) -> Message:
        before = self.gap_reference == "previous_global" or (self.waits and client.round > 0)
        q = self.validation_loss(client, message.params) if before else None
        params = client.fit(start=message.params).params
        p = self.validation_loss(client, params)
        losses = {"P": p, "Q": q}
        return Message(params=params, scalars={name: x for name, x in losses.items() if x is not None})

    def score(self, client: Client, message: Message) -> Message:
        """Q_i of the model just made."""
        q = self.validation_loss(client, message.params)
        return Message(scalars={} if q is None else {"Q": q})

    def validation_loss(self, client: Client, params: Params) -> float | None:
        """The mean loss of the cases (Eqs. 1 and 10), or None if there are none or it is not finite; a client
        with training cases that have no label has none of those."""
        if self.validation == "holdout" or client.data.num_unlabelled:
            loss = client.evaluate(params, fallback=False)
        else:
            losses = [
                told_losses(client.objective, logits, batch.label, client.data.annotation).double()
                for logits, batch in client.predictions(client.data.train, params)
            ]
            loss = float(torch.cat(losses).mean())
        return loss if loss is not None and math.isfinite(loss) else None


def differences(q: Mapping[str, float], p: Mapping[str, float]) -> dict[str, float]:
    """G_i = Q_i - P_i of the clients that have both, Eq. 6; without those that no loss can have."""
    gaps = {name: q[name] - p[name] for name in q if name in p}
    return {name: gap for name, gap in gaps.items() if abs(gap) < TOO_LARGE}


def adapt(a: Mapping[str, float], gaps: Mapping[str, float], step: float) -> dict[str, float]:
    """The weights after one step along the gaps; clients without a gap keep theirs (hold rule).

    >>> adapt({"north": 0.5, "east": 0.5}, {"north": 0.2, "east": -0.1}, step=0.1)
    {'north': 0.5714285714285714, 'east': 0.42857142857142855}
    """
    gaps = {name: gap for name, gap in gaps.items() if math.isfinite(gap)}
    largest = max((abs(gap) for gap in gaps.values()), default=0.0)
    if not largest or not step:
        return dict(a)  # A3
    shifted = {name: a[name] + step * (gaps[name] / largest) for name in gaps}  # Eq. 7
    clipped = {name: min(max(value, 0.0), 1.0) for name, value in shifted.items()}  # A2
    return redistribute(a, clipped)  # normalised; if all are clipped to 0, unchanged (A4)
