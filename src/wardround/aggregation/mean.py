"""Weighted means of Params, accumulated in float64, one tensor at a time.

Only one accumulator is alive, whatever the number of clients: replies that lie on disk are read
tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wardround.params import Params


def mean(items: Sequence[Params], weights: Sequence[float] | None = None) -> Params:
    """The weighted mean; equal weights when none are given. Integers take the maximum.

    >>> a, b = Params({"w": torch.tensor([0.0])}), Params({"w": torch.tensor([4.0])})
    >>> mean([a, b], [0.75, 0.25])["w"]
    tensor([1.])
    """
    shares = checked_weights(items, weights)
    return Params({name: mean_tensor(items, shares, name) for name in items[0]})


def layerwise_mean(items: Sequence[Params], weights: Mapping[str, Sequence[float]]) -> Params:
    """A mean with its own weights for every tensor name."""
    return Params(
        {name: mean_tensor(items, checked_weights(items, weights[name]), name) for name in items[0]}
    )


def mean_tensor(items: Sequence[Params], weights: Sequence[float], name: str) -> Tensor:
    """The weighted mean of one tensor; a client of weight 0 is not even read."""
    first = items[0][name]
    if not first.is_floating_point():
        for item in items[1:]:
            first = torch.maximum(first, item[name].to(first.device))
        return first.clone()
    total = first.double() * weights[0]
    for item, weight in zip(items[1:], weights[1:], strict=True):
        if weight:
            total.add_(item[name].to(total.device), alpha=weight)  # a stored reply is on the host
    return total.to(first.dtype)


def checked_weights(items: Sequence[Params], weights: Sequence[float] | None) -> list[float]:
    if not items:
        raise ValueError("a mean needs at least one item")
    if weights is None:
        return [1.0 / len(items)] * len(items)
    if len(weights) != len(items):
        raise ValueError(f"{len(items)} items but {len(weights)} weights")
    return [float(weight) for weight in weights]
