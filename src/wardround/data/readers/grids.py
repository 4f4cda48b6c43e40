"""Grids of image files, from their headers alone; and labels that store the image's voxels in their own way.

A label is put on its image's voxels where it holds the same voxels in another order or direction, or a part
of them, as 3D Slicer and ITK-SNAP may save it: nothing is interpolated. Any other grid stays as it is, and
whoever compares image and label refuses it by name.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.image_files import MOST_PACKED, NIFTI, Volume

Array = NDArray[Any]
OFF_GRID = 0.05  # of a voxel that the corners of a label may lie beside the image's voxels


def place_label(label: Volume, image: Path) -> Volume:
    """The label on the image's voxels, if it has them; else as it is."""
    grid = None if label.affine is None else read_grid(image)
    if grid is None or label.affine is None:
        return label
    shape, affine = grid
    data = label.data if label.thin is None else np.expand_dims(label.data, label.thin + 1)
    if data.ndim != 4 or len(shape) != 3 or 1 in shape:
        return label
    to_image = np.linalg.inv(affine) @ label.affine
    turn, start = np.rint(to_image[:3, :3]).astype(int), np.rint(to_image[:3, 3]).astype(int)
    order = np.abs(turn).argmax(axis=1)
    corners = np.array(np.meshgrid(*((0, side - 1) for side in data.shape[1:]))).reshape(3, -1)
    apart = (to_image[:3, :3] - turn) @ corners + (to_image[:3, 3] - start)[:, None]
    is_turn = sorted(order) == [0, 1, 2] and int(np.abs(turn).sum()) == 3
    in_place = (
        np.array_equal(turn, np.eye(3, dtype=int)) and not start.any()
    )  # another shape is a mistake then
    if not is_turn or in_place or np.abs(apart).max() > OFF_GRID:
        return label
    data = data[0].transpose(order)
    back = [axis for axis in range(3) if turn[axis, order[axis]] < 0]
    start[back] -= np.array(data.shape)[back] - 1
    data = np.flip(data, tuple(back))
    first, last = np.maximum(start, 0), np.minimum(start + data.shape, shape)
    inside = data[
        tuple(slice(*ends) for ends in zip(first - start, np.maximum(last - start, 0), strict=True))
    ]
    if np.count_nonzero(inside) < np.count_nonzero(data) or not inside.size:
        return label
    whole: Array = np.zeros((1, *shape), dtype=label.data.dtype)
    whole[0][tuple(slice(*pair) for pair in zip(first, last, strict=True))] = inside
    sides = tuple(float(side) for side in np.linalg.norm(affine[:3, :3], axis=0))
    return replace(label, data=whole, affine=affine, spacing=sides, thin=None, placed=True)


def read_grid(path: Path) -> tuple[tuple[int, ...], Array] | None:
    """Shape in space and affine; None where a file has none, or is broken: reading its values says why."""
    name, data_file = path.name.lower(), path
    try:
        if not path.is_file():  # opening a pipe by mistake would wait forever
            return None
        if name.endswith(NIFTI):
            _, affine, shape = read_nifti_header(path)
        elif name.endswith((*nrrd.ENDINGS, *metaimage.ENDINGS)):
            header = (nrrd if name.endswith(nrrd.ENDINGS) else metaimage).read_header(path)
            affine, data_file = header.affine, header.data_file
            shape = tuple(side for axis, side in enumerate(header.sizes) if axis != header.channel)
        else:
            return None
        claims = math.prod(shape) > data_file.stat().st_size * MOST_PACKED  # more than such a file can hold
        broken = affine is None or not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-12
        return None if affine is None or broken or claims else (shape[:3], affine)
    except Exception:  # a broken file may break the library in any way
        return None


def read_nifti_header(path: Path) -> tuple[Any, Array, tuple[int, ...]]:
    """Header, affine and shape, without voxels, and without extensions, which may name the patient."""
    import nibabel  # when a file is read: a run on synthetic cases need not wait for it

    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if packed else path.open("rb") as stream:
        start = stream.read(348)
        stream.seek(0)
        tools: Any = nibabel  # it has no type hints
        kind = tools.Nifti2Image if start[4:7] == b"n+2" else tools.Nifti1Image
        holder = tools.FileHolder(fileobj=stream)
        loaded = kind.from_file_map({"header": holder, "image": holder}, mmap=False)
        header, affine = loaded.header.copy(), np.array(loaded.affine)
        shape = tuple(int(side) for side in loaded.shape)
    del header.extensions[:]
    return header, affine, shape
