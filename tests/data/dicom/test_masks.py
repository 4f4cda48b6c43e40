"""SEG and RTSTRUCT become labels in their image's voxels, or are refused with a reason; nobody is named."""

import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import call

from data.dicom.test_writing import CLASSES, MADE_BY, make_study, read_back
from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.patient_map import KEY, MAP
from wardround.data.dicom.writing import SourceSeries, encode_rtstruct, encode_seg, encode_shares
from wardround.data.proposing.proposal import propose
from wardround.data.readers import nrrd
from wardround.data.readers.image_files import read_label

pydicom = pytest.importorskip("pydicom")
highdicom = pytest.importorskip("highdicom", reason="needs wardround[dicom]")


def save_mask(path: Path, content: bytes, edit: Callable[[Any], None] | None = None) -> None:
    path.write_bytes(content)
    if edit is not None:
        data = pydicom.dcmread(path)
        edit(data)
        data.save_as(path)


def boxes(shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, dtype=np.uint8)
    mask[2:8, 3:9, 1:3], mask[9:11, 3:6, 1:2] = 1, 2
    return mask


# What is read


def test_segments_that_overlap_are_read_and_the_smaller_one_is_kept(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 21)
    shares = np.zeros((2, *values.shape), dtype=np.float32)
    shares[0, 2:10, 2:10, 0:3], shares[1, 4:6, 4:6, 1:2] = 1, 1
    save_mask(tmp_path / "in" / "m.dcm", encode_shares(source, shares, ["liver", "tumour"], MADE_BY))
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert len(done.notes) == 1 and done.notes[0].endswith(
        "tumour lies over liver in 4 voxels and is kept there."
    )
    _, _, label, names = read_back(tmp_path / "out")
    assert names == {1: "liver", 2: "tumour"}
    assert np.array_equal(label, np.where(shares[1] > 0, 2, shares[0]))


def test_a_label_map_is_read(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 22)
    mask = boxes(values.shape)

    def as_label_map(data: Any) -> None:
        data.SegmentationType = "LABELMAP"
        frames = np.ascontiguousarray(mask.transpose(2, 1, 0))
        data.NumberOfFrames, data.BitsAllocated, data.BitsStored, data.HighBit = len(frames), 8, 8, 7
        data.PixelData = frames.tobytes() + b"\0" * (frames.size % 2)
        groups = data.PerFrameFunctionalGroupsSequence
        for number in range(len(frames)):
            groups[number].PlanePositionSequence[0].ImagePositionPatient = source.heads[
                number
            ].ImagePositionPatient
        data.PerFrameFunctionalGroupsSequence = groups[: len(frames)]

    everywhere = np.ones(values.shape, dtype=np.uint8)
    everywhere[0] = 2
    save_mask(tmp_path / "in" / "m.dcm", encode_seg(source, everywhere, CLASSES, MADE_BY), as_label_map)
    assert not import_dicom(tmp_path / "in", tmp_path / "out").notes
    assert np.array_equal(read_back(tmp_path / "out")[2], mask)


def add_contour(data: Any, source: SourceSeries, corners: list[list[float]]) -> None:
    """A contour of the first structure, its corners as (column, row, slice)."""
    from pydicom.dataset import Dataset

    to_patient = np.diag([-1.0, -1.0, 1.0, 1.0]) @ source.stack.affine
    points = np.asarray(corners) @ to_patient[:3, :3].T + to_patient[:3, 3]
    contour = Dataset()
    contour.ContourGeometricType, contour.NumberOfContourPoints = "CLOSED_PLANAR", len(points)
    contour.ContourData = [f"{number:.4f}" for number in points.reshape(-1)]
    data.ROIContourSequence[0].setdefault("ContourSequence", [])
    data.ROIContourSequence[0].ContourSequence = [*data.ROIContourSequence[0].ContourSequence, contour]


def square(low: float, high: float, height: float) -> list[list[float]]:
    return [[low, low, height], [high, low, height], [high, high, height], [low, high, height]]


def test_holes_and_several_contours_of_a_slice_are_read(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 23)

    def draw(data: Any) -> None:
        for corners in (square(0.5, 7.5, 1), square(2.5, 5.5, 1), square(8.5, 10.5, 1), square(0.5, 1.5, 2)):
            add_contour(data, source, corners)

    empty = np.zeros(values.shape, dtype=np.uint8)
    save_mask(tmp_path / "in" / "m.dcm", encode_rtstruct(source, empty, {1: "liver"}, MADE_BY), draw)
    assert not import_dicom(tmp_path / "in", tmp_path / "out").notes
    expected = empty.copy()
    expected[1:8, 1:8, 1], expected[9:11, 9:11, 1], expected[1, 1, 2] = 1, 1, 1
    expected[3:6, 3:6, 1] = 0
    assert np.array_equal(read_back(tmp_path / "out")[2], expected)


def test_shapes_as_a_person_draws_them_overlap_what_was_drawn(tmp_path: Path) -> None:
    """A circle of 40 points, as area in millimetres, against the voxels inside."""
    source, values, _ = make_study(tmp_path / "in", 24)
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    ring = [[6 + 5.3 * np.cos(a), 6 + 5.3 * np.sin(a), 1] for a in angles]
    empty = np.zeros(values.shape, dtype=np.uint8)
    content = encode_rtstruct(source, empty, {1: "liver"}, MADE_BY)
    save_mask(tmp_path / "in" / "m.dcm", content, lambda data: add_contour(data, source, ring))
    import_dicom(tmp_path / "in", tmp_path / "out")
    column, row = np.mgrid[: values.shape[0], : values.shape[1]]
    circle = (column - 6) ** 2 + (row - 6) ** 2 <= 5.3**2
    found = read_back(tmp_path / "out")[2][:, :, 1] > 0
    assert 2 * (found & circle).sum() / (found.sum() + circle.sum()) >= 0.98


def test_a_mask_without_references_goes_by_its_frame_of_reference(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 25)

    def forget(data: Any) -> None:
        del data.ReferencedSeriesSequence
        for group in data.PerFrameFunctionalGroupsSequence:
            group.pop("DerivationImageSequence", None)
        for group in data.SharedFunctionalGroupsSequence:
            group.pop("DerivationImageSequence", None)

    save_mask(tmp_path / "in" / "m.dcm", encode_seg(source, boxes(values.shape), CLASSES, MADE_BY), forget)
    assert not import_dicom(tmp_path / "in", tmp_path / "out").notes
    assert np.array_equal(read_back(tmp_path / "out")[2], boxes(values.shape))


def test_two_masks_of_an_image_are_joined_and_a_doubled_name_is_said(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 26)
    mask = boxes(values.shape)
    save_mask(tmp_path / "in" / "m1.dcm", encode_seg(source, mask * (mask == 1), {1: "liver"}, MADE_BY))
    save_mask(tmp_path / "in" / "m2.dcm", encode_rtstruct(source, mask, CLASSES, MADE_BY))
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert done.notes == ["m2.dcm: an earlier mask of this image has these already: liver."]
    assert np.array_equal(read_back(tmp_path / "out")[2], mask)


def test_names_of_structures_are_the_classes_that_init_proposes(tmp_path: Path) -> None:
    for seed in (27, 28):
        source, values, _ = make_study(tmp_path / "in" / f"{seed}", seed)
        classes = {1: "Kidney_L", 2: "Spleen"} if seed == 27 else {2: "Kidney_L", 1: "Spleen"}
        save_mask(
            tmp_path / "in" / f"{seed}" / "m", encode_seg(source, boxes(values.shape), classes, MADE_BY)
        )
    import_dicom(tmp_path / "in", tmp_path / "north")
    assert propose([tmp_path / "north"]).file.labels == {"kidney_left": (1,), "spleen": (2,)}


# What is refused


def move(data: Any, by: float) -> None:
    for group in data.PerFrameFunctionalGroupsSequence:
        place = group.PlanePositionSequence[0]
        place.ImagePositionPatient = [float(value) + by for value in place.ImagePositionPatient]


def scale(data: Any, by: float) -> None:
    measures = data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.PixelSpacing = [float(side) * by for side in measures.PixelSpacing]


def refer_elsewhere(data: Any) -> None:
    data.ReferencedSeriesSequence[0].SeriesInstanceUID = "1.2.3"
    data.pop("SourceImageSequence", None)
    for item in data.ReferencedSeriesSequence[0].ReferencedInstanceSequence:
        item.ReferencedSOPInstanceUID = "1.2.3.4"
    for group in data.PerFrameFunctionalGroupsSequence:
        group.pop("DerivationImageSequence", None)


def lose_pixels(data: Any) -> None:
    data.PixelData = data.PixelData[:2]


BAD_SEG: dict[str, tuple[Callable[[Any], None], str]] = {
    "of another series": (refer_elsewhere, "drawn on a series that is not here"),
    "of another patient": (
        lambda data: setattr(data, "PatientID", "other"),
        "PatientID is not that of the series",
    ),
    "in another space": (
        lambda data: setattr(data, "FrameOfReferenceUID", "1.9"),
        "frame of reference is not that",
    ),
    "off the grid": (lambda data: move(data, 0.3), "a grid of its own"),
    "in another spacing": (lambda data: scale(data, 1.37), "a grid of its own"),
    "beyond its image": (lambda data: move_along_rows(data, -20), "reaches beyond its image"),
    "of an unknown kind": (
        lambda data: setattr(data, "SegmentationType", "CLOUD"),
        "SegmentationType is 'CLOUD'",
    ),
    "without its pixels": (lose_pixels, "m.dcm: .*; left out"),
    "without segments": (
        lambda data: delattr(data, "SegmentSequence"),
        "m.dcm: .*SegmentSequence.*; left out",
    ),
}


def move_along_rows(data: Any, columns: int) -> None:
    shared = data.SharedFunctionalGroupsSequence[0]
    direction = np.asarray(shared.PlaneOrientationSequence[0].ImageOrientationPatient[:3], dtype=float)
    step = direction * float(shared.PixelMeasuresSequence[0].PixelSpacing[1]) * columns
    for group in data.PerFrameFunctionalGroupsSequence:
        place = group.PlanePositionSequence[0]
        place.ImagePositionPatient = [
            round(float(v) + s, 8) for v, s in zip(place.ImagePositionPatient, step, strict=True)
        ]


@pytest.mark.parametrize("kind", BAD_SEG)
def test_a_segmentation_that_does_not_fit_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    edit, reason = BAD_SEG[kind]
    source, values, _ = make_study(tmp_path / "in", 29)
    save_mask(tmp_path / "in" / "m.dcm", encode_seg(source, boxes(values.shape), CLASSES, MADE_BY), edit)
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    (note,) = done.notes
    assert re.search(reason, note) and note.startswith("m.dcm: ") and "\n" not in note, note
    assert len(done.written) == 1 and not (tmp_path / "out" / "labels").exists()


BAD_CONTOURS: dict[str, tuple[list[list[float]], str]] = {
    "between slices": (
        square(1, 4, 1.5),
        r"a contour of liver lies between slices, \d\.\d\d mm from the nearest",
    ),
    "at an angle": (
        [[1, 1, 0], [4, 1, 0], [4, 4, 2], [1, 4, 2]],
        "a contour of liver is not parallel to the slices",
    ),
    "beyond the slices": (square(1, 4, 40), "a contour of liver lies beyond the slices"),
    "of two points": ([[1, 1, 1], [4, 1, 1]], "has 6 coordinates, which are not three points or more"),
}


@pytest.mark.parametrize("kind", BAD_CONTOURS)
def test_contours_that_do_not_fit_are_refused_with_a_reason(tmp_path: Path, kind: str) -> None:
    corners, reason = BAD_CONTOURS[kind]
    source, values, _ = make_study(tmp_path / "in", 30)
    content = encode_rtstruct(source, boxes(values.shape), CLASSES, MADE_BY)
    save_mask(tmp_path / "in" / "m.dcm", content, lambda data: add_contour(data, source, corners))
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    (note,) = done.notes
    assert re.search(reason, note) and len(done.written) == 1, note


def test_points_and_open_lines_enclose_nothing(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 31)

    def mark(data: Any) -> None:
        add_contour(data, source, [[1, 1, 1]])
        data.ROIContourSequence[0].ContourSequence[-1].ContourGeometricType = "POINT"

    save_mask(tmp_path / "in" / "m.dcm", encode_rtstruct(source, boxes(values.shape), CLASSES, MADE_BY), mark)
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert done.notes == ["m.dcm: liver has a POINT contour, which encloses nothing."]
    assert np.array_equal(read_back(tmp_path / "out")[2], boxes(values.shape))


# Nobody is named

SECRET = "MuellerHans4711"


def plant(data: Any) -> None:
    """The secret in every text of a mask, private tags and descriptions too."""
    for tag in ("PatientName", "SeriesDescription", "StudyDescription", "ContentDescription",
                "StructureSetLabel", "StructureSetDescription", "InstitutionName", "ManufacturerModelName"):  # fmt: skip
        if tag != "ContentLabel":
            setattr(data, tag, SECRET)
    data.StudyDate = data.PatientBirthDate = "19600131"
    block = data.private_block(0x0011, SECRET, create=True)
    block.add_new(0x01, "LO", SECRET)
    for segment in data.get("SegmentSequence", []):
        segment.SegmentDescription = SECRET
        segment.TrackingID = SECRET
        if segment.SegmentLabel == "spleen":
            segment.SegmentLabel = SECRET
            segment.SegmentedPropertyTypeCodeSequence[0].CodeMeaning = SECRET
    for roi in data.get("StructureSetROISequence", []):
        roi.ROIDescription = SECRET
        if roi.ROIName == "spleen":
            roi.ROIName = SECRET
    for seen in data.get("RTROIObservationsSequence", []):
        seen.ROIObservationLabel = SECRET[:16]


@pytest.mark.parametrize("encode", [encode_seg, encode_rtstruct])
def test_no_text_of_a_mask_is_in_any_byte_that_is_written(tmp_path: Path, encode: Any) -> None:
    folder = tmp_path / SECRET
    source, values, _ = make_study(folder, 32)
    for path in folder.iterdir():
        data = pydicom.dcmread(path)
        plant(data)
        data.PatientID = SECRET
        data.save_as(path)
    content = encode(source, boxes(values.shape), CLASSES, MADE_BY)
    save_mask(
        folder / f"{SECRET}.dcm", content, lambda data: (plant(data), setattr(data, "PatientID", SECRET))
    )
    import_dicom(tmp_path / SECRET, tmp_path / "out")
    assert len(list((tmp_path / "out" / "labels").iterdir())) == 1
    uids = {
        str(source.heads[0][tag].value) for tag in ("SeriesInstanceUID", "StudyInstanceUID", "SOPInstanceUID")
    }
    words = re.compile(
        "|".join(["mueller", "hans", "4711", "19600131", *map(re.escape, uids)]), re.IGNORECASE
    )
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path.name not in (KEY, MAP):  # they stay at the hospital
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            for text in (
                str(path.relative_to(tmp_path)),
                content.decode("latin-1"),
                content.decode("utf-16", "replace"),
            ):
                assert not words.search(text), path


def test_free_text_is_left_out_unless_it_is_given_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, values, _ = make_study(tmp_path / "in", 33)
    content = encode_rtstruct(source, boxes(values.shape), {1: "GTV JS", 2: "Spleen"}, MADE_BY)
    save_mask(tmp_path / "in" / "m.dcm", content)
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert (
        "'GTV JS' left out, being no medical terms" in done.notes[0]
        and "--structure 'GTV JS=" in done.notes[0]
    )
    (label,) = (tmp_path / "out" / "labels").iterdir()
    assert [segment.name for segment in nrrd.read_segments(label)] == ["spleen"]
    paths = [str(tmp_path / "in"), str(tmp_path / "own")]
    code, _, _ = call(monkeypatch, capsys, "data", "import-dicom", *paths, "--structure", "gtv js=tumour")
    assert code == 0
    (label,) = (tmp_path / "own" / "labels").iterdir()
    assert [segment.name for segment in nrrd.read_segments(label)] == ["tumour"]
    assert np.array_equal(read_label(label).data[0] > 0, boxes(values.shape) == 1)
    code, _, said = call(monkeypatch, capsys, "data", "import-dicom", *paths, "--structure", "tumour")
    assert code == 2 and "NAME=CLASS" in said
