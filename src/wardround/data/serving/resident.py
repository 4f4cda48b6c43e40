"""Where prepared cases live while a client trains: on the device, in memory, or on disk.

The answer changes speed only: a batch holds the same bytes from all three.

- device: everything is on the GPU, where batches are cut;
- host: everything is in memory, batches are copied to the device;
- disk: cases stay in the memory-mapped cache and are read when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wardround.data.cases import Batch, Case, TensorSplit
from wardround.errors import DataError
from wardround.machine import free_memory
from wardround.text import format_size

Residence = Literal["auto", "device", "host", "disk"]
HOST_SHARE = 0.4  # of the free memory one client may take
DEVICE_SHARE = 0.25  # of the GPU's free memory one client may take


@dataclass(frozen=True)
class Stored:
    """One prepared case, wherever its tensors lie.

    foreground: some voxels (N, d) of each class present; change: what is done to the image on reading.
    """

    case: Case
    foreground: Mapping[int, Tensor]
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.case.label.shape)

    @property
    def image(self) -> Tensor:
        return self.case.image if self.change is None else self.change(self.case.image)

    @property
    def num_bytes(self) -> int:
        """Of image and label in memory, where labels of a stack have eight bytes."""
        return self.case.image.numel() * 4 + self.case.label.numel() * 8

    def kept(self, device: torch.device) -> Stored:
        """The case read whole, changed, and held there."""
        image = self.image.to(device)
        if image.data_ptr() == self.case.image.data_ptr():
            image = image.clone()  # else it would still be the file
        label = self.case.label.clone().to(device)
        return Stored(replace(self.case, image=image, label=label), self.foreground)


class CachedSplit:
    """Whole cases of any shape, each read when it is asked for.

    device: where batches go; together: whether cases of one shape may be judged several at a time.
    """

    draws = False

    def __init__(
        self,
        cases: Sequence[Stored],
        device: torch.device | None = None,
        *,
        together: bool = True,
        residence: Residence = "disk",
    ) -> None:
        self.cases = list(cases)
        self.names = [case.name for case in self.cases]
        self.device = device or torch.device("cpu")
        self.residence: Residence = residence
        self.together = together
        self.one_shape = together and len({(len(c.case.image), *c.shape) for c in self.cases}) <= 1

    def __len__(self) -> int:
        return len(self.cases)

    def spacing(self, index: int) -> tuple[float, ...]:
        return self.cases[index].case.spacing

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        chosen = [self.cases[int(index)] for index in indices]
        refuse_mixture(chosen)
        images = torch.stack([case.image for case in chosen])
        labels = torch.stack([case.case.label for case in chosen])
        return Batch(images.to(self.device), labels.to(self.device).long())

    def to(self, device: torch.device) -> CachedSplit:
        """Batches for this device; the cases move there too if they may and fit."""
        return self.like(moved(self.cases, device, self.residence), device)

    def like(self, cases: Sequence[Stored], device: torch.device) -> CachedSplit:
        return CachedSplit(cases, device, together=self.together, residence=self.residence)


class HostSplit(TensorSplit):
    """A stack that stays in memory when it is too large for the device, and hands batches over."""

    def __init__(
        self,
        names: Sequence[str],
        images: Tensor,
        labels: Tensor,
        spacings: Sequence[tuple[float, ...]],
        residence: Residence = "auto",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(names, images, labels, spacings)
        self.residence: Residence = residence
        self.device = device or images.device

    @classmethod
    def stacked(cls, cases: Sequence[Stored], residence: Residence) -> HostSplit:
        """Cases of one shape, read into one stack."""
        return cls(
            [case.name for case in cases],
            torch.stack([case.image for case in cases]),
            torch.stack([case.case.label for case in cases]).long(),
            [case.case.spacing for case in cases],
            residence,
        )

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        batch = super().batch(indices)
        return Batch(batch.image.to(self.device), batch.label.to(self.device))

    def to(self, device: torch.device) -> TensorSplit:
        num_bytes = self.images.nbytes + self.labels.nbytes
        if may_move(num_bytes, device, self.residence):
            return super().to(device)
        return HostSplit(self.names, self.images, self.labels, self._spacings, self.residence, device)


def refuse_mixture(cases: Sequence[Stored]) -> None:
    for case in cases[1:]:
        if case.shape != cases[0].shape:
            raise DataError(
                f"Cases '{cases[0].name}' ({format_size(cases[0].shape)}) and '{case.name}' "
                f"({format_size(case.shape)}) cannot "
                "be in one batch. Train on patches (data.patch), or bring all to one size (prepare.size)."
            )


# What fits where


def stays_in_memory(cases: Sequence[Stored], residence: Residence) -> bool:
    """Whether a client's cases are read into memory at once."""
    if residence == "auto":
        return sum(case.num_bytes for case in cases) <= HOST_SHARE * free_memory()
    return residence in ("device", "host")


def may_move(num_bytes: int, device: torch.device, residence: Residence) -> bool:
    """Whether cases in memory go to the device as a whole."""
    if device.type != "cuda":
        return True
    if residence == "auto":
        return num_bytes <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
    return residence == "device"


def moved(cases: Sequence[Stored], device: torch.device, residence: Residence) -> Sequence[Stored]:
    """The cases on the device where they may be and fit, else as they are."""
    total = sum(case.num_bytes for case in cases)
    if device.type != "cuda" or residence == "disk" or not may_move(total, device, residence):
        return cases
    return [case.kept(device) for case in cases]
