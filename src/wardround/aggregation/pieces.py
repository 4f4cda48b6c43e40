"""Models in pieces: a few elements of one tensor at a time, however many models there are.

A rule that compares models element by element needs the same piece of each, never whole models. A piece
fits a core's cache, and of a stored reply no more than the piece is read. Pieces are spread over as many
threads as torch may use, and results are joined in order: the bytes do not depend on the number of threads.
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
"""Elements at a time: 256 KiB as float64, few enough that torch starts no threads of its own."""

WORTH_THREADS = 2**20
"""Elements from which on threads save more time than they cost."""

T = TypeVar("T")


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
