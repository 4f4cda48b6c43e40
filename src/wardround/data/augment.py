"""Augmentation of whole batches on the device, drawn from named streams."""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from wardround.data.cases import Batch
from wardround.engine.seeding import generator


class Shading(BaseModel):
    """How intensities vary; the anatomy stays where it is.

    intensity: largest relative change of scale and shift (in standard deviations); noise: standard
    deviation of added noise; gamma: the contrast curve's exponent lies between 1/(1 + gamma) and
    1 + gamma; blur: largest standard deviation of a Gaussian blur, in voxels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    intensity: float = Field(0.1, ge=0, le=1)
    noise: float = Field(0.0, ge=0)
    gamma: float = Field(0.0, ge=0)
    blur: float = Field(0.0, ge=0, le=10)

    def _shaded(self, image: Tensor, draw: torch.Generator) -> Tensor:
        """The same scans seen by another scanner; a setting of 0 draws nothing and changes nothing."""
        if self.blur:
            image = blurred(image, torch.rand(len(image), generator=draw) * self.blur)
        if self.gamma:
            power = (1 + self.gamma) ** (torch.rand(len(image), generator=draw) * 2 - 1)
            image = curved(image, power)
        if self.intensity:
            change = (torch.rand(2, len(image), generator=draw) * 2 - 1) * self.intensity
            scale, shift = change.to(image.device)
            image = image * (1 + _fit(scale, image)) + _fit(shift, image)
        if self.noise:
            image = image + self.noise * torch.randn(image.shape, generator=draw).to(image.device)
        return image


class Augmentation(Shading):
    """How training batches vary.

    flip: chance for each case to be mirrored along one random axis; second_view: how the second view
    differs, for objectives that compare two. The first view is the ordinary one, whoever asks.
    """

    flip: float = Field(0.5, ge=0, le=1)
    # Scale and shift alone would not do: a norm layer takes them out again, and the views would be equal.
    second_view: Shading = Shading(intensity=0.1, noise=0.1, gamma=0.3, blur=1.0)

    def __call__(
        self, batch: Batch, seed: int, stream: tuple[object, ...], views: int = 1
    ) -> tuple[Batch, Tensor | None]:
        """The augmented batch, and a second view of it (same flip, other intensities) if asked."""
        draw = generator(seed, *stream)
        if self.flip:
            batch = self._flipped(batch, draw)
        first = self._shaded(batch.image, draw)
        second = self.second_view._shaded(batch.image, draw) if views == 2 else None
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


def curved(image: Tensor, power: Tensor) -> Tensor:
    """Every case and channel raised to its power (B,) between its own darkest and brightest voxel."""
    axes = tuple(range(2, image.ndim))
    low, high = image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)
    span = (high - low).clamp_min(1e-12)
    return ((image - low) / span) ** _fit(power.to(image.device), image) * span + low


def blurred(image: Tensor, sigma: Tensor) -> Tensor:
    """Every case smoothed by a Gaussian of its own width (B,), in voxels; 0 leaves it as it is.

    A sum of shifted copies, axis by axis, edges repeated.
    """
    reach = max(1, int(torch.ceil(3 * sigma.max())))
    offsets = torch.arange(-reach, reach + 1)
    taps = torch.exp(-0.5 * (offsets / sigma.clamp_min(1e-3)[:, None]) ** 2)
    taps = (taps / taps.sum(dim=1, keepdim=True)).to(image)  # (B, taps)
    for axis in range(2, image.ndim):
        place = torch.arange(image.shape[axis], device=image.device)
        total = torch.zeros_like(image)
        for tap, offset in zip(taps.unbind(dim=1), offsets.tolist(), strict=True):
            shifted = image.index_select(axis, (place + offset).clamp(0, image.shape[axis] - 1))
            total.addcmul_(_fit(tap, image), shifted)
        image = total
    return image


def _fit(values: Tensor, like: Tensor) -> Tensor:
    """(B,) -> (B, 1, ...) so that it broadcasts over a batch."""
    return values.view(-1, *[1] * (like.ndim - 1))
