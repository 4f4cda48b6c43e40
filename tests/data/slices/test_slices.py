"""Volumes cut into slices: each in its place, patients together, and the way back."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from helpers import call

from wardround.data.federation_file import PrepareSettings, SliceSettings, load
from wardround.data.preparing.cache import Recipe
from wardround.data.proposing.proposal import propose
from wardround.data.readers.image_files import Volume, read_image, read_label
from wardround.data.slices import cutting as module
from wardround.data.slices.cutting import Slices, cut, drop_axis, translate
from wardround.data.sources import list_cases
from wardround.errors import ConfigError, DataError


def random_affine(draw: np.random.Generator) -> np.ndarray:
    """Axes in any order and direction, oblique by some degrees, of unequal sides."""
    turn, _ = np.linalg.qr(np.eye(3)[draw.permutation(3)] + draw.normal(0, 0.1, (3, 3)))
    affine = np.eye(4)
    affine[:3, :3] = turn * draw.choice([-1, 1], 3) * draw.uniform(0.5, 4, 3)
    affine[:3, 3] = draw.normal(0, 50, 3)
    return affine


@pytest.mark.parametrize("seed", range(20))
def test_slices_lie_where_they_were_and_go_back_exactly(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shape = tuple(draw.integers(3, 8, 3))
    affine = random_affine(draw)
    sides = tuple(np.linalg.norm(affine[:3, :3], axis=0))
    volume = Volume(draw.normal(size=(2, *shape)).astype(np.float32), affine, sides)
    along = "RAS"[seed % 3]
    orientation = ("RAS", "LPI", "SAR", None)[seed % 4]

    cuts = Slices.of(volume, along, orientation)  # type: ignore[arg-type]
    planes = list(cuts)

    direction = affine[:3, :3][:, cuts.order[cuts.axis]]
    assert np.argmax(np.abs(direction / np.linalg.norm(direction))) == "RAS".index(along)
    assert len(planes) == len(cuts) == shape[cuts.order[cuts.axis]]
    plane, number = planes[1], np.array([2, 1, 1])
    assert plane.affine is not None and plane.spatial == tuple(
        np.delete([shape[a] for a in cuts.order], cuts.axis)
    )
    inside = number.copy()
    inside[cuts.axis] = 0
    here = plane.affine @ [*inside, 1]  # millimetres of a voxel of the second slice
    there = np.rint(np.linalg.solve(affine, here)[:3]).astype(int)
    assert np.allclose(affine @ [*there, 1], here)
    row, column = np.delete(inside, cuts.axis)
    assert np.array_equal(plane.data[:, row, column], volume.data[(slice(None), *there)])

    planes = [np.expand_dims(plane.data, cuts.axis + 1) for plane in planes]
    assert np.array_equal(cuts.join(planes), volume.data)


def save(path: Path, values: Any, affine: Any = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 5, 1]) if affine is None else affine), path)


def make(folder: Path, *, clients: int = 2, cases: int = 3) -> Path:
    """Volumes of 8x7x6 with a box drawn on slices 1 to 3; the second client stores its scans as LPS."""
    draw = np.random.default_rng(0)
    names = ["north", "west"][:clients]
    for client, flip in zip(names, (1, -1), strict=False):
        for case in range(cases):
            image = draw.integers(0, 900, (8, 7, 6)).astype(np.int16)
            label = np.zeros((8, 7, 6), np.uint8)
            label[2:5, 1:4, 1:4] = 1
            affine = np.diag([2.0 * flip, 2.0 * flip, 5.0, 1])
            save(folder / client / "images" / f"c{case}.nii.gz", image, affine)
            save(folder / client / "labels" / f"c{case}.nii.gz", label, affine)
    file = folder.parent / "volumes.yaml"
    file.write_text(
        f"sources: [{{path: {folder.name}, reader: centres}}]\nlabels: {{gland: [1]}}\n"
        "prepare: {size: [8, 8, 6], normalise: minmax}\n"
    )
    return file


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "cases.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_federation_of_slices(tmp_path: Path) -> None:
    done = cut(make(tmp_path / "data"), tmp_path / "cut")

    assert done.volumes == {"north": 3, "west": 3} and done.slices == {"north": 9, "west": 9}
    assert not done.left_out
    rows = rows_of(tmp_path / "cut")
    assert [row["stem"] for row in rows[:3]] == ["c0_s001", "c0_s002", "c0_s003"]
    parts: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        parts.setdefault((row["centre"], row["split_group"]), set()).add(row["split"])
    assert all(len(found) == 1 for found in parts.values())  # no patient on two sides
    assert {row["split"] for row in rows} >= {"train", "test"}

    file = load(done.path)
    assert (
        file.prepare.size == (8, 8)
        and file.prepare.slices == SliceSettings(along="S")
        and file.prepare.normalise == "minmax"
    )
    assert dict(file.labels) == {"gland": (1,)} and file.splits.by == "column"
    listing = list_cases(file, done.path.parent)
    assert len(listing.entries) == 18
    for entry in (listing.of("north")[0], listing.of("west")[0]):
        assert entry.label is not None
        image, label = read_image(entry.images), read_label(entry.label)
        whole = read_image([tmp_path / "data" / entry.client / "images/c0.nii.gz"]).data
        upright = whole if entry.client == "north" else whole[:, ::-1, ::-1]
        assert image.spatial == (8, 7) and image.spacing == (2, 2) and image.thin == 2
        assert np.array_equal(image.data, upright[..., 1])
        assert int(label.data.sum()) == 9


def test_slices_of_one_input_have_the_same_bytes(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1)
    for name in ("one", "two"):
        cut(file, tmp_path / name)
    first, second = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("one", "two")
    )
    assert first == second and len(first) > 2


def test_all_slices_other_axes_and_clipped_values(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1, cases=2)
    done = cut(file, tmp_path / "cut", along="R", keep="all", clip=50)

    assert done.slices == {"north": 16}
    settings = load(done.path).prepare
    assert settings.size == (8, 6) and settings.slices == SliceSettings(along="R", clip=50)
    whole = read_image([tmp_path / "data/north/images/c0.nii.gz"]).data
    planes = [read_image([tmp_path / "cut" / row["image"]]).data for row in rows_of(tmp_path / "cut")[:8]]
    assert np.array_equal(np.stack(planes, axis=1), np.minimum(whole, np.percentile(whole, 50)))


def test_channels_stay_together_and_floats_stay_exact(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(6, 5, 4, 2)).astype(np.float32)
    label = np.full((6, 5, 4), 300, np.int16)
    save(tmp_path / "data/north/images/a.nii.gz", values)
    save(tmp_path / "data/north/labels/a.nii.gz", label)
    (tmp_path / "volumes.yaml").write_text(
        "sources: [{path: data, reader: centres}]\nlabels: {big: [300]}\nsplits: {ratios: [1, 0, 0]}\n"
    )
    cut(tmp_path / "volumes.yaml", tmp_path / "cut")

    row = rows_of(tmp_path / "cut")[2]
    plane = read_image([tmp_path / "cut" / row["image"]])
    assert np.array_equal(plane.data, np.moveaxis(values[:, :, 2], -1, 0))
    assert set(np.unique(read_label(tmp_path / "cut" / row["label"]).data)) == {300}


def test_volumes_that_cannot_be_cut_are_left_out_with_their_reasons(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1, cases=8)
    images, labels = tmp_path / "data/north/images", tmp_path / "data/north/labels"
    good = np.zeros((8, 7, 6), np.float32)
    save(images / "c0.nii.gz", np.full((8, 7, 6), np.nan, np.float32), np.diag([2.0, 2, 5, 1]))
    save(images / "c1.nii.gz", good[:7], np.diag([2.0, 2, 5, 1]))
    save(images / "c2.nii.gz", good, np.eye(4))
    save(images / "c3.nii.gz", good[:, :, 0])
    save(labels / "c3.nii.gz", good[:, :, 0].astype(np.uint8))
    (labels / "c4.nii.gz").unlink()
    (images / "c5.nii.gz").write_bytes(b"broken")

    done = cut(file, tmp_path / "cut")

    assert done.volumes == {"north": 2}
    said = {line.split("'")[3]: line for line in done.left_out}
    for case, words in {
        "c0": "NaN", "c1": "but label is 8x7x6", "c2": "different places", "c3": "2D already",
        "c4": "it has no label; --keep all includes it", "c5": "not a NIfTI file",
    }.items():  # fmt: skip
        assert words in said[case]
    assert "client 'north', case 'c0'" in done.left_out[0]


def test_a_volume_without_a_place_in_space_is_refused() -> None:
    with pytest.raises(DataError, match="convert it to NIfTI"):
        Slices.of(Volume(np.zeros((1, 4, 4, 4), np.float32), None, (1.0, 1.0, 1.0)), "S", "RAS")


def test_nothing_is_replaced_and_nothing_is_left_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make(tmp_path / "data", clients=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        cut(file, tmp_path / "mine")
    with pytest.raises(ConfigError, match="percentile"):
        cut(file, tmp_path / "new", clip=120)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(module, "as_csv", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cut(file, tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "empty").mkdir()
    assert cut(file, tmp_path / "empty").path.exists()


def test_volumes_without_labelled_voxels_are_a_sentence(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1)
    for path in (tmp_path / "data/north/labels").iterdir():
        save(path, np.zeros((8, 7, 6), np.uint8), np.diag([2.0, 2, 5, 1]))
    with pytest.raises(DataError, match="no volume gave a slice. None has labelled voxels; add --keep all"):
        cut(file, tmp_path / "cut")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = make(tmp_path / "data")
    (tmp_path / "data/north/images/c0.nii.gz").write_bytes(b"broken")
    code, out, err = call(monkeypatch, capsys, "data", "slices", str(file), "-o", str(tmp_path / "cut"))
    assert code == 0 and "| north | 2 | 6 |" in out and "left out: client 'north', case 'c0'" in out
    assert "wardround data check" in out and "cutting: 6 of 6 cases" in err
    code, out, _ = call(
        monkeypatch, capsys, "data", "slices", str(file), "-o", str(tmp_path / "two"), "--json"
    )
    assert code == 0 and json.loads(out)["slices"] == {"north": 6, "west": 9}
    code, _, err = call(monkeypatch, capsys, "data", "slices", str(file), "-o", str(tmp_path / "cut"))
    assert code == 2 and "not an empty folder" in err


def test_what_slices_are_does_not_change_how_they_are_prepared() -> None:
    kinds = (None, SliceSettings(along="S"), SliceSettings(along="R", clip=99))
    keys = {Recipe(PrepareSettings(slices=kind), {}).key for kind in kinds}
    assert len(keys) == 1


def test_the_folder_of_slices_is_known_again_with_its_patients(tmp_path: Path) -> None:
    cut(make(tmp_path / "data"), tmp_path / "cut")
    found = propose([tmp_path / "cut"])
    assert found.listing.reader == "table"
    assert len({(entry.client, entry.group) for entry in found.listing.entries}) == 6
    assert found.listing.clients == ["north", "west"]


def test_values_of_no_class_become_background_and_are_noted(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1)
    label = np.zeros((8, 7, 6), np.uint8)
    label[2:5, 1:4, 1:4], label[:, 0, 5] = 1, 7
    save(tmp_path / "data/north/labels/c1.nii.gz", label, np.diag([2.0, 2, 5, 1]))
    done = cut(file, tmp_path / "cut")
    assert done.slices == {"north": 9}  # a slice with 7 alone shows nothing
    assert done.notes == ["Label values of no class became background: 7."]
    values = {v for path in (tmp_path / "cut").rglob("drawn/*") for v in np.unique(read_label(path).data)}
    assert values == {0, 1}


def test_columns_of_the_list_do_not_rename_clients_and_a_partition_keeps_its_own(tmp_path: Path) -> None:
    make(tmp_path / "data", clients=1)
    lines = ["image,label,center,scanner"]
    lines += [f"data/north/images/c{n}.nii.gz,data/north/labels/c{n}.nii.gz,x,s{n % 2}" for n in range(3)]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    file = tmp_path / "volumes.yaml"
    file.write_text(
        "sources: [{path: list.csv, client: solo}]\nlabels: {gland: [1]}\n"
        "partition: {kind: column, column: scanner}\nsplits: {ratios: [1, 0, 0]}\n"
    )
    done = cut(file, tmp_path / "cut")
    listing = list_cases(load(done.path), done.path.parent)
    assert listing.clients == list_cases(load(file), tmp_path).clients
    assert {entry.columns["scanner"] for entry in listing.entries} == {"s0", "s1"}


def test_numbers_of_the_axis_that_is_gone(tmp_path: Path) -> None:
    along_s, along_a = SliceSettings(along="S"), SliceSettings(along="A")
    given = PrepareSettings(size=(1, 2, 3), spacing=(4.0, 5, 6))
    assert drop_axis(given, along_s).size == (1, 2) and drop_axis(given, along_a).spacing == (4, 6)
    assert drop_axis(PrepareSettings(orientation="SAR", size=(1, 2, 3)), along_s).size == (2, 3)
    assert drop_axis(PrepareSettings(size=(9, 9)), along_s).size == (9, 9)
    assert drop_axis(PrepareSettings(orientation=None), along_s).size is None
    with pytest.raises(
        ConfigError, match="orientation is null, so it is unknown which number of prepare.size"
    ):
        drop_axis(PrepareSettings(orientation=None, size=(1, 2, 3)), along_s)


def test_values_beyond_a_whole_type_stay_what_they_are() -> None:
    values = np.array([[0, 2147483648.0]], np.float32)
    assert not module.can_hold(np.int32, values) and module.can_hold(np.int32, values / 2)


def test_names_that_would_share_a_file_or_are_too_long_are_left_out(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1, cases=2)
    for old, new in (("c0", "x" * 198), ("c1", "c9")):
        for kind in ("images", "labels"):
            path = tmp_path / "data/north" / kind / f"{old}.nii.gz"
            path.rename(path.with_name(f"{new}.nii.gz"))
    done = cut(file, tmp_path / "cut")
    assert done.volumes == {"north": 1} and "not a usable name" in done.left_out[0]
    assert len(list_cases(load(done.path), done.path.parent).entries) == 3


def test_a_hospital_without_slices_is_not_named_any_more(tmp_path: Path) -> None:
    file = make(tmp_path / "data")
    for path in (tmp_path / "data/west/labels").iterdir():
        path.unlink()
    file.write_text(file.read_text() + "clients: [north]\nheld_out: [west]\n")
    done = cut(file, tmp_path / "cut")
    assert done.slices == {"north": 9} and len(done.left_out) == 3
    assert load(done.path).held_out == () and list_cases(load(done.path), done.path.parent).clients == [
        "north"
    ]


def test_a_patient_in_two_splits_is_left_out(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1)
    rows = [f"data/north/images/c{n}.nii.gz,data/north/labels/c{n}.nii.gz,north" for n in range(3)]
    ends = [",p0,train", ",p0,test", ",p1,train"]
    (tmp_path / "list.csv").write_text(
        "image,label,centre,patient,split\n" + "\n".join(r + e for r, e in zip(rows, ends, strict=True))
    )
    file.write_text("sources: [{path: list.csv}]\nlabels: {gland: [1]}\n")
    done = cut(file, tmp_path / "cut")
    assert 1 <= done.volumes["north"] < 3 and "p0" in done.left_out[0]


def test_targets_that_cannot_be_written_are_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make(tmp_path / "data", clients=1)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    for target, words in ((Path(), "is the current folder"), (tmp_path / "link", "not an empty folder"),
                          (tmp_path / ("n" * 300), "cannot be written")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            cut(file, target)


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    file = make(tmp_path / "data", clients=1)
    dead, alive = tmp_path / ".cut.999999999.partial", tmp_path / ".cut.1.partial"
    dead.mkdir()
    alive.mkdir()
    cut(file, tmp_path / "cut")
    assert alive.exists() and not dead.exists()


def test_labels_of_a_source_with_its_own_map_are_cut_in_the_values_of_all() -> None:
    label = Volume(np.array([[[0, 1, 2, 255]]]), None, (1.0, 1.0))
    own, common = (
        {"kidney": (2, 255), "tumour": (1,), "cyst": ()},
        {"kidney": (1,), "tumour": (2,), "cyst": (3,)},
    )
    assert translate(label, own, common).data.tolist() == [[[0, 2, 1, 1]]]
    assert translate(label, common, common) is label
