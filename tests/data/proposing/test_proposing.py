"""`data init`: what is proposed for folders of every kind, and that it needs no hand-editing."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from helpers import SHARED
from numpy.typing import NDArray
from PIL import Image
from pytest import mark, raises

from wardround.data.checking.check import check
from wardround.data.federation_file import FederationFile, load, write
from wardround.data.proposing.proposal import describe, propose
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.data.sources import list_cases
from wardround.errors import DataError


def png(path: Path, shape: tuple[int, ...], value: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.zeros(shape, dtype=np.uint8)
    values[: shape[0] // 2] = value
    Image.fromarray(values).save(path)


def nifti(path: Path, values: NDArray[Any], spacing: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([*spacing, 1.0])), path)


def pictures(
    centre: Path, count: int = 3, size: tuple[int, int] = (40, 50), value: int = 1, mode: int = 3
) -> None:
    for n in range(count):
        png(centre / "images" / f"c{n}.png", (*size, 3) if mode == 3 else size, 200)
        png(centre / "labels" / f"c{n}.png", size, value)


def volumes(centre: Path, shape: tuple[int, ...], spacing: tuple[float, ...], low: int = 0) -> None:
    values = np.full(shape, 100, dtype=np.int16)
    values[0] = low
    for n in range(3):
        nifti(centre / "images" / f"v{n}.nii.gz", values, spacing)
        nifti(centre / "labels" / f"v{n}.nii.gz", (values == 100).astype(np.uint8)[:, :, : shape[2]], spacing)


def proposed(folders: list[Path]) -> FederationFile:
    return propose(folders).file


def again(file: FederationFile, folder: Path) -> FederationFile:
    """Written and read: what init leaves behind can be used as it is."""
    write(file, folder / "federation.yaml")
    loaded = load(folder / "federation.yaml")
    assert list_cases(loaded, folder).entries
    return loaded


def test_pictures_of_two_centres(tmp_path: Path) -> None:
    pictures(tmp_path / "data" / "north", size=(40, 50))
    pictures(tmp_path / "data" / "south", size=(34, 60))
    file = again(proposed([tmp_path / "data"]), tmp_path)
    assert file.clients == ("north", "south") and file.channels == ("red", "green", "blue")
    assert file.labels == {"class_1": (1,)} == file.regions
    assert file.prepare.size == (32, 32) and file.splits.by == "ratios" and file.partition.kind == "natural"


def test_pictures_of_one_size_keep_their_shape_and_large_ones_shrink(tmp_path: Path) -> None:
    pictures(tmp_path / "a" / "x", size=(32, 64), mode=1)
    assert proposed([tmp_path / "a"]).prepare.size == (32, 64) and proposed([tmp_path / "a"]).channels == (
        "grey",
    )
    pictures(tmp_path / "b" / "x", size=(600, 1200), mode=1)
    assert proposed([tmp_path / "b"]).prepare.size == (256, 512)


def test_folders_of_one_centre_are_a_client_each(tmp_path: Path) -> None:
    for name in ("north", "south"):
        pictures(tmp_path / name)
    file = again(proposed([tmp_path / "north", tmp_path / "south"]), tmp_path)
    assert file.clients == ("north", "south") and [source.client for source in file.sources] == [
        "north",
        "south",
    ]
    assert [str(source.path) for source in file.sources] == ["north", "south"]


def test_folders_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    for name in ("oslo", "bergen"):
        pictures(tmp_path / name / "data")
    file = again(proposed([tmp_path / "oslo" / "data", tmp_path / "bergen" / "data"]), tmp_path)
    assert file.clients == ("bergen-data", "oslo-data")


def test_a_folder_given_twice_and_no_folder_are_refused(tmp_path: Path) -> None:
    pictures(tmp_path / "x")
    with raises(DataError, match="twice"):
        proposed([tmp_path / "x", tmp_path / "x" / ".." / "x"])
    with raises(DataError, match="Give the folders"):
        proposed([])


def test_masks_of_255_are_a_class_and_pictures_are_no_masks(tmp_path: Path) -> None:
    pictures(tmp_path / "a" / "x", value=255)
    assert proposed([tmp_path / "a"]).labels == {"class_1": (255,)}
    pictures(tmp_path / "b" / "x")
    grey = np.tile(np.arange(200, dtype=np.uint8), (40, 1))[:, :50] * 5
    Image.fromarray(grey).save(tmp_path / "b" / "x" / "labels" / "c0.png")
    proposal = propose([tmp_path / "b"])
    assert proposal.file.labels == {"class_1": (1,)} and "is this an image" in " ".join(describe(proposal))
    for n in range(3):
        Image.fromarray(grey).save(tmp_path / "b" / "x" / "labels" / f"c{n}.png")
    with raises(DataError, match="None of the labels.*is this an image"):
        proposed([tmp_path / "b"])
    pictures(tmp_path / "c" / "x", value=0)
    with raises(DataError, match="no class values"):
        proposed([tmp_path / "c"])


def test_volumes_are_resampled_to_the_median_spacing(tmp_path: Path) -> None:
    volumes(tmp_path / "d" / "a", (20, 20, 10), (0.5, 0.5, 3.0))
    volumes(tmp_path / "d" / "b", (20, 20, 12), (0.5, 0.5, 2.0))
    file = again(proposed([tmp_path / "d"]), tmp_path)
    assert (
        file.prepare.spacing == (0.5, 0.5, 2.5)
        and file.prepare.size is None
        and file.channels == ("channel_0",)
    )


def test_one_millimetre_is_a_spacing(tmp_path: Path) -> None:
    volumes(tmp_path / "d" / "a", (20, 22, 18), (1.0, 1.0, 1.0))
    volumes(tmp_path / "d" / "b", (17, 21, 19), (1.0, 1.0, 1.0))
    proposal = propose([tmp_path / "d"])
    assert proposal.file.prepare.spacing == (1.0, 1.0, 1.0) and proposal.file.prepare.size is None
    assert "resampled to their median spacing, 1x1x1 mm" in " ".join(describe(proposal))


@mark.parametrize(("side", "size"), [(20, (16, 16, 16)), (140, None)])
def test_volumes_without_a_spacing_get_one_size_unless_they_are_large(
    tmp_path: Path, side: int, size: tuple[int, ...] | None
) -> None:
    for part in ("images", "labels"):
        (tmp_path / "d" / "a" / part).mkdir(parents=True)
        for n in range(3):
            np.save(tmp_path / "d" / "a" / part / f"v{n}.npy", np.ones((side,) * 3, dtype=np.uint8))
    proposal = propose([tmp_path / "d"])
    assert proposal.file.prepare.size == size
    assert "no spacing" in " ".join(describe(proposal))


def test_the_grid_is_that_of_the_oriented_volume(tmp_path: Path) -> None:
    turned = np.array([[0, 0, 3.0, 0], [2.0, 0, 0, 0], [0, 1.5, 0, 0], [0, 0, 0, 1]])
    for part in ("images", "labels"):
        (tmp_path / "d" / "a" / part).mkdir(parents=True)
        for n in range(3):
            image = nibabel.Nifti1Image(np.ones((8, 9, 10), dtype=np.uint8), turned)
            nibabel.save(image, tmp_path / "d" / "a" / part / f"v{n}.nii.gz")
    assert proposed([tmp_path / "d"]).prepare.spacing == (3.0, 2.0, 1.5)


def test_ct_gets_a_window(tmp_path: Path) -> None:
    volumes(tmp_path / "d" / "a", (20, 20, 10), (1.0, 1.0, 5.0), low=-1000)
    assert proposed([tmp_path / "d"]).prepare.window == (40.0, 400.0)


def test_small_centres_are_held_out_and_a_lone_one_is_partitioned(tmp_path: Path) -> None:
    pictures(tmp_path / "d" / "big", 6)
    pictures(tmp_path / "d" / "tiny", 2)
    proposal = propose([tmp_path / "d"])
    assert proposal.file.held_out == ("tiny",)
    assert proposal.file.partition.kind == "iid" and proposal.file.partition.clients == 2
    text = " ".join(describe(proposal))
    assert "held out" in text and "artificially partitioned" in text
    assert "Only one client has enough cases to train, 'big'" in text and "All cases" not in text
    again(proposal.file, tmp_path)
    pictures(tmp_path / "e" / "tiny", 2)
    assert proposed([tmp_path / "e"]).held_out == ()


def test_a_lone_client_gets_a_list_of_columns_that_could_divide_it(tmp_path: Path) -> None:
    pictures(tmp_path / "d" / "x", 8)
    rows = [f"x,c{n},{'AB'[n % 2]},{n % 2},{n}" for n in range(8)]
    (tmp_path / "d" / "index.csv").write_text("\n".join(["centre,stem,scanner,code,id", *rows]))
    text = " ".join(describe(propose([tmp_path / "d"])))
    assert "scanner (2 values)" in text and "code" not in text


def test_a_list_beside_the_images_that_is_not_read_is_reported(tmp_path: Path) -> None:
    pictures(tmp_path / "x", 4)
    (tmp_path / "x" / "cases.csv").write_text("stem,patient\nc0,p\nc1,p\nc2,q\nc3,q\n")
    assert "cases.csv beside the images is not read" in " ".join(describe(propose([tmp_path / "x"])))
    (tmp_path / "x" / "cases.csv").rename(tmp_path / "x" / "index.csv")
    proposal = propose([tmp_path / "x"])
    assert "is not read" not in " ".join(describe(proposal))
    assert {entry.group for entry in proposal.listing.entries} == {"p", "q"}


def test_a_decathlon_task_keeps_its_names(tmp_path: Path) -> None:
    root = tmp_path / "Task09"
    for n in range(3):
        nifti(root / "imagesTr" / f"s{n}.nii.gz", np.ones((16, 16, 20, 2), dtype=np.float32))
        nifti(root / "labelsTr" / f"s{n}.nii.gz", np.ones((16, 16, 20), dtype=np.uint8) * 2)
    pairs = [{"image": f"./imagesTr/s{n}.nii.gz", "label": f"./labelsTr/s{n}.nii.gz"} for n in range(3)]
    facts = {
        "name": "Spleen",
        "modality": {"0": "T1", "1": "T2"},
        "labels": {"0": "background", "1": "spleen"},
        "training": pairs,
    }
    (root / "dataset.json").write_text(json.dumps(facts))
    proposal = propose([root])
    file = again(proposal.file, tmp_path)
    assert (
        file.channels == ("T1", "T2")
        and file.labels == {"spleen": (1,)}
        and file.prepare.spacing == (1.0, 1.0, 1.0)
    )
    assert "values the data set does not name: 2" in " ".join(describe(proposal))
    facts["modality"] = {"0": "T1"}
    (root / "dataset.json").write_text(json.dumps(facts))
    assert proposed([root]).channels == ("channel_0", "channel_1")


def test_broken_files_are_reported_and_skipped(tmp_path: Path) -> None:
    pictures(tmp_path / "d" / "x", 4)
    (tmp_path / "d" / "x" / "images" / "c0.png").write_bytes(b"")
    (tmp_path / "d" / "x" / "labels" / "c1.png").write_text("no picture")
    proposal = propose([tmp_path / "d"])
    assert "2 files could not be used" in " ".join(describe(proposal))
    for n in range(4):
        (tmp_path / "d" / "x" / "images" / f"c{n}.png").write_bytes(b"")
    with raises(DataError, match="None of the inspected images"):
        proposed([tmp_path / "d"])


@mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
@mark.parametrize(
    ("name", "size", "classes", "held_out", "kind"),
    [
        ("polyp4", (160, 160), 1, (), "natural"),
        ("fundus_odoc", (128, 128), 2, (), "natural"),
        ("lgg3d", None, 1, ("TCGA_EZ",), "natural"),
        ("hippocampus", None, 2, (), "iid"),
    ],
)
def test_the_shared_sets_need_no_hand_editing(
    tmp_path: Path,
    name: str,
    size: tuple[int, ...] | None,
    classes: int,
    held_out: tuple[str, ...],
    kind: str,
) -> None:
    proposal = propose([SHARED / name])
    file = again(proposal.file, tmp_path)
    assert (file.prepare.size, len(file.labels), file.held_out, file.partition.kind) == (
        size,
        classes,
        held_out,
        kind,
    )
    assert file.prepare.spacing == (None if size else (1.0, 1.0, 1.0))
    assert file.splits.by == "column" and file.prepare.normalise == "zscore"
    if name == "hippocampus":
        assert "column: intensity_family" in " ".join(describe(proposal))


# nnU-Net


def test_an_nnunet_folder_brings_its_regions_folds_and_ignored_voxels(tmp_path: Path) -> None:
    root = tmp_path / "Dataset007_Brain"
    cases = [f"p{n}" for n in range(6)]
    for case in cases:
        nifti(root / "imagesTr" / f"{case}_0000.nii.gz", np.random.default_rng(0).random((8, 8, 8)))
        label = np.zeros((8, 8, 8), dtype=np.uint8)
        label[:4], label[:2], label[7] = 1, 2, 3 if case == "p5" else 0
        nifti(root / "labelsTr" / f"{case}.nii.gz", label)
    labels = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}
    facts = {
        "channel_names": {"0": "T1"},
        "labels": labels,
        "regions_class_order": [1, 2],
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(facts))
    folds = [{"train": cases[2:], "val": cases[:2]}, {"train": cases[:2], "val": cases[2:]}]
    (root / "splits_final.json").write_text(json.dumps(folds))
    proposal = propose([root])
    file = proposal.file
    assert file.regions == {"whole": (1, 2), "core": (2,)} and file.ignore == (3,)
    assert (file.splits.by, file.splits.folds, file.splits.fold) == ("kfold", 2, 0)
    assert "annotated; they count in no loss" in " ".join(describe(proposal))
    write(file, tmp_path / "federation.yaml")
    assert load(tmp_path / "federation.yaml").splits == file.splits
    text = (tmp_path / "federation.yaml").read_text()
    assert "fold: 0" in text and "ignore: [3]" in text
    told = " ".join(describe(proposal))
    assert "2 folds, which are kept" in told and "does not name" not in told


# What a check of the labels would say


def test_label_warnings_of_the_check_are_in_the_proposal_and_its_file(tmp_path: Path) -> None:
    for name, value in (("north", 1), ("south", 2)):
        pictures(tmp_path / "data" / name, value=value)
    proposal = propose([tmp_path / "data"])
    said = "client 'south' has no case with class 'class_1' (1); there are some at north."
    assert any(said in warning for warning in proposal.warnings)
    write(proposal.file, tmp_path / "federation.yaml", notes=describe(proposal))
    assert "has no case with class 'class_1'" in (tmp_path / "federation.yaml").read_text()


# The same classes as other values


def labels_of(file: FederationFile) -> dict[str, Any]:
    return {source.path.name: source.labels for source in file.sources}


def test_masks_of_1_here_and_255_there_are_one_class_with_a_map_for_each_source(tmp_path: Path) -> None:
    pictures(tmp_path / "data" / "north", value=1)
    pictures(tmp_path / "data" / "south", value=255, size=(34, 60))
    proposal = propose([tmp_path / "data"])
    file = again(proposal.file, tmp_path)
    assert file.labels == {"class_1": (1,)} and file.clients == ("north", "south")
    assert labels_of(file) == {"north": {"class_1": (1,)}, "south": {"class_1": (255,)}}
    said = "Clients have different label values (north 1, south 255). They are taken for the same classes"
    assert any(sentence.startswith(said) for sentence in describe(proposal)) and not proposal.warnings
    assert proposed([tmp_path / "data" / "north", tmp_path / "data" / "south"]).labels == file.labels
    report = check(list_cases(file, tmp_path), file)
    assert len(report.usable) == 6 and "class_absent" not in {found.code for found in report.findings}
    data = RealData(tmp_path / "federation.yaml", DataSettings())
    for client in ("north", "south"):
        split = data.load(client).test  # its pictures are alike, and the test case stays
        assert sorted(split.batch([0]).label.unique().tolist()) == [0, 1]


def test_values_that_may_be_different_classes_are_not_joined(tmp_path: Path) -> None:
    for name, value in (("north", 1), ("south", 2)):
        pictures(tmp_path / "data" / name, value=value)
    proposal = propose([tmp_path / "data"])
    assert set(proposal.file.labels) == {"class_1", "class_2"} and len(proposal.warnings) == 2
    file = again(proposal.file, tmp_path)
    with raises(DataError, match=r"no case with class 'class_1' \(1\).*labels_differ: true"):
        RealData(tmp_path / "federation.yaml", DataSettings()).prepare()
    write(file.model_copy(update={"labels_differ": True}), tmp_path / "federation.yaml", overwrite=True)
    assert len(RealData(tmp_path / "federation.yaml", DataSettings()).prepare()) == 2


def nnunet(folder: Path, labels: dict[str, int], value: int) -> None:
    folder.mkdir(parents=True)
    facts = {"channel_names": {"0": "CT"}, "labels": {"background": 0, **labels}, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps({**facts, "numTraining": 3}))
    for n in range(3):
        values = np.zeros((8, 8, 8), dtype=np.uint8)
        values[: 2 + n] = value
        values[6:] = 3 - value
        nifti(folder / "imagesTr" / f"c{n}_0000.nii.gz", values.astype(np.int16) * 50)
        nifti(folder / "labelsTr" / f"c{n}.nii.gz", values)


def test_swapped_label_maps_of_nnunet_folders_are_joined_by_name(tmp_path: Path) -> None:
    nnunet(tmp_path / "a", {"kidney": 1, "tumour": 2}, 1)
    nnunet(tmp_path / "b", {"tumour": 1, "kidney": 2}, 2)
    proposal = propose([tmp_path / "a", tmp_path / "b"])
    file = again(proposal.file, tmp_path)
    assert file.labels == {"kidney": (1,), "tumour": (2,)}
    assert labels_of(file)["b"] == {"tumour": (1,), "kidney": (2,)} and not proposal.warnings
    assert any("joined by name (kidney, tumour)" in sentence for sentence in describe(proposal))
    data = RealData(tmp_path / "federation.yaml", DataSettings())
    for client in ("a", "b"):
        label = data.load(client).test.batch([0]).label[0]
        assert label[0].unique().tolist() == [1] and label[7].unique().tolist() == [2]  # kidney, tumour


def test_a_class_of_another_number_and_other_capitals_is_the_same(tmp_path: Path) -> None:
    nnunet(tmp_path / "a", {"Kidney": 1, "tumour": 2}, 1)
    nnunet(tmp_path / "b", {"Tumour": 1, "kidney": 2}, 2)
    nnunet(tmp_path / "c", {"KIDNEY": 1, "tumour": 2}, 1)
    file = again(propose([tmp_path / name for name in "abc"]).file, tmp_path)
    assert file.labels == {"Kidney": (1,), "tumour": (2,)}
    assert labels_of(file)["b"] == {"tumour": (1,), "Kidney": (2,)}
    assert labels_of(file)["c"] == {"Kidney": (1,), "tumour": (2,)}


def test_pictures_that_will_be_stretched_are_announced(tmp_path: Path) -> None:
    pictures(tmp_path / "data" / "north", size=(40, 50))
    assert "stretched" not in " ".join(describe(propose([tmp_path / "data"])))
    pictures(tmp_path / "data" / "south", size=(34, 60))
    said = "Their shapes differ (34x50 to 40x60), so that some are stretched."
    assert said in " ".join(describe(propose([tmp_path / "data"])))
