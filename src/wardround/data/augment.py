"""Augmentation of whole batches on the device, drawn from named streams."""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from wardround.data.cases import Batch
from wardround.engine.seeding import generator


class Augmentation(BaseModel):
    """How training batches vary.

    flip: chance for each case to be mirrored along one random axis; intensity: largest relative change
    of scale and shift (in standard deviations); noise: standard deviation of added noise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    flip: float = Field(0.5, ge=0, le=1)
    intensity: float = Field(0.1, ge=0, le=1)
    noise: float = Field(0.0, ge=0)

    def __call__(
        self, batch: Batch, seed: int, stream: tuple[object, ...], views: int = 1
    ) -> tuple[Batch, Tensor | None]:
        """The augmented batch, and a second view of it (same flip, other intensities) if asked."""
        draw = generator(seed, *stream)
        if self.flip:
            batch = self._flipped(batch, draw)
        first = self._shaded(batch.image, draw)
        second = self._shaded(batch.image, draw) if views == 2 else None
        return replace(batch, image=first), second

    def _flipped(self, batch: Batch, draw: torch.Generator) -> Batch:
        dimensions = batch.label.ndim - 1
        chosen = torch.rand(len(batch), generator=draw) < self.flip
        axes = torch.randint(dimensions, (len(batch),), generator=draw)
        image, label = batch.image, batch.label
        for axis in range(dimensions):
            mask = (chosen & (axes == axis)).to(image.device)
            image = torch.where(_fit(mask, image), image.flip(axis + 2), image)
            label = torch.where(_fit(mask, label), label.flip(axis + 1), label)
        return replace(batch, image=image, label=label)

    def _shaded(self, image: Tensor, draw: torch.Generator) -> Tensor:
        if self.intensity:
            change = (torch.rand(2, len(image), generator=draw) * 2 - 1) * self.intensity
            scale, shift = change.to(image.device)
            image = image * (1 + _fit(scale, image)) + _fit(shift, image)
        if self.noise:
            image = image + self.noise * torch.randn(image.shape, generator=draw).to(image.device)
        return image


def _fit(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...) so that it broadcasts over a batch."""
    return values.view(-1, *[1] * (like.ndim - 1))
