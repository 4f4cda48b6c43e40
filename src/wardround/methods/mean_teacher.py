"""Mean teacher: hospitals without labels learn to agree with the average of their own past models.

Yu et al., "Uncertainty-aware Self-ensembling Model for Semi-supervised 3D Left Atrium Segmentation", MICCAI
2019. https://arxiv.org/abs/1907.07034
Federated, with one teacher at every unlabelled client, in FedIRM: Liu et al., "Federated Semi-supervised
Medical Image Classification via Inter-client Relation Matching", MICCAI 2021. https://arxiv.org/abs/2106.08600

A case without a label has no right answer, but two views of it have the same one. The student is trained to
say of one view what its teacher says of the other, where the teacher is sure.

Symbols: theta, theta' student and teacher; f, f' their probabilities; u entropy of f' at a voxel; H the
largest that counts; t round, T rounds.

    L     = L_s + lam(t) L_c                                                     Eq. 1
    u     = - sum over classes of mu log mu                                      Eq. 2
    L_c   = sum of 1(u < H) |f' - f|^2 / sum of 1(u < H), over voxels            Eq. 3
    theta' <- decay theta' + (1 - decay) theta, before every step
    lam(t) = lam r(t), H = (3/4 + 1/4 r(t)) ln C, r(t) = exp(-5 (1 - t/T)^2)     section 2.2 and 3

What leaves a client: the student, as any model; the teacher stays in the client's memory.
Differs: mu is one pass of the teacher, not the mean of eight with dropout, which few networks here have.
Differs: L_c is of cases without a label alone, as in FedIRM; Yu et al. add that of labelled ones.
Differs: lam is 1; Yu et al. take 0.1, and public code of their loss the mean over classes in L_c. Where a
client has no label at all, Adam makes steps of the same length whatever lam and r(t) are.
Differs: FedIRM's relation matrices are not exchanged; they relate the labels of whole images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.losses.objective import Context
from wardround.losses.unlabelled import SemiSupervised, follow
from wardround.uncertainty.maps import entropy


@dataclass(frozen=True)
class MeanTeacher(SemiSupervised):
    """Dice + cross entropy; cases without a label are taught by the average of a client's own past models.

    decay: of that average, at every step.
    """

    title = "Mean teacher"
    paper = "Yu et al., MICCAI 2019"
    needs = frozenset({"two_views", "teacher"})

    decay: Annotated[float, Field(ge=0, le=1)] = 0.99

    def start_step(self, model: nn.Module, context: Context) -> None:
        teacher = context.teacher
        assert teacher is not None, "a client with cases that have no label has one"
        context.make_once("teacher", lambda: follow(teacher, model, self.decay))

    def unlabelled_loss(self, logits: Tensor, image: Tensor, rows: Tensor, context: Context) -> Tensor:
        assert context.teacher is not None
        with torch.no_grad():
            taught = self.probabilities(context.teacher(image))
            ramp = math.exp(-5 * (1 - (context.round + 1) / context.rounds) ** 2)
            most = (0.75 + 0.25 * ramp) * math.log(taught.shape[1])
            sure = entropy(taught) < most  # Eq. 2
        context.note("sure", sure.float().mean())
        distance = (taught - self.probabilities(logits)).square().sum(dim=1)
        return ramp * (distance * sure).sum() / sure.sum().clamp_min(1)  # Eq. 3
