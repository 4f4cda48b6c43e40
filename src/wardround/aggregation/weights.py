"""Aggregation weights: one number per client, non-negative, summing to one."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from wardround.messages import Reply

ROUNDING = 1e-4  # how far from one the sum of weights in float32 may lie


def normalise(values: Sequence[float]) -> list[float]:
    """Values divided by their sum; uniform when the sum is zero.

    Values that already sum to one, to the last digit, stay as they are.

    >>> normalise([1, 3])
    [0.25, 0.75]
    """
    if any(value < 0 or not math.isfinite(value) for value in values):
        raise ValueError(f"weights must be finite and not negative: {list(values)}")
    total = math.fsum(values)
    if total <= 0:
        return [1.0 / len(values)] * len(values)
    if math.isclose(total, 1.0, rel_tol=4e-16):
        return [float(value) for value in values]
    return [value / total for value in values]


def by_samples(replies: Sequence[Reply]) -> list[float]:
    """n_k / sum n."""
    return normalise([reply.num_examples for reply in replies])


def by_class(weights: Sequence[float], replies: Sequence[Reply]) -> list[float]:
    """Every class has one vote, which those who annotate it share in proportion to their weights.

    For weights that come from losses or uncertainties: those of clients that annotate different classes
    cannot be compared, and a hard organ must not take the weight of an easy one, or the reverse. Where all
    annotate everything, weights stay as they are; a class that nobody with a weight annotates has no vote.
    A client without labels has no vote either and keeps its weight.

    >>> liver, both = Reply(annotates=(True, False)), Reply()
    >>> by_class([0.5, 0.5], [liver, both])  # half of the liver's vote, all of the kidney's
    [0.25, 0.75]
    """
    num_classes = max((len(reply.annotates) for reply in replies), default=0)
    told = [reply.annotates or (True,) * num_classes for reply in replies]
    if all(all(own) or not any(own) for own in told):
        return list(weights)
    votes = [
        [weight if any(own[n : n + 1]) else 0.0 for weight, own in zip(weights, told, strict=True)]
        for n in range(num_classes)
    ]
    shares = [normalise(vote) for vote in votes if any(vote)]
    if not shares:
        return normalise(weights)
    kept = [0.0 if any(own) else weight for weight, own in zip(weights, told, strict=True)]
    room = 1 - math.fsum(kept)
    found = [room * math.fsum(column) / len(shares) for column in zip(*shares, strict=True)]
    return normalise([own + vote for own, vote in zip(kept, found, strict=True)])


def uniform(replies: Sequence[Reply]) -> list[float]:
    return [1.0 / len(replies)] * len(replies)


def weighted_mean(weights: Sequence[float], values: Sequence[float]) -> float:
    """Σ w_k x_k; of equal numbers it is that number, to the last bit."""
    if min(values) == max(values):
        return float(values[0])
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True))


def map_to_clients(replies: Sequence[Reply], weights: Sequence[float]) -> dict[str, float]:
    """Weights by client name, for memory and records."""
    return {reply.client: float(weight) for reply, weight in zip(replies, weights, strict=True)}


def check_weights(weights: Any) -> str | None:
    """Why a round's weights by client are not aggregation weights, or None.

    >>> check_weights({"north": 0.5, "east": 0.25})
    'the weights sum to 0.75, not to one; divide them by their sum'
    """
    if not isinstance(weights, Mapping):
        return f"the weights are a {type(weights).__name__}, not numbers by client; return self.notes(...)"
    for client, weight in weights.items():
        if not is_number(weight):
            return f"the weight of client '{client}' is {weight!r}, not a finite number"
        if weight < 0:
            return f"the weight of client '{client}' is {weight:g}; weights are not negative"
    total = math.fsum(weights.values())
    if weights and abs(total - 1) > ROUNDING:
        return f"the weights sum to {total:g}, not to one; divide them by their sum"
    return None


def collect(
    replies: Sequence[Reply], name: str, least: float = -math.inf, most: float = math.inf
) -> dict[str, float]:
    """A number by client, of the clients that sent a finite one inside the bounds."""
    sent = {reply.client: reply.scalars.get(name) for reply in replies}
    return {
        client: float(value) for client, value in sent.items() if is_number(value) and least <= value <= most
    }


def is_number(value: Any) -> TypeGuard[float]:
    """Whether this is a finite number that fits a float; a bool is not, nor an integer of 400 digits."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and abs(value) <= sys.float_info.max


def renormalise(known: Mapping[str, float], replies: Sequence[Reply]) -> list[float]:
    """Remembered weights of the clients that answered, renormalised over them."""
    return normalise([known[reply.client] for reply in replies])


def recall_weights(known: Mapping[str, float], replies: Sequence[Reply]) -> list[float]:
    """`renormalise`, or by size if all of theirs are 0."""
    if not any(known[reply.client] > 0 for reply in replies):
        return by_samples(replies)
    return renormalise(known, replies)


def softmax(values: Sequence[float]) -> list[float]:
    """Weights from any real numbers, the larger the more.

    >>> softmax([0.0, 0.0])
    [0.5, 0.5]
    """
    largest = max(values)
    return normalise([math.exp(value - largest) for value in values])


def add_newcomers(known: Mapping[str, float], shares: Mapping[str, float]) -> dict[str, float]:
    """Weights of all clients: a newcomer enters with its share, and the others are scaled down.

    shares: of every client, newcomers included, summing to one.

    >>> add_newcomers({"north": 0.5, "east": 0.5}, {"north": 0.4, "east": 0.4, "south": 0.2})
    {'north': 0.4, 'east': 0.4, 'south': 0.2}
    """
    new = {name: share for name, share in shares.items() if name not in known}
    room = 1 - math.fsum(new.values())
    return {**({name: weight * room for name, weight in known.items()} if new else known), **new}


def redistribute(known: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """The hold rule: clients with a new value share, in proportion to it, what the others leave over.

    The others keep their weight exactly. With no value above zero, all do.

    >>> redistribute({"north": 0.5, "east": 0.25, "south": 0.25}, {"north": 1, "east": 3})
    {'north': 0.1875, 'east': 0.5625, 'south': 0.25}
    """
    total = math.fsum(values.values())
    if total <= 0:
        return dict(known)
    held = math.fsum(weight for name, weight in known.items() if name not in values)
    room = max(0.0, 1 - held)
    return {name: room * (values[name] / total) if name in values else known[name] for name in known}
