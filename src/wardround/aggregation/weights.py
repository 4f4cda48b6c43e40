"""Aggregation weights: one number a client, non-negative, summing to one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wardround.messages import Reply


def normalised(values: Sequence[float]) -> list[float]:
    """Values divided by their sum; uniform when the sum is zero.

    >>> normalised([1, 3])
    [0.25, 0.75]
    """
    if any(value < 0 or not math.isfinite(value) for value in values):
        raise ValueError(f"weights must be finite and not negative: {list(values)}")
    total = math.fsum(values)
    if total <= 0:
        return [1.0 / len(values)] * len(values)
    return [value / total for value in values]


def by_samples(replies: Sequence[Reply]) -> list[float]:
    """n_k / sum n."""
    return normalised([reply.num_examples for reply in replies])


def uniform(replies: Sequence[Reply]) -> list[float]:
    return [1.0 / len(replies)] * len(replies)


def named(replies: Sequence[Reply], weights: Sequence[float]) -> dict[str, float]:
    """Weights by client name, for memory and records."""
    return {reply.client: float(weight) for reply, weight in zip(replies, weights, strict=True)}


def for_present(known: Mapping[str, float], replies: Sequence[Reply]) -> list[float]:
    """Remembered weights of the clients that answered, renormalised over them."""
    return normalised([known[reply.client] for reply in replies])
