"""FedCE: Fair Federated Medical Image Segmentation via Client Contribution Estimation.

Jiang et al., CVPR 2023. https://arxiv.org/abs/2303.16520

A client contributes what the others lack. In gradient space that is an update unlike the rest's; in data
space it is an error of the model made without the client on the client's own validation cases.

Symbols: θ global model, θ_k client model, Δ_k = θ_k - θ; w_k aggregation weight; θ_-k the model without
client k, v_k its Dice; g_k gradient score, e_k data score, both over all rounds so far.
What leaves a client: θ_k and e_k.
What the server needs: all models at once, a piece of each in memory at a time.

Differs: the rest's update is weighted by w, as the text has it; the released code keeps it uniform
(`consensus: uniform`).
Differs: weights are normalised after their floor, which the released code leaves out.
Differs: with client sampling, w_k is that of the client's last participation, kept with the model it sent;
the absent keep their weight. Paper and code know full participation only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.robust import inner_products
from wardround.aggregation.weights import (
    add_newcomers,
    by_class,
    collect,
    map_to_clients,
    normalise,
    redistribute,
    renormalise,
)
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.models.norm import running_stats
from wardround.params import Params

LEAST_VARIANCE = 1e-5  # θ_-k extrapolates, and a running variance must stay positive
NEARLY_ALL = 1 - 1e-6  # beyond it nothing is left without the client
NOTHING = 1e-9  # scores that sum to less are rounding errors


@dataclass(frozen=True)
class FedCE(Method):
    """Weighs clients by what the others cannot replace.

    mode: gradient and data score are added (plus) or multiplied (times); consensus: whether the rest's
    update is weighted or uniform; floor: least share at every normalisation, 1 gives uniform weights.
    """

    title = "FedCE"
    paper = "Jiang et al., CVPR"
    year = 2023
    link = "https://arxiv.org/abs/2303.16520"
    sends = "one number (its error without itself)"
    secure_sum = False
    needs_each_model = "cosines need every client's own update"
    needs = frozenset({"validation", "state", "full"})
    up = frozenset({"error"})
    needs_labels = "it weighs clients by their errors, which only labels show"

    mode: Literal["plus", "times"] = "plus"
    consensus: Literal["weighted", "uniform"] = "weighted"
    floor: Annotated[float, Field(ge=0, le=1)] = 1e-3

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        used = state.memory.get("used", {})  # the weight of each client's last model
        each = {name: Message(scalars={"weight": w}) for name, w in used.items() if name in clients.present}
        replies = clients.ask("train", Message(params=state.params), each=each)

        names = [reply.client for reply in replies]
        known = state.memory.get("weights", {})
        everyone = dict.fromkeys([*known, *names])
        known = add_newcomers(known, dict.fromkeys(everyone, 1 / len(everyone)))
        prior = renormalise(known, replies) if self.consensus == "weighted" else [1 / len(names)] * len(names)
        cosines = dict(zip(names, cosines_to_rest(inner_products(state, replies), prior), strict=True))

        history = {name: list(values) for name, values in state.memory.get("cosines", {}).items()}
        for name, cosine in cosines.items():
            history.setdefault(name, []).append(cosine)
        gradient = {name: max(0.0, 1 - fmean(history[name])) for name in names}
        sent = collect(replies, "error", 0, 1)
        data = {name: sent.get(name, 1.0) for name in names}
        weights = by_class(self.combine(gradient, data), replies)

        by_name = map_to_clients(replies, weights)
        absent = {name: w for name, w in used.items() if name not in clients.present}
        memory = {
            "weights": redistribute(known, by_name),
            "cosines": history,
            "used": absent | by_name,  # without the present that did not answer: θ lacks what they trained
        }
        notes = self.notes(replies, weights, cosine=cosines, gradient_score=gradient, data_score=data)
        return state.next(params=self.average(state, replies, weights), memory=memory, notes=notes)

    def combine(self, gradient: Mapping[str, float], data: Mapping[str, float]) -> list[float]:
        """The weights of the clients, in their order, from g_k and e_k."""
        g, e = shares(gradient, self.floor), shares(data, self.floor)
        mixed = {name: g[name] + e[name] if self.mode == "plus" else g[name] * e[name] for name in g}
        return normalise(list(shares(mixed, self.floor).values()))

    # Client

    def train(self, client: Client, message: Message) -> Message:
        scores = list(client.memory.get("scores", []))
        score = self.score_without(client, message.params, message.scalars.get("weight"))
        if score is not None or not scores:
            scores.append(score or 0.0)  # the first participation counts as 0
        params = client.fit(start=message.params).params
        client.memory["scores"], client.memory["sent"] = scores, params
        return Message(params=params, scalars={"error": 1 - fmean(scores)})  # e_k

    def score_without(self, client: Client, received: Params, weight: float | None) -> float | None:
        """v_k, the Dice of θ_-k on the client's validation cases; None if θ does not hold its last model."""
        sent = client.memory.get("sent")
        if sent is None or weight is None:
            return None
        if weight > NEARLY_ALL:
            return 0.0
        params = without_client(received.to(client.device), sent.to(client.device), weight, client.model)
        return client.dice(params)

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if not isinstance(config.participation, float) or config.participation == 1:
            return []
        return [
            "FedCE: the model without a client is exact only if the client took part in the round before. "
            "Prefer participation 1."
        ]


def without_client(received: Params, sent: Params, weight: float, model: nn.Module) -> Params:
    """θ_-k = (θ - w_k θ_k) / (1 - w_k); integers are θ's, and variances stay positive."""
    rest = {}
    for name in received:
        if name in sent and received[name].is_floating_point():
            without = (received[name].double() - weight * sent[name].double()) / (1 - weight)
            rest[name] = without.to(received[name].dtype)
    for _, variance in running_stats(model):
        if variance in rest:
            rest[variance] = rest[variance].clamp_min(LEAST_VARIANCE)
    return received.updated(rest)


def cosines_to_rest(products: Tensor, weights: Sequence[float]) -> list[float]:
    """cos(Δ_k, Σ_{j≠k} w_j Δ_j) of every client; 0 where one of the two does not move."""
    found = []
    for k in range(len(weights)):
        w = torch.tensor([0.0 if j == k else weight for j, weight in enumerate(weights)], dtype=torch.float64)
        lengths = math.sqrt(float(products[k, k]) * max(0.0, float(w @ products @ w)))
        found.append(max(-1.0, min(1.0, float(products[k] @ w) / lengths)) if lengths > 0 else 0.0)
    return found


def shares(scores: Mapping[str, float], floor: float) -> dict[str, float]:
    """Scores over their sum, each at least the floor; uniform where there is nothing to share."""
    total = math.fsum(scores.values())
    if total <= NOTHING:
        return dict.fromkeys(scores, 1 / len(scores))
    return {name: max(score / total, floor) for name, score in scores.items()}
