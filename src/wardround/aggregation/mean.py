"""Weighted means of Params, accumulated in float64 piece by piece, and the updates of clients.

A rule that compares models element by element needs the same piece of each, never whole models: however many
there are, in memory or on disk, a mean needs no more memory than its result. A piece fits a core's cache, and
of a stored reply no more than the piece is read. Pieces are spread over as many threads as torch may use, and
results are joined in order: the bytes do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from wardround.aggregation.withheld import Withheld
from wardround.messages import Reply, ServerState
from wardround.params import Params

PIECE = 2**15
"""Elements at a time: 256 KiB as float64, few enough that torch starts no threads of its own."""

WORTH_THREADS = 2**20
"""Elements from which on threads save more time than they cost."""

T = TypeVar("T")


# Models in pieces


@dataclass(frozen=True)
class Piece:
    """The elements from `start` to `stop` of the flattened tensor; on_host: not on a GPU."""

    name: str
    start: int
    stop: int
    on_host: bool = True

    def of(self, params: Params) -> Tensor:
        return params.part(self.name, self.start, self.stop)

    def within(self, tensor: Tensor) -> Tensor:
        """This piece of a contiguous tensor, as a view."""
        return tensor.view(-1)[self.start : self.stop]


def split_pieces(params: Params, names: Iterable[str], length: int | None = None) -> list[Piece]:
    """Pieces that cover these tensors; on a GPU, where small pieces cost more, each tensor whole."""
    found = []
    for name in names:
        count = prod(params.spec(name)[0])
        on_host = params.device(name).type == "cpu"
        step = (length or PIECE) if on_host else max(count, 1)
        found += [Piece(name, start, min(start + step, count), on_host) for start in range(0, count, step)]
    return found


def map_pieces(function: Callable[[Piece], T], found: list[Piece]) -> list[T]:
    """The function's results for all pieces, in order."""
    threads = torch.get_num_threads()
    numbers = sum(piece.stop - piece.start for piece in found if piece.on_host)
    if threads == 1 or numbers < WORTH_THREADS:
        return [function(piece) for piece in found]
    with ThreadPoolExecutor(threads, thread_name_prefix="pieces") as pool:
        return list(pool.map(function, found))


def mean(items: Sequence[Params], weights: Sequence[float] | None = None) -> Params:
    """The weighted mean; equal weights when none are given. Integers take the maximum.

    >>> a, b = Params({"w": torch.tensor([0.0])}), Params({"w": torch.tensor([4.0])})
    >>> mean([a, b], [0.75, 0.25])["w"]
    tensor([1.])
    """
    shares = validate_weights(items, weights)
    return layerwise_mean(items, dict.fromkeys(items[0], shares))


def layerwise_mean(items: Sequence[Params], weights: Mapping[str, Sequence[float]]) -> Params:
    """A mean with its own weights for every tensor name; of withheld tensors it is their secure sum."""
    if any(isinstance(item, Withheld) for item in items):
        return mean_of_withheld(items, weights)
    first = items[0]
    result: dict[str, Tensor] = {}
    shares: dict[str, list[float]] = {}
    on_gpu: dict[tuple[object, ...], list[str]] = {}  # tensors of one device, type and weights
    for name in first:
        shape, dtype = first.spec(name)
        device = first.device(name)
        if not dtype.is_floating_point:
            result[name] = maximum(items, name)
            continue
        result[name] = torch.empty(shape if device.type == "cpu" else 0, dtype=dtype, device=device)
        own = validate_weights(items, weights[name])
        if device.type == "cpu":
            shares[name] = own
        else:
            on_gpu.setdefault((device, dtype, *own), []).append(name)
    for names in on_gpu.values():
        result |= mean_at_once(items, names, validate_weights(items, weights[names[0]]))

    def fill(piece: Piece) -> None:
        piece.within(result[piece.name]).copy_(mean_of_piece(items, shares[piece.name], piece))

    map_pieces(fill, split_pieces(first, shares))
    return Params(result)


def mean_of_withheld(items: Sequence[Params], weights: Mapping[str, Sequence[float]]) -> Params:
    """The same where clients keep their tensors: one sum over all of them, and in the clear what is known."""
    held = {k: item for k, item in enumerate(items) if isinstance(item, Withheld)}
    first = next(iter(held.values()))
    floats = [name for name in first if first.spec(name)[1].is_floating_point]
    factors = {item.client: {name: float(weights[name][k]) for name in floats} for k, item in held.items()}
    total = first.weighted_sum(factors)
    result: dict[str, Tensor] = {}
    for name in first:
        if name not in total:
            result[name] = maximum(items, name)
            continue
        known = [item[name].double() * weights[name][k] for k, item in enumerate(items) if k not in held]
        result[name] = sum(known, start=total[name]).to(first.spec(name)[1])
    return Params(result)


def mean_at_once(
    items: Sequence[Params], names: Sequence[str], weights: Sequence[float]
) -> dict[str, Tensor]:
    """The mean of tensors of one type joined into one: on a GPU a few launches, not some for each tensor."""
    first, (start, *others) = items[0], leave_out_zeros(items, weights)
    total = join(start[0], names).double() * start[1]
    for item, weight in others:
        total.add_(join(item, names).to(total.device), alpha=weight)
    shapes = [first.spec(name)[0] for name in names]
    parts = torch.split(total.to(first.spec(names[0])[1]), [prod(shape) for shape in shapes])
    return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}


def join(params: Params, names: Iterable[str]) -> Tensor:
    return torch.cat([params[name].detach().reshape(-1) for name in names])


def mean_of_piece(items: Sequence[Params], weights: Sequence[float], piece: Piece) -> Tensor:
    """The weighted mean of one piece, in float64; a client of weight 0 is not even read."""
    (first, share), *others = leave_out_zeros(items, weights)
    total = piece.of(first).double() * share
    for item, weight in others:
        total.add_(piece.of(item).to(total.device), alpha=weight)  # a stored reply is on the host
    return total


def leave_out_zeros(items: Sequence[Params], weights: Sequence[float]) -> list[tuple[Params, float]]:
    """Items with their weights; those of weight 0 are left out, unless all are."""
    pairs = list(zip(items, weights, strict=True))
    return [pair for pair in pairs if pair[1]] or pairs[:1]


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


# Updates of clients: only tensors that learn count; running statistics and counters are not directions


def collect_params(replies: Sequence[Reply]) -> list[Params]:
    """The params each client returned."""
    return [reply.params for reply in replies]


def move_along(
    state: ServerState, replies: Sequence[Reply], factors: Sequence[float], weights: Sequence[float]
) -> Params:
    """θ + Σ factor_k (θ_k - θ) for what learns, and the weighted mean of everything else.

    Factors that sum to one give the weighted mean with them.
    """
    sent = collect_params(replies)
    rest = 1.0 - sum(factors)
    moved, averaged = [0.0 if abs(rest) < 1e-12 else rest, *factors], [0.0, *weights]
    learned = set(state.trainable)
    shares = {name: moved if name in learned else averaged for name in sent[0]}
    return state.params.updated(layerwise_mean([state.params.only(sent[0]), *sent], shares))


def average_update(state: ServerState, average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Δ = average - θ in float64, for the learned tensors that travelled."""
    return {
        name: average[name].double() - state.params[name].double().to(average[name].device)
        for name in state.trainable
        if name in average
    }
