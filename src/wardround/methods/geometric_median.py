"""RFA: Robust Aggregation for Federated Learning, by the geometric median.

Pillutla, Kakade and Harchaoui, IEEE Transactions on Signal Processing 2022. https://arxiv.org/abs/1912.13445

The server takes the point whose distances to the client models, not their squares, add up to the least;
fewer than half of the clients (by weight) cannot carry it away. It is found by weighted means, again and
again, in which a model counts the less the farther it is from the last mean (smoothed Weiszfeld).

Symbols: w_k client models, α_k their first weights, v the median so far, ν least distance that counts,
β_k = α_k / max(ν, ‖v - w_k‖), v ← Σ β_k w_k / Σ β_k.
What leaves a client: its model.
What the server needs: all models at once, a piece of each in memory at a time.

Differs: v is always a weighted mean of the models, so its distances follow from the inner products of the
clients' changes: all iterations cost one pass over the models. The paper stops after 3 (each costs an
exchange under secure summation), which is too few for an update that was blown up; we make 100.
Differs: α_k are all alike unless asked for; by cases, whoever claims most of them carries the median away.
Differs: distances are over the tensors that learn; running statistics are averaged with the final weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from wardround.aggregation.robust import inner_products, weiszfeld
from wardround.aggregation.weights import by_samples, uniform
from wardround.messages import Reply, ServerState
from wardround.methods.base import Method


@dataclass(frozen=True)
class GeometricMedian(Method):
    """Averages with weights that fall with the distance from the others.

    weighting: first weights, all alike or by number of training cases (the paper). iterations: of
    Weiszfeld's rule, 0 gives FedAvg with equal weights. nu: ν, distances below it count as this long.
    """

    title = "Geometric median (RFA)"
    paper = "Pillutla et al., IEEE TSP"
    year = 2022
    link = "https://arxiv.org/abs/1912.13445"
    kind = "robust"
    secure_sum = False
    needs_each_model = "it compares every client's own model with the others"

    weighting: Literal["samples", "uniform"] = "uniform"
    iterations: Annotated[int, Field(ge=0, le=10_000)] = 100
    nu: Annotated[float, Field(gt=0)] = 1e-6

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        alpha = by_samples(replies) if self.weighting == "samples" else uniform(replies)
        if not self.iterations or len(replies) == 1:
            return alpha
        return weiszfeld(inner_products(state, replies), alpha, self.iterations, self.nu)
