"""Geometry: the way from a scan's own grid to the prepared one, and exactly back.

Four steps, each of which leaves out what the settings do not ask for:

    turn     axes swapped and flipped, so that an oblique scan lies closest to the wanted orientation
    crop     the box around the body
    resample linear between voxel centres; the box keeps its extent, so spacing is extent / voxels
    place    padded or cropped around the middle to the wanted size

Classes are resampled one by one, linearly, and the most likely one wins; where they are level, the higher
number, so that small lesions stay. Levels are frequent where an axis is halved, and there what is drawn
grows: a ball of radius 6, 10 or 20 voxels by about 12, 8 and 4 % when one axis of three is halved, by 2 to
6 % when all are. Taking the nearest voxel keeps volumes within about 1 %, but loses thin and small
structures. Where nothing is resampled nothing changes.
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


@dataclass(frozen=True)
class Geometry:
    """One case's way.

    shape: of the file's grid, with the axis `thin` that reading dropped; affine, spacing: of that grid;
    order, flips: axis i of the turned grid is axis order[i], reversed where flips[i]; box: first and last
    (excluded) voxel of the crop, on the turned grid; resampled: voxels of the box after resampling; size:
    voxels of the prepared grid, around the same middle.
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
    def from_record(cls, record: Mapping[str, Any]) -> Geometry:
        try:
            return cls(**{key: _tuples(record[key]) for key in cls.__dataclass_fields__})
        except KeyError as error:
            raise DataError(f"A record of geometry lacks {error}; prepare the case again.") from None

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        record: dict[str, Any] = _lists(asdict(self))
        return record

    @property
    def flat(self) -> tuple[int, ...]:
        """The file's shape without its thin axis."""
        return tuple(side for axis, side in enumerate(self.shape) if axis != self.thin)

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

    # There

    def turn(self, data: Array) -> Array:
        """(C, *file) -> (C, *turned), a view."""
        return turned(data, self.order, self.flips)

    def cut(self, data: Array) -> Array:
        """(C, *file) -> (C, *box), in memory of its own."""
        # a copy: NumPy calls an axis of one voxel contiguous even when it runs backwards, torch does not
        return self.turn(data)[(slice(None), *(slice(*side) for side in self.box))].copy(order="C")

    def place(self, data: Tensor, fill: Tensor) -> Tensor:
        """(C, *resampled) -> (C, *size); fill: (C,), what padding is made of."""
        return placed(data, self.offset, self.size, fill)

    @property
    def window(self) -> Box:
        """The voxels of the box, on the turned grid, whose centres the prepared grid still has."""
        sides = []
        for (start, stop), first, voxels, size in zip(
            self.box, self.offset, self.resampled, self.size, strict=True
        ):
            scale = (stop - start) / voxels
            low, high = (round(max(0, min(voxels, edge)) * scale) for edge in (first, first + size))
            sides.append((start + low, start + high))
        return tuple(sides)

    @property
    def cuts(self) -> bool:
        """Whether placing crops anything."""
        return any(size < now for size, now in zip(self.size, self.resampled, strict=True))

    def share_cut(self, drawn: Array) -> float:
        """The share of what is drawn (1, *file) that placing crops, 0 where nothing is drawn."""
        if not self.cuts:
            return 0.0
        turned_drawn = self.turn(drawn)
        total = np.count_nonzero(turned_drawn)
        kept = np.count_nonzero(turned_drawn[(slice(None), *(slice(*side) for side in self.window))])
        return 1 - kept / total if total else 0.0

    # And back

    def unplace(self, data: Tensor, fill: Tensor) -> Tensor:
        """(C, *size) -> (C, *resampled)."""
        return placed(data, [-first for first in self.offset], self.resampled, fill)

    def uncut(self, data: Array, fill: Array) -> Array:
        """(C, *box) -> (C, *shape of the file)."""
        turned_shape = [self.flat[axis] for axis in self.order]
        whole = np.empty((len(data), *turned_shape), dtype=data.dtype)
        whole[:] = fill.reshape(-1, *[1] * len(turned_shape))
        whole[(slice(None), *(slice(*side) for side in self.box))] = data
        back = turned(whole, *inverse(self.order, self.flips))
        if self.thin is not None:
            back = np.expand_dims(back, self.thin + 1)
        return np.ascontiguousarray(back)


def invert_label(mask: Array | Tensor, geometry: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Classes (*size) on the prepared grid -> (*shape) on the scan's own; background where it was cut."""
    way = Geometry.from_record(geometry)
    values = torch.as_tensor(mask).detach().cpu()
    if tuple(values.shape) != way.size:
        raise DataError(
            f"A mask is {format_size(values.shape)} but the prepared scan was {format_size(way.size)}."
        )
    background = torch.zeros(1)
    box = [stop - start for start, stop in way.box]
    back = resample_label(way.unplace(values.to(torch.uint8)[None], background), box)
    whole: NDArray[np.uint8] = way.uncut(back.numpy(), np.zeros(1))[0]
    return whole


def invert_probabilities(probabilities: Array | Tensor, geometry: Mapping[str, Any]) -> NDArray[np.float32]:
    """(C, *size) on the prepared grid -> (C, *shape) on the scan's own, linearly.

    What was cut away is background: 1 in channel 0 and 0 in the others; a single channel gets 0.
    """
    way = Geometry.from_record(geometry)
    values = torch.as_tensor(probabilities).detach().cpu().float()
    if tuple(values.shape[1:]) != way.size:
        raise DataError(
            f"A map is {format_size(values.shape[1:])} but the prepared scan was {format_size(way.size)}."
        )
    background = torch.zeros(len(values))
    background[0] = 1.0 if len(values) > 1 else 0.0
    box = [stop - start for start, stop in way.box]
    back = resample_image(way.unplace(values, background), box)
    return way.uncut(back.numpy(), background.numpy())


# Turning


def turning(affine: Array | None, axes: int, wanted: str | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
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


def turned(data: Array, order: Sequence[int], flips: Sequence[bool]) -> Array:
    """Spatial axes of (C, *spatial) in another order, some reversed: a view."""
    data = data.transpose(0, *(axis + 1 for axis in order))
    return data[(slice(None), *(slice(None, None, -1 if flip else 1) for flip in flips))]


def inverse(order: Sequence[int], flips: Sequence[bool]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
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
    for value in torch.unique(mask).tolist():  # ascending: where two are level the higher one wins
        share = F.interpolate((mask == value).float()[None], size=tuple(size), mode=mode)[0]
        wins = (share >= best) & (share > 0)
        result[wins] = value
        torch.maximum(best, share, out=best)
    return result


def placed(data: Tensor, offset: Sequence[int], size: Sequence[int], fill: Tensor) -> Tensor:
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


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
