"""FedUAA: Federated Uncertainty-Aware Aggregation for Fundus Diabetic Retinopathy Staging.

Wang et al., MICCAI 2023. https://arxiv.org/abs/2303.13033

Networks put out evidence. Each client finds the uncertainty above which its own model is most often wrong;
a high threshold means errors only where the model is unsure, and such a client gains weight.

Symbols: e = softplus(logits) evidence, α = e + 1, S = Σα, C classes, u = C/S uncertainty of a voxel;
θ_k threshold that maximises Youden's J = TPR - FPR of "wrong if u >= θ_k"; w = softmax(θ) the weights.
What leaves a client: its model and θ_k.

Differs: the paper grades whole images. For voxels the loss is the Dice of α/S with the KL that rises over
the run, as in FedEvi's comparison; the classifier's cross entropy on beliefs is left out.
Differs: θ_k is read from histograms of u, so that memory does not grow with the cases. Its candidates are the
least u of each of 1024 bins; the paper takes every observed u.
Differs: validation cases in evaluation mode; the released code looks at the last training epoch (`source:
train` takes training cases, without augmentation).
Differs: everything is shared; the released code keeps head and BatchNorm personal, because its sites grade
differently (`personal_head`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.weights import by_class, collect, softmax
from wardround.clients import Client
from wardround.config import Config
from wardround.data.annotation import find_errors
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses.evidential import DiceMode, EvidenceKind
from wardround.losses.objective import Context, Objective
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.methods.fedevi import Evidential
from wardround.models.base import head_names
from wardround.params import Params

NO_THRESHOLD = 0.5  # where no threshold separates wrong from right


@dataclass(frozen=True)
class FedUAAEvidential(Evidential):
    """Dice of expected probabilities, plus a KL against evidence for wrong classes that rises over the run.

    Settings are those of `evidential`, with other defaults; anneal_rounds: rounds over which the KL's
    weight rises, 0 takes all rounds of the run.
    """

    title = "Evidential Dice + KL (FedUAA)"
    paper = "Wang et al., MICCAI 2023"

    lam: Annotated[float, Field(ge=0)] = 1.0
    anneal_rounds: Annotated[int, Field(ge=0)] = 0
    evidence: EvidenceKind = "softplus"
    dice_mode: DiceMode = "plug_in"

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return super(FedUAAEvidential, self.fill_rounds(context)).loss(model, batch, context)

    def numbers(self, context: Context) -> dict[str, float]:
        return super(FedUAAEvidential, self.fill_rounds(context)).numbers(context)

    def fill_rounds(self, context: Context) -> FedUAAEvidential:
        """With the run's own number of rounds where none is set: min(1, t/R)."""
        return replace(self, anneal_rounds=self.anneal_rounds or context.rounds)


@dataclass(frozen=True)
class FedUAA(Method):
    """Weighs clients by how well their uncertainty separates wrong voxels from right ones.

    source: cases the threshold is found on (training cases also serve a client that has no others);
    bins: of the histograms of u; region: all voxels, or those near predicted or true foreground, since
    background outweighs the rest; margin: how many voxels around the foreground are near; personal_head:
    the output layer stays at the client.
    """

    title = "FedUAA"
    paper = "Wang et al., MICCAI"
    year = 2023
    link = "https://arxiv.org/abs/2303.13033"
    sends = "one number (its uncertainty threshold)"
    needs = frozenset({"validation"})
    up = frozenset({"threshold"})
    needs_labels = "it weighs clients by which voxels are wrong, which only labels show"
    objective = "feduaa_evidential"

    source: Literal["val", "train"] = "val"
    bins: Annotated[int, Field(ge=2)] = 1024
    region: Literal["image", "foreground"] = "image"
    margin: Annotated[int, Field(ge=0)] = 5
    personal_head: bool = False

    # Server

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return by_class(softmax([thresholds(replies)[reply.client] for reply in replies]), replies)

    def notes(self, replies: Sequence[Reply], weights: Sequence[float], **ingredients: Any) -> dict[str, Any]:
        return super().notes(replies, weights, threshold=thresholds(replies), **ingredients)

    # Client

    def train(self, client: Client, message: Message) -> Message:
        params = client.fit(start=message.params).params
        return Message(params=params, scalars={"threshold": self.threshold(client, params)})

    def threshold(self, client: Client, params: Params) -> float:
        """θ_k of this model on the client's cases."""
        objective = client.objective
        assert isinstance(objective, Evidential)
        split = client.data.val if self.source == "val" and len(client.data.val) else client.data.train
        counts = torch.zeros(2, self.bins, dtype=torch.long)
        least = torch.full((self.bins,), math.inf, dtype=torch.float64)
        for logits, batch in client.predictions(split, params):
            u = uncertainty(objective.alpha(logits.double()))
            predicted = objective.predict(logits)
            wrong = find_errors(predicted, batch.label, client.data.annotation)
            if self.region == "foreground":
                chosen = find_near((predicted > 0) | (batch.label > 0), self.margin)
                u, wrong = u[chosen], wrong[chosen]
            more, lower = histograms(u, wrong, self.bins)
            counts, least = counts.to(u.device) + more, torch.minimum(least.to(u.device), lower)
        found = youden(counts, least)
        return NO_THRESHOLD if found is None else found[0]

    # Both

    def shared(self, model: nn.Module) -> list[str]:
        own = set(head_names(model)) if self.personal_head else set()
        return [name for name in super().shared(model) if name not in own]

    def check(self, config: Config, objective: Objective) -> None:
        if not isinstance(objective, Evidential):
            raise ConfigError(
                f"method 'feduaa' weighs clients by the uncertainty of a Dirichlet model, which objective "
                f"'{config.objective.get('name')}' does not train. Leave the objective out, or use "
                "objective: {name: feduaa_evidential}."
            )


def uncertainty(alpha: Tensor) -> Tensor:
    """u = C/S of each voxel, 1 without any evidence: (B, C, *spatial) -> (B, *spatial)."""
    return alpha.shape[1] / alpha.sum(dim=1)


def find_near(mask: Tensor, margin: int) -> Tensor:
    """Where a voxel of the mask is at most `margin` away along every axis: (B, *spatial)."""
    pool = F.max_pool3d if mask.dim() == 4 else F.max_pool2d
    return pool(mask.float().unsqueeze(1), 2 * margin + 1, stride=1, padding=margin).squeeze(1) > 0


def histograms(u: Tensor, wrong: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Right and wrong voxels in each bin of [0, 1], (2, bins), and the least u seen there, (bins,)."""
    u, wrong = u.double().flatten(), wrong.flatten()
    index = (u * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(index + bins * wrong.long(), minlength=2 * bins).reshape(2, bins)
    unseen = torch.full((bins,), math.inf, dtype=torch.float64, device=u.device)
    return counts, unseen.scatter_reduce(0, index, u, "amin")


def youden(counts: Tensor, least: Tensor) -> tuple[float, float] | None:
    """The threshold of the largest J, and J; of equal ones the larger threshold. None if no J is above 0."""
    right, wrong = counts.flip(1).cumsum(1).flip(1).cpu()  # voxels with u in this bin or above
    num_right, num_wrong = int(right[0]), int(wrong[0])
    scaled = wrong * num_right - right * num_wrong  # J times both numbers: integers, so ties are exact
    best = int(scaled.max())
    if best <= 0:
        return None  # also where all voxels are right, or all wrong
    index = int((scaled == best).nonzero()[-1])
    return float(least[index]), best / num_right / num_wrong


def thresholds(replies: Sequence[Reply]) -> dict[str, float]:
    """θ_k of every reply; one outside [0, 1] counts as not found."""
    none = dict.fromkeys([reply.client for reply in replies], NO_THRESHOLD)
    return none | collect(replies, "threshold", 0, 1)
