"""Segment a scan with this folder's model:

    python prepare_and_run.py scan.nii.gz mask.nii.gz
    python prepare_and_run.py flair.nii.gz t1.nii.gz mask.nii.gz     one file a channel, the mask last

Needs numpy, scipy and onnxruntime; nibabel for NIfTI, pillow for pictures. All settings are in
inference.json, the network is model.onnx; scan_files.py reads and writes. All lie beside this file.

    read -> reorient -> crop -> resample -> normalise -> pad -> network, window by window -> mask -> way back

The mask is on the scan's own grid, with the values that the training labels had. Research use only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

try:
    import numpy as np
except ImportError:
    sys.exit("numpy is missing here: pip install numpy")
sys.dont_write_bytecode |= __name__ == "__main__"  # the folder stays as it was exported
from scan_files import (  # noqa: E402, I001
    Array, LoadedImage, RefusedScan, check_target, find_axes, load_package, read_image, write_mask,
)  # fmt: skip

Facts = dict[str, Any]
HERE = Path(__file__).resolve().parent


class PreparedGrid(NamedTuple):
    """From the scan's grid to the network's: axis i is axis order[i], reversed where flips[i]; the box is
    cut out, resampled to so many voxels, and padded or cropped around its centre to size."""

    order: tuple[int, ...]
    flips: tuple[bool, ...]
    box: tuple[tuple[int, int], ...]
    resampled: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def offset(self) -> list[int]:
        return [(now - size) // 2 for now, size in zip(self.resampled, self.size, strict=True)]


# The whole way


def segment(files: Sequence[Path], folder: Path = HERE) -> Array:
    """The mask of a scan: uint8, on the scan's own grid."""
    facts = json.loads((folder / "inference.json").read_text(encoding="utf-8"))
    network = open_network(folder / "model.onnx")
    image = read_image(files)
    if len(image.data) != facts["in_channels"]:
        names = f" ({', '.join(facts['channels'])})" if facts["channels"] else ""
        raise RefusedScan(
            f"{files[0]} has {len(image.data)} channels, the model takes {facts['in_channels']}{names}."
        )
    if not np.isfinite(image.data).all():
        raise RefusedScan(f"{files[0]} holds NaN or infinite voxels.")
    label = segment_slices(image, facts, network)
    if label is None:
        if image.data.ndim - 1 != facts["dimensions"]:
            raise RefusedScan(
                f"{files[0]} is {image.data.ndim - 1}D, the model takes {facts['dimensions']}D images."
            )
        label = segment_image(image, facts, network)
        label = label if image.thin is None else np.expand_dims(label, image.thin)
    if facts["postprocess"] == "largest_component":
        label = keep_largest(label)
    if max(facts["values"]) > 255:
        raise RefusedScan(f"class value {max(facts['values'])} does not fit an 8-bit mask.")
    mask: Array = np.asarray(facts["values"], dtype=np.uint8)[label]
    return mask


def segment_image(image: LoadedImage, facts: Facts, network: Network) -> Array:
    """Class numbers on the image's own grid, without the axis that reading dropped."""
    settings = facts["prepare"]
    place = plan(image, settings)
    data = reorient(image.data, place.order, place.flips)[as_index(place.box)]
    data = normalise(resample(np.ascontiguousarray(data), place.resampled), settings)
    is_dark = settings["normalise"] != "zscore_nonzero"
    fill = data.reshape(len(data), -1).min(1) if is_dark else np.zeros(len(data), np.float32)
    data = pad_or_crop(data, place.offset, place.size, fill)
    logits = slide(data, facts, network)
    back = [-first for first in place.offset]
    sides = tuple(stop - start for start, stop in place.box)
    nothing = np.zeros(1, np.float32)
    if sides == place.resampled:  # nothing was resampled: the label as it is
        label = pad_or_crop(decide(logits, facts["logits"])[None], back, sides, nothing)[0]
    else:  # class by class, so that borders are smooth
        label, best = np.zeros(sides, np.uint8), np.zeros(sides, np.float32)
        for number, share in enumerate(probabilities(logits, facts)):
            there = resample(pad_or_crop(share[None], back, place.resampled, nothing), sides)[0]
            label[there > best] = number
            best = np.maximum(best, there)
    whole = np.zeros([image.data.shape[1:][axis] for axis in place.order], np.uint8)
    whole[as_index(place.box)[1:]] = label
    return reorient(whole[None], *invert(place.order, place.flips))[0]


def segment_slices(image: LoadedImage, facts: Facts, network: Network) -> Array | None:
    """A volume by a 2D network that was trained on slices; None where the image is not cut."""
    settings = facts["prepare"]["slices"]
    if facts["dimensions"] == 3 or settings is None or (image.data.ndim == 3 and image.thin is None):
        return None
    if image.affine is None:
        raise RefusedScan("The format of this volume does not say where its axes point; convert it to NIfTI.")
    data = image.data
    spacing = np.linalg.norm(image.affine[:3, :3], axis=0)
    if image.thin is not None:
        data = np.expand_dims(data, image.thin + 1)
    elif settings["clip"] is not None:
        highest = np.percentile(data, settings["clip"], axis=(1, 2, 3), keepdims=True)
        data = np.minimum(data, highest.astype(np.float32))
    order, flips = find_reorientation(image.affine, facts["prepare"]["orientation"])
    points = [axis for axis, _ in find_axes(image.affine)]
    cut = [points[axis] for axis in order].index("RAS".index(settings["along"]))
    data = reorient(data, order, flips)
    if image.thin is not None and (data.shape[cut + 1] != 1 or (order == (0, 1, 2) and not any(flips))):
        return None
    sides = tuple(float(spacing[axis]) for number, axis in enumerate(order) if number != cut)
    planes = [
        segment_image(LoadedImage(np.ascontiguousarray(plane), None, sides, cut), facts, network)
        for plane in np.moveaxis(data, cut + 1, 0)
    ]
    return reorient(np.stack(planes, axis=cut)[None], *invert(order, flips))[0]


# Preparing


def plan(image: LoadedImage, settings: Facts) -> PreparedGrid:
    """Orientation, crop, resampling and final size."""
    spatial = image.data.shape[1:]
    order, flips = tuple(range(len(spatial))), (False,) * len(spatial)
    if image.affine is not None and settings["orientation"] is not None and len(spatial) == 3:
        order, flips = find_reorientation(image.affine, settings["orientation"])
    box = tuple((0, spatial[axis]) for axis in order)
    if settings["crop"] == "foreground":
        box = find_body(reorient(image.data, order, flips), settings["crop_margin"])
    resampled = tuple(stop - start for start, stop in box)
    if settings["spacing"] is not None:
        spacing = [image.spacing[axis] for axis in order]
        extents = (
            n * has / wants for n, has, wants in zip(resampled, spacing, settings["spacing"], strict=True)
        )
        resampled = tuple(max(1, round(extent)) for extent in extents)
    elif settings["size"] is not None:
        resampled = tuple(settings["size"])
    return PreparedGrid(order, flips, box, resampled, tuple(settings["size"] or resampled))


def find_reorientation(affine: Array, wanted: str | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Order and flips that bring axes closest to an orientation such as RAS."""
    if wanted is None:
        return (0, 1, 2), (False, False, False)
    has = find_axes(affine)
    wants = [("RAS".find(c), 1) if c in "RAS" else ("LPI".find(c), -1) for c in wanted.upper()]
    order = tuple([axis for axis, _ in has].index(target) for target, _ in wants)
    return order, tuple(has[axis][1] != sign for axis, (_, sign) in zip(order, wants, strict=True))


def reorient(data: Array, order: Sequence[int], flips: Sequence[bool]) -> Array:
    data = data.transpose(0, *(axis + 1 for axis in order))
    return data[(slice(None), *(slice(None, None, -1 if flip else 1) for flip in flips))]


def invert(order: Sequence[int], flips: Sequence[bool]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    back = tuple(order.index(axis) for axis in range(len(order)))
    return back, tuple(flips[axis] for axis in back)


def as_index(box: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return (slice(None), *(slice(*side) for side in box))


def find_body(data: Array, margin: int) -> tuple[tuple[int, int], ...]:
    """The box around all that is not empty: not the value of all corners, or else not the darkest."""
    inside: Array = np.zeros(data.shape[1:], dtype=bool)
    for channel in data:
        corners = channel[tuple(slice(None, None, max(1, side - 1)) for side in channel.shape)]
        is_same = bool((corners == corners.flat[0]).all())
        inside |= channel != (corners.flat[0] if is_same else channel.min())
    box = []
    for axis, side in enumerate(inside.shape):
        along = np.flatnonzero(inside.any(axis=tuple(a for a in range(inside.ndim) if a != axis)))
        low, high = (int(along[0]), int(along[-1])) if len(along) else (0, side - 1)
        box.append((max(0, low - margin), min(side, high + 1 + margin)))
    return tuple(box)


def resample(data: Array, size: Sequence[int]) -> Array:
    """(C, *spatial) -> (C, *size): linear between voxel centres, smoothed first along axes that shrink.

    The same as PyTorch's interpolate(mode="bilinear", antialias=True), axis by axis.
    """
    sparse = load_package("scipy.sparse")
    for axis in range(data.ndim - 1, 0, -1):
        if data.shape[axis] != size[axis - 1]:
            moved = np.moveaxis(data, axis, 0)
            matrix = sparse.csr_array(interpolation(data.shape[axis], size[axis - 1]))
            rows = matrix @ np.ascontiguousarray(moved).reshape(data.shape[axis], -1)
            data = np.moveaxis(rows.reshape(size[axis - 1], *moved.shape[1:]), 0, axis)
    return np.ascontiguousarray(data)


def interpolation(sides: int, size: int) -> Array:
    """The weights (size, sides) of a triangle filter, in float32 as PyTorch computes them."""
    f = np.float32
    scale = f(sides) / f(size)
    support = max(scale, f(1))
    weights = np.zeros((size, sides), f)
    for place in range(size):
        centre = scale * f(place + 0.5)
        start = max(int(centre - support + f(0.5)), 0)
        stop = min(int(centre + support + f(0.5)), sides)
        distance = np.abs(np.arange(start, stop, dtype=f) - centre + f(0.5)) * (f(1) / support)
        each = np.maximum(f(0), f(1) - distance)
        weights[place, start:stop] = each / each.sum()
    return weights


def normalise(data: Array, settings: Facts) -> Array:
    """Intensities, scaled channel by channel (maximum: by one number; ct: as in the training cases)."""
    kind, largest = settings["normalise"], float(np.abs(data).max())
    if kind == "none":
        return data
    if kind == "maximum":
        return data / np.float32(max(largest, 1e-6))
    if kind == "ct":
        rows = settings["intensities"]
        return np.stack([normalise_ct(channel, row) for channel, row in zip(data, rows, strict=True)])
    least = max(1e-5 * largest, 1e-12)  # below it, differences are rounding
    return np.stack([scale_channel(channel, kind, least, settings) for channel in data])


def normalise_ct(data: Array, row: Sequence[float] | None) -> Array:
    """Clip, subtract the mean, divide by the SD; a channel without a row has a z-score of its own."""
    if row is None:
        return zscore(data, max(1e-5 * float(np.abs(data).max()), 1e-12))
    low, high, mean, deviation = (np.float32(value) for value in row)
    return np.asarray((np.clip(data, low, high) - mean) / deviation)


def scale_channel(data: Array, kind: str, least: float, settings: Facts) -> Array:
    if kind == "zscore":
        return zscore(data, least)
    if kind == "zscore_nonzero":
        inside, result = data > 0, np.zeros_like(data)
        result[inside] = zscore(data[inside], least) if inside.any() else 0
        return result
    if kind == "window":
        centre, width = settings["window"]
        low, high, least = centre - width / 2, centre + width / 2, 0.0
    else:
        ends = settings["percentiles"] if kind == "percentile" else (0, 100)
        low, high = (float(value) for value in np.percentile(data, ends))
    scaled = (
        np.clip((data - np.float32(low)) / np.float32(high - low), 0, 1) if high - low > least else 0 * data
    )
    return np.asarray(scaled)


def zscore(data: Array, least: float) -> Array:
    mean, deviation = float(data.mean(dtype=np.float64)), float(data.std(dtype=np.float64))
    return (data - np.float32(mean)) / np.float32(deviation) if deviation > least else np.zeros_like(data)


def pad_or_crop(data: Array, offset: Sequence[int], size: Sequence[int], fill: Array) -> Array:
    """The part of (C, *spatial) that starts at offset, filled where it reaches outside."""
    result = np.empty((len(data), *size), dtype=data.dtype)
    result[:] = fill.reshape(-1, *[1] * len(size))
    source, target = [slice(None)], [slice(None)]
    for first, voxels, has in zip(offset, size, data.shape[1:], strict=True):
        start, stop = max(first, 0), max(min(first + voxels, has), max(first, 0))
        source.append(slice(start, stop))
        target.append(slice(start - first, stop - first))
    result[tuple(target)] = data[tuple(source)]
    return result


# The network


Network = Callable[[Array], Array]


def open_network(path: Path) -> Network:
    """(C, *spatial) -> logits (outputs, *spatial)."""
    runtime = load_package("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def forward(image: Array) -> Array:
        found: Array = session.run(["logits"], {"image": np.ascontiguousarray(image[None])})[0][0]
        return found

    return forward


def slide(image: Array, facts: Facts, network: Network) -> Array:
    """Logits of a whole image: the mean over overlapping windows, weighted by a Gaussian (MONAI's)."""
    spatial, windows = image.shape[1:], facts["windows"]
    wanted = windows["size"]
    if wanted is None:
        is_huge = len(spatial) == 2 and math.prod(spatial) > windows["huge_picture"]
        wanted = windows["tile"] if is_huge else windows["largest_volume"] if len(spatial) == 3 else spatial
    window = [min(pair) for pair in zip(wanted, spatial, strict=True)]
    if tuple(window) == spatial:
        return mirrored(image, facts, network)
    weight, total, count = window_weights(window, windows), None, np.zeros(spatial, np.float32)
    starts = [list(list_starts(*pair, windows["overlap"])) for pair in zip(spatial, window, strict=True)]
    for corner in itertools.product(*starts):
        part = tuple(slice(start, start + side) for start, side in zip(corner, window, strict=True))
        logits = mirrored(image[(slice(None), *part)], facts, network) * weight
        total = np.zeros((len(logits), *spatial), np.float32) if total is None else total
        total[(slice(None), *part)] += logits
        count[part] += weight
    assert total is not None
    return total / count


def list_starts(side: int, window: int, overlap: float) -> Iterator[int]:
    step = window if window == side else max(1, int(window * (1 - overlap)))
    for number in range(math.ceil((side - window) / step) + 1):
        yield min(number * step, side - window)


def window_weights(window: Sequence[int], windows: Facts) -> Array:
    weight: Array = np.ones(())
    for side in window:
        x = np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2)
        weight = weight[..., None] * np.exp(x**2 / np.float32(-2 * (side * windows["sigma"]) ** 2))
    return np.maximum(weight, max(float(weight.min()), windows["least_weight"])).astype(np.float32)


def mirrored(image: Array, facts: Facts, network: Network) -> Array:
    """Logits; with test-time augmentation those of the mean over mirror images."""
    if not facts["tta"]:
        return network(image)
    axes = [axis + 1 for axis in facts["mirror_axes"]]
    sets = [s for count in range(len(axes) + 1) for s in itertools.combinations(axes, count)]
    views = (np.flip(to_average(network(np.flip(image, s)), facts["logits"]), s) for s in sets)
    return from_average(np.asarray(sum(views)) / np.float32(len(sets)), facts["logits"])


# Logits: softmax; sigmoid, where output k paints a class over earlier ones; or evidence of a Dirichlet


def to_average(logits: Array, rule: Facts) -> Array:
    """What a mean over mirror images is taken of."""
    if rule["kind"] == "softmax":
        return np.exp(log_softmax(logits))
    return evidence(logits, rule) if rule["kind"] == "dirichlet" else np.exp(-softplus(-logits))


def from_average(mean: Array, rule: Facts) -> Array:
    """Logits that stand for such a mean."""
    least = np.finfo(np.float32).tiny
    logs = np.log(np.maximum(mean, least))
    if rule["kind"] == "softmax":
        return logs
    if rule["kind"] == "sigmoid":
        return np.asarray(logs - np.log(np.maximum(1 - mean, least)))
    if rule["evidence"] == "softplus":
        return np.maximum(mean, least) + np.log(-np.expm1(-np.maximum(mean, least)))
    if rule["cap_kind"] == "hard":
        return logs
    below = np.maximum(rule["cap"] - logs, np.finfo(np.float32).eps)
    return np.asarray(rule["cap"] - below - np.log(-np.expm1(-below)))


def probabilities(logits: Array, facts: Facts) -> Array:
    """Of each class, background first, after the temperature: (classes, *spatial)."""
    rule, scores = facts["logits"], logits.astype(np.float64)
    if rule["kind"] == "dirichlet":
        scores = np.log(evidence(scores, rule) + 1)
    elif rule["kind"] == "sigmoid":  # a class: its output is there, and no later one
        later = np.cumsum(-softplus(scores)[::-1], axis=0)[::-1]
        each = -softplus(-scores) + np.concatenate([later[1:], np.zeros_like(later[:1])])
        scores = np.concatenate([later[:1], each[np.argsort(rule["paints"])]])
    return np.asarray(np.exp(log_softmax(scores / facts["temperature"])), np.float32)


def decide(logits: Array, rule: Facts) -> Array:
    """The class of each voxel."""
    if rule["kind"] != "sigmoid":
        return logits.argmax(axis=0).astype(np.uint8)
    label = np.zeros(logits.shape[1:], np.uint8)
    for output, number in zip(logits, rule["paints"], strict=True):
        label[output > 0] = number
    return label


def evidence(logits: Array, rule: Facts) -> Array:
    if rule["evidence"] == "softplus":
        return softplus(logits)
    cap = rule["cap"]
    return np.exp(cap - softplus(cap - logits) if rule["cap_kind"] == "smooth" else np.minimum(logits, cap))


def softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(x, x.dtype.type(0)))


def log_softmax(x: Array) -> Array:
    x = x - x.max(axis=0)
    return np.asarray(x - np.log(np.exp(x).sum(axis=0)))


def keep_largest(label: Array) -> Array:
    """Only the largest connected part of each class."""
    kept = np.zeros_like(label)
    for number in np.unique(label[label > 0]):
        parts, _ = load_package("scipy.ndimage").label(label == number)
        sizes = np.bincount(parts.ravel())
        sizes[0] = 0
        kept[parts == sizes.argmax()] = number
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description="Segment a scan with the model in this folder.")
    parser.add_argument("scan", nargs="+", type=Path, help="the scan; or one file a channel, in their order")
    parser.add_argument("mask", type=Path, help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a mask that exists")
    given = parser.parse_args()
    try:
        check_target(given.mask, given.scan, given.overwrite)
        write_mask(segment(given.scan), given.mask, given.scan[0])
    except (RefusedScan, OSError, ValueError, EOFError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"{given.mask}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
