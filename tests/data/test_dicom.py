"""DICOM into a centre's folder: slices in their order, geometry kept, bad series noted."""

import builtins
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pytest import MonkeyPatch, approx, fixture, importorskip, raises

from wardround.data.dicom import import_dicom
from wardround.data.federation_file import Source
from wardround.data.readers import read
from wardround.errors import DataError


@fixture
def pydicom() -> Any:
    return importorskip("pydicom")


def save(pydicom: Any, path: Path, pixels: NDArray[Any], series: str, **tags: Any) -> None:
    """One file as a scanner writes it."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = CTImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = generate_uid()
    data.SeriesInstanceUID = series
    data.PatientID, data.PatientName, data.Modality = "secret-77", "Doe^Jane", "CT"
    data.Rows, data.Columns = pixels.shape[:2]
    data.SamplesPerPixel = 3 if pixels.ndim == 3 else 1
    if pixels.ndim == 3:
        data.PlanarConfiguration = 0
    data.PhotometricInterpretation = "RGB" if pixels.ndim == 3 else "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = pixels.dtype.itemsize * 8
    data.HighBit, data.PixelRepresentation = data.BitsStored - 1, int(pixels.dtype.kind == "i")
    data.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)


def stack(
    pydicom: Any, folder: Path, uid: str = "1.2.3", heights: tuple[float, ...] = (5.0, 0.0, 2.5), **tags: Any
) -> None:
    """Slices 4 x 6, saved out of order; the value of a voxel tells its row, column and height."""
    for number, height in enumerate(heights):
        row, column = np.mgrid[:4, :6]
        pixels = (100 * row + 10 * column + height * 2).astype(np.int16)
        place = {
            "ImagePositionPatient": [10.0, 20.0, height],
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "PixelSpacing": [0.8, 0.5],
            "RescaleSlope": 2,
            "RescaleIntercept": -1000,
        }
        save(pydicom, folder / f"IM{number}", pixels, uid, **{**place, **tags})


def test_a_series_becomes_a_volume_with_its_geometry(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in" / "p 1")
    done = import_dicom(tmp_path / "in", tmp_path / "centre")
    assert [path.name for path in done.written] == ["p_1.nii.gz"] and not done.notes
    image = nibabel.load(done.written[0])
    assert image.shape == (6, 4, 3)
    values = np.asarray(image.dataobj)
    assert values[5, 3, 2] == 2 * (300 + 50 + 10) - 1000 and values[0, 0, 0] == -1000
    # DICOM: column 5, row 3, slice 2 lies at (10 + 5 * 0.5, 20 + 3 * 0.8, 5) to the left and back.
    assert (image.affine @ [5, 3, 2, 1])[:3].tolist() == approx([-12.5, -22.4, 5.0])


def test_what_is_written_is_a_centre_and_names_nobody(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in" / "a", "1.1", SeriesDescription="FLAIR")
    stack(pydicom, tmp_path / "in" / "b", "1.2", SeriesDescription="T1", PatientID="other")
    import_dicom(tmp_path / "in", tmp_path / "centre")
    (tmp_path / "centre" / "labels").mkdir()
    found = read(Source(path=tmp_path / "centre"), Path())
    a, b = found.entries
    assert (a.name, b.name) == ("a", "b") and a.group != b.group and a.group.startswith("patient_")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "centre").rglob("*.csv"))
    assert b"secret" not in everything and b"Doe" not in everything
    only = import_dicom(tmp_path / "in", tmp_path / "flair", series="flair")
    assert [path.name for path in only.written] == ["a.nii.gz"]


def test_several_series_of_a_folder_get_names_of_their_own(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in", "1.1", SeriesNumber=3)
    for number, height in enumerate((0.0, 1.0)):
        pixels = np.ones((4, 4), dtype=np.int16)
        tags = {
            "ImagePositionPatient": [0, 0, height],
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "PixelSpacing": [1, 1],
        }
        save(pydicom, tmp_path / "in" / f"second{number}", pixels, "1.2", SeriesNumber=4, **tags)
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in done.written] == ["in.nii.gz", "in_s4.nii.gz"]


def test_a_later_import_adds_to_the_list_and_knows_the_patient_again(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "one" / "a", "1.1")
    stack(pydicom, tmp_path / "two" / "b", "1.2")
    (tmp_path / "out" / "images").mkdir(parents=True)
    (tmp_path / "out" / "labels").mkdir()
    (tmp_path / "out" / "images" / "mine.png").write_bytes(b"")
    for source in ("one", "two"):
        import_dicom(tmp_path / source, tmp_path / "out")
    a, b, mine = read(Source(path=tmp_path / "out"), Path()).entries
    assert a.group == b.group != mine.group and mine.name == "mine"


def test_single_pictures_become_png(pydicom: Any, tmp_path: Path) -> None:
    colour = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    save(pydicom, tmp_path / "in" / "colour" / "1.dcm", colour, "1")
    bright = np.array([[0, 4000], [100, 50]], dtype=np.uint16)
    save(pydicom, tmp_path / "in" / "xray" / "1.dcm", bright, "2", PhotometricInterpretation="MONOCHROME1")
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in done.written] == ["colour.png", "xray.png"]
    assert np.array_equal(np.asarray(Image.open(done.written[0])), colour)
    assert np.asarray(Image.open(done.written[1])).tolist() == [[4000, 0], [3900, 3950]]


def test_series_that_cannot_be_used_are_noted_and_the_others_go_on(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in" / "good")
    stack(pydicom, tmp_path / "in" / "gap", "2", heights=(0.0, 1.0, 2.0, 5.0))
    stack(pydicom, tmp_path / "in" / "film", "3", NumberOfFrames=5)
    (tmp_path / "in" / "broken.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"rubbish")
    (tmp_path / "in" / "readme.txt").write_text("hello")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    text = " ".join(done.notes)
    assert [path.name for path in done.written] == ["good.nii.gz"]
    assert "gap: slices are missing" in text and "multi-frame" in text and "broken.dcm" in text
    again = import_dicom(tmp_path / "in", tmp_path / "out")
    assert not again.written and "already" in " ".join(again.notes)


def test_a_list_of_the_users_own_is_not_replaced(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in" / "a")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "index.csv").write_text("stem,split\na,train\n")
    with raises(DataError, match="not replaced"):
        import_dicom(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out" / "images").exists()


def test_nothing_to_import_is_said(pydicom: Any, tmp_path: Path) -> None:
    with raises(DataError, match="no DICOM series"):
        import_dicom(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with raises(DataError, match="not a folder"):
        import_dicom(tmp_path / "nowhere", tmp_path / "out")


def test_without_the_library_one_is_told_what_to_install(monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "pydicom":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with raises(DataError, match=r"wardround\[dicom\]"):
        import_dicom(tmp_path, tmp_path / "out")
