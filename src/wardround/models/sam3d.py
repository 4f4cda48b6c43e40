"""SAM3D: a segment-anything style transformer for volumes, without prompts.

Kirillov et al., Segment Anything, ICCV 2023. https://arxiv.org/abs/2304.02643

The image is cut into patches, a plain vision transformer works on them, a small neck makes the image
embedding, and a light decoder brings it back to full size. Most transformer blocks look at windows only;
a few look at everything, so that cost grows almost linearly with the volume.

    size    width  heads  depth  neck   parameters (3D, 1 channel in, 1 out)
    tiny      192      3     12   128    6,151,553
    small     384      6     12   192   23,114,401
    base      768     12     12   256   88,404,609  (width and depth of SAM ViT-B)

`levels` counts resolutions, the image's included, as in a U-Net: a patch has 2 ** (levels - 1) voxels a
side, so 4 gives 8 and 5 gives SAM's 16. `base_filters` is the transformer's width. The neck's output is the
bottleneck. Transformer blocks carry the names they have in SAM's published files
(`image_encoder.blocks.0.attn.qkv.weight` ...), and ViT-B's fit the size "base".

Differs: the papers under study name a SAM-style 3D network and say no more; what follows is ours.
- No prompt encoder and no mask decoder with tokens: with one mask a class there is nothing to prompt.
- Positions are a sum of one embedding an axis, interpolated to any size. SAM adds one a place and, in each
  attention, a bias by distance; the bias would rule out the fast attention kernels.
- Windows are of nearly equal size and do not attend to padding; SAM's are all alike and attend to zeros.
- The norm of choice stands behind convolutions, and a ReLU in the decoder. SAM has LayerNorm and GELU there,
  as the transformer blocks have here too.
- A convolution of the image joins the last decoder stage: patches alone forget small structures.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wardround.models.base import Output
from wardround.models.norm import Norm, needs_bias
from wardround.models.unet import EncoderDecoder, add_norm, channel_dropout, convolution, unit, up_convolution

HEAD_WIDTH = 64  # channels an attention head has, in SAM and most vision transformers
NARROWEST = 16  # channels of the finest decoder stage at least
PLACES = 16  # places an axis of the position embedding has: 128 voxels in patches of 8


class Size(NamedTuple):
    """Channels of the transformer and of the image embedding."""

    width: int
    neck: int


SIZES = {"tiny": Size(192, 128), "small": Size(384, 192), "base": Size(768, 256)}


class SAM3D(EncoderDecoder):
    """Image encoder, a convolution of the image for details, decoder stages (coarse to fine) and a head.

    dropout: chance of a whole channel being dropped, in front of the decoder and of the head.
    """

    def __init__(
        self, *, encoder: ImageEncoder, widths: Sequence[int], norm: Norm, dropout: float, **sizes: int
    ) -> None:
        super().__init__(divisor=2 ** (len(widths) - 1), **sizes)
        in_channels, dimensions = self.in_channels, self.dimensions
        self.image_encoder = encoder
        self.detail = unit(in_channels, widths[-1], norm, dimensions)
        skips = [0] * (len(widths) - 2) + [widths[-1]]
        self.decoder = nn.ModuleList(
            SAMDecoderStage(below, width, norm, dimensions, skip=skip)
            for (below, width), skip in zip(pairwise(widths), skips, strict=True)
        )
        self.dropout = channel_dropout(dropout, dimensions)
        self.head = convolution(widths[-1], self.num_outputs, dimensions, size=1)

    def _output(self, x: Tensor) -> Output:
        bottleneck = self._bottleneck(x)
        skips: list[list[Tensor]] = [[] for _ in self.decoder]
        skips[0].append(self.block(self.detail, x))
        return self.decode(self.dropout(bottleneck), bottleneck, skips)

    def _bottleneck(self, x: Tensor) -> Tensor:
        encoder = self.image_encoder
        x = encoder.patch_embed(x).movedim(1, -1)  # (B, C, *spatial) -> (B, *grid, width)
        x = x + encoder.position(x.shape[1:-1])
        for block in encoder.blocks:
            x = self.block(block, x)
        return self.block(encoder.neck, x.movedim(-1, 1))  # (B, *grid, width) -> (B, neck, *grid)


def sam3d(
    *,
    in_channels: int,
    num_outputs: int,
    dimensions: Literal[2, 3] = 3,
    base_filters: int | None = None,
    levels: int = 4,
    norm: Norm = "instance",
    dropout: float = 0.0,
    size: Literal["tiny", "small", "base"] = "tiny",
    depth: Annotated[int, Field(ge=1)] = 12,
    window: Annotated[int, Field(ge=1)] = 8,
    global_every: Annotated[int, Field(ge=1)] = 3,
) -> SAM3D:
    """The network of a size; the page above says what `levels` and `base_filters` mean here.

    base_filters: None takes the size's width; depth: transformer blocks; window: patches a side that a
    windowed block sees; global_every: each so-manieth block is global, and the last always. 3 of 12 gives
    the 3rd, 6th, 9th and 12th, as in SAM ViT-B; 1 makes all global.
    """
    width = base_filters or SIZES[size].width
    neck = SIZES[size].neck
    windows = [0 if is_global(block, depth, global_every) else window for block in range(depth)]
    patch = 2 ** (levels - 1)
    encoder = ImageEncoder(
        in_channels, width, neck, patch=patch, windows=windows, norm=norm, dimensions=dimensions
    )
    widths = [neck, *(max(NARROWEST, neck // 2**stage) for stage in range(1, levels))]
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": dimensions}
    return init_weights(SAM3D(encoder=encoder, widths=widths, norm=norm, dropout=dropout, **sizes))


def is_global(block: int, depth: int, global_every: int) -> bool:
    """Whether a block, counted from 0, attends to all patches."""
    return (block + 1) % global_every == 0 or block == depth - 1


# Encoder


class ImageEncoder(nn.Module):
    """Patches, positions, transformer blocks and the neck; `SAM3D` runs them one by one.

    windows: for each block how many patches a side it sees, 0 for all of them.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        neck: int,
        *,
        patch: int,
        windows: Sequence[int],
        norm: Norm,
        dimensions: int,
    ) -> None:
        super().__init__()
        kind = nn.Conv3d if dimensions == 3 else nn.Conv2d
        self.patch_embed = nn.Sequential(OrderedDict(proj=kind(in_channels, width, patch, stride=patch)))
        self.position = Position(width, dimensions)
        self.blocks = nn.ModuleList(Block(width, window) for window in windows)
        self.neck = nn.Sequential(
            OrderedDict(
                narrow=unit(width, neck, norm, dimensions, size=1, relu=False),
                smooth=unit(neck, neck, norm, dimensions, relu=False),
            )
        )


class Position(nn.Module):
    """Where a patch lies: the sum of one learned embedding an axis, stretched to the grid at hand."""

    def __init__(self, width: int, dimensions: int) -> None:
        super().__init__()
        self.axes = nn.ParameterList(torch.zeros(PLACES, width) for _ in range(dimensions))

    def forward(self, grid: Sequence[int]) -> Tensor:
        """(*grid, width)"""
        total: Tensor | None = None
        for axis, (side, embedding) in enumerate(zip(grid, self.axes, strict=True)):
            shape = [side if a == axis else 1 for a in range(len(grid))]
            part = interpolate_places(embedding, side).reshape(*shape, -1)
            total = part if total is None else total + part
        assert total is not None
        return total


def interpolate_places(embedding: Tensor, side: int) -> Tensor:
    """(places, width) -> (side, width), linear in between.

    A product of matrices, because the backward pass of PyTorch's own interpolation is not deterministic
    on a GPU.
    """
    places = embedding.shape[0]
    if side == places:
        return embedding
    wanted = (torch.arange(side, device=embedding.device) + 0.5) * (places / side) - 0.5
    distance = (wanted.clamp(0, places - 1)[:, None] - torch.arange(places, device=embedding.device)).abs()
    weights = (1 - distance).clamp_min(0).to(embedding.dtype)  # (side, places), each row sums to one
    return weights @ embedding


class Block(nn.Module):
    """A transformer block on (B, *grid, width): attention and a perceptron, each behind a LayerNorm.

    window: patches a side seen at most, 0 for all of them.
    """

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = SelfAttention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y

    def attend(self, x: Tensor) -> Tensor:
        """Attention among all patches, or inside each window."""
        batch, *grid, _ = x.shape
        sides = [balance_window(side, self.window or side) for side in grid]
        padded = [-(-side // window) * window for side, window in zip(grid, sides, strict=True)]
        if padded == grid:
            windows = self.attn(to_windows(x, sides), None)
        else:
            margins = [m for side, full in zip(grid, padded, strict=True) for m in (full - side, 0)]
            inside = F.pad(x.new_ones(1, *grid, 1), [0, 0, *reversed(margins)])
            mask = to_windows(inside, sides)[:, None, None, :, 0] > 0  # (windows, 1, 1, patches)
            x = F.pad(x, [0, 0, *reversed(margins)])
            windows = self.attn(to_windows(x, sides), mask.repeat(batch, 1, 1, 1))
        whole = from_windows(windows, sides, [batch, *padded])
        for axis, side in enumerate(grid, start=1):
            whole = whole.narrow(axis, 0, side)
        return whole


class SelfAttention(nn.Module):
    """Self-attention on (N, patches, width), one head for every 64 channels where that divides the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = next(n for n in range(max(1, width // HEAD_WIDTH), 0, -1) if width % n == 0)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """mask: (N, 1, 1, patches), true where a patch may be attended to; None for everywhere."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (N, patches, 3, heads, width of a head)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (N, heads, patches, ...)
        mixed: Tensor = self.proj(seen.transpose(1, 2).flatten(2))
        return mixed


class Perceptron(nn.Sequential):
    """Two linear layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        layers = OrderedDict(
            lin1=nn.Linear(width, 4 * width), act=nn.GELU(), lin2=nn.Linear(4 * width, width)
        )
        super().__init__(layers)


# Windows


def balance_window(side: int, window: int) -> int:
    """The window's side when `side` patches share as few windows as possible evenly: 9 patches, 8 -> 5."""
    return -(-side // -(-side // window))


def to_windows(x: Tensor, sides: Sequence[int]) -> Tensor:
    """(B, *grid, C) -> (B * windows, patches of a window, C); the sides divide the grid."""
    batch, *grid, channels = x.shape
    if list(sides) == grid:
        return x.reshape(batch, -1, channels)
    cut = [n for side, window in zip(grid, sides, strict=True) for n in (side // window, window)]
    x = x.reshape(batch, *cut, channels)
    x = x.permute(0, *range(1, len(cut), 2), *range(2, len(cut) + 1, 2), len(cut) + 1)
    return x.reshape(-1, math.prod(sides), channels)


def from_windows(x: Tensor, sides: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The inverse of `to_windows`; shape: (B, *grid)."""
    batch, *grid = shape
    channels = x.shape[-1]
    if list(sides) == grid:
        return x.reshape(batch, *grid, channels)
    numbers = [side // window for side, window in zip(grid, sides, strict=True)]
    x = x.reshape(batch, *numbers, *sides, channels)
    axes = len(grid)
    woven = [a for axis in range(1, axes + 1) for a in (axis, axis + axes)]
    return x.permute(0, *woven, 2 * axes + 1).reshape(batch, *grid, channels)


# Decoder


class SAMDecoderStage(nn.Module):
    """Transposed convolution to the doubled size, norm, ReLU, a skip if there is one, and a convolution.

    below, width, skip: channels that come in, that leave, and that the skip has (0: there is none).
    """

    def __init__(self, below: int, width: int, norm: Norm, dimensions: int, *, skip: int) -> None:
        super().__init__()
        self.up = add_norm(up_convolution(below, width, dimensions, bias=needs_bias(norm)), norm, dimensions)
        self.merge = unit(skip + width, width, norm, dimensions)

    def forward(self, x: Tensor, *skip: Tensor) -> Tensor:
        merged: Tensor = self.merge(torch.cat([*skip, self.up(x)], dim=1))
        return merged


# First weights, drawn from PyTorch's global stream


def init_weights(model: SAM3D) -> SAM3D:
    """Small Gaussians in the transformer, as is usual there, and weights that keep the variance elsewhere.

    The head keeps PyTorch's smaller weights: the first predictions shall be undecided.
    """
    linear = {model.image_encoder.patch_embed.proj, *model.image_encoder.neck.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        elif isinstance(module, _ConvTransposeNd):  # each output sees one voxel
            nn.init.normal_(module.weight, std=math.sqrt(2 / module.in_channels))
        elif isinstance(module, _ConvNd) and module is not model.head:
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear" if module in linear else "relu")
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for embedding in model.image_encoder.position.axes:
        nn.init.trunc_normal_(embedding, std=0.02)
    return model
