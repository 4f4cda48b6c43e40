"""Patches: crops of volumes that are too large, or too different in shape, to be stacked.

A training batch has one patch of each of its cases, at a random place or, with probability `foreground`,
around a voxel of a class that is present, so that small lesions are seen. Evaluation takes whole cases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.cases import Batch
from wardround.data.preparing.grid import round_to_multiple
from wardround.data.serving.resident import CachedSplit, Residence, StoredCase
from wardround.errors import ConfigError
from wardround.text import format_size

LARGEST = {2: 512, 3: 96}  # voxels along a side of a default patch
Box = tuple[int, ...]  # where a patch starts; below 0 where it is larger than the volume


class PatchSplit(CachedSplit):
    """Cases of any shape; batches with a `draw` are patches, batches without one are whole cases."""

    draws = True

    def __init__(
        self,
        cases: Sequence[StoredCase],
        patch: Sequence[int],
        foreground: float,
        device: torch.device | None = None,
        *,
        residence: Residence = "disk",
    ) -> None:
        # Whole volumes are large: they are evaluated one at a time, even where they have one shape.
        super().__init__(cases, device, together=False, residence=residence)
        self.patch = tuple(patch)
        self.foreground = foreground
        for case in self.cases:
            if len(case.shape) != len(self.patch):
                raise ConfigError(
                    f"data.patch is {format_size(self.patch)}, but case '{case.name}' is "
                    f"{format_size(case.shape)}; "
                    f"give {len(case.shape)} numbers."
                )

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        if draw is None:
            return super().batch(indices)
        chosen = [self.cases[int(index)] for index in indices]
        # All at once, and as many for every case: what one case draws does not depend on the others.
        chances = torch.rand(len(chosen), 3 + len(self.patch), generator=draw, dtype=torch.float64).tolist()
        parts = [
            crop_patch(case, choose_start(case, self.patch, self.foreground, numbers), self.patch)
            for case, numbers in zip(chosen, chances, strict=True)
        ]
        images = torch.stack([image for image, _ in parts])
        labels = torch.stack([label for _, label in parts])
        return Batch(images.to(self.device), labels.to(self.device).long())

    def with_cases(self, cases: Sequence[StoredCase], device: torch.device) -> PatchSplit:
        return PatchSplit(cases, self.patch, self.foreground, device, residence=self.residence)


def choose_start(case: StoredCase, patch: Sequence[int], foreground: float, chances: Sequence[float]) -> Box:
    """Where the patch starts, from numbers in [0, 1): at foreground or not, class, voxel, other place."""
    whether, which, voxel, *where = chances
    classes = [value for value, voxels in sorted(case.foreground.items()) if len(voxels)]
    if whether < foreground and classes:
        voxels = case.foreground[classes[int(which * len(classes))]]
        centre = voxels[int(voxel * len(voxels))].tolist()
        wanted = [place - side // 2 for place, side in zip(centre, patch, strict=True)]
    else:
        wanted = [
            low + int(chance * (high - low + 1))
            for chance, (low, high) in zip(where, start_limits(case.shape, patch), strict=True)
        ]
    return tuple(
        min(max(place, low), high)
        for place, (low, high) in zip(wanted, start_limits(case.shape, patch), strict=True)
    )


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
