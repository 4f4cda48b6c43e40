"""Networks as users write them, for tests: `user_nets:Small` and others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.models.base import Output, Segmenter


class Small(nn.Module):
    """Two poolings, skips, batch norm; in 2D and 3D."""

    def __init__(self, in_channels: int, num_classes: int, spatial_dims: int = 2, width: int = 4) -> None:
        super().__init__()
        three = spatial_dims == 3
        conv, norm = (nn.Conv3d, nn.BatchNorm3d) if three else (nn.Conv2d, nn.BatchNorm2d)

        def block(source: int, target: int) -> nn.Sequential:
            return nn.Sequential(conv(source, target, 3, padding=1), norm(target), nn.ReLU(inplace=True))

        self.pool = nn.MaxPool3d(2) if three else nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.one, self.two, self.deep = (
            block(in_channels, width),
            block(width, width),
            block(width, 2 * width),
        )
        self.four, self.five = block(3 * width, width), block(2 * width, width)
        self.out = conv(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = self.two(self.pool(a))
        y = self.deep(self.pool(b))
        y = self.four(torch.cat([self.up(y), b], dim=1))
        y = self.five(torch.cat([self.up(y), a], dim=1))
        logits: Tensor = self.out(y)
        return logits


class Flat(nn.Conv2d):
    """One convolution: it has no inside to show."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)


class Rgb(nn.Module):
    """For colour images and two classes alone; grows by functions, and writes into its own maps."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 2, stride=2)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        y = F.relu_(y)
        logits: Tensor = self.out(F.interpolate(y, scale_factor=2.0))
        return logits


class Tokens(nn.Module):
    """A transformer on patches of 4, for images of 32; with a class token nobody knows its grid."""

    def __init__(self, in_channels: int, num_classes: int, class_token: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(in_channels, 8, 4, stride=4)
        self.places = nn.Parameter(torch.zeros(1, 64, 8))
        self.extra = nn.Parameter(torch.zeros(1, 1, 8)) if class_token else None
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.expand = nn.ConvTranspose2d(8, num_classes, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x).flatten(2).transpose(1, 2) + self.places
        if self.extra is not None:
            y = torch.cat([self.extra.expand(len(y), -1, -1), y], dim=1)
        y = self.block(y)[:, -64:]
        logits: Tensor = self.expand(y.transpose(1, 2).reshape(len(y), 8, 8, 8))
        return logits


class Reads(nn.Module):
    """Looks at its numbers on the way, so it cannot run without any."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.net = Small(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if x.abs().max().item() < 1e6 else 0.0
        logits: Tensor = self.net(x * scale)
        return logits


class Own(Segmenter):
    """Already speaks our language."""

    def __init__(self, in_channels: int, num_outputs: int, dimensions: int) -> None:
        super().__init__(in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions, divisor=1)
        self.body, self.head = nn.Conv2d(in_channels, 3, 3, padding=1), nn.Conv2d(3, num_outputs, 1)

    def _output(self, x: Tensor) -> Output:
        body = self._bottleneck(x)
        return Output(self.head(body), body, body, (body,))

    def _bottleneck(self, x: Tensor) -> Tensor:
        body: Tensor = self.body(x)
        return body


class Halves(nn.Conv2d):
    """Gives logits of half the size."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes, 2, stride=2)


def function(in_channels: int, num_classes: int) -> nn.Module:
    return Small(in_channels, num_classes)


class NotANetwork:
    pass
