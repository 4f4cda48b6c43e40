"""Distribution shift: warnings about scans unlike those the run was trained and validated on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wardround.data.preparing.geometry import Geometry
from wardround.data.readers.image_files import Volume
from wardround.uncertainty.maps import Predicted, case_mean, case_uncertainty

UNUSUAL = {"q99": "99 %", "q95": "95 %"}  # quantiles a scan is held against, the rarest first
FEW = 20  # validation scans below which a quantile of 95 % is a guess
FAR_SPACING = 1.5  # times the training scans' largest (or smallest) voxel side


def unlike_training(calibration: Mapping[str, Any] | None, predicted: Predicted) -> Iterator[str]:
    """A sentence for each number of the case that lies beyond nearly all of the run's validation scans.

    Of few scans no quantile is known: a number must lie beyond all of them, and how often that happens by
    chance is said too (of N + 1 scans alike, each is as likely as any other to be the highest).
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
                said = "{} {} lies beyond {}".format(what, *told_apart(value, limit))
                scans = "validation scans" if count is None else f"{count} validation scans"
                if few is not None:
                    yield f"{said}, and so beyond all {scans}; by chance one scan in {few + 1} does"
                else:
                    stay = f"which {UNUSUAL[mark]} of their {scans} stay below"
                    yield f"unlike the training hospitals: {said}, {stay}"
                break


def far_spacing(
    seen: tuple[Sequence[float], Sequence[float]] | None, image: Volume, geometry: Mapping[str, Any]
) -> Iterator[str]:
    """A sentence where voxels are of another size than those of the training scans (smallest, largest)."""
    if seen is None or image.affine is None:
        return
    here = [image.spacing[axis] for axis in Geometry.from_dict(geometry).order]
    for side, low, high in zip(here, *seen, strict=True):
        if not low / FAR_SPACING <= side <= high * FAR_SPACING:
            now, least, most = (" x ".join(f"{v:.3g}" for v in sides) for sides in (here, *seen))
            yield f"voxels of {now} mm are far from those of the training scans ({least} to {most} mm)"
            return


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Two unequal numbers with as many digits as tell them apart, three or more.

    >>> told_apart(0.17812, 0.17784)
    ('0.1781', '0.1778')
    """
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(3, 18))
    return next((a, b) for a, b in texts if a != b)
