"""View: a volume as 2D slices along one axis, and the way back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wardround.data.federation_file import OPPOSITE
from wardround.data.preparing.geometry import find_reorientation, invert_reorientation, reorient
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError

Array = NDArray[Any]
Along = Literal["R", "A", "S"]


@dataclass(frozen=True)
class Slices:
    """A volume as slices: reoriented (see `geometry.reorient`), then cut along one of its axes."""

    volume: Volume
    order: tuple[int, ...]
    flips: tuple[bool, ...]
    axis: int

    @classmethod
    def of(cls, volume: Volume, along: Along, orientation: str | None) -> Slices:
        """along: R, A or S, the direction in which slices follow each other (S: axial slices)."""
        if len(volume.spatial) != 3:
            raise DataError("it is 2D already.")
        if volume.affine is None:
            raise DataError(
                f"its format does not store the orientation, so axis {along} is unknown; convert it to NIfTI."
            )
        order, flips = find_reorientation(volume.affine, 3, orientation)
        slices = cls(volume, order, flips, 0)
        import nibabel

        tools: Any = nibabel  # untyped
        codes = "".join(tools.aff2axcodes(slices.affine)).translate(OPPOSITE)
        return replace(slices, axis=codes.index(along))

    @property
    def are_reoriented(self) -> bool:
        return self.order != (0, 1, 2) or any(self.flips)

    @property
    def affine(self) -> NDArray[np.float64]:
        """Voxel to millimetres of the reoriented grid."""
        old = self.volume.affine
        assert old is not None
        new = old.copy()
        for axis, (source, flip) in enumerate(zip(self.order, self.flips, strict=True)):
            new[:, axis] = -old[:, source] if flip else old[:, source]
            if flip:
                new[:, 3] += old[:, source] * (self.volume.spatial[source] - 1)
        return new

    def __len__(self) -> int:
        return self.volume.spatial[self.order[self.axis]]

    def __iter__(self) -> Iterator[Volume]:
        data = reorient(self.volume.data, self.order, self.flips)
        affine = self.affine
        spacing = [self.volume.spacing[axis] for axis in self.order]
        del spacing[self.axis]
        for number in range(len(self)):
            place = affine.copy()
            place[:, 3] += number * affine[:, self.axis]
            plane = np.ascontiguousarray(np.take(data, number, axis=self.axis + 1))
            yield Volume(plane, place, tuple(spacing), thin=self.axis)

    def join(self, planes: Sequence[Array]) -> Array:
        """Join planes (C, *spatial), with the axis of length one, into an array on the volume's own grid."""
        whole = np.concatenate(planes, axis=self.axis + 1)
        return np.ascontiguousarray(reorient(whole, *invert_reorientation(self.order, self.flips)))


def restore_axis(image: Volume) -> Volume:
    """Give a scan of one slice the axis that reading dropped."""
    assert image.thin is not None and image.affine is not None
    spacing = list(image.spacing)
    spacing.insert(image.thin, float(np.linalg.norm(image.affine[:3, image.thin])))
    return Volume(np.expand_dims(image.data, image.thin + 1), image.affine, tuple(spacing))


def clip_intensities(image: Volume, percentile: float | None) -> Volume:
    """Clip the values of each channel at this percentile of the volume."""
    if percentile is None:
        return image
    axes = tuple(range(1, image.data.ndim))
    highest = np.percentile(image.data, percentile, axis=axes, keepdims=True).astype(np.float32)
    return replace(image, data=np.minimum(image.data, highest))
