"""The table of metrics, and `measure` on cases with several regions."""

import doctest
import math

import numpy as np
import pytest

from wardround.errors import DataError
from wardround.metrics import METRICS, SurfaceDistances, measure, overlap, registry, summary

NAMES = [
    "dice",
    "iou",
    "precision",
    "sensitivity",
    "specificity",
    "hd95",
    "hd95_pooled",
    "assd",
    "assd_mean_directed",
    "asd",
    "surface_dice",
    "volume_difference",
    "relative_volume_difference",
]
EYE = {"disc": [1, 2], "cup": [2]}


@pytest.fixture
def eye():
    """A disc of 5x5 with a cup of 3x3 inside; the prediction has the cup one voxel to the right."""
    truth = np.zeros((9, 9), dtype=np.int64)
    truth[2:7, 2:7] = 1
    pred = truth.copy()
    truth[3:6, 3:6] = 2
    pred[3:6, 4:7] = 2
    return pred, truth


def test_every_metric_is_listed_under_its_own_name():
    assert list(METRICS) == NAMES
    assert all(METRICS[name].name == name for name in NAMES)


def test_titles_carry_the_unit():
    assert METRICS["hd95"].title_in() == "HD95 (mm)"
    assert METRICS["volume_difference"].title_in() == "Volume difference (ml)"
    assert METRICS["dice"].title_in() == "Dice"
    assert len({metric.title_in() for metric in METRICS.values()}) == len(METRICS)


@pytest.mark.parametrize("name", NAMES)
def test_equal_masks_give_the_best_value(name, eye):
    _, truth = eye
    assert measure(truth, truth, EYE, [name], (1.0, 1.0))["disc"][name] == METRICS[name].best


@pytest.mark.parametrize("name", NAMES)
def test_a_region_absent_from_both_gives_the_best_value_by_default(name, eye):
    assert measure(*eye, {"absent": [7]}, [name], (1.0, 1.0))["absent"][name] == METRICS[name].best


def test_regions_may_overlap(eye):
    scores = measure(*eye, EYE, ["dice", "hd95", "volume_difference"], (1.0, 2.0))
    assert scores["disc"] == {"dice": 1.0, "hd95": 0.0, "volume_difference": 0.0}
    assert scores["cup"]["dice"] == pytest.approx(6 / 9)
    assert scores["cup"]["hd95"] == 2.0


def test_a_region_without_labels_is_empty(eye):
    assert measure(*eye, {"nothing": []}, ["dice", "hd95"], (1.0, 1.0))["nothing"] == {
        "dice": 1.0,
        "hd95": 0.0,
    }


def test_each_name_gives_its_own_definition(eye):
    pred, truth = eye
    scores = measure(*eye, {"cup": [2]}, NAMES, (1.0, 1.5), tolerance=1.4)["cup"]
    counts = overlap.confusion(pred == 2, truth == 2)
    surface = SurfaceDistances.of(pred == 2, truth == 2, (1.0, 1.5))
    assert scores == {
        "dice": overlap.dice(counts),
        "iou": overlap.iou(counts),
        "precision": overlap.precision(counts),
        "sensitivity": overlap.sensitivity(counts),
        "specificity": overlap.specificity(counts),
        "hd95": surface.hd95("max_directed"),
        "hd95_pooled": surface.hd95("pooled"),
        "assd": surface.assd("pooled"),
        "assd_mean_directed": surface.assd("mean_directed"),
        "asd": surface.asd(),
        "surface_dice": surface.surface_dice(1.4),
        "volume_difference": 0.0,
        "relative_volume_difference": 0.0,
    }


def test_a_class_absent_from_the_prediction_is_penalised(eye):
    pred, truth = eye
    pred = np.where(pred == 2, 1, pred)
    scores = measure(pred, truth, EYE, NAMES, (1.0, 1.0))["cup"]
    assert scores["dice"] == scores["sensitivity"] == scores["surface_dice"] == 0.0
    assert math.isnan(scores["precision"])
    assert scores["hd95"] == scores["assd"] == scores["asd"] == math.inf
    assert scores["relative_volume_difference"] == -1.0
    diagonal = measure(pred, truth, EYE, ["hd95"], (1.0, 1.0), surface_penalty="diagonal")
    assert diagonal["cup"]["hd95"] == pytest.approx(9 * math.sqrt(2))


def test_the_nan_policy_reaches_overlap_and_surface_metrics(eye):
    scores = measure(*eye, {"absent": [7]}, ["dice", "hd95", "surface_dice"], (1.0, 1.0), empty_policy="nan")
    assert all(math.isnan(value) for value in scores["absent"].values())


def test_the_smooth_policy_reaches_dice(eye):
    pred, truth = eye
    scores = measure(np.zeros_like(pred), truth, {"cup": [2]}, ["dice"], (1.0, 1.0), empty_policy="smooth")
    assert scores["cup"]["dice"] == 1e-5 / (9 + 1e-5)


def test_surface_distances_are_found_once_a_region_and_only_when_asked_for(eye, monkeypatch):
    calls = []
    of = SurfaceDistances.of

    def counted(*args, **kwargs):
        calls.append(args)
        return of(*args, **kwargs)

    monkeypatch.setattr(SurfaceDistances, "of", counted)
    measure(*eye, EYE, [name for name in NAMES if not METRICS[name].is_surface], (1.0, 1.0))
    assert len(calls) == 0
    measure(*eye, EYE, NAMES, (1.0, 1.0))
    assert len(calls) == 2


def test_labels_of_different_shape_are_refused_rather_than_broadcast():
    with pytest.raises(DataError, match=r"prediction is 3 but the truth is 3x3"):
        measure(np.zeros(3), np.zeros((3, 3)), EYE, ["dice"], (1.0, 1.0))


@pytest.mark.parametrize("module", [registry, overlap, summary], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_are_true(module):
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0
