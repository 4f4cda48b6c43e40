"""Views of volumes: the plane with the finest pixels, its name, and which way is up.

Pictures follow the radiologist's convention: anterior or superior is up, the patient's right is on the left,
and sagittal slices look to the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PLANES = {"S": "axial", "A": "coronal", "R": "sagittal"}  # by the direction across their slices
DOWN_AND_RIGHT = {"axial": "PL", "coronal": "IL", "sagittal": "IP"}
OPPOSITES = dict(zip("RLAPSI", "LRPAIS", strict=True))
SAME = 1.01  # voxel sides closer than this are equal


@dataclass(frozen=True)
class View:
    """How a volume is looked at. axes: of its slices, rows and columns; flips: those of the result that are
    reversed; plane: axial, coronal or sagittal, "" where files do not say how the patient lies."""

    axes: tuple[int, int, int] = (0, 1, 2)
    flips: tuple[int, ...] = ()
    plane: str = ""

    def turn(self, volume: Tensor) -> Tensor:
        """(X, Y, Z) -> (slices, rows, columns)."""
        return volume.permute(self.axes).flip(self.flips)

    def aspect(self, spacing: Sequence[float]) -> float:
        """Height of a pixel divided by its width."""
        return spacing[self.axes[1]] / spacing[self.axes[2]]


def choose_view(shape: Sequence[int], spacing: Sequence[float], orientation: str | None) -> View:
    """The plane across the longest voxel side; of equal sides axial, or where there are fewest slices.

    orientation: directions in which the axes of the volume go, such as RAS; None: not known.

    >>> choose_view((24, 200, 200), (3.0, 1.0, 1.0), "RAS").plane
    'sagittal'
    """
    codes = [code if code in PLANES else OPPOSITES[code] for code in (orientation or "").upper()]
    coarse = [axis for axis in range(3) if spacing[axis] * SAME >= max(spacing)]
    if not codes:
        across = min(coarse, key=lambda axis: shape[axis])
        rest = [axis for axis in range(3) if axis != across]
        return View((across, rest[0], rest[1]))
    across = min(coarse, key=lambda axis: "SAR".index(codes[axis]))
    plane = PLANES[codes[across]]
    assert orientation is not None
    rows, columns = (find_axis(orientation.upper(), code) for code in DOWN_AND_RIGHT[plane])
    flips = tuple(place for place, (_, is_reversed) in enumerate((rows, columns), start=1) if is_reversed)
    return View((across, rows[0], columns[0]), flips, plane)


def find_axis(orientation: str, code: str) -> tuple[int, bool]:
    """The axis along a direction, and whether it goes the other way."""
    if code in orientation:
        return orientation.index(code), False
    return orientation.index(OPPOSITES[code]), True
