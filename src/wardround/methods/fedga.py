"""FedGA (FedDG-GA): Federated Domain Generalization with Generalization Adjustment.

Zhang et al., CVPR 2023. https://github.com/MediaBrain-SJTU/FedDG-GA

A client whose validation cases the global model serves worse than the client's own model gains weight, so
that the gap between the two becomes alike everywhere. The step falls linearly to 0 over the run.

Symbols: a_k aggregation weight; P_k, Q_k metric of client model and of global model on the client's
validation cases, G_k = Q_k - P_k the gap; d first step, d_t that of round t from 0, R rounds, K clients.
What leaves a client: its model, P_k and Q_k.

Differs: `rule: code` is the released rule, G_k / max|G| with a step of d_t / 3 for its three clients, which
we read as 1/K; the paper has no 1/K, subtracts the mean gap and divides by the largest rest (`rule: paper`),
which we clip at 0 too.
Differs: Q_k of the new model comes with the next round's reply. The weights are those of a second exchange.
Differs: the metric is the loss; the released code prefers accuracy (here `metric: dice`, sign turned).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from wardround.aggregation.weights import (
    add_newcomers,
    by_class,
    collect,
    normalise,
    recall_weights,
    redistribute,
)
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.messages import Message, Reply, ServerState
from wardround.methods.adaptive_weights import adapt, differences
from wardround.methods.base import Method
from wardround.params import Params


@dataclass(frozen=True)
class FedGA(Method):
    """Moves weights towards clients that the global model serves worse than their own.

    rule: of the released code, or of the paper; d: the first step, 0 keeps the first weights; metric: what
    the gap is measured in; init: first weights, uniform or by training cases (with d 0, that is FedAvg).
    """

    title = "FedGA"
    paper = "Zhang et al., CVPR"
    year = 2023
    link = "https://github.com/MediaBrain-SJTU/FedDG-GA"
    sends = "two validation scores (P, Q)"
    needs = frozenset({"validation", "full"})
    up = frozenset({"P", "Q"})

    rule: Literal["code", "paper"] = "code"
    d: Annotated[float, Field(ge=0, le=1)] = 0.2
    metric: Literal["loss", "dice"] = "loss"
    init: Literal["uniform", "samples"] = "uniform"

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        p, q = collect(replies, "P"), collect(replies, "Q")
        # Q is of the model these clients received, the remembered P of the replies it was made of
        gaps, step = differences(q, state.memory.get("P", {})), self.step(state.round - 1, clients.rounds)
        known = add_newcomers(state.memory.get("weights", {}), self.first_weights(clients))
        a = self.adjust(known, gaps, step)
        state = replace(state, memory={"weights": a, "P": p})
        weights = self.weigh(state, replies)
        notes = self.notes(replies, weights, P=p, Q=q, gap=gaps, step=step if gaps else 0.0)
        return state.next(params=self.average(state, replies, weights), notes=notes)

    def first_weights(self, clients: Clients) -> dict[str, float]:
        sizes = clients.sizes if self.init == "samples" else dict.fromkeys(clients.sizes, 1)
        return dict(zip(sizes, normalise(list(sizes.values())), strict=True))

    def step(self, round: int, rounds: int) -> float:
        """d_t = (1 - t/R) d."""
        return (1 - round / rounds) * self.d

    def adjust(self, a: Mapping[str, float], gaps: Mapping[str, float], step: float) -> dict[str, float]:
        """The weights after one step; clients without a gap keep theirs."""
        sign = 1 if self.metric == "loss" else -1
        signed = {name: sign * gap for name, gap in gaps.items()}
        return adapt(a, signed, step / len(a)) if self.rule == "code" else adapt_centred(a, signed, step)

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return by_class(recall_weights(state.memory["weights"], replies), replies)

    # Client

    def train(self, client: Client, message: Message) -> Message:
        if not self.d:
            return super().train(client, message)
        q = self.score(client, message.params) if client.round > 0 else None
        params = client.fit(start=message.params).params
        found = {"P": self.score(client, params), "Q": q}
        scalars = {name: x for name, x in found.items() if x is not None and math.isfinite(x)}
        return Message(params=params, scalars=scalars)

    def score(self, client: Client, params: Params) -> float | None:
        """The metric's mean over validation cases; over training cases where there are none."""
        return client.evaluate(params) if self.metric == "loss" else client.dice(params)

    # Both

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if not isinstance(config.participation, float) or config.participation == 1:
            return []
        return ["FedGA: only clients drawn in two rounds in a row move their weight. Prefer participation 1."]


def adapt_centred(a: Mapping[str, float], gaps: Mapping[str, float], step: float) -> dict[str, float]:
    """The paper's rule: a_k + (G_k - Ḡ) d_t / max_j(G_j - Ḡ), clipped at 0 and normalised."""
    mean = math.fsum(gaps.values()) / len(gaps) if gaps else 0.0
    largest = max((gap - mean for gap in gaps.values()), default=0.0)
    if largest <= 0 or not step:
        return dict(a)  # all gaps alike
    return redistribute(a, {name: max(0.0, a[name] + (gaps[name] - mean) * step / largest) for name in gaps})
