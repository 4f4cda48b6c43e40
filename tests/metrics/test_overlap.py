"""Overlap metrics: a worked example, MONAI as the independent implementation, and empty masks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.metrics import compute_dice, compute_iou, get_confusion_matrix

from wardround.errors import DataError
from wardround.metrics.overlap import (
    Confusion,
    confusion,
    dice,
    iou,
    label_pairs,
    precision,
    region_confusion,
    relative_volume_difference,
    sensitivity,
    specificity,
    volume_difference,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "metrics.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
MASK_CASES = [case for case in VECTORS["cases"] if "pred" in case["inputs"]]
SCORES = {"dice": dice, "iou": iou, "precision": precision, "recall": sensitivity}

shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)
mask_pairs = shapes.flatmap(lambda shape: st.tuples(hnp.arrays(bool, shape), hnp.arrays(bool, shape)))


def close(expected):
    return pytest.approx(float(expected), rel=VECTORS["rtol"], abs=VECTORS["atol"], nan_ok=True)


def masks_of_edge_case(name):
    empty, filled = np.zeros((3, 3), dtype=bool), np.eye(3, dtype=bool)
    return {"both_empty": (empty, empty), "pred_empty": (empty, filled), "truth_empty": (filled, empty)}[name]


@pytest.mark.parametrize("case", MASK_CASES, ids=lambda case: case["name"])
def test_overlap_equals_the_golden_vectors(case):
    pred, truth = (np.array(case["inputs"][name], dtype=bool) for name in ("pred", "truth"))
    expected = case["expected"]
    counts = confusion(pred, truth)

    assert (counts.tp, counts.fp, counts.fn) == (expected["tp"], expected["fp"], expected["fn"])
    for name, score in SCORES.items():
        assert score(counts) == close(expected[name])


@pytest.mark.parametrize("name", ["both_empty", "pred_empty", "truth_empty"])
def test_empty_masks_follow_the_golden_policy_table(name):
    counts = confusion(*masks_of_edge_case(name))
    for score_name, score in SCORES.items():
        assert score(counts) == close(CASES["edge_cases"]["expected"][name][score_name])


def test_a_worked_example_gives_the_numbers_found_by_hand():
    counts = Confusion(tp=6, fp=2, fn=4, tn=8)
    assert dice(counts) == 12 / 18
    assert iou(counts) == 6 / 12
    assert precision(counts) == 6 / 8
    assert sensitivity(counts) == 6 / 10
    assert specificity(counts) == 8 / 10
    assert volume_difference(counts, (2.0, 5.0, 10.0)) == -0.2  # two voxels of 100 cubic mm too few
    assert relative_volume_difference(counts) == -2 / 10


@given(mask_pairs)
def test_overlap_equals_monai_wherever_both_masks_have_voxels_of_both_kinds(pair):
    pred, truth = pair
    if not (pred.any() and truth.any()) or truth.all():
        return
    batch = [torch.from_numpy(mask.reshape(1, 1, -1)).float() for mask in pair]
    tp, fp, tn, fn = get_confusion_matrix(*batch).reshape(4).int().tolist()
    counts = confusion(pred, truth)
    assert counts == Confusion(tp, fp, fn, tn)
    assert dice(counts) == pytest.approx(compute_dice(*batch).item(), rel=1e-6)
    assert iou(counts) == pytest.approx(compute_iou(*batch).item(), rel=1e-6)


@given(mask_pairs)
def test_iou_is_dice_over_two_minus_dice(pair):
    counts = confusion(*pair)
    assert iou(counts) == pytest.approx(dice(counts) / (2 - dice(counts)))


@given(mask_pairs)
def test_swapping_the_masks_swaps_precision_and_sensitivity_and_keeps_dice(pair):
    pred, truth = pair
    there, back = confusion(pred, truth), confusion(truth, pred)
    assert dice(there) == dice(back)
    assert precision(there) == pytest.approx(sensitivity(back), nan_ok=True)


@given(mask_pairs)
def test_specificity_is_the_sensitivity_of_the_background(pair):
    pred, truth = pair
    background = confusion(~pred, ~truth)
    assert specificity(confusion(pred, truth)) == pytest.approx(sensitivity(background), nan_ok=True)


@given(mask_pairs)
def test_a_mask_compared_with_itself_scores_best(pair):
    counts = confusion(pair[0], pair[0])
    assert [score(counts) for score in (dice, iou, precision, sensitivity, specificity)] == [1.0] * 5
    assert relative_volume_difference(counts) == volume_difference(counts, (1.0,)) == 0.0


def test_both_empty_masks_score_dice_one():
    assert dice(Confusion(0, 0, 0, 9)) == 1.0


@pytest.mark.parametrize("score", [dice, iou, precision, sensitivity, relative_volume_difference])
def test_the_nan_policy_leaves_out_cases_with_both_masks_empty(score):
    assert math.isnan(score(Confusion(0, 0, 0, 9), "nan"))


def test_the_nan_policy_keeps_what_is_defined():
    both_empty, pred_empty = Confusion(0, 0, 0, 9), Confusion(0, 0, 2, 7)
    assert specificity(both_empty, "nan") == 1.0
    assert dice(pred_empty, "nan") == 0.0
    assert sensitivity(pred_empty, "nan") == 0.0


def test_the_smooth_policy_adds_a_small_number_to_both_sides_of_dice():
    assert dice(Confusion(0, 0, 0, 9), "smooth") == 1.0
    assert dice(Confusion(0, 1, 1, 7), "smooth") == 1e-5 / (2 + 1e-5)
    assert dice(Confusion(3, 1, 1, 4), "smooth") == (6 + 1e-5) / (8 + 1e-5)


def test_the_smooth_policy_changes_dice_only():
    assert iou(Confusion(0, 0, 0, 9), "smooth") == 1.0
    assert math.isnan(precision(Confusion(0, 0, 2, 7), "smooth"))


def test_full_masks_score_specificity_one_and_a_missed_full_mask_none():
    full, one_voxel = np.ones((2, 2), dtype=bool), np.zeros((2, 2), dtype=bool)
    one_voxel[0, 0] = True
    assert specificity(confusion(full, full)) == 1.0
    assert math.isnan(specificity(confusion(one_voxel, full)))
    assert specificity(confusion(full, one_voxel)) == 0.0
    assert dice(confusion(one_voxel, full)) == 0.4


def test_one_voxel_masks_agree_wholly_or_not_at_all():
    here, there = np.zeros((2, 3, 2), dtype=bool), np.zeros((2, 3, 2), dtype=bool)
    here[0, 1, 1] = there[1, 0, 0] = True
    assert dice(confusion(here, here)) == 1.0
    assert dice(confusion(here, there)) == 0.0


def test_relative_volume_difference_is_infinite_if_only_the_truth_is_empty():
    assert relative_volume_difference(Confusion(0, 3, 0, 6)) == math.inf
    assert relative_volume_difference(Confusion(0, 0, 3, 6)) == -1.0
    assert relative_volume_difference(Confusion(0, 0, 0, 9)) == 0.0


def test_masks_of_different_shape_are_refused_rather_than_broadcast():
    with pytest.raises(DataError, match=r"prediction is 1x3 but the truth is 3x3"):
        confusion(np.ones((1, 3), dtype=bool), np.ones((3, 3), dtype=bool))


# Counts on the device


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("highest", [0, 3, 13, 14, 253, 254, 300])
@pytest.mark.parametrize("shape", [(1, 50), (3, 7, 5), (2, 4, 5, 6)])
def test_pairs_of_labels_are_counted_as_numpy_counts_them(dtype, highest, shape):
    draw = torch.Generator().manual_seed(highest)
    top = min(highest + 4, 255 if dtype == torch.uint8 else 32767)
    least = 0 if dtype == torch.uint8 else -2
    pred, truth = (torch.randint(least, top + 1, shape, generator=draw).to(dtype) for _ in range(2))

    found = label_pairs(pred, truth, highest).numpy()

    size = highest + 2
    for case in range(shape[0]):
        expected = np.zeros((size, size), dtype=np.int64)
        for i, j in zip(truth[case].flatten().tolist(), pred[case].flatten().tolist(), strict=True):
            row, column = (value if 0 <= value <= highest else highest + 1 for value in (i, j))
            expected[row, column] += 1
        assert np.array_equal(found[case], expected)


@pytest.mark.parametrize("labels", [[1], [1, 2], [2, 2], [], [0], [0, 1, 2, 3], [3]])
def test_a_region_read_from_pairs_has_the_counts_of_its_masks(labels):
    draw = np.random.default_rng(len(labels))
    pred, truth = draw.integers(0, 6, (2, 11, 7))  # 4 and 5 belong to no region

    pairs = label_pairs(torch.from_numpy(pred)[None], torch.from_numpy(truth)[None], 3).numpy()[0]

    assert region_confusion(pairs, labels) == confusion(np.isin(pred, labels), np.isin(truth, labels))


def test_batches_of_different_shape_are_refused():
    with pytest.raises(DataError, match="Resample"):
        label_pairs(torch.zeros(1, 4), torch.zeros(1, 5), 1)
