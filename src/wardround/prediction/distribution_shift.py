"""Distribution shift: warnings about scans unlike those the run was trained and validated on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wardround.data.preparing.geometry import Geometry
from wardround.data.readers.image_files import Volume
from wardround.uncertainty.maps import Predicted, case_mean, case_uncertainty

UNUSUAL = {"q99": "99 %", "q95": "95 %"}  # quantiles a scan is compared with, the rarest first
FEW = 20  # validation scans below which a quantile of 95 % is a guess
FAR_SPACING = 1.5  # times the training scans' largest (or smallest) voxel side


def warn_of_uncertainty(calibration: Mapping[str, Any] | None, predicted: Predicted) -> Iterator[str]:
    """A warning for each uncertainty of the case that exceeds nearly all of the run's validation scans.

    Few scans give no quantile: a value must then exceed all of them, and the warning says how often that
    happens by chance (of N + 1 scans alike, each is as likely as any other to be the highest).
    """
    known = ((calibration or {}).get("quantiles") or {}).get(predicted.kind) or {}
    here = {"case": case_uncertainty(predicted), "epistemic": case_mean(predicted, "epistemic")}
    for name, value in here.items():
        limits = known.get(name)
        if value is None or not isinstance(limits, Mapping):
            continue
        count = limits.get("count")
        few = count if isinstance(count, int) and count < FEW else None
        for mark in UNUSUAL if few is None else ("max",):
            limit = limits.get(mark)
            if isinstance(limit, int | float) and value > limit:
                what = "uncertainty" if name == "case" else f"{name} uncertainty"
                said = "{} {} lies beyond {}".format(what, *format_apart(value, limit))
                scans = "validation scans" if count is None else f"{count} validation scans"
                if few is not None:
                    yield f"{said}, and so beyond all {scans}; by chance one scan in {few + 1} does"
                else:
                    stay = f"which {UNUSUAL[mark]} of their {scans} stay below"
                    yield f"unlike the training hospitals: {said}, {stay}"
                break


def warn_of_spacing(
    seen: tuple[Sequence[float], Sequence[float]] | None, image: Volume, geometry: Mapping[str, Any]
) -> Iterator[str]:
    """A warning if voxels are far smaller or larger than those of the training scans (seen: their range)."""
    if seen is None or image.affine is None:
        return
    here = [image.spacing[axis] for axis in Geometry.from_dict(geometry).order]
    for side, low, high in zip(here, *seen, strict=True):
        if not low / FAR_SPACING <= side <= high * FAR_SPACING:
            now, least, most = (" x ".join(f"{v:.3g}" for v in sides) for sides in (here, *seen))
            yield f"voxels of {now} mm are far from those of the training scans ({least} to {most} mm)"
            return


def format_apart(one: float, other: float) -> tuple[str, str]:
    """Two unequal numbers with three digits, or as many as show the difference.

    >>> told_apart(0.17812, 0.17784)
    ('0.1781', '0.1778')
    """
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(3, 18))
    return next((a, b) for a, b in texts if a != b)
