"""GELAN: the encoder and neck of YOLOv9 with a mask head, in 2D, and slice by slice for volumes.

Wang et al., YOLOv9: Learning What You Want to Learn Using Programmable Gradient Information, ECCV 2024.
https://arxiv.org/abs/2402.13616

GELAN blocks split their channels, send one half through two stages of convolutions in a row, and join all
four pieces: short and long paths for the gradient at few parameters. A neck passes features from coarse to
fine and back, and the mask head adds up all resolutions.

Level 0 has the image's resolution, each further level half of it; widths double from `base_filters` up to 16
times that. The bottleneck is the deepest level behind its spatial pyramid pooling (SPP). 32 filters and 6
levels, 1 channel in and 1 out, have 20,839,169 parameters with batch norm.

Volumes: each slice along the last axis (axial, in a NIfTI file of usual orientation) is an image of its own.
Slices join the batch and the maps are folded back, so features are (B, C, height, width, slices) and only the
first two sides are padded and halved. Slices share all parameters and, with batch norm, its statistics.

Differs: the papers under study name a YOLOv9 model and say no more; what follows is ours.
- YOLOv9's segmentation finds boxes and mixes prototype masks for each. Here every voxel gets a class, so no
  boxes, no prototypes, and no auxiliary branch (the paper's programmable gradients), made for the boxes.
- A level of full resolution stands in front, where YOLOv9 starts at half; all block widths follow one rule.
- Two convolutions side by side, which YOLOv9 merges into one after training, stay two: only batch norm
  allows it, and a model that is exchanged must keep its parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.models.base import Output, Segmenter
from wardround.models.norm import Norm, make_norm, needs_bias
from wardround.models.unet import convolution, init_he

WIDEST = 16  # times base_filters
FINEST = 2  # the neck's finest level; finer ones join in the mask head


class GELAN(Segmenter):
    """Encoder levels and SPP, a neck that goes down to the finest level and up again, a mask head.

    dropout: chance of a whole channel being dropped, in front of the neck and of the head.
    """

    needs_two = True

    def __init__(
        self, *, widths: Sequence[int], norm: Norm, depth: int, dropout: float, **sizes: int
    ) -> None:
        super().__init__(divisor=2 ** (len(widths) - 1), **sizes)
        self.finest = min(FINEST, len(widths) - 2)
        pyramid = widths[self.finest :]
        self.encoder = nn.ModuleList([unit(self.in_channels, widths[0], norm, size=3)])
        for level, (source, width) in enumerate(pairwise(widths), start=1):
            self.encoder.append(encoder_level(source, width, norm, depth, plain=level <= 2))
        self.spp = SPP(widths[-1], norm)
        self.dropout = nn.Dropout2d(dropout)
        self.top_down = nn.ModuleList(
            Up(ELAN(below + width, width, norm, depth)) for width, below in reversed(list(pairwise(pyramid)))
        )
        self.bottom_up = nn.ModuleList(
            Down(above, ELAN(above + width, width, norm, depth), norm) for above, width in pairwise(pyramid)
        )
        self.fuse = Fuse(pyramid, norm)
        self.refine = nn.ModuleList(
            Up(unit(below + width, width, norm, size=3))
            for width, below in reversed(list(pairwise(widths[: self.finest + 1])))
        )
        self.head = convolution(widths[0], self.num_outputs, 2, size=1)

    def output_layer(self) -> nn.Module:
        return self.head

    def padded_size(self, size: Sequence[int]) -> list[int]:
        """The sides of a slice are padded, slices are not added."""
        return [*super().padded_size(size[:2]), *size[2:]]

    def _output(self, x: Tensor) -> Output:
        slices = x.shape[2:][2:]  # none in 2D
        maps = self._encode(to_slices(x))
        bottleneck = maps.pop()
        neck = self._neck([*maps[self.finest :], self.dropout(bottleneck)])
        stages = neck[1:-1][::-1]  # between the bottleneck's level and the finest
        x = self.block(self.fuse, *neck)
        stages.append(x)
        for stage, skip in zip(self.refine, reversed(maps[: self.finest]), strict=True):
            x = self.block(stage, x, skip)
            stages.append(x)
        logits = from_slices(self.head(self.dropout(x)), slices)
        folded = tuple(from_slices(stage, slices) for stage in stages)
        return Output(logits, from_slices(bottleneck, slices), decoder=folded[-1], stages=folded)

    def _bottleneck(self, x: Tensor) -> Tensor:
        return from_slices(self._encode(to_slices(x))[-1], x.shape[2:][2:])

    def _encode(self, x: Tensor) -> list[Tensor]:
        """The output of every encoder level, fine to coarse; the last one behind the pyramid pooling."""
        maps: list[Tensor] = []
        for level in self.encoder:
            x = self.block(level, x)
            maps.append(x)
        maps[-1] = self.block(self.spp, x)
        return maps

    def _neck(self, maps: list[Tensor]) -> list[Tensor]:
        """The maps of the neck's levels, fine to coarse, each informed by all others."""
        *skips, x = maps
        down = [x]
        for stage, skip in zip(self.top_down, reversed(skips), strict=True):
            x = self.block(stage, x, skip)
            down.append(x)
        up = [down.pop()]
        for stage, skip in zip(self.bottom_up, reversed(down), strict=True):
            up.append(self.block(stage, up[-1], skip))
        return up


def gelan(
    *,
    in_channels: int,
    num_outputs: int,
    dimensions: Literal[2, 3] = 2,
    base_filters: Annotated[int, Field(ge=2)] = 32,
    levels: int = 6,
    norm: Norm = "batch",
    dropout: float = 0.0,
    depth: Annotated[int, Field(ge=1)] = 1,
) -> GELAN:
    """The network; depth: bottlenecks in each half of a GELAN block.

    Its first weights are those for a ReLU, which SiLU resembles. Without norm layers the deep levels start
    small: SiLU shrinks small values more than large ones.
    """
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": dimensions}
    widths = [base_filters * min(2**level, WIDEST) for level in range(levels)]
    return init_he(GELAN(widths=widths, norm=norm, depth=depth, dropout=dropout, **sizes))


# Slices


def to_slices(x: Tensor) -> Tensor:
    """(B, C, H, W, D) -> (B * D, C, H, W); an image stays as it is."""
    return x if x.dim() == 4 else x.movedim(-1, 1).flatten(0, 1)


def from_slices(x: Tensor, slices: Sequence[int]) -> Tensor:
    """(B * D, C, h, w) -> (B, C, h, w, D), the inverse of `to_slices`; slices: (D,), or () for an image."""
    return x.reshape(-1, *slices, *x.shape[1:]).movedim(1, -1) if slices else x


# Blocks


def unit(
    source: int, width: int, norm: Norm, *, size: int, stride: int = 1, act: bool = True
) -> nn.Sequential:
    """Convolution, norm, SiLU."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv"] = nn.Conv2d(source, width, size, stride=stride, padding=size // 2, bias=needs_bias(norm))
    layers["norm"] = make_norm(norm, width, 2)
    if act:
        layers["act"] = nn.SiLU(inplace=True)
    return nn.Sequential(layers)


def encoder_level(source: int, width: int, norm: Norm, depth: int, *, plain: bool) -> nn.Sequential:
    """Half the size, then a GELAN block; plain: halved by one convolution, as YOLOv9 begins."""
    down = unit(source, width, norm, size=3, stride=2) if plain else ADown(source, width, norm)
    return nn.Sequential(OrderedDict(down=down, elan=ELAN(width, width, norm, depth)))


class ELAN(nn.Module):
    """The GELAN block: split in two, two stages on the second half, all four pieces joined.

    It is called RepNCSPELAN4 in YOLOv9's public code.
    """

    def __init__(self, source: int, width: int, norm: Norm, depth: int) -> None:
        super().__init__()
        half = max(1, width // 2)
        self.split = unit(source, 2 * half, norm, size=1)
        self.first = elan_stage(half, norm, depth)
        self.second = elan_stage(half, norm, depth)
        self.join = unit(4 * half, width, norm, size=1)

    def forward(self, x: Tensor) -> Tensor:
        short, x = self.split(x).chunk(2, dim=1)
        first = self.first(x)
        second = self.second(first)
        joined: Tensor = self.join(torch.cat([short, x, first, second], dim=1))
        return joined


def elan_stage(width: int, norm: Norm, depth: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(csp=CSP(width, norm, depth), conv=unit(width, width, norm, size=3)))


class CSP(nn.Module):
    """Cross-stage partial: bottlenecks on one narrow copy, another goes past them, both are joined."""

    def __init__(self, width: int, norm: Norm, depth: int) -> None:
        super().__init__()
        half = max(1, width // 2)
        self.through = unit(width, half, norm, size=1)
        self.past = unit(width, half, norm, size=1)
        self.bottlenecks = nn.Sequential(*(Bottleneck(half, norm) for _ in range(depth)))
        self.join = unit(2 * half, width, norm, size=1)

    def forward(self, x: Tensor) -> Tensor:
        through = self.bottlenecks(self.through(x))
        joined: Tensor = self.join(torch.cat([through, self.past(x)], dim=1))
        return joined


class Bottleneck(nn.Module):
    """A 3x3 and a 1x1 convolution side by side, then a 3x3, added to the input."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.wide = unit(width, width, norm, size=3, act=False)
        self.point = unit(width, width, norm, size=1, act=False)
        self.conv = unit(width, width, norm, size=3)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.conv(F.silu(self.wide(x) + self.point(x)))
        return added


class ADown(nn.Module):
    """Half the size: half of the channels by a convolution, the others by their maximum."""

    def __init__(self, source: int, width: int, norm: Norm) -> None:
        super().__init__()
        self.sources = [source - source // 2, source // 2]
        self.conv = unit(self.sources[0], width - width // 2, norm, size=3, stride=2)
        self.point = unit(self.sources[1], width // 2, norm, size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 2, stride=1)
        first, second = torch.split(x, self.sources, dim=1)
        second = F.max_pool2d(second, 3, stride=2, padding=1)
        return torch.cat([self.conv(first), self.point(second)], dim=1)


class SPP(nn.Module):
    """Pyramid pooling: the maximum over 5, 9 and 13 voxels a side joins the map itself."""

    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        half = max(1, width // 2)
        self.narrow = unit(width, half, norm, size=1)
        self.join = unit(4 * half, width, norm, size=1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.narrow(x)]
        for _ in range(3):
            maps.append(F.max_pool2d(maps[-1], 5, stride=1, padding=2))
        joined: Tensor = self.join(torch.cat(maps, dim=1))
        return joined


class Up(nn.Module):
    """Twice the size by repeating voxels, [skip | upsampled], and what merges them."""

    def __init__(self, merge: nn.Module) -> None:
        super().__init__()
        self.merge = merge

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        merged: Tensor = self.merge(torch.cat([skip, repeat_voxels(x, 2)], dim=1))
        return merged


class Down(nn.Module):
    """Half the size, [skip | halved], and what merges them."""

    def __init__(self, width: int, merge: nn.Module, norm: Norm) -> None:
        super().__init__()
        self.down = ADown(width, width, norm)
        self.merge = merge

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        merged: Tensor = self.merge(torch.cat([skip, self.down(x)], dim=1))
        return merged


class Fuse(nn.Module):
    """The sum of all the neck's levels at the finest one's size, smoothed by a convolution."""

    def __init__(self, widths: Sequence[int], norm: Norm) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(unit(width, widths[0], norm, size=1) for width in widths)
        self.smooth = unit(widths[0], widths[0], norm, size=3)

    def forward(self, *maps: Tensor) -> Tensor:
        parts = [
            repeat_voxels(f(x), 2**level)
            for level, (f, x) in enumerate(zip(self.laterals, maps, strict=True))
        ]
        smoothed: Tensor = self.smooth(torch.stack(parts).sum(dim=0))
        return smoothed


def repeat_voxels(x: Tensor, times: int) -> Tensor:
    """Every voxel `times` times along both sides."""
    return F.interpolate(x, scale_factor=float(times), mode="nearest") if times > 1 else x
