"""Contours of a slice and the pixels inside them, for RTSTRUCT.

    fill(rings, shape)        pixels whose centre is inside an odd number of closed rings: holes stay open
    trace(mask)               closed rings around pixels, holes joined to the outline by a channel of no width

Points are (column, row); the centre of the first pixel is (0, 0). `fill(trace(mask))` is the mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
Mask = NDArray[np.bool_]


def fill(rings: Iterable[Points], shape: tuple[int, int]) -> Mask:
    """(rows, columns): the even-odd rule over all rings."""
    rows, columns = shape
    flips = np.zeros((rows, columns + 1), dtype=bool)  # where inside and outside change, from left to right
    for ring in rings:
        x, y = ring[:, 0], ring[:, 1]
        for x0, y0, x1, y1 in zip(x, y, np.roll(x, -1), np.roll(y, -1), strict=True):
            low, high = min(y0, y1), max(y0, y1)
            crossed = np.arange(max(0, int(np.ceil(low))), min(rows, int(np.ceil(high))))  # low <= row < high
            if crossed.size:
                across = x0 + (crossed - y0) * (x1 - x0) / (y1 - y0)
                flips[crossed, np.clip(np.ceil(across), 0, columns).astype(int)] ^= True
    return np.logical_xor.accumulate(flips, axis=1)[:, :columns]


def trace(mask: Mask) -> list[Points]:
    """Rings half way between pixels inside and outside, without the first point repeated at the end."""
    import contourpy

    padded = np.pad(mask, 1).astype(np.float32)
    drawn: Any = contourpy.contour_generator(z=padded, fill_type=contourpy.FillType.OuterOffset)
    points, offsets = drawn.filled(0.5, 2.0)
    return [
        join_holes([outline[start : stop - 1] - 1 for start, stop in itertools.pairwise(ends)])
        for outline, ends in zip(points, offsets, strict=True)
    ]


def join_holes(rings: list[Points]) -> Points:
    """An outline with its holes as one ring: there and back along the shortest channel (PS3.3 C.8.8.6.3)."""
    outer, *holes = (np.asarray(ring, dtype=np.float64) for ring in rings)
    for hole in sorted(holes, key=lambda ring: float(ring[:, 0].min())):
        apart = np.linalg.norm(outer[:, None] - hole[None], axis=-1)
        here, there = np.unravel_index(int(apart.argmin()), apart.shape)
        around = np.roll(hole, -int(there), axis=0)
        outer = np.concatenate([outer[: here + 1], around, around[:1], outer[here:]])
    return outer
