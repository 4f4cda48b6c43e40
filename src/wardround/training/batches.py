"""Which cases make the batches of local training, by random streams with a name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wardround.seeding import generator


def shuffle_indices(count: int, batch_size: int, seed: int, *stream: object) -> Iterator[Tensor]:
    """Batches of indices in random order; the last one may be smaller."""
    order = torch.randperm(count, generator=generator(seed, *stream))
    for start in range(0, count, batch_size):
        yield order[start : start + batch_size]


def draw_full_batches(
    count: int, batch_size: int, steps: int, seed: int, *stream: object
) -> Iterator[tuple[int, Tensor]]:
    """So many full batches of indices, each with the epoch it begins in.

    Every epoch has an order of its own, and a batch goes on with the next one where an order ends; of fewer
    cases than a batch some come twice.
    """
    for first in range(0, steps * batch_size if count else 0, batch_size):
        epochs = range(first // count, (first + batch_size - 1) // count + 1)
        orders = [torch.randperm(count, generator=generator(seed, *stream, epoch)) for epoch in epochs]
        skipped = first - epochs[0] * count
        yield epochs[0], torch.cat(orders)[skipped : skipped + batch_size]
