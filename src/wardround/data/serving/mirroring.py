"""Mirroring: images turned over along some of their axes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from wardround.data.cases import Batch, to_device


def mirror(batch: Batch, chosen: Tensor) -> Batch:
    """Mirror each case along its axes; chosen: (B, d) booleans on the CPU, so that only those are touched."""
    image, label = batch.image.clone(), batch.label.clone()
    for axis, cases in enumerate(chosen.unbind(dim=1)):
        which = to_device(cases.nonzero()[:, 0], image.device)
        image.index_copy_(0, which, image[which].flip(axis + 2))
        label.index_copy_(0, which, label[which].flip(axis + 1))
    return replace(batch, image=image, label=label)
