"""Results: the prediction of one scan, on the scan's own grid; of a volume also from its slices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.preparing.geometry import Geometry, invert_label, invert_probabilities
from wardround.data.preparing.record import Preparation
from wardround.data.readers.image_files import Volume
from wardround.data.slices.cutting import Slices
from wardround.prediction.inputs import Scan
from wardround.text import format_size
from wardround.uncertainty.maps import Predicted

Array = NDArray[Any]


@dataclass(frozen=True)
class Prediction:
    """The prediction of one scan, on the scan's own grid.

    mask: uint8, the values the training labels had in their files; classes: value -> name; probabilities:
    (classes, *shape) float32, background first, or None; uncertainty: total, epistemic, aleatoric where the
    model separates them, each (*shape) float32 in nats, empty if not requested; affine: voxel to millimetres,
    None if the file has none; spacing: millimetres per voxel, of the axes longer than one; sizes: class ->
    number of voxels and, if millimetres are known, ml (volumes) or mm2 (pictures); doubt: one number for the
    case, how little mask and probabilities overlap, to rank cases by (not an estimate of Dice); structures:
    the same by class; mean and highest: of the total map over the scan; kind: source of the uncertainty;
    slices: the axis along which a 2D network went through a volume; absent: channels the scan did not have.
    """

    scan: Scan
    mask: NDArray[np.uint8]
    classes: Mapping[int, str]
    probabilities: NDArray[np.float32] | None
    uncertainty: Mapping[str, NDArray[np.float32]]
    affine: NDArray[np.float64] | None
    spacing: tuple[float, ...]
    sizes: Mapping[str, Mapping[str, float]]
    doubt: float
    structures: Mapping[str, float]
    mean: float
    highest: float
    kind: str
    warnings: tuple[str, ...] = ()
    slices: str | None = None
    absent: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.scan.name

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {size['voxels']:g} voxels" for name, size in self.sizes.items())
        return f"<Prediction {self.name}: {format_size(self.mask.shape)}, {found}, doubt {self.doubt:.3f}>"

    def as_dict(self) -> dict[str, Any]:
        """All but the arrays, for predictions.json."""
        uncertainty = {"kind": self.kind, "case": self.doubt, "mean": self.mean, "maximum": self.highest}
        return {
            "inputs": [str(file) for file in self.scan.files],
            "shape": list(self.mask.shape),
            "spacing": list(self.spacing) if self.affine is not None else None,
            **({"slices": self.slices} if self.slices else {}),
            **({"absent_channels": list(self.absent)} if self.absent else {}),
            "classes": {
                name: {"value": value, **self.sizes[name], "uncertainty": self.structures[name]}
                for value, name in self.classes.items()
                if name in self.sizes
            },
            "uncertainty": uncertainty,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class GridPrediction:
    """The prediction of an image: on the prepared grid, and classes and maps on its own grid.

    unlike, far: warnings about uncertainty and voxel size beyond those of the run's scans.
    """

    predicted: Predicted
    label: NDArray[np.uint8]
    maps: Mapping[str, NDArray[np.float32]]
    probabilities: NDArray[np.float32] | None
    unlike: tuple[str, ...]
    far: tuple[str, ...]


def join_slices(seen: Sequence[GridPrediction], slices: Slices) -> GridPrediction:
    """Slices as one volume; on the prepared grid, voxels are flattened, which is enough for sums."""

    def joined(planes: Sequence[Array]) -> Array:
        whole: Array = slices.join([plane[None] for plane in planes])[0]
        return whole

    def row(name: str) -> Tensor | None:
        parts = [getattr(one.predicted, name) for one in seen]
        if parts[0] is None:
            return None
        return torch.cat([part.flatten(1 if name == "probabilities" else 0).cpu() for part in parts], dim=-1)

    fields = {name: row(name) for name in ("probabilities", "label", "total", "epistemic", "aleatoric")}
    maps = {name: joined([one.maps[name] for one in seen]) for name in seen[0].maps}
    kept = [one.probabilities for one in seen if one.probabilities is not None]
    shares = slices.join(kept) if kept else None
    label = joined([one.label for one in seen])
    predicted = Predicted(**fields, kind=seen[0].predicted.kind)  # type: ignore[arg-type]
    return GridPrediction(predicted, label, maps, shares, tuple(join_warnings(seen)), seen[0].far)


def join_warnings(seen: Sequence[GridPrediction]) -> Iterator[str]:
    """Warnings shared, apart from their numbers, by more than half of the slices with foreground."""
    if len(seen) == 1:
        yield from seen[0].unlike
        return
    shown = [one for one in seen if one.label.any()]
    kinds: dict[str, list[str]] = {}
    for one in shown:
        for sentence in one.unlike:
            kinds.setdefault(re.sub(r"[\d.]+", "#", sentence), []).append(sentence)
    for said in kinds.values():
        if 2 * len(said) > len(shown):
            yield f"{len(said)} of {len(shown)} slices with foreground, such as one where {said[0]}"


# On the scan's own grid


def restore_mask(predicted: Predicted, geometry: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Classes (*shape) on the scan's own grid."""
    way = Geometry.from_dict(geometry)
    if [stop - start for start, stop in way.box] == list(way.resampled):
        return invert_label(predicted.label, geometry)
    best: NDArray[np.float32] | None = None
    mask: NDArray[np.uint8] = np.zeros(way.shape, dtype=np.uint8)
    for number in range(len(predicted.probabilities)):
        share = invert_probabilities(predicted.probabilities[number : number + 1], geometry)[0]
        if best is None:
            best = share
            continue
        wins = share > best
        mask[wins] = number
        np.maximum(best, share, out=best)
    return mask


def measure_classes(
    label: NDArray[np.uint8], image: Volume, preparation: Preparation
) -> dict[str, dict[str, float]]:
    """Voxels of each class, and its volume in ml or area in mm2 if millimetres are known."""
    counts = np.bincount(label.reshape(-1), minlength=preparation.num_classes)
    sizes: dict[str, dict[str, float]] = {}
    for number, name in preparation.numbered:
        sizes[name] = {"voxels": int(counts[number])}
        if image.affine is not None:
            dims = len(image.spatial)
            unit, scale = ("ml", 1000.0) if dims == 3 else ("mm2", 1.0)
            sizes[name][unit] = float(counts[number]) * voxel_size(image) / scale
    return sizes


def voxel_size(image: Volume) -> float:
    """mm3 of a voxel (mm2 of a pixel), whatever the angles between its sides."""
    assert image.affine is not None
    axes = [axis for axis in range(3) if axis != image.thin][: len(image.spatial)]
    sides = image.affine[:3, axes]
    return float(np.sqrt(np.linalg.det(sides.T @ sides)))
