"""What distances of a run's cases are in: millimetres where files tell them, pixels where they do not.

A picture has no spacing, and a pixel of it counts as 1; so does a voxel of a NumPy array. Hospitals tell the
sides of voxels, not the files: there, images of 1 x 1 may be either.
"""

from __future__ import annotations

from wardround.data.federation import Federation
from wardround.data.readers.image_files import NIFTI
from wardround.metrics import MM, MM_OR_PX, PX, lengths_together


def lengths_of(federation: Federation) -> str:
    """mm, px, or that it may be both; made-up cases know their millimetres."""
    if federation.first_images is not None:
        images = federation.first_images()
        return lengths_together(MM if path.name.lower().endswith(NIFTI) else PX for path in images)
    seen = None if federation.summarise_scans is None else federation.summarise_scans().spacing
    if seen is None or federation.dimensions == 3 or any(side != 1 for sides in seen for side in sides):
        return MM
    return MM_OR_PX
