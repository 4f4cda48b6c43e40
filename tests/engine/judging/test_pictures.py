"""The panel: cases that are the same under every method."""

from pathlib import Path

import numpy as np
import torch
import yaml
from helpers import run
from PIL import Image
from pytest import mark

from wardround.comparison.runs import read_run
from wardround.data.annotation import Annotation
from wardround.data.cases import Case, TensorSplit
from wardround.engine.judging import pictures
from wardround.engine.judging.views import View


def test_two_methods_keep_the_same_cases_and_their_own_predictions(tmp_path: Path) -> None:
    kept = []
    for name in ("fedavg", "fedevi"):
        run(tmp_path / name, method={"name": name}, rounds=1, evaluate={"metrics": ["dice"], "overlays": 1})
        kept.append(read_run(tmp_path / name).files)

    for client in kept[0]:
        ours, theirs = (files[client].panel for files in kept)
        assert [case.name for case in ours] == [case.name for case in theirs]
        assert len(ours) <= pictures.PANEL_CASES and len(kept[0][client].pictures) == 1
        for one, other in zip(ours, theirs, strict=True):
            assert (one.truth == other.truth).all() and one.truth.any()
            assert one.image.shape == (1, 16, 16) and one.features is not None and one.features.shape[1] < 16
    assert any(
        (one.uncertainty != other.uncertainty).any()
        for client in kept[0]
        for one, other in zip(*(files[client].panel for files in kept), strict=True)
    )


def test_images_that_are_judged_in_windows_show_no_features(tmp_path: Path) -> None:
    evaluate = {"metrics": ["dice"], "overlays": 1, "window": [8, 8]}
    run(tmp_path / "run", rounds=1, evaluate=evaluate)
    panels = [files.panel for files in read_run(tmp_path / "run").files.values()]

    assert any(panels) and all(case.features is None for panel in panels for case in panel)


def test_few_cases_are_shown_once_and_empty_ones_never() -> None:
    assert pictures.choose_by_truth([0.2]) == [0]
    assert pictures.choose_by_truth([0.0, 0.0]) == []
    assert pictures.choose_by_truth([0.3, 0.1]) == [1, 0]


def test_features_are_mean_sizes_of_the_slice_that_is_shown() -> None:
    features = torch.zeros(2, 3, 2, 2)  # two channels, three slices
    features[:, 2] = torch.tensor([[[1.0, -2.0], [3.0, 5.0]], [[-1.0, 0.0], [3.0, 5.0]]])
    drawn = pictures.draw_features(features, 1.0, View())

    assert drawn.tolist() == [[[0, 0], [128, 255]]]  # 1, 1, 3 and 5 from smallest to largest
    assert not pictures.draw_features(features, 0.0, View()).any()


def test_a_panel_of_a_volume_is_one_small_slice() -> None:
    shape = (40, 400, 200)
    truth = torch.zeros(shape, dtype=torch.long)
    truth[30, 50:90, 50:90] = 1
    entropy = torch.zeros(shape, dtype=torch.uint8)
    picture = pictures.picture_of("v", torch.rand(1, *shape), truth, truth, entropy, (3.0, 1.0, 1.0))
    panel = pictures.make_panel(picture, torch.rand(4, 10, 300, 300))

    assert panel.places == [30] and panel.truth.any() and len(panel.image) == 1
    for layer in (panel.image, panel.prediction, panel.uncertainty, panel.features):
        assert layer is not None and max(layer.shape) <= pictures.PANEL_PIXELS


def write_pictures(folder: Path, channels: list[str]) -> Path:
    """Two hospitals' colour images: orange, with a blue square that is labelled; a federation.yaml."""
    rng = np.random.default_rng(0)
    for client in ("north", "south"):
        for kind in ("images", "labels"):
            (folder / client / kind).mkdir(parents=True)
        for number in range(8):
            image = np.full((24, 32, 3), (220, 120, 40), np.uint8) + rng.integers(0, 9, (24, 32, 3), np.uint8)
            label = np.zeros((24, 32), np.uint8)
            label[4:12, 4 : 12 + number] = 255
            image[label > 0] = (30, 60, 200)
            Image.fromarray(image).save(folder / client / "images" / f"p{number}.png")
            Image.fromarray(label).save(folder / client / "labels" / f"p{number}.png")
    sources = [{"path": ".", "reader": "centres"}]
    file = {"sources": sources, "labels": {"lesion": [255]}, "prepare": {"size": [24, 32]}}
    if channels:
        file["channels"] = channels
    (folder / "federation.yaml").write_text(yaml.safe_dump(file))
    return folder / "federation.yaml"


@mark.parametrize("channels", [[], ["red", "green", "blue"]])
def test_colour_images_are_shown_in_the_colours_of_their_files(tmp_path: Path, channels: list[str]) -> None:
    path = write_pictures(tmp_path / "data", channels)
    evaluate = {"metrics": ["dice"], "overlays": 2}
    run(tmp_path / "run", rounds=1, data={"federation": str(path)}, evaluate=evaluate)

    for files in read_run(tmp_path / "run").files.values():
        for picture in (*files.pictures, *files.panel):
            assert picture.image.shape == (1, 24, 32, 3) and picture.size == (24, 32)
            inside, outside = picture.image[picture.truth > 0], picture.image[picture.truth == 0]
            assert np.abs(inside.mean(axis=0) - (30, 60, 200)).max() < 1
            assert np.abs(outside.mean(axis=0) - (224, 124, 44)).max() < 1
    assert (tmp_path / "run/overlays.png").exists()


def test_three_channels_of_other_names_are_not_taken_for_colours(tmp_path: Path) -> None:
    path = write_pictures(tmp_path / "data", ["T1", "T2", "FLAIR"])
    evaluate = {"metrics": ["dice"], "overlays": 1}
    run(tmp_path / "run", rounds=1, data={"federation": str(path)}, evaluate=evaluate)

    (picture,) = read_run(tmp_path / "run").files["north"].pictures
    assert picture.image.ndim == 3


def test_what_a_client_does_not_annotate_or_is_ignored_is_neither_drawn_nor_counted() -> None:
    """A client that annotates class 1 of two; the last column is to be ignored."""
    truth = torch.tensor([[[1, 0, 3]]], dtype=torch.uint8)
    split = TensorSplit.of([Case("p1", torch.rand(1, 1, 3), truth[0], (1.0, 1.0))])
    album = pictures.Album(split, {"one": (1,)}, "score", annotation=Annotation((0, 1, 0), ignores=True))
    album.add(
        torch.rand(1, 1, 3),
        truth[0],
        torch.tensor([[[0.0, 0.0, 0.0]], [[1.0, 0.0, 1.0]], [[0.0, 1.0, 0.0]]]),
        np.array([[1, 2, 1]], dtype=np.uint8),
    )

    (picture,) = album._pictures
    assert picture.truth.tolist() == picture.prediction.tolist() == [[[1, 0, 0]]]
    assert picture.dice == 1.0  # as in cases.csv
    voxels, _, hits = album._calibration.sum(dim=0).tolist()
    assert (voxels, hits) == (2.0, 1.0)
