"""METRICS, name -> metric; their units; and `measure`, which scores one case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.metrics.overlap import (
    Confusion,
    EmptyPolicy,
    Mask,
    check_same_shape,
    confusion,
    dice,
    iou,
    precision,
    relative_volume_difference,
    sensitivity,
    specificity,
    volume_difference,
)
from wardround.metrics.surface import SurfaceDistances, SurfacePenalty
from wardround.plugins import Registry

MM, PX, MM_OR_PX = "mm", "px", "mm or px"  # units of distances; pictures have no millimetres
UNITS: dict[str, dict[str, str]] = {
    "mm": {MM: "mm", PX: "px", MM_OR_PX: "mm or px"},
    "ml": {MM: "ml", PX: "1000 px", MM_OR_PX: "ml or 1000 px"},
}
BOTH = "Where a file has no spacing, distances are in pixels (px), else in mm."


def combine_units(found: Iterable[str]) -> str:
    """The unit of distances of several cases or runs together; mm where there are none.

    >>> combine_units(["px", "px"]), combine_units(["mm", "px"]), combine_units([])
    ('px', 'mm or px', 'mm')
    """
    kinds = set(found)
    return MM_OR_PX if len(kinds) > 1 else next(iter(kinds), MM)


@dataclass(frozen=True, eq=False)
class MaskPair:
    """Predicted and true mask of a region; masks, counts and distances are computed on first use.

    masks: returns the two masks; known: their counts, where these are known already.
    """

    masks: Callable[[], tuple[Mask, Mask]]
    spacing: Sequence[float]
    tolerance: float = 1.0
    empty_policy: EmptyPolicy = "defined"
    surface_penalty: SurfacePenalty = "inf"
    known: Confusion | None = None

    @cached_property
    def pair(self) -> tuple[Mask, Mask]:
        return self.masks()

    @cached_property
    def counts(self) -> Confusion:
        return confusion(*self.pair) if self.known is None else self.known

    @cached_property
    def surface(self) -> SurfaceDistances:
        return SurfaceDistances.of(
            *self.pair, self.spacing, empty_policy=self.empty_policy, surface_penalty=self.surface_penalty
        )


@dataclass(frozen=True)
class Metric:
    """A number that says how similar two masks are.

    best: its value for two equal masks. higher_is_better: None for signed differences, where the
    value closest to `best` is better. unit: for cases with a spacing, "" for a plain number.
    """

    name: str
    label: str
    best: float
    higher_is_better: bool | None
    unit: str
    is_surface: bool
    of: Callable[[MaskPair], float]

    def title_in(self, units: str = MM) -> str:
        """The heading of a table's column: `HD95 (mm)`; units: of distances of the cases."""
        unit = self.unit_in(units)
        return f"{self.label} ({unit})" if unit else self.label

    def unit_in(self, units: str = MM) -> str:
        """Its unit where distances are in mm, in px, or in either; "" where that is not known."""
        return UNITS.get(self.unit, {}).get(units, "")


def _share(name: str, label: str, of: Callable[[MaskPair], float], is_surface: bool = False) -> Metric:
    return Metric(name, label, best=1.0, higher_is_better=True, unit="", is_surface=is_surface, of=of)


def _distance(name: str, label: str, of: Callable[[MaskPair], float]) -> Metric:
    return Metric(name, label, best=0.0, higher_is_better=False, unit="mm", is_surface=True, of=of)


def _difference(name: str, label: str, unit: str, of: Callable[[MaskPair], float]) -> Metric:
    return Metric(name, label, best=0.0, higher_is_better=None, unit=unit, is_surface=False, of=of)


_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _share("dice", "Dice", lambda c: dice(c.counts, c.empty_policy)),
        _share("iou", "IoU", lambda c: iou(c.counts, c.empty_policy)),
        _share("precision", "Precision", lambda c: precision(c.counts, c.empty_policy)),
        _share("sensitivity", "Sensitivity", lambda c: sensitivity(c.counts, c.empty_policy)),
        _share("specificity", "Specificity", lambda c: specificity(c.counts, c.empty_policy)),
        _distance("hd95", "HD95", lambda c: c.surface.hd95()),
        _distance("hd95_pooled", "HD95 pooled", lambda c: c.surface.hd95("pooled")),
        _distance("assd", "ASSD", lambda c: c.surface.assd()),
        _distance("assd_mean_directed", "ASSD mean directed", lambda c: c.surface.assd("mean_directed")),
        _distance("asd", "ASD", lambda c: c.surface.asd()),
        _share(
            "surface_dice", "Surface Dice", lambda c: c.surface.surface_dice(c.tolerance), is_surface=True
        ),
        _difference(
            "volume_difference", "Volume difference", "ml", lambda c: volume_difference(c.counts, c.spacing)
        ),
        _difference(
            "relative_volume_difference",
            "Relative volume difference",
            "",
            lambda c: relative_volume_difference(c.counts, c.empty_policy),
        ),
    )
}


SHARES = frozenset(name for name, metric in _METRICS.items() if metric.best == 1.0)
"""Metrics of our own that lie between 0 and 1."""


def accept_metric(name: str, found: Any) -> Metric | None:
    """A metric of the user, under the name that was asked for; a function of two masks and the spacing is one
    whose best value is 1."""
    if isinstance(found, Metric):
        return replace(found, name=name)
    if isinstance(found, type) or not callable(found):
        return None
    label = getattr(found, "__name__", name).replace("_", " ").capitalize()
    return Metric(name, label, 1.0, True, "", True, lambda c: float(found(*c.pair, c.spacing)))


METRICS = Registry(
    "metric", _METRICS, accept_metric, "a wardround.Metric or a function of two masks", has_command=False
)


def measure(
    pred_labels: NDArray[np.generic],
    true_labels: NDArray[np.generic],
    regions: Mapping[str, Sequence[int]],
    metrics: Sequence[str],
    spacing: Sequence[float],
    *,
    tolerance: float = 1.0,
    empty_policy: EmptyPolicy = "defined",
    surface_penalty: SurfacePenalty = "inf",
    counts: Mapping[str, Confusion] | None = None,
) -> dict[str, dict[str, float]]:
    """Score one case: region name -> metric name -> value.

    regions: the label values each region joins; regions may overlap, as disc [1, 2] and cup [2] do.
    spacing: mm per voxel, in the order of the axes; tolerance: mm, for surface Dice.
    counts: of each region, where known already; the labels are then used for surface metrics alone.

    >>> scan = np.array([[0, 1, 2, 2]])
    >>> measure(scan, scan, {"disc": [1, 2], "cup": [2]}, ["dice"], spacing=(1.0, 1.0))
    {'disc': {'dice': 1.0}, 'cup': {'dice': 1.0}}
    """
    check_same_shape(pred_labels, true_labels)
    scores = {}
    for region, labels in regions.items():

        def masks(labels: Sequence[int] = labels) -> tuple[Mask, Mask]:
            return _join(pred_labels, labels), _join(true_labels, labels)

        known = None if counts is None else counts[region]
        pair = MaskPair(masks, spacing, tolerance, empty_policy, surface_penalty, known)
        scores[region] = {name: METRICS[name].of(pair) for name in metrics}
    return scores


def _join(labels: NDArray[np.generic], values: Sequence[int]) -> Mask:
    """Where the label is one of the values; a few comparisons are faster than `np.isin`."""
    mask = np.zeros(labels.shape, dtype=np.bool_)
    for value in values:
        mask |= labels == value
    return mask
