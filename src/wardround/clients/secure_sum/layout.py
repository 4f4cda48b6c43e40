"""SumLayout: which numbers of a group of tensors are summed, in what order, and how they are rounded.

Both sides make it from what they have in common, so it never travels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wardround.aggregation.withheld import Specs
from wardround.errors import ClientError, ConfigError
from wardround.params import Params
from wardround.privacy import PrivacySettings
from wardround.privacy.secure_sum import FixedPoint, SumRefusal

SUM_TASKS = ("sum_shares", "sum_masked", "sum_confirm", "sum_unmask")
KEY = "sum"  # of the scalars that belong to the protocol
REFUSAL, ACCUSES = "refusal", "accuses"  # of an answer that names another member's fault
MODEL = "params"  # the group whose change is summed; of all others it is the tensors themselves
LEAST_MEMBERS = 3  # of two, each would know the other's from the sum
MAX_SHARE = 0.8  # of one client in a sum: beyond it, the sum is close to what that client sent

# A model's change in 32 bits, to 2^-28 of its tensor's largest number (at least 1): within 4 times that. What
# is not bounded by the model that was sent (running statistics, control variates) in 64 bits, within 2^30.
NARROW, WIDE = 2.0**-28, 2.0**-32

Array = np.ndarray[Any, np.dtype[Any]]
Shares = Sequence[Mapping[str, Any]]  # {"names": tensors, "factors": client -> factor}


def choose_threshold(num_members: int, min_clients: int = 0) -> int:
    """How many members must stay to the end: more than half, so that no two sums come out of one exchange."""
    return max(LEAST_MEMBERS, num_members // 2 + 1, min_clients)


def check_members(num_clients: int) -> None:
    """Refuse a run of too few clients."""
    if num_clients < LEAST_MEMBERS:
        raise ConfigError(
            f"privacy.secure_sum needs at least {LEAST_MEMBERS} clients that train, and there are "
            f"{num_clients}: of two, each knows the other's update from the sum."
        )


class Terms(NamedTuple):
    """What a run asks of noise: all in a sum rely on the others' share, so all are bound to the same."""

    level: str = "none"
    epsilon: float = 0.0
    delta: float = 0.0
    clip: float = 0.0
    rounds: int = 0

    @classmethod
    def of(cls, asked: PrivacySettings, rounds: int) -> Terms:
        return cls(asked.level, asked.epsilon, asked.delta, asked.clip, rounds) if asked.is_on else cls()

    @property
    def are_wide(self) -> bool:
        """Whether numbers need 64 bits, as noise of the client level may be far larger than the model."""
        return self.level == "client"


NO_NOISE = Terms()


@dataclass(frozen=True)
class SumLayout:
    """The numbers of one group in one vector: floating tensors by name, each rounded to its step."""

    specs: Specs
    steps: Mapping[str, float]
    bits: int

    @classmethod
    def of(cls, specs: Specs, base: Params | None, learned: Collection[str]) -> SumLayout:
        """base: what tensors are the change of, None where they are summed as they are."""
        floats = {name: specs[name] for name in sorted(specs) if specs[name][1].is_floating_point}
        if base is None or not set(floats) <= set(learned):
            return cls(floats, dict.fromkeys(floats, WIDE), 64)
        return cls(floats, {name: NARROW * round_up(base[name]) for name in floats}, 32)

    @property
    def length(self) -> int:
        return sum(math.prod(shape) for shape, _ in self.specs.values())

    def error(self, num_members: int) -> float:
        """How far a sum may be from that of the numbers before rounding, at most."""
        return max((self._rounding(name).error(num_members) for name in self.steps), default=0.0)

    def encode(self, give: Callable[[str], Iterable[Tensor]], num_members: int) -> Array:
        """One vector of all tensors, which the others' cannot carry beyond the range of their sum.

        give: a tensor in float64 by its name, flattened and in pieces, which stay in the processor's cache.
        """
        vector = np.empty(self.length, dtype=np.uint32 if self.bits == 32 else np.uint64)
        for name, part in self._parts():
            rounding, start = self._rounding(name), part.start
            most = 2 * rounding.limit / num_members
            try:
                for piece in give(name):
                    values = piece.numpy()
                    largest = max(float(values.max()), -float(values.min()))
                    if largest > most - rounding.step:
                        raise SumRefusal("too large")
                    vector[start : start + len(values)] = rounding.encode(values)
                    start += len(values)
            except SumRefusal:  # which number it is would be one of a single client's update
                raise ClientError(
                    f"secure summation: tensor '{name}': its weighted change is not finite, or more than the "
                    f"{most:.3g} that a sum has room for."
                ) from None
        return vector

    def decode(self, vector: Array) -> dict[str, Tensor]:
        """The tensors of a sum, in float64."""
        return {
            name: torch.from_numpy(self._rounding(name).decode(vector[part])).reshape(self.specs[name][0])
            for name, part in self._parts()
        }

    def _rounding(self, name: str) -> FixedPoint:
        return FixedPoint(self.steps[name], self.bits)

    def _parts(self) -> Iterator[tuple[str, slice]]:
        start = 0
        for name, (shape, _) in self.specs.items():
            stop = start + math.prod(shape)
            yield name, slice(start, stop)
            start = stop

    def bind(self, members: Sequence[str], shares: Shares) -> bytes:
        """What all members must have been told alike, or their masks do not cancel."""
        rounding = {name: [list(shape), self.steps[name]] for name, (shape, _) in self.specs.items()}
        told = [self.bits, rounding, sorted(members), list(shares)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()


def round_up(tensor: Tensor) -> float:
    """The power of two from 1 on that no number of the tensor exceeds."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return 2.0 ** max(0, math.ceil(math.log2(largest))) if largest > 1 else 1.0


def make_context(session: str, threshold: int, round: int, task: str, label: str, terms: Terms) -> bytes:
    """What tells one sum from every other."""
    return json.dumps(["wardround-sum-1", session, threshold, round, task, label, terms]).encode()
