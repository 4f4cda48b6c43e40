"""DICOM into a centre's folder: slices in their order, geometry kept, nobody named, bad series noted."""

import builtins
import gzip
import hashlib
import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from helpers import call
from numpy.typing import NDArray
from PIL import Image
from pytest import CaptureFixture, MonkeyPatch, approx, fixture, importorskip, mark, raises

from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.patient_map import KEY, MAP
from wardround.data.federation_file import Source, write
from wardround.data.proposing.proposal import describe, propose
from wardround.data.readers.common import read_rows
from wardround.data.slices.cutting import cut
from wardround.data.sources import read_source
from wardround.errors import DataError

PRIVATE = (KEY, MAP)  # what names patients, or the secret behind their names


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
    assert len(done.written) == 1 and not done.notes
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
    found = read_source(Source(path=tmp_path / "centre"), Path())
    a, b = found.entries
    assert a.group != b.group and a.group.startswith("patient_") and b.group.startswith("patient_")
    assert a.name.startswith(f"{a.group}_CT_") and b.name.startswith(f"{b.group}_CT_")
    every = [path for path in (tmp_path / "centre").rglob("*.csv") if path.name not in PRIVATE]
    everything = b"".join(path.read_bytes() for path in every)
    assert b"secret" not in everything and b"Doe" not in everything


def test_a_map_beside_the_key_leads_back_to_the_source_and_is_read_by_its_owner_alone(
    pydicom: Any, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in", tmp_path / "centre"
    stack(pydicom, source / "a", "1.1", PatientID="A-1")
    command = ("data", "import-dicom", str(source), str(target))
    code, out, _ = call(monkeypatch, capsys, *command)
    assert code == 0 and ".patient-map.csv says which file is whose" in " ".join(out.split())
    stack(pydicom, source / "b", "1.2", PatientID="B-2")
    assert call(monkeypatch, capsys, *command)[0] == 0
    for name in PRIVATE:
        assert (target / name).stat().st_mode & 0o777 == 0o600
    rows = {row["stem"]: row for row in read_rows(target / ".patient-map.csv")}
    listed = {row["stem"]: row["patient"] for row in read_rows(target / "index.csv")}
    assert {stem: row["patient"] for stem, row in rows.items()} == listed
    assert {(row["patient_id"], row["series_uid"], row["source"]) for row in rows.values()} == {
        ("A-1", "1.1", str(source / "a")),
        ("B-2", "1.2", str(source / "b")),
    }
    assert (target / ".gitignore").read_text().split() == list(PRIVATE)


def test_the_map_is_in_no_listing_and_in_nothing_that_is_written_from_one(
    pydicom: Any, tmp_path: Path
) -> None:
    target = tmp_path / "centre"
    for number in range(3):
        stack(pydicom, tmp_path / "in" / f"{number}", f"1.{number}", PatientID=f"A-{number}")
    for path in import_dicom(tmp_path / "in", target).written:
        image = nibabel.load(path)
        (target / "labels").mkdir(exist_ok=True)
        label = nibabel.Nifti1Image((np.asarray(image.dataobj) > -900).astype(np.uint8), image.affine)
        nibabel.save(label, target / "labels" / path.name)
    proposal = propose([target])
    assert not {path.name for entry in proposal.listing.entries for path in entry.files} & set(PRIVATE)
    write(proposal.file, tmp_path / "federation.yaml", notes=describe(proposal))
    cut(tmp_path / "federation.yaml", tmp_path / "slices")
    written = [tmp_path / "federation.yaml", *(p for p in (tmp_path / "slices").rglob("*") if p.is_file())]
    for path in written:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        assert b"A-1" not in content and b"patient_id" not in content and path.name not in PRIVATE


def test_a_map_of_somebody_else_is_not_replaced(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in")
    (tmp_path / "centre").mkdir()
    (tmp_path / "centre" / ".patient-map.csv").write_text("a,b\n1,2\n")
    with raises(DataError, match="is not the map that an import writes; move it elsewhere"):
        import_dicom(tmp_path / "in", tmp_path / "centre")
    assert not (tmp_path / "centre" / "images").exists()
    import_dicom(tmp_path / "in", tmp_path / "once", by_folders=True)
    assert not (tmp_path / "once" / ".patient-map.csv").exists()


# Nobody is named

NAMING = {
    "PatientName": "Müller^Hans",
    "PatientID": "MUE-4711",
    "PatientBirthDate": "19600131",
    "StudyDate": "20240229",
    "StudyDescription": "Leber Müller",
    "SeriesDescription": "Abd, Müller",
    "ProtocolName": "Müller",
    "ImageComments": "Hans Müller, 1960",
    "SeriesNumber": 1960,
    "SpecificCharacterSet": "ISO_IR 192",
}
TOLD = re.compile(r"m.{0,2}ller|hans|1960|4711|20240229|19600131|abd[,o]|leber|1\.2\.84", re.IGNORECASE)


def secret_source(pydicom: Any, tmp_path: Path) -> Path:
    """A volume and two pictures of a patient whose name stands in folders, file names and every text."""
    source = tmp_path / "dcm"
    patient = source / "Müller^Hans 1960"
    stack(pydicom, patient / "CT Abdomen", "1.2.84.1", **NAMING)
    for number in (1, 2):
        pixels = np.full((4, 4), number, dtype=np.uint8)
        file = patient / "US Leber" / f"Müller{number}.dcm"
        save(pydicom, file, pixels, "1.2.84.2", **{**NAMING, "Modality": "HANS MUELLER"})
    return source


def told(target: Path) -> list[str]:
    """Every path and content below a folder, compressed ones opened, that tells something of the source."""
    found = []
    for path in sorted(target.rglob("*")):
        if path.is_dir() or path.name in PRIVATE:
            continue
        content = path.read_bytes()
        content = gzip.decompress(content)[:352] if path.suffix == ".gz" else content
        texts = [
            path.relative_to(target).as_posix(),
            content.decode("latin-1"),
            content.decode("utf-8", "replace"),
        ]
        if any(TOLD.search(text) for text in texts):
            found.append(str(path.relative_to(target)))
    return found


@mark.parametrize("way", ["function", "command"])
def test_neither_names_nor_contents_tell_who_it_is(
    way: str, pydicom: Any, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    source, target = secret_source(pydicom, tmp_path), tmp_path / "centre"
    target.mkdir()
    (target / ".patient-key").write_text("00" * 16)  # so that no pseudonym has 1960 in it by chance
    if way == "function":
        import_dicom(source, target)
    else:
        code, _, err = call(monkeypatch, capsys, "data", "import-dicom", str(source), str(target))
        assert code == 0, err
    names = sorted(path.name for path in (target / "images").iterdir())
    assert len(names) == 3 and told(target) == []
    patient = r"patient_[0-9a-f]{10}"
    assert re.fullmatch(rf"{patient}_CT_[0-9a-f]{{10}}\.nii\.gz", names[0])
    assert re.fullmatch(rf"{patient}_OT_[0-9a-f]{{10}}_0001\.png", names[1])
    assert (target / "index.csv").read_text().splitlines()[0] == "stem,patient,modality"
    header = nibabel.load(target / "images" / names[0]).header
    assert {bytes(header[text].item()) for text in ("descrip", "aux_file", "db_name", "intent_name")} == {b""}
    with Image.open(target / "images" / names[1]) as picture:
        assert not picture.info


def test_descriptions_are_listed_for_those_who_ask_and_go_with_the_next_import(
    pydicom: Any, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    stack(pydicom, tmp_path / "in" / "a", SeriesDescription="FLAIR, axial")
    command = ("data", "import-dicom", str(tmp_path / "in"), str(tmp_path / "out"))
    index = tmp_path / "out" / "index.csv"
    assert call(monkeypatch, capsys, *command)[0] == 0 and "FLAIR" not in index.read_text()
    assert call(monkeypatch, capsys, *command, "--keep-descriptions")[0] == 0
    heads, row = index.read_text().splitlines()
    assert heads == "stem,patient,modality,series" and row.endswith(',CT,"FLAIR, axial"')
    code, out, _ = call(monkeypatch, capsys, *command)
    assert code == 0 and "FLAIR" not in index.read_text() and "taken out" in out


def test_a_pseudonym_needs_the_key_of_the_folder(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in")
    names = [import_dicom(tmp_path / "in", tmp_path / place).written[0].name for place in ("one", "two")]
    assert names[0] != names[1]
    for identity in ("secret-77", "Doe^Jane", "1.2.3"):
        for kind in ("sha256", "sha1", "md5"):
            plain = hashlib.new(kind, identity.encode(), usedforsecurity=False).hexdigest()
            assert all(plain[:10] not in name for name in names)
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / ".patient-key").write_text("\n")
    with raises(DataError, match="is empty"):
        import_dicom(tmp_path / "in", tmp_path / "three")


def test_a_series_left_out_is_named_by_its_folder_and_not_by_its_pseudonym(
    pydicom: Any, tmp_path: Path
) -> None:
    stack(pydicom, tmp_path / "in" / "good")
    stack(pydicom, tmp_path / "in" / "gap", "2", heights=(0.0, 1.0, 5.0), SeriesNumber=7)
    (note,) = import_dicom(tmp_path / "in", tmp_path / "out").notes
    assert note.startswith("gap, series 7: slices are missing") and "patient_" not in note


def test_odd_values_are_not_repeated_in_warnings_or_the_log(
    pydicom: Any, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    stack(pydicom, tmp_path / "in", "1.2.8415")
    for file in (tmp_path / "in").iterdir():  # letters, which a UID does not allow
        file.write_bytes(file.read_bytes().replace(b"1.2.8415", b"1.2.Hans"))
    command = ("data", "import-dicom", str(tmp_path / "in"), str(tmp_path / "out"))
    code, out, err = call(monkeypatch, capsys, *command)
    assert (
        code == 0
        and err == "importing: 1 of 1 cases\n"
        and "Hans" not in out
        and (tmp_path / "out" / "index.csv").exists()
    )


def test_text_in_the_pixels_is_refused_until_somebody_has_looked(
    pydicom: Any, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    pixels = np.ones((4, 4), dtype=np.uint8)
    save(pydicom, tmp_path / "in" / "a" / "1.dcm", pixels, "1", BurnedInAnnotation="YES", Modality="US")
    save(pydicom, tmp_path / "in" / "b" / "2.dcm", pixels, "2", BurnedInAnnotation="NO", Modality="US")
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    (note,) = done.notes
    assert "BurnedInAnnotation is YES" in note and note.endswith("with --burned-in: a.")
    assert len(done.written) == 1
    command = ("data", "import-dicom", str(tmp_path / "in"), str(tmp_path / "out"), "--burned-in")
    code, said, _ = call(monkeypatch, capsys, *command)
    assert code == 0 and "Wrote 1 files" in said


def test_a_mask_does_not_pass_for_a_scan(pydicom: Any, tmp_path: Path) -> None:
    pixels = np.ones((8, 8), np.uint16)
    save(pydicom, tmp_path / "in" / "1.dcm", pixels, "1", Modality="US")
    save(pydicom, tmp_path / "in" / "2.dcm", pixels, "2", Modality="SEG")
    done = import_dicom(tmp_path / "in", tmp_path / "north")
    assert len(done.written) == 1 and "2.dcm: no image has its frame of reference" in " ".join(done.notes)


def test_one_series_in_two_folders_is_two_files(pydicom: Any, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        stack(pydicom, tmp_path / "in" / folder)
    first, second = import_dicom(tmp_path / "in", tmp_path / "out").written
    assert second.name == first.name.replace(".nii.gz", "_2.nii.gz")


# Lists and names


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
    done = import_dicom(tmp_path / "in", tmp_path / "folders", by_folders=True)
    assert [path.name for path in done.written] == ["in.nii.gz", "in_s4.nii.gz"]
    done = import_dicom(tmp_path / "in", tmp_path / "out")
    assert len({path.name for path in done.written}) == 2
    assert len({path.name.rpartition("_")[0] for path in done.written}) == 1  # of one patient


def test_a_later_import_adds_to_the_list_and_knows_the_patient_again(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "one" / "a", "1.1")
    stack(pydicom, tmp_path / "two" / "b", "1.2")
    (tmp_path / "out" / "images").mkdir(parents=True)
    (tmp_path / "out" / "labels").mkdir()
    (tmp_path / "out" / "images" / "mine.png").write_bytes(b"")
    for source in ("one", "two"):
        import_dicom(tmp_path / source, tmp_path / "out")
    mine, a, b = read_source(Source(path=tmp_path / "out"), Path()).entries
    assert a.group == b.group != mine.group and mine.name == "mine"


def test_single_pictures_become_png(pydicom: Any, tmp_path: Path) -> None:
    colour = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    save(pydicom, tmp_path / "in" / "colour" / "1.dcm", colour, "1")
    bright = np.array([[0, 4000], [100, 50]], dtype=np.uint16)
    save(pydicom, tmp_path / "in" / "xray" / "1.dcm", bright, "2", PhotometricInterpretation="MONOCHROME1")
    done = import_dicom(tmp_path / "in", tmp_path / "out", by_folders=True)
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
    done = import_dicom(tmp_path / "in", tmp_path / "out", by_folders=True)
    text = " ".join(done.notes)
    assert [path.name for path in done.written] == ["good.nii.gz"]
    assert "gap: slices are missing" in text and "multi-frame" in text and "broken.dcm" in text
    again = import_dicom(tmp_path / "in", tmp_path / "out", by_folders=True)
    assert not again.written and "already" in " ".join(again.notes)


def test_a_scan_that_is_there_is_known_again_wherever_it_lies(pydicom: Any, tmp_path: Path) -> None:
    stack(pydicom, tmp_path / "in" / "before")
    first = import_dicom(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in" / "before").rename(tmp_path / "in" / "after")
    again = import_dicom(tmp_path / "in", tmp_path / "out")
    assert len(first.written) == 1 and not again.written and "already" in " ".join(again.notes)
    assert len((tmp_path / "out" / "index.csv").read_text().splitlines()) == 2


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
