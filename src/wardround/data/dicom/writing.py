"""DICOM from volumes: series of made-up patients, and masks that refer to the series they were drawn on.

    write_series(folder, values, affine, patient)        CT or MR, one file a slice, or one enhanced file
    encode_seg(source, mask, classes, made_by)           DICOM SEG, binary; encode_shares: fractional
    encode_rtstruct(source, mask, classes, made_by)      contours, holes joined to their outline

A mask has the patient and study of its source, as a PACS needs it. Volumes are (column, row, slice) as
`volume` reads them.

Needs pydicom and highdicom: pip install wardround[dicom]
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.data.dicom.class_names import find_code
from wardround.data.dicom.contours import trace
from wardround.data.dicom.importing import import_pydicom, silence_pydicom
from wardround.data.dicom.volume import TO_NIFTI, Stack, plan_stack
from wardround.data.readers import nrrd
from wardround.errors import DataError
from wardround.version import __version__

Array = NDArray[Any]
NAME = "wardround"
LEVELS = 255  # of fractional segments
PLACE = (0x0018, 0x0020, 0x0028, 0x5200)  # groups of DICOM: acquisition, relation, image, frames
COPIED = (
    "SpecificCharacterSet", "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyInstanceUID",
    "StudyDate", "StudyTime", "StudyID", "AccessionNumber", "ReferringPhysicianName",
)  # fmt: skip


@dataclass(frozen=True)
class SourceSeries:
    """The series a mask refers to: its headers in the order of slices (or the enhanced one), its volume."""

    heads: Sequence[Any]
    stack: Stack


@dataclass(frozen=True)
class MadeBy:
    """The algorithm behind a mask; model: what identifies it, the SHA-256 of its parameters."""

    name: str
    model: str


@silence_pydicom()
def read_source(files: Sequence[Path]) -> SourceSeries:
    """The headers of a series that was read as a volume."""
    pydicom = import_pydicom()
    heads = [pydicom.dcmread(file, stop_before_pixels=True) for file in files]
    stack = plan_stack(heads)
    return SourceSeries(heads if stack.enhanced else [heads[place] for place in stack.order], stack)


def import_highdicom() -> Any:
    try:
        import highdicom  # type: ignore[import-not-found,unused-ignore]
        import highdicom.content  # type: ignore[import-not-found,unused-ignore]
        import highdicom.seg  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise DataError(
            "Writing DICOM SEG needs highdicom. Install it with: pip install 'wardround[dicom]'"
        ) from None
    return highdicom


# SEG


def encode_seg(
    source: SourceSeries, mask: NDArray[np.uint8], classes: Mapping[int, str], made_by: MadeBy
) -> bytes:
    """A mask (column, row, slice) as binary segments; classes: value -> name."""
    numbers = np.zeros(256, dtype=np.uint8)
    numbers[list(classes)] = range(1, len(classes) + 1)
    return build_seg(source, numbers[to_frames(source, mask)], list(classes.values()), made_by, "BINARY")


def encode_shares(
    source: SourceSeries, shares: NDArray[np.float32], names: Sequence[str], made_by: MadeBy
) -> bytes:
    """Probabilities (name, column, row, slice) of 0 to 1 as fractional segments."""
    frames = np.stack([to_frames(source, np.clip(share, 0, 1)) for share in shares], axis=-1)
    return build_seg(source, frames, names, made_by, "FRACTIONAL")


def to_frames(source: SourceSeries, values: Array) -> Array:
    """(column, row, slice) -> (frame, row, column), in the order of the source's frames."""
    frames = values.transpose(2, 1, 0)
    if source.stack.enhanced:
        frames = frames[np.argsort(source.stack.order)]
    return np.ascontiguousarray(frames)


@silence_pydicom()
def build_seg(source: SourceSeries, frames: Array, names: Sequence[str], made_by: MadeBy, kind: str) -> bytes:
    highdicom = import_highdicom()
    fractional = (
        {"fractional_type": "PROBABILITY", "max_fractional_value": LEVELS} if kind == "FRACTIONAL" else {}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values in the source's own header
        found = highdicom.seg.Segmentation(
            source_images=[drop_texts(head) for head in source.heads],
            pixel_array=frames,
            segmentation_type=kind,
            segment_descriptions=[
                describe_segment(n, name, made_by) for n, name in enumerate(names, start=1)
            ],
            series_instance_uid=highdicom.UID(),
            series_number=900 if kind == "BINARY" else 901,
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer=NAME,
            manufacturer_model_name=NAME,
            software_versions=__version__,
            device_serial_number=made_by.model[:16] or "0",
            content_description=f"{NAME} {kind.lower()} segmentation",
            content_label="SEGMENTATION",
            series_description=f"{NAME} {made_by.name}"[:64],
            omit_empty_frames=bool(
                (frames >= (1 if kind == "BINARY" else 1 / LEVELS)).any()
            ),  # or it has none
            **fractional,
        )
    return to_bytes(found)


def drop_texts(head: Any) -> Any:
    """A header with patient, study, place and pixels alone: highdicom copies all it finds on a patient."""
    from pydicom.datadict import keyword_for_tag
    from pydicom.dataset import Dataset

    kept = Dataset()
    kept.file_meta = head.file_meta
    for tag in head.keys():  # noqa: SIM118 - iterating a header decodes all of it
        if tag.group in PLACE or keyword_for_tag(tag) in (
            *COPIED,
            "SOPClassUID",
            "SOPInstanceUID",
            "Modality",
        ):
            kept[tag] = head.get_item(tag)
    return kept


def describe_segment(number: int, name: str, made_by: MadeBy) -> Any:
    highdicom = import_highdicom()
    from pydicom.sr.codedict import codes  # type: ignore[import-not-found,unused-ignore]

    identity = highdicom.AlgorithmIdentificationSequence(
        name=f"{NAME} {made_by.name}"[:64],
        family=codes.DCM.ArtificialIntelligence,
        version=__version__,
        parameters={"params_sha256": made_by.model},
    )
    description = highdicom.seg.SegmentDescription(
        segment_number=number,
        segment_label=name[:64],
        segmented_property_category=codes.SCT.Tissue,
        segmented_property_type=find_code(name) or codes.SCT.Tissue,
        algorithm_type="AUTOMATIC",
        algorithm_identification=identity,
        tracking_uid=highdicom.UID(),
        tracking_id=name[:64],
    )
    colour = nrrd.COLOURS[(number - 1) % len(nrrd.COLOURS)]
    description.RecommendedDisplayCIELabValue = list(highdicom.color.CIELabColor.from_rgb(*colour).value)
    return description


def to_bytes(data: Any) -> bytes:
    buffer = io.BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


# RTSTRUCT


@silence_pydicom()
def encode_rtstruct(
    source: SourceSeries, mask: NDArray[np.uint8], classes: Mapping[int, str], made_by: MadeBy
) -> bytes:
    """A mask (column, row, slice) as closed contours, one region of interest a class."""
    import_pydicom()
    from pydicom.dataset import Dataset
    from pydicom.uid import RTStructureSetStorage

    head = source.heads[0]
    data = make_dataset(RTStructureSetStorage)
    for tag in COPIED:
        if tag in head:
            data[tag] = head[tag]
        elif tag != "SpecificCharacterSet":  # the others may be empty, not absent
            setattr(data, tag, "")
    now = datetime.now(UTC)
    data.Modality, data.SeriesInstanceUID, data.SeriesNumber = "RTSTRUCT", make_uid(), 902
    data.SeriesDescription = f"{NAME} {made_by.name}"[:64]
    data.OperatorsName = ""
    data.Manufacturer = data.ManufacturerModelName = NAME
    data.SoftwareVersions, data.DeviceSerialNumber = __version__, made_by.model[:16] or "0"
    data.StructureSetLabel, data.InstanceNumber = "SEGMENTATION", 1
    data.StructureSetDescription = f"{NAME} {made_by.name}, params_sha256 {made_by.model}"[:1024]
    data.StructureSetDate, data.StructureSetTime = now.strftime("%Y%m%d"), now.strftime("%H%M%S")
    data.FrameOfReferenceUID, data.PositionReferenceIndicator = source.stack.frame_of_reference, ""
    data.ReferencedFrameOfReferenceSequence = [refer_to(source)]
    data.StructureSetROISequence, data.ROIContourSequence, data.RTROIObservationsSequence = [], [], []
    for number, (value, name) in enumerate(classes.items(), start=1):
        roi, contours, seen = Dataset(), Dataset(), Dataset()
        roi.ROINumber, roi.ROIName = number, name[:64]
        roi.ReferencedFrameOfReferenceUID, roi.ROIGenerationAlgorithm = (
            source.stack.frame_of_reference,
            "AUTOMATIC",
        )
        contours.ROIDisplayColor = list(nrrd.COLOURS[(number - 1) % len(nrrd.COLOURS)])
        contours.ReferencedROINumber = number
        drawn = list(draw_contours(source, mask == value))
        if drawn:
            contours.ContourSequence = drawn
        seen.ObservationNumber = seen.ReferencedROINumber = number
        seen.RTROIInterpretedType, seen.ROIInterpreter = "", ""
        data.StructureSetROISequence.append(roi)
        data.ROIContourSequence.append(contours)
        data.RTROIObservationsSequence.append(seen)
    return to_bytes(data)


def refer_to(source: SourceSeries) -> Any:
    from pydicom.dataset import Dataset

    series, study, space = Dataset(), Dataset(), Dataset()
    series.SeriesInstanceUID = source.stack.series
    series.ContourImageSequence = [name_instance(head) for head in source.heads]
    study.ReferencedSOPClassUID = (
        "1.2.840.10008.3.1.2.3.1"  # Detached Study Management, as the standard has it
    )
    study.ReferencedSOPInstanceUID = source.heads[0].StudyInstanceUID
    study.RTReferencedSeriesSequence = [series]
    space.FrameOfReferenceUID = source.stack.frame_of_reference
    space.RTReferencedStudySequence = [study]
    return space


def name_instance(head: Any, frame: int | None = None) -> Any:
    from pydicom.dataset import Dataset

    named = Dataset()
    named.ReferencedSOPClassUID, named.ReferencedSOPInstanceUID = head.SOPClassUID, head.SOPInstanceUID
    if frame is not None:
        named.ReferencedFrameNumber = frame
    return named


def draw_contours(source: SourceSeries, inside: NDArray[np.bool_]) -> Any:
    """Contours of a structure in millimetres, slice by slice."""
    from pydicom.dataset import Dataset

    stack = source.stack
    to_patient = TO_NIFTI @ stack.affine
    for height in np.flatnonzero(inside.any(axis=(0, 1))).tolist():
        for ring in trace(inside[:, :, height].T):
            places = np.column_stack([ring, np.full(len(ring), height)])
            points = places @ to_patient[:3, :3].T + to_patient[:3, 3]
            contour = Dataset()
            frame = stack.order[height] + 1 if stack.enhanced else None
            contour.ContourImageSequence = [
                name_instance(source.heads[0 if stack.enhanced else height], frame)
            ]
            contour.ContourGeometricType, contour.NumberOfContourPoints = "CLOSED_PLANAR", len(points)
            contour.ContourData = [f"{number:.5f}"[:16] for number in points.reshape(-1)]
            yield contour


# Image series of made-up patients


def make_uid(*seeds: object) -> str:
    """A new UID; always the same for the same seeds."""
    from pydicom.uid import generate_uid

    return str(generate_uid(entropy_srcs=[str(seed) for seed in seeds] or None))


def make_dataset(sop_class: str, *seeds: object) -> Any:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import UID, ExplicitVRLittleEndian

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = UID(sop_class)
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = UID(make_uid(*seeds))
    return data


def write_series(
    folder: Path, values: NDArray[np.int16], affine: NDArray[np.float64], patient: str, modality: str = "CT"
) -> list[Path]:
    """A volume (column, row, slice) as one file a slice; the same arguments give the same bytes."""
    import_pydicom()
    from pydicom.uid import CTImageStorage, MRImageStorage

    folder.mkdir(parents=True, exist_ok=True)
    to_patient = TO_NIFTI @ affine
    sides = np.linalg.norm(to_patient[:3, :3], axis=0)
    files = []
    for number in range(values.shape[2]):
        uid = (patient, modality, number)
        data = make_dataset(CTImageStorage if modality == "CT" else MRImageStorage, *uid)
        describe_patient(data, patient, modality)
        data.InstanceNumber = number + 1
        data.PixelSpacing = [float(f"{sides[1]:.8g}"), float(f"{sides[0]:.8g}")]
        data.SliceThickness = float(f"{sides[2]:.8g}")
        directions = (to_patient[:3, :2] / sides[:2]).T.reshape(-1)
        data.ImageOrientationPatient = [f"{value:.10f}"[:16] for value in directions]
        place = to_patient[:3, 2] * number + to_patient[:3, 3]
        data.ImagePositionPatient = [f"{value:.8f}"[:16] for value in place]
        set_pixels(data, values[:, :, number].T)
        files.append(folder / f"{modality}{number + 1:04d}.dcm")
        data.save_as(files[-1], enforce_file_format=True)
    return files


def describe_patient(data: Any, patient: str, modality: str) -> None:
    data.PatientID, data.PatientName = patient, f"{patient}^"
    data.PatientBirthDate = data.PatientSex = data.StudyDate = data.StudyTime = data.AccessionNumber = ""
    data.ReferringPhysicianName, data.StudyID = "", "1"
    data.StudyInstanceUID = make_uid(patient, "study")
    data.SeriesInstanceUID = make_uid(patient, modality, "series")
    data.FrameOfReferenceUID = make_uid(patient, "space")
    data.PositionReferenceIndicator = ""
    data.Modality, data.SeriesNumber, data.Manufacturer = modality, 1, NAME
    data.ImageType = (
        ["ORIGINAL", "PRIMARY", "AXIAL"] if modality == "CT" else ["ORIGINAL", "PRIMARY", "OTHER"]
    )
    data.PatientPosition, data.AcquisitionNumber, data.Laterality = "HFS", 1, ""
    if modality == "CT":
        data.KVP, data.RescaleSlope, data.RescaleIntercept, data.RescaleType = 120, 1, 0, "HU"
    else:
        data.ScanningSequence, data.SequenceVariant, data.ScanOptions = "SE", "NONE", ""
        data.MRAcquisitionType, data.EchoTime, data.EchoTrainLength, data.RepetitionTime = "3D", 10, 1, 500


def set_pixels(data: Any, pixels: NDArray[np.int16]) -> None:
    data.Rows, data.Columns = pixels.shape
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit, data.PixelRepresentation = 15, 1
    data.PixelData = np.ascontiguousarray(pixels, dtype="<i2").tobytes()
