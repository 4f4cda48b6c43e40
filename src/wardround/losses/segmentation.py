"""Segmentation losses: pure functions of logits and labels.

Logits are (B, K, *spatial): K = 1 is two classes by a sigmoid, K > 1 is K classes by a softmax,
background first. A label is an integer map (B, *spatial), or a soft target (B, K, *spatial) of
floating type.

Sums run over the voxels of one sample and class; the ratio is formed, then averaged over classes,
then over the batch. `reduction="batch"` sums over the whole batch first. `reduce=False` gives the
loss of each sample, (B,), whatever the reduction. Half-precision logits are raised to float32.

>>> logits = torch.tensor([[[[100.0, -100.0]]]])
>>> dice_loss(logits, torch.tensor([[[1, 0]]])).item()
0.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["per_sample", "batch"]

TINY = 1e-12  # keeps a denominator from being 0
NEARLY_PERFECT = 1e-7  # below it, focal Tversky goes on linearly


def dice_loss(
    logits: Tensor,
    label: Tensor,
    *,
    smooth: float = 1e-5,
    reduction: Reduction = "per_sample",
    include_background: bool = False,
    reduce: bool = True,
) -> Tensor:
    """Soft Dice: 1 - (2Σyp + s) / (Σy + Σp + s), mean over classes. Two empty masks give 0.

    include_background: whether class 0 of a softmax counts; nothing to a sigmoid.
    """
    p, y = prepare(logits, label)
    p, y = choose_classes(p, y, include_background)
    total, overlap = sums(reduction if reduce else "per_sample", p + y, p * y)
    ratio = divide(total - 2 * overlap, total + smooth)  # (B, K), equal to the formula above
    return finish(ratio.mean(dim=1), reduce)


def cross_entropy_loss(logits: Tensor, label: Tensor, *, reduce: bool = True) -> Tensor:
    """Binary (one logit) or categorical cross entropy from logits, mean over voxels."""
    logits = at_least_float32(logits)
    y = matching_targets(logits, label)
    if logits.shape[1] == 1:
        voxels = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    else:
        voxels = -(y * F.log_softmax(logits, dim=1)).sum(dim=1)
    return finish(voxels.flatten(1).mean(dim=1), reduce)


def dice_bce_loss(logits: Tensor, label: Tensor, *, reduce: bool = True, **dice: Any) -> Tensor:
    """Soft Dice plus cross entropy (AAW Eq. 10); dice: settings of `dice_loss`."""
    return dice_loss(logits, label, reduce=reduce, **dice) + cross_entropy_loss(logits, label, reduce=reduce)


def generalised_dice_loss(
    logits: Tensor, label: Tensor, *, reduction: Reduction = "per_sample", reduce: bool = True
) -> Tensor:
    """Generalised Dice (Sudre et al. 2017): 1 - 2Σ_l w_l Σrp / Σ_l w_l Σ(r + p), w_l = 1/(Σr_l)².

    All classes count, background too; a class absent from the label has weight 0. A sigmoid is read
    as the two classes [1 - p, p].
    """
    p, r = prepare(logits, label)
    if p.shape[1] == 1:
        p, r = torch.cat([1 - p, p], dim=1), torch.cat([1 - r, r], dim=1)
    volume, total, overlap = sums(reduction if reduce else "per_sample", r, r + p, r * p)
    weights = torch.where(volume > 0, 1 / (volume.square() + TINY), 0.0)
    # the sum cancels in the ratio; large volumes stay exact
    weights = divide(weights, weights.sum(dim=1, keepdim=True))
    ratio = divide((weights * (total - 2 * overlap)).sum(dim=1), (weights * total).sum(dim=1))
    return finish(ratio, reduce)


def focal_tversky_loss(
    logits: Tensor,
    label: Tensor,
    *,
    alpha: float = 0.7,
    beta: float = 0.3,
    gamma: float = 4 / 3,
    smooth: float = 1.0,
    reduction: Reduction = "per_sample",
    include_background: bool = False,
    reduce: bool = True,
) -> Tensor:
    """Focal Tversky (Abraham and Khan 2019): Σ_classes (1 - TI)^(1/γ).

    TI = (TP + s) / (TP + α FN + β FP + s). alpha weighs missed foreground, beta false alarms.
    gamma: 1 gives the Tversky loss. Beware of the opposite convention (1 - TI)^γ.

    The power's slope is infinite at TI = 1; below 1 - TI = 1e-7 the loss is a straight line to 0.
    """
    p, y = prepare(logits, label)
    p, y = choose_classes(p, y, include_background)
    hit, missed, false = sums(reduction if reduce else "per_sample", p * y, (1 - p) * y, p * (1 - y))
    wrong = alpha * missed + beta * false
    distance = divide(wrong, hit + wrong + smooth)  # 1 - TI, without the subtraction
    line = distance * NEARLY_PERFECT ** (1 / gamma - 1)
    power = distance.clamp_min(NEARLY_PERFECT) ** (1 / gamma)
    loss = torch.where(distance > NEARLY_PERFECT, power, line)  # (B, K)
    return finish(loss.sum(dim=1), reduce)


# What the losses share


def probabilities(logits: Tensor) -> Tensor:
    """Sigmoid of one logit, softmax of several; at least float32."""
    logits = at_least_float32(logits)
    return torch.sigmoid(logits) if logits.shape[1] == 1 else torch.softmax(logits, dim=1)


def targets(label: Tensor, num_outputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The label as (B, K, *spatial) of floating type: one-hot, or as it is if already soft.

    One output: every class above 0 is foreground.
    """
    if label.is_floating_point():
        return label.to(dtype)
    if num_outputs == 1:
        return (label > 0).unsqueeze(1).to(dtype)
    classes = torch.arange(num_outputs, device=label.device)
    classes = classes.reshape(1, -1, *[1] * (label.dim() - 1))
    return (label.unsqueeze(1) == classes).to(dtype)  # (B, *spatial) -> (B, K, *spatial)


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def matching_targets(logits: Tensor, label: Tensor) -> Tensor:
    """`targets`, checked against the logits: broadcasting a wrong shape would give a wrong number."""
    y = targets(label, logits.shape[1], logits.dtype)
    if y.shape != logits.shape:
        raise ValueError(
            f"label of type {label.dtype} is {tuple(label.shape)} but logits are {tuple(logits.shape)}. Give "
            "integers (batch, *spatial) or probabilities of floating type, shaped like the logits."
        )
    return y


def prepare(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and targets, both (B, K, *spatial)."""
    p = probabilities(logits)
    return p, matching_targets(p, label)


def choose_classes(p: Tensor, y: Tensor, include_background: bool) -> tuple[Tensor, Tensor]:
    """Drop a softmax's class 0, unless it counts."""
    if include_background or p.shape[1] == 1:
        return p, y
    return p[:, 1:], y[:, 1:]


def sums(reduction: Reduction, *maps: Tensor) -> list[Tensor]:
    """Each map summed over voxels, (B, K, *spatial) -> (B, K); "batch" over samples too, (1, K)."""
    summed = [values.sum(dim=tuple(range(2, values.dim()))) for values in maps]
    if reduction == "batch":
        summed = [values.sum(dim=0, keepdim=True) for values in summed]
    return summed


def downsample(label: Tensor, size: Sequence[int]) -> Tensor:
    """The label nearest to each voxel of a coarser grid, as `interpolate(mode="nearest-exact")` takes it.

    label: (B, *spatial), or soft (B, K, *spatial); its last axes are spatial.
    """
    for axis, side in enumerate(size, start=label.dim() - len(size)):
        place = (torch.arange(side, device=label.device) + 0.5) * (label.shape[axis] / side)
        label = label.index_select(axis, place.long())
    return label


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0/0 is 0."""
    return numerator / denominator.clamp_min(TINY)


def finish(samples: Tensor, reduce: bool) -> Tensor:
    return samples.mean() if reduce else samples


def mask_dice(predicted: Tensor, label: Tensor, num_outputs: int) -> Tensor:
    """Dice of two label maps, case by case (B,), mean over foreground classes; two empty masks give 1.

    num_outputs: channels of the network, which give the number of classes.
    """
    masks = [targets(values, num_outputs, torch.float32) for values in (predicted, label)]
    p, y = choose_classes(masks[0], masks[1], include_background=False)
    total, overlap = sums("per_sample", p + y, p * y)
    return 1 - divide(total - 2 * overlap, total).mean(dim=1)
