"""Grid: what shape and spacing will be, before any voxel is touched. Without torch, so quick to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MULTIPLE = 16  # a U-Net halves its input four times


def reorient_grid(
    shape: Sequence[int], spacing: Sequence[float], affine: NDArray[Any] | None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Shape and spacing with the axes in the order they have after reorientation to RAS."""
    order: Sequence[int] = range(len(shape))
    if affine is not None and len(shape) == 3:
        import nibabel

        places = nibabel.io_orientation(affine)[:, 0]  # type: ignore[no-untyped-call]
        order = order if np.isnan(places).any() else np.argsort(places).tolist()
    return tuple(shape[axis] for axis in order), tuple(float(spacing[axis]) for axis in order)


def round_to_multiple(side: float) -> int:
    """The nearest multiple of 16, at least 16; halves go up."""
    return max(MULTIPLE, int(side / MULTIPLE + 0.5) * MULTIPLE)
