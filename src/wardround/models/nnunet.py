"""The networks of nnU-Net: a U-Net whose kernels, strides and widths a plan decides, level by level.

plain     Isensee et al., Nature Methods 2021. https://doi.org/10.1038/s41592-020-01008-z
residual  Isensee et al., MICCAI 2024 (ResEnc). https://arxiv.org/abs/2404.09556

Strided convolutions take the place of pooling, leaky ReLUs that of ReLUs, and widths double up to a limit.
The residual encoder has a stem and blocks as in ResNet-D: where a block shrinks its image the skip averages,
where it widens the skip has a 1x1 convolution. The decoder is plain in both.

Differs: a convolution has no bias where the norm behind it subtracts it (see `unet`); nnU-Net's have one,
which learns nothing. The coarsest decoder stage has no head of deep supervision, which nnU-Net weighs by 0.
Skips are concatenated as [encoder | upsampled]. The head starts with PyTorch's smaller weights.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from wardround.errors import ConfigError
from wardround.models.norm import Norm, needs_bias
from wardround.models.unet import UNet, UpStage, add_norm, convolution, init_he

SLOPE = 0.01  # of the leaky ReLUs
MOST_FILTERS = {2: 512, 3: 320}
RESIDUAL_BLOCKS = (1, 3, 4, 6)  # a level; all further ones have as many as the last

Side = int | list[int]
Sides = tuple[int, ...]


class PlannedUNet(UNet):
    """A U-Net whose levels shrink the image themselves, along each axis by a factor of its own."""

    def __init__(self, *, strides: Sequence[Sides], **parts: object) -> None:
        super().__init__(**parts)  # type: ignore[arg-type]
        self._divisors = tuple(math.prod(factors) for factors in zip(*strides, strict=True))
        self.divisor = max(self._divisors)
        self.pool = nn.Identity()

    @property
    def divisors(self) -> Sides:
        return self._divisors


def nnunet(
    *,
    in_channels: int,
    num_outputs: int,
    dimensions: int,
    base_filters: int = 32,
    levels: int = 6,
    norm: Norm = "instance_affine",
    dropout: float = 0.0,
    encoder: Literal["plain", "residual"] = "plain",
    kernels: list[Side] | None = None,
    strides: list[Side] | None = None,
    blocks: list[int] | None = None,
    decoder_convolutions: int | None = None,
    most_filters: int | None = None,
) -> PlannedUNet:
    """nnU-Net's U-Net.

    kernels, strides: of each level, one number or one an axis; by default 3, and 2 behind the first level.
    blocks: convolutions (plain) or residual blocks of each level of the encoder, by default 2, or 1, 3, 4, 6,
    6 ...; decoder_convolutions: of each decoder stage, 2 or 1. most_filters: 512 in 2D, 320 in 3D.
    """
    is_plain = encoder == "plain"
    kernel = expand_sides(kernels or [3] * levels, "kernels", levels, dimensions)
    stride = expand_sides(strides or [1] + [2] * (levels - 1), "strides", levels, dimensions)
    counts = blocks or ([2] * levels if is_plain else [RESIDUAL_BLOCKS[min(n, 3)] for n in range(levels)])
    check_plan(kernel, stride, counts, levels)
    most = most_filters or MOST_FILTERS[dimensions]
    widths = [min(base_filters * 2**level, most) for level in range(levels)]
    build = PlanBuilder(norm, dimensions)
    sources = [in_channels if is_plain else widths[0], *widths]
    made = [
        (build.plain if is_plain else build.residual)(source, width, kernel[n], stride[n], counts[n])
        for n, (source, width) in enumerate(pairwise(sources))
    ]
    if not is_plain:
        made[0] = nn.Sequential(
            OrderedDict(stem=build.unit(in_channels, widths[0], kernel[0]), blocks=made[0])
        )
    merged = decoder_convolutions or (2 if is_plain else 1)
    decoder = [
        PlannedStage(
            up_convolution(widths[n + 1], widths[n], stride[n + 1]),
            build.plain(2 * widths[n], widths[n], kernel[n], (1,) * dimensions, merged),
        )
        for n in reversed(range(levels - 1))
    ]
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": dimensions}
    model = PlannedUNet(
        strides=stride, encoder=made, decoder=decoder, last_width=widths[0], dropout=dropout, **sizes
    )
    return silence_residuals(init_he(model))


# The plan


def expand_sides(
    given: Sequence[int | Sequence[int]], name: str, levels: int, dimensions: int
) -> list[Sides]:
    """One number an axis for every level."""
    if len(given) != levels:
        raise ConfigError(
            f"model.arguments.{name} has {len(given)} entries, but model.levels is {levels}. Make them equal."
        )
    expanded = [(side,) * dimensions if isinstance(side, int) else tuple(side) for side in given]
    for sides in expanded:
        if len(sides) != dimensions or min(sides) < 1:
            raise ConfigError(
                f"model.arguments.{name} has {list(sides)}; give {dimensions} numbers from 1 on, or one."
            )
    return expanded


def check_plan(
    kernels: Sequence[Sides], strides: Sequence[Sides], blocks: Sequence[int], levels: int
) -> None:
    """Refuse what would give logits of another size than the image, or no layer at all."""
    even = next((sides for sides in kernels if any(side % 2 == 0 for side in sides)), None)
    if even is not None:
        raise ConfigError(f"model.arguments.kernels has {list(even)}; give odd numbers, which keep the size.")
    if max(strides[0]) > 1:
        raise ConfigError(
            f"model.arguments.strides begins with {list(strides[0])}; the first level has the image's "
            "resolution, so begin with 1."
        )
    if len(blocks) != levels or min(blocks) < 1:
        raise ConfigError(
            f"model.arguments.blocks is {list(blocks)}; give {levels} numbers from 1 on, one a level."
        )


# Blocks


class PlanBuilder:
    """Layers with this norm and leaky ReLUs, for images of so many dimensions."""

    def __init__(self, norm: Norm, dimensions: int) -> None:
        self.norm: Norm = norm
        self.dimensions = dimensions

    def unit(
        self,
        source: int,
        width: int,
        kernel: int | Sides,
        stride: int | Sides = 1,
        *,
        relu: bool = True,
    ) -> nn.Sequential:
        """Convolution, norm and, if asked, leaky ReLU."""
        bias = needs_bias(self.norm)
        conv = convolution(source, width, self.dimensions, size=kernel, stride=stride, bias=bias)
        return add_norm(conv, self.norm, self.dimensions, relu=relu, slope=SLOPE)

    def plain(self, source: int, width: int, kernel: Sides, stride: Sides, count: int) -> nn.Sequential:
        """So many units, of which the first shrinks the image."""
        first = self.unit(source, width, kernel, stride)
        return nn.Sequential(first, *(self.unit(width, width, kernel) for _ in range(count - 1)))

    def residual(self, source: int, width: int, kernel: Sides, stride: Sides, count: int) -> nn.Sequential:
        """So many residual blocks, of which the first shrinks the image."""
        first = ResidualBlock(self, source, width, kernel, stride)
        still = (1,) * self.dimensions
        more = (ResidualBlock(self, width, width, kernel, still) for _ in range(count - 1))
        return nn.Sequential(first, *more)


class ResidualBlock(nn.Module):
    """Two units and a skip around them; the last ReLU follows their sum."""

    def __init__(self, build: PlanBuilder, source: int, width: int, kernel: Sides, stride: Sides) -> None:
        super().__init__()
        self.first = build.unit(source, width, kernel, stride)
        self.second = build.unit(width, width, kernel, relu=False)
        skip: list[nn.Module] = []
        if max(stride) > 1:
            pool: Any = nn.AvgPool3d if len(stride) == 3 else nn.AvgPool2d
            skip.append(pool(stride, stride))
        if source != width:
            skip.append(build.unit(source, width, 1, relu=False))
        self.skip = nn.Sequential(*skip)
        self.relu = nn.LeakyReLU(SLOPE, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.relu(self.second(self.first(x)) + self.skip(x))
        return total


class PlannedStage(UpStage):
    """A decoder stage of given layers."""

    def __init__(self, up: _ConvNd, convs: nn.Sequential) -> None:
        nn.Module.__init__(self)
        self.up = up
        self.convs = convs


def up_convolution(source: int, width: int, stride: Sides) -> _ConvNd:
    """A transposed convolution that enlarges the image by its stride."""
    kind: Any = nn.ConvTranspose3d if len(stride) == 3 else nn.ConvTranspose2d
    made: _ConvNd = kind(source, width, stride, stride)
    return made


def silence_residuals(model: PlannedUNet) -> PlannedUNet:
    """Let residual blocks begin as their skip: the last norm of each scales by 0, where it has a scale."""
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            weight = getattr(module.second.get_submodule("norm"), "weight", None)
            if weight is not None:
                nn.init.zeros_(weight)
    return model
