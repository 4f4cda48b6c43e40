"""A label that stores its image's voxels in its own way is put right; one of another grid is refused by name."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from helpers import call

from data.dicom.test_writing import draw_volume
from wardround.data.listing import Entry
from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.image_files import read_image
from wardround.data.readers.label_files import read_case_label

FORMATS = (".nii.gz", ".nii", ".nrrd", ".seg.nrrd", ".mha")


def save(path: Path, values: np.ndarray, affine: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".nii" in path.name:
        nibabel.save(nibabel.Nifti1Image(values, affine), path)
    elif path.name.endswith(".seg.nrrd"):
        path.write_bytes(nrrd.encode_segments(values, affine, {1: "liver", 2: "spleen"}, nrrd.COLOURS))
    else:
        encode: Any = nrrd.encode if path.name.endswith(".nrrd") else metaimage.encode
        path.write_bytes(encode(values, affine, channels=False))
    return path


def turn(mask: np.ndarray, affine: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same voxels in another order and direction, without most of the background."""
    draw = np.random.default_rng(seed)
    corners = np.argwhere(mask).min(axis=0), np.argwhere(mask).max(axis=0) + 1
    part = mask[tuple(slice(*ends) for ends in zip(*corners, strict=True))]
    moved = affine.copy()
    moved[:3, 3] += affine[:3, :3] @ corners[0]
    order = draw.permutation(3)
    part, moved[:3, :3] = part.transpose(order), moved[:3, order]
    for axis in np.flatnonzero(draw.integers(0, 2, 3)):
        moved[:3, 3] += moved[:3, axis] * (part.shape[axis] - 1)
        moved[:3, axis] *= -1
        part = np.flip(part, axis)
    return np.ascontiguousarray(part), moved


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_the_same_voxels_in_another_order_are_put_right(tmp_path: Path, ending: str, seed: int) -> None:
    values, mask, affine = draw_volume(seed)
    mask = np.pad(mask[2:-2, 2:-2, 1:-1], ((2, 2), (2, 2), (1, 1)))  # a label in the middle
    image = save(tmp_path / f"image{ending.replace('.seg', '')}", values, affine)
    label = save(tmp_path / f"label{ending}", *turn(mask, affine, seed))
    found = read_case_label(Entry("north", "p1", (image,), label, "p1"))
    assert found is not None and found.placed and np.array_equal(found.data[0], mask)
    assert np.allclose(found.affine, read_image([image]).affine, rtol=0, atol=1e-4)


def test_masks_of_single_classes_may_each_be_a_part(tmp_path: Path) -> None:
    values, mask, affine = draw_volume(7)
    image = save(tmp_path / "image.nii.gz", values, affine)
    masks = {
        name: save(tmp_path / f"{name}.nii.gz", *turn((mask == value).astype(np.uint8), affine, value))
        for name, value in (("liver", 1), ("spleen", 2))
    }
    from wardround.data.listing import LabelCoding

    coding = LabelCoding(masks={"liver": 1, "spleen": 2})
    entry = Entry("north", "p1", (image,), masks["liver"], "p1", masks=masks, coding=coding)
    found = read_case_label(entry)
    assert found is not None and np.array_equal(found.data[0], mask)


OTHER_GRIDS = {
    "half a voxel aside": lambda affine: affine + 0.5 * np.outer(affine[:, 0], [0, 0, 0, 1]),
    "another spacing": lambda affine: affine @ np.diag([1.0, 1.0, 1.5, 1.0]),
    "beyond the image": lambda affine: affine + 50 * np.outer(affine[:, 0], [0, 0, 0, 1]),
}


@pytest.mark.parametrize("ending", FORMATS)
def test_another_grid_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["fits", "parts", *OTHER_GRIDS]):
        values, mask, affine = draw_volume(number)
        save(Path("north/images") / f"{name}{ending.replace('.seg', '')}", values, affine)
        moved = OTHER_GRIDS[name](affine) if name in OTHER_GRIDS else affine
        stored = turn(mask, affine, 1) if name == "parts" else (mask, moved)
        save(Path("north/labels") / f"{name}{ending}", *stored)
    assert call(monkeypatch, capsys, "data", "init", "north", "-o", "f.yaml")[0] == 0
    code, said, _ = call(monkeypatch, capsys, "data", "check", "f.yaml", "--strict")
    assert code == 2 and "error: client 'north', case 'fits'" not in said
    assert "case 'parts': the label stores the image's voxels in another order, or a part of them" in said
    for name in OTHER_GRIDS:
        assert f"case '{name}': image and label lie in different places" in said
