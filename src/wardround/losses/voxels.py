"""Random voxels for contrastive terms: a fixed number of places, so that nothing waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.models.base import Output, Segmenter, pad

MOST_OF_A_CLASS = 64  # voxels of one class and image
MIXED = -1  # the label of a voxel whose neighbourhood mixes classes


class Voxels(NamedTuple):
    """A fixed number of draws, some of them empty: features (N, D), label (N,), kept (N,)."""

    features: Tensor
    label: Tensor
    kept: Tensor

    def same_class(self) -> Tensor:
        """Which pairs are of one class, (N, N); a voxel is always its own, so that no row is empty."""
        pairs = (self.label[:, None] == self.label) & self.kept[:, None] & self.kept
        return pairs | torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)


def iterate_levels(model: Segmenter, output: Output, label: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels at the bottleneck and at every decoder stage."""
    assert output.bottleneck is not None
    sides = model.padded_size(label.shape[1:])
    padded = pad(label[:, None], sides)[:, 0]  # coarse maps still have the padding
    for features in (output.bottleneck, *output.stages[:-1]):
        yield features, pure_labels(padded, tuple(features.shape[2:]))
    yield output.stages[-1], pure_labels(label, tuple(label.shape[1:]))


def pure_labels(label: Tensor, size: tuple[int, ...]) -> Tensor:
    """The label on a coarser grid, MIXED where a voxel's block and the ring around it mix classes."""
    stride = [full // coarse for full, coarse in zip(label.shape[1:], size, strict=True)]
    pool = F.max_pool3d if len(size) == 3 else F.max_pool2d
    values = label[:, None].float()
    block = [step + 2 for step in stride]
    highest, lowest = pool(values, block, stride, 1), -pool(-values, block, stride, 1)
    return highest.where(highest == lowest, MIXED)[:, 0].long()


def draw_voxels(
    features: Tensor, label: Tensor, num_classes: int, most: int, draw: torch.Generator
) -> Voxels:
    """Random voxels, an equal number of places for every class and image; unfilled places are not kept."""
    batch, classes = len(label), torch.arange(num_classes, device=label.device)
    flat = label.flatten(1).clamp_max(num_classes - 1)
    share = min(MOST_OF_A_CLASS, max(1, most // (batch * num_classes)), flat.shape[1])
    ticket = torch.rand(flat.shape, generator=draw, device=flat.device)
    tickets = ticket[:, None].where(flat[:, None] == classes[:, None], -1.0)  # (B, classes, voxels)
    best, place = tickets.topk(share, dim=2)  # (B, classes, share)
    kept = best >= 0
    foreground = kept[:, 1:].sum()
    rank = best[:, 0].flatten().argsort(descending=True).argsort().view_as(best[:, 0])
    kept = torch.cat([(kept[:, 0] & (rank < foreground))[:, None], kept[:, 1:]], dim=1)
    case = torch.arange(batch, device=flat.device)[:, None, None]
    chosen = features.flatten(2).transpose(1, 2)[case, place]  # (B, classes, share, D)
    labels = classes[:, None].expand_as(best)
    return Voxels(chosen.flatten(0, 2), labels.flatten(), kept.flatten())
