"""Weighted means of Params, accumulated in float64.

Only one accumulator is alive, the size of one piece of a tensor: however many models there are, in memory
or on disk, a mean needs no more memory than its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wardround.aggregation.pieces import Piece, map_pieces, split_pieces
from wardround.params import Params


def mean(items: Sequence[Params], weights: Sequence[float] | None = None) -> Params:
    """The weighted mean; equal weights when none are given. Integers take the maximum.

    >>> a, b = Params({"w": torch.tensor([0.0])}), Params({"w": torch.tensor([4.0])})
    >>> mean([a, b], [0.75, 0.25])["w"]
    tensor([1.])
    """
    shares = validate_weights(items, weights)
    return layerwise_mean(items, dict.fromkeys(items[0], shares))


def layerwise_mean(items: Sequence[Params], weights: Mapping[str, Sequence[float]]) -> Params:
    """A mean with its own weights for every tensor name."""
    first = items[0]
    result: dict[str, Tensor] = {}
    shares: dict[str, list[float]] = {}
    for name in first:
        shape, dtype = first.spec(name)
        if dtype.is_floating_point:
            result[name] = torch.empty(shape, dtype=dtype, device=first.device(name))
            shares[name] = validate_weights(items, weights[name])
        else:
            result[name] = maximum(items, name)

    def fill(piece: Piece) -> None:
        piece.within(result[piece.name]).copy_(mean_of_piece(items, shares[piece.name], piece))

    map_pieces(fill, split_pieces(first, shares))
    return Params(result)


def mean_of_piece(items: Sequence[Params], weights: Sequence[float], piece: Piece) -> Tensor:
    """The weighted mean of one piece, in float64; a client of weight 0 is not even read."""
    total = piece.of(items[0]).double() * weights[0]
    for item, weight in zip(items[1:], weights[1:], strict=True):
        if weight:
            total.add_(piece.of(item).to(total.device), alpha=weight)  # a stored reply is on the host
    return total


def maximum(items: Sequence[Params], name: str) -> Tensor:
    """The largest of each number: counters ride along."""
    largest = items[0][name]
    for item in items[1:]:
        largest = torch.maximum(largest, item[name].to(largest.device))
    return largest.clone()


def validate_weights(items: Sequence[Params], weights: Sequence[float] | None) -> list[float]:
    if not items:
        raise ValueError("a mean needs at least one item")
    if weights is None:
        return [1.0 / len(items)] * len(items)
    if len(weights) != len(items):
        raise ValueError(f"{len(items)} items but {len(weights)} weights")
    return [float(weight) for weight in weights]
