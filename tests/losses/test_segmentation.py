"""Segmentation losses: golden vectors, independent implementations, edge cases by name."""

import json
from pathlib import Path

import pytest
import torch
from monai.losses import DiceCELoss, DiceLoss, GeneralizedDiceLoss, TverskyLoss
from torch import nn

from wardround.losses.objective import DiceBCE
from wardround.losses.segmentation import (
    cross_entropy_loss,
    dice_bce_loss,
    dice_loss,
    focal_tversky_loss,
    generalised_dice_loss,
    probabilities,
    targets,
)

LOSSES = [dice_loss, cross_entropy_loss, dice_bce_loss, generalised_dice_loss, focal_tversky_loss]
OVERLAP_LOSSES = [dice_loss, generalised_dice_loss, focal_tversky_loss]
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "baselines.json").read_text())
GOLDEN = {case["name"]: case for case in VECTORS["cases"]}

every_loss = pytest.mark.parametrize("loss", LOSSES)
one_and_more_outputs = pytest.mark.parametrize("num_outputs", [1, 2, 4])
flat_and_solid = pytest.mark.parametrize("size", [(5, 6), (3, 4, 5)])


def example(num_outputs, size=(5, 6), batch=3, seed=0, dtype=torch.float64):
    """Random logits and a label map with every class in every sample."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, num_outputs, *size, generator=generator, dtype=dtype)
    num_classes = max(2, num_outputs)
    label = torch.randint(0, num_classes, (batch, *size), generator=generator)
    label.flatten(1)[:, :num_classes] = torch.arange(num_classes)
    return logits, label


def golden_binary(name):
    """One sample of one logit whose sigmoid is the golden p."""
    case = GOLDEN[name]
    p = torch.tensor(case["inputs"]["p"], dtype=torch.float64)
    y = torch.tensor(case["inputs"]["y"])
    return torch.logit(p)[None, None], y[None].long(), case


# Golden vectors


def test_dice_gives_the_golden_number():
    logits, label, case = golden_binary("soft_dice_smooth1")
    loss = dice_loss(logits, label, smooth=case["inputs"]["smooth"])
    assert loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-11)


def test_generalised_dice_gives_the_golden_number_with_a_softmax():
    case = GOLDEN["generalised_dice"]
    logits = torch.tensor(case["inputs"]["p"], dtype=torch.float64).log()[None]
    target = torch.tensor(case["inputs"]["y"], dtype=torch.float64)[None]
    assert generalised_dice_loss(logits, target).item() == pytest.approx(case["expected"]["loss"], abs=1e-11)
    label = target.argmax(dim=1)
    assert generalised_dice_loss(logits, label).item() == pytest.approx(case["expected"]["loss"], abs=1e-11)


def test_generalised_dice_gives_the_golden_number_with_a_sigmoid():
    case = GOLDEN["generalised_dice"]
    logits = torch.logit(torch.tensor(case["inputs"]["p"][1], dtype=torch.float64))[None, None]
    label = torch.tensor(case["inputs"]["y"][1])[None].long()
    assert generalised_dice_loss(logits, label).item() == pytest.approx(case["expected"]["loss"], abs=1e-11)


def test_focal_tversky_gives_the_golden_numbers():
    logits, label, case = golden_binary("focal_tversky")
    expected = case["expected"]
    focal = focal_tversky_loss(logits, label)
    assert focal.item() == pytest.approx(expected["focal_tversky_loss"], abs=1e-11)
    plain = focal_tversky_loss(logits, label, gamma=1)
    assert plain.item() == pytest.approx(expected["tversky_loss"], abs=1e-11)
    assert 1 - plain.item() == pytest.approx(expected["tversky_index"], abs=1e-11)


def test_dice_by_hand():
    # p = 1, 1/2; y = 1, 0: 1 - 2·1/(1 + 1.5) = 0.2
    logits = torch.tensor([[[100.0, 0.0]]])
    assert dice_loss(logits, torch.tensor([[1, 0]]), smooth=0).item() == pytest.approx(0.2)


def test_cross_entropy_by_hand():
    # every voxel undecided: ln 2 for two classes, ln 4 for four
    label = torch.zeros(2, 3, 3, dtype=torch.long)
    assert cross_entropy_loss(torch.zeros(2, 1, 3, 3), label).item() == pytest.approx(0.69314718)
    assert cross_entropy_loss(torch.zeros(2, 4, 3, 3), label).item() == pytest.approx(1.38629436)


# Independent implementations


@flat_and_solid
@one_and_more_outputs
@pytest.mark.parametrize("reduction", ["per_sample", "batch"])
@pytest.mark.parametrize("background", [False, True])
def test_dice_agrees_with_monai(num_outputs, size, reduction, background):
    logits, label = example(num_outputs, size)
    theirs = DiceLoss(
        sigmoid=num_outputs == 1,
        softmax=num_outputs > 1,
        include_background=background or num_outputs == 1,
        batch=reduction == "batch",
        smooth_nr=1e-5,
        smooth_dr=1e-5,
    )(logits, targets(label, num_outputs))
    ours = dice_loss(logits, label, reduction=reduction, include_background=background)
    torch.testing.assert_close(ours, theirs)


@one_and_more_outputs
@pytest.mark.parametrize("settings", [{}, {"reduction": "batch"}, {"include_background": True}], ids=str)
def test_dice_bce_agrees_with_monai(num_outputs, settings):
    logits, label = example(num_outputs)
    theirs = DiceCELoss(
        sigmoid=num_outputs == 1,
        softmax=num_outputs > 1,
        include_background="include_background" in settings or num_outputs == 1,
        batch="reduction" in settings,
        smooth_nr=1e-5,
        smooth_dr=1e-5,
    )(logits, targets(label, num_outputs, torch.float64))
    torch.testing.assert_close(DiceBCE(**settings).function()(logits, label), theirs)


@pytest.mark.parametrize("num_outputs", [2, 4])
@pytest.mark.parametrize("reduction", ["per_sample", "batch"])
def test_generalised_dice_agrees_with_monai_where_every_class_is_present(num_outputs, reduction):
    logits, label = example(num_outputs)
    theirs = GeneralizedDiceLoss(
        softmax=True, include_background=True, batch=reduction == "batch", smooth_nr=0, smooth_dr=0
    )(logits, targets(label, num_outputs, torch.float64))
    torch.testing.assert_close(generalised_dice_loss(logits, label, reduction=reduction), theirs)


@flat_and_solid
@one_and_more_outputs
def test_focal_tversky_with_gamma_one_agrees_with_monais_tversky(num_outputs, size):
    logits, label = example(num_outputs, size)
    theirs = TverskyLoss(
        sigmoid=num_outputs == 1,
        softmax=num_outputs > 1,
        include_background=num_outputs == 1,
        alpha=0.3,  # MONAI's alpha weighs false positives
        beta=0.7,
        smooth_nr=1.0,
        smooth_dr=1.0,
        reduction="none",
    )(logits, targets(label, num_outputs))
    torch.testing.assert_close(focal_tversky_loss(logits, label, gamma=1), theirs.flatten(1).sum(1).mean())


@flat_and_solid
def test_cross_entropy_agrees_with_pytorch(size):
    logits, label = example(1, size)
    theirs = nn.BCEWithLogitsLoss()(logits[:, 0], label.double())
    torch.testing.assert_close(cross_entropy_loss(logits, label), theirs)
    logits, label = example(4, size)
    torch.testing.assert_close(cross_entropy_loss(logits, label), nn.CrossEntropyLoss()(logits, label))
    soft = torch.softmax(example(4, size, seed=1)[0], dim=1)
    torch.testing.assert_close(cross_entropy_loss(logits, soft), nn.CrossEntropyLoss()(logits, soft))


def test_two_softmax_logits_are_one_sigmoid_logit():
    logits, label = example(1)
    pair = torch.cat([torch.zeros_like(logits), logits], dim=1)
    for loss in LOSSES:
        torch.testing.assert_close(loss(pair, label), loss(logits, label))


# Gradients


@every_loss
@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("reduce", [True, False])
def test_gradients_are_those_of_finite_differences(loss, num_outputs, reduce):
    logits, label = example(num_outputs, size=(2, 3), batch=2)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, label, reduce=reduce), logits)


@pytest.mark.parametrize("loss", OVERLAP_LOSSES)
def test_gradients_of_the_pooled_batch_are_those_of_finite_differences(loss):
    logits, label = example(3, size=(2, 3), batch=2)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(x, label, reduction="batch"), logits)


# Samples and batches


@every_loss
@one_and_more_outputs
def test_the_loss_is_the_mean_of_the_samples_losses(loss, num_outputs):
    logits, label = example(num_outputs)
    samples = loss(logits, label, reduce=False)
    assert samples.shape == (3,)
    torch.testing.assert_close(loss(logits, label), samples.mean())
    alone = torch.stack([loss(logits[i : i + 1], label[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(samples, alone)


@pytest.mark.parametrize("loss", [*OVERLAP_LOSSES, dice_bce_loss])
def test_a_pooled_batch_differs_and_still_gives_each_samples_loss(loss):
    logits, label = example(3)
    label[0] = 0
    assert not torch.isclose(loss(logits, label, reduction="batch"), loss(logits, label))
    torch.testing.assert_close(
        loss(logits, label, reduction="batch", reduce=False), loss(logits, label, reduce=False)
    )


def test_a_pooled_batch_of_one_is_the_sample():
    logits, label = example(3, batch=1)
    for loss in OVERLAP_LOSSES:
        torch.testing.assert_close(loss(logits, label, reduction="batch"), loss(logits, label))


def test_focal_tversky_is_a_sum_over_foreground_classes():
    # background never predicted, two foreground classes at 1/2 with the same target
    _, label = example(1)
    y = targets(label, 1, torch.float64)
    undecided = torch.zeros_like(y)
    three = torch.cat([undecided - 100, undecided, undecided], dim=1)
    together = focal_tversky_loss(three, torch.cat([1 - y, y, y], dim=1))
    torch.testing.assert_close(together, 2 * focal_tversky_loss(undecided, label))


# Targets


@one_and_more_outputs
@every_loss
def test_a_one_hot_target_gives_what_its_label_map_gives(loss, num_outputs):
    logits, label = example(num_outputs)
    torch.testing.assert_close(loss(logits, targets(label, num_outputs)), loss(logits, label))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_targets_are_one_hot(dtype):
    label = torch.tensor([[0, 2], [1, 1]]).to(dtype)
    expected = [[[1, 0], [0, 0], [0, 1]], [[0, 0], [1, 1], [0, 0]]]
    assert targets(label, 3).tolist() == expected
    assert targets(label, 3).dtype == torch.float32


def test_a_binary_target_is_one_channel():
    label = torch.tensor([[True, False]])
    assert targets(label, 1).tolist() == [[[1, 0]]]


def test_probabilities_sum_to_one():
    logits, _ = example(4)
    torch.testing.assert_close(probabilities(logits).sum(dim=1), torch.ones(3, 5, 6, dtype=torch.float64))
    logits, _ = example(1)
    assert ((probabilities(logits) > 0) & (probabilities(logits) < 1)).all()


@every_loss
def test_a_label_of_the_wrong_shape_is_named_instead_of_broadcast(loss):
    logits, label = example(1)
    with pytest.raises(ValueError, match=r"label of type torch.float32 is \(3, 5, 6\) but logits are"):
        loss(logits, label.float())
    with pytest.raises(ValueError, match=r"label of type torch.int64 is \(3, 1, 5, 6\)"):
        loss(logits, label[:, None])


# Edge cases by name


def labels_by_name(num_outputs, size):
    last = max(2, num_outputs) - 1
    empty = torch.zeros(1, *size, dtype=torch.long)
    full = torch.full((1, *size), last)
    one_voxel = empty.clone()
    one_voxel.flatten()[0] = last
    absent_class = empty.clone()
    absent_class[:, 0] = 1
    return {"empty": empty, "full": full, "one voxel": one_voxel, "absent class": absent_class}


@every_loss
@one_and_more_outputs
@flat_and_solid
@pytest.mark.parametrize("name", ["empty", "full", "one voxel", "absent class"])
def test_extreme_logits_keep_loss_and_gradient_finite(loss, num_outputs, size, name):
    label = labels_by_name(num_outputs, size)[name]
    right = 200 * targets(label, num_outputs) - 100
    for logits in (right, -right, torch.full_like(right, 100.0), torch.zeros_like(right)):
        logits.requires_grad_()
        value = loss(logits, label)
        value.backward()
        assert value.isfinite()
        assert value >= 0
        assert logits.grad.isfinite().all()


@every_loss
@one_and_more_outputs
@pytest.mark.parametrize("name", ["empty", "full", "one voxel", "absent class"])
def test_a_perfect_prediction_costs_nothing(loss, num_outputs, name):
    label = labels_by_name(num_outputs, (4, 4))[name]
    logits = 200 * targets(label, num_outputs) - 100
    assert loss(logits, label).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("loss", OVERLAP_LOSSES)
def test_the_opposite_of_the_truth_costs_most(loss):
    label = labels_by_name(1, (4, 4))["absent class"]
    logits = 100 - 200 * targets(label, 1)
    options = {"smooth": 0.0} if loss is not generalised_dice_loss else {}
    assert loss(logits, label, **options).item() == pytest.approx(1, abs=1e-6)


def test_two_empty_masks_without_smoothing_cost_nothing():
    logits, label = torch.full((1, 1, 4, 4), -200.0), torch.zeros(1, 4, 4, dtype=torch.long)
    assert dice_loss(logits, label, smooth=0).item() == 0
    assert focal_tversky_loss(logits, label, smooth=0).item() == 0


def test_generalised_dice_gives_an_absent_class_no_weight():
    logits, label = example(3)
    label[label == 2] = 1
    p, r = probabilities(logits)[:, :2], targets(label, 3, torch.float64)[:, :2]
    w = 1 / r.sum(dim=(2, 3)).square()
    expected = 1 - 2 * (w * (r * p).sum(dim=(2, 3))).sum(1) / (w * (r + p).sum(dim=(2, 3))).sum(1)
    torch.testing.assert_close(generalised_dice_loss(logits, label, reduce=False), expected)


def test_focal_tversky_near_perfection_is_a_line_to_zero():
    label = torch.ones(1, 4, dtype=torch.long)
    logits = torch.full((1, 1, 4), 30.0, dtype=torch.float64, requires_grad=True)
    loss = focal_tversky_loss(logits, label)
    loss.backward()
    assert 0 < loss.item() < 1e-10
    assert (logits.grad < 0).all()


def test_generalised_dice_of_a_large_empty_volume_keeps_its_digits():
    logits = torch.zeros(1, 1, 64, 64, 64)
    label = torch.zeros(1, 64, 64, 64, dtype=torch.uint8)
    # background half right: 1 - 2·(N/2)/(N + N/2) = 1/3
    assert generalised_dice_loss(logits, label).item() == pytest.approx(1 / 3, abs=1e-6)


# Precision


@every_loss
@one_and_more_outputs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_raised_to_float32(loss, num_outputs, dtype):
    logits, label = example(num_outputs, dtype=torch.float32)
    half = logits.to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        value = loss(half, label)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(half.float(), label))


@every_loss
def test_double_logits_stay_double(loss):
    logits, label = example(1)
    assert loss(logits, label).dtype == torch.float64
