"""Augment: random changes of whole batches on the device, drawn from named streams.

Rotation, scaling and elastic deformation are one resampling (image linear, label nearest), so that a case is
interpolated at most once. A setting of 0 draws no random numbers, so it shifts no other draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from wardround.data.cases import Batch, to_device
from wardround.data.serving.mirroring import find_mirror_axes, mirror
from wardround.seeding import generator
from wardround.settings import Settings

INTERVALS = 4  # between the knots of the elastic grid, along each axis
DROP_CHANNELS = 0.25  # measured: docs/decisions/0012-absent-channels-are-zeros.md
BIAS_ORDER = 3  # highest total degree of the bias field's polynomial


Chance = Annotated[float, Field(ge=0, le=1, description="probability for every case by itself")]


class Chances(Settings):
    """How probable each change of intensity is."""

    blur: Chance = 1.0
    low_resolution: Chance = 1.0
    gamma: Chance = 1.0
    contrast: Chance = 1.0
    bias: Chance = 1.0
    intensity: Chance = 1.0
    noise: Chance = 1.0


class Shading(Settings):
    """How intensities vary; the anatomy stays where it is.

    intensity: largest relative change of scale and shift (in standard deviations); noise: standard
    deviation of added noise; gamma: the contrast curve's exponent lies between 1/(1 + gamma) and
    1 + gamma; inverted: probability that it acts on the negative; contrast: largest relative change of the
    distance from the mean, within the image's range; blur: largest standard deviation of a Gaussian blur, in
    voxels; low_resolution: sides shrink to no less than 1 - low_resolution of their voxels, and grow again;
    bias: a smooth field as of a receiver coil multiplies the image by 1/(1 + bias) to 1 + bias. chances:
    how probable each of these is.
    """

    intensity: float = Field(0.1, ge=0, le=1)
    noise: float = Field(0.0, ge=0)
    gamma: float = Field(0.0, ge=0)
    blur: float = Field(0.0, ge=0, le=10)
    bias: float = Field(0.0, ge=0, le=10)
    inverted: float = Field(0.0, ge=0, le=1)
    contrast: float = Field(0.0, ge=0, le=1)
    low_resolution: float = Field(0.0, ge=0, le=0.9)
    chances: Chances = Chances()

    @property
    def _changes_intensity(self) -> bool:
        return any(getattr(self, change) and chance for change, chance in self.chances)

    def _shade(self, image: Tensor, draw: torch.Generator) -> Tensor:
        """The same scans as another scanner would show them."""
        count = len(image)
        if self.blur:
            sigma = torch.rand(count, generator=draw) * self.blur
            image = self._change("blur", image, draw, blur, sigma)
        if self.low_resolution:
            zoom = 1 - torch.rand(count, generator=draw) * self.low_resolution
            image = self._change("low_resolution", image, draw, lower_resolution, zoom)
        if self.gamma:
            power = (1 + self.gamma) ** (torch.rand(count, generator=draw) * 2 - 1)
            sign = torch.ones(count)
            if self.inverted:
                sign[torch.rand(count, generator=draw) < self.inverted] = -1
            image = self._change("gamma", image, draw, apply_gamma, power, sign)
        if self.contrast:
            factor = 1 + (torch.rand(count, generator=draw) * 2 - 1) * self.contrast
            image = self._change("contrast", image, draw, change_contrast, factor)
        if self.bias:
            field = draw_bias_field(count, image.ndim - 2, math.log1p(self.bias), draw)
            image = self._change("bias", image, draw, apply_bias_field, *field)
        if self.intensity:
            scale, shift = (torch.rand(2, count, generator=draw) * 2 - 1) * self.intensity
            image = self._change("intensity", image, draw, scale_and_shift, scale, shift)
        if self.noise:
            image = self._add_noise(image, draw)
        return image

    def _change(
        self,
        name: str,
        image: Tensor,
        draw: torch.Generator,
        change: Callable[..., Tensor],
        *drawn: Tensor,
    ) -> Tensor:
        """Change all cases, or each with its chance; drawn: what every case drew, chosen or not."""
        chosen = self._choose(name, len(image), draw)
        if chosen is None:
            return change(image, *drawn)
        if not len(chosen):
            return image
        place = to_device(chosen, image.device)
        return image.index_copy(0, place, change(image[place], *(numbers[chosen] for numbers in drawn)))

    def _choose(self, name: str, count: int, draw: torch.Generator) -> Tensor | None:
        """The cases that change; None for all of them."""
        chance: float = getattr(self.chances, name)
        return None if chance == 1 else (torch.rand(count, generator=draw) < chance).nonzero()[:, 0]

    def _add_noise(self, image: Tensor, draw: torch.Generator) -> Tensor:
        chosen = self._choose("noise", len(image), draw)
        if chosen is None:
            return image + self.noise * to_device(torch.randn(image.shape, generator=draw), image.device)
        # Noise takes time to draw, so only chosen cases do, each from a stream of its own.
        seeds = torch.randint(2**62, (len(image),), generator=draw)
        image = image.clone() if len(chosen) else image
        for place in chosen.tolist():
            own = torch.Generator().manual_seed(int(seeds[place]))
            noise = torch.randn(image.shape[1:], generator=own)
            image[place] += self.noise * to_device(noise, image.device)
        return image


class Augmentation(Shading):
    """How training batches vary.

    flip: probability for each case to be mirrored along one random axis; mirror: the same along each axis,
    whatever happens along the others; mirror_axes: the axes (from 0 on) that these two and test-time
    augmentation mirror along, null for all; leave out one along which classes that look alike, such as left
    and right, are told apart; spatial: probability for each case to be rotated, scaled and deformed; rotate:
    the largest angle in degrees, in the plane or about a random axis; scale: sizes change by a factor between
    1/(1 + scale) and 1 + scale; elastic: how far the knots of a coarse grid move at most, as a share of their
    distance (up to 0.4, where no fold can arise). All in voxels: where these are far from cubes, resample
    first, or name the axis of thick slices. slice_axis: of volumes, the axis (0 to 2) along which nothing is
    rotated, scaled or deformed. second_view: how the second view differs, for objectives that compare two.
    The first view does not depend on it. drop_channels: probability for each channel of a case to be left out
    (zeros), never the last one, so that the network learns to do without; null: 0.25 where a client lacks
    channels, else 0.
    """

    flip: float = Field(0.5, ge=0, le=1)
    mirror: float = Field(0.0, ge=0, le=1)
    mirror_axes: tuple[Annotated[int, Field(ge=0, le=2)], ...] | None = None
    spatial: float = Field(0.0, ge=0, le=1)
    rotate: float = Field(15.0, ge=0, le=180)
    scale: float = Field(0.1, ge=0, le=1)
    elastic: float = Field(0.0, ge=0, le=0.4)
    slice_axis: int | None = Field(None, ge=0, le=2)
    # Scale and shift alone would not do: a norm layer takes them out again, and the views would be equal.
    second_view: Shading = Shading(intensity=0.1, noise=0.1, gamma=0.3, blur=1.0)
    drop_channels: float | None = Field(None, ge=0, lt=1)

    @field_validator("mirror_axes")
    @classmethod
    def _check_axes(cls, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Each once, and ascending."""
        if axes is not None and len(set(axes)) < len(axes):
            raise ValueError(f"it is {list(axes)}; name each axis once")
        return None if axes is None else tuple(sorted(axes))

    @model_validator(mode="after")
    def _check_spatial(self) -> Self:
        """Refuse a rotation, scale or deformation that would never be applied."""
        asked = [
            name for name in ("rotate", "scale", "elastic", "slice_axis") if name in self.model_fields_set
        ]
        if asked and "spatial" not in self.model_fields_set:
            raise ValueError(
                f"{asked[0]} does nothing while spatial is 0; set spatial to the share of cases, such as 0.5"
            )
        return self

    @property
    def changes_nothing(self) -> bool:
        """Whether every case is the same in all epochs."""
        mirrors = (self.flip or self.mirror) and self.mirror_axes != ()
        return not (mirrors or self.spatial or self.drop_channels or self._changes_intensity)

    def for_channels(self, *, lacking: bool) -> Augmentation:
        """The same with `drop_channels` decided: a number where channels may be absent, else None."""
        if not lacking or self.drop_channels is not None:
            return self
        return self.model_copy(update={"drop_channels": DROP_CHANNELS})

    def __call__(
        self, batch: Batch, seed: int, stream: tuple[object, ...], views: int = 1
    ) -> tuple[Batch, Tensor | None]:
        """The augmented batch, and a second view of it (same geometry, other intensities) if asked."""
        draw = generator(seed, *stream)
        axes = find_mirror_axes(self.mirror_axes, batch.label.ndim - 1)
        if self.flip and axes:
            chosen = torch.rand(len(batch), generator=draw) < self.flip
            drawn = torch.randint(len(axes), (len(batch),), generator=draw)
            batch = mirror(batch, chosen[:, None] & (drawn[:, None] == torch.arange(len(axes))), axes)
        if self.mirror and axes:
            batch = mirror(batch, torch.rand(len(batch), len(axes), generator=draw) < self.mirror, axes)
        if self.spatial:
            batch = self._transform(batch, draw)
        absent = None
        if self.drop_channels is not None:
            absent = drop_channels(batch.image, self.drop_channels, draw)
            batch = replace(batch, image=batch.image.masked_fill(absent, 0))
        first = self._shade(batch.image, draw)
        second = self.second_view._shade(batch.image, draw) if views == 2 else None
        if absent is not None:  # shading adds to zeros too
            first = first.masked_fill(absent, 0)
            second = None if second is None else second.masked_fill(absent, 0)
        return replace(batch, image=first), second

    def _transform(self, batch: Batch, draw: torch.Generator) -> Batch:
        """Rotate, scale and deform some cases; the others keep their bytes."""
        count, dimensions = len(batch), batch.label.ndim - 1
        # Every case draws, chosen or not: what one does must not depend on its neighbours.
        chosen = (torch.rand(count, generator=draw) < self.spatial).nonzero()[:, 0]
        still = self.slice_axis if dimensions == 3 else None
        degrees = (torch.rand(count, generator=draw) * 2 - 1) * self.rotate
        matrix = make_rotations(degrees, dimensions, draw, still)
        size = (1 + self.scale) ** (torch.rand(count, generator=draw) * 2 - 1)
        matrix = matrix / size.view(-1, 1, 1)
        knots = None
        if self.elastic:
            shape = (count, dimensions, *[INTERVALS + 3] * dimensions)
            knots = (torch.rand(shape, generator=draw) * 2 - 1)[chosen] * self.elastic
        if still is not None:
            matrix[:, still, still] = 1
            if knots is not None:
                knots[:, still] = 0
        if not len(chosen):
            return batch
        place = to_device(chosen, batch.image.device)
        grid = make_source_grid(matrix[chosen], knots, batch.image[place])
        image = resample(batch.image[place], grid, "bilinear")
        label = resample(batch.label[place][:, None], grid, "nearest")[:, 0]
        return replace(
            batch,
            image=batch.image.index_copy(0, place, image),
            label=batch.label.index_copy(0, place, label),
        )


# Channels


def drop_channels(image: Tensor, chance: float, draw: torch.Generator) -> Tensor:
    """Which channels are absent, (B, C, 1, ...): those that hold zeros alone, and others by chance.

    A case keeps one of its channels, whatever it draws.
    """
    number = to_device(torch.rand(image.shape[:2], generator=draw), image.device)
    is_there = image.flatten(2).any(dim=2)
    last = number.masked_fill(~is_there, -1).argmax(dim=1, keepdim=True)
    absent = ~is_there | (number < chance).scatter(1, last, value=False)
    return absent.view(*absent.shape, *[1] * (image.ndim - 2))


# Geometry


def make_rotations(
    degrees: Tensor, dimensions: int, draw: torch.Generator, about: int | None = None
) -> Tensor:
    """(B,) angles -> (B, d, d) rotations, in the plane or each about an axis drawn from the sphere.

    about: the axis of all rotations of volumes, in place of drawn ones.
    """
    angle = torch.deg2rad(degrees)
    if dimensions == 2:
        cos, sin = torch.cos(angle), torch.sin(angle)
        return torch.stack([cos, -sin, sin, cos], dim=1).view(-1, 2, 2)
    if about is None:
        axis = F.normalize(torch.randn(len(degrees), 3, generator=draw), dim=1)
    else:
        axis = torch.eye(3)[about].expand(len(degrees), 3)
    cross = torch.linalg.cross(torch.eye(3).expand(len(degrees), 3, 3), axis[:, None], dim=2)
    cos, sin = torch.cos(angle).view(-1, 1, 1), torch.sin(angle).view(-1, 1, 1)
    # Rodrigues' formula; `cross` is the matrix of v -> axis x v
    rotation: Tensor = cos * torch.eye(3) + sin * cross + (1 - cos) * axis[:, :, None] * axis[:, None, :]
    return rotation


def make_source_grid(matrix: Tensor, knots: Tensor | None, image: Tensor) -> Tensor:
    """Where every voxel takes its value from, in the coordinates of grid_sample: (B, *spatial, d).

    matrix: (B, d, d), voxel offsets from the centre to offsets in the source; knots: (B, d, *grid)
    displacements on top, as shares of the knots' distance. Coordinates run from -1 to 1 along every side,
    so a rotation of voxels is no rotation of coordinates unless the sides are equal.
    """
    sides = torch.tensor(image.shape[2:], dtype=matrix.dtype)
    theta = matrix * sides[None, None, :] / sides[None, :, None]
    theta = theta.flip(1, 2)  # grid_sample names the last axis first
    shift = torch.zeros(len(matrix), len(sides), 1)
    theta = torch.cat([theta, shift], dim=2).to(image)
    grid = F.affine_grid(theta, [len(matrix), 1, *image.shape[2:]], align_corners=False)
    if knots is not None:
        bases = [spline_basis(side) for side in image.shape[2:]]
        field = evaluate_separable(knots.to(image) * (2 / INTERVALS), bases)  # (B, d, *spatial)
        grid = grid + field.flip(1).movedim(1, -1)
    return grid


def resample(values: Tensor, grid: Tensor, mode: str) -> Tensor:
    """Sample (B, C, *spatial) at the points of a grid, edges repeated; integers stay integers."""
    moved: Tensor = F.grid_sample(values.to(grid), grid, mode, padding_mode="border", align_corners=False)
    return moved.to(values.dtype)


def evaluate_separable(coefficients: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Sum of separable functions: (B, C, *numbers) and a (side, number) basis an axis -> (B, C, *spatial)."""
    for axis, basis in enumerate(bases, start=2):
        coefficients = torch.tensordot(coefficients, basis.to(coefficients), ([axis], [1])).movedim(-1, axis)
    return coefficients


def spline_basis(side: int) -> Tensor:
    """(side, INTERVALS + 3): weights of uniform cubic B-splines at voxel centres; each row sums to one."""
    place = (torch.arange(side, dtype=torch.float64) + 0.5) / side * INTERVALS
    distance = (place[:, None] - (torch.arange(INTERVALS + 3, dtype=torch.float64) - 1)).abs()
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = (2 - distance).clamp_min(0) ** 3 / 6
    return torch.where(distance < 1, near, far)


# Intensities


def draw_bias_field(
    count: int, dimensions: int, strength: float, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The coefficients of a smooth field for every case, and how strong it is, up to `strength`."""
    shape = (count, 1, *[BIAS_ORDER + 1] * dimensions)
    weight = torch.randn(shape, generator=draw)
    amount = torch.rand(count, generator=draw) * strength
    degrees = torch.cartesian_prod(*[torch.arange(BIAS_ORDER + 1)] * dimensions).sum(dim=1)
    weight *= ((degrees > 0) & (degrees <= BIAS_ORDER)).view(shape[2:])  # constants are for `intensity`
    return weight, amount


def apply_bias_field(image: Tensor, weight: Tensor, amount: Tensor) -> Tensor:
    """Multiply every case by its field, between exp(-amount) and exp(amount).

    The field scales the brightness above the darkest voxel: a coil does not brighten the background.
    """
    field = evaluate_separable(weight.to(image), [polynomial_basis(side) for side in image.shape[2:]])
    axes = tuple(range(1, image.ndim))
    field = field / field.abs().amax(axes, keepdim=True).clamp_min(1e-12)
    low = image.amin(tuple(range(2, image.ndim)), keepdim=True)
    return (image - low) * torch.exp(_fit(amount.to(image), image) * field) + low


def polynomial_basis(side: int) -> Tensor:
    """(side, BIAS_ORDER + 1): the Legendre polynomials of degree 0 to 3 at the voxels' centres."""
    x = (2 * torch.arange(side, dtype=torch.float64) + 1) / side - 1
    return torch.stack([torch.ones_like(x), x, (3 * x**2 - 1) / 2, (5 * x**3 - 3 * x) / 2], dim=1)


def apply_gamma(image: Tensor, power: Tensor, sign: Tensor | None = None) -> Tensor:
    """Raise every case and channel to its power (B,), between its own darkest and brightest voxel.

    sign: -1 for cases whose negative is raised.
    """
    if sign is not None and bool((sign < 0).any()):
        signs = _fit(to_device(sign, image.device), image)
        return apply_gamma(image * signs, power) * signs
    low, high = find_range(image)
    span = (high - low).clamp_min(1e-12)
    return ((image - low) / span) ** _fit(power.to(image.device), image) * span + low


def change_contrast(image: Tensor, factor: Tensor) -> Tensor:
    """Multiply the distance from the mean of every case and channel by its factor (B,), within its range."""
    mean = image.mean(tuple(range(2, image.ndim)), keepdim=True)
    changed = (image - mean) * _fit(to_device(factor, image.device), image) + mean
    return changed.clamp(*find_range(image))


def find_range(image: Tensor) -> tuple[Tensor, Tensor]:
    """The darkest and the brightest voxel of every case and channel."""
    axes = tuple(range(2, image.ndim))
    return image.amin(axes, keepdim=True), image.amax(axes, keepdim=True)


def scale_and_shift(image: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Multiply every case by 1 + scale and add its shift, (B,) each."""
    scale, shift = to_device(torch.stack([scale, shift]), image.device)
    return (image * (1 + _fit(scale, image))).add_(_fit(shift, image))


def lower_resolution(image: Tensor, zoom: Tensor) -> Tensor:
    """Take every case to its share (B,) of voxels a side by the nearest, and back by linear interpolation."""
    size, mode = image.shape[2:], "bilinear" if image.ndim == 4 else "trilinear"
    changed = []
    for case, share in zip(image.unbind(), zoom.tolist(), strict=True):
        coarse = F.interpolate(
            case[None], [max(1, round(side * share)) for side in size], mode="nearest-exact"
        )
        changed.append(F.interpolate(coarse, size, mode=mode))
    return torch.cat(changed)


def blur(image: Tensor, sigma: Tensor) -> Tensor:
    """Smooth every case by a Gaussian of its own width (B,), in voxels; 0 changes nothing.

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
