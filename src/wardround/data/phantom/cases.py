"""Cases: head scans with lesions at synthetic hospitals, drawn from a seed, 2D or 3D.

Every case is one synthetic patient: a head in millimetres (scalp, skull, folded cortex, white matter,
ventricles) with lesions of irregular outline. A 2D case is one axial slice of such a head, a 3D case a
whole volume. What a scan looks like depends on the hospital: its sequence, noise, bias field, resolution,
its patients' lesions and its annotator's style are the fields of `PhantomHospital`.

Two stages: `make_scan` returns what the scanner stores (whole numbers), `make_case` what a network reads
(zero mean and unit variance, per case and channel).

Every draw comes from (seed, hospital, case, purpose), so a hospital can be made alone, in any order.

Spatial axes are rows (front to back), columns (the patient's right to left) and, in 3D, slices (bottom to
top): `image[0]` of a 2D case and `image[0, :, :, k]` of a 3D case are upright pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator, model_validator

from wardround.data.annotation import Annotation, annotations_of
from wardround.data.cases import Case, ClientData, TensorSplit, blank_label
from wardround.data.phantom.scans import (
    DESIGNED,
    Organ,
    PhantomHospital,
    acquire,
    annotate,
    annotate_organs,
    blend,
    draw_head,
    draw_lesions,
    draw_style,
    make_generator,
    make_grid,
)
from wardround.errors import ConfigError, DataError
from wardround.settings import Settings

Array = NDArray[np.float32]


class PhantomSettings(Settings):
    """Settings of a federation of synthetic hospitals."""

    hospitals: int = Field(default=3, ge=1, le=99, description="Number of hospitals.")
    dimensions: Literal[2, 3] = Field(default=2, description="2 for slices, 3 for volumes.")
    size: int | list[int] | None = Field(
        default=None,
        description="Voxels along each axis, 16 to 512: one number, or one per axis. "
        "Left out: 64 in 2D, 32 in 3D.",
    )
    cases: int | list[int] | None = Field(
        default=None,
        description="Cases of each hospital, all splits together: one number, or one per hospital. "
        "Left out: 60, 48, 32, 40, and 30 at each further hospital.",
    )
    num_classes: Literal[2, 3] = Field(
        default=2, description="2: background and lesion; 3: background, lesion rim and lesion core."
    )
    organs: tuple[Organ, ...] = Field(
        default=(),
        description="Classes in place of the lesion alone, in this order: skull, nuclei, ventricles, lesion.",
    )
    annotates: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Hospital -> the classes it annotates; its labels hold no others. Left out: all.",
    )
    unlabelled: tuple[str, ...] = Field(
        default=(),
        description="Hospitals without any label: they train without, and are not validated or tested.",
    )
    channels: int = Field(
        default=1, ge=1, le=4, description="Sequences of each scan; each shows other tissue."
    )
    lacks: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Hospital -> channels its scans do not have, of channel_0, channel_1 ... Left out: none.",
    )
    heterogeneity: float = Field(
        default=1.0,
        ge=0.0,
        le=2.0,
        description="How much hospitals differ: 0, all alike; 1, as designed; 2, exaggerated.",
    )
    split: tuple[float, float, float] = Field(
        default=(0.6, 0.15, 0.25),
        description="Shares of training, validation and test cases; above 0, together 1.",
    )
    seed: int | None = Field(
        default=None, ge=0, description="Seed of the synthetic patients. Left out: the run's seed."
    )

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: int | list[int] | None, info: ValidationInfo) -> int | list[int] | None:
        dimensions = info.data.get("dimensions")
        if isinstance(size, list) and dimensions and len(size) != dimensions:
            raise ValueError(f"has {len(size)} numbers; give one, or {dimensions} for {dimensions}D")
        if not all(16 <= voxels <= 512 for voxels in _as_list(size)):
            raise ValueError("each axis needs 16 to 512 voxels")
        return size

    @field_validator("cases")
    @classmethod
    def _check_cases(cls, cases: int | list[int] | None, info: ValidationInfo) -> int | list[int] | None:
        hospitals = info.data.get("hospitals")
        if isinstance(cases, list) and hospitals and len(cases) != hospitals:
            raise ValueError(
                f"has {len(cases)} numbers for {hospitals} hospitals; give one each, or one for all"
            )
        if not all(0 <= count <= 10_000 for count in _as_list(cases)):
            raise ValueError("each hospital has 0 to 10000 cases")
        return cases

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: tuple[float, float, float]) -> tuple[float, float, float]:
        if not all(share > 0 for share in split) or abs(sum(split) - 1) > 1e-6:
            raise ValueError("three shares above 0 must add up to 1")
        return split

    @model_validator(mode="after")
    def _check_annotates(self) -> Self:
        if len(set(self.organs)) != len(self.organs):
            raise ValueError("organs names one twice")
        if self.organs and self.num_classes != 2:
            raise ValueError("organs and num_classes are both given; leave num_classes out")
        unknown = [name for name in self.unlabelled if name not in list_hospitals(self)]
        if unknown:
            raise ValueError(f"unlabelled names '{unknown[0]}', which is not one of the hospitals")
        try:
            annotations_of(self.annotates, self.classes, {}, list_hospitals(self))
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _check_lacks(self) -> Self:
        hospitals = list_hospitals(self)
        for hospital, names in self.lacks.items():
            if hospital not in hospitals:
                raise ValueError(f"lacks names '{hospital}'; the hospitals are {', '.join(hospitals)}")
            unknown = sorted(set(names) - set(self.channel_names))
            if unknown:
                raise ValueError(
                    f"lacks.{hospital} names '{unknown[0]}'; there are {', '.join(self.channel_names)}"
                )
            if not self.places(hospital):
                raise ValueError(f"lacks.{hospital} names every channel; leave it one")
        return self

    @property
    def channel_names(self) -> tuple[str, ...]:
        return tuple(f"channel_{number}" for number in range(self.channels))

    def places(self, hospital: str) -> list[int]:
        """Which channels its scans have."""
        lacking = self.lacks.get(hospital, ())
        return [number for number, name in enumerate(self.channel_names) if name not in lacking]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, without background."""
        return self.organs or (("lesion",) if self.num_classes == 2 else ("rim", "core"))

    @property
    def annotations(self) -> dict[str, Annotation]:
        """Of each hospital that does not annotate everything."""
        return annotations_of(self.annotates, self.classes, {}, list_hospitals(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        if isinstance(self.size, list):
            return tuple(self.size)
        return (self.size or (64 if self.dimensions == 2 else 32),) * self.dimensions


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class PhantomScan:
    """One case as the scanner and the annotator store it.

    image: (C, *spatial) int16 scanner intensities; label: (*spatial) uint8; spacing: mm a voxel.
    """

    name: str
    image: NDArray[np.int16]
    label: NDArray[np.uint8]
    spacing: tuple[float, ...]


# Hospitals

_CASES = (60, 48, 32, 40)
_FURTHER_CASES = 30


def list_hospitals(settings: PhantomSettings) -> list[str]:
    """north, east, south, west, hospital-05, hospital-06, ..."""
    designed = [style.name for style in DESIGNED]
    further = [f"hospital-{number:02d}" for number in range(len(designed) + 1, settings.hospitals + 1)]
    return (designed + further)[: settings.hospitals]


def make_hospital(settings: PhantomSettings, index: int, seed: int) -> PhantomHospital:
    """The hospital at this index of `list_hospitals`; it does not depend on how many others there are.

    Only hospitals from the fifth on depend on the seed; `settings.seed` overrides `seed`.
    """
    name = list_hospitals(settings)[index]
    own = DESIGNED[index] if index < len(DESIGNED) else draw_style(name, _choose_seed(settings, seed))
    return replace(blend(own, settings.heterogeneity), name=name)


# Cases and splits


def count_cases(settings: PhantomSettings, name: str) -> int:
    """Cases of this hospital, all splits together."""
    index = _index(settings, name)
    if isinstance(settings.cases, list):
        return settings.cases[index]
    if settings.cases is not None:
        return settings.cases
    return _CASES[index] if index < len(_CASES) else _FURTHER_CASES


def count_split_cases(settings: PhantomSettings, name: str) -> tuple[int, int, int]:
    """Number of training, validation and test cases of this hospital.

    From three cases on, each split has at least one; one case is for training, a second for testing.
    """
    total = count_cases(settings, name)
    if total < 3:
        return min(total, 1), 0, max(total - 1, 0)
    _, val_share, test_share = settings.split
    val = min(max(1, round(total * val_share)), total - 2)
    test = min(max(1, round(total * test_share)), total - val - 1)
    return total - val - test, val, test


def choose_split(settings: PhantomSettings, name: str, number: int) -> str:
    """Which of "train", "val" and "test" holds this case; cases are numbered from 1."""
    train, val, _ = count_split_cases(settings, name)
    if number <= train:
        return "train"
    return "val" if number <= train + val else "test"


def make_client(settings: PhantomSettings, name: str, seed: int) -> ClientData:
    """All cases of one hospital, in their splits; `settings.seed` overrides `seed`."""
    style = make_hospital(settings, _index(settings, name), seed)
    cases: dict[str, list[Case]] = {"train": [], "val": [], "test": []}
    for number in range(1, count_cases(settings, name) + 1):
        cases[choose_split(settings, name, number)].append(make_case(settings, style, number, seed))
    if name in settings.unlabelled:
        bare = [replace(case, label=blank_label(case.image)) for case in cases["train"]]
        none = TensorSplit.of([])
        return ClientData(TensorSplit.of(bare), none, none, num_unlabelled=len(bare))
    train, val, test = (TensorSplit.of(members) for members in cases.values())
    return ClientData(train, val, test, settings.annotations.get(name), lacking=bool(settings.lacks))


def make_case(settings: PhantomSettings, hospital: PhantomHospital, number: int, seed: int) -> Case:
    """One case as a network reads it, from its number (1, 2, ...) at the hospital."""
    scan = make_scan(settings, hospital, number, seed)
    label = torch.from_numpy(scan.label.astype(np.int64))
    image = np.zeros((settings.channels, *label.shape), dtype=np.float32)
    image[settings.places(hospital.name)] = normalise(scan.image)
    return Case(scan.name, torch.from_numpy(image), label, scan.spacing)


def normalise(image: NDArray[np.generic]) -> Array:
    """Zero mean and unit variance in each channel; a constant channel becomes zero. (C, *spatial)"""
    values = image.astype(np.float64)
    spatial = tuple(range(1, values.ndim))
    values -= values.mean(axis=spatial, keepdims=True)
    deviation = values.std(axis=spatial, keepdims=True)
    return (values / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)


def _choose_seed(settings: PhantomSettings, seed: int) -> int:
    return seed if settings.seed is None else settings.seed


def _index(settings: PhantomSettings, name: str) -> int:
    names = list_hospitals(settings)
    if name not in names:
        raise DataError(f"There is no synthetic hospital {name!r}; choose from {', '.join(names)}.")
    return names.index(name)


# One scan


def make_scan(settings: PhantomSettings, hospital: PhantomHospital, number: int, seed: int) -> PhantomScan:
    """One case as the scanner stores it, from its number (1, 2, ...) at the hospital."""
    seed = _choose_seed(settings, seed)
    who = (seed, hospital.name, number)
    grid = make_grid(settings.shape, hospital)
    head = draw_head(make_generator(*who, "anatomy"), grid)

    lesion = None
    if not _is_healthy(settings, hospital, number, seed):
        lesion = draw_lesions(make_generator(*who, "lesions"), grid, head, hospital)
    if settings.organs:
        label = annotate_organs(head, lesion, grid, hospital, settings.organs)
    else:
        label = annotate(lesion, grid, hospital, settings.num_classes)
    annotation = settings.annotations.get(hospital.name)
    if annotation is not None:
        label = annotation.hide(torch.from_numpy(label)).numpy()
    channels = [
        acquire(make_generator(*who, "scanner", channel), grid, head, lesion, hospital, contrast)
        for channel, contrast in enumerate(hospital.contrasts[: settings.channels])
        if channel in settings.places(hospital.name)
    ]
    image = np.stack(channels)  # (C, rows, columns, slices)
    if settings.dimensions == 2:
        image, label = image[..., 0], label[..., 0]
    return PhantomScan(f"{hospital.name}-{number:03d}", image, label, grid.spacing[: settings.dimensions])


def _is_healthy(settings: PhantomSettings, hospital: PhantomHospital, number: int, seed: int) -> bool:
    """Whether the patient is healthy: the hospital's share of each split, to the nearest whole case."""
    train, val, test = count_split_cases(settings, hospital.name)
    split = choose_split(settings, hospital.name, number)
    first, size = {"train": (1, train), "val": (train + 1, val), "test": (train + val + 1, test)}[split]
    order = make_generator(seed, hospital.name, split, "healthy").permutation(size)
    return number - first in order[: round(hospital.empty * size)]
