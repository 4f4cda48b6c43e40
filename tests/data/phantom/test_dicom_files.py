"""Synthetic hospitals as DICOM come back from an import as the NIfTI files that hold the same cases."""

from pathlib import Path

import numpy as np
import pytest

from wardround.data.dicom.importing import import_dicom
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write
from wardround.data.readers import nrrd
from wardround.data.readers.image_files import read_image, read_label
from wardround.errors import DataError

pytest.importorskip("highdicom", reason="needs wardround[dicom]")
SETTINGS = PhantomSettings(hospitals=2, dimensions=3, size=16, cases=2, num_classes=3)


def test_an_import_gives_the_cases_back(tmp_path: Path) -> None:
    write(SETTINGS, tmp_path / "nifti", "nifti", seed=4)
    write(SETTINGS, tmp_path / "dicom", "dicom", seed=4)
    for home in sorted(path for path in (tmp_path / "dicom").iterdir() if path.is_dir()):
        cases = sorted(path for path in home.iterdir() if path.is_dir())
        assert len(cases) == 2
        for case in cases:
            done = import_dicom(case, tmp_path / "back" / case.name)
            assert not [note for note in done.notes if "empty" not in note]
            image, label = done.written
            first = tmp_path / "nifti" / home.name
            for found, wanted in (
                (read_image([image]), read_image([first / "images" / f"{case.name}.nii.gz"])),
                (read_label(label), read_label(first / "labels" / f"{case.name}.nii.gz")),
            ):
                assert found.affine is not None and wanted.affine is not None
                assert np.array_equal(found.data, wanted.data.swapaxes(1, 2))
                assert np.abs(found.affine - wanted.affine[:, [1, 0, 2, 3]]).max() < 1e-4
            assert {segment.name for segment in nrrd.read_segments(label)} <= {"lesion", "necrosis"}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(SETTINGS, tmp_path / name, "dicom", seed=4)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.dcm"))
    assert len({path.name for path in files if path.name == "mask.dcm"}) == 1 and len(files) > 30
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)


def test_pictures_and_several_channels_are_refused(tmp_path: Path) -> None:
    for settings in (PhantomSettings(hospitals=1), PhantomSettings(hospitals=1, dimensions=3, channels=2)):
        with pytest.raises(DataError, match="3D cases of one channel"):
            write(settings, tmp_path / "x", "dicom", seed=1)
