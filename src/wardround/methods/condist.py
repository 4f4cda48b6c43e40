"""ConDistFL: what a hospital does not annotate, it learns from the model it received.

Wang et al., "ConDistFL: Conditional Distillation for Federated Learning from Partially Annotated Data", DeCaF
at MICCAI 2023. https://arxiv.org/abs/2308.04070

The marginal loss (`losses/partial.py`) says nothing about classes that a client does not annotate, so its
copy of the model forgets them while it trains, and the mean of such copies is poor at all of them. ConDistFL
holds the copy to what the received model says of these classes, given that a voxel is none of the annotated.

Symbols: z, z' logits of the trained and of the received model; p, p' their conditional probabilities; tau
`temperature`; B the classes that are not annotated, background among them; M voxels that neither the label
nor the received model puts into an annotated class; s `smooth`; t round from 0, T rounds.

    p_n     = P(n | not annotated) = exp(z_n / tau) / sum over m in B of exp(z_m / tau), n in B; likewise p'
    L_dist  = mean over n in B of 1 - (2 sum(p_n p'_n) + s) / (sum(p_n) + sum(p'_n) + s), sums over M
    L       = marginal Dice + cross entropy + lam(t) L_dist
    lam(t)  = weight (start + (1 - start) t / (T - 1))

Annotated classes are not in p, and a small change of p leaves the probability of B as a whole as it is:
labels alone teach where annotated classes are, the received model alone what the rest is.

What leaves a client: the model.
Differs: the equations were checked against the authors' code in NVIDIA FLARE (research/condist-fl), which has
the values of `temperature`, `start` and `weight`, and not against the numbered ones of the paper.
Differs: every class counts by itself; there an organ and its tumour are one.
Differs: classes of an annotated region (rim and cup of a disc) are distilled likewise, given the region.
Differs: s also stands above the line, so that a batch without such voxels costs 0, and p has none below it.
With deep supervision the finest resolution is distilled, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.data.annotation import Annotation
from wardround.data.cases import Batch
from wardround.losses.objective import Context, DiceBCE
from wardround.losses.segmentation import at_least_float32, divide, sums


@dataclass(frozen=True)
class ConDist(DiceBCE):
    """Dice + cross entropy of what a client annotates; the received model teaches what it does not.

    weight: of the distillation in the last round, 0 gives `dice_bce`; start: share of it in the first round,
    from where it rises in a straight line; temperature: logits are divided by it before they are compared.
    """

    title = "ConDistFL"
    paper = "Wang et al., DeCaF 2023"
    needs = frozenset({"global"})

    weight: Annotated[float, Field(ge=0)] = 1.0
    start: Annotated[float, Field(ge=0, le=1)] = 0.01
    temperature: Annotated[float, Field(gt=0)] = 2.0

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        loss = super().loss(model, batch, context)
        annotation = context.annotation
        if annotation is None or not self.distils(context):
            return loss
        with torch.no_grad():
            received = context.global_.model(batch.image)
        term = distillation_loss(
            context.output.logits, received, batch.label, annotation=annotation,
            temperature=self.temperature, smooth=self.smooth,
        )  # fmt: skip
        context.note("distillation", term)
        return loss + self.weight_in(context) * term

    def distils(self, context: Context) -> bool:
        """Whether the received model knows what the client's labels do not tell apart."""
        annotation = context.annotation
        return bool(self.weight) and annotation is not None and annotation.num_groups < len(annotation.groups)

    def weight_in(self, context: Context) -> float:
        """lam(t)."""
        done = context.round / (context.rounds - 1) if context.rounds > 1 else 1.0
        return self.weight * (self.start + (1 - self.start) * done)

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return None if self.distils(context) else super().constants(context)  # it runs another model


def distillation_loss(
    logits: Tensor,
    received: Tensor,
    label: Tensor,
    *,
    annotation: Annotation,
    temperature: float = 2.0,
    smooth: float = 1e-5,
) -> Tensor:
    """L_dist of logits (B, K, *spatial) of two models, in every group of classes not told apart.

    Sums run over the whole batch. It is 0 where both models are sure of the same classes.
    """
    found = annotation.to_groups(received.argmax(dim=1))
    told = annotation.to_groups(label)
    z = [at_least_float32(values) / temperature for values in (logits, received)]
    ratios = []
    for group in range(annotation.num_groups):
        members = list(annotation.members(group))
        if len(members) == 1:
            continue
        counts = ((told == group) & (found == group)).unsqueeze(1)
        p, q = (torch.softmax(values[:, members], dim=1) * counts for values in z)
        total, overlap = sums("batch", p + q, p * q)
        ratios.append(divide(total - 2 * overlap, total + smooth))  # (1, classes of the group)
    return torch.cat(ratios, dim=1).mean()
