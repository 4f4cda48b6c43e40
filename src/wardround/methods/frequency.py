"""Amplitude and phase of images: a scanner's style, and the anatomy.

A window holds the amplitudes of the frequencies -b..b along every spatial axis, 0 in the middle: the mean
intensity and slow shading. Images are (B, C, *spatial), 2D or 3D; windows (B, C, 2b+1, ...). Amplitudes
are per voxel, so that images of different sizes compare: the middle one is |mean intensity|.

>>> window = amplitude_window(torch.full((1, 1, 4, 4), -3.0), half_width=1)
>>> window.shape, window[0, 0, 1, 1]
(torch.Size([1, 1, 3, 3]), tensor(3.))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType

import torch
from torch import Tensor

from wardround.errors import DataError
from wardround.text import format_size

NOTHING = 1e-5  # below it, a mean intensity is rounding
TOO_BRIGHT = 1e30  # beyond it, float32 overflows soon


def half_width(sides: Sequence[int], share: float) -> int:
    """b = floor(L · shortest side), without the rounding error of the product.

    >>> half_width((384, 400), 0.01), half_width((100, 100), 0.29)
    (3, 29)
    """
    return math.floor(round(share * min(sides), 9))


def amplitude_window(image: Tensor, half_width: int) -> Tensor:
    """|F| at the lowest frequencies of each case and channel: (B, C, *spatial) -> (B, C, 2b+1, ...)."""
    here = _where(image)
    window = _transform(image.to(here))[low_frequencies(image.shape[2:], half_width, here)].abs()
    return window.to(image.device)


def restyle(image: Tensor, amplitude: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """The image with its window's amplitudes moved by `share` towards others; every phase is kept.

    Re F⁻¹([(1-λ)A + λA'] e^{iP}) inside the window, the rest as it is. Only the change is transformed
    back, so a share of 0 gives the image itself, bit for bit. amplitude: (B or 1, C, 2b+1, ...); share: one
    number, or one a case.
    """
    if isinstance(share, Tensor):
        share = share.reshape(-1, *[1] * (image.ndim - 1)).to(_where(image))
    here = _where(image)
    index = low_frequencies(image.shape[2:], amplitude.shape[-1] // 2, here)
    own = _transform(image.to(here))[index]
    change = share * (amplitude.to(here) - own.abs())
    spectrum = torch.zeros(image.shape, dtype=own.dtype, device=here)
    spectrum[index] = torch.polar(change, own.angle())
    moved: Tensor = torch.fft.ifftn(spectrum, dim=_spatial(image), norm="forward").real
    return image + moved.to(image.device)


def clip_to_range(image: Tensor, like: Tensor) -> Tensor:
    """The image, clipped to the range of another, for each case and channel."""
    axes = _spatial(like)
    return image.clamp(like.amin(axes, keepdim=True), like.amax(axes, keepdim=True))


def is_blank(window: Tensor) -> bool:
    """Whether a window holds the mean intensity alone, and that is 0, as in z-scored images."""
    return window.shape[-1] == 1 and float(window.max()) < NOTHING


def check_amplitudes(window: Tensor) -> str | None:
    """Why these cannot be the amplitudes of any image, or None."""
    least, most = float(window.min()), float(window.max())
    return f"amplitudes from {least:g} to {most:g} cannot be" if least < 0 or most > TOO_BRIGHT else None


def low_frequencies(
    sides: Sequence[int], half_width: int, device: torch.device | None = None
) -> tuple[EllipsisType | Tensor, ...]:
    """Where the frequencies -b..b of every axis lie in a spectrum, whose first entry is frequency 0."""
    if 2 * half_width + 1 > min(sides):
        size = format_size(sides)
        raise DataError(
            f"a window of {2 * half_width + 1} frequencies does not fit an image of {size}. "
            "Set method.window smaller."
        )
    steps = torch.arange(-half_width, half_width + 1, device=device)
    places = [
        (steps % side).reshape([-1 if other == axis else 1 for other in range(len(sides))])
        for axis, side in enumerate(sides)
    ]
    return (..., *places)


def _where(image: Tensor) -> torch.device:
    """Where its spectrum is computed: older systems of Apple's have no complex numbers on mps."""
    return torch.device("cpu") if image.device.type == "mps" else image.device


def _transform(image: Tensor) -> Tensor:
    spectrum: Tensor = torch.fft.fftn(image, dim=_spatial(image), norm="forward")
    return spectrum


def _spatial(image: Tensor) -> tuple[int, ...]:
    return tuple(range(2, image.ndim))
