"""Updates of clients: how far each moved from the model it received.

Only tensors that learn count: running statistics and counters are not directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from wardround.aggregation.mean import mean
from wardround.messages import Reply, ServerState
from wardround.params import Params


def collect_params(replies: Sequence[Reply]) -> list[Params]:
    """The params each client returned."""
    return [reply.params for reply in replies]


def move_along(state: ServerState, replies: Sequence[Reply], factors: Sequence[float]) -> Params:
    """θ + Σ factor_k (θ_k - θ) for all floating tensors; factors that sum to one give the plain mean."""
    received = state.params.only(collect_params(replies)[0])
    rest = 1.0 - sum(factors)
    if abs(rest) < 1e-12:
        return state.params.updated(mean(collect_params(replies), factors))
    return state.params.updated(mean([received, *collect_params(replies)], [rest, *factors]))


def average_update(state: ServerState, average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Δ = average - θ in float64, for the learned tensors that travelled."""
    return {
        name: average[name].double() - state.params[name].double().to(average[name].device)
        for name in state.trainable
        if name in average
    }
