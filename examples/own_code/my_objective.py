"""An objective of one's own: log-cosh Dice (Jadon, CIBCB 2020), smoother than Dice near its minimum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wardround import Batch, Context, Objective


@dataclass(frozen=True)
class LogCoshDice(Objective):
    """log(cosh(Dice loss)).

    smooth: added to numerator and denominator.
    """

    title = "Log-cosh Dice"

    smooth: float = 1e-5

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        logits = context.forward(model, batch.image).logits
        return self.sample_losses(logits, batch.label).mean()

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        foreground = self.probabilities(logits)[:, 1:].flatten(1)  # (B, classes, *spatial) -> (B, voxels)
        classes = torch.arange(1, self.probabilities(logits).shape[1], device=label.device)
        truth = torch.stack([label == number for number in classes], dim=1).flatten(1).to(foreground)
        overlap = 2 * (foreground * truth).sum(dim=1) + self.smooth
        dice = overlap / (foreground.sum(dim=1) + truth.sum(dim=1) + self.smooth)
        return torch.log(torch.cosh(1 - dice))
