"""NRRD files lie where 3D Slicer shows them, and every broken one is explained."""

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest

from wardround.data.readers import nrrd
from wardround.data.readers.image_files import read_image, read_label
from wardround.errors import DataError

LPS = (-1.0, -1.0, 1.0)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


def save(
    path: Path, values: np.ndarray, *lines: str, data: bytes | None = None, **changed: str | None
) -> Path:
    """A file written by hand: fields of an ordinary header, some replaced, None leaves one out."""
    fields: dict[str, str | None] = {
        "type": "short",
        "dimension": str(values.ndim),
        "sizes": " ".join(map(str, values.shape)),
        "encoding": "raw",
        "endian": "little",
        **{name.replace("_", " "): value for name, value in changed.items()},
    }
    said = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    text = "\n".join(["NRRD0004", "# by hand", *said, *lines]) + "\n\n"
    path.write_bytes(text.encode() + (values.tobytes(order="F") if data is None else data))
    return path


def test_a_header_in_lps_is_turned_to_the_right_and_front(tmp_path: Path) -> None:
    directions = "(0.5,0,0) (0,2,0.25) (0,-0.25,3)"
    path = save(
        tmp_path / "a.nrrd",
        numbers(3, 4, 5),
        space="left-posterior-superior",
        space_directions=directions,
        space_origin="(10,-20,30)",
    )
    found = read_image([path])
    assert np.array_equal(found.data[0], numbers(3, 4, 5))
    assert found.affine is not None
    assert np.allclose(
        found.affine, [[-0.5, 0, 0, -10], [0, -2, 0.25, 20], [0, 0.25, 3, 30], [0, 0, 0, 1]], atol=0
    )
    assert np.allclose(found.spacing, [0.5, np.sqrt(4.0625), np.sqrt(9.0625)])


@pytest.mark.parametrize(
    ("space", "signs"),
    [
        ("RAS", (1, 1, 1)),
        ("right-anterior-superior", (1, 1, 1)),
        ("LAS", (-1, 1, 1)),
        ("left-posterior-superior", LPS),
        ("scanner-xyz", LPS),
    ],
)
def test_each_space_counts_its_own_way(tmp_path: Path, space: str, signs: tuple[float, ...]) -> None:
    directions = "(1,0,0) (0,1,0) (0,0,1)"
    path = save(
        tmp_path / "a.nrrd",
        numbers(3, 4, 5),
        space=space,
        space_directions=directions,
        space_origin="(1,2,3)",
    )
    affine = read_image([path]).affine
    assert affine is not None and np.array_equal(affine[:3, 3], np.array([1, 2, 3]) * signs)
    assert np.array_equal(np.diag(affine)[:3], signs)


def test_spacings_alone_are_taken_as_itk_takes_them(tmp_path: Path) -> None:
    found = read_image([save(tmp_path / "a.nrrd", numbers(3, 4, 5), spacings="1 2 3")])
    assert found.affine is not None and np.array_equal(found.affine, np.diag([-1.0, -2, 3, 1]))


def test_without_any_geometry_there_is_no_affine(tmp_path: Path) -> None:
    found = read_image([save(tmp_path / "a.nrrd", numbers(3, 4, 5))])
    assert found.affine is None and found.spacing == (1, 1, 1)


@pytest.mark.parametrize("packed", ["gzip", "gz", "bzip2", "raw", "text"])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_packed_and_big_endian_values_are_the_same(tmp_path: Path, packed: str, endian: str) -> None:
    values = numbers(3, 4, 5)
    plain = values.astype(">i2" if endian == "big" else "<i2").tobytes(order="F")
    data = {
        "gzip": gzip.compress(plain),
        "gz": gzip.compress(plain),
        "bzip2": bz2.compress(plain),
        "raw": plain,
        "text": " ".join(map(str, values.reshape(-1, order="F"))).encode(),
    }[packed]
    path = save(tmp_path / "a.nrrd", values, data=data, encoding=packed, endian=endian)
    assert np.array_equal(read_image([path]).data[0], values)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("uchar", "u1"), ("signed char", "i1"), ("ushort", "<u2"), ("int", "<i4"), ("uint", "<u4"), ("float", "<f4"),
     ("double", "<f8"), ("long long int", "<i8"), ("uint64", "<u8")],
)  # fmt: skip
def test_every_type_of_numbers_is_read(tmp_path: Path, kind: str, dtype: str) -> None:
    values = numbers(3, 4, 5).astype(dtype)
    assert np.array_equal(
        read_image([save(tmp_path / "a.nrrd", values, type=kind)]).data[0], numbers(3, 4, 5)
    )


def test_a_detached_header_finds_its_values_beside_it(tmp_path: Path) -> None:
    values = numbers(3, 4, 5)
    (tmp_path / "a.raw.gz").write_bytes(gzip.compress(values.tobytes(order="F")))
    path = save(tmp_path / "a.nhdr", values, data=b"", encoding="gzip", data_file="a.raw.gz")
    assert np.array_equal(read_image([path]).data[0], values)
    (tmp_path / "b.raw").write_bytes(b"a header of 21 bytes." + values.tobytes(order="F"))
    for skipped in ("21", "-1"):
        path = save(tmp_path / "b.nhdr", values, data=b"", data_file="b.raw", byte_skip=skipped)
        assert np.array_equal(read_image([path]).data[0], values)


def test_the_axis_outside_space_holds_channels(tmp_path: Path) -> None:
    values = numbers(2, 3, 4, 5)
    directions = "none (1,0,0) (0,1,0) (0,0,1)"
    first = save(
        tmp_path / "a.nrrd",
        values,
        space="LPS",
        space_directions=directions,
        kinds="list domain domain domain",
    )
    found = read_image([first])
    assert found.channels == 2 and np.array_equal(found.data, values)
    last = save(tmp_path / "b.nrrd", np.moveaxis(values, 0, -1), kinds="domain domain domain list")
    assert np.array_equal(read_image([last]).data, values)
    old = save(
        tmp_path / "c.nrrd", values, space="LPS", space_directions=directions.replace("none", "(nan,nan,nan)")
    )
    assert np.array_equal(read_image([old]).data, values)
    colour = save(tmp_path / "d.nrrd", numbers(4, 6, 7, 5), kinds="RGBA-color domain domain domain")
    assert read_image([colour]).channels == 3


def test_a_single_slice_is_2d(tmp_path: Path) -> None:
    directions = "(1,0,0) (0,2,0) (0,0,3)"
    found = read_image(
        [save(tmp_path / "a.nrrd", numbers(4, 5, 1), space="LPS", space_directions=directions)]
    )
    assert found.spatial == (4, 5) and found.thin == 2 and found.spacing == (1, 2)
    plane = read_image(
        [save(tmp_path / "b.nrrd", numbers(4, 5), space="LPS", space_directions="(0,1,0) (0,0,2)")]
    )
    assert plane.spatial == (4, 5) and plane.spacing == (1, 2) and plane.affine is not None
    assert abs(plane.affine[0, 2]) == 1


@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ("type 'block'", {"type": "block"}),
        ("stored? as 'hex'|values as 'hex'", {"encoding": "hex"}),
        ("several files .LIST", {"data_file": "LIST"}),
        ("several files .slice%03d.raw", {"data_file": "slice%03d.raw 1 5 1"}),
        ("outside its folder", {"data_file": "../secret.raw"}),
        ("outside its folder", {"data_file": "/etc/hostname"}),
        ("not beside it", {"data_file": "lost.raw"}),
        ("complex numbers", {"kinds": "domain domain complex"}),
        ("do not span space", {"space": "LPS", "space_directions": "(1,0,0) (1,0,0) (0,0,1)"}),
        ("do not span space", {"space": "LPS", "space_directions": "(1,0,0) (nan,0,1) (0,0,1)"}),
        ("its space is 'somewhere'", {"space": "somewhere", "space_directions": "(1,0,0) (0,1,0) (0,0,1)"}),
        ("for 3 axes", {"space": "LPS", "space_directions": "(1,0,0) (0,1,0)"}),
        ("sizes are '3 4'", {"sizes": "3 4"}),
        ("no voxels", {"sizes": "3 4 0"}),
        ("more than a file of its size", {"sizes": "3000 4000 5000"}),
        ("should hold 60 values|claims to hold", {"sizes": "3 4 50"}),
        ("has no endian", {"endian": None}),
        ("has no encoding", {"encoding": None}),
        ("has no type", {"type": None}),
        ("line skip|skips lines", {"line_skip": "2"}),
        ("5 axes in space|axes in space and", {"dimension": "5", "sizes": "3 4 5 1 1"}),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, said: str, changed: dict[str, str | None]
) -> None:
    path = save(tmp_path / "odd.nrrd", numbers(3, 4, 5), **changed)
    with pytest.raises(DataError, match=said) as error:
        read_image([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_damaged_and_cut_off_values_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(numbers(30, 40, 5).tobytes(order="F"))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x40
    for name, data in (("cut", whole[:-20]), ("flipped", bytes(flipped)), ("more", whole[:-8] + bytes(8))):
        path = save(tmp_path / f"{name}.nrrd", numbers(30, 40, 5), data=data, encoding="gzip")
        with pytest.raises(DataError, match=f"{name}.nrrd"):
            read_image([path])
    (tmp_path / "text.nrrd").write_text("not an NRRD")
    with pytest.raises(DataError, match="is not an NRRD file, despite its name"):
        read_image([tmp_path / "text.nrrd"])
    (tmp_path / "odd.nrrd").write_text("NRRD0004\nno colon\n\n")
    with pytest.raises(DataError, match="neither a field nor a key"):
        read_image([tmp_path / "odd.nrrd"])


# Segments of 3D Slicer


def table(*rows: tuple[str, int, int]) -> list[str]:
    """name, layer, value"""
    return [
        line
        for number, (name, layer, value) in enumerate(rows)
        for line in (
            f"Segment{number}_ID:=Segment_{number + 1}",
            f"Segment{number}_Name:={name}",
            f"Segment{number}_Layer:={layer}",
            f"Segment{number}_LabelValue:={value}",
        )
    ]


def test_a_segmentation_has_the_values_of_its_table(tmp_path: Path) -> None:
    values = np.zeros((3, 4, 5), dtype=np.int16)
    values[0], values[1] = 3, 7
    path = save(tmp_path / "a.seg.nrrd", values, *table(("liver", 0, 3), ("left  kidney", 0, 7)))
    assert np.array_equal(read_label(path).data[0], values)
    assert [(s.name, s.value) for s in nrrd.read_segments(path)] == [("liver", 3), ("left kidney", 7)]


def make_layers() -> np.ndarray:
    layers = np.zeros((2, 3, 4, 5), dtype=np.int16)
    layers[0, 0], layers[1, 1], layers[0, 2] = 1, 1, 2
    return layers


def test_layers_are_joined_and_segments_counted_in_the_order_of_the_table(tmp_path: Path) -> None:
    rows = table(("liver", 0, 1), ("tumour", 1, 1), ("spleen", 0, 2))
    path = save(tmp_path / "a.seg.nrrd", make_layers(), *rows, kinds="list domain domain domain")
    assert read_label(path).data[0, :, 0, 0].tolist() == [1, 2, 3]
    assert {s.name: s.value for s in nrrd.read_segments(path)} == {"liver": 1, "tumour": 2, "spleen": 3}


def test_a_layer_for_each_segment_without_values_is_the_older_kind(tmp_path: Path) -> None:
    layers = np.minimum(make_layers(), 1)
    rows = ["Segment0_ID:=a", "Segment0_Name:=liver", "Segment1_ID:=b", "Segment1_Name:=tumour"]
    path = save(tmp_path / "a.seg.nrrd", layers, *rows, kinds="list domain domain domain")
    assert read_label(path).data[0, :, 0, 0].tolist() == [1, 2, 1]


def test_segments_that_overlap_are_refused_by_name(tmp_path: Path) -> None:
    layers = make_layers()
    layers[1, 0, 0, 0] = 1
    rows = table(("liver", 0, 1), ("tumour", 1, 1))
    path = save(tmp_path / "a.seg.nrrd", layers, *rows, kinds="list domain domain domain")
    with pytest.raises(DataError, match="segments 'liver' and 'tumour' overlap in 1 voxels"):
        read_label(path)


def test_a_segmentation_is_no_scan_and_a_layered_nrrd_no_label(tmp_path: Path) -> None:
    path = save(tmp_path / "a.seg.nrrd", numbers(3, 4, 5), *table(("liver", 0, 1)))
    with pytest.raises(DataError, match="is a segmentation of 3D Slicer, not a scan"):
        read_image([path])
    layers = save(tmp_path / "b.nrrd", make_layers(), kinds="list domain domain domain")
    with pytest.raises(DataError, match="2 values a voxel; a label has one"):
        read_label(layers)
    with pytest.raises(DataError, match="1 layers, but its table of segments names 2"):
        read_label(save(tmp_path / "c.seg.nrrd", numbers(3, 4, 5), *table(("a", 0, 1), ("b", 1, 1))))
    with pytest.raises(DataError, match="damaged table of segments"):
        nrrd.read_segments(
            save(tmp_path / "d.seg.nrrd", numbers(3, 4, 5), "Segment0_ID:=a", "Segment0_Layer:=x")
        )


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    affine = np.array([[0.1, -2.0, 0.3, 5], [1.0, 0.7, 0, -3], [0, 0.1, 3.0, 7], [0, 0, 0, 1]])
    mask = (numbers(3, 4, 5) % 3).astype(np.uint8)
    content = nrrd.encode_segments(mask, affine, {1: "liver", 2: "left\nkidney"}, [(255, 0, 0), (0, 128, 0)])
    (tmp_path / "a.seg.nrrd").write_bytes(content)
    found = read_label(tmp_path / "a.seg.nrrd")
    assert np.array_equal(found.data[0], mask) and np.array_equal(found.affine, affine)
    assert [s.name for s in nrrd.read_segments(tmp_path / "a.seg.nrrd")] == ["liver", "left kidney"]
    assert b"Segment0_Color:=1 0 0\n" in content
    maps = numbers(2, 3, 4, 5).astype(np.float32) / 7
    (tmp_path / "b.nrrd").write_bytes(nrrd.encode(maps, affine, channels=True))
    assert np.array_equal(read_image([tmp_path / "b.nrrd"]).data, maps)
    (tmp_path / "c.nrrd").write_bytes(nrrd.encode(mask, None))
    assert read_image([tmp_path / "c.nrrd"]).affine is None


def test_the_library_of_3d_slicer_finds_names_colours_and_places_of_segments(tmp_path: Path) -> None:
    slicerio = pytest.importorskip("slicerio")
    affine = np.array([[-0.5, 0.1, 0, 9], [0.1, 0.5, 0.2, -8], [0, -0.1, 3, 7], [0, 0, 0, 1.0]])
    mask = np.zeros((5, 6, 7), dtype=np.uint8)
    mask[1:3, 2:5, 3], mask[4, 4, 4] = 1, 3
    names = {1: "liver", 3: "GTV 2"}
    (tmp_path / "a.seg.nrrd").write_bytes(nrrd.encode_segments(mask, affine, names, nrrd.COLOURS))
    found = slicerio.read_segmentation(str(tmp_path / "a.seg.nrrd"))
    assert np.array_equal(found["voxels"], mask)
    assert np.allclose(np.diag([-1, -1, 1, 1]) @ found["ijkToLPS"], affine, rtol=0, atol=1e-6)
    segments = found["segments"]
    assert {segment["labelValue"]: segment["name"] for segment in segments} == names
    colours = [tuple(round(255 * part) for part in segment["color"]) for segment in segments]
    assert colours == list(nrrd.COLOURS[:2])
