"""Robust means: for models a few of which may be arbitrarily bad.

Coordinate by coordinate (trimmed mean, median), by distances between models (Krum), or by the point whose
distances to all add up to the least (geometric median). Numbers of cases play no part unless said.

These rules need all models at once, so secure summation cannot serve them. They work on pieces: of K models,
K pieces are in memory, however large the models are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from wardround.aggregation.mean import Piece, collect_params, map_pieces, maximum, mean, split_pieces
from wardround.aggregation.weights import normalise
from wardround.messages import Reply, ServerState
from wardround.params import Params

LONG = 2**18
"""Numbers of a model at a time where products of all pairs are formed: 2 MiB of each as float64."""


def median_cut(count: int) -> int:
    """The cut that leaves one value of an odd number and two of an even one."""
    return (count - 1) // 2


def trimmed_mean(items: Sequence[Params], cut: int) -> tuple[Params, list[float]]:
    """Each coordinate's mean without its `cut` smallest and largest values; each item's share in it all.

    >>> items = [Params({"w": torch.tensor([value, -value])}) for value in (1.0, 2.0, 9.0)]
    >>> trimmed_mean(items, 1)[0]["w"]
    tensor([ 2., -2.])
    """
    if not cut:
        return mean(items), [1 / len(items)] * len(items)
    first, inner = items[0], slice(cut, len(items) - cut)
    taken = torch.zeros(len(items), dtype=torch.int64)
    result: dict[str, Tensor] = {}
    for name in first:
        shape, dtype = first.spec(name)
        if not dtype.is_floating_point:
            result[name] = maximum(items, name)
            continue
        result[name] = torch.empty(shape, dtype=dtype, device=first.device(name))
        for piece in split_pieces(first, [name]):
            place = piece.within(result[name])
            ranked = torch.stack([piece.of(item).to(place.device) for item in items]).sort(dim=0, stable=True)
            place.copy_(ranked.values[inner].double().mean(dim=0))
            taken += torch.bincount(ranked.indices[inner].flatten(), minlength=len(items)).cpu()
    return Params(result), normalise([float(count) for count in taken])


# Distances


def squared_distances(items: Sequence[Params], names: Collection[str]) -> Tensor:
    """‖θ_i - θ_j‖² over these tensors, (K, K) in float64."""

    def between(piece: Piece) -> Tensor:
        rows = [piece.of(item).double().cpu() for item in items]
        found = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for i, row in enumerate(rows):
            for j in range(i):
                found[i, j] = (row - rows[j]).square_().sum()
        return found

    total = torch.zeros(len(items), len(items), dtype=torch.float64)
    chosen = [name for name in items[0] if name in names]
    for found in map_pieces(between, split_pieces(items[0], chosen)):
        total += found
    return total + total.T


def krum_scores(distances: Tensor, f: int) -> list[float]:
    """s_i, the sum of the K - f - 2 smallest distances to others."""
    num_neighbours = len(distances) - f - 2
    to_others = distances + torch.diag(torch.full((len(distances),), torch.inf, dtype=distances.dtype))
    nearest = to_others.sort(dim=1).values[:, :num_neighbours]
    return [float(score) for score in nearest.sum(dim=1)]


def find_lowest(scores: Sequence[float], count: int) -> list[int]:
    """Positions of the `count` lowest scores, in order of position; the first wins a tie."""
    return sorted(sorted(range(len(scores)), key=lambda k: scores[k])[:count])


def inner_products(state: ServerState, replies: Sequence[Reply]) -> Tensor:
    """⟨Δ_i, Δ_j⟩ of the clients' changes, (K, K) in float64.

    Changes, because around the model they started from honest clients are small numbers, whose distances
    do not drown in the rounding of a huge one.
    """
    sent = collect_params(replies)
    total = torch.zeros(len(sent), len(sent), dtype=torch.float64)
    for piece in split_pieces(sent[0], [name for name in state.trainable if name in sent[0]], LONG):
        start = piece.of(state.params).double().cpu()
        changes = torch.stack([piece.of(item).cpu() - start for item in sent])
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
    return normalise(weights.tolist())


def distances_from(products: Tensor, weights: Tensor) -> Tensor:
    """‖v - w_k‖ for v = Σ c_k w_k: the root of c'Gc - 2 (Gc)_k + G_kk."""
    along = products @ weights
    squares = weights @ along - 2 * along + products.diagonal()
    return squares.clamp_min(0).sqrt()
