"""A network of one's own: any `nn.Module` that maps (B, channels, *spatial) to logits of the same size."""

from __future__ import annotations

from torch import Tensor, nn


class TinyNet(nn.Module):
    """Three convolutions; channels and classes are filled in from the data by their names."""

    def __init__(self, in_channels: int, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, num_classes, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.layers(image)
        return logits
