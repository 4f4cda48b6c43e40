"""The synthetic hospitals as files: complete or absent, repeatable, and readable again."""

from __future__ import annotations

import csv
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from wardround.data.phantom import cases as phantom
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.errors import DataError


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def cases(settings: PhantomSettings, seed: int) -> dict[str, phantom.Case]:
    found = {}
    for index, name in enumerate(phantom.list_hospitals(settings)):
        style = phantom.make_hospital(settings, index, seed)
        for number in range(1, phantom.count_cases(settings, name) + 1):
            case = phantom.make_case(settings, style, number, seed)
            found[f"{name}/{case.name}"] = case
    return found


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("channels", [1, 2])
def test_nifti_files_give_the_cases_back(tmp_path: Path, dimensions: int, channels: int) -> None:
    settings = PhantomSettings(hospitals=2, dimensions=dimensions, channels=channels, size=24, cases=3)
    phantom_files.write(settings, tmp_path / "data", "nifti", seed=4)
    for key, case in cases(settings, seed=4).items():
        name, stem = key.split("/")
        image = nibabel.load(tmp_path / "data" / name / "images" / f"{stem}.nii.gz")
        label = nibabel.load(tmp_path / "data" / name / "labels" / f"{stem}.nii.gz")
        assert image.get_data_dtype() == np.int16
        assert label.get_data_dtype() == np.uint8
        assert np.array_equal(image.affine, label.affine)
        assert image.ndim == (3 if channels == 1 else 4)
        assert image.header.get_zooms()[:dimensions] == pytest.approx(case.spacing)
        assert nibabel.aff2axcodes(image.affine) == ("P", "L", "S")

        shape = (*label.shape, channels)
        values = np.moveaxis(np.asarray(image.dataobj).reshape(shape), -1, 0)
        truth = np.asarray(label.dataobj)
        if dimensions == 2:
            assert label.shape[2] == 1
            values, truth = values[..., 0], truth[..., 0]
        assert np.allclose(phantom.normalise(values), case.image.numpy(), atol=1e-5)
        assert np.array_equal(truth, case.label.numpy())


@pytest.mark.parametrize("channels", [1, 3])
def test_png_files_give_the_cases_back(tmp_path: Path, channels: int) -> None:
    settings = PhantomSettings(hospitals=3, channels=channels, size=32, cases=3, num_classes=3)
    phantom_files.write(settings, tmp_path / "data", "png", seed=4)
    for key, case in cases(settings, seed=4).items():
        name, stem = key.split("/")
        with Image.open(tmp_path / "data" / name / "images" / f"{stem}.png") as picture:
            assert picture.mode == ("L" if channels == 1 else "RGB")
            values = np.asarray(picture).reshape(32, 32, channels)
        with Image.open(tmp_path / "data" / name / "labels" / f"{stem}.png") as picture:
            truth = np.asarray(picture)
        assert np.allclose(phantom.normalise(np.moveaxis(values, -1, 0)), case.image.numpy(), atol=0.02)
        assert np.array_equal(truth, case.label.numpy())


def test_the_index_names_every_case_and_its_split(tmp_path: Path) -> None:
    settings = PhantomSettings(size=16, cases=[5, 0, 1])
    phantom_files.write(settings, tmp_path / "data", "nifti", seed=0)
    with (tmp_path / "data" / "index.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["centre"], row["stem"], row["split"]) for row in rows] == [
        ("north", "north-001", "train"),
        ("north", "north-002", "train"),
        ("north", "north-003", "train"),
        ("north", "north-004", "val"),
        ("north", "north-005", "test"),
        ("south", "south-001", "train"),
    ]
    images = sorted(path.name for path in (tmp_path / "data").glob("*/images/*"))
    labels = sorted(path.name for path in (tmp_path / "data").glob("*/labels/*"))
    assert images == labels == [f"{row['stem']}.nii.gz" for row in rows]
    assert (tmp_path / "data" / "east" / "images").is_dir()


@pytest.mark.parametrize("file_format", ["nifti", "png"])
def test_the_same_seed_gives_the_same_files(tmp_path: Path, file_format: phantom_files.FileFormat) -> None:
    settings = PhantomSettings(hospitals=1, size=16, cases=3)
    for folder, seed in (("first", 1), ("second", 1), ("third", 2)):
        phantom_files.write(settings, tmp_path / folder, file_format, seed=seed)
    first, second, third = (contents(tmp_path / folder) for folder in ("first", "second", "third"))
    assert first == second
    assert first.keys() == third.keys()
    assert first != third


def test_a_folder_in_use_is_refused_and_left_untouched(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="not an empty folder; name a new one"):
        phantom_files.write(PhantomSettings(size=16, cases=1), folder, "nifti", seed=0)
    assert contents(tmp_path) == {"data/mine.txt": b"precious"}


def test_a_file_of_that_name_is_refused_and_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("precious")
    with pytest.raises(DataError, match="not an empty folder"):
        phantom_files.write(PhantomSettings(size=16, cases=1), tmp_path / "data", "nifti", seed=0)
    assert contents(tmp_path) == {"data": b"precious"}


def test_an_empty_folder_and_missing_parents_are_fine(tmp_path: Path) -> None:
    settings = PhantomSettings(hospitals=1, size=16, cases=1)
    (tmp_path / "empty").mkdir()
    phantom_files.write(settings, tmp_path / "empty", "png", seed=0)
    phantom_files.write(settings, tmp_path / "a" / "b", "png", seed=0)
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty"]


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(phantom_files, "_save_nifti", fail)
    with pytest.raises(OSError, match="No space left"):
        phantom_files.write(PhantomSettings(size=16, cases=1), tmp_path / "data", "nifti", seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "file_format", "sentence"),
    [
        (PhantomSettings(dimensions=3), "png", "PNG files hold 2D cases .* choose the format 'nifti'"),
        (PhantomSettings(channels=2), "png", "PNG files hold 1 or 3 channels .* have 2"),
        (PhantomSettings(), "tiff", "'tiff'; choose 'nifti', 'png' or 'dicom'"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    tmp_path: Path, settings: PhantomSettings, file_format: phantom_files.FileFormat, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        phantom_files.write(settings, tmp_path / "data", file_format, seed=0)
    assert list(tmp_path.iterdir()) == []
