"""Overlap of two masks: Dice, IoU, precision, sensitivity, specificity and volume difference.

All follow from one count of voxels, `confusion`:

>>> counts = confusion(np.array([1, 1, 0, 0], dtype=bool), np.array([0, 1, 1, 0], dtype=bool))
>>> counts
Confusion(tp=1, fp=1, fn=1, tn=1)
>>> dice(counts)
0.5

Empty masks. `empty_policy` says what a score is where its formula reads 0/0:

                           Dice, IoU   precision   sensitivity
    both empty                 1           1            1         "nan": NaN for all
    only prediction empty      0          NaN           0
    only truth empty           0           0           NaN

Specificity is the sensitivity of the background and follows the same rule there: with truth
and prediction both full it is 1, with only the truth full it is NaN. "smooth" is "defined", but
Dice is (2 TP + s) / (2 TP + FP + FN + s) with s = 1e-5, as in the public code of FedEvi.

A model's predictions are counted where they are: `label_pairs` of a batch on its device, from which
`region_confusion` reads every region of a case, the same whole numbers as `confusion` finds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.errors import DataError
from wardround.text import format_size

EmptyPolicy = Literal["defined", "nan", "smooth"]
Mask = NDArray[np.bool_]

SMOOTH = 1e-5


@dataclass(frozen=True)
class Confusion:
    """Voxel counts: true and false positives, false and true negatives."""

    tp: int
    fp: int
    fn: int
    tn: int


def confusion(pred: Mask, truth: Mask) -> Confusion:
    """Count the voxels of two masks of one shape."""
    check_same_shape(pred, truth)
    tp = int(np.count_nonzero(pred & truth))
    fp = int(np.count_nonzero(pred)) - tp
    fn = int(np.count_nonzero(truth)) - tp
    return Confusion(tp, fp, fn, pred.size - tp - fp - fn)


def label_pairs(pred: Tensor, truth: Tensor, highest: int) -> Tensor:
    """How many voxels of each case have true label i and predicted label j, (B, i, j), where the labels are.

    highest: of the labels that count; all others, above it or negative, are joined under `highest` + 1.
    """
    check_same_shape(pred, truth)
    if pred.device.type == "cpu" and len(pred) > 1:  # a case at a time stays nearer to the cache
        return torch.cat([label_pairs(pred[k : k + 1], truth[k : k + 1], highest) for k in range(len(pred))])
    size = highest + 2
    bins = len(pred) * size**2
    kind = torch.uint8 if bins <= 256 else torch.int32
    cases = torch.arange(len(pred), dtype=kind, device=pred.device).view(-1, *[1] * (pred.ndim - 1))
    places = (cases * size + bounded(truth, highest)).mul_(size).add_(bounded(pred, highest))
    return torch.bincount(places.flatten(), minlength=bins).view(-1, size, size)


def bounded(labels: Tensor, highest: int) -> Tensor:
    """Labels up to the highest one, and `highest` + 1 in place of all others; a byte each if they fit."""
    other = highest + 1
    if labels.dtype == torch.uint8 and other <= 255:
        return labels.clamp(max=other)
    if labels.dtype == torch.uint8:
        labels = labels.int()
    labels = labels.clamp(-1, other)
    if other < 255:
        return labels.to(torch.uint8).clamp(max=other)  # -1 as a byte is 255
    return torch.where(labels < 0, other, labels)


def region_confusion(pairs: NDArray[np.int64], labels: Sequence[int]) -> Confusion:
    """The counts of a region that joins these labels, from one case's `label_pairs` (i, j).

    >>> pairs = np.array([[5, 1, 0], [2, 3, 1], [0, 0, 4]])
    >>> region_confusion(pairs, [1, 2])
    Confusion(tp=8, fp=1, fn=2, tn=5)
    """
    inside = sorted(set(labels))
    predicted = pairs[:, inside]
    tp = int(predicted[inside].sum())
    fp = int(predicted.sum()) - tp
    fn = int(pairs[inside].sum()) - tp
    return Confusion(tp, fp, fn, int(pairs.sum()) - tp - fp - fn)


def dice(counts: Confusion, empty_policy: EmptyPolicy = "defined") -> float:
    """2 TP / (2 TP + FP + FN)."""
    c = counts
    if empty_policy == "smooth":
        return (2 * c.tp + SMOOTH) / (2 * c.tp + c.fp + c.fn + SMOOTH)
    return _share(2 * c.tp, 2 * c.tp + c.fp + c.fn, c.fp + c.fn, empty_policy)


def iou(counts: Confusion, empty_policy: EmptyPolicy = "defined") -> float:
    """TP / (TP + FP + FN)."""
    c = counts
    return _share(c.tp, c.tp + c.fp + c.fn, c.fp + c.fn, empty_policy)


def precision(counts: Confusion, empty_policy: EmptyPolicy = "defined") -> float:
    """TP / (TP + FP)."""
    c = counts
    return _share(c.tp, c.tp + c.fp, c.fn, empty_policy)


def sensitivity(counts: Confusion, empty_policy: EmptyPolicy = "defined") -> float:
    """TP / (TP + FN), also called recall."""
    c = counts
    return _share(c.tp, c.tp + c.fn, c.fp, empty_policy)


def specificity(counts: Confusion, empty_policy: EmptyPolicy = "defined") -> float:
    """TN / (TN + FP)."""
    c = counts
    return _share(c.tn, c.tn + c.fp, c.fn, empty_policy)


def volume_difference(counts: Confusion, spacing: Sequence[float]) -> float:
    """Predicted minus true volume in millilitres; a 2D image counts as 1 mm thick."""
    cubic_mm = (counts.fp - counts.fn) * math.prod(float(step) for step in spacing)
    return cubic_mm / 1000


def relative_volume_difference(counts: Confusion, empty_policy: EmptyPolicy = "defined") -> float:
    """Predicted minus true volume, over the true volume; infinite if only the truth is empty."""
    c = counts
    if c.tp + c.fn == 0:
        if c.fp:
            return math.inf
        return math.nan if empty_policy == "nan" else 0.0
    return (c.fp - c.fn) / (c.tp + c.fn)


def check_same_shape(pred: NDArray[np.generic] | Tensor, truth: NDArray[np.generic] | Tensor) -> None:
    """Refuse arrays that NumPy would silently broadcast."""
    if pred.shape != truth.shape:
        sizes = [format_size(array.shape) for array in (pred, truth)]
        raise DataError(
            f"the prediction is {sizes[0]} but the truth is {sizes[1]}. Resample one to the other."
        )


def _share(part: int, whole: int, num_mistakes: int, empty_policy: EmptyPolicy) -> float:
    """part / whole; of an empty whole NaN, or 1 where the policy defines it and there is no mistake."""
    if whole:
        return part / whole
    return math.nan if num_mistakes or empty_policy == "nan" else 1.0
