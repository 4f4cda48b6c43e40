"""The label of a case from coloured masks and from masks of single classes."""

from pathlib import Path

import nibabel
import numpy as np
from PIL import Image
from pytest import mark, raises

from wardround.data.listing import Entry, LabelCoding
from wardround.data.readers.label_files import read_case_label
from wardround.errors import DataError

RED, GREEN, BLACK, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 0), (255, 255, 255)


def paint(path: Path, *rows: list[tuple[int, int, int]], mode: str = "RGB") -> Path:
    Image.fromarray(np.array(rows, dtype=np.uint8)).convert(mode).save(path)
    return path


def mask(path: Path, values: list[int], shift: float = 0.0) -> Path:
    affine = np.diag([1.0, 1.0, 1.0 + shift, 1.0])
    nibabel.save(nibabel.Nifti1Image(np.array(values, dtype=np.uint8).reshape(-1, 2, 2), affine), path)
    return path


def case(label: Path, coding: LabelCoding | None, masks: dict[str, Path] | None = None) -> Entry:
    return Entry("north", "p1", (label,), label, "p1", masks=masks or {}, coding=coding)


def read(entry: Entry) -> list[int]:
    found = read_case_label(entry)
    assert found is not None
    return [int(value) for value in found.data.ravel()]


def test_a_case_without_a_label_has_none() -> None:
    assert read_case_label(Entry("north", "p1", (Path("a.png"),), None, "p1")) is None


@mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_become_values_also_of_a_palette(tmp_path: Path, mode: str) -> None:
    path = paint(tmp_path / "m.png", [RED, BLACK, WHITE], [GREEN, RED, BLACK], mode=mode)
    colours = {"#000000": 0, "#ff0000": 1, "#00ff00": 7, "#ffffff": 2}
    assert read(case(path, LabelCoding(colours))) == [1, 0, 2, 7, 1, 0]


def test_grey_is_a_colour_where_colours_tell_classes_apart(tmp_path: Path) -> None:
    path = paint(tmp_path / "m.png", [BLACK, WHITE, BLACK], mode="L")
    assert read(case(path, LabelCoding({"#000000": 0, "#ffffff": 3}))) == [0, 3, 0]


def test_an_unknown_colour_is_named_with_file_and_count(tmp_path: Path) -> None:
    path = paint(tmp_path / "m.png", [RED, GREEN, GREEN, (1, 2, 3), BLACK])
    with raises(DataError, match=r"m.png has the colour #00ff00 in 2 pixels \(and 1 more colours in 1\)"):
        read(case(path, LabelCoding({"#000000": 0, "#ff0000": 1})))


def test_a_coloured_label_without_a_map_says_what_to_write(tmp_path: Path) -> None:
    path = paint(tmp_path / "m.png", [RED, BLACK])
    with raises(DataError, match="is a coloured label. Say what its colours mean under sources"):
        read(case(path, None))


def test_a_jpeg_of_colours_is_refused_with_and_without_a_map(tmp_path: Path) -> None:
    path = paint(tmp_path / "m.jpg", *[[RED] * 8 + [BLACK] * 8] * 16)
    for coding in (None, LabelCoding({"#000000": 0, "#ff0000": 1})):
        with raises(DataError, match="JPEG, which blurs colours; store the label as PNG"):
            read(case(path, coding))


def test_masks_of_single_classes_are_joined_whatever_value_they_hold(tmp_path: Path) -> None:
    masks = {
        "liver": mask(tmp_path / "liver.nii.gz", [255, 255, 0, 0]),
        "spleen": mask(tmp_path / "spleen.nii.gz", [0, 0, 1, 0]),
        "empty": mask(tmp_path / "empty.nii.gz", [0, 0, 0, 0]),
    }
    coding = LabelCoding(masks={"liver": 1, "spleen": 2, "empty": 3})
    assert read(case(masks["liver"], coding, masks)) == [1, 1, 2, 0]


def test_masks_that_overlap_are_refused_unless_their_order_is_stated(tmp_path: Path) -> None:
    masks = {
        "liver": mask(tmp_path / "liver.nii.gz", [1, 1, 1, 0]),
        "tumour": mask(tmp_path / "tumour.nii.gz", [0, 1, 1, 0]),
    }
    entry = case(masks["liver"], LabelCoding(masks={"liver": 1, "tumour": 2}), masks)
    with raises(
        DataError, match="tumour.nii.gz and liver.nii.gz overlap in 2 voxels. Correct them, or write"
    ):
        read(entry)
    later = LabelCoding(masks={"liver": 1, "tumour": 2}, overlap=True)
    assert read(case(masks["liver"], later, masks)) == [1, 2, 2, 0]
    earlier = LabelCoding(masks={"tumour": 2, "liver": 1}, overlap=True)
    assert read(case(masks["liver"], earlier, masks)) == [1, 1, 1, 0]
    one_class = LabelCoding(masks={"liver": 1, "tumour": 1})  # parts of one class may overlap
    assert read(case(masks["liver"], one_class, masks)) == [1, 1, 1, 0]


def test_a_mask_of_several_values_and_masks_of_several_grids_are_refused(tmp_path: Path) -> None:
    coding = LabelCoding(masks={"a": 1, "b": 2})
    a, b = mask(tmp_path / "a.nii.gz", [1, 2, 0, 0]), mask(tmp_path / "b.nii.gz", [0, 0, 1, 0])
    with raises(DataError, match="a.nii.gz holds the values 1, 2; a mask of one class holds one"):
        read(case(a, coding, {"a": a, "b": b}))
    shifted = mask(tmp_path / "c.nii.gz", [1, 0, 0, 0], shift=1.0)
    with raises(DataError, match="another grid than b.nii.gz"):
        read(case(b, coding, {"b": b, "a": shifted}))
    larger = mask(tmp_path / "d.nii.gz", [1, 0, 0, 0] * 2)
    with raises(DataError, match="2x2x2, 2x2"):
        read(case(b, coding, {"b": b, "a": larger}))
