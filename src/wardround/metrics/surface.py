"""Distances between the boundaries of two masks: HD95, ASSD, ASD and surface Dice.

The boundary of a mask is the mask minus its erosion by the cross of direct neighbours (4 in 2D,
6 in 3D); what lies outside the image is background. With d(a, B) the distance in millimetres
from a boundary voxel a to the nearest one of B, and P and T the boundaries of prediction and truth:

    HD95   "max_directed": the larger of the 95th percentiles of d(p, T) and d(t, P)   (MONAI)
           "pooled": the 95th percentile of all d(p, T) and d(t, P) together           (medpy)
    ASSD   "pooled": the mean of all d(p, T) and d(t, P) together        (MONAI, medpy from 0.5.2)
           "mean_directed": the mean of the two directed means                (medpy up to 0.4)
    ASD    the mean of d(p, T) alone
    surface Dice   the share of all voxels of P and T whose distance is at most the tolerance

Two empty masks are 0 mm apart with surface Dice 1 (both NaN with `empty_policy="nan"`). If only
one is empty, surface Dice is 0 and the distances are infinite, or the diagonal of the image with
`surface_penalty="diagonal"`.

Exact and quick: masks are cropped to their joint box, all distances are found once, and most
boundary voxels meet the other boundary within a few steps. So those steps are tried first, nearest
first, for all voxels together; only what is left after them is looked up in a k-d tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wardround.errors import DataError
from wardround.metrics.overlap import EmptyPolicy, Mask, check_same_shape

SurfacePenalty = Literal["inf", "diagonal"]
HD95Definition = Literal["max_directed", "pooled"]
ASSDDefinition = Literal["pooled", "mean_directed"]
Distances = NDArray[np.float64]
Indices = NDArray[np.intp]

REACH = 3.0
"""How many voxels away (of the mean size, if they are not cubes) is tried before the k-d tree is asked."""

SLACK = 1e-6
"""Relative. Image headers keep the spacing in float32, so 3 x 0.1 mm must still be within 0.3 mm."""


@dataclass(frozen=True, eq=False)
class SurfaceDistances:
    """Distances in mm from every boundary voxel of one mask to the boundary of the other.

    penalty: what the distance metrics are if exactly one mask is empty; the distances of the other
    mask's boundary are then infinite here.
    """

    pred_to_truth: Distances
    truth_to_pred: Distances
    penalty: float = math.inf
    empty_policy: EmptyPolicy = "defined"

    @classmethod
    def of(
        cls,
        pred: Mask,
        truth: Mask,
        spacing: Sequence[float],
        *,
        empty_policy: EmptyPolicy = "defined",
        surface_penalty: SurfacePenalty = "inf",
    ) -> SurfaceDistances:
        """Measure two masks of one shape; spacing in mm, in the order of the axes."""
        check_same_shape(pred, truth)
        if len(spacing) != pred.ndim:
            raise DataError(
                f"spacing {tuple(spacing)} has {len(spacing)} values; the mask has {pred.ndim} axes."
            )
        mm = tuple(float(step) for step in spacing)
        penalty = math.inf
        if surface_penalty == "diagonal":
            penalty = math.hypot(*(size * step for size, step in zip(pred.shape, mm, strict=True)))
        return cls(*_distances(pred, truth, mm), penalty, empty_policy)

    def hd95(self, definition: HD95Definition = "max_directed") -> float:
        """The 95th percentile Hausdorff distance in mm, percentiles interpolated linearly."""
        if self._has_empty:
            return self._distance_of_empty
        if definition == "pooled":
            return float(np.percentile(self._pooled, 95))
        return max(float(np.percentile(each, 95)) for each in (self.pred_to_truth, self.truth_to_pred))

    def assd(self, definition: ASSDDefinition = "pooled") -> float:
        """The average symmetric surface distance in mm."""
        if self._has_empty:
            return self._distance_of_empty
        if definition == "pooled":
            return float(self._pooled.mean())
        return float(self.pred_to_truth.mean() + self.truth_to_pred.mean()) / 2

    def asd(self) -> float:
        """The average distance in mm from the prediction's boundary to the truth's."""
        return self._distance_of_empty if self._has_empty else float(self.pred_to_truth.mean())

    def surface_dice(self, tolerance: float = 1.0) -> float:
        """The share of both boundaries that lies within `tolerance` mm of the other."""
        if self._both_empty:
            return math.nan if self.empty_policy == "nan" else 1.0
        if self._has_empty:
            return 0.0
        return float(np.mean(self._pooled <= tolerance * (1 + SLACK)))

    @property
    def _pooled(self) -> Distances:
        return np.concatenate([self.pred_to_truth, self.truth_to_pred])

    @property
    def _has_empty(self) -> bool:
        return not (self.pred_to_truth.size and self.truth_to_pred.size)

    @property
    def _both_empty(self) -> bool:
        return not (self.pred_to_truth.size or self.truth_to_pred.size)

    @property
    def _distance_of_empty(self) -> float:
        if not self._both_empty:
            return self.penalty
        return math.nan if self.empty_policy == "nan" else 0.0


def _distances(pred: Mask, truth: Mask, spacing: tuple[float, ...]) -> tuple[Distances, Distances]:
    """From the prediction's boundary to the truth's, and back."""
    both = pred | truth
    if not both.any():
        return np.zeros(0), np.zeros(0)
    box = _bounding_box(both)
    steps = _steps(spacing)
    pred_boundary, truth_boundary = (_boundary(_padded(mask[box], steps.reach)) for mask in (pred, truth))
    pred_voxels, truth_voxels = np.flatnonzero(pred_boundary), np.flatnonzero(truth_boundary)
    return (
        _to_nearest(pred_voxels, truth_boundary, truth_voxels, spacing),
        _to_nearest(truth_voxels, pred_boundary, pred_voxels, spacing),
    )


def _to_nearest(voxels: Indices, boundary: Mask, targets: Indices, spacing: tuple[float, ...]) -> Distances:
    """Distance from each voxel to the nearest of the targets, which are the voxels of the boundary."""
    if not targets.size:
        return np.full(voxels.size, np.inf)
    is_target = boundary.reshape(-1)
    distances = np.zeros(voxels.size)
    left = np.flatnonzero(~is_target[voxels])
    strides = _strides(boundary.shape)
    for distance, shell in _steps(spacing).shells:
        if not left.size:
            return distances
        here = voxels[left]
        jumps = shell @ strides
        found = is_target[here + jumps[0]]
        for jump in jumps[1:]:
            found |= is_target[here + jump]
        distances[left[found]] = distance
        left = left[~found]
    if left.size:
        from scipy.spatial import cKDTree  # most masks never come here

        mm = np.array(spacing)
        positions = np.stack(np.unravel_index(targets, boundary.shape), axis=-1) * mm
        tree = cKDTree(positions, leafsize=64, balanced_tree=False, compact_nodes=False)
        asked = np.stack(np.unravel_index(voxels[left], boundary.shape), axis=-1) * mm
        distances[left] = tree.query(asked)[0]
    return distances


class _Steps(NamedTuple):
    """Steps from a voxel to those around it.

    shells: (distance in mm, steps of that length), nearest first; reach: the longest along each axis.
    """

    shells: list[tuple[float, Indices]]
    reach: tuple[int, ...]


@lru_cache(maxsize=256)
def _steps(spacing: tuple[float, ...]) -> _Steps:
    """All steps up to REACH voxels long: about 110 of them in 3D, 30 in 2D."""
    ndim = len(spacing)
    radius = REACH * math.prod(spacing) ** (1 / ndim)
    reach = tuple(int(radius / mm) for mm in spacing)
    steps = np.stack(np.meshgrid(*(np.arange(-far, far + 1) for far in reach), indexing="ij"), axis=-1)
    steps = steps.reshape(-1, ndim).astype(np.intp)
    lengths = np.sqrt(np.sum((steps * np.array(spacing)) ** 2, axis=1))
    inside = np.flatnonzero((lengths > 0) & (lengths <= radius))
    order = inside[np.argsort(lengths[inside], kind="stable")]
    steps, lengths = steps[order], lengths[order]
    cuts = np.flatnonzero(np.diff(lengths) > 1e-9 * radius) + 1
    shells = zip(np.split(lengths, cuts), np.split(steps, cuts), strict=True)
    return _Steps([(float(length[0]), shell) for length, shell in shells if length.size], reach)


def _bounding_box(mask: Mask) -> tuple[slice, ...]:
    """The smallest box around a mask that is not empty."""
    box = []
    for _ in range(mask.ndim):
        filled = np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))
        box.append(slice(int(filled[0]), int(filled[-1]) + 1))
        mask = np.bitwise_or.reduce(mask[box[-1]], axis=0)  # the axes still to come
    return tuple(box)


def _padded(mask: Mask, reach: tuple[int, ...]) -> Mask:
    """The mask with a rim of background as wide as the steps reach, and at least one voxel."""
    rims = [max(1, far) for far in reach]
    padded = np.zeros([size + 2 * rim for size, rim in zip(mask.shape, rims, strict=True)], dtype=np.bool_)
    padded[tuple(slice(rim, -rim) for rim in rims)] = mask
    return padded


def _boundary(mask: Mask) -> Mask:
    """The mask minus its erosion; its rim must be background, so that a step never wraps around."""
    flat = mask.reshape(-1)
    eroded = flat.copy()
    for stride in _strides(mask.shape):
        eroded[stride:] &= flat[:-stride]
        eroded[:-stride] &= flat[stride:]
    return (flat ^ eroded).reshape(mask.shape)


def _strides(shape: tuple[int, ...]) -> Indices:
    """How far apart neighbours along each axis are in the flattened array."""
    return np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], dtype=np.intp)
