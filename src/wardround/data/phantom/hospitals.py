"""The made-up hospitals of `cases`: what makes the scans, patients and labels of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np


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


# The hospitals there are

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

DESIGNED = (
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


def draw_style(name: str, seed: int) -> Hospital:
    """A further hospital: one of the designed contrasts, everything else anywhere between them."""
    random = stream(seed, name, "style")
    own = DESIGNED[random.integers(len(DESIGNED))]
    drawn: dict[str, Any] = {}
    for field in _LIMITS:
        values = [getattr(style, field) for style in DESIGNED]
        drawn[field] = float(random.uniform(min(values), max(values)))
    drawn["bias_angle"] = float(random.uniform(-np.pi, np.pi))
    return replace(own, name=name, **drawn)


def blended(own: Hospital, heterogeneity: float) -> Hospital:
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


def stream(*parts: object) -> np.random.Generator:
    """A random generator of its own for these words and numbers, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))
