"""Domain shifts of a feature partition: the images of each client as another scanner would store them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.data.federation_file import PartitionSettings
from wardround.data.listing import Entry
from wardround.errors import DataError


def assign_shifts(entries: Sequence[Entry], settings: PartitionSettings) -> list[Entry]:
    """The cases with their client's shift, as JSON, in column `shift`."""
    clients = sorted({entry.client for entry in entries})
    shifts = {
        client: json.dumps(make_shift(settings.shift, settings.strength, number / (len(clients) - 1)))
        for number, client in enumerate(clients)
    }
    return [replace(e, columns={**e.columns, "shift": shifts[e.client]}) for e in entries]


def make_shift(kind: str, strength: float, place: float) -> dict[str, Any]:
    """The shift of the client at a place from 0 (the first) to 1 (the last); strength 0 changes nothing.

    Intensity goes from dark to bright and its bias field from one corner to the other, contrast from low
    gamma to high: a client in the middle is unchanged. Resolution goes from full down to a quarter.
    """
    amount = strength * (2 * place - 1)
    if kind == "intensity":
        values = {"scale": 2.0**amount, "offset": 0.5 * amount, "bias": 0.5 * amount}
    elif kind == "contrast":
        values = {"gamma": 2.5**amount}
    else:
        values = {"factor": 1 + 3 * strength * place}
    return {"kind": kind, **{name: round(value, 6) for name, value in values.items()}}


def read_shift(entry: Entry) -> dict[str, Any] | None:
    """The shift a feature partition gave a case; None for none (or for a list's own column of that name)."""
    try:
        shift = json.loads(entry.columns.get("shift", "null"))
    except (ValueError, RecursionError):
        return None
    return shift if isinstance(shift, dict) and shift.get("kind") in SHIFTS else None


def apply_shift(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """The image as this client's scanner would have stored it, (C, *spatial) -> (C, *spatial).

    Measured by the image's own range and spread, so it does the same before and after scaling. Apply it to
    the prepared image: normalising afterwards would take scale and offset out again.
    """
    if shift.get("kind") not in SHIFTS:
        raise DataError(f"The shift {shift.get('kind')!r} is unknown; there are {', '.join(SHIFTS)}.")
    return SHIFTS[shift["kind"]](image, shift)


def shift_intensity(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """Brightness above the darkest voxel times scale and a tilted bias field, plus offset in SDs."""
    scale, offset, bias = (float(shift[name]) for name in ("scale", "offset", "bias"))
    if (scale, offset, bias) == (1.0, 0.0, 0.0):
        return image
    axes = tuple(range(1, image.ndim))
    low, spread = image.amin(axes, keepdim=True), image.std(axes, correction=0, keepdim=True)
    ramps = [torch.linspace(-1, 1, size, device=image.device, dtype=image.dtype) for size in image.shape[1:]]
    ramps = [ramp if len(ramp) > 1 else ramp * 0 for ramp in ramps]
    field = torch.stack(torch.meshgrid(*ramps, indexing="ij")).mean(0)  # (*spatial)
    return (image - low) * scale * (bias * field).exp() + low + offset * spread


def shift_contrast(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """Gamma between the darkest and the brightest voxel of each channel; above 1 darkens the middle."""
    gamma = float(shift["gamma"])
    axes = tuple(range(1, image.ndim))
    low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
    if gamma == 1.0:
        return image
    width = torch.where(high > low, high - low, 1.0)
    return torch.where(high > low, ((image - low) / width) ** gamma * width + low, image)


def shift_resolution(image: Tensor, shift: Mapping[str, Any]) -> Tensor:
    """Averaged over blocks of `factor` voxels along each axis, then interpolated back."""
    factor = float(shift["factor"])
    if factor == 1.0:
        return image
    shape = image.shape[1:]
    small = F.interpolate(image[None], size=[max(1, round(size / factor)) for size in shape], mode="area")
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(shape)]
    return F.interpolate(small, size=list(shape), mode=mode, align_corners=False)[0]


SHIFTS = {"intensity": shift_intensity, "contrast": shift_contrast, "resolution": shift_resolution}
