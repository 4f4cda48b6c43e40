"""Hospitals: the scanner, patients and annotator of each synthetic hospital."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np


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


def make_generator(*parts: object) -> np.random.Generator:
    """A random generator seeded by these words and numbers, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
