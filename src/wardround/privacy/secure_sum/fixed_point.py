"""Numbers of tensors as integers modulo 2^bits, whose sum is exact.

A number is rounded to the nearest multiple of `step` (half to even) and kept in two's complement. A sum
modulo 2^bits is then the sum of the rounded numbers, as long as that stays below twice the `limit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wardround.privacy.secure_sum.refusals import SumRefusal

PIECE = 2**16  # numbers at a time: their copies in float64 stay in the processor's cache
UNSIGNED: dict[int, np.dtype[Any]] = {32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
SIGNED: dict[int, np.dtype[Any]] = {32: np.dtype(np.int32), 64: np.dtype(np.int64)}


@dataclass(frozen=True)
class FixedPoint:
    """step: between two numbers; a power of two divides without an error of its own. bits: 32 or 64."""

    step: float
    bits: int = 32

    def __post_init__(self) -> None:
        if self.bits not in UNSIGNED:
            raise SumRefusal(f"numbers of {self.bits} bits cannot be summed; give 32 or 64.")
        if not (np.isfinite(self.step) and self.step > 0 and np.isfinite(self.limit)):
            raise SumRefusal(f"the step of a sum is {self.step}; it must be a finite number above 0.")

    @property
    def limit(self) -> float:
        """Numbers are smaller than this; two of them add without wrapping around."""
        return float(2.0 ** (self.bits - 2) * self.step)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """The numbers as unsigned integers of the same shape; one too large or not finite is refused."""
        if values.dtype not in (np.float32, np.float64):
            raise SumRefusal(f"a secure sum is of float32 or float64 numbers, not of {values.dtype}.")
        flat = values.reshape(-1)
        coded = np.empty(flat.size, SIGNED[self.bits])
        for start in range(0, flat.size, PIECE):
            part = flat[start : start + PIECE].astype(np.float64)
            with np.errstate(over="ignore"):  # infinite then, and refused
                np.rint(np.divide(part, self.step, out=part), out=part)
            if not max(part.max(), -part.min()) < 2.0 ** (self.bits - 2):  # also where it is not a number
                raise self._refuse(flat[start : start + PIECE])
            coded[start : start + part.size] = part
        return coded.view(UNSIGNED[self.bits]).reshape(values.shape)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """A sum as float64 numbers."""
        if total.dtype != UNSIGNED[self.bits]:
            raise SumRefusal(f"a sum is of {UNSIGNED[self.bits]} numbers, not of {total.dtype}.")
        decoded: np.ndarray = total.view(SIGNED[self.bits]) * np.float64(self.step)
        return decoded

    def _refuse(self, values: np.ndarray) -> SumRefusal:
        size = np.abs(values)
        worst = values[np.argmax(np.where(np.isnan(size), np.inf, size))]
        return SumRefusal(
            f"a number to be summed is {worst:g}; its size must stay below {self.limit:g} "
            f"(2^{self.bits - 2} steps of {self.step:g})."
        )

    def error(self, members: int) -> float:
        """How far the sum of so many may be from that of the numbers before they were rounded."""
        return members * self.step / 2
