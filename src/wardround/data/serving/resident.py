"""Resident: where prepared cases are held while a client trains; batches are the same from everywhere.

- device: all cases are on the GPU, and batches are indexed there;
- host: all cases are in memory, and batches are copied to the device;
- disk: cases stay in the memory-mapped cache and are read when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.cases import Batch, Case, JoinedSplit, Split, TensorSplit
from wardround.data.preparing.grid import round_to_multiple
from wardround.errors import ConfigError, DataError
from wardround.machine import free_memory
from wardround.text import format_size

Residence = Literal["auto", "device", "host", "disk"]
Oversampling = Literal["patch", "batch"]
HOST_SHARE = 0.4  # of the free memory one client may take
DEVICE_SHARE = 0.25  # of the GPU's free memory one client may take
LARGEST = {2: 512, 3: 96}  # voxels along a side of a default patch
Box = tuple[int, ...]  # where a patch starts; below 0 where it is larger than the volume


@dataclass(frozen=True)
class StoredCase:
    """One prepared case, wherever its tensors are.

    foreground: some voxels (N, d) of each class present; change: applied to the image on reading.
    """

    case: Case
    foreground: Mapping[int, Tensor]
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.case.image.shape[1:])

    @property
    def image(self) -> Tensor:
        return self.case.image if self.change is None else self.change(self.case.image)

    @property
    def num_bytes(self) -> int:
        """Of image and label in memory, where a label voxel has eight bytes."""
        return self.case.image.numel() * 4 + self.case.label.numel() * 8

    def load_to(self, device: torch.device) -> StoredCase:
        """The case read from disk, changed, and copied to the device."""
        image = self.image.to(device)
        if image.data_ptr() == self.case.image.data_ptr():
            image = image.clone()  # otherwise it would still be mapped from the file
        label = self.case.label.clone().to(device)
        return StoredCase(replace(self.case, image=image, label=label), self.foreground)


class CachedSplit:
    """Whole cases of any shape, each read when it is needed.

    device: where batches go; together: whether cases of one shape may be evaluated several at a time.
    """

    draws = False

    def __init__(
        self,
        cases: Sequence[StoredCase],
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
        check_one_shape(chosen)
        images = torch.stack([case.image for case in chosen])
        labels = torch.stack([case.case.label for case in chosen])
        return Batch(images.to(self.device), labels.to(self.device).long())

    def to(self, device: torch.device) -> CachedSplit:
        """Batches for this device; the cases move there too if allowed and if they fit."""
        return self.with_cases(move_cases(self.cases, device, self.residence), device)

    def with_cases(self, cases: Sequence[StoredCase], device: torch.device) -> CachedSplit:
        return CachedSplit(cases, device, together=self.together, residence=self.residence)


class HostSplit(TensorSplit):
    """A stack that stays in memory when it is too large for the device, and copies batches there."""

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
    def from_cases(cls, cases: Sequence[StoredCase], residence: Residence) -> HostSplit:
        """Stack cases of one shape."""
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


def check_one_shape(cases: Sequence[StoredCase]) -> None:
    """Refuse a batch of cases that differ in shape."""
    for case in cases[1:]:
        if case.shape != cases[0].shape:
            raise DataError(
                f"Cases '{cases[0].name}' ({format_size(cases[0].shape)}) and '{case.name}' "
                f"({format_size(case.shape)}) cannot be in one batch. "
                "Train on patches (data.patch), or bring all to one size (prepare.size)."
            )


def join_splits(splits: Sequence[Split]) -> Split:
    """All cases of several splits; one split again where they are alike."""
    filled = [split for split in splits if len(split)]
    stacks = [split for split in filled if isinstance(split, TensorSplit)]
    if len(stacks) == len(filled) and len({stack.images.shape[1:] for stack in stacks}) <= 1:
        return TensorSplit.join(stacks)
    patches = [split for split in filled if isinstance(split, PatchSplit)]
    if len(patches) == len(filled) and len({split.patch for split in patches}) == 1:
        first = patches[0]  # shares of a batch are over all of its cases
        return first.with_cases([case for split in patches for case in split.cases], first.device)
    return JoinedSplit(filled)


# What fits where


def fits_in_memory(cases: Sequence[StoredCase], residence: Residence) -> bool:
    """Whether all cases of a client are read into memory."""
    if residence == "auto":
        return sum(case.num_bytes for case in cases) <= HOST_SHARE * free_memory()
    return residence in ("device", "host")


def may_move(num_bytes: int, device: torch.device, residence: Residence) -> bool:
    """Whether cases in memory all move to the device."""
    if device.type != "cuda":
        return True
    if residence == "auto":
        return num_bytes <= DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]
    return residence == "device"


def move_cases(cases: list[StoredCase], device: torch.device, residence: Residence) -> list[StoredCase]:
    """The cases on the device if allowed and if they fit, otherwise as they are."""
    total = sum(case.num_bytes for case in cases)
    if device.type != "cuda" or residence == "disk" or not may_move(total, device, residence):
        return cases
    return [case.load_to(device) for case in cases]


# Patches: crops of volumes that are too large, or too different in shape, to be stacked


class PatchSplit(CachedSplit):
    """Cases of any shape; batches with a `draw` are patches, batches without one are whole cases.

    A batch of patches has one of each of its cases, at a random place or around a voxel of a class that is
    present, so that small lesions are seen. foreground: share of the latter; by: each patch by chance, or
    that share of every batch, rounded up, as far as its cases have something labelled.
    """

    draws = True

    def __init__(
        self,
        cases: Sequence[StoredCase],
        patch: Sequence[int],
        foreground: float,
        device: torch.device | None = None,
        *,
        by: Oversampling = "patch",
        residence: Residence = "disk",
    ) -> None:
        # Whole volumes are large: they are evaluated one at a time, even where they have one shape.
        super().__init__(cases, device, together=False, residence=residence)
        self.patch = tuple(patch)
        self.foreground = foreground
        self.by: Oversampling = by
        for case in self.cases:
            if len(case.shape) != len(self.patch):
                raise ConfigError(
                    f"data.patch is {format_size(self.patch)}, but case '{case.name}' is "
                    f"{format_size(case.shape)}; give {len(case.shape)} numbers."
                )

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        if draw is None:
            return super().batch(indices)
        chosen = [self.cases[int(index)] for index in indices]
        # All at once, and as many for every case: what one case draws does not depend on the others.
        chances = torch.rand(len(chosen), 3 + len(self.patch), generator=draw, dtype=torch.float64).tolist()
        shares = [self.foreground] * len(chosen)
        if self.by == "batch":
            shares = assign_foreground(chosen, self.foreground, [numbers[0] for numbers in chances])
        parts = [
            crop_patch(case, choose_start(case, self.patch, share, numbers), self.patch)
            for case, share, numbers in zip(chosen, shares, chances, strict=True)
        ]
        images = torch.stack([image for image, _ in parts])
        labels = torch.stack([label for _, label in parts])
        return Batch(images.to(self.device), labels.to(self.device).long())

    def with_cases(self, cases: Sequence[StoredCase], device: torch.device) -> PatchSplit:
        return PatchSplit(cases, self.patch, self.foreground, device, by=self.by, residence=self.residence)


def assign_foreground(cases: Sequence[StoredCase], share: float, chances: Sequence[float]) -> list[float]:
    """1 for the patches of a batch that lie at foreground, 0 for the others; lower chances come first."""
    able = [place for place, case in enumerate(cases) if any(map(len, case.foreground.values()))]
    able.sort(key=lambda place: chances[place])
    chosen = able[: math.ceil(share * len(cases))]
    return [float(place in chosen) for place in range(len(cases))]


def choose_start(case: StoredCase, patch: Sequence[int], foreground: float, chances: Sequence[float]) -> Box:
    """Where the patch starts, from numbers in [0, 1): at foreground or not, class, voxel, other place."""
    whether, which, voxel, *where = chances
    limits = start_limits(case.shape, patch)
    classes = [value for value, voxels in sorted(case.foreground.items()) if len(voxels)]
    if whether < foreground and classes:
        voxels = case.foreground[classes[int(which * len(classes))]]
        centre = voxels[int(voxel * len(voxels))].tolist()
        wanted = [place - side // 2 for place, side in zip(centre, patch, strict=True)]
    else:
        pairs = zip(where, limits, strict=True)
        wanted = [low + int(chance * (high - low + 1)) for chance, (low, high) in pairs]
    return tuple(min(max(place, low), high) for place, (low, high) in zip(wanted, limits, strict=True))


def start_limits(shape: Sequence[int], patch: Sequence[int]) -> list[tuple[int, int]]:
    """First and last place a patch may start, so that it lies in the volume, or the volume in it."""
    room = [side - length for side, length in zip(shape, patch, strict=True)]
    return [(min(0, left), max(0, left)) for left in room]


def crop_patch(case: StoredCase, start: Box, patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Image (C, *patch) and label (*patch); outside the volume its edge is repeated, and labels are 0.

    Only the pages of the file that the patch covers are read.
    """
    box, margins = [], []
    for begin, length, side in zip(start, patch, case.shape, strict=True):
        box.append(slice(max(begin, 0), min(begin + length, side)))
        margins.append((max(-begin, 0), max(begin + length - side, 0)))
    image, label = case.image[(slice(None), *box)], case.case.label[tuple(box)]
    if any(side for margin in margins for side in margin):
        pad = [side for margin in reversed(margins) for side in margin]  # the last axis first
        image = F.pad(image[None], pad, mode="replicate")[0]
        label = F.pad(label, pad)
    return image, label


def choose_patch(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """A patch for cases of several shapes: their median sides to a multiple of 16, up to LARGEST."""
    sides = torch.tensor([list(shape) for shape in shapes], dtype=torch.float64).median(dim=0).values
    largest = LARGEST[len(sides)]
    return tuple(min(largest, round_to_multiple(side)) for side in sides.tolist())
