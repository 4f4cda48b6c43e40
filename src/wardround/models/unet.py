"""U-Net: an encoder that halves the image, a decoder that doubles it, and skips in between.

unet2d         Ronneberger et al., MICCAI 2015. https://arxiv.org/abs/1505.04597
unet3d         Çiçek et al., MICCAI 2016. https://arxiv.org/abs/1606.06650
unet2d_fedevi  the small U-Net in the public code of FedEvi (Chen et al., MICCAI 2024)
autoencoder    a U-Net without skips, so that everything passes the bottleneck (SAFCF, Table 12)

One class runs them all; a builder chooses the blocks. Level 0 has the image's resolution, each
further level half of it. A skip is concatenated as [encoder | upsampled].

Differs: convolutions are padded, so that the mask has the size of the image. A convolution has no
bias where the norm behind it subtracts the channel mean anyway (batch, instance): such a bias
receives no gradient, yet would count in distances between models.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wardround.errors import ConfigError
from wardround.models.base import Output, Segmenter
from wardround.models.instance_norm import FusableUnit
from wardround.models.norm import Norm, make_norm, needs_bias

Network = TypeVar("Network", bound=Segmenter)


class EncoderDecoder(Segmenter):
    """A network that ends in decoder stages (coarse to fine), channel dropout and a head.

    deep_heads: of some stages, coarse to fine, for training with deep supervision.
    """

    needs_two = True
    decoder: nn.ModuleList
    dropout: nn.Module
    head: nn.Module
    deep_heads: nn.ModuleList

    def output_layer(self) -> nn.Module:
        return self.head

    def decode(self, x: Tensor, bottleneck: Tensor, skips: list[list[Tensor]]) -> Output:
        """Run the decoder on `x` and the head on what it gives; skips: of each stage, fine to coarse."""
        stages = []
        for stage in self.decoder:
            x = self.block(stage, x, *skips.pop())
            stages.append(x)
        logits = self.head(self.dropout(x))
        deep: list[Tensor] = []
        if self.is_deep and self.training:
            deep = [head(stage) for head, stage in zip(self.deep_heads, stages[1:-1], strict=True)]
        return Output(logits, bottleneck, decoder=x, stages=tuple(stages), deep=tuple(reversed(deep)))

    def supervise_deeply(self) -> None:
        if len(self.decoder) < 3:
            raise ConfigError(
                f"model.deep_supervision needs 4 levels or more, and there are {len(self.decoder) + 1}: the "
                "finest has its logits already, and the coarsest two have none. Raise them, or leave it out."
            )
        weight = self.get_parameter("head.weight")
        size = self.padded_size(self.divisors)
        image = weight.new_zeros(1, self.in_channels, *size)
        was_training = self.training
        with torch.no_grad():
            stages = self.eval().forward_features(image).stages
        self.train(was_training)
        self.deep_heads = nn.ModuleList(
            convolution(stage.shape[1], self.num_outputs, self.dimensions, size=1) for stage in stages[1:-1]
        )
        self.is_deep = True


class UNet(EncoderDecoder):
    """Encoder levels, decoder stages (coarse to fine) and a head.

    dropout: chance of a whole channel being dropped, in front of the decoder and of the head.
    """

    def __init__(
        self,
        *,
        encoder: Sequence[nn.Module],
        decoder: Sequence[nn.Module],
        last_width: int,
        dropout: float,
        **sizes: int,
    ) -> None:
        super().__init__(divisor=2 ** len(decoder), **sizes)
        self.pool: nn.Module = (nn.MaxPool3d if self.dimensions == 3 else nn.MaxPool2d)(2)
        self.dropout = channel_dropout(dropout, self.dimensions)
        self.encoder = nn.ModuleList(encoder)
        self.decoder = nn.ModuleList(decoder)
        self.head = convolution(last_width, self.num_outputs, self.dimensions, size=1)

    def _output(self, x: Tensor) -> Output:
        skips = [[x] for x in self._encode(x)]
        (bottleneck,) = skips.pop()
        return self.decode(self.dropout(bottleneck), bottleneck, skips)

    def _bottleneck(self, x: Tensor) -> Tensor:
        return self._encode(x)[-1]

    def _encode(self, x: Tensor) -> list[Tensor]:
        """The output of every encoder level, fine to coarse."""
        maps: list[Tensor] = []
        for level in self.encoder:
            x = self.block(level, self.pool(x) if maps else x)
            maps.append(x)
        return maps


# Builders


def unet2d(
    *,
    in_channels: int,
    num_outputs: int,
    base_filters: int = 64,
    levels: int = 5,
    norm: Norm = "instance",
    dropout: float = 0.0,
) -> UNet:
    """Ronneberger's U-Net: widths 64 to 1024, transposed convolutions halve the width."""
    widths = [base_filters * 2**level for level in range(levels)]
    encoder = [
        double_convolution(source, width, width, norm, dimensions=2)
        for source, width in pairwise([in_channels, *widths])
    ]
    decoder = [
        UpStage(below, width, width, norm, dimensions=2, up_bias=True)
        for width, below in reversed(list(pairwise(widths)))
    ]
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": 2}
    return init_he(UNet(encoder=encoder, decoder=decoder, last_width=base_filters, dropout=dropout, **sizes))


def unet3d(
    *,
    in_channels: int,
    num_outputs: int,
    base_filters: int = 32,
    levels: int = 4,
    norm: Norm = "instance",
    dropout: float = 0.0,
) -> UNet:
    """Çiçek's 3D U-Net: the width doubles before pooling and is kept by the up-convolution.

    Without norm layers, 3 channels in and 3 out, its convolutions have the paper's 19,069,955 weights.
    """
    widths, encoder = doubling_encoder(in_channels, base_filters, levels, norm, dimensions=3)
    decoder = [
        UpStage(below, below, width, norm, dimensions=3, up_bias=False)
        for width, below in reversed(list(pairwise(widths)))
    ]
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": 3}
    return init_he(UNet(encoder=encoder, decoder=decoder, last_width=widths[0], dropout=dropout, **sizes))


def unet2d_fedevi(
    *,
    in_channels: int,
    num_outputs: int,
    base_filters: int = 16,
    levels: int = 5,
    norm: Norm = "instance",
    dropout: float = 0.0,
) -> UNet:
    """The U-Net of FedEvi's authors: three convolutions a level, nearest-neighbour upsampling."""
    widths = [base_filters * 2**level for level in range(levels)]
    encoder = [triple_convolution(source, width, norm) for source, width in pairwise([in_channels, *widths])]
    decoder = [NearestStage(width, norm, is_first=width == widths[-1]) for width in reversed(widths[1:])]
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": 2}
    return init_fan_out(
        UNet(encoder=encoder, decoder=decoder, last_width=widths[1], dropout=dropout, **sizes)
    )


# Blocks


def convolution(
    source: int,
    width: int,
    dimensions: int,
    *,
    size: int | tuple[int, ...] = 3,
    stride: int | tuple[int, ...] = 1,
    bias: bool = True,
) -> _ConvNd:
    """A convolution that keeps the image's size, but for its stride; size: odd, of its kernel."""
    kind: Any = nn.Conv3d if dimensions == 3 else nn.Conv2d
    padding = size // 2 if isinstance(size, int) else tuple(side // 2 for side in size)
    made: _ConvNd = kind(source, width, size, stride=stride, padding=padding, bias=bias)
    return made


def up_convolution(source: int, width: int, dimensions: int, *, bias: bool) -> _ConvNd:
    """A transposed convolution that doubles the image's size."""
    kind = nn.ConvTranspose3d if dimensions == 3 else nn.ConvTranspose2d
    return kind(source, width, 2, stride=2, bias=bias)


def channel_dropout(chance: float, dimensions: int) -> nn.Module:
    return (nn.Dropout3d if dimensions == 3 else nn.Dropout2d)(chance)


def add_norm(
    conv: _ConvNd, norm: Norm, dimensions: int, *, relu: bool = True, slope: float = 0.0
) -> nn.Sequential:
    """The convolution, norm, ReLU; slope: of the ReLU below 0."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=conv)
    layers["norm"] = make_norm(norm, conv.out_channels, dimensions)
    if relu:
        layers["relu"] = nn.LeakyReLU(slope, inplace=True) if slope else nn.ReLU(inplace=True)
    return FusableUnit(layers)


def unit(
    source: int, width: int, norm: Norm, dimensions: int, *, size: int = 3, relu: bool = True
) -> nn.Sequential:
    """A convolution that keeps the image's size, norm, ReLU."""
    conv = convolution(source, width, dimensions, size=size, bias=needs_bias(norm))
    return add_norm(conv, norm, dimensions, relu=relu)


def double_convolution(source: int, middle: int, width: int, norm: Norm, dimensions: int) -> nn.Sequential:
    first = unit(source, middle, norm, dimensions)
    second = unit(middle, width, norm, dimensions)
    return nn.Sequential(OrderedDict(first=first, second=second))


def doubling_encoder(
    in_channels: int, base_filters: int, levels: int, norm: Norm, dimensions: int
) -> tuple[list[int], list[nn.Sequential]]:
    """Çiçek's encoder, whose levels double the width before pooling: the widths and the levels."""
    widths = [base_filters * 2 ** (level + 1) for level in range(levels)]
    pairs = pairwise([in_channels, *widths])
    return widths, [double_convolution(source, w // 2, w, norm, dimensions) for source, w in pairs]


def triple_convolution(source: int, width: int, norm: Norm) -> nn.Sequential:
    """FedEvi's encoder level; its first convolution has no ReLU."""
    first = unit(source, width, norm, dimensions=2, relu=False)
    second = unit(width, width, norm, dimensions=2)
    third = unit(width, width, norm, dimensions=2)
    return nn.Sequential(OrderedDict(first=first, second=second, third=third))


class UpStage(nn.Module):
    """Transposed convolution to the doubled size, skip, two convolutions.

    below, up_width, width: channels that come in, after the transposed convolution, and that leave.
    """

    def __init__(
        self, below: int, up_width: int, width: int, norm: Norm, *, dimensions: int, up_bias: bool
    ) -> None:
        super().__init__()
        self.up = up_convolution(below, up_width, dimensions, bias=up_bias)
        self.convs = double_convolution(width + up_width, width, width, norm, dimensions)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        merged: Tensor = self.convs(torch.cat([skip, self.up(x)], dim=1))
        return merged


class NearestStage(nn.Module):
    """FedEvi's decoder stage: (3x3 to `width`,) 1x1 to half of it, doubled size, skip, 3x3.

    The authors upsample before the 1x1 unit. Nearest neighbours copy voxels, so the order changes
    no number of the forward pass, and ours costs a quarter.
    """

    def __init__(self, width: int, norm: Norm, *, is_first: bool) -> None:
        super().__init__()
        self.reduce = nn.Identity() if is_first else unit(2 * width, width, norm, dimensions=2)
        self.narrow = unit(width, width // 2, norm, dimensions=2, size=1)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.merge = unit(width, width, norm, dimensions=2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(self.narrow(self.reduce(x)))
        merged: Tensor = self.merge(torch.cat([skip, x], dim=1))
        return merged


# First weights, drawn from PyTorch's global stream


def init_he(model: Network, *, up_gain: float = 1.0) -> Network:
    """Gaussian weights that keep the variance through a ReLU, as Ronneberger et al. section 3.

    up_gain: 2 where a ReLU stands behind the transposed convolutions, of which each output sees one voxel.
    Linear layers keep the variance without a ReLU. The head keeps PyTorch's smaller weights: the first
    predictions shall be undecided.
    """
    head = model.output_layer()
    for module in model.modules():
        if not isinstance(module, _ConvNd | nn.Linear) or module is head:
            continue
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, _ConvTransposeNd):
            nn.init.normal_(module.weight, std=math.sqrt(up_gain / module.in_channels))
        else:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def init_fan_out(model: UNet) -> UNet:
    """Kaiming's Gaussian by fan-out for every convolution, the head too, as FedEvi's public code."""
    for module in model.modules():
        if isinstance(module, _ConvNd):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# Autoencoder


class Autoencoder(UNet):
    """A U-Net whose decoder stages take no skip."""

    def _output(self, x: Tensor) -> Output:
        bottleneck = self._bottleneck(x)
        return self.decode(self.dropout(bottleneck), bottleneck, [[] for _ in self.decoder])


class PlainStage(nn.Module):
    """Transposed convolution to the doubled size, two convolutions from `below` to `width` channels."""

    def __init__(self, below: int, width: int, norm: Norm, dimensions: int) -> None:
        super().__init__()
        self.up = up_convolution(below, below, dimensions, bias=False)
        self.convs = double_convolution(below, width, width, norm, dimensions)

    def forward(self, x: Tensor) -> Tensor:
        expanded: Tensor = self.convs(self.up(x))
        return expanded


def autoencoder(
    *,
    in_channels: int,
    num_outputs: int,
    dimensions: int,
    base_filters: int = 32,
    levels: int = 4,
    norm: Norm = "instance",
    dropout: float = 0.0,
) -> Autoencoder:
    """Çiçek's 3D U-Net, or its 2D likeness with the same widths, without skips; SAFCF gives no details.

    base_filters 32 and 4 levels give 64, 128, 256, 512; with 5 levels the 2D network has 64 to 1024.
    """
    widths, encoder = doubling_encoder(in_channels, base_filters, levels, norm, dimensions)
    decoder = [
        PlainStage(below, width, norm, dimensions) for width, below in reversed(list(pairwise(widths)))
    ]
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": dimensions}
    model = Autoencoder(encoder=encoder, decoder=decoder, last_width=widths[0], dropout=dropout, **sizes)
    return init_he(model)
