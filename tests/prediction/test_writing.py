"""Masks lie where the scans lie: fifty random geometries, and a network that is known by heart."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import nibabel
import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image
from scipy.spatial.transform import Rotation

from prediction.threshold import ball, predictor, save_nifti
from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.writing import write_series
from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.image_files import read_image, read_label
from wardround.prediction.inputs import Format
from wardround.prediction.session import predict_all, predict_into


def random_affine(draw: np.random.Generator, number: int) -> np.ndarray:
    """Oblique or straight, flipped or not, axes in any order, voxels up to four times as long as wide."""
    sides = draw.uniform(0.8, 2.0, 3)
    if number % 3 == 0:
        sides[draw.integers(3)] *= 2
    directions = Rotation.random(random_state=int(draw.integers(2**31))).as_matrix()
    if number % 4 == 0:
        directions = np.eye(3)
    directions = directions[:, draw.permutation(3)] * draw.choice([-1.0, 1.0], 3)
    affine = np.eye(4)
    affine[:3, :3] = directions * sides
    affine[:3, 3] = draw.uniform(-50, 50, 3)
    return affine


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return float(2 * (one & other).sum() / max(1, one.sum() + other.sum()))


@pytest.mark.parametrize("number", range(50))
def test_fifty_random_affines(number: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(number)
    kind = ("3D", "2D", "4D single-channel", "one slice", "3D")[number % 5]
    affine = random_affine(draw, number)
    shape = tuple(int(side) for side in draw.integers(18, 30, 3))
    if kind == "2D":
        shape = shape[:2]
    elif kind == "one slice":
        shape = (*shape[:2], 1)
    middle = np.array([*(draw.uniform(0.35, 0.65, len(shape)) * (np.array(shape) - 1)), *[0.0] * 3])[:3]
    middle[2] = 0 if kind == "one slice" else middle[2]
    centre = affine[:3, :3] @ middle + affine[:3, 3]
    sides = np.linalg.norm(affine[:3, :3], axis=0)
    lesion = ball(shape, centre, 4.0 * float(sides.max()), affine)
    stored = lesion[..., None] if kind == "4D single-channel" else lesion
    ending = ".nii.gz" if number % 2 else ".nii"
    scan = save_nifti(tmp_path / f"scan{ending}", stored * 900 + 100, affine)
    dimensions = 2 if kind in ("2D", "one slice") else 3
    prepare: dict[str, object] = {}
    if number % 3 == 1:  # resampled: to one spacing, or to one size
        prepare = {"spacing": [1.0] * dimensions} if number % 2 else {"size": [28] * dimensions}
    if number % 7 == 0:
        prepare["crop"] = "foreground"
    model = predictor(dimensions, prepare=prepare, patch=(16, 16, 16) if number % 2 else None)
    report = predict_into(model, [scan], tmp_path / "out")
    assert not report.problems

    before, after = nibabel.load(scan), nibabel.load(tmp_path / "out" / scan.name)
    mask = np.asarray(after.dataobj)
    assert mask.shape == before.shape
    assert mask.dtype == np.uint8 and after.get_data_dtype() == np.uint8
    assert_allclose(after.affine, before.affine, atol=1e-6)
    for form in ("qform_code", "sform_code"):
        assert after.header[form] == before.header[form]
    found = mask.reshape(lesion.shape) > 0
    here, there = (np.argwhere(part).mean(axis=0) for part in (found, lesion > 0))
    assert np.abs(here - there).max() < 1  # voxels
    own = predictor(dimensions, prepare={"orientation": None})  # on the grid as it is
    reference = predict_all(own, [scan])[0].mask.reshape(lesion.shape) > 0
    assert dice(found, reference) > 0.95
    assert np.array_equal(reference, lesion > 0)


def test_volume_is_in_millilitres_even_of_a_sheared_grid(tmp_path: Path) -> None:
    affine = np.array([[2.0, 0.5, 0, 0], [0, 2.0, 0, 0], [0, 0, 3.0, 0], [0, 0, 0, 1]])
    values = np.zeros((10, 10, 10), dtype=np.float32)
    values[2:7, 2:7, 2:6] = 1
    scan = save_nifti(tmp_path / "scan.nii", values, affine)
    found = predict_all(predictor(prepare={"orientation": None}), [scan])[0]
    assert found.sizes["lesion"]["voxels"] == 100
    assert found.sizes["lesion"]["ml"] == pytest.approx(100 * 12 / 1000)


def test_masks_have_the_values_of_the_training_labels(tmp_path: Path) -> None:
    values = np.zeros((12, 12, 12), dtype=np.float32)
    values[3:6, 3:6, 3:6] = 1
    scan = save_nifti(tmp_path / "scan.nii.gz", values, np.eye(4))
    model = predictor(labels={"lesion": (7, 8)})
    mask = predict_all(model, [scan])[0].mask
    assert set(np.unique(mask)) == {0, 7}


@pytest.mark.parametrize("name", ["photo.png", "photo.jpg", "photo.tif", "photo.bmp"])
def test_pictures_become_masks_of_their_size(name: str, tmp_path: Path) -> None:
    values = np.zeros((40, 30), dtype=np.uint8)
    values[10:20, 5:15] = 255
    Image.fromarray(values).save(tmp_path / name)
    report = predict_into(predictor(2), [tmp_path / name], tmp_path / "out")
    assert not report.problems
    (mask,) = report.done
    assert mask == {"photo.jpg": "photo.png", "photo.bmp": "photo.png"}.get(name, name)
    found = np.asarray(Image.open(tmp_path / "out" / mask))
    assert found.dtype == np.uint8
    assert np.array_equal(found, (values > 127).astype(np.uint8))
    assert report.done[mask]["classes"]["lesion"]["voxels"] == 100
    assert "mm2" not in report.done[mask]["classes"]["lesion"]  # a picture has no millimetres


def test_header_is_the_scans_own(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(
        np.zeros((8, 9, 10), dtype=np.int16) + np.arange(10, dtype=np.int16), np.eye(4)
    )
    image.header.set_xyzt_units("mm", "sec")
    image.header["descrip"] = b"made by hand"
    image.header.set_slope_inter(2.0, -5.0)
    image.set_sform(np.diag([1.0, 2.0, 3.0, 1.0]), code=4)
    image.set_qform(np.diag([1.0, 2.0, 3.0, 1.0]), code=1)
    nibabel.save(image, tmp_path / "scan.nii")
    predict_into(predictor(), [tmp_path / "scan.nii"], tmp_path / "out")
    before, after = (nibabel.load(folder / "scan.nii").header for folder in (tmp_path, tmp_path / "out"))
    for key in ("pixdim", "qform_code", "sform_code", "xyzt_units", "descrip", "srow_x", "quatern_b"):
        assert np.array_equal(before[key], after[key])
    assert set(np.unique(np.asarray(nibabel.load(tmp_path / "out" / "scan.nii").dataobj))) <= {0, 1}


def test_probabilities_and_maps_lie_where_the_scan_lies(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    affine = random_affine(draw, 1)
    shape = (20, 18, 16)
    scan = save_nifti(tmp_path / "scan.nii.gz", ball(shape, affine[:3] @ [9, 9, 8, 1], 6, affine), affine)
    model = predictor(
        prepare={"spacing": [1.2, 1.2, 1.2]}, options={"probabilities": True, "uncertainty": "auto"}
    )
    report = predict_into(model, [scan], tmp_path / "out")
    assert not report.problems
    files = report.done["scan.nii.gz"]["files"]
    maps = {what: nibabel.load(tmp_path / "out" / name) for what, name in files.items()}
    assert set(maps) == {"mask", "probabilities", "total"}
    assert maps["probabilities"].shape == (*shape, 2)
    assert maps["total"].shape == shape
    for image in maps.values():
        assert_allclose(image.affine, affine, atol=1e-6)
    values = np.asarray(maps["probabilities"].dataobj)
    assert_allclose(values.sum(axis=-1), 1, atol=1e-5)
    assert np.array_equal(values.argmax(axis=-1), np.asarray(maps["mask"].dataobj))


# NRRD and MetaImage


def save_scan(path: Path, values: np.ndarray, affine: np.ndarray) -> Path:
    content = nrrd.encode(values, affine) if path.suffix == ".nrrd" else metaimage.encode(values, affine)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("to", [None, "nifti", "nrrd"])
@pytest.mark.parametrize("ending", [".nrrd", ".mha", ".nii.gz"])
def test_masks_of_every_format_lie_where_the_scan_lies(tmp_path: Path, ending: str, to: str | None) -> None:
    own = {".nrrd": ".seg.nrrd"}.get(ending, ending)
    expected = {"nifti": ".nii.gz", "nrrd": ".seg.nrrd", None: own}[to]
    for number in range(6):
        draw = np.random.default_rng(number)
        affine = random_affine(draw, number)
        values = (draw.random((7, 8, 9)) > 0.6).astype(np.float32) * 900 + 100
        save = save_nifti if ending == ".nii.gz" else save_scan
        scan = save(tmp_path / f"scan{number}{ending}", values, affine)
        model = predictor(
            3, prepare={"orientation": None}, options={"probabilities": True, "uncertainty": "auto"}
        )
        report = predict_into(model, [scan], tmp_path / "out", to=to)  # type: ignore[arg-type]
        assert not report.problems
        (facts,) = report.done.values()
        assert facts["files"]["mask"] == f"scan{number}{expected}"
        mask = read_label(tmp_path / "out" / facts["files"]["mask"])
        assert np.array_equal(mask.data[0] > 0, values > 500)
        assert_allclose(mask.affine, affine, atol=1e-5)
        shares = read_image([tmp_path / "out" / facts["files"]["probabilities"]])
        assert shares.data.shape == (2, 7, 8, 9)
        assert np.array_equal(shares.data[1] > 0.5, values > 500)
        assert_allclose(shares.affine, affine, atol=1e-5)
        assert read_image([tmp_path / "out" / facts["files"]["total"]]).spatial == (7, 8, 9)
    if expected == ".seg.nrrd":
        assert [s.name for s in nrrd.read_segments(tmp_path / "out" / "scan0.seg.nrrd")] == ["lesion"]


def test_a_slice_in_another_format_keeps_its_plane(tmp_path: Path) -> None:
    values = np.zeros((12, 10, 1), dtype=np.float32)
    values[3:6, 4:7] = 1000
    scan = save_scan(tmp_path / "scan.mha", values, np.diag([-1.0, -2, 3, 1]))
    report = predict_into(predictor(2, prepare={"orientation": None}), [scan], tmp_path / "out", to="nifti")
    assert not report.problems
    mask = nibabel.load(tmp_path / "out" / "scan.nii.gz")
    assert np.array_equal(np.asarray(mask.dataobj) > 0, values > 500)


def test_pictures_have_no_mask_in_another_format(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(tmp_path / "photo.png")
    report = predict_into(predictor(2), [tmp_path / "photo.png"], tmp_path / "out", to="nrrd")
    (problem,) = report.problems
    assert "photo.png is a picture or an array: no mask as nrrd" in problem.reason


def test_segmentations_beside_the_scans_are_not_predicted(tmp_path: Path) -> None:
    save_scan(tmp_path / "scan.nrrd", np.zeros((7, 8, 9), dtype=np.float32), np.eye(4))
    save_scan(tmp_path / "scan.seg.nrrd", np.zeros((7, 8, 9), dtype=np.uint8), np.eye(4))
    report = predict_into(predictor(3), [tmp_path], tmp_path / "out")
    assert list(report.done) == ["scan.seg.nrrd"] and not report.problems


# DICOM


def save_study(folder: Path) -> tuple[np.ndarray, list[Path]]:
    """A bright box in a CT, oblique, and where it is."""
    pytest.importorskip("highdicom", reason="needs wardround[dicom]")
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", [10, 20, 30], degrees=True).as_matrix() * [1.0, 1.5, 3.0]
    values = np.full((14, 12, 6), 100, dtype=np.int16)
    values[4:9, 3:7, 2:5] = 1000
    values[6, 5, 3] = 100  # a hole
    return values > 500, write_series(folder, values, affine, "patient 1")


@pytest.mark.parametrize("to", ["dicom-seg", "rtstruct"])
def test_a_mask_goes_back_to_the_series_it_was_predicted_from(tmp_path: Path, to: Format) -> None:
    inside, _ = save_study(tmp_path / "study")
    options = {"probabilities": True, "uncertainty": "auto"}
    model = predictor(3, prepare={"orientation": None}, options=options)
    report = predict_into(model, [tmp_path / "study"], tmp_path / "out", to=to)
    assert not report.problems
    (facts,) = report.done.values()
    ending = {"dicom-seg": "study.seg.dcm", "rtstruct": "study.rtstruct.dcm"}[to]
    assert facts["files"] == {
        "mask": ending,
        "probabilities": "study_probabilities.seg.dcm",
        "total": "study_uncertainty.seg.dcm",
    }
    for name in ("mask", "probabilities"):
        (tmp_path / name).mkdir()
        shutil.copytree(tmp_path / "study", tmp_path / name / "in")
        shutil.copy(tmp_path / "out" / facts["files"][name], tmp_path / name / "in" / "mask.dcm")
        done = import_dicom(tmp_path / name / "in", tmp_path / name / "out", structures={"lesion": "lesion"})
        assert not done.notes
        (label,) = (tmp_path / name / "out" / "labels").iterdir()
        assert np.array_equal(read_label(label).data[0] > 0, inside)
    again = predict_into(model, [tmp_path / "study"], tmp_path / "out", to=to)
    assert "exists already" in again.problems[0].reason


def test_a_zip_of_a_study_is_read_wherever_its_series_lie(tmp_path: Path) -> None:
    inside, files = save_study(tmp_path / "study")
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as packed:
        for file in files:
            packed.write(file, f"DICOM/PAT1/ST1/SE1/{file.name}")
        packed.writestr("DICOM/readme.txt", "from the PACS")
    model = predictor(3, prepare={"orientation": None})
    for to in ("dicom-seg", None):
        report = predict_into(model, [tmp_path / "export.zip"], tmp_path / f"out {to}", to=to)  # type: ignore[arg-type]
        assert not report.problems and len(report.done) == 1
    (mask,) = (tmp_path / "out None").glob("*.nii.gz")
    assert np.array_equal(read_label(mask).data[0] > 0, inside)
    report = predict_into(model, [tmp_path / "study"], tmp_path / "nested", to="nrrd")
    assert list(report.done) == ["study.seg.nrrd"]


def test_a_folder_of_nested_series_is_read(tmp_path: Path) -> None:
    save_study(tmp_path / "pacs" / "patient" / "series")
    report = predict_into(predictor(3), [tmp_path / "pacs"], tmp_path / "out")
    assert not report.problems and len(report.done) == 1


def test_a_mask_as_dicom_needs_a_dicom_scan(tmp_path: Path) -> None:
    scan = save_nifti(tmp_path / "scan.nii.gz", np.zeros((7, 8, 9), dtype=np.float32), np.eye(4))
    report = predict_into(predictor(3), [scan], tmp_path / "out", to="dicom-seg")
    assert "is no DICOM volume, to which a mask as dicom-seg would refer" in report.problems[0].reason


def test_broken_and_huge_zips_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.zip").write_bytes(b"PK no zip")
    report = predict_into(predictor(3), [tmp_path / "broken.zip"], tmp_path / "out")
    assert "broken.zip cannot be unpacked" in report.problems[0].reason
    with zipfile.ZipFile(tmp_path / "large.zip", "w") as packed:
        packed.writestr("scan.nii", bytes(2000))
    monkeypatch.setattr("wardround.prediction.inputs.MOST_UNPACKED", 1000)
    report = predict_into(predictor(3), [tmp_path / "large.zip"], tmp_path / "out")
    assert "would unpack to more than" in report.problems[0].reason
