"""MetaImage files lie where ITK puts them, and every broken one is explained."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from wardround.data.readers import metaimage
from wardround.data.readers.image_files import read_image, read_label
from wardround.errors import DataError


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


def save(path: Path, values: np.ndarray, data: bytes | None = None, **changed: str | None) -> Path:
    """A file written by hand: fields of an ordinary header, some replaced, None leaves one out."""
    fields: dict[str, str | None] = {
        "ObjectType": "Image",
        "NDims": str(values.ndim),
        "BinaryData": "True",
        "DimSize": " ".join(map(str, values.shape)),
        "ElementType": "MET_SHORT",
        "ElementDataFile": "LOCAL",
        **changed,
    }
    fields["ElementDataFile"] = fields.pop("ElementDataFile")  # always the last line
    text = "".join(f"{name} = {value}\n" for name, value in fields.items() if value is not None)
    path.write_bytes(text.encode() + (values.tobytes(order="F") if data is None else data))
    return path


def test_rows_of_the_matrix_are_directions_in_lps(tmp_path: Path) -> None:
    path = save(
        tmp_path / "a.mha",
        numbers(3, 4, 5),
        TransformMatrix="0 1 0 -1 0 0 0 0 1",
        Offset="10 -20 30",
        ElementSpacing="0.5 2 3",
        AnatomicalOrientation="RAI",
    )
    found = read_image([path])
    assert np.array_equal(found.data[0], numbers(3, 4, 5)) and found.spacing == (0.5, 2, 3)
    assert np.allclose(found.affine, [[0, 2, 0, -10], [-0.5, 0, 0, 20], [0, 0, 3, 30], [0, 0, 0, 1]], atol=0)


def test_without_any_geometry_there_is_no_affine(tmp_path: Path) -> None:
    assert read_image([save(tmp_path / "a.mha", numbers(3, 4, 5))]).affine is None


@pytest.mark.parametrize("big", ["True", "False"])
@pytest.mark.parametrize("packed", ["True", "False"])
def test_packed_and_big_endian_values_are_the_same(tmp_path: Path, packed: str, big: str) -> None:
    plain = numbers(3, 4, 5).astype(">i2" if big == "True" else "<i2").tobytes(order="F")
    data = zlib.compress(plain) if packed == "True" else plain
    for name in ("BinaryDataByteOrderMSB", "ElementByteOrderMSB"):
        path = save(tmp_path / "a.mha", numbers(3, 4, 5), data, CompressedData=packed, **{name: big})
        assert np.array_equal(read_image([path]).data[0], numbers(3, 4, 5))


def test_a_header_finds_its_values_beside_it(tmp_path: Path) -> None:
    values = numbers(3, 4, 5)
    (tmp_path / "a.zraw").write_bytes(zlib.compress(values.tobytes(order="F")))
    path = save(tmp_path / "a.mhd", values, b"", CompressedData="True", ElementDataFile="a.zraw")
    assert np.array_equal(read_image([path]).data[0], values)
    (tmp_path / "b.raw").write_bytes(b"header" + values.tobytes(order="F"))
    for skipped in ("6", "-1"):
        path = save(tmp_path / "b.mhd", values, b"", HeaderSize=skipped, ElementDataFile="b.raw")
        assert np.array_equal(read_image([path]).data[0], values)


def test_channels_are_interleaved_or_a_fourth_axis(tmp_path: Path) -> None:
    values = numbers(2, 3, 4, 5)
    path = save(tmp_path / "a.mha", values, NDims="3", DimSize="3 4 5", ElementNumberOfChannels="2")
    assert np.array_equal(read_image([path]).data, values)
    fourth = save(
        tmp_path / "b.mha", numbers(3, 4, 5, 2), ElementSpacing="1 2 3 1", Offset="1 2 3 0",
        TransformMatrix="1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1",
    )  # fmt: skip
    found = read_image([fourth])
    assert found.channels == 2 and found.spacing == (1, 2, 3)
    with pytest.raises(DataError, match="2 values a voxel; a label has one"):
        read_label(path)
    colour = save(tmp_path / "c.mha", numbers(4, 6, 5), NDims="2", DimSize="6 5", ElementNumberOfChannels="4")
    assert read_image([colour]).channels == 3


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("type MET_STRING", {"ElementType": "MET_STRING"}),
        ("holds its values as text", {"BinaryData": "False"}),
        ("a MetaIO Tube, not an image", {"ObjectType": "Tube"}),
        ("several files", {"ElementDataFile": "LIST"}),
        ("several files", {"ElementDataFile": "slice%03d.raw 1 5 1"}),
        ("outside its folder", {"ElementDataFile": "../secret.raw"}),
        ("not beside it", {"ElementDataFile": "lost.raw"}),
        ("do not span space", {"ElementSpacing": "1 0 1"}),
        ("do not span space", {"ElementSpacing": "1 nan 1"}),
        ("2 spacings for 3 axes", {"ElementSpacing": "1 2"}),
        ("damaged header", {"TransformMatrix": "1 0 0 1"}),
        ("sizes are '3 4'", {"DimSize": "3 4"}),
        ("no voxels", {"DimSize": "3 4 0"}),
        ("more than a file of its size", {"DimSize": "3000 4000 5000"}),
        ("has no ElementType", {"ElementType": None}),
        ("scale its values by 2", {"ElementToIntensityFunctionSlope": "2"}),
        ("5 axes", {"NDims": "5", "DimSize": "3 4 5 1 1"}),
        ("HeaderSize is -2", {"HeaderSize": "-2"}),
        ("does not unpack", {"CompressedData": "True"}),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, said: str, changed: dict[str, str | None]
) -> None:
    data = zlib.compress(numbers(3, 4, 4).tobytes()) if "CompressedData" in changed else None
    path = save(tmp_path / "odd.mha", numbers(3, 4, 5), data, **changed)
    with pytest.raises(DataError, match=said) as error:
        read_image([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_no_metaimage_are_refused(tmp_path: Path) -> None:
    for name, content in (
        ("text", b"not an image"),
        ("half", b"ObjectType = Image\nNDims = 3\n"),
        ("bytes", bytes(9999)),
    ):
        (tmp_path / f"{name}.mha").write_bytes(content)
        with pytest.raises(DataError, match="not a MetaImage file, despite its name"):
            read_image([tmp_path / f"{name}.mha"])


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    affine = np.array([[0.1, -2.0, 0.3, 5], [1.0, 0.7, 0, -3], [0, 0.1, 3.0, 7], [0, 0, 0, 1]])
    mask = (numbers(3, 4, 5) % 3).astype(np.uint8)
    (tmp_path / "a.mha").write_bytes(metaimage.encode(mask, affine))
    found = read_label(tmp_path / "a.mha")
    assert np.array_equal(found.data[0], mask) and np.allclose(found.affine, affine, rtol=0, atol=1e-12)
    maps = numbers(2, 3, 4, 5).astype(np.float32) / 7
    (tmp_path / "b.mha").write_bytes(metaimage.encode(maps, affine, channels=True))
    assert np.array_equal(read_image([tmp_path / "b.mha"]).data, maps)
