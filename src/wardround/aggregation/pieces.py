"""Models in pieces: a few numbers of one tensor at a time, whatever the number of models.

A rule that compares models number by number needs the same piece of each, never whole models. A piece fits a
core's cache, and of a stored reply no more than the piece is read. Pieces are dealt to as many threads as
torch may use, and what comes of them is joined in their order: the bytes are the same for any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from wardround.params import Params

PIECE = 2**15
"""Numbers at a time: 256 KiB as float64, and torch works on so few without threads of its own."""

WORTH_THREADS = 2**20
"""Numbers from which on threads save more time than they cost."""

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """The numbers from `start` to `stop` of a tensor, counted row by row; on_host: not on a GPU."""

    name: str
    start: int
    stop: int
    on_host: bool = True

    def of(self, params: Params) -> Tensor:
        return params.part(self.name, self.start, self.stop)

    def within(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor that lies row by row, to be read or written."""
        return tensor.view(-1)[self.start : self.stop]


def pieces(params: Params, names: Iterable[str], length: int | None = None) -> list[Piece]:
    """Pieces that cover these tensors; on a GPU, where small pieces cost more, each tensor whole."""
    found = []
    for name in names:
        count = prod(params.spec(name)[0])
        on_host = params.device(name).type == "cpu"
        step = (length or PIECE) if on_host else max(count, 1)
        found += [Piece(name, start, min(start + step, count), on_host) for start in range(0, count, step)]
    return found


def each(function: Callable[[Piece], T], found: list[Piece]) -> list[T]:
    """What the function gives for every piece, in their order."""
    threads = torch.get_num_threads()
    numbers = sum(piece.stop - piece.start for piece in found if piece.on_host)
    if threads == 1 or numbers < WORTH_THREADS:
        return [function(piece) for piece in found]
    with ThreadPoolExecutor(threads, thread_name_prefix="pieces") as pool:
        return list(pool.map(function, found))
