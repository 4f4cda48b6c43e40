"""Made-up hospitals: head scans with lesions, drawn from a seed, 2D or 3D.

Every case is one made-up patient: a head in millimetres (scalp, skull, folded cortex, white matter,
ventricles) with lesions of irregular outline. A 2D case is one axial slice of such a head, a 3D case a
whole volume. What the scan looks like is the hospital's doing: its sequence, noise, bias field,
resolution, its patients' lesions and its annotator's hand are the fields of `Hospital`.

Two stages: `make_scan` gives what the scanner stores (whole numbers), `make_case` what a network reads
(zero mean and unit variance, per case and channel).

Every draw comes from (seed, hospital, case, purpose), so a hospital can be made alone, in any order.

Spatial axes are rows (front to back), columns (the patient's right to left) and, in 3D, slices (bottom to
top): `image[0]` of a 2D case and `image[0, :, :, k]` of a 3D case are upright pictures.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from wardround.data.cases import Case, ClientData, TensorSplit
from wardround.errors import DataError

Array = NDArray[np.float32]


class PhantomSettings(BaseModel):
    """Settings of a federation of made-up hospitals."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    channels: int = Field(
        default=1, ge=1, le=4, description="Sequences of each scan; each shows other tissue."
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
        default=None, ge=0, description="Seed of the made-up patients. Left out: the run's seed."
    )

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: int | list[int] | None, info: ValidationInfo) -> int | list[int] | None:
        dimensions = info.data.get("dimensions")
        if isinstance(size, list) and dimensions and len(size) != dimensions:
            raise ValueError(f"has {len(size)} numbers; give one, or {dimensions} for {dimensions}D")
        if not all(16 <= voxels <= 512 for voxels in _listed(size)):
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
        if not all(0 <= count <= 10_000 for count in _listed(cases)):
            raise ValueError("each hospital has 0 to 10000 cases")
        return cases

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: tuple[float, float, float]) -> tuple[float, float, float]:
        if not all(share > 0 for share in split) or abs(sum(split) - 1) > 1e-6:
            raise ValueError("three shares above 0 must add up to 1")
        return split

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        if isinstance(self.size, list):
            return tuple(self.size)
        return (self.size or (64 if self.dimensions == 2 else 32),) * self.dimensions


def _listed(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Contrast:
    """How bright each tissue is in one kind of scan, from 0 for air to about 1.

    lesion, core: brightness above white matter; below zero is darker.
    """

    scalp: float
    skull: float
    fluid: float
    grey: float
    white: float
    blood: float
    lesion: float
    core: float


@dataclass(frozen=True)
class Hospital:
    """What makes the scans, patients and labels of one hospital.

    contrasts: one per channel, at most four; the first is the hospital's own, the others are common.
    gamma: exponent on intensity; above 1 darkens the middle greys.
    noise: standard deviation, where the brightest tissue is about 1; rician: 0 Gaussian, 1 Rician.
    bias: how uneven the coil is, as log intensity from the centre to the edge; bias_angle: towards where,
    in radians: 0 is the patient's left, pi / 2 the back.
    blur: in-plane, mm; field_of_view: 1 fits a head; thickness: of slices in 3D, 1 fits a head.
    num_lesions: the mean; lesion_radius: the mean, mm; irregularity: of the outline, 0 is an ellipse;
    rim: how thick it is around the core, as a share of the radius.
    margin: mm the annotator draws outside (above 0) or inside the true outline; smoothing: of that line, mm.
    empty: share of cases without a lesion.
    gain: what the scanner stores for brightness 1.
    """

    name: str
    contrasts: tuple[Contrast, ...]
    gamma: float
    noise: float
    rician: float
    bias: float
    bias_angle: float
    blur: float
    field_of_view: float
    thickness: float
    num_lesions: float
    lesion_radius: float
    irregularity: float
    rim: float
    margin: float
    smoothing: float
    empty: float
    gain: float


@dataclass(frozen=True)
class Scan:
    """One case as the scanner and the annotator left it.

    image: (C, *spatial) int16 scanner intensities; label: (*spatial) uint8; spacing: mm a voxel.
    """

    name: str
    image: NDArray[np.int16]
    label: NDArray[np.uint8]
    spacing: tuple[float, ...]


# Hospitals

_FLAIR = Contrast(
    scalp=0.72, skull=0.10, fluid=0.12, grey=0.58, white=0.44, blood=0.36, lesion=0.40, core=0.30
)
_T1 = Contrast(
    scalp=0.85, skull=0.12, fluid=0.14, grey=0.56, white=0.70, blood=0.40, lesion=-0.40, core=-0.48
)
_T1_ENHANCED = replace(_T1, scalp=0.90, grey=0.58, blood=1.08, lesion=-0.44, core=0.30)
_T2 = Contrast(scalp=0.48, skull=0.08, fluid=0.94, grey=0.50, white=0.38, blood=0.40, lesion=0.44, core=0.52)
_PD = Contrast(scalp=0.62, skull=0.16, fluid=0.46, grey=0.70, white=0.56, blood=0.50, lesion=0.32, core=0.20)

_REFERENCE = Hospital(
    name="reference",
    contrasts=(_FLAIR, _T1, _T2, _PD),
    gamma=1.0,
    noise=0.035,
    rician=0.5,
    bias=0.12,
    bias_angle=0.0,
    blur=1.6,
    field_of_view=1.0,
    thickness=1.0,
    num_lesions=1.4,
    lesion_radius=18.0,
    irregularity=0.22,
    rim=0.26,
    margin=0.0,
    smoothing=1.0,
    empty=0.0,
    gain=1000.0,
)

_DESIGNED = (
    # A university hospital: crisp FLAIR, bright lesions, outlines drawn as they are.
    replace(
        _REFERENCE,
        name="north",
        noise=0.025,
        rician=0.3,
        bias=0.10,
        bias_angle=0.6,
        blur=1.2,
        num_lesions=1.3,
        lesion_radius=20.0,
        irregularity=0.24,
        rim=0.26,
        empty=0.06,
        gain=1100.0,
    ),
    # T1 with contrast agent: dark rim, bright core, bright vessels. An old coil; drawn generously.
    replace(
        _REFERENCE,
        name="east",
        contrasts=(_T1_ENHANCED, _T1, _T2, _PD),
        gamma=0.85,
        noise=0.04,
        rician=0.6,
        bias=0.28,
        bias_angle=3.0,
        blur=2.0,
        field_of_view=0.94,
        thickness=1.25,
        num_lesions=1.2,
        lesion_radius=22.0,
        irregularity=0.20,
        rim=0.16,
        margin=0.6,
        smoothing=2.0,
        empty=0.03,
        gain=420.0,
    ),
    # Fast T2: the fluid is as bright as any lesion; grainy and soft; several small lesions, drawn tightly.
    replace(
        _REFERENCE,
        name="south",
        contrasts=(_T2, _T1, _T2, _PD),
        gamma=1.15,
        noise=0.045,
        rician=1.0,
        bias=0.22,
        bias_angle=-1.4,
        blur=2.2,
        field_of_view=1.06,
        thickness=1.5,
        num_lesions=2.1,
        lesion_radius=17.0,
        irregularity=0.14,
        rim=0.26,
        margin=-0.6,
        smoothing=1.5,
        empty=0.06,
        gain=260.0,
    ),
    # Plain T1: the same disease is dark. An open coil; the annotator draws smooth outlines.
    replace(
        _REFERENCE,
        name="west",
        contrasts=(_T1, _T1, _T2, _PD),
        gamma=1.1,
        noise=0.03,
        rician=0.2,
        bias=0.30,
        bias_angle=1.7,
        blur=2.2,
        field_of_view=0.98,
        thickness=0.9,
        num_lesions=1.6,
        lesion_radius=19.0,
        irregularity=0.28,
        rim=0.30,
        margin=1.0,
        smoothing=3.0,
        empty=0.06,
        gain=1900.0,
    ),
)

_CASES = (60, 48, 32, 40)
_FURTHER_CASES = 30

# Where exaggeration stops.
_LIMITS = {
    "gamma": (0.5, 2.0),
    "noise": (0.0, 0.25),
    "rician": (0.0, 1.0),
    "bias": (0.0, 0.9),
    "blur": (0.0, 6.0),
    "field_of_view": (0.85, 1.25),
    "thickness": (0.75, 2.0),
    "num_lesions": (1.0, 5.0),
    "lesion_radius": (9.0, 28.0),
    "irregularity": (0.0, 0.5),
    "rim": (0.1, 0.5),
    "margin": (-3.0, 5.0),
    "smoothing": (0.0, 8.0),
    "empty": (0.0, 0.15),
    "gain": (100.0, 6000.0),
}
_FAINTEST_LESION = 0.2


def hospital_names(settings: PhantomSettings) -> list[str]:
    """north, east, south, west, hospital-05, hospital-06, ..."""
    designed = [style.name for style in _DESIGNED]
    further = [f"hospital-{number:02d}" for number in range(len(designed) + 1, settings.hospitals + 1)]
    return (designed + further)[: settings.hospitals]


def hospital(settings: PhantomSettings, index: int, seed: int) -> Hospital:
    """The hospital at this place of `hospital_names`; it does not depend on how many others there are.

    Only hospitals from the fifth on depend on the seed; `settings.seed` goes before `seed`.
    """
    name = hospital_names(settings)[index]
    own = _DESIGNED[index] if index < len(_DESIGNED) else _draw_style(name, _seed(settings, seed))
    return replace(_blend(own, settings.heterogeneity), name=name)


def _draw_style(name: str, seed: int) -> Hospital:
    """A further hospital: one of the designed contrasts, everything else anywhere between them."""
    random = stream(seed, name, "style")
    own = _DESIGNED[random.integers(len(_DESIGNED))]
    drawn: dict[str, Any] = {}
    for field in _LIMITS:
        values = [getattr(style, field) for style in _DESIGNED]
        drawn[field] = float(random.uniform(min(values), max(values)))
    drawn["bias_angle"] = float(random.uniform(-np.pi, np.pi))
    return replace(own, name=name, **drawn)


def _blend(own: Hospital, heterogeneity: float) -> Hospital:
    """From the reference (0) to a hospital's own style (1), and as far again beyond it (2)."""

    def between(start: float, end: float) -> float:
        return start + heterogeneity * (end - start)

    blended: dict[str, Any] = {}
    for field in [*_LIMITS, "bias_angle"]:
        low, high = _LIMITS.get(field, (-np.inf, np.inf))
        value = between(getattr(_REFERENCE, field), getattr(own, field))
        blended[field] = float(np.clip(value, low, high))
    contrasts = tuple(
        _blend_contrast(start, end, heterogeneity)
        for start, end in zip(_REFERENCE.contrasts, own.contrasts, strict=True)
    )
    return replace(own, contrasts=contrasts, **blended)


def _blend_contrast(start: Contrast, end: Contrast, heterogeneity: float) -> Contrast:
    """Between two contrasts and not beyond; a lesion on its way from bright to dark stays visible."""
    share = min(heterogeneity, 1.0)
    values = {
        field.name: (1 - share) * getattr(start, field.name) + share * getattr(end, field.name)
        for field in fields(Contrast)
    }
    for part in ("lesion", "core"):
        if abs(values[part]) < _FAINTEST_LESION:
            values[part] = float(np.copysign(_FAINTEST_LESION, values[part]))
    return Contrast(**values)


# Cases and splits


def num_cases(settings: PhantomSettings, name: str) -> int:
    """Cases of this hospital, all splits together."""
    index = _index(settings, name)
    if isinstance(settings.cases, list):
        return settings.cases[index]
    if settings.cases is not None:
        return settings.cases
    return _CASES[index] if index < len(_CASES) else _FURTHER_CASES


def split_sizes(settings: PhantomSettings, name: str) -> tuple[int, int, int]:
    """Number of training, validation and test cases of this hospital.

    From three cases on, each split has at least one; one case is for training, a second for testing.
    """
    total = num_cases(settings, name)
    if total < 3:
        return min(total, 1), 0, max(total - 1, 0)
    _, val_share, test_share = settings.split
    val = min(max(1, round(total * val_share)), total - 2)
    test = min(max(1, round(total * test_share)), total - val - 1)
    return total - val - test, val, test


def split_of(settings: PhantomSettings, name: str, number: int) -> str:
    """Which of "train", "val" and "test" holds this case; cases are numbered from 1."""
    train, val, _ = split_sizes(settings, name)
    if number <= train:
        return "train"
    return "val" if number <= train + val else "test"


def make_client(settings: PhantomSettings, name: str, seed: int) -> ClientData:
    """All cases of one hospital, in their splits; `settings.seed` goes before `seed`."""
    style = hospital(settings, _index(settings, name), seed)
    cases: dict[str, list[Case]] = {"train": [], "val": [], "test": []}
    for number in range(1, num_cases(settings, name) + 1):
        cases[split_of(settings, name, number)].append(make_case(settings, style, number, seed))
    return ClientData(**{split: TensorSplit.of(members) for split, members in cases.items()})


def make_case(settings: PhantomSettings, hospital: Hospital, number: int, seed: int) -> Case:
    """One case as a network reads it, from its number (1, 2, ...) at the hospital."""
    scan = make_scan(settings, hospital, number, seed)
    label = torch.from_numpy(scan.label.astype(np.int64))
    return Case(scan.name, torch.from_numpy(normalise(scan.image)), label, scan.spacing)


def normalise(image: NDArray[np.generic]) -> Array:
    """Zero mean and unit variance in each channel; a constant channel becomes zero. (C, *spatial)"""
    values = image.astype(np.float64)
    spatial = tuple(range(1, values.ndim))
    values -= values.mean(axis=spatial, keepdims=True)
    deviation = values.std(axis=spatial, keepdims=True)
    return (values / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)


def stream(*parts: object) -> np.random.Generator:
    """A random generator of its own for these words and numbers, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def _seed(settings: PhantomSettings, seed: int) -> int:
    return seed if settings.seed is None else settings.seed


def _index(settings: PhantomSettings, name: str) -> int:
    names = hospital_names(settings)
    if name not in names:
        raise DataError(f"There is no phantom hospital {name!r}; choose from {', '.join(names)}.")
    return names.index(name)


# One scan


def make_scan(settings: PhantomSettings, hospital: Hospital, number: int, seed: int) -> Scan:
    """One case as the scanner stores it, from its number (1, 2, ...) at the hospital."""
    seed = _seed(settings, seed)
    who = (seed, hospital.name, number)
    grid = _grid(settings, hospital)
    head = _draw_head(stream(*who, "anatomy"), grid)

    lesion = None
    if not _is_empty(settings, hospital, number, seed):
        lesion = _draw_lesions(stream(*who, "lesions"), grid, head, hospital)
    label = _annotate(lesion, grid, hospital, settings.num_classes)
    channels = [
        _acquire(stream(*who, "scanner", channel), grid, head, lesion, hospital, hospital.contrasts[channel])
        for channel in range(settings.channels)
    ]
    image = np.stack(channels)  # (C, rows, columns, slices)
    if settings.dimensions == 2:
        image, label = image[..., 0], label[..., 0]
    return Scan(f"{hospital.name}-{number:03d}", image, label, grid.spacing[: settings.dimensions])


def _is_empty(settings: PhantomSettings, hospital: Hospital, number: int, seed: int) -> bool:
    """Whether the patient is healthy: the hospital's share of each split, to the nearest whole case."""
    train, val, test = split_sizes(settings, hospital.name)
    split = split_of(settings, hospital.name, number)
    first, size = {"train": (1, train), "val": (train + 1, val), "test": (train + val + 1, test)}[split]
    order = stream(seed, hospital.name, split, "healthy").permutation(size)
    return number - first in order[: round(hospital.empty * size)]


@dataclass(frozen=True)
class _Grid:
    """Where the voxels are: a 2D scan is a volume of one slice.

    points: (3, rows, columns, slices) mm from the middle; spacing: of the three axes, mm.
    """

    points: Array
    spacing: tuple[float, float, float]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.points.shape[1:]

    @property
    def is_flat(self) -> bool:
        return self.shape[2] == 1

    def smooth(self, values: Array, width: float, through_plane: float | None = None) -> Array:
        """Gaussian smoothing by a width in mm, of which a flat grid takes only the part in its plane."""
        sigma = [width / self.spacing[0], width / self.spacing[1], 0.0]
        if not self.is_flat:
            sigma[2] = (width if through_plane is None else through_plane) / self.spacing[2]
        from scipy import ndimage  # only who makes the cases waits for it

        smoothed = ndimage.gaussian_filter(values, sigma, mode="nearest", truncate=3.0)
        return np.asarray(smoothed, dtype=np.float32)

    def texture(self, random: np.random.Generator, width: float) -> Array:
        """A random field with standard deviation 1 whose bumps are about `width` mm wide."""
        field = self.smooth(random.standard_normal(self.shape, dtype=np.float32), width)
        return np.asarray(field / max(float(np.sqrt(np.mean(field**2))), 1e-6), dtype=np.float32)

    def cover(self, level: Array, softness: float = 0.0) -> Array:
        """How much of each voxel lies inside, from the mm to the border (above zero is inside)."""
        width = max(self.spacing[0], softness)
        return np.asarray(np.clip(0.5 + level / width, 0.0, 1.0), dtype=np.float32)


_HEAD_LENGTH, _HEAD_WIDTH, _HEAD_HEIGHT = 92.0, 75.0, 84.0  # from the middle to the skin, mm
_MARGIN_OF_VIEW = 1.12
SLICE_THICKNESS = 5.0  # of a 2D case, mm


def _grid(settings: PhantomSettings, hospital: Hospital) -> _Grid:
    """Square pixels that fit a head into the picture, as the hospital sets its field of view."""
    rows, columns, *rest = settings.shape
    slices = rest[0] if rest else 1
    in_plane = max(2 * _HEAD_LENGTH / rows, 2 * _HEAD_WIDTH / columns)
    in_plane = round(in_plane * _MARGIN_OF_VIEW * hospital.field_of_view, 3)
    between = round(2 * _HEAD_HEIGHT / slices * hospital.thickness, 3) if rest else SLICE_THICKNESS

    spacing = (in_plane, in_plane, between)
    axes = [
        (np.arange(n) - (n - 1) / 2) * step for n, step in zip((rows, columns, slices), spacing, strict=True)
    ]
    return _Grid(np.stack(np.meshgrid(*axes, indexing="ij")).astype(np.float32), spacing)


@dataclass(frozen=True)
class _Head:
    """One patient's anatomy, as mm inside of each border (above zero is inside).

    points: the voxels in the patient's own axes.
    """

    points: Array
    skin: Array
    brain: Array
    white: Array
    sulci: Array
    nuclei: Array
    ventricles: Array
    vessels: Array
    texture: Array


def _draw_head(random: np.random.Generator, grid: _Grid) -> _Head:
    points = _pose(random, grid)
    rows, columns, slices = points
    length, width, height = (_HEAD_LENGTH, _HEAD_WIDTH, _HEAD_HEIGHT) * random.uniform(0.95, 1.04, 3)

    # The back of a head is broader than its front.
    broad = width * (1 + 0.07 * np.tanh(rows / 45))
    radius = np.sqrt((rows / length) ** 2 + (columns / broad) ** 2 + (slices / height) ** 2)
    skin = (1 - radius) * 0.5 * (length + width) + 1.5 * grid.texture(random, 22.0)

    folds = grid.texture(random, 4.5)
    brain = skin - 13.0 - 1.2 * folds
    # Sulci follow the creases of a random field and end some way below the surface.
    crease = 1.8 - 6.0 * np.abs(folds)
    sulci = np.minimum(crease, 17.0 + 5.0 * grid.texture(random, 12.0) - brain)
    # Grey matter lines the surface and every sulcus.
    white = np.minimum(brain - 5.0 - 2.0 * grid.texture(random, 6.0), -sulci - 3.0)
    fissure = np.minimum(1.3 - np.abs(columns + 1.0 * grid.texture(random, 15.0)), np.abs(rows) - 30.0)
    sulci = np.minimum(np.maximum(sulci, fissure), brain)
    nuclei = _pair(random, points, (6.0, 21.0, 2.0), (17.0, 9.0, 15.0), -0.35) + 0.8 * folds
    ventricles = _ventricles(random, points)
    vessels = _vessels(random, points, length)
    return _Head(points, skin, brain, white, sulci, nuclei, ventricles, vessels, grid.texture(random, 5.0))


def _pose(random: np.random.Generator, grid: _Grid) -> Array:
    """The voxels in the patient's axes: heads are never laid down quite straight or centred."""
    angle = random.normal(0, 0.08)
    shift = random.normal(0, 2.5, 3)
    # A slice cuts the head somewhere about the ventricles.
    shift[2] = random.uniform(-26, 6) if grid.is_flat else shift[2]
    rows, columns, slices = grid.points - shift.astype(np.float32)[:, None, None, None]
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return np.stack([cosine * rows - sine * columns, sine * rows + cosine * columns, slices])


def _ventricles(random: np.random.Generator, points: Array) -> Array:
    """Two front horns, two back horns and the third ventricle; they widen with age."""
    age = random.uniform(0.75, 1.35)
    front = _pair(random, points, (-22.0, 10.0, 6.0), (17.0, 5.5 * age, 15.0), 0.35)
    back = _pair(random, points, (24.0, 17.0, 4.0), (20.0, 5.5 * age, 14.0), -0.45)
    third = _ellipsoid(points, (4.0, 0.0, -6.0), (12.0, 2.2 * age, 10.0), 0.0)
    return np.maximum(np.maximum(front, back), third)


def _vessels(random: np.random.Generator, points: Array, length: float) -> Array:
    """The sinus behind, the artery in front, a pair at the sides, and the plexus in each ventricle."""
    behind = _ellipsoid(points, (length - 17.0, 0.0, 10.0), (4.5, 4.5, 60.0), 0.0)
    front = _ellipsoid(points, (-36.0, 0.0, 0.0), (6.0, 2.5, 40.0), 0.0)
    sides = _pair(random, points, (-4.0, 46.0, 0.0), (10.0, 2.8, 40.0), 0.3)
    plexus = _pair(random, points, (27.0, 18.0, 4.0), (9.0, 3.2, 8.0), -0.45)
    return np.maximum(np.maximum(behind, front), np.maximum(sides, plexus))


def _pair(
    random: np.random.Generator,
    points: Array,
    centre: tuple[float, float, float],
    axes: tuple[float, float, float],
    tilt: float,
) -> Array:
    """The same structure left and right, each a little its own."""
    sides = []
    for side in (-1, 1):
        row, column, height = np.asarray(centre) + random.normal(0, 1.0, 3)
        grown = np.asarray(axes) * random.uniform(0.9, 1.1, 3)
        sides.append(_ellipsoid(points, (row, side * column, height), tuple(grown), side * tilt))
    return np.maximum(*sides)


def _ellipsoid(points: Array, centre: tuple[float, ...], axes: tuple[float, ...], tilt: float) -> Array:
    """Millimetres inside an ellipsoid, about; tilt turns it in the plane."""
    rows, columns, slices = points - np.asarray(centre, dtype=np.float32)[:, None, None, None]
    cosine, sine = float(np.cos(tilt)), float(np.sin(tilt))
    along, across = cosine * rows + sine * columns, cosine * columns - sine * rows
    radius = np.sqrt((along / axes[0]) ** 2 + (across / axes[1]) ** 2 + (slices / axes[2]) ** 2)
    return np.asarray((1 - radius) * min(axes), dtype=np.float32)


@dataclass(frozen=True)
class _Lesion:
    """All lesions of one patient, as mm inside of the border; strength is how far they stand out."""

    whole: Array
    core: Array
    texture: Array
    strength: float


def _draw_lesions(random: np.random.Generator, grid: _Grid, head: _Head, hospital: Hospital) -> _Lesion:
    """Irregular ellipsoids inside the brain and outside the ventricles."""
    allowed = np.minimum(head.brain - 2.0, -head.ventricles)
    whole = core = np.full(grid.shape, -1e3, dtype=np.float32)
    # A slice rarely cuts a lesion at its widest.
    typical = hospital.lesion_radius * (1.0 if grid.is_flat else 1.25)
    for _ in range(1 + random.poisson(hospital.num_lesions - 1)):
        radius = max(typical * float(np.exp(random.normal(0, 0.18))), 1.5 * max(grid.spacing))
        body = _draw_blob(random, grid, head, allowed, radius, hospital.irregularity)
        whole = np.maximum(whole, body)
        core = np.maximum(core, body - radius * hospital.rim * random.uniform(0.8, 1.2))
    whole = np.minimum(whole, allowed)
    core = np.minimum(core + 0.8 * grid.texture(random, 3.0), whole - 2.0)
    return _Lesion(whole, core, grid.texture(random, 3.0), float(random.uniform(0.85, 1.15)))


def _draw_blob(
    random: np.random.Generator,
    grid: _Grid,
    head: _Head,
    allowed: Array,
    radius: float,
    irregularity: float,
) -> Array:
    """One lesion whose middle lies well inside the allowed region."""
    places = np.flatnonzero(allowed > min(0.6 * radius, 0.7 * float(allowed.max())))
    centre = head.points.reshape(3, -1)[:, random.choice(places)]
    axes = radius * np.exp(random.normal(0, 0.14, 3))
    body = _ellipsoid(head.points, tuple(centre), tuple(axes), random.uniform(-np.pi / 2, np.pi / 2))
    lobes = np.tanh(grid.texture(random, 0.4 * radius)) + 0.5 * np.tanh(grid.texture(random, 0.18 * radius))
    return np.asarray(body + irregularity * radius * lobes, dtype=np.float32)


def _annotate(lesion: _Lesion | None, grid: _Grid, hospital: Hospital, num_classes: int) -> NDArray[np.uint8]:
    """The label as this hospital's annotator draws it; a lesion is never lost altogether."""
    label = np.zeros(grid.shape, dtype=np.uint8)
    if lesion is None:
        return label
    parts = [lesion.whole, lesion.core][: num_classes - 1]
    for value, level in enumerate(parts, start=1):
        drawn = grid.smooth(level, hospital.smoothing) + hospital.margin
        # The margin belongs to the outer line; the core keeps its size.
        if value > 1:
            drawn = np.where(label > 0, drawn - hospital.margin, -np.inf)
        label[(drawn > 0) | (drawn == drawn.max())] = value
    return label


def _acquire(
    random: np.random.Generator,
    grid: _Grid,
    head: _Head,
    lesion: _Lesion | None,
    hospital: Hospital,
    contrast: Contrast,
) -> NDArray[np.int16]:
    """What the hospital's scanner stores for one contrast."""
    signal = _paint(grid, head, lesion, contrast)
    signal = grid.smooth(signal, hospital.blur, through_plane=0.3 * grid.spacing[2])
    signal = np.clip(signal, 0.0, 1.5) ** hospital.gamma * _bias(random, grid, hospital)
    first, second = random.standard_normal((2, *grid.shape), dtype=np.float32) * hospital.noise
    magnitude = np.sqrt((signal + first) ** 2 + (hospital.rician * second) ** 2)
    gain = hospital.gain * random.uniform(0.9, 1.1)
    stored = np.clip(np.rint(magnitude * gain), 0, np.iinfo(np.int16).max)
    return np.asarray(stored, dtype=np.int16)


def _paint(grid: _Grid, head: _Head, lesion: _Lesion | None, contrast: Contrast) -> Array:
    """The brightness of every tissue, painted from the outside in."""
    tissue = 1 + 0.035 * head.texture
    layers: list[tuple[Array, Array | float]] = [
        (grid.cover(head.skin), contrast.scalp),
        (grid.cover(head.skin - 5.0), contrast.skull),
        (grid.cover(head.skin - 11.0), contrast.fluid),
        (grid.cover(head.brain), contrast.grey * tissue),
        (grid.cover(head.white, 5.0), contrast.white * tissue),
        (grid.cover(head.nuclei, 5.0), 0.75 * contrast.grey + 0.25 * contrast.white),
        (grid.cover(head.sulci), 0.5 * (contrast.fluid + contrast.grey)),
        (grid.cover(head.ventricles), contrast.fluid),
        (grid.cover(head.vessels), contrast.blood),
    ]
    if lesion is not None:
        uneven = lesion.strength * (1 + 0.10 * lesion.texture)
        layers.append((grid.cover(lesion.whole, 4.0), contrast.white + contrast.lesion * uneven))
        layers.append((grid.cover(lesion.core, 4.0), contrast.white + contrast.core * uneven))
    picture = np.full(grid.shape, 0.01, dtype=np.float32)
    for cover, brightness in layers:
        picture += cover * (brightness - picture)
    return picture


def _bias(random: np.random.Generator, grid: _Grid, hospital: Hospital) -> Array:
    """The coil's uneven gain: stronger towards one side, weaker in the depth of the head."""
    angle = hospital.bias_angle + random.normal(0, 0.2)
    rows, columns, slices = grid.points / np.float32(_HEAD_LENGTH)
    slope = np.sin(angle) * rows + np.cos(angle) * columns + 0.4 * slices
    depth = rows**2 + columns**2 + slices**2
    strength = hospital.bias * random.uniform(0.8, 1.2)
    return np.asarray(np.exp(strength * (slope + 0.4 * (depth - 0.5))), dtype=np.float32)
