"""Pseudo-labels: hospitals without labels train on what the received model is sure of.

Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence", NeurIPS 2020.
https://arxiv.org/abs/2001.07685
Federated, for segmentation with unlabelled clients: Yang et al., "Federated Semi-Supervised Learning for
COVID Region Segmentation in Chest CT", Medical Image Analysis 70, 2021. https://arxiv.org/abs/2011.11750

The model that arrives labels one view of a case; the client's model learns these labels from another view.
Voxels whose uncertainty is too large are ignored, as if nobody had annotated them.

Symbols: q probabilities of the received model, q^ its labels, p probabilities of the trained model on the
second view; u the entropy of q as a share of the largest, ln C; tau (`limit`).

    l_s = H(y, p), here Dice + cross entropy                                  Eq. 3
    l_u = mean over voxels of 1(u <= tau) H(q^, p), H the cross entropy       Eq. 4

What leaves a client: the model.
Differs: the gate is our uncertainty, 1(u <= tau), in place of 1(max q >= tau); with two classes each is a
function of the other.
Differs: q is that of the model as it was received, fixed for the round, so that a client does not confirm its
own errors; FixMatch takes the present model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.config import Config
from wardround.data.annotation import Annotation
from wardround.errors import ConfigError
from wardround.losses.objective import Context
from wardround.losses.segmentation import cross_entropy_loss
from wardround.losses.unlabelled import SemiSupervised
from wardround.uncertainty.maps import entropy


@dataclass(frozen=True)
class PseudoLabels(SemiSupervised):
    """Dice + cross entropy; cases without a label are labelled by the received model where it is sure.

    limit: most uncertainty of a voxel that counts, as a share of the largest; 1 takes all, 0 almost none.
    """

    title = "Pseudo-labels"
    paper = "Sohn et al., NeurIPS 2020"
    needs = frozenset({"two_views", "global"})

    limit: Annotated[float, Field(ge=0, le=1)] = 0.3

    def unlabelled_loss(self, logits: Tensor, image: Tensor, rows: Tensor, context: Context) -> Tensor:
        with torch.no_grad():
            q = self.probabilities(context.global_.model(image))
            classes = q.shape[1]
            unsure = entropy(q) > self.limit * math.log(classes)
            everything = Annotation(tuple(range(classes)), ignores=True)
            label = self.decide(q).long().masked_fill(unsure, everything.ignored)
        context.note("sure", 1 - unsure.float().mean())
        loss: Tensor = context.supervise(  # Eq. 4
            cross_entropy_loss, logits, label, rows=rows, annotation=everything
        )
        return loss

    def check(self, config: Config) -> None:
        super().check(config)
        if self.include_background:
            raise ConfigError(
                "objective.include_background is true, but objective 'pseudo_labels' leaves out voxels it is "
                "not sure of, which background sums cannot. Set it to false."
            )
