"""Enhanced files are read as the slices they hold, and series that are no volume are refused with a reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dicom.test_writing import CLASSES, MADE_BY, draw_volume, make_study, read_back
from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.volume import Plane, place_planes
from wardround.data.dicom.writing import encode_rtstruct, encode_seg, read_source, write_series
from wardround.data.readers.image_files import read_image
from wardround.errors import DataError

pydicom = pytest.importorskip("pydicom")
highdicom = pytest.importorskip("highdicom", reason="needs wardround[dicom]")


def make_enhanced(folder: Path, files: list[Path], modality: str = "CT", shuffle: bool = True) -> Path:
    """One multi-frame file by highdicom's own conversion, its frames out of order."""
    slices = [pydicom.dcmread(path) for path in files]
    if shuffle:
        slices = [slices[place] for place in np.random.default_rng(0).permutation(len(slices))]
    kind = "LegacyConvertedEnhancedCTImage" if modality == "CT" else "LegacyConvertedEnhancedMRImage"
    found = getattr(highdicom.legacy, kind)(
        slices,
        series_instance_uid=highdicom.UID(),
        series_number=2,
        sop_instance_uid=highdicom.UID(),
        instance_number=1,
    )
    folder.mkdir(parents=True)
    found.save_as(folder / "enhanced.dcm")
    return folder / "enhanced.dcm"


@pytest.mark.parametrize("modality", ["CT", "MR"])
def test_an_enhanced_file_is_the_volume_of_its_slices(tmp_path: Path, modality: str) -> None:
    values, mask, affine = draw_volume(11)
    files = write_series(tmp_path / "slices", values, affine, "patient 11", modality)
    enhanced = make_enhanced(tmp_path / "in", files, modality)
    source = read_source([enhanced])
    assert source.stack.enhanced and source.stack.shape == values.shape
    for name, encode in (("seg", encode_seg), ("rt", encode_rtstruct)):
        (tmp_path / "in" / "mask.dcm").write_bytes(encode(source, mask, CLASSES, MADE_BY))
        done = import_dicom(tmp_path / "in", tmp_path / name)
        assert not done.notes
        image, found, label, _ = read_back(tmp_path / name)
        assert np.array_equal(image, values) and np.array_equal(label, mask)
        assert np.abs(found - affine).max() < 1e-4


def test_values_are_in_the_unit_of_the_modality_and_small_where_they_fit(tmp_path: Path) -> None:
    values, _, affine = draw_volume(12)
    for slope, shift, dtype in ((2, -1000, np.int16), (0.5, 0.25, np.float32)):
        files = write_series(tmp_path / f"{slope}", values, affine, "p")
        for path in files:
            data = pydicom.dcmread(path)
            data.RescaleSlope, data.RescaleIntercept = slope, shift
            data.save_as(path)
        (written,) = import_dicom(tmp_path / f"{slope}", tmp_path / f"out {slope}").written
        import nibabel

        assert nibabel.load(written).get_data_dtype() == dtype
        assert np.array_equal(read_image([written]).data[0], values.astype(np.float32) * slope + shift)


# Damaged and unusual input


def change(path: Path, **tags: Any) -> None:
    """Some tags of a file; None takes one out."""
    data = pydicom.dcmread(path)
    for name, value in tags.items():
        if value is None:
            delattr(data, name)
        else:
            setattr(data, name, value)
    data.save_as(path)


def drop_a_slice(files: list[Path]) -> None:
    files[2].unlink()


def double_an_instance(files: list[Path]) -> None:
    (files[1].parent / "copy.dcm").write_bytes(files[1].read_bytes())


def mix_directions(files: list[Path]) -> None:
    change(files[0], ImageOrientationPatient=[0, 1, 0, 0, 0, -1])


def mix_spacings(files: list[Path]) -> None:
    change(files[0], PixelSpacing=[9.0, 9.0])


def mix_sizes(files: list[Path]) -> None:
    data = pydicom.dcmread(files[0])
    change(files[0], Rows=data.Rows - 1, PixelData=data.PixelData[: (data.Rows - 1) * data.Columns * 2])


def mix_patients(files: list[Path]) -> None:
    change(files[0], PatientID="another")


def lose_spacing(files: list[Path]) -> None:
    for path in files:
        change(path, PixelSpacing=None)


def zero_spacing(files: list[Path]) -> None:
    for path in files:
        change(path, PixelSpacing=[0.0, 1.0])


def lose_orientation(files: list[Path]) -> None:
    for path in files:
        change(path, ImageOrientationPatient=None)


def skew_axes(files: list[Path]) -> None:
    for path in files:
        change(path, ImageOrientationPatient=[1, 0, 0, 0.6, 0.8, 0])


def cut_off_pixels(files: list[Path]) -> None:
    data = pydicom.dcmread(files[1])
    change(files[1], PixelData=data.PixelData[:100])


def lie_about_the_transfer_syntax(files: list[Path]) -> None:
    data = pydicom.dcmread(files[1])
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEG2000Lossless
    data["PixelData"].VR = "OB"
    data.PixelData = pydicom.encaps.encapsulate([b"not JPEG 2000"])
    data.save_as(files[1])


def compress_as_jpeg_lossless(files: list[Path]) -> None:
    lie_about_the_transfer_syntax(files)
    data = pydicom.dcmread(files[1])
    data.file_meta.TransferSyntaxUID = pydicom.uid.JPEGLosslessSV1
    data.save_as(files[1])


def make_a_video(files: list[Path]) -> None:
    lie_about_the_transfer_syntax(files)
    data = pydicom.dcmread(files[1])
    data.file_meta.TransferSyntaxUID = pydicom.uid.MPEG2MPML
    data.save_as(files[1])


def shift_a_slice(files: list[Path]) -> None:
    data = pydicom.dcmread(files[1])
    along = np.asarray(data.ImageOrientationPatient[:3], dtype=float) * 3 * float(data.PixelSpacing[1])
    place = np.asarray(data.ImagePositionPatient, dtype=float) + along
    change(files[1], ImagePositionPatient=[f"{value:.6f}" for value in place])


def tilt_the_gantry(files: list[Path]) -> None:
    for number, path in enumerate(files):
        change(
            path,
            ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
            ImagePositionPatient=[0, number * 2.0, number * 3.0],
        )


def lose_pixels(files: list[Path]) -> None:
    change(files[1], PixelData=None)


def cut_off_a_file(files: list[Path]) -> None:
    files[1].write_bytes(files[1].read_bytes()[:300])


REFUSED: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "a missing slice": (drop_a_slice, "slices are missing or doubled"),
    "a doubled instance": (double_an_instance, "slices are missing or doubled"),
    "mixed orientation": (mix_directions, "slices lie in different directions"),
    "mixed spacing": (mix_spacings, "slices have different pixel spacings"),
    "mixed sizes": (mix_sizes, "slices have different sizes"),
    "two patients in a series": (mix_patients, "its slices are of 2 patients"),
    "no spacing": (lose_spacing, "a slice has no PixelSpacing"),
    "a spacing of zero": (zero_spacing, "not a number above 0"),
    "no orientation": (lose_orientation, "a slice has no ImageOrientationPatient"),
    "axes not at right angles": (skew_axes, "not at right angles"),
    "pixels cut off": (cut_off_pixels, "less than the expected|length of the pixel data|PixelData|bytes"),
    "a wrong transfer syntax": (
        lie_about_the_transfer_syntax,
        "cannot be decoded as JPEG 2000 .*: they are damaged",
    ),
    "JPEG lossless without its decoder": (
        compress_as_jpeg_lossless,
        "as JPEG Lossless.*pip install python-gdcm",
    ),
    "a video": (make_a_video, "as MPEG2 .*, which wardround does not read"),
    "a slice beside the others": (shift_a_slice, "slices are shifted sideways"),
    "a tilted gantry": (tilt_the_gantry, r"the gantry was tilted by 33\.7 degrees.*dcm2niix"),
    "a slice without pixels": (lose_pixels, "(?i)pixel data"),
    "a file cut off": (cut_off_a_file, "not DICOM images: CT0002.dcm|missing or doubled|PixelData|no "),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_damaged_series_is_refused_by_name_and_the_other_is_read(tmp_path: Path, kind: str) -> None:
    damage, reason = REFUSED[kind]
    values, _, affine = draw_volume(13)
    damage(write_series(tmp_path / "in" / "bad", values, affine, "patient 1"))
    write_series(tmp_path / "in" / "good", values, affine, "patient 2")
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert len(done.written) == 1 and np.array_equal(read_image(done.written).data[0], values)
    told = " ".join(done.notes)
    import re

    assert "bad" in told and re.search(reason, told), told


@pytest.mark.parametrize("syntax", ["JPEG2000Lossless", "JPEGLSLossless", "RLELossless"])
def test_a_compressed_series_of_signed_values_is_read(tmp_path: Path, syntax: str) -> None:
    values = np.random.default_rng(14).integers(-2000, 3000, (64, 48, 3)).astype(np.int16)
    for path in write_series(tmp_path / "in", values, np.diag([-1.0, -1, 2, 1]), "p"):
        data = pydicom.dcmread(path)
        if syntax == "JPEG2000Lossless":
            pytest.importorskip("openjpeg", reason="needs wardround[dicom]")
        data.compress(getattr(pydicom.uid, syntax))
        data.save_as(path)
    (written,) = import_dicom(tmp_path / "in", tmp_path / "out").written
    assert np.array_equal(read_image([written]).data[0], values)


def test_unsigned_and_twelve_bit_values_are_read(tmp_path: Path) -> None:
    values, _, affine = draw_volume(15)
    for path in write_series(tmp_path / "in", values, affine, "p"):
        data = pydicom.dcmread(path)
        stored = (data.pixel_array.astype(np.int32) + 2048).astype("<u2")
        data.BitsStored, data.HighBit, data.PixelRepresentation = 12, 11, 0
        data.PixelData, data.RescaleIntercept = stored.tobytes(), -2048
        data.save_as(path)
    (written,) = import_dicom(tmp_path / "in", tmp_path / "out").written
    assert np.array_equal(read_image([written]).data[0], values)


def test_two_patients_in_one_folder_are_two_cases(tmp_path: Path) -> None:
    for seed in (16, 17):
        source, _, mask = make_study(tmp_path / f"{seed}", seed)
        for path in sorted((tmp_path / f"{seed}").iterdir()):
            (tmp_path / "in").mkdir(exist_ok=True)
            path.rename(tmp_path / "in" / f"{seed} {path.name}")
        (tmp_path / "in" / f"{seed} mask.dcm").write_bytes(encode_seg(source, mask, CLASSES, MADE_BY))
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert not done.notes and len({path.name.split("_")[1] for path in done.written}) == 2
    assert len(done.written) == 4


def list_planes(affine: np.ndarray, slices: int) -> list[Plane]:
    sides = np.linalg.norm(affine[:3, :3], axis=0)
    direction, spacing = tuple((affine[:3, :2] / sides[:2]).T.reshape(-1)), (sides[1], sides[0])
    return [
        Plane((9, 9), direction, tuple(affine[:3, 3] + affine[:3, 2] * n), spacing) for n in range(slices)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_each_of_the_oblique_volumes_is_refused_where_it_is_tilted(seed: int) -> None:
    values, _, affine = draw_volume(seed)
    slices = values.shape[2]
    place_planes(list_planes(affine, slices))
    draw = np.random.default_rng(seed)
    affine[:3, 2] += affine[:3, draw.integers(2)] * draw.uniform(0.6, 4) * 10 / (slices - 1)
    with pytest.raises(DataError, match=r"the gantry was tilted by \d+\.\d degrees"):
        place_planes(list_planes(affine, slices))
