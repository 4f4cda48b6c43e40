"""Amplitude windows and restyling: golden vectors, NumPy's FFT as a second opinion, edges."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import vectors

from wardround.errors import DataError
from wardround.methods.frequency import (
    amplitude_window,
    clip_to_range,
    half_width,
    is_blank,
    low_frequencies,
    restyle,
)

GOLDEN = vectors("feddg")


def images(*shape: Any, seed: Any = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numpy_mix(image: Any, other: Any, share: Any, b: Any) -> Any:
    """The paper's formula on whole, centred spectra with an explicit mask M, one channel."""
    spectrum, foreign = np.fft.fftn(image), np.abs(np.fft.fftn(other))
    amplitude, phase = np.fft.fftshift(np.abs(spectrum)), np.angle(spectrum)
    mask = np.zeros(image.shape)
    mask[tuple(slice(side // 2 - b, side // 2 + b + 1) for side in image.shape)] = 1
    mixed = (1 - share) * amplitude + share * np.fft.fftshift(foreign)
    amplitude = np.fft.ifftshift(amplitude * (1 - mask) + mixed * mask)
    return np.real(np.fft.ifftn(amplitude * np.exp(1j * phase)))


@pytest.mark.parametrize("case", GOLDEN)
def test_the_golden_images_come_out(case: Any) -> None:
    inputs = GOLDEN[case]["inputs"]
    image = torch.tensor(inputs["image"], dtype=torch.float64)[None, None]
    other = torch.tensor(inputs["other_amplitude"], dtype=torch.float64)[None, None]
    window = other[low_frequencies(image.shape[2:], inputs["b"])] / 16  # ours are per voxel
    expected = torch.tensor(GOLDEN[case]["expected"]["image"], dtype=torch.float64)

    assert torch.allclose(restyle(image, window, inputs["lambda"])[0, 0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sides", [(8, 8), (7, 9), (6, 11), (6, 7, 8), (5, 5, 4)])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_restyling_is_what_numpy_gives_in_two_and_three_dimensions(sides: Any, b: Any, share: Any) -> None:
    image, other = images(2, 3, *sides), 5 * images(2, 3, *sides, seed=1) + 2
    ours = restyle(image, amplitude_window(other, b), share)

    for case in range(2):
        for channel in range(3):
            expected = numpy_mix(image[case, channel].numpy(), other[case, channel].numpy(), share, b)
            assert np.allclose(ours[case, channel].numpy(), expected, rtol=0, atol=1e-12)


def test_every_case_has_its_own_share() -> None:
    image, other = images(2, 1, 6, 6), images(2, 1, 6, 6, seed=1)
    both = restyle(image, amplitude_window(other, 1), torch.tensor([0.2, 0.9], dtype=torch.float64))

    assert np.allclose(both[0, 0], numpy_mix(image[0, 0].numpy(), other[0, 0].numpy(), 0.2, 1), atol=1e-12)
    assert np.allclose(both[1, 0], numpy_mix(image[1, 0].numpy(), other[1, 0].numpy(), 0.9, 1), atol=1e-12)


def test_a_share_of_zero_gives_the_image_bit_for_bit() -> None:
    image = images(2, 2, 9, 9).float()
    assert torch.equal(restyle(image, amplitude_window(image, 3) + 7, 0.0), image)


def test_a_share_of_one_gives_the_window_of_the_other() -> None:
    image, other = images(1, 1, 8, 8), images(1, 1, 8, 8, seed=1)
    window = amplitude_window(other, 2)
    assert torch.allclose(amplitude_window(restyle(image, window), 2), window, atol=1e-12)


def test_amplitudes_are_per_voxel_so_that_sizes_compare() -> None:
    """The same wave on twice the grid has the same window."""
    small, large = (1 + torch.cos(2 * torch.pi * torch.arange(n).double() / n) for n in (8, 16))
    windows = [amplitude_window(wave.expand(1, 1, len(wave), -1), 1) for wave in (small, large)]
    assert torch.allclose(windows[0], windows[1], atol=1e-12)
    assert windows[0][0, 0, 1].tolist() == pytest.approx(
        [0.5, 1.0, 0.5]
    )  # frequencies -1, 0, 1 along columns


def test_an_image_of_zeros_takes_an_amplitude_without_nan() -> None:
    """Its phase counts as 0, as NumPy's angle has it."""
    window = amplitude_window(torch.full((1, 1, 4, 4), -3.0), 0)
    assert torch.equal(restyle(torch.zeros(1, 1, 4, 4), window), torch.full((1, 1, 4, 4), 3.0))


def test_an_image_below_zero_keeps_its_sign() -> None:
    """The phase of a negative mean is pi."""
    window = amplitude_window(torch.full((1, 1, 4, 4), 3.0), 0)
    assert torch.allclose(restyle(torch.full((1, 1, 4, 4), -1.0), window), torch.tensor(-3.0))


def test_half_widths_are_rounded_down() -> None:
    assert half_width((384, 384), 0.003) == 1  # the authors' demo
    assert half_width((16, 16), 0.01) == 0
    assert half_width((384, 384, 24), 0.1) == 2
    assert [half_width((side,), 0.4999) * 2 + 1 <= side for side in range(1, 40)] == [True] * 39


def test_a_window_larger_than_the_image_is_refused() -> None:
    with pytest.raises(DataError, match="5 frequencies does not fit an image of 4x9"):
        amplitude_window(images(1, 1, 4, 9), 2)


def test_clipping_keeps_each_case_and_channel_in_its_own_range() -> None:
    like = torch.tensor([[[[0.0, 1.0]], [[10.0, 20.0]]]])
    assert clip_to_range(torch.full_like(like, 15.0), like).tolist() == [[[[1.0, 1.0]], [[15.0, 15.0]]]]


def test_the_mean_of_z_scored_images_says_nothing() -> None:
    image = images(4, 1, 8, 8).float()
    centred = image - image.mean(dim=(2, 3), keepdim=True)
    assert is_blank(amplitude_window(centred, 0))
    assert not is_blank(amplitude_window(centred, 1))
    assert not is_blank(amplitude_window(centred + 1, 0))
