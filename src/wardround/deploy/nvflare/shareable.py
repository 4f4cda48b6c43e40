"""A parcel as FLARE carries it, in its data exchange object (DXO).

The arrays are its data, the header is JSON in its metadata. What else FLARE adds is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo import from_shareable as read_dxo
from nvflare.apis.shareable import ReservedHeaderKey, Shareable

from wardround.clients.traffic import Array
from wardround.deploy.nvflare.job import CHUNK_BYTES
from wardround.deploy.strict_json import is_shape, parse_json
from wardround.deploy.wire import Parcel, ParcelError

HEADER = "wardround"
PIECES = "wardround-pieces"


def to_shareable(parcel: Parcel) -> Shareable:
    """What FLARE sends; the arrays are the parcel's own, not copies."""
    pieces, plan = split_arrays(parcel.arrays)
    meta = {HEADER: parcel.text, PIECES: json.dumps(plan)}
    return DXO(DataKind.WEIGHTS, pieces, meta).to_shareable()


def from_shareable(shareable: Shareable) -> Parcel:
    """The parcel in what FLARE received, which is emptied; ValueError if there is none."""
    try:
        found = read_dxo(shareable)
        text, plan, pieces = found.meta[HEADER], parse_json(found.meta[PIECES]), found.data
    except Exception as error:  # whatever FLARE stumbles over in foreign content
        raise ValueError(f"no parcel inside ({type(error).__name__})") from None
    if not isinstance(pieces, dict) or not all(isinstance(piece, np.ndarray) for piece in pieces.values()):
        raise ValueError("something other than arrays inside")
    try:
        return Parcel.read(text, join_arrays(pieces, plan))
    except (ParcelError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a complete parcel: {error}") from None


def split_arrays(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], list[dict[str, Any]]]:
    """Arrays in pieces that FLARE can send one by one (it copies each as a whole, twice), and how to join
    them. The pieces are views."""
    pieces: dict[str, Array] = {}
    plan = []
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        step = max(1, CHUNK_BYTES // max(1, flat.itemsize))
        keys = []
        for start in range(0, max(1, flat.size), step):
            keys.append(str(len(pieces)))
            pieces[keys[-1]] = flat[start : start + step]
        plan.append({"name": name, "shape": list(array.shape), "pieces": keys})
    return pieces, plan


def join_arrays(pieces: dict[str, Array], plan: list[dict[str, Any]]) -> dict[str, Array]:
    """The arrays joined again; pieces are removed from the dictionary one by one."""
    arrays: dict[str, Array] = {}
    for entry in plan:
        keys, shape = entry["pieces"], entry["shape"]
        first = pieces[keys[0]]
        if not is_shape(shape) or math.prod(shape) != sum(pieces[key].size for key in keys):
            raise ValueError("its pieces do not add up to its arrays")
        if len(keys) == 1:
            arrays[str(entry["name"])] = pieces.pop(keys[0]).reshape(shape)
            continue
        whole = np.empty(math.prod(shape), first.dtype)
        place = 0
        for key in keys:
            piece = pieces.pop(key)
            if piece.dtype != whole.dtype:
                raise ValueError("its pieces are of different types")
            whole[place : place + piece.size] = piece.reshape(-1)
            place += piece.size
        arrays[str(entry["name"])] = whole.reshape(shape)
    if pieces:
        raise ValueError("it has pieces that belong to no array")
    return arrays


def clear_content(shareable: Shareable) -> None:
    """Drop the content and keep the headers, which FLARE needs for routing."""
    for key in [key for key in shareable if key != ReservedHeaderKey.HEADERS]:
        del shareable[key]
