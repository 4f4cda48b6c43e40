"""Losses of clients that annotate some of the classes: marginal and exclusion loss.

Shi et al., "Marginal loss and exclusion loss for partially supervised multi-organ segmentation", Medical
Image Analysis 70, 2021. https://arxiv.org/abs/2007.03868
The marginal cross entropy is also the target adaptive loss of Fang and Yan, "Multi-organ segmentation over
partially labeled datasets with multi-scale feature abstraction", IEEE TMI 2020.
https://arxiv.org/abs/2001.00208

Where kidneys are not outlined, background means "background or kidney". The marginal loss adds up the
probabilities of such classes before any loss sees them. The exclusion loss uses that organs do not overlap:
where the liver is outlined there is no kidney.

Symbols: p probabilities of all classes, z their logits; m a group of classes that the labels do not tell
apart (`Annotation`), q_m its marginal probability, y_m its label; n a class that is not annotated;
e all that is outlined.

    q_m     = sum over n in m of p_n                  marginal probability
    L_mCE   = - sum over m of y_m log q_m             marginal cross entropy; likewise the Dice of q and y
    L_eDice = mean over n of 2 sum(e p_n) / (sum(e) + sum(p_n))
    L_eCE   = mean over n of mean(e log(p_n + 1))

A softmax of logsumexp(z_n over m) is q_m, so any loss of logits becomes its marginal loss when the logits are
merged first. Where everything is annotated nothing is merged and nothing is added.

Voxels to be ignored are taken out by certain background in logits and labels (`fill_ignored`).

Differs: groups of several foreground classes (the whole disc, of rim and cup) are merged as well.
Differs: n runs over classes that are not annotated. Public code of the paper's loss also has background and
annotated classes, each with the complement of its own label for e, which the marginal loss sees to; it trains
with the Dice part alone, weighted 2. The equations were checked against that code, whose authors we do not
know, and not against the numbered ones of the paper.

>>> annotation = Annotation((0, 1, 0))
>>> merge_logits(torch.tensor([[[0.0], [1.0], [0.0]]]), annotation)  # ln 2, and 1
tensor([[[0.6931],
         [1.0000]]])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wardround.data.annotation import Annotation
from wardround.losses.segmentation import at_least_float32, divide

CERTAIN = 1e4  # a logit whose probability is exactly 1, or 0 below it, in float64 too


def marginal(
    function: Callable[..., Any], logits: Tensor, label: Tensor, *, annotation: Annotation, **settings: Any
) -> Any:
    """A loss of logits and labels, of the groups that the labels tell apart and voxels that count."""
    logits = merge_logits(logits, annotation)
    logits, label = fill_ignored(logits, label, annotation, background_first=logits.shape[1] > 1)
    return function(logits, annotation.to_groups(label), **settings)


def fill_ignored(
    logits: Tensor, label: Tensor, annotation: Annotation, *, background_first: bool
) -> tuple[Tensor, Tensor]:
    """Logits and labels with certain background where voxels are to be ignored: nothing is learned there.

    Such voxels add exactly 0 to every sum over foreground classes, and cost 0 in a cross entropy, whose mean
    is still over all voxels. background_first: whether the first channel is background, the others are not.
    """
    if not annotation.ignores:
        return logits, label
    where = label == annotation.ignored
    channels = list(logits.unbind(1))
    certain = [CERTAIN if background_first else -CERTAIN, *[-CERTAIN] * (len(channels) - 1)]
    filled = [channel.masked_fill(where, value) for channel, value in zip(channels, certain, strict=True)]
    return torch.stack(filled, dim=1), label.masked_fill(where, 0)


def merge_logits(logits: Tensor, annotation: Annotation) -> Tensor:
    """One logit a group; softmax gives the sums of probabilities: (B, K, *spatial) -> (B, G, *spatial)."""
    return merge_channels(at_least_float32(logits), annotation, lambda several: several.logsumexp(dim=1))


def merge_sums(values: Tensor, annotation: Annotation | None) -> Tensor:
    """Probabilities or Dirichlet parameters, added up in each group."""
    return (
        values if annotation is None else merge_channels(values, annotation, lambda several: several.sum(1))
    )


def merge_channels(values: Tensor, annotation: Annotation, merge: Callable[[Tensor], Tensor]) -> Tensor:
    channels, groups = values.unbind(1), []
    if len(channels) == 1:  # two classes, which are always told apart
        return values
    for group in range(annotation.num_groups):
        members = [channels[number] for number in annotation.members(group)]
        groups.append(members[0] if len(members) == 1 else merge(torch.stack(members, dim=1)))
    return torch.stack(groups, dim=1)


def exclusion_loss(p: Tensor, label: Tensor, *, annotation: Annotation) -> Tensor:
    """L_eDice + L_eCE of class probabilities (B, K, *spatial), mean over cases.

    It is 0 where nothing but background and what is annotated is predicted inside of what is outlined.
    """
    if not annotation.unannotated:
        return p.sum() * 0
    _, label = annotation.drop_ignored(label, label)
    e = (annotation.to_groups(label) > 0).unsqueeze(1).to(p.dtype)
    p = torch.stack([p[:, number] for number in annotation.unannotated], dim=1)
    spatial = tuple(range(2, p.dim()))
    overlap, total = (e * p).sum(spatial), e.sum(spatial) + p.sum(spatial)
    cross_entropy = (e * torch.log1p(p)).mean(spatial)
    return (divide(2 * overlap, total) + cross_entropy).mean()
