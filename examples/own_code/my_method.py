"""A method of one's own: clients count almost the same, however many cases they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wardround import Method, Reply, ServerState


@dataclass(frozen=True)
class EqualWeights(Method):
    """Averages with equal weights, mixed with a share by cases.

    by_cases: 0 gives equal weights, 1 gives FedAvg.
    """

    title: ClassVar[str] = "Equal weights"

    by_cases: float = 0.0

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        counts = [reply.num_examples for reply in replies]
        equal = (1 - self.by_cases) / len(counts)
        return [equal + self.by_cases * count / sum(counts) for count in counts]
