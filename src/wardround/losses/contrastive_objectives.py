"""The contrastive baselines of the SAFCF and FSF3A tables, made into segmentation objectives.

Neither paper says how a contrastive loss is to produce masks. Our rule, the mirror of CFSL:
L = λ L_con + (1 - λ) L_dice from the first round on; or `schedule: pretrain`, L_con alone for some
rounds, then L_dice alone.

Two views of each case share their flip and differ in intensities; the Dice term sees the first,
which is what ordinary training would see. Heads and prototypes are `model.projection`: trained,
averaged and stored with the network, or kept at each client by `local_head`.
Only the part of the network that is needed sees the second view: the encoder, and the decoder for
Local CL.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.config import Config
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses import contrastive
from wardround.losses.objective import Context, Objective, Smooth
from wardround.losses.segmentation import dice_loss
from wardround.models.base import Output, Segmenter

Temperature = Annotated[float, Field(gt=0, description="similarities are divided by it")]
Dimension = Annotated[int, Field(ge=1, description="length of the projected vectors")]


class Projection(nn.Module):
    """Two linear layers over channels, (..., width) -> (..., dimension), and prototypes if any.

    On a map with its channels last they are two 1x1 convolutions.
    """

    def __init__(self, width: int, dimension: int, num_prototypes: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dimension))
        if num_prototypes:
            self.prototypes = nn.Parameter(torch.randn(num_prototypes, dimension))

    def forward(self, vectors: Tensor) -> Tensor:
        projected: Tensor = self.layers(vectors)
        return projected


@dataclass(frozen=True)
class Contrastive(Objective):
    """Base: λ times a contrastive loss plus 1 - λ times soft Dice.

    lam: λ, 0 gives Dice alone, 1 no supervision (`schedule: joint` only); local_head: it stays at the client;
    pretrain_rounds: with `schedule: pretrain`, rounds of the contrastive loss alone.
    """

    needs = frozenset({"features", "two_views"})

    lam: Annotated[float, Field(ge=0, le=1)] = 0.5
    schedule: Literal["joint", "pretrain"] = "joint"
    pretrain_rounds: Annotated[int, Field(ge=1)] = 5
    smooth: Smooth = 1e-5
    local_head: bool = False

    # What differs

    @abstractmethod
    def projection(self, output: Output) -> Projection:
        """A fresh head that fits what the network puts out."""

    @abstractmethod
    def contrast(self, model: Segmenter, head: Projection, second: Tensor, context: Context) -> Tensor:
        """The contrastive loss of the present forward pass against the second view."""

    # What they share

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        contrast_share, dice_share = self.shares(context.round)
        output = context.forward(model, batch.image)
        terms = []
        if dice_share:
            dice = context.supervise(partial(dice_loss, smooth=self.smooth), output.logits, batch.label)
            context.note("dice", dice)
            terms.append(dice_share * dice)
        else:
            context.has_supervised = True  # with nothing, at any resolution
        if contrast_share:
            contrast = self.contrast(*get_head(model), require_second_view(context), context)
            context.note("contrast", contrast)
            terms.append(contrast_share * contrast)
        return torch.stack(terms).sum()

    def shares(self, round: int) -> tuple[float, float]:
        """The weights of the contrastive and of the supervised term in a round."""
        if self.schedule == "joint":
            return self.lam, 1 - self.lam
        return (1.0, 0.0) if round < self.pretrain_rounds else (0.0, 1.0)

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return self.shares(context.round)

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return dice_loss(logits, label, smooth=self.smooth, reduce=False)

    def start_model(self, model: nn.Module) -> None:
        if not isinstance(model, Segmenter) or not model.has_features:
            return  # the engine refuses such a network, with the reason
        model.projection = self.projection(probe_output(model))

    def local_names(self, model: nn.Module) -> list[str]:
        if not self.local_head:
            return []
        return [f"projection.{name}" for name in get_head(model)[1].state_dict()]

    def check(self, config: Config) -> None:
        if self.schedule == "pretrain" and self.pretrain_rounds >= config.rounds:
            raise ConfigError(
                f"objective.pretrain_rounds is {self.pretrain_rounds}, but there are only {config.rounds} "
                "rounds, so none is left for the masks. Lower it, or raise rounds."
            )

    def warnings(self, config: Config) -> list[str]:
        if self.schedule == "joint" and self.lam == 1:
            return ["objective.lam is 1: no supervised term, so the masks are never learned."]
        return []


@dataclass(frozen=True)
class Pooled(Contrastive):
    """Base of the two that compare whole cases: one vector a case from the pooled bottleneck."""

    least_together = 2
    dimension: Dimension = 128

    def projection(self, output: Output) -> Projection:
        return Projection(require_bottleneck(output).shape[1], self.dimension)

    def contrast(self, model: Segmenter, head: Projection, second: Tensor, context: Context) -> Tensor:
        first = head(contrastive.mean_over_voxels(context.features))
        other = head(contrastive.mean_over_voxels(model.encode(second)))
        return self.compare(first, other).mean()

    @abstractmethod
    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        """The loss of each vector, positives row by row."""

    def check(self, config: Config) -> None:
        super().check(config)
        if config.batch_size < 2 or config.compute.micro_batch == 1:
            name = "batch_size" if config.batch_size < 2 else "compute.micro_batch"
            raise ConfigError(
                f"{name} is 1, and a case is contrasted with the others of its batch: without any the "
                "contrastive loss is 0. Take 2 or more, or the objectives local_cl or swav."
            )


@dataclass(frozen=True)
class InfoNCE(Pooled):
    """InfoNCE and Dice: view 1 of a case finds its view 2 among those of the batch."""

    title = "InfoNCE + Dice"
    paper = "van den Oord et al., 2018"
    tau: Temperature = 0.07

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        return contrastive.info_nce(first, second, self.tau)


@dataclass(frozen=True)
class SimCLR(Pooled):
    """NT-Xent and Dice: every view finds its partner among all views of the batch."""

    title = "SimCLR + Dice"
    paper = "Chen et al., ICML 2020"
    tau: Temperature = 0.5

    def compare(self, first: Tensor, second: Tensor) -> Tensor:
        return contrastive.nt_xent(first, second, self.tau)


@dataclass(frozen=True)
class LocalCL(Contrastive):
    """Local contrast and Dice: decoder regions of a case are contrasted with near ones.

    blocks: after how many decoder blocks, from the bottleneck on; at most as many as there are.
    """

    title = "Local CL + Dice"
    paper = "Chaitanya et al., NeurIPS 2020"
    needs = frozenset({"features", "decoder", "two_views"})
    tau: Temperature = 0.1
    blocks: Annotated[int, Field(ge=1)] = 3

    def projection(self, output: Output) -> Projection:
        width = self.select_stage(output).shape[1]
        return Projection(width, width)

    def contrast(self, model: Segmenter, head: Projection, second: Tensor, context: Context) -> Tensor:
        first = self.project_regions(head, context.output)
        other = self.project_regions(head, model.forward_features(second))
        negatives = contrastive.region_negatives(second.ndim - 2, second.device)
        return contrastive.local_contrast(first, other, negatives, self.tau).mean()

    def project_regions(self, head: Projection, output: Output) -> Tensor:
        """One vector a region, (B, R, D). The head sees voxel by voxel, so only those taken."""
        vectors: Tensor = head(contrastive.take_regions(self.select_stage(output)))
        return vectors.flatten(2)

    def select_stage(self, output: Output) -> Tensor:
        if not output.stages:
            raise LookupError("Local CL needs a network that shows its decoder stages")
        return output.stages[min(self.blocks, len(output.stages)) - 1]


@dataclass(frozen=True)
class SwAV(Contrastive):
    """Swapped prediction and Dice: each view predicts which prototypes the other's voxels belong to.

    Samples are the voxels of the bottleneck, whose views stay aligned. prototypes: how many; epsilon:
    sharpness of the codes; freeze_epochs: local epochs of the first round in which prototypes rest.
    """

    title = "SwAV + Dice"
    paper = "Caron et al., NeurIPS 2020"
    tau: Temperature = 0.1
    epsilon: Annotated[float, Field(gt=0)] = 0.05
    sinkhorn_iterations: Annotated[int, Field(ge=1)] = 3
    prototypes: Annotated[int, Field(ge=2)] = 32
    dimension: Dimension = 128
    freeze_epochs: Annotated[int, Field(ge=0)] = 1

    def projection(self, output: Output) -> Projection:
        return Projection(require_bottleneck(output).shape[1], self.dimension, self.prototypes)

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return *self.shares(context.round), self.is_resting(context)

    def is_resting(self, context: Context) -> bool:
        """Whether prototypes are left alone for now."""
        return context.round == 0 and context.epoch < self.freeze_epochs

    def contrast(self, model: Segmenter, head: Projection, second: Tensor, context: Context) -> Tensor:
        # Prototypes have length one in the forward pass, so their mean over clients needs no repair.
        prototypes: Tensor = head.prototypes
        if self.is_resting(context):
            prototypes = prototypes.detach()
        return contrastive.swav(
            head(contrastive.flatten_voxels(context.features)),
            head(contrastive.flatten_voxels(model.encode(second))),
            prototypes,
            tau=self.tau,
            epsilon=self.epsilon,
            iterations=self.sinkhorn_iterations,
        ).mean()


# Parts of the network


def get_head(model: nn.Module) -> tuple[Segmenter, Projection]:
    """The network and the head that `start_model` gave it."""
    head = getattr(model, "projection", None)
    if not isinstance(model, Segmenter) or not isinstance(head, Projection):
        raise LookupError("the model has no projection head; call objective.start_model(model) first")
    return model, head


def require_second_view(context: Context) -> Tensor:
    if context.second_view is None:
        raise LookupError("add 'two_views' to `needs` to use a second view")
    return context.second_view


def require_bottleneck(output: Output) -> Tensor:
    assert output.bottleneck is not None
    return output.bottleneck


def probe_output(model: Segmenter) -> Output:
    """The network's output for an empty image of the smallest size; nothing in it changes."""
    was_training = model.training
    like = next(model.parameters())
    sides = [model.divisor] * model.dimensions
    image = torch.zeros(1, model.in_channels, *sides, device=like.device, dtype=like.dtype)
    model.eval()
    try:
        with torch.no_grad():
            return model.forward_features(image)
    finally:
        model.train(was_training)
