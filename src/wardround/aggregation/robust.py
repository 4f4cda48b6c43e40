"""Robust means: of models of which a few may be anything.

Coordinate by coordinate (trimmed mean, median), by distances between models (Krum), or by the point whose
distances to all add up to the least (geometric median). Numbers of cases play no part unless said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from wardround.aggregation.mean import mean, mean_tensor
from wardround.aggregation.updates import models
from wardround.aggregation.weights import normalised
from wardround.messages import Reply, ServerState
from wardround.params import Params

CHUNK = 2**20  # coordinates sorted at a time; bounds the memory


def middle(count: int) -> int:
    """The cut that leaves one value of an odd number and two of an even one."""
    return (count - 1) // 2


def trimmed_mean(items: Sequence[Params], cut: int) -> tuple[Params, list[float]]:
    """Each coordinate's mean without its `cut` smallest and largest values; each item's share in it all.

    >>> items = [Params({"w": torch.tensor([value, -value])}) for value in (1.0, 2.0, 9.0)]
    >>> trimmed_mean(items, 1)[0]["w"]
    tensor([ 2., -2.])
    """
    even = [1 / len(items)] * len(items)
    if not cut:
        return mean(items), even
    taken = torch.zeros(len(items), dtype=torch.int64)
    result: dict[str, Tensor] = {}
    for name in items[0]:
        first = items[0][name]
        if not first.is_floating_point():
            result[name] = mean_tensor(items, even, name)  # the maximum
            continue
        rows = [item[name].to(first.device).flatten() for item in items]
        parts = []
        for start in range(0, first.numel(), CHUNK):
            ranked = torch.stack([row[start : start + CHUNK] for row in rows]).sort(dim=0, stable=True)
            inner = slice(cut, len(items) - cut)
            parts.append(ranked.values[inner].double().mean(dim=0).to(first.dtype))
            taken += torch.bincount(ranked.indices[inner].flatten(), minlength=len(items)).cpu()
        result[name] = torch.cat(parts).reshape(first.shape) if parts else first.clone()
    return Params(result), normalised([float(count) for count in taken])


# Distances


def squared_distances(items: Sequence[Params], names: Collection[str]) -> Tensor:
    """‖θ_i - θ_j‖² over these tensors, (K, K) in float64; one tensor of each model is in memory."""
    total = torch.zeros(len(items), len(items), dtype=torch.float64)
    for name in items[0]:
        if name not in names:
            continue
        rows = [item[name].double().flatten().cpu() for item in items]
        for i, row in enumerate(rows):
            for j in range(i):
                total[i, j] += (row - rows[j]).square().sum()
    return total + total.T


def krum_scores(distances: Tensor, f: int) -> list[float]:
    """s_i, the sum of the K - f - 2 smallest distances to others."""
    num_neighbours = len(distances) - f - 2
    to_others = distances + torch.diag(torch.full((len(distances),), torch.inf, dtype=distances.dtype))
    nearest = to_others.sort(dim=1).values[:, :num_neighbours]
    return [float(score) for score in nearest.sum(dim=1)]


def lowest(scores: Sequence[float], count: int) -> list[int]:
    """Positions of the `count` lowest scores, in order of position; the first wins a tie."""
    return sorted(sorted(range(len(scores)), key=lambda k: scores[k])[:count])


def inner_products(state: ServerState, replies: Sequence[Reply]) -> Tensor:
    """⟨Δ_i, Δ_j⟩ of the clients' changes, (K, K) in float64.

    Changes, because around the model they started from honest clients are small numbers, whose distances
    do not drown in the rounding of a huge one.
    """
    sent = models(replies)
    total = torch.zeros(len(sent), len(sent), dtype=torch.float64)
    for name in state.trainable:
        if name in sent[0]:
            start = state.params[name].double().cpu()
            changes = torch.stack([(item[name].cpu() - start).flatten() for item in sent])
            total += changes @ changes.T
    return total


def weiszfeld(products: Tensor, alpha: Sequence[float], iterations: int, nu: float) -> list[float]:
    """Weights of the smoothed geometric median, from inner products of the points; they sum to one."""
    first = torch.tensor(alpha, dtype=torch.float64)
    weights = first
    for _ in range(iterations):
        distances = distances_from(products, weights)
        beta = first / distances.clamp_min(nu)
        weights = beta / beta.sum()
    return normalised(weights.tolist())


def distances_from(products: Tensor, weights: Tensor) -> Tensor:
    """‖v - w_k‖ for v = Σ c_k w_k: the root of c'Gc - 2 (Gc)_k + G_kk."""
    along = products @ weights
    squares = weights @ along - 2 * along + products.diagonal()
    return squares.clamp_min(0).sqrt()
