"""Folders of real cases: read, resized, normalised; every mistake named in a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from helpers import run
from numpy.typing import NDArray
from PIL import Image
from pytest import approx, fixture, mark, raises

from wardround.data.federation import open_federation
from wardround.data.folders import Folders, FolderSettings, find, normalised, read_image, read_label
from wardround.data.settings import DataSettings
from wardround.engine.judging.evaluation import largest_components
from wardround.errors import DataError

SPLITS = ["train", "train", "train", "val", "test"]


def write(path: Path, values: NDArray[Any], spacing: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
    """A PNG or a NIfTI file, as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".nii.gz"):
        nibabel.save(nibabel.Nifti1Image(values, np.diag([*spacing, 1.0])), path)
    else:
        Image.fromarray(values).save(path)


def write_index(root: Path, rows: list[tuple[str, str, str]]) -> None:
    lines = ["centre,stem,split", *(",".join(row) for row in rows)]
    (root / "index.csv").write_text("\n".join(lines) + "\n")


@fixture
def pictures(tmp_path: Path) -> Path:
    """Two centres with five RGB pictures of 20 x 12 each; a bright square is the lesion."""
    random = np.random.default_rng(0)
    rows = []
    for centre in ("lund", "graz"):
        for number, split in enumerate(SPLITS):
            label = np.zeros((20, 12), np.uint8)
            label[4 + number : 12 + number, 3:9] = 1
            image = random.integers(0, 99, (20, 12, 3), np.uint8) + label[..., None] * np.uint8(150)
            write(tmp_path / f"data/{centre}/images/case{number}.png", image)
            write(tmp_path / f"data/{centre}/labels/case{number}.png", label)
            rows.append((centre, f"case{number}", split))
    write_index(tmp_path / "data", rows)
    return tmp_path / "data"


@fixture
def volumes(tmp_path: Path) -> Path:
    """Two centres with five volumes of 16 x 16 x 8 voxels of 1 x 2 x 3 mm; classes 0, 1 and 2."""
    random = np.random.default_rng(1)
    rows = []
    for centre in ("bern", "oslo"):
        for number, split in enumerate(SPLITS):
            label = np.zeros((16, 16, 8), np.int16)
            label[2:10, 4:12, 2:6] = 1
            label[4:8, 6:10, 3:5] = 2
            image = random.normal(0, 20, label.shape).astype(np.float32) + 100 * label.astype(np.float32)
            write(tmp_path / f"data/{centre}/images/p{number}.nii.gz", image, (1.0, 2.0, 3.0))
            write(tmp_path / f"data/{centre}/labels/p{number}.nii.gz", label, (1.0, 2.0, 3.0))
            rows.append((centre, f"p{number}", split))
    write_index(tmp_path / "data", rows)
    return tmp_path / "data"


def folders(root: Path, size: tuple[int, ...] = (16, 16), **changes: Any) -> Folders:
    return Folders(FolderSettings(root=root, size=size, **changes))


# Reading


def test_names_counts_and_channels_come_from_the_list(pictures: Path) -> None:
    found = folders(pictures)

    assert found.names == ["graz", "lund"]
    assert found.counts() == {"graz": 5, "lund": 5}
    assert found.channels == 3
    assert found.regions == {"class 1": (1,)}


def test_a_centre_without_training_cases_is_no_client_unless_it_is_named(pictures: Path) -> None:
    write_index(pictures, [("lund", "case0", "train"), ("graz", "case0", "test")])

    assert folders(pictures).names == ["lund"]
    assert folders(pictures, clients=("graz", "lund")).names == ["graz", "lund"]


def test_pictures_are_loaded_into_their_splits_at_one_size(pictures: Path) -> None:
    data = folders(pictures).load("lund")

    assert [len(split) for split in (data.train, data.val, data.test)] == [3, 1, 1]
    assert list(data.train.names) == ["case0", "case1", "case2"] and list(data.test.names) == ["case4"]
    assert data.train.images.shape == (3, 3, 16, 16) and data.train.images.dtype == torch.float32
    assert data.train.labels.shape == (3, 16, 16)
    assert set(data.train.labels.unique().tolist()) == {0, 1}


def test_a_case_of_the_right_size_keeps_its_values(pictures: Path) -> None:
    case = folders(pictures, size=(20, 12), normalise="maximum").case("lund", "case2")
    image = np.asarray(Image.open(pictures / "lund/images/case2.png")).astype(np.float32)

    assert torch.allclose(case.image, torch.from_numpy(image / image.max()).movedim(-1, 0))
    assert np.array_equal(case.label, np.asarray(Image.open(pictures / "lund/labels/case2.png")))


def test_image_and_label_stay_on_top_of_each_other_when_resized(pictures: Path) -> None:
    for size in ((40, 24), (10, 6), (16, 16)):
        case = folders(pictures, size=size, normalise="minmax").case("lund", "case1")
        inside, outside = case.image[:, case.label == 1], case.image[:, case.label == 0]
        assert inside.mean() > outside.mean() + 0.3
        assert (case.label == 1).float().mean() == approx(8 * 6 / (20 * 12), abs=0.03)


def test_spacing_follows_the_size(pictures: Path) -> None:
    case = folders(pictures, size=(10, 24)).case("lund", "case0")

    assert case.spacing == approx((2.0, 0.5))


def test_volumes_keep_their_millimetres(volumes: Path) -> None:
    found = folders(volumes, size=(8, 16, 16), num_classes=3)
    case = found.case("bern", "p0")

    assert found.channels == 1
    assert case.image.shape == (1, 8, 16, 16) and case.label.shape == (8, 16, 16)
    assert case.spacing == approx((2.0, 2.0, 1.5))
    assert set(case.label.unique().tolist()) == {0, 1, 2}


def test_a_fourth_axis_of_a_volume_holds_channels(volumes: Path) -> None:
    image = np.stack([np.full((16, 16, 8), value, np.float32) for value in (1, 2)], axis=-1)
    write(volumes / "bern/images/two.nii.gz", image, (1.0, 2.0, 3.0))

    values, spacing = read_image(volumes / "bern/images/two.nii.gz")

    assert values.shape == (2, 16, 16, 8) and spacing == approx((1.0, 2.0, 3.0))
    assert values[:, 0, 0, 0].tolist() == [1.0, 2.0]


def test_images_may_be_jpeg_and_labels_rgb(tmp_path: Path) -> None:
    write(tmp_path / "images/a.jpg", np.full((8, 8), 100, np.uint8))
    write(tmp_path / "labels/a.png", np.ones((8, 8, 3), np.uint8))

    assert find(tmp_path / "images", "a").suffix == ".jpg"
    assert read_image(find(tmp_path / "images", "a"))[0].shape == (1, 8, 8)
    assert read_label(find(tmp_path / "labels", "a")).unique().tolist() == [1]


def test_a_stem_may_hold_dots(tmp_path: Path) -> None:
    write(tmp_path / "scan.v1.2.png", np.zeros((8, 8), np.uint8))

    assert find(tmp_path, "scan.v1.2").name == "scan.v1.2.png"


# Normalising


def test_zscore_gives_every_channel_mean_0_and_sd_1() -> None:
    image = torch.stack([torch.arange(16.0).view(4, 4), 1000 + 7 * torch.arange(16.0).view(4, 4)])
    scaled = normalised(image, "zscore")

    assert torch.allclose(scaled.mean((1, 2)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(scaled.std((1, 2)), torch.ones(2), atol=1e-5)


def test_minmax_gives_every_channel_0_to_1() -> None:
    image = torch.stack([torch.arange(16.0).view(4, 4), -5 + 7 * torch.arange(16.0).view(4, 4)])
    scaled = normalised(image, "minmax")

    assert scaled.amin((1, 2)).tolist() == [0.0, 0.0] and scaled.amax((1, 2)).tolist() == [1.0, 1.0]


def test_maximum_divides_all_channels_by_one_number() -> None:
    image = torch.stack([torch.arange(16.0).view(4, 4), 2 * torch.arange(16.0).view(4, 4)])

    assert torch.equal(normalised(image, "maximum"), image / 30)


@mark.parametrize("how", ["zscore", "minmax"])
def test_a_constant_image_becomes_0(how: str) -> None:
    assert torch.equal(normalised(torch.full((1, 4, 4), 7.0), how), torch.zeros(1, 4, 4))


# Regions and the federation


def test_regions_join_label_values_under_a_name(volumes: Path) -> None:
    regions = {"whole": (1, 2), "core": (2,)}

    assert folders(volumes, (8, 8, 8), num_classes=3, regions=regions).regions == regions
    assert folders(volumes, (8, 8, 8), num_classes=3).regions == {"class 1": (1,), "class 2": (2,)}


def test_the_federation_knows_its_facts_without_loading(volumes: Path) -> None:
    settings = DataSettings(folders=FolderSettings(root=volumes, size=(8, 8, 8), num_classes=3))
    federation = open_federation(settings, seed=1)

    assert list(federation.names) == ["bern", "oslo"] and federation.counts == {"bern": 5, "oslo": 5}
    assert (federation.dimensions, federation.in_channels, federation.num_classes) == (3, 1, 3)
    assert len(federation.load("pooled").train) == 6 and len(federation.load("pooled").test) == 0


def test_a_whole_run_over_folders_of_pictures(pictures: Path, tmp_path: Path) -> None:
    data = {"folders": {"root": str(pictures), "size": [16, 16], "regions": {"square": [1]}}}
    result = run(tmp_path / "run", data=data)

    assert set(result.records[0]["weights"]) == {"graz", "lund"}
    assert [row["case"] for row in result.test.cases["graz"]] == ["case4"]
    assert list(result.test.cases["graz"][0]["regions"]) == ["square"]
    assert result.params_sha256 == run(tmp_path / "again", data=data).params_sha256


def test_a_whole_run_over_folders_of_volumes(volumes: Path, tmp_path: Path) -> None:
    result = run(
        tmp_path / "run",
        rounds=1,
        data={"folders": {"root": str(volumes), "size": [16, 16, 8], "num_classes": 3}},
        model={"name": "unet3d", "base_filters": 2, "levels": 2},
        evaluate={"metrics": ["dice", "hd95"], "overlays": 0, "postprocess": "largest_component"},
    )

    assert set(result.test.clients["dice"]) == {"bern", "oslo"}
    assert set(result.test.cases["bern"][0]["regions"]) == {"class 1", "class 2"}


# Mistakes


def drop_index(root: Path) -> None:
    (root / "index.csv").unlink()


def bad_split(root: Path) -> None:
    write_index(root, [("lund", "case0", "train"), ("lund", "case1", "training")])


def missing_column(root: Path) -> None:
    (root / "index.csv").write_text("centre,stem\nlund,case0\n")


def not_text(root: Path) -> None:
    (root / "index.csv").write_bytes(b"centre,stem,split\n\xff\xfe\n")


def missing_image(root: Path) -> None:
    (root / "lund/images/case1.png").unlink()


def missing_label(root: Path) -> None:
    (root / "lund/labels/case1.png").unlink()


def other_shape(root: Path) -> None:
    write(root / "lund/labels/case1.png", np.zeros((12, 20), np.uint8))


def large_label(root: Path) -> None:
    write(root / "lund/labels/case1.png", np.full((20, 12), 255, np.uint8))


def other_channels(root: Path) -> None:
    write(root / "lund/images/case1.png", np.zeros((20, 12), np.uint8))


def broken_file(root: Path) -> None:
    (root / "lund/images/case1.png").write_bytes(b"not a picture")


def broken_volume(root: Path) -> None:
    (root / "lund/images/case1.png").unlink()
    (root / "lund/images/case1.nii.gz").write_bytes(b"not a volume")


def volume(root: Path, kind: str, values: NDArray[Any]) -> None:
    (root / f"lund/{kind}/case1.png").unlink()
    write(root / f"lund/{kind}/case1.nii.gz", values)


def float_label(root: Path) -> None:
    volume(root, "labels", np.full((20, 12), 0.5, np.float32))


def negative_label(root: Path) -> None:
    volume(root, "labels", np.full((20, 12), -1, np.int16))


def nan_label(root: Path) -> None:
    volume(root, "labels", np.full((20, 12), np.nan, np.float32))


def infinite_label(root: Path) -> None:
    volume(root, "labels", np.full((20, 12), np.inf, np.float32))


def nan_image(root: Path) -> None:
    volume(root, "images", np.full((20, 12), np.nan, np.float32))


def climbing_stem(root: Path) -> None:
    write_index(root, [("lund", "case0", "train"), ("lund", "../../graz/images/case1", "train")])


def three_dimensions(root: Path) -> None:
    for kind, dtype in (("images", np.float32), ("labels", np.int16)):
        volume(root, kind, np.zeros((20, 12, 4), dtype))


MISTAKES: dict[Callable[[Path], None], str] = {
    drop_index: r"index\.csv cannot be read: No such file.*lists centre, stem and split",
    bad_split: r"index\.csv, line 3: needs .*train, val or test.*'lund', 'case1', 'training'",
    missing_column: r"index\.csv, line 2: needs centre, stem and split.*None",
    not_text: r"index\.csv is not a CSV file",
    missing_image: r"lund/images has no image 'case1' \(\.png",
    missing_label: r"lund/labels has no image 'case1'",
    other_shape: r"client 'lund', case 'case1': image is 20x12 but label is 12x20",
    large_label: r"client 'lund', case 'case1': label value 255, but num_classes is 2",
    other_channels: r"case 'case1': 1 channels, but the first image has 3",
    broken_file: r"case1\.png cannot be read: cannot identify image file",
    broken_volume: r"case1\.nii\.gz cannot be read",
    float_label: r"case1\.nii\.gz holds label values that are not 0, 1, 2",
    negative_label: r"case1\.nii\.gz holds label values that are not 0, 1, 2",
    nan_label: r"case1\.nii\.gz holds label values that are not 0, 1, 2",
    infinite_label: r"case1\.nii\.gz holds label values that are not 0, 1, 2",
    nan_image: r"case1\.nii\.gz holds NaN or infinite values",
    climbing_stem: r"'\.\./\.\./graz/images/case1' is not a file's stem",
    three_dimensions: r"case 'case1': image has 3 dimensions, but size has 2 numbers",
}


@mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_the_folders_is_named(mistake: Callable[[Path], None], pictures: Path) -> None:
    mistake(pictures)
    with raises(DataError, match=MISTAKES[mistake]):
        folders(pictures).load("lund")


def test_an_unknown_client_is_named_with_those_there_are(pictures: Path) -> None:
    with raises(DataError, match="has no centre 'lnd'; it has graz, lund"):
        _ = folders(pictures, clients=("lnd",)).names


def test_a_run_over_broken_folders_stops_with_the_sentence(pictures: Path, tmp_path: Path) -> None:
    large_label(pictures)
    with raises(DataError, match="client 'lund', case 'case1': label value 255"):
        run(tmp_path / "run", data={"folders": {"root": str(pictures), "size": [16, 16]}})


@mark.parametrize(
    ("rows", "sentence"),
    [
        ([("lund", "case0", "test")], "no centre has training cases"),
        ([], "no centre has training cases"),
        ([("lund", "case0", "train"), ("lund", "case0", "test")], "listed twice"),
        ([("../lund", "case0", "train")], "not the name of a folder"),
    ],
)
def test_a_list_that_cannot_be_used_is_explained(
    pictures: Path, rows: list[tuple[str, str, str]], sentence: str
) -> None:
    write_index(pictures, rows)
    with raises(DataError, match=sentence):
        open_federation(DataSettings(folders=FolderSettings(root=pictures, size=(16, 16))), seed=1)


def test_a_constant_image_does_not_become_noise() -> None:
    image = torch.full((1, 16, 16), 12345.67) + torch.randn(1, 16, 16) * 1e-3  # rounding of a resize

    assert not normalised(image, "zscore").any() and not normalised(image, "minmax").any()
    assert torch.allclose(normalised(-image, "maximum"), torch.tensor(-1.0), atol=1e-4)


# Largest component


def test_only_the_largest_part_of_each_class_is_kept() -> None:
    labels = np.array(
        [
            [1, 1, 0, 2, 0],
            [1, 0, 0, 0, 0],
            [0, 0, 1, 0, 2],
            [0, 0, 0, 0, 2],
        ],
        np.uint8,
    )

    assert largest_components(labels).tolist() == [
        [1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 2],
        [0, 0, 0, 0, 2],
    ]


def test_the_largest_part_of_nothing_is_nothing() -> None:
    empty = np.zeros((3, 3), np.uint8)

    assert np.array_equal(largest_components(empty), empty)
    assert largest_components(empty).dtype == np.uint8


def test_corners_do_not_connect_and_volumes_work_alike() -> None:
    labels = np.zeros((2, 3, 3), np.uint8)
    labels[0, 0, 0] = labels[1, 0, 0] = 1  # two voxels, face to face
    labels[1, 1, 1] = 1  # touches by an edge only

    kept = largest_components(labels)

    assert kept.sum() == 2 and kept[1, 1, 1] == 0


def test_the_prediction_itself_is_not_changed() -> None:
    labels = np.array([[1, 0, 1, 1]], np.uint8)
    largest_components(labels)

    assert labels.tolist() == [[1, 0, 1, 1]]
