"""Autoencoder: the 3D U-Net without its skips, so that everything passes the bottleneck.

A backbone that SAFCF compares in its Table 12, without further details. Ours has the widths of Çiçek et al.
(see `unet.py`), and the decoder reads the upsampled map alone.

2D and 3D have the same widths: base_filters 32 and 4 levels give 64, 128, 256, 512; with 5 levels the 2D
network has those of Ronneberger's U-Net, 64 to 1024.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from wardround.models.base import Output
from wardround.models.norm import Norm
from wardround.models.unet import UNet, double_convolution, doubling_encoder, init_he, up_convolution


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
    """Çiçek's 3D U-Net, or its 2D likeness, without skips."""
    widths, encoder = doubling_encoder(in_channels, base_filters, levels, norm, dimensions)
    decoder = [
        PlainStage(below, width, norm, dimensions) for width, below in reversed(list(pairwise(widths)))
    ]
    model = Autoencoder(
        in_channels=in_channels,
        num_outputs=num_outputs,
        dimensions=dimensions,
        encoder=encoder,
        decoder=decoder,
        last_width=widths[0],
        dropout=dropout,
    )
    return init_he(model)
