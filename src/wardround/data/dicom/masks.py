"""Labels kept as DICOM: segmentations (SEG) and contours (RTSTRUCT), in the grid of their image.

    mask = read_mask(path, pydicom)                    what it refers to
    volume = find_image(mask, stacks)                  the series it was drawn on
    read_structures(mask, stack, renamed)              its structures as masks of that series' voxels

SEG: binary, fractional (at least half is inside) and label maps. Its frames must lie on the voxels of the
image. RTSTRUCT: a voxel is inside where its centre is inside an odd number of contours of its slice, so that
holes stay open. Contours between slices, or at an angle to them, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.dicom.class_names import name_class
from wardround.data.dicom.contours import fill
from wardround.data.dicom.volume import TO_NIFTI, Stack, find_in_groups, list_frames, read_pixels
from wardround.data.readers.common import join_names
from wardround.errors import DataError

Mask = NDArray[np.bool_]

KINDS = ("SEG", "RTSTRUCT")
OFF_GRID = 0.1  # of a voxel that contours and frames may lie beside it


@dataclass(frozen=True)
class DicomMask:
    """A SEG or RTSTRUCT; series, instances: UIDs it was drawn on; frame_of_reference: of its space."""

    path: Path
    kind: str
    patient: str
    series: frozenset[str]
    instances: frozenset[str]
    frame_of_reference: str


@dataclass
class Structures:
    """The masks of one image by class, (columns, rows, slices); free: names that are free text."""

    found: dict[str, Mask] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, inside: Mask) -> None:
        self.found[name] = self.found[name] | inside if name in self.found else inside


# What it belongs to


def read_mask(path: Path, pydicom: Any) -> DicomMask:
    head = pydicom.dcmread(path, stop_before_pixels=True)
    places = [head, *head.get("ReferencedFrameOfReferenceSequence", [])]
    frames = [str(place.FrameOfReferenceUID) for place in places if place.get("FrameOfReferenceUID")]
    return DicomMask(
        path,
        str(head.Modality).strip().upper(),
        str(head.get("PatientID", "")),
        frozenset(list_references(head, "SeriesInstanceUID")) - {str(head.SeriesInstanceUID)},
        frozenset(list_references(head, "ReferencedSOPInstanceUID")),
        frames[0] if frames else "",
    )


def list_references(data: Any, tag: str) -> Iterator[str]:
    """Every value of a tag in the sequences that name the images of a mask."""
    found = data.get(tag)
    if found:
        yield str(found)
    for name in (
        "ReferencedSeriesSequence", "ReferencedInstanceSequence", "ReferencedFrameOfReferenceSequence",
        "RTReferencedStudySequence", "RTReferencedSeriesSequence", "ContourImageSequence",
        "ROIContourSequence", "ContourSequence", "PerFrameFunctionalGroupsSequence",
        "SharedFunctionalGroupsSequence", "DerivationImageSequence", "SourceImageSequence",
    ):  # fmt: skip
        for item in data.get(name, None) or []:
            yield from list_references(item, tag)


def find_images(mask: DicomMask, stacks: Mapping[str, Stack]) -> list[str]:
    """The images, by name, that a mask was drawn on: by series, then instances, then the space they share."""
    same = [name for name, stack in stacks.items() if stack.series in mask.series]
    same = same or [name for name, stack in stacks.items() if mask.instances & set(stack.instances)]
    if same:
        return same
    if mask.series or mask.instances:
        raise DataError("it was drawn on a series that is not here, or could not be read")
    space = mask.frame_of_reference
    same = [name for name, stack in stacks.items() if space and stack.frame_of_reference == space]
    if len({stacks[name].series for name in same}) > 1:
        raise DataError(f"it does not say on which of {len(same)} series in its space it was drawn")
    if not same:
        raise DataError("no image has its frame of reference")
    return same


def read_structures(mask: DicomMask, stack: Stack, renamed: Mapping[str, str], pydicom: Any) -> Structures:
    """Its structures in the voxels of an image; renamed: see `class_names`."""
    if mask.patient != stack.patient:
        raise DataError("its PatientID is not that of the series it was drawn on")
    if stack.frame_of_reference and mask.frame_of_reference not in ("", stack.frame_of_reference):
        raise DataError("its frame of reference is not that of its image")
    data = pydicom.dcmread(mask.path)
    structures = Structures()
    if mask.kind == "SEG":
        read_segments(data, stack, renamed, structures, pydicom)
    else:
        read_contours(data, stack, renamed, structures)
    if structures.free and not renamed:
        names = join_names([f"'{name}'" for name in structures.free])
        structures.notes.append(
            f"{names} left out, being no medical terms; such names may tell of a patient. To use one: "
            f"--structure '{structures.free[0]}=tumour'"
        )
    empty = [name for name, inside in structures.found.items() if not inside.any()]
    if empty:
        structures.notes.append(f"{join_names(empty)} is empty")
    return structures


# SEG


def read_segments(
    data: Any, stack: Stack, renamed: Mapping[str, str], structures: Structures, pydicom: Any
) -> None:
    kind = str(data.get("SegmentationType", "")).upper()
    if kind not in ("BINARY", "FRACTIONAL", "LABELMAP"):
        raise DataError(f"its SegmentationType is {kind[:20]!a}")
    names: dict[int, str] = {}
    for segment in data.SegmentSequence:
        said = str(segment.get("SegmentLabel", "")) or str(segment.get("SegmentDescription", ""))
        name = name_class(said, read_code(segment), renamed)
        if name is None:
            structures.free.append(said)
        else:
            names[int(segment.SegmentNumber)] = name
            structures.add(name, np.zeros(stack.shape, dtype=bool))
    frames = read_pixels(data, pydicom)
    frames = frames[None] if frames.ndim == 2 else frames
    half = int(data.get("MaximumFractionalValue", 1)) / 2
    for number, plane in enumerate(list_frames(data)):
        inside = frames[number] >= half if kind == "FRACTIONAL" else frames[number] > 0
        if not inside.any():
            continue
        place = place_pixels(plane.direction, plane.position, plane.spacing, stack, inside)
        if kind == "LABELMAP":
            for value, name in names.items():
                structures.found[name][tuple(place[:, frames[number][inside] == value])] = True
            continue
        segment = find_in_groups(data, number, "SegmentIdentificationSequence", "ReferencedSegmentNumber")
        if int(segment) in names:
            structures.found[names[int(segment)]][tuple(place)] = True


def read_code(segment: Any) -> tuple[str, str] | None:
    for code in segment.get("SegmentedPropertyTypeCodeSequence", None) or []:
        return str(code.get("CodeValue", "")), str(code.get("CodingSchemeDesignator", ""))
    return None


def place_pixels(
    direction: Sequence[float],
    position: Sequence[float],
    spacing: Sequence[float],
    stack: Stack,
    inside: Mask,
) -> NDArray[np.int64]:
    """(3, count): the voxels of an image that the pixels of a frame are."""
    frame = np.eye(4)
    frame[:3, 0] = np.asarray(direction[:3]) * spacing[1]
    frame[:3, 1] = np.asarray(direction[3:]) * spacing[0]
    frame[:3, 3] = position
    moved = np.linalg.inv(stack.affine) @ TO_NIFTI @ frame
    row, column = np.nonzero(inside)
    exact = moved[:3, :2] @ np.stack([column, row]) + moved[:3, 3:]
    whole = np.rint(exact).astype(np.int64)
    steps = np.abs(moved[:3, :2])
    on_grid = np.abs(steps - np.rint(steps)).max() < 1e-2 and set(np.rint(steps).sum(axis=0)) == {1.0}
    if not on_grid or np.abs(exact - whole).max() > OFF_GRID:
        raise DataError("it has a grid of its own, not that of its image; resample it first")
    if (whole < 0).any() or (whole >= np.asarray(stack.shape)[:, None]).any():
        raise DataError("it reaches beyond its image")
    return whole


# RTSTRUCT


def read_contours(data: Any, stack: Stack, renamed: Mapping[str, str], structures: Structures) -> None:
    drawn = {int(roi.ReferencedROINumber): roi for roi in data.get("ROIContourSequence", None) or []}
    to_voxels = np.asarray(np.linalg.inv(stack.affine) @ TO_NIFTI, dtype=np.float64)
    for roi in data.StructureSetROISequence:
        said = str(roi.get("ROIName", ""))
        name = name_class(said, None, renamed)
        if name is None:
            structures.free.append(said)
            continue
        own = drawn.get(int(roi.ROINumber), {})
        slices: dict[int, list[NDArray[np.float64]]] = {}
        for contour in own.get("ContourSequence", None) or []:
            kind = str(contour.get("ContourGeometricType", ""))
            if kind in ("POINT", "OPEN_PLANAR", "OPEN_NONPLANAR"):
                structures.notes.append(f"{name} has a {kind} contour, which encloses nothing")
                continue
            height, ring = place_contour(contour, to_voxels, stack, name)
            slices.setdefault(height, []).append(ring)
        columns, rows, _ = stack.shape
        inside = np.zeros(stack.shape, dtype=bool)
        for height, rings in slices.items():
            inside[:, :, height] = fill(rings, (rows, columns)).T
        structures.add(name, inside)


def place_contour(
    contour: Any, to_voxels: NDArray[np.float64], stack: Stack, name: str
) -> tuple[int, NDArray[np.float64]]:
    """The slice of a contour and its points as (column, row)."""
    numbers = np.asarray(contour.ContourData, dtype=np.float64)
    if numbers.size < 9 or numbers.size % 3:
        raise DataError(
            f"a contour of {name} has {numbers.size} coordinates, which are not three points or more"
        )
    points = to_voxels[:3, :3] @ numbers.reshape(-1, 3).T + to_voxels[:3, 3:]
    heights = points[2]
    height = round(float(heights.mean()))
    if not np.isfinite(points).all() or heights.max() - heights.min() > 2 * OFF_GRID:
        raise DataError(f"a contour of {name} is not parallel to the slices")
    apart = float(np.abs(heights - height).max())
    if apart > OFF_GRID:
        step = float(np.linalg.norm(stack.affine[:3, 2]))
        raise DataError(f"a contour of {name} lies between slices, {apart * step:.2f} mm from the nearest")
    if not 0 <= height < stack.shape[2]:
        raise DataError(f"a contour of {name} lies beyond the slices of its image")
    return height, points[:2].T


# One label of several structures


def join_structures(found: Mapping[str, Mask]) -> tuple[NDArray[np.uint8], dict[int, str], list[str]]:
    """A label with one class a voxel, its names, and where structures overlap: there the smaller is kept."""
    notes: list[str] = []
    if len(found) > 255:
        raise DataError(f"it has {len(found)} structures; a label has at most 255")
    names = dict(enumerate(sorted(found), start=1))
    values = {name: value for value, name in names.items()}
    label: NDArray[np.uint8] = np.zeros(next(iter(found.values())).shape, dtype=np.uint8)
    for name in sorted(found, key=lambda name: (-int(found[name].sum()), name)):
        inside = found[name]
        for value in np.unique(label[inside]):
            if value:
                count = int((label[inside] == value).sum())
                notes.append(f"{name} lies over {names[int(value)]} in {count} voxels and is kept there")
        label[inside] = values[name]
    return label, names, notes
