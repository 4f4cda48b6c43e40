"""Masks go to DICOM and come back: no voxel changed, valid by another's judgement, read by another's library."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.writing import (
    MadeBy,
    SourceSeries,
    encode_rtstruct,
    encode_seg,
    encode_shares,
    read_source,
    write_series,
)
from wardround.data.readers import nrrd
from wardround.data.readers.image_files import read_image, read_label

pydicom = pytest.importorskip("pydicom")
highdicom = pytest.importorskip("highdicom", reason="needs wardround[dicom]")
MADE_BY = MadeBy("FedAvg", "ab" * 32)
CLASSES = {1: "liver", 2: "spleen"}


def draw_volume(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, a mask of blobs with holes, and an oblique, anisotropic affine whose slices follow their normal."""
    draw = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(draw.normal(size=(3, 3)))
    affine = np.eye(4)
    affine[:3, :3] = axes * np.r_[draw.uniform(0.3, 3, 2), draw.uniform(0.5, 6)]
    if np.linalg.det(affine[:3, :3]) < 0:  # slices of DICOM are counted along the normal
        affine[:3, 2] *= -1
    affine[:3, 3] = draw.uniform(-200, 200, 3)
    shape = (*(int(side) for side in draw.integers(12, 28, 2)), int(draw.integers(3, 9)))
    smooth = gaussian_filter(draw.normal(size=shape), 1.5)
    values = (smooth / smooth.std() * 400).astype(np.int16)
    mask = np.select([values > 150, values < -250], [1, 2], 0).astype(np.uint8)
    return values, mask, affine


def make_study(folder: Path, seed: int, modality: str = "CT") -> tuple[SourceSeries, np.ndarray, np.ndarray]:
    values, mask, affine = draw_volume(seed)
    files = write_series(folder, values, affine, f"patient {seed}", modality)
    return read_source(files), values, mask


def read_back(target: Path) -> tuple[np.ndarray, Any, np.ndarray, dict[int, str]]:
    (image,), (label,) = sorted((target / "images").iterdir()), sorted((target / "labels").iterdir())
    scan, mask = read_image([image]), read_label(label)
    assert scan.affine is not None and np.allclose(scan.affine, mask.affine, rtol=0, atol=1e-4)
    return scan.data[0], scan.affine, mask.data[0], {s.value: s.name for s in nrrd.read_segments(label)}


@pytest.mark.parametrize("seed", range(50))
def test_image_and_mask_come_back_from_dicom_unchanged(tmp_path: Path, seed: int) -> None:
    source, values, mask = make_study(tmp_path / "in", seed, "CT" if seed % 2 else "MR")
    encode = encode_rtstruct if seed % 5 == 0 else encode_seg
    (tmp_path / "in" / "mask.dcm").write_bytes(encode(source, mask, CLASSES, MADE_BY))
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert not done.notes
    image, affine, label, names = read_back(tmp_path / "out")
    assert np.array_equal(image, values) and np.array_equal(label, mask)
    assert np.abs(affine - draw_volume(seed)[2]).max() < 1e-4
    assert names == CLASSES


def test_probabilities_come_back_as_segments_of_at_least_half(tmp_path: Path) -> None:
    source, values, _ = make_study(tmp_path / "in", 3)
    share = np.random.default_rng(0).random(values.shape).astype(np.float32)
    content = encode_shares(source, share[None], ["liver"], MADE_BY)
    (tmp_path / "in" / "mask.dcm").write_bytes(content)
    import_dicom(tmp_path / "in", tmp_path / "out")
    _, _, label, _ = read_back(tmp_path / "out")
    assert np.array_equal(label == 1, np.rint(share * 255) >= 127.5)


def test_a_mask_says_what_made_it_and_whose_it_is(tmp_path: Path) -> None:
    source, _, mask = make_study(tmp_path / "in", 4)
    (tmp_path / "seg.dcm").write_bytes(encode_seg(source, mask, CLASSES, MADE_BY))
    (tmp_path / "rt.dcm").write_bytes(encode_rtstruct(source, mask, CLASSES, MADE_BY))
    seg, rt = (pydicom.dcmread(tmp_path / name) for name in ("seg.dcm", "rt.dcm"))
    for data in (seg, rt):
        assert data.PatientID == "patient 4" and data.StudyInstanceUID == source.heads[0].StudyInstanceUID
        assert data.FrameOfReferenceUID == source.heads[0].FrameOfReferenceUID
        assert data.SeriesInstanceUID != source.heads[0].SeriesInstanceUID
    first = seg.SegmentSequence[0]
    assert (
        first.SegmentLabel == "liver" and first.SegmentedPropertyTypeCodeSequence[0].CodeValue == "10200004"
    )
    algorithm = first.SegmentationAlgorithmIdentificationSequence[0]
    assert algorithm.AlgorithmName == "wardround FedAvg" and "ab" * 32 in str(algorithm.AlgorithmParameters)
    assert [roi.ROIName for roi in rt.StructureSetROISequence] == ["liver", "spleen"]
    assert "ab" * 32 in rt.StructureSetDescription


MUST = (  # what a PACS needs to put a mask beside its series: the patient and study modules of DICOM PS3.3
    "PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyInstanceUID", "StudyDate", "StudyTime",
    "StudyID", "AccessionNumber", "ReferringPhysicianName",
)  # fmt: skip
FREE_TEXT = (
    "StudyDescription", "SeriesDescription", "InstitutionName", "InstitutionAddress", "OperatorsName", "StationName",
    "PerformingPhysicianName", "PatientComments", "PatientAddress", "PatientMotherBirthName", "OtherPatientNames",
    "ImageComments", "ProtocolName", "RequestedProcedureDescription", "AdditionalPatientHistory", "DeviceSerialNumber",
    "PerformedProcedureStepDescription", "ClinicalTrialSubjectID", "Occupation", "MedicalAlerts", "Allergies",
)  # fmt: skip


@pytest.mark.parametrize("encode", [encode_seg, encode_rtstruct])
def test_a_mask_carries_the_patient_and_study_and_no_other_text_of_its_source(
    tmp_path: Path, encode: Any
) -> None:
    source, _, mask = make_study(tmp_path / "in", 9)
    for head in source.heads:
        for number, tag in enumerate(FREE_TEXT):
            setattr(head, tag, f"Planted{number}")
        head.private_block(0x0011, "Planted", create=True).add_new(0x01, "LO", "Planted77")
        head.PatientBirthDate, head.AccessionNumber, head.PatientSex = "19600131", "A77", "O"
    (tmp_path / "mask.dcm").write_bytes(encode(source, mask, CLASSES, MADE_BY))
    assert b"Planted" not in (tmp_path / "mask.dcm").read_bytes()
    found = pydicom.dcmread(tmp_path / "mask.dcm")
    assert all(found[tag].value == source.heads[0][tag].value for tag in MUST)


def test_highdicom_reads_the_mask_of_every_slice(tmp_path: Path) -> None:
    source, _, mask = make_study(tmp_path / "in", 5)
    (tmp_path / "seg.dcm").write_bytes(encode_seg(source, mask, CLASSES, MADE_BY))
    found = highdicom.seg.segread(tmp_path / "seg.dcm")
    uids = [head.SOPInstanceUID for head in source.heads]
    frames = found.get_pixels_by_source_instance(
        uids, combine_segments=True, relabel=True, assert_missing_frames_are_empty=True
    )
    assert np.array_equal(frames.transpose(2, 1, 0), mask)
    assert [found.get_segment_description(n).segment_label for n in (1, 2)] == ["liver", "spleen"]


def test_an_empty_mask_is_a_valid_segmentation(tmp_path: Path) -> None:
    source, _, mask = make_study(tmp_path / "in", 6)
    for encode in (encode_seg, encode_rtstruct):
        (tmp_path / "in" / "mask.dcm").write_bytes(encode(source, mask * 0, CLASSES, MADE_BY))
        done = import_dicom(tmp_path / "in", tmp_path / encode.__name__)
        assert done.notes == ["mask.dcm: liver, spleen is empty."]
        assert not read_back(tmp_path / encode.__name__)[2].any()


def test_the_same_phantom_is_the_same_bytes(tmp_path: Path) -> None:
    make_study(tmp_path / "a", 7)
    make_study(tmp_path / "b", 7)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


@pytest.mark.skipif(shutil.which("dciodvfy") is None, reason="needs dciodvfy of Debian's dicom3tools")
@pytest.mark.parametrize("modality", ["CT", "MR"])
def test_a_validator_of_others_finds_no_error(tmp_path: Path, modality: str) -> None:
    source, values, mask = make_study(tmp_path / "in", 8, modality)
    share = np.random.default_rng(0).random((2, *values.shape)).astype(np.float32)
    (tmp_path / "seg.dcm").write_bytes(encode_seg(source, mask, CLASSES, MADE_BY))
    (tmp_path / "empty.dcm").write_bytes(encode_seg(source, mask * 0, CLASSES, MADE_BY))
    (tmp_path / "share.dcm").write_bytes(encode_shares(source, share, ["liver", "spleen"], MADE_BY))
    (tmp_path / "rt.dcm").write_bytes(encode_rtstruct(source, mask, CLASSES, MADE_BY))
    for path in (*sorted(tmp_path.glob("*.dcm")), next((tmp_path / "in").iterdir())):
        said = subprocess.run(["dciodvfy", str(path)], capture_output=True, text=True, check=False)
        errors = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith("Error")]
        assert errors == [], path.name
