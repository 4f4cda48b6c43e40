"""Regions that may overlap (whole tumour, core, enhancing core): one sigmoid each, as nnU-Net trains them.

Isensee et al., "nnU-Net for Brain Tumor Segmentation", BrainLes 2020. https://arxiv.org/abs/2011.00848

A label map is painted region by region, later ones over earlier ones (nnU-Net's regions_class_order). Read as
independent events, the sigmoids also give class probabilities: that of the class painted by region k is the
chance that k is there and no later region is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.config import Config
from wardround.data.annotation import Annotation
from wardround.errors import ConfigError
from wardround.losses.objective import Smooth, Supervised
from wardround.losses.partial import fill_ignored
from wardround.losses.segmentation import Reduction, at_least_float32, divide, finish, sums

# These compare classes by the network's outputs, which are regions here.
BY_OUTPUT = ("fedbr", "feddg", "fedmix_supervision", "fedproto", "fedrcl")

Regions = Sequence[Sequence[int]]


def region_targets(label: Tensor, regions: Regions, dtype: torch.dtype) -> Tensor:
    """(B, *spatial) class numbers -> (B, regions, *spatial) of 0 and 1."""
    if label.is_floating_point():
        raise ValueError("regions are made of class numbers; a soft label has none")
    masks = [torch.stack([label == number for number in region]).any(dim=0) for region in regions]
    return torch.stack(masks, dim=1).to(dtype)


def region_dice_bce_loss(
    logits: Tensor,
    label: Tensor,
    *,
    regions: Regions,
    smooth: float = 1e-5,
    reduction: Reduction = "per_sample",
    reduce: bool = True,
) -> Tensor:
    """Soft Dice of each region, their mean, plus binary cross entropy over regions and voxels."""
    logits = at_least_float32(logits)
    p, y = torch.sigmoid(logits), region_targets(label, regions, logits.dtype)
    total, overlap = sums(reduction if reduce else "per_sample", p + y, p * y)
    dice = divide(total - 2 * overlap, total + smooth).mean(dim=1)
    voxels = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    return finish(dice, reduce) + finish(voxels.flatten(1).mean(dim=1), reduce)


@dataclass(frozen=True)
class RegionDiceBCE(Supervised):
    """Dice plus binary cross entropy over regions that may overlap, one sigmoid output each.

    regions: class numbers of each output (1 is the first of labels), as many regions as classes, larger ones
    first; left out, every class is a region. order: the class that each region paints, later regions over
    earlier ones; left out, the one class that no later region has.
    """

    title = "Dice + binary cross entropy over regions"
    paper = "Isensee et al., BrainLes 2020"
    regions: tuple[Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)], ...] = ()
    order: tuple[int, ...] = ()
    smooth: Smooth = 1e-5
    reduction: Annotated[
        Literal["per_sample", "batch"], Field(description="sums run over each case, or over the whole batch")
    ] = "per_sample"

    def function(self) -> Callable[..., Tensor]:
        return partial(self._loss, smooth=self.smooth, reduction=self.reduction)

    def sample_losses(self, logits: Tensor, label: Tensor, *, annotation: Annotation | None = None) -> Tensor:
        return self.function()(logits, label, reduce=False, annotation=annotation)

    def restrict(self, function: Callable[..., Any], annotation: Annotation) -> Callable[..., Any]:
        """Regions that the client's labels do not tell are left out: their outputs get no gradient."""
        return partial(function, annotation=annotation)

    def _loss(
        self,
        logits: Tensor,
        label: Tensor,
        *,
        smooth: float,
        reduction: Reduction,
        reduce: bool = True,
        annotation: Annotation | None = None,
    ) -> Tensor:
        regions = self.list_regions(logits.shape[1])
        if annotation is not None:
            told = [place for place, region in enumerate(regions) if annotation.tells(region)]
            logits = torch.stack([logits[:, place] for place in told], dim=1)
            regions = [regions[place] for place in told]
            logits, label = fill_ignored(logits, label, annotation, background_first=False)
        return region_dice_bce_loss(
            logits, label, regions=regions, smooth=smooth, reduction=reduction, reduce=reduce
        )

    def list_regions(self, num_outputs: int) -> Regions:
        """The classes of each output."""
        return self.regions or [(number,) for number in range(1, num_outputs + 1)]

    def painted(self, num_outputs: int) -> list[int]:
        """The class that each region paints."""
        if self.order:
            return list(self.order)
        if not self.regions:
            return list(range(1, num_outputs + 1))
        later = [set().union(*self.regions[place + 1 :]) for place in range(len(self.regions))]
        left = [sorted(set(region) - rest) for region, rest in zip(self.regions, later, strict=True)]
        return [classes[0] if len(classes) == 1 else 0 for classes in left]

    # Outputs and what they mean

    def num_outputs(self, num_classes: int) -> int:
        return len(self.regions) or num_classes - 1

    def count_classes(self, num_outputs: int) -> int:
        return num_outputs + 1

    def probabilities(self, logits: Tensor) -> Tensor:
        """P(class of region k) = p_k times the chance that no later region is there."""
        logits = at_least_float32(logits)
        absent = F.logsigmoid(-logits)
        later = absent.flip(1).cumsum(1).flip(1)  # ln P(none of k, k + 1, ...)
        zero = torch.zeros_like(later[:, :1])
        each = F.logsigmoid(logits) + torch.cat([later[:, 1:], zero], dim=1)
        painted = self.painted(logits.shape[1])
        places = [painted.index(number) for number in range(1, len(painted) + 1)]
        return torch.cat([later[:, :1], each[:, places]], dim=1).exp()

    def predict(self, logits: Tensor) -> Tensor:
        return self._paint([channel > 0 for channel in logits.unbind(1)])

    def decide(self, probabilities: Tensor) -> Tensor:
        """The same from class probabilities, which regions can be had back from."""
        left = torch.ones_like(probabilities[:, 0])  # chance that no later region is there
        there: list[Tensor] = []
        for number in reversed(self.painted(probabilities.shape[1] - 1)):
            there.append(probabilities[:, number] > left / 2)
            left = left - probabilities[:, number]
        return self._paint(there[::-1])

    def _paint(self, there: Sequence[Tensor]) -> Tensor:
        label = torch.zeros_like(there[0], dtype=torch.uint8)
        for mask, number in zip(there, self.painted(len(there)), strict=True):
            label = torch.where(mask, torch.full_like(label, number), label)
        return label

    def to_average(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(at_least_float32(logits))

    def from_average(self, average: Tensor) -> Tensor:
        least = torch.finfo(average.dtype).tiny
        return average.clamp_min(least).log() - (1 - average).clamp_min(least).log()

    # Refusals

    def check(self, config: Config) -> None:
        name = str(config.method.get("name", "fedavg"))
        if name in BY_OUTPUT:
            raise ConfigError(
                f"objective 'region_dice_bce' has an output for each region, but method '{name}' takes "
                "outputs for classes. Choose another objective, for example dice_bce, or another method."
            )
        count = len(self.regions)
        painted = self.painted(count)
        if self.order and (len(self.order) != count or not self.regions):
            raise ConfigError(
                f"objective.order has {len(self.order)} classes for {count} regions; give each one."
            )
        if sorted(painted) != list(range(1, count + 1)):
            regions = [list(region) for region in self.regions]
            raise ConfigError(
                f"objective.regions are {regions}, of which not every one paints a class of its own. Put "
                f"larger regions first, as many as there are classes, or give {count} in objective.order."
            )
        for number, region in zip(painted, self.regions, strict=True):
            if number not in region:
                raise ConfigError(
                    f"objective.order paints class {number} for region {list(region)}, which lacks it."
                )

    def check_annotation(self, annotation: Annotation) -> None:
        super().check_annotation(annotation)
        if not any(map(annotation.tells, self.list_regions(len(annotation.groups) - 1))):
            raise ConfigError(
                "objective 'region_dice_bce' has no region among what this client annotates (annotates in "
                "federation.yaml), so it would learn nothing there. Name a region under annotates, or choose "
                "another objective, for example dice_bce."
            )

    def check_classes(self, num_classes: int) -> None:
        count = len(self.regions) or num_classes - 1
        if count != num_classes - 1 or any(max(region) >= num_classes for region in self.regions):
            raise ConfigError(
                f"objective.regions names {count} regions, but the data have {num_classes - 1} classes; "
                "give as many regions, of these classes."
            )
