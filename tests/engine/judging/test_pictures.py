"""The panel: cases that are the same under every method."""

from pathlib import Path

import torch
from helpers import run

from wardround.comparison.runs import read_run
from wardround.engine.judging import pictures


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


def test_few_cases_are_shown_once_and_empty_ones_never() -> None:
    assert pictures.choose_by_truth([0.2]) == [0]
    assert pictures.choose_by_truth([0.0, 0.0]) == []
    assert pictures.choose_by_truth([0.3, 0.1]) == [1, 0]


def test_features_are_mean_sizes_of_the_slice_that_is_shown() -> None:
    features = torch.zeros(2, 3, 2, 2)  # two channels, three slices
    features[:, 2] = torch.tensor([[[1.0, -2.0], [3.0, 5.0]], [[-1.0, 0.0], [3.0, 5.0]]])
    drawn = pictures.draw_features(features, at=1.0)

    assert drawn.tolist() == [[[0, 0], [128, 255]]]  # 1, 1, 3 and 5 from smallest to largest
    assert not pictures.draw_features(features, at=0.0).any()


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
