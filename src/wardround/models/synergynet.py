"""SynergyNet-8s2h: continuous and quantised features, combined by attention in the bottleneck.

Gorade et al., SynergyNet: Bridging the Gap between Discrete and Continuous Representations for Precise
Medical Image Segmentation, WACV 2024. https://arxiv.org/abs/2310.17764
The network of the adaptive aggregation weights paper (AAW), in 2D and 3D.

A V-Net-like encoder and decoder with additive skips. The deepest features z are also replaced by the
nearest codes of a codebook; attention lets each code ask the continuous features (8 synergy heads), and
the answers ask each other (2 refinement heads). No position code, residual, norm or output projection.

Differs: AAW says only that 2D blocks became 3D ones; layers and widths are those of the same group's public
3D version (NUBagciLab/Cyst-X), and "8s2h" read as 8 and 2 heads is an inference. That code lays out memory
so that channels and voxels mix, and its attention matrix is head width x head width. Ours attends between
voxels (`attention: token`), or between properly laid out channels (`channel`). A convolution has no bias
where the norm behind it removes it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.models.base import Output
from wardround.models.norm import Norm, needs_bias
from wardround.models.quantiser import VectorQuantiser
from wardround.models.unet import (
    EncoderDecoder,
    add_norm,
    channel_dropout,
    convolution,
    init_he,
    unit,
    up_convolution,
)

Attends = Literal["token", "channel"]


class SynergyNet(EncoderDecoder):
    """Encoder levels, quantiser, two attentions, decoder stages (coarse to fine) and a head.

    `Output.bottleneck` is the deepest encoder map, continuous, before the quantiser.
    dropout: chance of a whole channel being dropped, in front of the quantiser and of the head.
    """

    def __init__(
        self,
        *,
        encoder: Sequence[nn.Module],
        quantiser: VectorQuantiser,
        synergy: CrossAttention,
        refinement: CrossAttention,
        decoder: Sequence[nn.Module],
        last_width: int,
        dropout: float,
        **sizes: int,
    ) -> None:
        super().__init__(divisor=2 ** len(decoder), **sizes)
        self.dropout = channel_dropout(dropout, self.dimensions)
        self.encoder = nn.ModuleList(encoder)
        self.quantiser = quantiser
        self.synergy = synergy
        self.refinement = refinement
        self.decoder = nn.ModuleList(decoder)
        self.head = convolution(last_width, self.num_outputs, self.dimensions, size=1)

    def start_fit(self) -> None:
        self.quantiser.start_fit()

    def extra_losses(self, num_examples: int) -> dict[str, Tensor]:
        """The quantiser's loss of the last forward pass, "quantiser"; none in evaluation mode."""
        loss = self.quantiser.take_loss()
        return {"quantiser": loss} if self.training and loss is not None else {}

    def notes(self) -> dict[str, Tensor]:
        """How evenly the last training pass used the codebook."""
        return dict(self.quantiser.usage)

    def _output(self, x: Tensor) -> Output:
        skips = [[x] for x in self._encode(x)]
        (bottleneck,) = skips.pop()
        return self.decode(self._combine(self.dropout(bottleneck)), bottleneck, skips)

    def _bottleneck(self, x: Tensor) -> Tensor:
        return self._encode(x)[-1]

    def _encode(self, x: Tensor) -> list[Tensor]:
        """The output of every encoder level, fine to coarse."""
        maps: list[Tensor] = []
        for level in self.encoder:
            x = self.block(level, x)
            maps.append(x)
        return maps

    def _combine(self, x: Tensor) -> Tensor:
        """Quantise, let the codes ask the features, refine. Not run through `block`, which would run it twice
        and count the codes twice."""
        z = x.flatten(2).transpose(1, 2)  # (B, C, *spatial) -> (B, N, C)
        mixed: Tensor = self.synergy(self.quantiser(z), z)
        mixed = self.refinement(mixed, mixed)
        return mixed.transpose(1, 2).reshape(x.shape).contiguous()


def synergynet(
    *,
    in_channels: int,
    num_outputs: int,
    dimensions: int,
    base_filters: int = 16,
    levels: int = 5,
    norm: Norm = "batch",
    dropout: float = 0.5,
    heads: Annotated[int, Field(ge=1, description="synergy heads: codes ask features")] = 8,
    refine_heads: Annotated[int, Field(ge=1, description="refinement heads")] = 2,
    codes: Annotated[int, Field(ge=1, description="entries of the codebook")] = 256,
    commitment: Annotated[float, Field(ge=0, description="pull of the features towards their codes")] = 0.25,
    attention: Annotated[Attends, Field(description="between voxels or between channels")] = "token",
    revive: Annotated[
        int, Field(ge=0, description="training passes after which an idle code is moved; 0: never")
    ] = 0,
) -> SynergyNet:
    """SynergyNet: widths 16 to 256, with 1, 2, 3, 3, 3 convolutions a level.

    Where a number of heads does not divide the bottleneck's channels, there are fewer, as with group norm.
    """
    widths = [base_filters * 2**level for level in range(levels)]
    encoder = [
        encoder_level(level, source, width, norm, dimensions)
        for level, (source, width) in enumerate(pairwise([in_channels, *widths]))
    ]
    decoder = [AddStage(level, widths, norm, dimensions) for level in reversed(range(levels - 1))]
    return init_he(
        SynergyNet(
            in_channels=in_channels,
            num_outputs=num_outputs,
            dimensions=dimensions,
            encoder=encoder,
            quantiser=VectorQuantiser(codes, widths[-1], commitment=commitment, revive=revive),
            synergy=CrossAttention(widths[-1], heads, attention),
            refinement=CrossAttention(widths[-1], refine_heads, attention),
            decoder=decoder,
            last_width=widths[0],
            dropout=dropout,
        ),
        up_gain=2.0,
    )


# Blocks


class CrossAttention(nn.Module):
    """Multi-head attention without output projection, (B, N, C) and (B, N, C) -> (B, N, C).

    token: N x N weights a head, scores divided by the root of the head's width.
    channel: the head's channels attend to each other, scores divided by the root of N.
    Between voxels the keys have no bias: it would add the same to all scores of a query and change nothing.
    """

    def __init__(self, width: int, heads: int, attends: Attends) -> None:
        super().__init__()
        self.heads = math.gcd(heads, width)
        self.attends = attends
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=attends == "channel")
        self.value = nn.Linear(width, width)

    def forward(self, asking: Tensor, asked: Tensor) -> Tensor:
        parts = self.query(asking), self.key(asked), self.value(asked)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.attends == "token":
            answer = F.scaled_dot_product_attention(q, k, v)  # (B, heads, N, C / heads)
        else:
            turned = (part.transpose(2, 3) for part in (q, k, v))  # (B, heads, C / heads, N)
            answer = F.scaled_dot_product_attention(*turned).transpose(2, 3)
        return answer.transpose(1, 2).flatten(2)


def encoder_level(level: int, source: int, width: int, norm: Norm, dimensions: int) -> nn.Sequential:
    """Halve the image, except at level 0, and convolve: `source` channels come in, `width` leave."""
    if level == 0:
        return convolutions(level, source, width, norm, dimensions)
    kind = nn.Conv3d if dimensions == 3 else nn.Conv2d
    down = add_norm(kind(source, width, 2, stride=2, bias=needs_bias(norm)), norm, dimensions)
    convs = convolutions(level, width, width, norm, dimensions)
    return nn.Sequential(OrderedDict(down=down, convs=convs))


class AddStage(nn.Module):
    """Transposed convolution to the doubled size, plus the skip, then the level's convolutions."""

    def __init__(self, level: int, widths: Sequence[int], norm: Norm, dimensions: int) -> None:
        super().__init__()
        width = widths[level]
        up = up_convolution(widths[level + 1], width, dimensions, bias=needs_bias(norm))
        self.up = add_norm(up, norm, dimensions)
        self.convs = convolutions(level, width, width, norm, dimensions)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        merged: Tensor = self.convs(self.up(x) + skip)
        return merged


def convolutions(level: int, source: int, width: int, norm: Norm, dimensions: int) -> nn.Sequential:
    """One convolution at level 0, two at level 1, three below."""
    names = ("first", "second", "third")[: level + 1]
    sources = [source, width, width]
    layers = {name: unit(into, width, norm, dimensions) for name, into in zip(names, sources, strict=False)}
    return nn.Sequential(OrderedDict(layers))
