"""FedRCL: Relaxed Contrastive Learning for Federated Learning.

Seo et al., CVPR 2024. https://arxiv.org/abs/2401.04928

A supervised contrastive term makes features of one class alike at every client. Alone it lets them
collapse into one point, so a second term pushes apart samples of one class that are already too alike.

Symbols: s cosine of two samples; p the least similar sample of the same class, N the k most similar
samples of other classes, q the least similar other sample of the same class; tau temperature.
What leaves a client: its model.

Differs: samples are voxels, not images, drawn at the bottleneck and every decoder stage. A voxel of a
coarse map counts if all image voxels it stands for, and those that touch them, have one class.
Differs: at most 64 of a class and image and 1024 in all; as many of background as of foreground.
Differs: features behind the activation (the code takes them in front of it); weight 0.1 beside Dice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.clients import Client
from wardround.data.cases import Batch
from wardround.losses.contrastive import Voxels, cosines, draw_voxels, iterate_levels
from wardround.losses.objective import Context
from wardround.messages import Message
from wardround.methods.base import Method
from wardround.models.base import Segmenter


@dataclass(frozen=True)
class FedRCL(Method):
    """Averages models trained with a contrastive term on voxels of one class.

    weight: of the term, 0 gives FedAvg; temperature: cosines are divided by it; threshold: same-class
    voxels above this cosine are pushed apart; negatives: k, the most similar voxels of other classes that
    count; pixels: the most voxels drawn from a batch at each level.
    """

    title = "FedRCL"
    paper = "Seo et al., CVPR"
    year = 2024
    link = "https://arxiv.org/abs/2401.04928"
    kind = "objective"
    needs_every_class = "it contrasts the voxels of every class"
    needs_labels = needs_every_class
    needs = frozenset({"features", "decoder"})

    weight: Annotated[float, Field(ge=0)] = 0.1
    temperature: Annotated[float, Field(gt=0)] = 0.05
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.7
    negatives: Annotated[int, Field(ge=1)] = 2
    pixels: Annotated[int, Field(ge=2)] = 1024

    def train(self, client: Client, message: Message) -> Message:
        # On the device: nothing waits for the host. Streams of CPU and GPU differ, as dropout's do.
        draw = torch.Generator(client.device).manual_seed(client.seed("voxels"))

        def contrast(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            assert isinstance(model, Segmenter)
            losses = []
            for features, label in iterate_levels(model, context.output, batch.label):
                voxels = draw_voxels(features, label, max(2, model.num_outputs), self.pixels, draw)
                losses.append(self.relaxed(voxels))
            term = self.weight * torch.stack(losses).mean()
            context.note("contrast", term)
            return term

        add = contrast if self.weight else None
        return Message(params=client.fit(start=message.params, add=add).params)

    def relaxed(self, voxels: Voxels) -> Tensor:
        """The mean of both terms over the voxels drawn; 0 if there are none."""
        similarity = cosines(voxels.features, voxels.features)
        losses = supervised_contrast(similarity, voxels, self.temperature, self.negatives)
        losses = losses + divergence_penalty(similarity, voxels, self.temperature, self.threshold)
        return losses.where(voxels.kept, 0.0).sum() / voxels.kept.sum().clamp_min(1)


def supervised_contrast(s: Tensor, voxels: Voxels, tau: float, negatives: int) -> Tensor:
    """-log e^{s_p/τ} / (e^{s_p/τ} + Σ_N e^{s_n/τ}) of each voxel (N,); without another class it is 0."""
    same = voxels.same_class()
    hardest = s.masked_fill(~same, math.inf).amin(dim=1, keepdim=True)  # s_p; itself if alone
    others = s.masked_fill(same | ~voxels.kept, -math.inf)
    nearest = others.topk(min(negatives, len(s)), dim=1).values  # s_n
    return (torch.cat([hardest, nearest], dim=1) / tau).logsumexp(dim=1) - hardest[:, 0] / tau


def divergence_penalty(s: Tensor, voxels: Voxels, tau: float, threshold: float) -> Tensor:
    """-log e^{1/τ} / (e^{1/τ} + e^{s/τ}) of each voxel (N,), s = s_q, or -1 below the threshold."""
    itself = torch.eye(len(s), dtype=torch.bool, device=s.device)
    least = s.masked_fill(~voxels.same_class() | itself, math.inf).amin(dim=1)  # s_q; infinite if alone
    too_alike = (least >= threshold) & least.isfinite()
    return F.softplus((least.where(too_alike, -1.0) - 1) / tau)
