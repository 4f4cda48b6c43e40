"""Scans: the style of a hospital; one synthetic head in millimetres, its lesions, its image and its label."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Random = np.random.Generator
Point = tuple[float, float, float]
Organ = Literal["skull", "nuclei", "ventricles", "lesion"]


@dataclass(frozen=True)
class SequenceContrast:
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
class PhantomHospital:
    """What makes the scans, patients and labels of one hospital.

    contrasts: one per channel, at most four; the first is the hospital's own, the others are common.
    gamma: exponent on intensity; above 1 darkens the middle greys.
    noise: standard deviation, where the brightest tissue is about 1; rician: 0 Gaussian, 1 Rician.
    bias: how uneven the coil is, as log intensity from the centre to the edge; bias_angle: towards where,
    in radians: 0 is the patient's left, pi / 2 the back.
    blur: in-plane, mm; field_of_view: 1 fits a head; thickness: of slices in 3D, 1 fits a head.
    num_lesions: the mean; lesion_radius: the mean, mm; irregularity: of the outline, 0 is an ellipse;
    rim: how thick it is around the core, as a share of the radius.
    margin: mm of the annotator's outline outside (above 0) or inside the true border; smoothing: of it, mm.
    empty: share of cases without a lesion.
    gain: what the scanner stores for brightness 1.
    """

    name: str
    contrasts: tuple[SequenceContrast, ...]
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


# Styles

# fmt: off
#                         scalp skull fluid grey  white blood lesion core
_FLAIR = SequenceContrast(0.72, 0.10, 0.12, 0.58, 0.44, 0.36, 0.40, 0.30)
_T1 = SequenceContrast(   0.85, 0.12, 0.14, 0.56, 0.70, 0.40, -0.40, -0.48)
_T2 = SequenceContrast(   0.48, 0.08, 0.94, 0.50, 0.38, 0.40, 0.44, 0.52)
_PD = SequenceContrast(   0.62, 0.16, 0.46, 0.70, 0.56, 0.50, 0.32, 0.20)
# fmt: on
_T1_ENHANCED = replace(_T1, scalp=0.90, grey=0.58, blood=1.08, lesion=-0.44, core=0.30)

_NAMES = ("reference", "north", "east", "south", "west")
_CONTRASTS = (_FLAIR, _FLAIR, _T1_ENHANCED, _T2, _T1)  # of the first channel; the others are common
# north  a university hospital: crisp FLAIR, bright lesions, accurate outlines
# east   T1 with contrast agent: dark rim, bright core, bright vessels; an old coil; generous outlines
# south  fast T2: fluid is as bright as any lesion; grainy and soft; several small lesions, tight outlines
# west   plain T1: the same disease is dark; an open coil; smooth outlines
# fmt: off
_STYLES: dict[str, tuple[float, ...]] = {
    #             reference   north    east     south    west      lower and upper limit
    "gamma":         (1.0,    1.0,     0.85,    1.15,    1.1,      0.5, 2.0),
    "noise":         (0.035,  0.025,   0.04,    0.045,   0.03,     0.0, 0.25),
    "rician":        (0.5,    0.3,     0.6,     1.0,     0.2,      0.0, 1.0),
    "bias":          (0.12,   0.10,    0.28,    0.22,    0.30,     0.0, 0.9),
    "blur":          (1.6,    1.2,     2.0,     2.2,     2.2,      0.0, 6.0),
    "field_of_view": (1.0,    1.0,     0.94,    1.06,    0.98,     0.85, 1.25),
    "thickness":     (1.0,    1.0,     1.25,    1.5,     0.9,      0.75, 2.0),
    "num_lesions":   (1.4,    1.3,     1.2,     2.1,     1.6,      1.0, 5.0),
    "lesion_radius": (18.0,   20.0,    22.0,    17.0,    19.0,     9.0, 28.0),
    "irregularity":  (0.22,   0.24,    0.20,    0.14,    0.28,     0.0, 0.5),
    "rim":           (0.26,   0.26,    0.16,    0.26,    0.30,     0.1, 0.5),
    "margin":        (0.0,    0.0,     0.6,     -0.6,    1.0,      -3.0, 5.0),
    "smoothing":     (1.0,    1.0,     2.0,     1.5,     3.0,      0.0, 8.0),
    "empty":         (0.0,    0.06,    0.03,    0.06,    0.06,     0.0, 0.15),
    "gain":          (1000.0, 1100.0,  420.0,   260.0,   1900.0,   100.0, 6000.0),
    "bias_angle":    (0.0,    0.6,     3.0,     -1.4,    1.7,      -np.inf, np.inf),
}
# fmt: on
_REFERENCE, *DESIGNED = (
    PhantomHospital(name, (contrast, _T1, _T2, _PD), **{field: row[place] for field, row in _STYLES.items()})
    for place, (name, contrast) in enumerate(zip(_NAMES, _CONTRASTS, strict=True))
)
_FAINTEST_LESION = 0.2


def draw_style(name: str, seed: int) -> PhantomHospital:
    """A further hospital: one of the designed contrasts, everything else within their range."""
    random = make_generator(seed, name, "style")
    own = DESIGNED[random.integers(len(DESIGNED))]
    drawn: dict[str, Any] = {}
    for field in _STYLES:
        values = [-np.pi, np.pi] if field == "bias_angle" else [getattr(style, field) for style in DESIGNED]
        drawn[field] = float(random.uniform(min(values), max(values)))
    return replace(own, name=name, **drawn)


def blend(own: PhantomHospital, heterogeneity: float) -> PhantomHospital:
    """From the reference (0) to a hospital's own style (1), and as far again beyond it (2)."""
    blended: dict[str, Any] = {}
    for field, (*_, low, high) in _STYLES.items():
        start, end = getattr(_REFERENCE, field), getattr(own, field)
        blended[field] = float(np.clip(start + heterogeneity * (end - start), low, high))
    contrasts = tuple(
        _blend_contrast(start, end, heterogeneity)
        for start, end in zip(_REFERENCE.contrasts, own.contrasts, strict=True)
    )
    return replace(own, contrasts=contrasts, **blended)


def _blend_contrast(start: SequenceContrast, end: SequenceContrast, heterogeneity: float) -> SequenceContrast:
    """Between two contrasts, not beyond; a lesion between bright and dark stays visible."""
    share = min(heterogeneity, 1.0)
    values = {
        field.name: (1 - share) * getattr(start, field.name) + share * getattr(end, field.name)
        for field in fields(SequenceContrast)
    }
    for part in ("lesion", "core"):
        if abs(values[part]) < _FAINTEST_LESION:
            values[part] = float(np.copysign(_FAINTEST_LESION, values[part]))
    return SequenceContrast(**values)


def make_generator(*parts: object) -> Random:
    """A random generator seeded by these words and numbers, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


# One head


@dataclass(frozen=True)
class ScanGrid:
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
        from scipy import ndimage  # slow to import

        smoothed = ndimage.gaussian_filter(values, sigma, mode="nearest", truncate=3.0)
        return np.asarray(smoothed, dtype=np.float32)

    def texture(self, random: Random, width: float) -> Array:
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


def make_grid(shape: Sequence[int], hospital: PhantomHospital) -> ScanGrid:
    """Square pixels that fit a head into the picture, as the hospital sets its field of view."""
    rows, columns, *rest = shape
    slices = rest[0] if rest else 1
    in_plane = max(2 * _HEAD_LENGTH / rows, 2 * _HEAD_WIDTH / columns)
    in_plane = round(in_plane * _MARGIN_OF_VIEW * hospital.field_of_view, 3)
    between = round(2 * _HEAD_HEIGHT / slices * hospital.thickness, 3) if rest else SLICE_THICKNESS

    spacing = (in_plane, in_plane, between)
    axes = [(np.arange(n) - (n - 1) / 2) * mm for n, mm in zip((rows, columns, slices), spacing, strict=True)]
    return ScanGrid(np.stack(np.meshgrid(*axes, indexing="ij")).astype(np.float32), spacing)


@dataclass(frozen=True)
class PhantomHead:
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


def draw_head(random: Random, grid: ScanGrid) -> PhantomHead:
    """A random head in a random pose."""
    points = _draw_pose(random, grid)
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
    nuclei = _draw_pair(random, points, (6.0, 21.0, 2.0), (17.0, 9.0, 15.0), -0.35) + 0.8 * folds
    ventricles = _draw_ventricles(random, points)
    vessels = _draw_vessels(random, points, length)
    texture = grid.texture(random, 5.0)
    return PhantomHead(points, skin, brain, white, sulci, nuclei, ventricles, vessels, texture)


def _draw_pose(random: Random, grid: ScanGrid) -> Array:
    """The voxels in the patient's axes: heads are never laid down quite straight or centred."""
    angle = random.normal(0, 0.08)
    shift = random.normal(0, 2.5, 3)
    # A slice cuts the head somewhere about the ventricles.
    shift[2] = random.uniform(-26, 6) if grid.is_flat else shift[2]
    rows, columns, slices = grid.points - shift.astype(np.float32)[:, None, None, None]
    cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return np.stack([cosine * rows - sine * columns, sine * rows + cosine * columns, slices])


def _draw_ventricles(random: Random, points: Array) -> Array:
    """Two front horns, two back horns and the third ventricle; they widen with age."""
    age = random.uniform(0.75, 1.35)
    front = _draw_pair(random, points, (-22.0, 10.0, 6.0), (17.0, 5.5 * age, 15.0), 0.35)
    back = _draw_pair(random, points, (24.0, 17.0, 4.0), (20.0, 5.5 * age, 14.0), -0.45)
    third = _ellipsoid(points, (4.0, 0.0, -6.0), (12.0, 2.2 * age, 10.0), 0.0)
    return np.maximum(np.maximum(front, back), third)


def _draw_vessels(random: Random, points: Array, length: float) -> Array:
    """The sinus behind, the artery in front, a pair at the sides, and the plexus in each ventricle."""
    behind = _ellipsoid(points, (length - 17.0, 0.0, 10.0), (4.5, 4.5, 60.0), 0.0)
    front = _ellipsoid(points, (-36.0, 0.0, 0.0), (6.0, 2.5, 40.0), 0.0)
    sides = _draw_pair(random, points, (-4.0, 46.0, 0.0), (10.0, 2.8, 40.0), 0.3)
    plexus = _draw_pair(random, points, (27.0, 18.0, 4.0), (9.0, 3.2, 8.0), -0.45)
    return np.maximum(np.maximum(behind, front), np.maximum(sides, plexus))


def _draw_pair(random: Random, points: Array, centre: Point, axes: Point, tilt: float) -> Array:
    """The same structure left and right, each a little its own."""
    sides = []
    for side in (-1, 1):
        row, column, height = np.asarray(centre) + random.normal(0, 1.0, 3)
        grown = np.asarray(axes) * random.uniform(0.9, 1.1, 3)
        sides.append(_ellipsoid(points, (row, side * column, height), tuple(grown), side * tilt))
    return np.maximum(*sides)


def _ellipsoid(points: Array, centre: tuple[float, ...], axes: tuple[float, ...], tilt: float) -> Array:
    """Millimetres inside an ellipsoid, about; tilt rotates it in the plane."""
    rows, columns, slices = points - np.asarray(centre, dtype=np.float32)[:, None, None, None]
    cosine, sine = float(np.cos(tilt)), float(np.sin(tilt))
    along, across = cosine * rows + sine * columns, cosine * columns - sine * rows
    radius = np.sqrt((along / axes[0]) ** 2 + (across / axes[1]) ** 2 + (slices / axes[2]) ** 2)
    return np.asarray((1 - radius) * min(axes), dtype=np.float32)


@dataclass(frozen=True)
class Lesion:
    """All lesions of one patient, as mm inside of the border; strength is how far they stand out."""

    whole: Array
    core: Array
    texture: Array
    strength: float


def draw_lesions(random: Random, grid: ScanGrid, head: PhantomHead, hospital: PhantomHospital) -> Lesion:
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
    return Lesion(whole, core, grid.texture(random, 3.0), float(random.uniform(0.85, 1.15)))


def _draw_blob(
    random: Random, grid: ScanGrid, head: PhantomHead, allowed: Array, radius: float, irregularity: float
) -> Array:
    """One lesion whose middle lies well inside the allowed region."""
    places = np.flatnonzero(allowed > min(0.6 * radius, 0.7 * float(allowed.max())))
    centre = head.points.reshape(3, -1)[:, random.choice(places)]
    axes = radius * np.exp(random.normal(0, 0.14, 3))
    body = _ellipsoid(head.points, tuple(centre), tuple(axes), random.uniform(-np.pi / 2, np.pi / 2))
    lobes = np.tanh(grid.texture(random, 0.4 * radius)) + 0.5 * np.tanh(grid.texture(random, 0.18 * radius))
    return np.asarray(body + irregularity * radius * lobes, dtype=np.float32)


def annotate(
    lesion: Lesion | None, grid: ScanGrid, hospital: PhantomHospital, num_classes: int
) -> NDArray[np.uint8]:
    """The label as this hospital's annotator outlines it; a lesion is never lost altogether."""
    label = np.zeros(grid.shape, dtype=np.uint8)
    if lesion is None:
        return label
    parts = [lesion.whole, lesion.core][: num_classes - 1]
    for value, level in enumerate(parts, start=1):
        outline = grid.smooth(level, hospital.smoothing) + hospital.margin
        # The margin belongs to the outer line; the core keeps its size.
        if value > 1:
            outline = np.where(label > 0, outline - hospital.margin, -np.inf)
        label[(outline > 0) | (outline == outline.max())] = value
    return label


def annotate_organs(
    head: PhantomHead,
    lesion: Lesion | None,
    grid: ScanGrid,
    hospital: PhantomHospital,
    organs: Sequence[Organ],
) -> NDArray[np.uint8]:
    """The label of several organs, class 1 the first; inner ones cover outer ones, as in the image."""
    bone = np.minimum(head.skin - 5.0, 11.0 - head.skin)
    levels = {"skull": bone, "nuclei": head.nuclei, "ventricles": head.ventricles}
    if lesion is not None:
        levels["lesion"] = lesion.whole
    label = np.zeros(grid.shape, dtype=np.uint8)
    for organ, level in levels.items():
        outline = grid.smooth(level, hospital.smoothing) + hospital.margin
        covered = organs.index(organ) + 1 if organ in organs else 0
        label[outline > 0] = covered
    return label


def acquire(
    random: Random,
    grid: ScanGrid,
    head: PhantomHead,
    lesion: Lesion | None,
    hospital: PhantomHospital,
    contrast: SequenceContrast,
) -> NDArray[np.int16]:
    """What the hospital's scanner stores for one contrast."""
    signal = _paint(grid, head, lesion, contrast)
    signal = grid.smooth(signal, hospital.blur, through_plane=0.3 * grid.spacing[2])
    signal = np.clip(signal, 0.0, 1.5) ** hospital.gamma * _draw_bias_field(random, grid, hospital)
    first, second = random.standard_normal((2, *grid.shape), dtype=np.float32) * hospital.noise
    magnitude = np.sqrt((signal + first) ** 2 + (hospital.rician * second) ** 2)
    gain = hospital.gain * random.uniform(0.9, 1.1)
    stored = np.clip(np.rint(magnitude * gain), 0, np.iinfo(np.int16).max)
    return np.asarray(stored, dtype=np.int16)


def _paint(grid: ScanGrid, head: PhantomHead, lesion: Lesion | None, contrast: SequenceContrast) -> Array:
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


def _draw_bias_field(random: Random, grid: ScanGrid, hospital: PhantomHospital) -> Array:
    """The coil's uneven gain: stronger towards one side, weaker in the depth of the head."""
    angle = hospital.bias_angle + random.normal(0, 0.2)
    rows, columns, slices = grid.points / np.float32(_HEAD_LENGTH)
    slope = np.sin(angle) * rows + np.cos(angle) * columns + 0.4 * slices
    depth = rows**2 + columns**2 + slices**2
    strength = hospital.bias * random.uniform(0.8, 1.2)
    return np.asarray(np.exp(strength * (slope + 0.4 * (depth - 0.5))), dtype=np.float32)
