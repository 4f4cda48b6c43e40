"""Colours of masks: red is one class, green another; which is which stands in `colours` of a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wardround.errors import DataError


def apply_colours(shown: NDArray[np.int64], colours: Mapping[str, int], path: Path) -> NDArray[np.int64]:
    """Class values from colours 0xrrggbb; one that the map does not have is refused with its count."""
    known = np.array(sorted(int(colour[1:], 16) for colour in colours))
    values = np.array([colours[name_colour(int(code))] for code in known])
    places = np.searchsorted(known, shown).clip(max=len(known) - 1)
    unknown = shown[known[places] != shown]
    if unknown.size:
        others, counts = np.unique(unknown, return_counts=True)
        first = int(counts.argmax())
        more = (
            ""
            if len(others) == 1
            else f" (and {len(others) - 1} more colours in {counts.sum() - counts[first]})"
        )
        raise DataError(
            f"{path} has the colour {name_colour(int(others[first]))} in {counts[first]} pixels{more}, which "
            f"colours of its source does not name. Add it there (0 is background), or correct the mask."
        )
    found: NDArray[np.int64] = values[places]
    return found


def name_colour(code: int) -> str:
    """
    >>> name_colour(0xFF0000)
    '#ff0000'
    """
    return f"#{code:06x}"
