"""Mirroring: images turned over along some of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from wardround.data.cases import Batch, to_device
from wardround.errors import ConfigError


def find_mirror_axes(axes: Sequence[int] | None, dimensions: int) -> tuple[int, ...]:
    """The axes to mirror along, None for all; those that images do not have are refused."""
    if axes is None:
        return tuple(range(dimensions))
    if any(axis >= dimensions for axis in axes):
        raise ConfigError(
            f"augmentation.mirror_axes is {list(axes)}, but the images are {dimensions}D; their axes are "
            f"{', '.join(map(str, range(dimensions)))}."
        )
    return tuple(axes)


def describe_mirror_axes(axes: Sequence[int] | None) -> str:
    """For sentences.

    >>> describe_mirror_axes((0, 2)), describe_mirror_axes((1,)), describe_mirror_axes(None)
    (' along axes 0 and 2', ' along axis 1', '')
    """
    if axes is None:
        return ""
    return f" along {'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(str, axes))}"


def mirror(batch: Batch, chosen: Tensor, axes: Sequence[int]) -> Batch:
    """Mirror each case along some of the axes; chosen: (B, axes) booleans on the CPU, so that only those are
    touched."""
    image, label = batch.image.clone(), batch.label.clone()
    for axis, cases in zip(axes, chosen.unbind(dim=1), strict=True):
        which = to_device(cases.nonzero()[:, 0], image.device)
        image.index_copy_(0, which, image[which].flip(axis + 2))
        label.index_copy_(0, which, label[which].flip(axis + 1))
    return replace(batch, image=image, label=label)
