"""Case: what a fingerprint needs of one case; never shared.

Shapes are after cropping to what is not zero in any channel, as nnU-Net crops, with all that is labelled
inside; axes are those of prepared scans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wardround.data.fingerprint.histogram import VoxelCounts, clip_intensity
from wardround.data.fingerprint.positions import Spans, find_spans
from wardround.data.listing import Entry, Labels, Places
from wardround.data.preparing.geometry import find_reorientation, reorient
from wardround.data.preparing.prepare import find_box, take_channels
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError
from wardround.text import format_size

LEVELS = (1.0, 5.0, 25.0, 50.0, 75.0, 95.0, 99.0)  # per cent, of the intensities of a case
MOST_VOXELS = 500_000  # of a channel are read; more would not move a quantile
ALL = "foreground"  # all classes together
Modality = Literal["ct", "mr", "rgb", "other"]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class CaseStatistics:
    """One case, never shared.

    shape: after cropping; kept: share of the voxels it leaves; raw, standard: quantiles of each channel as
    stored and standardised; modality: of each channel by its values; voxels: of each class, None without a
    label; extent: voxels of the box around all classes, and inside: intensities in it, where there are any;
    spans: where each class lies, in voxels of that box.
    A channel that is absent has NaN as quantiles, and None.
    """

    entry: Entry
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    has_spacing: bool
    kept: float
    raw: Matrix
    standard: Matrix
    modality: tuple[Modality | None, ...]
    voxels: Mapping[str, int] | None
    extent: tuple[int, ...] = ()
    inside: tuple[VoxelCounts | None, ...] = ()
    spans: Spans = field(default_factory=dict)


def measure_case(
    entry: Entry,
    image: Volume,
    label: Volume | None,
    labels: Labels | None = None,
    orientation: str | None = "RAS",
) -> CaseStatistics:
    """Measure what a fingerprint needs of one case."""
    if label is not None and label.spatial != image.spatial:
        raise DataError(
            f"{entry.where}: image is {format_size(image.spatial)} but label is "
            f"{format_size(label.spatial)}. Resample one."
        )
    labels = labels and entry.label_map(labels)
    image = take_channels(image, entry.places)
    flat = image.data.reshape(len(image.data), -1)
    flat = flat[:, :: max(1, flat.shape[1] // MOST_VOXELS)].astype(np.float64)
    finite = np.isfinite(flat)
    flat = flat if finite.all() else flat[:, finite.all(axis=0)]
    if flat.size == 0:
        raise DataError(f"{entry.where}: the image has no finite voxel; leave the case out.")
    flat = clip_intensity(flat)
    raw = np.percentile(flat, LEVELS, axis=1).T  # (C, levels)
    spread = flat.std(axis=1, keepdims=True)
    standard = (raw - flat.mean(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    order, flips = find_reorientation(image.affine, len(image.spatial), orientation)
    drawn = None if label is None else find_labelled(label.data, labels)
    filled = reduce(np.logical_or, (channel != 0 for channel in image.data))[None]
    box = find_box(reorient(filled if drawn is None else filled | drawn, order, flips)[0])
    shape = tuple(stop - start for start, stop in box)
    found: dict[str, Any] = {}
    if label is not None and drawn is not None and drawn.any():
        extent = find_box(reorient(drawn, order, flips)[0])
        found["extent"] = tuple(stop - start for start, stop in extent)
        within = reorient(label.data, order, flips)[0][tuple(slice(*ends) for ends in extent)]
        found["spans"] = find_spans(within, labels or name_values(within))
        inside = [count_inside(channel, drawn[0]) for channel in image.data]
        found["inside"] = place_values(inside, entry.places, None)
    return CaseStatistics(
        entry=entry,
        shape=shape,
        spacing=tuple(float(image.spacing[axis]) for axis in order),
        has_spacing=image.affine is not None,
        kept=math.prod(shape) / math.prod(image.spatial),
        raw=np.stack(place_values(list(raw), entry.places, np.full(len(LEVELS), np.nan))),
        standard=np.stack(place_values(list(standard), entry.places, np.full(len(LEVELS), np.nan))),
        modality=place_values(guess_modality(flat, image), entry.places, None),
        voxels=None if label is None else count_voxels(label.data, labels),
        **found,
    )


def place_values(values: Sequence[Any], places: Places, absent: Any) -> tuple[Any, ...]:
    """What the channels of a case gave, in the places of the federation's."""
    given = iter(values)
    return tuple(next(given) if place >= 0 else absent for place in places) if places else tuple(values)


def find_labelled(label: NDArray[Any], labels: Labels | None) -> NDArray[np.bool_]:
    """The voxels of any class."""
    if labels is None:
        return label > 0
    return np.isin(label, [value for values in labels.values() for value in values])


def count_inside(channel: NDArray[Any], drawn: NDArray[np.bool_]) -> VoxelCounts:
    values = channel[drawn]
    values = values[:: max(1, len(values) // MOST_VOXELS)]
    finite = values[np.isfinite(values)]
    return VoxelCounts(finite if finite.size else np.zeros(1))


def guess_modality(flat: Matrix, image: Volume) -> tuple[Modality, ...]:
    """By values alone: Hounsfield units are whole numbers that reach far below zero; colours are the three
    channels of a picture, whole numbers from 0 to 255. MR has no values of its own."""
    whole = (flat == np.rint(flat)).all(axis=1)
    low, high = flat.min(axis=1), flat.max(axis=1)
    if len(flat) == 3 and image.affine is None and whole.all() and low.min() >= 0 and high.max() <= 255:
        return ("rgb",) * 3
    in_hounsfield = whole & (low < -100) & (low >= -5000) & (high <= 2**15)
    return tuple("ct" if is_ct else "other" for is_ct in in_hounsfield)


def count_voxels(label: NDArray[Any], labels: Labels | None) -> dict[str, int]:
    """Class -> its voxels, and those of all classes together."""
    values, counts = np.unique(label, return_counts=True)
    found = {int(value): int(count) for value, count in zip(values, counts, strict=True)}
    voxels = {
        name: sum(found.get(value, 0) for value in own)
        for name, own in (labels or name_values(values)).items()
    }
    return {ALL: sum(voxels.values()), **voxels}


def name_values(values: NDArray[Any]) -> dict[str, tuple[int, ...]]:
    """A class of its own for every value above 0."""
    return {f"class {int(value)}": (int(value),) for value in np.unique(values) if value > 0}
