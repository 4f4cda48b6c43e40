"""Tensors that stay at their client: the server learns their weighted sum over all clients, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from wardround.errors import WardroundError
from wardround.params import Params

Factors = Mapping[str, Mapping[str, float]]  # client -> tensor -> what it is multiplied with
Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Withheld(Params):
    """What stands for a client's tensors under secure summation.

    specs: their shapes and types; counters: integer tensors, which travel as they are; weighted_sum: gives
    the sum of all clients' tensors times their factors, in float64, once.
    """

    __slots__ = ("client", "specs", "weighted_sum")

    def __init__(
        self,
        client: str,
        specs: Specs,
        counters: Mapping[str, Tensor],
        weighted_sum: Callable[[Factors], Mapping[str, Tensor]],
    ) -> None:
        super().__init__(counters)
        self.client = client
        self.specs = specs
        self.weighted_sum = weighted_sum

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name] if name in self._tensors else self._refuse(name)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        return self[name].reshape(-1)[start:stop]

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.specs[name]

    def device(self, name: str) -> torch.device:
        return torch.device("cpu")

    def zeros(self) -> Params:
        return Params({name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self.specs.items()})

    def _refuse(self, name: str) -> NoReturn:
        raise WardroundError(
            f"the method reads tensor '{name}' of client '{self.client}', but under privacy.secure_sum the "
            "server sees weighted sums over all clients alone (aggregation.mean). Set secure_sum = False on "
            "the method's card, or privacy.secure_sum to false."
        )
