"""Results: what models say of one scan, on the scan's own grid; of a volume, from its slices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.preparing.geometry import Geometry
from wardround.data.preparing.prepare import invert_label, invert_probabilities
from wardround.data.preparing.record import Preparation
from wardround.data.readers.image_files import Volume
from wardround.data.slices.view import Slices
from wardround.prediction.inputs import Scan
from wardround.uncertainty.maps import Predicted

Array = NDArray[Any]


@dataclass(frozen=True)
class Prediction:
    """What a model says of one scan, on the scan's own grid.

    mask: uint8, the values the training labels had in their files; classes: value -> name; probabilities:
    (classes, *shape) float32, background first, or None; uncertainty: total, epistemic, aleatoric where the
    model tells them apart, each (*shape) float32 in nats, empty if not asked for; affine: voxel to
    millimetres, None where the file has none; spacing: millimetres a voxel, of the axes longer than one;
    sizes: class -> number of voxels and, where millimetres are known, ml (volumes) or mm2 (pictures);
    doubt: one number for the case, how little mask and probabilities overlap, to rank cases by (it is no
    estimate of Dice); structures: the same by class; mean and highest: of the total map over the scan; kind:
    where the uncertainty comes from; slices: the axis along which a 2D network went through a volume.
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

    @property
    def name(self) -> str:
        return self.scan.name

    def facts(self) -> dict[str, Any]:
        """All but the arrays, for predictions.json."""
        return {
            "inputs": [str(file) for file in self.scan.files],
            "shape": list(self.mask.shape),
            "spacing": list(self.spacing) if self.affine is not None else None,
            **({"slices": self.slices} if self.slices else {}),
            "classes": {
                name: {"value": value, **self.sizes[name], "uncertainty": self.structures[name]}
                for value, name in self.classes.items()
                if name in self.sizes
            },
            "uncertainty": {
                "kind": self.kind,
                "case": self.doubt,
                "mean": self.mean,
                "maximum": self.highest,
            },
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Seen:
    """What the models say of an image: on the prepared grid, and the classes and maps on its own.

    unlike, far: warnings of scans unlike those of the training, and of voxels of another size.
    """

    predicted: Predicted
    label: NDArray[np.uint8]
    maps: Mapping[str, NDArray[np.float32]]
    probabilities: NDArray[np.float32] | None
    unlike: tuple[str, ...]
    far: tuple[str, ...]


def as_volume(seen: Sequence[Seen], slices: Slices) -> Seen:
    """Slices as one volume; what lies on the prepared grid is a row of voxels, for its sums."""

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
    return Seen(
        Predicted(**fields, kind=seen[0].predicted.kind),  # type: ignore[arg-type]
        joined([one.label for one in seen]),
        maps,
        slices.join(kept) if kept else None,
        tuple(most_say(seen)),
        seen[0].far,
    )


def most_say(seen: Sequence[Seen]) -> Iterator[str]:
    """Warnings that more than half of the slices with something on them have in common, in kind."""
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
            yield f"{len(said)} of {len(shown)} slices with something on them, such as one where {said[0]}"


# On the scan's own grid


def mask_on_grid(predicted: Predicted, geometry: Mapping[str, Any]) -> NDArray[np.uint8]:
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


def measured(
    label: NDArray[np.uint8], image: Volume, preparation: Preparation
) -> dict[str, dict[str, float]]:
    """Voxels of each class, and its volume in ml or its area in mm2 where millimetres are known."""
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
    """mm3 (mm2 of a picture) one voxel takes up, whatever the angles between its sides."""
    assert image.affine is not None
    axes = [axis for axis in range(3) if axis != image.thin][: len(image.spatial)]
    sides = image.affine[:3, axes]
    return float(np.sqrt(np.linalg.det(sides.T @ sides)))
