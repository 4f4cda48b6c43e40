"""Surface metrics against a brute force over all pairs of boundary voxels, and against MONAI."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from monai.metrics import (
    compute_average_surface_distance,
    compute_hausdorff_distance,
    compute_surface_dice,
)
from scipy import ndimage
from scipy.spatial.distance import cdist

from wardround.errors import DataError
from wardround.metrics.surface import REACH, SurfaceDistances

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "metrics.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
MASK_CASES = [case for case in VECTORS["cases"] if "pred" in case["inputs"]]
SPACINGS = {2: [(1.0, 1.0), (0.8, 2.5)], 3: [(1.0, 1.0, 1.0), (3.3, 0.7, 0.9)]}


def close(expected):
    return pytest.approx(float(expected), rel=VECTORS["rtol"], abs=VECTORS["atol"], nan_ok=True)


def brute_force(pred, truth, spacing):
    """Sorted distances both ways, from SciPy's erosion and the full table of distances."""
    points = [np.argwhere(mask & ~ndimage.binary_erosion(mask)) * spacing for mask in (pred, truth)]
    table = cdist(*points)
    return table.min(axis=1), table.min(axis=0)


def random_mask(rng, shape):
    """A blob, a scatter, a half-space (which touches the border), a full mask or one voxel."""
    kind = rng.integers(5)
    if kind == 0:
        return ndimage.gaussian_filter(rng.normal(size=shape), 2.0) > 0.05
    if kind == 1:
        return rng.random(shape) < 0.03
    if kind == 2:
        return np.indices(shape)[rng.integers(len(shape))] < rng.integers(1, min(shape))
    mask = np.full(shape, kind == 3)
    mask[tuple(rng.integers(shape))] = True
    return mask


def random_pairs(seed, num):
    """Mask pairs in 2D and 3D; some predictions are the truth moved a little, as a model's would be."""
    rng = np.random.default_rng(seed)
    while num:
        shape = tuple(rng.integers(9, 20, size=rng.integers(2, 4)))
        truth = random_mask(rng, shape)
        pred = np.roll(truth, 2, axis=0) if rng.random() < 0.3 else random_mask(rng, shape)
        if pred.any() and truth.any():
            num -= 1
            yield pred, truth, SPACINGS[len(shape)][rng.integers(2)]


def values_of(surface, tolerance=1.1):
    return (
        surface.hd95(),
        surface.hd95("pooled"),
        surface.assd(),
        surface.assd("mean_directed"),
        surface.asd(),
        surface.surface_dice(tolerance),
    )


def one_voxel(shape, place):
    mask = np.zeros(shape, dtype=bool)
    mask[place] = True
    return mask


@pytest.mark.parametrize("case", MASK_CASES, ids=lambda case: case["name"])
def test_surface_metrics_equal_the_golden_vectors(case):
    inputs, expected = case["inputs"], case["expected"]
    pred, truth = (np.array(inputs[name], dtype=bool) for name in ("pred", "truth"))
    surface = SurfaceDistances.of(pred, truth, inputs["spacing"])

    np.testing.assert_allclose(np.sort(surface.pred_to_truth), expected["surface_pred_to_gt"], 1e-6, 1e-6)
    np.testing.assert_allclose(np.sort(surface.truth_to_pred), expected["surface_gt_to_pred"], 1e-6, 1e-6)
    assert max(surface.pred_to_truth.max(), surface.truth_to_pred.max()) == close(expected["hd"])
    assert surface.hd95() == close(expected["hd95_max_of_directed"])
    assert surface.hd95("pooled") == close(expected["hd95_pooled"])
    assert surface.assd() == close(expected["assd_pooled"])
    assert surface.assd("mean_directed") == close(expected["assd_mean_of_directed"])


@pytest.mark.parametrize("name", ["both_empty", "pred_empty", "truth_empty"])
def test_empty_masks_follow_the_golden_policy_table(name):
    empty, filled = np.zeros((3, 3), dtype=bool), np.eye(3, dtype=bool)
    pair = {"both_empty": (empty, empty), "pred_empty": (empty, filled), "truth_empty": (filled, empty)}[name]
    surface = SurfaceDistances.of(*pair, (1.0, 1.0))
    expected = CASES["edge_cases"]["expected"][name]
    assert surface.hd95() == surface.hd95("pooled") == close(expected["hd95"])
    assert surface.assd() == surface.assd("mean_directed") == surface.asd() == close(expected["assd"])


def test_two_hundred_random_pairs_agree_with_brute_force():
    for pred, truth, spacing in random_pairs(seed=0, num=200):
        there, back = brute_force(pred, truth, spacing)
        pooled = np.concatenate([there, back])
        surface = SurfaceDistances.of(pred, truth, spacing)

        np.testing.assert_allclose(surface.pred_to_truth, there, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(surface.truth_to_pred, back, rtol=1e-9, atol=1e-9)
        assert values_of(surface) == pytest.approx(
            (
                max(np.percentile(there, 95), np.percentile(back, 95)),
                np.percentile(pooled, 95),
                pooled.mean(),
                (there.mean() + back.mean()) / 2,
                there.mean(),
                (pooled <= 1.1).mean(),
            )
        )


def test_two_hundred_random_pairs_agree_with_monai():
    # MONAI keeps distances in float32, hence 1e-6 of the value. torch.quantile also finds the rank,
    # 0.95 (n - 1), in float32 and so misses the percentile by up to that error times the gap between
    # two distances; the brute force above is the reference for HD95 to the last digits.
    for pred, truth, spacing in random_pairs(seed=1, num=200):
        batch = [torch.from_numpy(mask)[None, None].float() for mask in (pred, truth)]
        options = {"include_background": True, "spacing": spacing}
        surface = SurfaceDistances.of(pred, truth, spacing)
        longest = max(surface.pred_to_truth.max(), surface.truth_to_pred.max())
        num_ranks = max(surface.pred_to_truth.size, surface.truth_to_pred.size)
        assert surface.hd95() == pytest.approx(
            compute_hausdorff_distance(*batch, percentile=95, **options).item(),
            rel=1e-6,
            abs=1e-6 + num_ranks * 2**-23 * longest,
        )
        assert surface.assd() == pytest.approx(
            compute_average_surface_distance(*batch, symmetric=True, **options).item(), rel=1e-6, abs=1e-6
        )
        assert surface.asd() == pytest.approx(
            compute_average_surface_distance(*batch, **options).item(), rel=1e-6, abs=1e-6
        )
        assert surface.surface_dice(1.1) == pytest.approx(
            compute_surface_dice(*batch, [1.1], use_subvoxels=False, **options).item(), rel=1e-6
        )


def test_far_voxels_agree_with_a_distance_transform_of_the_whole_image():
    # An island far from the truth is beyond the short steps, so the k-d tree must find it.
    rng = np.random.default_rng(2)
    shape, spacing = (40, 36, 44), (2.0, 0.9, 1.3)
    distance = np.sqrt(sum((axis - 18) ** 2 for axis in np.indices(shape)))
    truth = distance < 8
    pred = distance + ndimage.gaussian_filter(rng.normal(size=shape), 2) * 20 < 8
    pred[36:39, 30:33, 38:42] = True
    boundaries = [mask & ~ndimage.binary_erosion(mask) for mask in (pred, truth)]
    maps = [ndimage.distance_transform_edt(~boundary, sampling=spacing) for boundary in boundaries]

    surface = SurfaceDistances.of(pred, truth, spacing)

    assert surface.pred_to_truth.max() > 10 * REACH
    np.testing.assert_allclose(surface.pred_to_truth, maps[1][boundaries[0]], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(surface.truth_to_pred, maps[0][boundaries[1]], rtol=1e-9, atol=1e-9)


def test_cropping_gives_the_same_as_no_cropping():
    # A wide border of background enlarges the image but not the box around the masks.
    for pred, truth, spacing in random_pairs(seed=3, num=20):
        wide = [np.pad(mask, 7) for mask in (pred, truth)]
        assert values_of(SurfaceDistances.of(pred, truth, spacing)) == values_of(
            SurfaceDistances.of(*wide, spacing)
        )


@settings(max_examples=60, deadline=None)
@given(
    hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6).flatmap(
        lambda shape: st.tuples(
            hnp.arrays(bool, shape),
            hnp.arrays(bool, shape),
            st.lists(st.sampled_from([0.3, 1.0, 1.7, 6.0]), min_size=len(shape), max_size=len(shape)),
        )
    )
)
def test_masks_of_any_dimension_keep_the_promises_of_a_distance(drawn):
    pred, truth, spacing = drawn
    there, back = SurfaceDistances.of(pred, truth, spacing), SurfaceDistances.of(truth, pred, spacing)
    assert there.hd95() == back.hd95()
    assert there.assd() == pytest.approx(back.assd())
    assert there.surface_dice(1.0) == back.surface_dice(1.0)
    assert values_of(SurfaceDistances.of(pred, pred, spacing)) == (0, 0, 0, 0, 0, 1)
    assert there.surface_dice(0.5) <= there.surface_dice(5.0)
    doubled = SurfaceDistances.of(pred, truth, [2 * step for step in spacing])
    assert doubled.hd95() == pytest.approx(2 * there.hd95())


def test_one_voxel_masks_are_apart_by_the_spacing_between_them():
    here, there = one_voxel((5, 5, 5), (0, 0, 0)), one_voxel((5, 5, 5), (1, 2, 0))
    surface = SurfaceDistances.of(here, there, (3.0, 2.0, 9.0))
    assert values_of(surface) == (5.0, 5.0, 5.0, 5.0, 5.0, 0.0)
    assert surface.surface_dice(5.0) == 1.0


def test_the_boundary_of_a_full_mask_is_the_rim_of_the_image():
    full = np.ones((5, 5), dtype=bool)
    surface = SurfaceDistances.of(full, one_voxel((5, 5), (2, 2)), (1.0, 1.0))
    assert surface.pred_to_truth.size == 16
    assert surface.truth_to_pred.tolist() == [2.0]


def test_diagonal_neighbours_are_not_part_of_the_cross():
    pred = np.ones((3, 3), dtype=bool)
    pred[0, 0] = False  # the centre touches the outside only across a corner
    assert SurfaceDistances.of(pred, pred, (1.0, 1.0)).pred_to_truth.size == 7


def test_both_empty_masks_have_distance_zero_and_surface_dice_one():
    empty = np.zeros((3, 4), dtype=bool)
    assert values_of(SurfaceDistances.of(empty, empty, (1.0, 1.0))) == (0, 0, 0, 0, 0, 1)


def test_the_nan_policy_leaves_out_cases_with_both_masks_empty():
    empty = np.zeros((3, 4), dtype=bool)
    surface = SurfaceDistances.of(empty, empty, (1.0, 1.0), empty_policy="nan", surface_penalty="diagonal")
    assert all(math.isnan(value) for value in values_of(surface))


@pytest.mark.parametrize("empty_policy", ["defined", "nan"])
def test_one_empty_mask_is_infinitely_far_with_surface_dice_zero(empty_policy):
    empty, filled = np.zeros((3, 4), dtype=bool), one_voxel((3, 4), (1, 1))
    for pair in [(empty, filled), (filled, empty)]:
        surface = SurfaceDistances.of(*pair, (1.0, 1.0), empty_policy=empty_policy)
        assert values_of(surface) == (math.inf,) * 5 + (0.0,)


def test_with_one_empty_mask_monai_has_the_same_surface_dice_but_no_hd95():
    # torch.quantile interpolates between infinities and gets NaN, which a mean would skip: a missed
    # lesion would cost nothing. Ours is infinite, and counted.
    empty, filled = torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None]
    for pair in [(empty, filled), (filled, empty)]:
        ours = SurfaceDistances.of(*(mask[0, 0].bool().numpy() for mask in pair), (1.0, 1.0))
        assert (
            compute_surface_dice(*pair, [1.0], include_background=True).item() == ours.surface_dice() == 0.0
        )
        assert math.isnan(compute_hausdorff_distance(*pair, include_background=True, percentile=95).item())
        assert ours.hd95() == math.inf


def test_the_diagonal_penalty_is_that_of_the_whole_image():
    empty, filled = np.zeros((3, 4), dtype=bool), one_voxel((3, 4), (1, 1))
    for pair in [(empty, filled), (filled, empty)]:
        surface = SurfaceDistances.of(*pair, (2.0, 2.0), surface_penalty="diagonal")
        assert values_of(surface) == (10.0,) * 5 + (0.0,)


def test_the_diagonal_penalty_does_not_touch_masks_that_are_not_empty():
    here, there = one_voxel((9, 9), (0, 0)), one_voxel((9, 9), (0, 8))
    surface = SurfaceDistances.of(here, there, (1.0, 1.0), surface_penalty="diagonal")
    assert surface.hd95() == 8.0


def test_a_distance_equal_to_the_tolerance_is_within_it_despite_rounding():
    here, there = one_voxel((1, 9), (0, 2)), one_voxel((1, 9), (0, 5))
    assert 3 * 0.1 > 0.3  # in floating point
    assert SurfaceDistances.of(here, there, (1.0, 0.1)).surface_dice(0.3) == 1.0
    assert SurfaceDistances.of(here, there, (1.0, float(np.float32(0.1)))).surface_dice(0.3) == 1.0


def test_masks_in_any_memory_order_give_the_same():
    pred, truth, spacing = next(random_pairs(seed=5, num=1))
    flipped = [mask.T.copy().T[::-1] for mask in (pred, truth)]
    again = [np.ascontiguousarray(mask) for mask in flipped]
    assert values_of(SurfaceDistances.of(*flipped, spacing)) == values_of(
        SurfaceDistances.of(*again, spacing)
    )


def test_spacing_needs_one_value_an_axis():
    mask = np.ones((3, 3), dtype=bool)
    with pytest.raises(DataError, match=r"spacing \(1.0,\) has 1 values; the mask has 2 axes"):
        SurfaceDistances.of(mask, mask, (1.0,))


def test_masks_of_different_shape_are_refused_rather_than_broadcast():
    with pytest.raises(DataError, match=r"prediction is 1x3 but the truth is 3x3"):
        SurfaceDistances.of(np.ones((1, 3), dtype=bool), np.ones((3, 3), dtype=bool), (1.0, 1.0))
