"""What distances of a run's cases are in: millimetres where files tell them, pixels where they do not.

A picture has no spacing, and a pixel of it counts as 1; so does a voxel of a NumPy array.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wardround.config import DataSettings
from wardround.data.federation import Federation
from wardround.data.federation_file import listing_of, load
from wardround.data.files import NIFTI
from wardround.data.folders import Folders, find
from wardround.metrics import MM, MM_OR_PX, PX, lengths_together


def lengths_here(data: DataSettings) -> str:
    """Of cases on this machine: mm, px, or that there are both."""
    return lengths_together(MM if path.name.lower().endswith(NIFTI) else PX for path in images_of(data))


def images_of(data: DataSettings) -> Iterator[Path]:
    """The first image of every case; made-up cases have none, and know their millimetres."""
    if data.federation is not None:
        for entry in listing_of(load(data.federation), data.federation.parent).entries:
            yield entry.images[0]
    elif data.folders is not None:
        found = Folders(data.folders)
        for name in found.names:
            for stem, _ in found.index[name]:
                yield find(data.folders.root / name / "images", stem)


def lengths_at_hospitals(federation: Federation) -> str:
    """Of cases at hospitals, which tell the sides of voxels, not the files: images of 1 x 1 may be either."""
    seen = None if federation.look_back is None else federation.look_back().spacing
    if seen is None or federation.dimensions == 3 or any(side != 1 for sides in seen for side in sides):
        return MM
    return MM_OR_PX
