"""Cases, and the three splits of one client.

A `Case` is one scan with its label. A `Split` returns batches of cases; `TensorSplit` keeps
them stacked in memory, for images of one size. `ClientData` is all that one hospital has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wardround.data.annotation import Annotation
from wardround.errors import DataError

UNLABELLED = -1  # at every voxel of a training case without a label


@dataclass(frozen=True)
class Case:
    """One scan with its label.

    image: (C, *spatial) float32; label: (*spatial) integer class values 0..C-1, or UNLABELLED;
    spacing: millimetres a voxel, in the order of the spatial axes.
    """

    name: str
    image: Tensor
    label: Tensor
    spacing: tuple[float, ...]


@dataclass
class Batch:
    """Some cases together: image (B, C, *spatial), label (B, *spatial)."""

    image: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.image)

    @property
    def labelled(self) -> Tensor:
        """Which cases have a label (B,)."""
        return (self.label >= 0).flatten(1).all(dim=1)

    def part(self, first: int, last: int) -> Batch:
        """Cases `first` to `last`, the last excluded."""
        return Batch(self.image[first:last], self.label[first:last])


def blank_label(image: Tensor) -> Tensor:
    """The label of an image (C, *spatial) without one; it takes no memory."""
    return torch.full((1,), UNLABELLED, dtype=torch.int16).expand(image.shape[1:])


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor to the device, without waiting for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Split(Protocol):
    """What training and evaluation need of a set of cases.

    names: of the cases; one_shape: whether cases stack, else they are judged one at a time;
    draws: whether training batches are sampled (patches of volumes).
    """

    names: list[str]
    one_shape: bool
    draws: bool

    def __len__(self) -> int: ...

    def spacing(self, index: int) -> tuple[float, ...]: ...

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        """Cases by index: whole, or parts of them chosen by `draw`."""
        ...

    def to(self, device: torch.device) -> Split: ...


class TensorSplit:
    """Cases of one shape, stacked in memory or on the device."""

    one_shape = True
    draws = False

    def __init__(
        self, names: Sequence[str], images: Tensor, labels: Tensor, spacings: Sequence[tuple[float, ...]]
    ) -> None:
        self.names = list(names)
        self.images = images
        self.labels = labels
        self._spacings = list(spacings)

    @classmethod
    def of(cls, cases: Sequence[Case]) -> TensorSplit:
        """Stack cases; an empty list is an empty split."""
        if not cases:
            return cls([], torch.zeros(0), torch.zeros(0, dtype=torch.long), [])
        return cls(
            [case.name for case in cases],
            torch.stack([case.image for case in cases]),
            torch.stack([case.label.long() for case in cases]),
            [case.spacing for case in cases],
        )

    @classmethod
    def join(cls, splits: Sequence[TensorSplit]) -> TensorSplit:
        """All cases of several splits, in the order given."""
        filled = [split for split in splits if len(split)]
        if not filled:
            return cls.of([])
        return cls(
            [name for split in filled for name in split.names],
            torch.cat([split.images for split in filled]),
            torch.cat([split.labels for split in filled]),
            [spacing for split in filled for spacing in split._spacings],
        )

    def __len__(self) -> int:
        return len(self.names)

    def spacing(self, index: int) -> tuple[float, ...]:
        return self._spacings[index]

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        index = to_device(torch.as_tensor(indices, dtype=torch.long), self.images.device)
        return Batch(self.images.index_select(0, index), self.labels.index_select(0, index))

    def to(self, device: torch.device) -> TensorSplit:
        return TensorSplit(self.names, self.images.to(device), self.labels.to(device), self._spacings)


class JoinedSplit:
    """Several splits one after the other, whose cases need not have one shape."""

    one_shape = False

    def __init__(self, parts: Sequence[Split]) -> None:
        self.parts = list(parts)
        self.names = [name for part in self.parts for name in part.names]
        self.draws = any(part.draws for part in self.parts)
        self._places = [(part, index) for part in self.parts for index in range(len(part))]

    def __len__(self) -> int:
        return len(self.names)

    def spacing(self, index: int) -> tuple[float, ...]:
        part, place = self._places[index]
        return part.spacing(place)

    def batch(self, indices: Sequence[int] | Tensor, draw: torch.Generator | None = None) -> Batch:
        places = [self._places[int(index)] for index in indices]
        batches = [part.batch([place], draw) for part, place in places]
        return Batch(torch.cat([b.image for b in batches]), torch.cat([b.label for b in batches]))

    def to(self, device: torch.device) -> JoinedSplit:
        return JoinedSplit([part.to(device) for part in self.parts])


def as_stack(split: Split, who: str) -> TensorSplit:
    """The split as one stack of images, for methods that average or transform whole images."""
    if isinstance(split, TensorSplit):
        return split
    raise DataError(f"{who} needs images of one size; set prepare.size.")


@dataclass(frozen=True)
class ClientData:
    """What one hospital has: cases to train on, to choose by, and to report.

    annotation: what its labels tell apart, None for all classes; num_unlabelled: training cases without one;
    lacking: whether cases of the federation, its own or others', may lack channels, which are zeros.
    """

    train: Split
    val: Split
    test: Split
    annotation: Annotation | None = None
    num_unlabelled: int = 0
    lacking: bool = False
