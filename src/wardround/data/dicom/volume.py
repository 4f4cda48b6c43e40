"""The volume a DICOM series is: where its slices lie, and their values.

    stack = plan_stack(heads)                  one file a slice, or one enhanced multi-frame file
    read_stack(stack, files, pydicom)          (column, row, slice), in the unit of the modality

Slices are ordered by where they lie. A series whose slices differ in size, direction or distance, or do not
lie one above the other (a tilted gantry), is refused with a reason. So are pixels that cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.errors import DataError

Array = NDArray[Any]
Floats = NDArray[np.float64]

UNEVEN = 0.05  # of the slice distance: more is a missing slice
ASIDE = 0.5  # of a pixel that a slice may lie beside the others: more is a tilted gantry, or a moved patient
SAME_DIRECTION = 1e-3
DECODERS = {  # the package that decodes a compression, where it is not of wardround[dicom]
    "1.2.840.10008.1.2.4.51": "python-gdcm",
    "1.2.840.10008.1.2.4.57": "python-gdcm",
    "1.2.840.10008.1.2.4.70": "python-gdcm",
}
# DICOM counts to the patient's left and back, NIfTI to right and front.
TO_NIFTI = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True)
class Stack:
    """A volume.

    series, frame_of_reference: UIDs; patient: the ID; instances: SOP instance UIDs of slices in order (all
    the same in an enhanced file); order: which file, or frame, is slice 0, 1 ...; enhanced: whether these are
    frames of one file; shape: (columns, rows, slices); affine: voxel to millimetres as in NIfTI.
    """

    series: str
    patient: str
    frame_of_reference: str
    instances: tuple[str, ...]
    order: tuple[int, ...]
    enhanced: bool
    shape: tuple[int, int, int]
    affine: Floats


@dataclass(frozen=True)
class Plane:
    """Where one slice lies: DICOM PS3.3 C.7.6.2."""

    size: tuple[int, int]
    direction: tuple[float, ...]
    position: tuple[float, ...]
    spacing: tuple[float, ...]


def is_multi_frame(head: Any) -> bool:
    return int(head.get("NumberOfFrames", 1) or 1) > 1


def is_volume(heads: Sequence[Any]) -> bool:
    """Whether a series has slices in space, rather than pictures."""
    if is_multi_frame(heads[0]):
        return len(heads) == 1 and "PerFrameFunctionalGroupsSequence" in heads[0]
    return "ImagePositionPatient" in heads[0] and len(heads) > 1


def plan_stack(heads: Sequence[Any]) -> Stack:
    """Put slices in order; a DataError says why they are no volume."""
    enhanced = is_multi_frame(heads[0])
    patients = {str(head.get("PatientID", "")) for head in heads}
    if len(patients) > 1:
        raise DataError(f"its slices are of {len(patients)} patients")
    planes = list_frames(heads[0]) if enhanced else [read_plane(head) for head in heads]
    order, affine = place_planes(planes)
    rows, columns = planes[0].size
    uids = [str(head.SOPInstanceUID) for head in heads] * (len(planes) if enhanced else 1)
    return Stack(
        series=str(heads[0].SeriesInstanceUID),
        patient=patients.pop(),
        frame_of_reference=str(heads[0].get("FrameOfReferenceUID", "")),
        instances=tuple(uids[place] for place in order),
        order=order,
        enhanced=enhanced,
        shape=(columns, rows, len(planes)),
        affine=affine,
    )


def read_plane(head: Any) -> Plane:
    for tag in ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"):
        if not head.get(tag):
            raise DataError(f"a slice has no {tag}")
    return make_plane(head, head.ImageOrientationPatient, head.ImagePositionPatient, head.PixelSpacing)


def make_plane(head: Any, direction: Any, position: Any, spacing: Any) -> Plane:
    plane = Plane(
        (int(head.Rows), int(head.Columns)),
        tuple(float(value) for value in direction),
        tuple(float(value) for value in position),
        tuple(float(value) for value in spacing),
    )
    if not np.isfinite([*plane.direction, *plane.position, *plane.spacing]).all() or min(plane.spacing) <= 0:
        raise DataError("a slice has a place or spacing that is not a number above 0")
    return plane


def list_frames(head: Any) -> list[Plane]:
    """The planes of an enhanced multi-frame file, in the order of its frames."""
    planes = []
    for frame in range(int(head.NumberOfFrames)):
        said = (
            find_in_groups(head, frame, "PlaneOrientationSequence", "ImageOrientationPatient"),
            find_in_groups(head, frame, "PlanePositionSequence", "ImagePositionPatient"),
            find_in_groups(head, frame, "PixelMeasuresSequence", "PixelSpacing"),
        )
        if any(value is None for value in said):
            raise DataError("it is multi-frame without the place of every frame; convert it with dcm2niix")
        planes.append(make_plane(head, *said))
    return planes


def find_in_groups(head: Any, frame: int, sequence: str, tag: str) -> Any:
    """A value of the functional groups of a frame, its own or shared by all; None where there is none."""
    groups = (
        *list(head.get("PerFrameFunctionalGroupsSequence", []))[frame : frame + 1],
        *head.get("SharedFunctionalGroupsSequence", []),
    )
    for group in groups:
        for item in group.get(sequence, []) or []:
            if item.get(tag) is not None:
                return item[tag].value
    return None


def place_planes(planes: Sequence[Plane]) -> tuple[tuple[int, ...], Floats]:
    """The order of planes and the affine of their stack."""
    shapes = {plane.size for plane in planes}
    if len(shapes) > 1:
        raise DataError(f"slices have different sizes: {sorted(shapes)}")
    directions = np.asarray([plane.direction for plane in planes])
    if np.abs(directions - directions[0]).max() > SAME_DIRECTION:
        raise DataError("slices lie in different directions (a scout?)")
    spacings = np.asarray([plane.spacing for plane in planes])
    if np.abs(spacings - spacings[0]).max() > SAME_DIRECTION:
        raise DataError("slices have different pixel spacings")
    across, down = directions[0, :3], directions[0, 3:]
    if abs(float(across @ down)) > SAME_DIRECTION or not np.allclose(
        [across @ across, down @ down], 1, atol=1e-2
    ):
        raise DataError("rows and columns of the slices are not at right angles (ImageOrientationPatient)")
    places = np.asarray([plane.position for plane in planes])
    heights = places @ np.cross(across, down)
    order = np.argsort(heights, kind="stable")
    steps = np.diff(heights[order])
    step = float(np.median(steps))
    if step <= 0 or np.abs(steps - step).max() > UNEVEN * step:
        raise DataError(
            f"slices are missing or doubled: distances from {steps.min():.2f} to {steps.max():.2f} mm"
        )
    ordered = places[order]
    check_upright(ordered, np.cross(across, down), min(planes[0].spacing))
    row_distance, column_distance = planes[0].spacing
    affine = np.eye(4)  # DICOM PS3.3 C.7.6.2.1.1
    affine[:3, 0] = across * column_distance
    affine[:3, 1] = down * row_distance
    affine[:3, 2] = (ordered[-1] - ordered[0]) / (len(planes) - 1)
    affine[:3, 3] = ordered[0]
    return tuple(int(place) for place in order), TO_NIFTI @ affine


def check_upright(places: Floats, normal: Floats, pixel: float) -> None:
    """Refuse slices that do not lie one above the other; places: where each begins, in order."""
    moved = places - places[0]
    aside = moved - np.outer(moved @ normal, normal)
    if np.linalg.norm(aside, axis=1).max() <= ASIDE * pixel:
        return
    even = np.outer(np.arange(len(places)) / (len(places) - 1), aside[-1])
    if np.linalg.norm(aside - even, axis=1).max() > ASIDE * pixel:
        raise DataError("slices are shifted sideways against each other; export the series again")
    angle = np.degrees(np.arctan2(np.linalg.norm(aside[-1]), moved[-1] @ normal))
    raise DataError(
        f"the gantry was tilted by {angle:.1f} degrees, so that slices do not lie one above the other; "
        "straighten them with dcm2niix and use the file it names _Tilt"
    )


# Values


def read_pixels(data: Any, pydicom: Any) -> Array:
    """Stored values of all frames; a DataError names the package that a compression needs."""
    syntax = data.file_meta.TransferSyntaxUID
    if syntax.is_private or not syntax.is_compressed:
        return np.asarray(data.pixel_array)
    install = "pip install " + DECODERS.get(syntax, "'wardround[dicom]'")
    try:
        if pydicom.pixels.get_decoder(syntax).is_available:
            return np.asarray(data.pixel_array)
    except NotImplementedError:
        raise DataError(
            f"its pixels are compressed as {syntax.name}, which wardround does not read"
        ) from None
    except RuntimeError:
        raise DataError(
            f"its pixels cannot be decoded as {syntax.name}: they are damaged, or need {install}"
        ) from None
    raise DataError(f"its pixels are compressed as {syntax.name}; to read them: {install}")


def read_stack(stack: Stack, files: Sequence[Path], pydicom: Any) -> Array:
    """(column, row, slice): int16 where all values are whole and fit, else float32."""
    columns, rows, slices = stack.shape
    values = np.empty((slices, rows, columns), dtype=np.int16)  # slices first, as they are read
    if stack.enhanced:
        data = pydicom.dcmread(files[0])
        planes = (
            rescale_frame(data, place, frames, pydicom)
            for frames in [read_pixels(data, pydicom)]
            for place in stack.order
        )
    else:
        planes = (rescale(pydicom.dcmread(files[place]), pydicom) for place in stack.order)
    for number, plane in enumerate(planes):
        if values.dtype == np.int16 and not fits_int16(plane):
            values = values.astype(np.float32)
        values[number] = plane
    return values.transpose(2, 1, 0)


def rescale(data: Any, pydicom: Any) -> Array:
    """Stored values in the unit of the modality (Hounsfield for CT)."""
    if "ModalityLUTSequence" in data:
        return np.asarray(pydicom.pixels.apply_rescale(read_pixels(data, pydicom), data), dtype=np.float32)
    slope, shift = data.get("RescaleSlope"), data.get("RescaleIntercept")
    return scale(read_pixels(data, pydicom), 1 if slope is None else slope, 0 if shift is None else shift)


def rescale_frame(data: Any, frame: int, frames: Array, pydicom: Any) -> Array:
    """The same for a frame of an enhanced file, whose functional groups say the scale."""
    slope = find_in_groups(data, frame, "PixelValueTransformationSequence", "RescaleSlope")
    shift = find_in_groups(data, frame, "PixelValueTransformationSequence", "RescaleIntercept")
    return scale(frames[frame], 1 if slope is None else slope, 0 if shift is None else shift)


def scale(stored: Array, slope: Any, shift: Any) -> Array:
    """Whole numbers stay so where slope and shift are whole."""
    slope, shift = float(slope), float(shift)
    if slope.is_integer() and shift.is_integer() and stored.dtype.kind in "iu":
        return stored.astype(np.int64) * int(slope) + int(shift)
    return np.asarray(stored * slope + shift, dtype=np.float32)


def fits_int16(values: Array) -> bool:
    if values.dtype.kind == "f" and not np.array_equal(np.rint(values), values):
        return False
    return bool(values.min() >= -32768 and values.max() <= 32767)
