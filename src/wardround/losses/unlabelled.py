"""Semi-supervised objectives: what they share, whatever they learn from cases without a label.

Labelled cases are trained by Dice + cross entropy on their first view, as everywhere. Cases without a label
are seen in the second view (`augmentation.second_view`), and something that saw the first view says what they
show. Every case of a batch counts alike: L = (1/B) (sum of L_s + lam * sum of L_u). A client that has labels
for all its cases trains exactly as with `dice_bce`.

Clients without any label join after `warmup`: a model that nobody has taught yet cannot teach.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.config import Config
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses.contrastive_objectives import require_second_view
from wardround.losses.objective import Context, DiceBCE


@dataclass(frozen=True)
class SemiSupervised(DiceBCE):
    """Base: Dice + cross entropy of labelled cases, and another loss of those without a label.

    lam: weight of the latter; warmup: share of the rounds before clients without any label begin to train.
    """

    needs = frozenset({"two_views"})
    uses_unlabelled = True

    lam: Annotated[float, Field(ge=0)] = 1.0
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.2

    @abstractmethod
    def unlabelled_loss(self, logits: Tensor, image: Tensor, rows: Tensor, context: Context) -> Tensor:
        """Of logits of second views, given the first views (`image`); rows: their places in the batch."""

    def start_step(self, model: nn.Module, context: Context) -> None:
        """Called before each loss of a client that has cases without a label; default nothing."""

    def first_unlabelled_round(self, rounds: int) -> int:
        """The round, from 0, in which clients without any label begin to train."""
        return math.ceil(self.warmup * rounds)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        if not context.has_unlabelled:
            return super().loss(model, batch, context)
        self.start_step(model, context)
        labelled = batch.labelled
        if bool(labelled.all()):
            return super().loss(model, batch, context)
        have, bare = labelled.nonzero()[:, 0], (~labelled).nonzero()[:, 0]
        shown = batch.image.index_copy(0, bare, require_second_view(context)[bare].to(batch.image))
        logits = context.forward(model, shown).logits
        context.has_supervised = True  # where nothing but the finest logits is taught
        other = self.unlabelled_loss(logits[bare], batch.image[bare], bare, context)
        context.note("unlabelled", other)
        loss: Tensor = len(bare) / len(batch) * self.lam * other
        if len(have):
            own = context.supervise(self.function(), logits[have], batch.label[have], rows=have)
            loss = loss + len(have) / len(batch) * own
        return loss

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return None if context.has_unlabelled else super().constants(context)  # batches differ in labels

    def check(self, config: Config) -> None:
        if config.exclusion:
            raise ConfigError(
                f"exclusion is {config.exclusion:g}, which needs a label for every case; objective "
                f"'{config.objective.get('name')}' takes cases without one. Leave exclusion out."
            )


def follow(teacher: nn.Module, student: nn.Module, decay: float) -> Tensor:
    """Move a teacher towards its student, theta' <- decay theta' + (1 - decay) theta; integers are copied."""
    with torch.no_grad():
        theirs = student.state_dict()
        for name, tensor in teacher.state_dict().items():
            if tensor.is_floating_point():
                tensor.mul_(decay).add_(theirs[name], alpha=1 - decay)
            else:
                tensor.copy_(theirs[name])
    return torch.zeros(())
