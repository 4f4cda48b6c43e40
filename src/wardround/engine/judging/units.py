"""The units of distances in a run: millimetres where files have a spacing, pixels where they do not.

A picture has no spacing, and a pixel of it counts as 1; so does a voxel of a NumPy array. Hospitals send the
spacing, not the files: there, images of 1 x 1 may be either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wardround.data.federation import Federation
from wardround.data.readers.image_files import NIFTI
from wardround.metrics import MM, MM_OR_PX, PX, combine_units


def detect_units(federation: Federation) -> str:
    """mm, px, or either; synthetic cases have a spacing in mm."""
    if federation.first_images is not None:
        images = federation.first_images()
        return combine_units(MM if path.name.lower().endswith(NIFTI) else PX for path in images)
    if federation.units is not None:
        return federation.units
    seen = None if federation.summarise_scans is None else federation.summarise_scans().spacing
    if seen is None or federation.dimensions == 3 or any(side != 1 for sides in seen for side in sides):
        return MM
    return MM_OR_PX


def read_units(result: Mapping[str, Any]) -> str:
    """What result.json says; older files call it lengths, and the oldest, in mm, say nothing."""
    found = result.get("units", result.get("lengths"))
    return found if found in (MM, PX, MM_OR_PX) else MM
