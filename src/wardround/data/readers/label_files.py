"""The label of a case, however its files say it: one file of class numbers or colours, or one a class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wardround.data.listing import Entry, LabelCoding
from wardround.data.readers.grids import place_label
from wardround.data.readers.image_files import Volume, read_label, same_affine
from wardround.errors import DataError
from wardround.text import format_size


def read_case_label(entry: Entry) -> Volume | None:
    """The label of a case as class values, on its image's voxels where it has them; None without a label."""
    if entry.label is None:
        return None
    coding = entry.coding or LabelCoding()
    if entry.masks:
        return join_masks(entry, coding)
    return place_label(read_label(entry.label, coding.colours), entry.images[0])


def read_masks(entry: Entry) -> dict[str, Volume]:
    """Each mask of a case, by its name, as zeros and ones; all have one grid."""
    found: dict[str, Volume] = {}
    for name, path in entry.masks.items():
        mask = place_label(read_label(path), entry.images[0])
        values = [value for value in np.unique(mask.data).tolist() if value]
        if len(values) > 1 or min(values, default=0) < 0:
            raise DataError(
                f"{path} holds the values {', '.join(map(str, values[:5]))}; a mask of one class holds one."
            )
        first = next(iter(found.values()), mask)
        if mask.spatial != first.spatial or not same_affine(first.affine, mask.affine):
            sizes = f"{format_size(mask.spatial)}, {format_size(first.spatial)}"
            raise DataError(
                f"{path} has another grid than {entry.label_files[0].name} ({sizes}); the masks of a case "
                "have one. Resample one."
            )
        found[name] = replace(mask, data=(mask.data != 0).astype(np.int64))
    return found


def join_masks(entry: Entry, coding: LabelCoding) -> Volume:
    """One label of several masks, in the order of `coding.masks`."""
    masks = read_masks(entry)
    names = [name for name in coding.masks if name in masks]
    joined = np.zeros_like(masks[names[0]].data)
    for number, name in enumerate(names):
        inside = masks[name].data != 0
        before = joined[inside]
        if not coding.overlap and bool((before[before != 0] != coding.masks[name]).any()):
            others = [other for other in names[:number] if coding.masks[other] != coding.masks[name]]
            shared = {other: int((masks[other].data[inside] != 0).sum()) for other in others}
            other = max(shared, key=lambda other: shared[other])
            raise DataError(
                f"{entry.masks[name]} and {entry.masks[other].name} overlap in {shared[other]} voxels. "
                "Correct them, or write overlap: later at their source; the later of its masks then counts."
            )
        joined[inside] = coding.masks[name]
    return replace(masks[names[0]], data=joined)
