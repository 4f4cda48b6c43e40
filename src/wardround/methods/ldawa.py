"""L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual Representation
Learning.

Rehman et al., ICCV 2023. https://arxiv.org/abs/2307.07393

Every tensor of a client's model is scaled by its cosine with the same tensor of the last global model before
the plain mean is taken: a layer that turned away counts less, and disagreement shrinks the layer.

Symbols: θ^l tensor l of the last global model, θ_k^l of client k's; δ_k^l their cosine; K clients present.
What leaves a client: θ_k. (It could scale θ_k itself, since it knows θ.)
What the server needs: one tensor of one client at a time; all models are read twice.

Differs: buffers are averaged, not scaled; the released code scales running statistics too, and a smaller
variance is another network.
Differs: one client alone is taken as it is; the rule would scale it.
Differs: `normalise` divides by Σδ instead of K, so nothing shrinks. It is ours, neither paper's nor code's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from wardround.aggregation.mean import collect_params, layerwise_mean
from wardround.aggregation.weights import map_to_clients, uniform
from wardround.clients import Clients
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.params import Params

LEAST_SUM = 1e-3  # of δ, in shares of K: below it, dividing by Σδ would inflate the layer


@dataclass(frozen=True)
class LDAWA(Method):
    """Averages client models layer by layer, each scaled by its cosine with the last global model.

    normalise: divide by the sum of the cosines instead of the number of clients.
    """

    title = "L-DAWA"
    paper = "Rehman et al., ICCV"
    year = 2023
    link = "https://arxiv.org/abs/2307.07393"
    secure_sum = False
    needs_each_model = "cosines need every client's own model"

    normalise: bool = False

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        items, weights = collect_params(replies), uniform(replies)
        if len(items) == 1:
            params = self.average(state, replies, weights)
            return state.next(params=params, notes=self.notes(replies, weights))
        delta = cosines(state, items)
        sent = layerwise_mean(items, {name: self.factors(delta, name, len(items)) for name in items[0]})
        means = [math.fsum(layers[k] for layers in delta.values()) / len(delta) for k in range(len(items))]
        notes = self.notes(replies, weights, cosine=map_to_clients(replies, means))
        return state.next(params=state.params.updated(sent), notes=notes)

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        """1/K, before the cosines come in; the sample counts play no part."""
        return uniform(replies)

    def factors(self, delta: Mapping[str, Sequence[float]], name: str, num_clients: int) -> list[float]:
        """What each client's tensor is multiplied with: δ_k / K, and 1/K for a buffer."""
        found = delta.get(name, [1.0] * num_clients)
        total = math.fsum(found)
        if not self.normalise:
            return [value / num_clients for value in found]
        if total < LEAST_SUM * num_clients:
            return [1 / num_clients] * num_clients
        return [value / total for value in found]


def cosines(state: ServerState, items: Sequence[Params]) -> dict[str, list[float]]:
    """δ_k^l by tensor and client, for all that learns."""
    names = [name for name in state.trainable if name in items[0]]
    found = {}
    for name in names:
        theta = state.params[name].double()
        found[name] = [cosine(theta, item[name]) for item in items]
    return found


def cosine(a: Tensor, b: Tensor) -> float:
    """The cosine in float64; 1 where a tensor is all zeros, and rounding does not take it above 1."""
    a = a.double().flatten()
    b = b.to(a).flatten()
    lengths = float(a.norm() * b.norm())
    return min(1.0, float(a @ b) / lengths) if lengths > 0 else 1.0
