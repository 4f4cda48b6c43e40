"""Prepare: one case from what the scanner stored to what a network reads.

reorient -> crop -> resample -> normalise -> pad or crop (all but normalise are in `geometry`, with the way
back). Intensities are scaled by the case alone, so that nothing depends on other cases; a constant channel
becomes zeros, never NaN. Padding is as dark as the darkest voxel (after zscore_nonzero: 0).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.federation_file import PrepareSettings, check_settings
from wardround.data.listing import Labels, Places
from wardround.data.preparing.geometry import (
    Box,
    Geometry,
    find_reorientation,
    reorient,
    resample_image,
    resample_label,
)
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError
from wardround.text import format_percent, format_size

Array = NDArray[Any]
MARGIN = 2  # voxels kept around the body
MOST_CUT = 0.01  # share of the labelled voxels that may be cut off without a warning
MAX_VOXELS = 2**30  # a prepared case beyond it comes from a wrong spacing


@dataclass(frozen=True)
class PreparedCase:
    """A case as it is stored.

    image: (C, *spatial) float32; label: (*spatial) uint8 classes, None for an unlabelled case; spacing:
    millimetres a voxel; geometry: plain values that `invert_label` needs; others: label values of no class
    that became background; cut: the share of labelled voxels that `size` cuts off.
    """

    image: Tensor
    label: Tensor | None
    spacing: tuple[float, ...]
    geometry: dict[str, Any]
    others: tuple[int, ...] = ()
    cut: float = 0.0


def prepare_case(
    image: Volume,
    label: Volume | None,
    settings: PrepareSettings,
    labels: Labels,
    *,
    background: Collection[int] | None = (),
    places: Places = (),
) -> PreparedCase:
    """Prepare one case; a DataError says what is wrong with it, without the name of the case.

    background: label values of no class that are allowed, as `data check` reports; None allows any; places:
    where the federation's channels are in the image. Absent ones become zeros, and count in no statistics.
    """
    check_settings(settings)
    image, settings = take_channels(image, places), take_rows(settings, places)
    check_voxels(image, label)
    classes: Array | None = None
    others: list[int] = []
    if label is not None:
        classes, others = to_classes(label.data, labels, background)
    geometry = plan(image, classes, settings)
    values = resample_image(torch.from_numpy(geometry.crop(image.data)), geometry.resampled)
    values = torch.from_numpy(normalise(values.numpy(), settings))
    dark = torch.zeros(len(values))
    if settings.normalise != "zscore_nonzero":
        dark = values.flatten(1).amin(1)
    mask, cut = None, 0.0
    if classes is not None:
        cut = geometry.share_cut(classes > 0)
        mask = resample_label(torch.from_numpy(geometry.crop(classes)), geometry.resampled)
        mask = geometry.pad_or_crop(mask, torch.zeros(1))[0].contiguous()
    values = fill_absent(geometry.pad_or_crop(values, dark), places).contiguous()
    return PreparedCase(values, mask, geometry.prepared_spacing, geometry.as_dict(), tuple(others), cut)


# Channels


def take_channels(image: Volume, places: Places) -> Volume:
    """The channels of an image that the federation has, in its order."""
    if not places:
        return image
    if max(places) >= image.channels:
        raise DataError(f"the image has {image.channels} channels, but {max(places) + 1} are named.")
    return replace(image, data=np.ascontiguousarray(image.data[[place for place in places if place >= 0]]))


def take_rows(settings: PrepareSettings, places: Places) -> PrepareSettings:
    """Settings with the rows of `intensities` for the channels that are there."""
    rows = settings.intensities
    if rows is None or len(rows) != len(places):
        return settings
    kept = tuple(row for row, place in zip(rows, places, strict=True) if place >= 0)
    return settings.model_copy(update={"intensities": kept})


def fill_absent(values: Tensor, places: Places) -> Tensor:
    """Channels that are there (C', *spatial), with zeros for the others: (C, *spatial)."""
    if -1 not in places:
        return values
    filled = torch.zeros(len(places), *values.shape[1:], dtype=values.dtype)
    filled[[number for number, place in enumerate(places) if place >= 0]] = values
    return filled


# Labels


def check_voxels(image: Volume, label: Volume | None) -> None:
    """Refuse voxels that are not finite, and image and label of two shapes."""
    if not bool(np.isfinite(image.data).all()):
        raise DataError("the image holds NaN or infinite voxels.")
    if label is not None and label.spatial != image.spatial:
        raise DataError(
            f"image is {format_size(image.spatial)} but label is {format_size(label.spatial)}. Resample one."
        )


def cut_off(share: float) -> str:
    """The warning that labelled voxels are lost."""
    return f"prepare.size cuts off {format_percent(share)} of what is labelled; raise it."


def to_classes(
    data: Array, labels: Labels, background: Collection[int] | None = ()
) -> tuple[Array, list[int]]:
    """File values -> classes 1, 2, ... in the order of `labels` (uint8), and values made background.

    Without labels the values are the classes. An unlisted value is background where it is 0 or in
    `background` (None: any), and is refused by name otherwise.
    """
    values = list_values(data)
    if not labels:
        unexpected = [value for value in values if not 0 <= value <= 255]
        if unexpected:
            raise DataError(f"the label has the value {unexpected[0]}; say under labels which class it is.")
        return data.astype(np.uint8), []
    number = {value: index for index, listed in enumerate(labels.values(), start=1) for value in listed}
    others = [value for value in values if value != 0 and value not in number]
    check_values(others, labels, background)
    result = np.zeros(data.shape, dtype=np.uint8)
    for value in values:
        if value in number:
            result[data == value] = number[value]
    return result, others


def list_values(data: Array) -> list[int]:
    """The distinct values, ascending."""
    small = data.min() >= 0 and data.max() < 2**16
    found = np.flatnonzero(np.bincount(data.reshape(-1))) if small else np.unique(data)
    values: list[int] = found.tolist()
    return values


def check_values(others: Sequence[int], labels: Labels, background: Collection[int] | None) -> None:
    """Refuse label values of no class that are not allowed as background (None: any is)."""
    unexpected = [] if background is None else sorted(set(others) - set(background))
    if unexpected:
        named = ", ".join(f"{name} {list(values)}" for name, values in labels.items())
        raise DataError(f"the label has the value {unexpected[0]}, which is none of the labels ({named}).")


# The grid


def plan(image: Volume, classes: Array | None, settings: PrepareSettings) -> Geometry:
    """Work out the geometry: orientation, crop, resampling and final size."""
    dims = len(image.spatial)
    for name, given in (("spacing", settings.spacing), ("size", settings.size)):
        if given is not None and len(given) != dims:
            thin = ", being one slice thick" if image.thin is not None else ""
            raise DataError(f"the image is {dims}D{thin}, but prepare.{name} has {len(given)} numbers.")
    order, flips = find_reorientation(image.affine, dims, settings.orientation)
    spacing = tuple(image.spacing[axis] for axis in order)
    box: Box = tuple((0, image.spatial[axis]) for axis in order)
    if settings.crop == "foreground":
        label = None if classes is None else reorient(classes, order, flips)
        box = find_body(reorient(image.data, order, flips), label)
    sides = [stop - start for start, stop in box]
    resampled = sides
    if settings.spacing is not None:
        extents = (n * has / wants for n, has, wants in zip(sides, spacing, settings.spacing, strict=True))
        resampled = [max(1, round(min(extent, 1e9))) for extent in extents]
    elif settings.size is not None:
        resampled = list(settings.size)
    size = settings.size if settings.size is not None else tuple(resampled)
    if max(_count_voxels(resampled), _count_voxels(size)) * image.channels > MAX_VOXELS:
        raise DataError(
            f"it would become {format_size(resampled)} voxels; check its spacing and prepare.spacing."
        )
    shape = list(image.spatial)
    if image.thin is not None:
        shape.insert(image.thin, 1)
    affine = None if image.affine is None else tuple(tuple(row) for row in image.affine.tolist())
    return Geometry(
        shape=tuple(shape), thin=image.thin, affine=affine, spacing=image.spacing, order=order, flips=flips,
        box=box, resampled=tuple(resampled), size=tuple(size),
    )  # fmt: skip


def find_body(data: Array, classes: Array | None) -> Box:
    """The box around all that is not empty, with a margin; labelled voxels are always inside.

    Empty is the value that all corners share, or else the darkest one. Channels are joined.
    """
    inside: NDArray[np.bool_] = np.zeros(data.shape[1:], dtype=bool)
    for channel in data:
        corners = channel[tuple(slice(None, None, max(1, side - 1)) for side in channel.shape)]
        same = bool((corners == corners.flat[0]).all())
        inside |= channel != (corners.flat[0] if same else channel.min())
    if classes is not None:
        inside |= classes[0] > 0
    return find_box(inside, MARGIN)


def find_box(inside: NDArray[np.bool_], margin: int = 0) -> Box:
    """The box around what is true, with a margin; all of it where nothing is."""
    sides: tuple[int, ...] = inside.shape
    if not inside.any():
        return tuple((0, side) for side in sides)
    box = []
    for axis, side in enumerate(sides):
        along = np.flatnonzero(inside.any(axis=tuple(a for a in range(inside.ndim) if a != axis)))
        box.append((max(0, int(along[0]) - margin), min(side, int(along[-1]) + 1 + margin)))
    return tuple(box)


# Intensities


def normalise(data: Array, settings: PrepareSettings) -> Array:
    """Scale intensities (C, *spatial), each channel by its own (maximum: by the largest of all)."""
    if settings.normalise == "none":
        return data
    if settings.normalise == "ct":
        return _normalise_ct(data, settings)
    largest = float(np.abs(data).max())
    if settings.normalise == "maximum":
        return data / np.float32(max(largest, 1e-6))
    scale = SCALES[settings.normalise]
    least = max(1e-5 * largest, 1e-12)  # below it, differences are rounding
    return np.stack([scale(channel, least, settings) for channel in data]).astype(np.float32, copy=False)


def _normalise_ct(data: Array, settings: PrepareSettings) -> Array:
    """Clip, subtract the mean, divide by the SD of all training cases (nnU-Net's CTNormalization)."""
    rows = settings.intensities or ()
    if len(rows) != len(data):
        raise DataError(f"the image has {len(data)} channels, but prepare.intensities has {len(rows)} rows.")
    scaled = []
    for channel, row in zip(data, rows, strict=True):
        if row is None:
            scaled.append(normalise(channel[None], settings.model_copy(update={"normalise": "zscore"}))[0])
            continue
        low, high, mean, deviation = (np.float32(value) for value in row)
        scaled.append((np.clip(channel, low, high) - mean) / deviation)
    return np.stack(scaled).astype(np.float32, copy=False)


def _zscore(data: Array, least: float, settings: PrepareSettings) -> Array:
    mean, deviation = float(data.mean(dtype=np.float64)), float(data.std(dtype=np.float64))
    return (data - np.float32(mean)) / np.float32(deviation) if deviation > least else np.zeros_like(data)


def _zscore_nonzero(data: Array, least: float, settings: PrepareSettings) -> Array:
    inside = data > 0
    result = np.zeros_like(data)
    if inside.any():
        result[inside] = _zscore(data[inside], least, settings)
    return result


def _percentile(data: Array, least: float, settings: PrepareSettings) -> Array:
    low, high = (float(value) for value in np.percentile(data, settings.percentiles))
    return _rescale(data, low, high, least)


def _minmax(data: Array, least: float, settings: PrepareSettings) -> Array:
    return _rescale(data, float(data.min()), float(data.max()), least)


def _window(data: Array, least: float, settings: PrepareSettings) -> Array:
    assert settings.window is not None
    centre, width = settings.window
    return _rescale(data, centre - width / 2, centre + width / 2, 0.0)


def _rescale(data: Array, low: float, high: float, least: float) -> Array:
    """Map low to 0 and high to 1, and clip."""
    if high - low <= least:
        return np.zeros_like(data)
    scaled: Array = np.clip((data - np.float32(low)) / np.float32(high - low), 0, 1)
    return scaled


SCALES: Mapping[str, Callable[[Array, float, PrepareSettings], Array]] = {
    "zscore": _zscore,
    "zscore_nonzero": _zscore_nonzero,
    "percentile": _percentile,
    "minmax": _minmax,
    "window": _window,
}


def _count_voxels(sides: Sequence[int]) -> float:
    return float(np.prod(np.asarray(sides, dtype=np.float64)))
