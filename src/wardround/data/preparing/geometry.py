"""Geometry: from a scan's own grid to the prepared one, and exactly back.

Four steps, each skipped where the settings do not ask for it:

    reorient     swap and flip axes to the wanted orientation; an oblique scan to the closest one
    crop         to the box around the body
    resample     linearly between voxel centres; the box keeps its extent, so spacing is extent / voxels
    pad or crop  around the centre to the wanted size

Classes are resampled one by one, linearly, and the most likely one wins; a tie goes to the higher number, so
that small lesions stay. Ties are frequent where an axis is halved, and there labels grow: a ball of radius
6, 10 or 20 voxels by about 12, 8 and 4 % when one axis of three is halved, by 2 to 6 % when all are. Taking
the nearest voxel keeps volumes within about 1 %, but loses thin and small structures. Without resampling
nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from wardround.errors import DataError
from wardround.text import format_size

Array = NDArray[Any]
Box = tuple[tuple[int, int], ...]
Reorientation = tuple[tuple[int, ...], tuple[bool, ...]]  # order of the axes, and which are reversed


@dataclass(frozen=True)
class Geometry:
    """How one case gets to the prepared grid.

    shape: of the file's grid, with the axis `thin` that reading dropped; affine, spacing: of that grid;
    order, flips: axis i of the reoriented grid is axis order[i], reversed where flips[i]; box: first and
    last (excluded) voxel of the crop, on the reoriented grid; resampled: voxels of the box after resampling;
    size: voxels of the prepared grid, around the same centre.
    """

    shape: tuple[int, ...]
    thin: int | None
    affine: tuple[tuple[float, ...], ...] | None
    spacing: tuple[float, ...]
    order: tuple[int, ...]
    flips: tuple[bool, ...]
    box: Box
    resampled: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Geometry:
        try:
            return cls(**{key: _to_tuples(plain[key]) for key in cls.__dataclass_fields__})
        except KeyError as error:
            raise DataError(f"The geometry of a case lacks {error}; prepare the case again.") from None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain: dict[str, Any] = _to_lists(asdict(self))
        return plain

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the prepared grid starts on the resampled one; negative where it is padded."""
        return tuple((now - size) // 2 for now, size in zip(self.resampled, self.size, strict=True))

    @property
    def prepared_spacing(self) -> tuple[float, ...]:
        return tuple(
            self.spacing[axis] * (stop - start) / voxels
            for axis, (start, stop), voxels in zip(self.order, self.box, self.resampled, strict=True)
        )

    # Forwards

    def reorient(self, data: Array) -> Array:
        """(C, *file) -> (C, *reoriented), a view."""
        return reorient(data, self.order, self.flips)

    def crop(self, data: Array) -> Array:
        """(C, *file) -> (C, *box), a copy."""
        # NumPy calls an axis of one voxel contiguous even when it runs backwards, torch does not
        return self.reorient(data)[_index(self.box)].copy(order="C")

    def pad_or_crop(self, data: Tensor, fill: Tensor) -> Tensor:
        """(C, *resampled) -> (C, *size); fill: (C,), the value of padded voxels."""
        return pad_or_crop(data, self.offset, self.size, fill)

    @property
    def window(self) -> Box:
        """The voxels of the box, on the reoriented grid, whose centres lie inside the prepared grid."""
        sides = []
        axes = zip(self.box, self.offset, self.resampled, self.size, strict=True)
        for (start, stop), first, voxels, size in axes:
            scale = (stop - start) / voxels
            low, high = (round(max(0, min(voxels, edge)) * scale) for edge in (first, first + size))
            sides.append((start + low, start + high))
        return tuple(sides)

    @property
    def cuts(self) -> bool:
        """Whether the wanted size crops anything."""
        return any(size < now for size, now in zip(self.size, self.resampled, strict=True))

    def share_cut(self, mask: Array) -> float:
        """The share of a mask's foreground (1, *file) that the wanted size crops, 0 if it is empty."""
        if not self.cuts:
            return 0.0
        mask = self.reorient(mask)
        total = np.count_nonzero(mask)
        return 1 - np.count_nonzero(mask[_index(self.window)]) / total if total else 0.0

    # And back

    def undo_pad_or_crop(self, data: Tensor, fill: Tensor) -> Tensor:
        """(C, *size) -> (C, *resampled)."""
        return pad_or_crop(data, [-first for first in self.offset], self.resampled, fill)

    def uncrop(self, data: Array, fill: Array) -> Array:
        """(C, *box) -> (C, *shape of the file)."""
        flat = [side for axis, side in enumerate(self.shape) if axis != self.thin]
        shape = [flat[axis] for axis in self.order]
        whole = np.empty((len(data), *shape), dtype=data.dtype)
        whole[:] = fill.reshape(-1, *[1] * len(shape))
        whole[_index(self.box)] = data
        back = reorient(whole, *invert_reorientation(self.order, self.flips))
        if self.thin is not None:
            back = np.expand_dims(back, self.thin + 1)
        return np.ascontiguousarray(back)


def _index(box: Box) -> tuple[slice, ...]:
    """The box of an array (C, *spatial)."""
    return (slice(None), *(slice(*side) for side in box))


def invert_label(mask: Array | Tensor, geometry: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Classes (*size) on the prepared grid -> (*shape) on the scan's own; background where it was cropped."""
    grid = Geometry.from_dict(geometry)
    values = torch.as_tensor(mask).detach().cpu()
    if tuple(values.shape) != grid.size:
        raise DataError(
            f"A mask is {format_size(values.shape)} but the prepared scan was {format_size(grid.size)}."
        )
    box = [stop - start for start, stop in grid.box]
    back = resample_label(grid.undo_pad_or_crop(values.to(torch.uint8)[None], torch.zeros(1)), box)
    whole: NDArray[np.uint8] = grid.uncrop(back.numpy(), np.zeros(1))[0]
    return whole


def invert_probabilities(probabilities: Array | Tensor, geometry: Mapping[str, Any]) -> NDArray[np.float32]:
    """(C, *size) on the prepared grid -> (C, *shape) on the scan's own, linearly.

    Where the scan was cropped it is background: 1 in channel 0 and 0 in the others; a single channel gets 0.
    """
    grid = Geometry.from_dict(geometry)
    values = torch.as_tensor(probabilities).detach().cpu().float()
    if tuple(values.shape[1:]) != grid.size:
        raise DataError(
            f"A map is {format_size(values.shape[1:])} but the prepared scan was {format_size(grid.size)}."
        )
    background = torch.zeros(len(values))
    background[0] = 1.0 if len(values) > 1 else 0.0
    box = [stop - start for start, stop in grid.box]
    back = resample_image(grid.undo_pad_or_crop(values, background), box)
    return grid.uncrop(back.numpy(), background.numpy())


# Orientation


def find_reorientation(affine: Array | None, axes: int, wanted: str | None) -> Reorientation:
    """Order and flips that bring a scan closest to an orientation such as RAS; 2D images stay as they are."""
    if affine is None or wanted is None or axes != 3:
        return tuple(range(axes)), (False,) * axes
    import nibabel.orientations

    tools: Any = nibabel.orientations  # it has no types here
    has, wants = tools.io_orientation(affine), tools.axcodes2ornt(tuple(wanted.upper()))
    steps = tools.ornt_transform(has, wants)  # axis i goes to steps[i, 0], reversed where -1
    goes = [int(axis) for axis in steps[:, 0]]
    order = tuple(goes.index(axis) for axis in range(3))
    return order, tuple(bool(steps[axis, 1] < 0) for axis in order)


def reorient(data: Array, order: Sequence[int], flips: Sequence[bool]) -> Array:
    """Spatial axes of (C, *spatial) in another order, some reversed: a view."""
    data = data.transpose(0, *(axis + 1 for axis in order))
    return data[(slice(None), *(slice(None, None, -1 if flip else 1) for flip in flips))]


def invert_reorientation(order: Sequence[int], flips: Sequence[bool]) -> Reorientation:
    """The order and flips that undo these."""
    back = tuple(order.index(axis) for axis in range(len(order)))
    return back, tuple(flips[axis] for axis in back)


# Resampling


def resample_image(data: Tensor, size: Sequence[int]) -> Tensor:
    """(C, *spatial) -> (C, *size), linear, smoothed first along axes that shrink."""
    if list(data.shape[1:]) == list(size):
        return data
    if data.ndim == 3:
        return _bilinear(data[None], size[0], size[1])[0]
    channels, depth = data.shape[:2]
    planes = _bilinear(data.reshape(1, channels * depth, *data.shape[2:]), size[1], size[2])
    columns = planes.reshape(1, channels, depth, size[1] * size[2])
    return _bilinear(columns, size[0], size[1] * size[2]).reshape(channels, *size)


def _bilinear(data: Tensor, rows: int, columns: int) -> Tensor:
    if tuple(data.shape[2:]) == (rows, columns):
        return data
    return F.interpolate(data, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True)


def resample_label(mask: Tensor, size: Sequence[int]) -> Tensor:
    """(1, *spatial) classes -> (1, *size): the class most likely after resampling each linearly."""
    if list(mask.shape[1:]) == list(size):
        return mask
    mode = "bilinear" if mask.ndim == 3 else "trilinear"
    best = torch.zeros((1, *size))
    result = torch.zeros((1, *size), dtype=torch.uint8)
    for value in torch.unique(mask).tolist():  # ascending: the higher one wins a tie
        share = F.interpolate((mask == value).float()[None], size=tuple(size), mode=mode)[0]
        wins = (share >= best) & (share > 0)
        result[wins] = value
        torch.maximum(best, share, out=best)
    return result


def pad_or_crop(data: Tensor, offset: Sequence[int], size: Sequence[int], fill: Tensor) -> Tensor:
    """The window of (C, *spatial) that starts at offset, filled where it reaches outside."""
    if not any(offset) and list(data.shape[1:]) == list(size):
        return data
    result = torch.empty((len(data), *size), dtype=data.dtype)
    result[:] = fill.to(data.dtype).reshape(-1, *[1] * len(size))
    source, target = [slice(None)], [slice(None)]
    for first, voxels, has in zip(offset, size, data.shape[1:], strict=True):
        start, stop = max(first, 0), max(min(first + voxels, has), max(first, 0))
        source.append(slice(start, stop))
        target.append(slice(start - first, stop - first))
    result[tuple(target)] = data[tuple(source)]
    return result


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _to_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_lists(item) for key, item in value.items()}
    return [_to_lists(item) for item in value] if isinstance(value, list | tuple) else value
