"""3D convolutions of one volume by slices: the same values and gradients."""

from __future__ import annotations

from typing import Any

import torch
from pytest import mark
from torch import nn

from wardround.training.slow_conv3d import LARGEST, AvoidSlowConv3d

LAYERS = {
    "usual": {"kernel_size": 3, "padding": 1},
    "without bias": {"kernel_size": 3, "padding": 1, "bias": False},
    "of strides": {"kernel_size": 3, "padding": 1, "stride": (2, 1, 2)},
    "of kernels": {"kernel_size": (1, 3, 2), "padding": (0, 1, 0)},
    "without padding": {"kernel_size": 2, "stride": 2},
    "reflecting": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "dilated in the plane": {"kernel_size": 3, "padding": (1, 2, 2), "dilation": (1, 2, 2)},
    "dilated": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "padded by name": {"kernel_size": 3, "padding": "same"},
    "in groups": {"kernel_size": 3, "padding": 1, "groups": 2},
}


def convolve(layer: nn.Conv3d, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values, and the gradients of input and layer."""
    y = layer(x)
    slope = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return (y, *torch.autograd.grad((y * slope).sum(), [x, *layer.parameters()]))


@mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = LAYERS[name]
    layer = nn.Conv3d(4, 6, **settings).double()
    x = torch.randn(1, 4, 5, 6, 7, dtype=torch.float64, requires_grad=True)
    expected = convolve(layer, x)
    with AvoidSlowConv3d():
        found = convolve(layer, x)

    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@mark.parametrize(
    ("shape", "kernel"),
    [((1, 1, 4, 5, 6), "slow_conv3d"), ((2, 1, 4, 5, 6), "oneDNN"), ((1, 2, 64, 161, 2), "oneDNN")],
)
def test_no_small_volume_goes_to_the_slow_kernel(shape: tuple[int, ...], kernel: str) -> None:
    layer = nn.Conv3d(shape[1], 2, kernel_size=3, padding=1)
    assert (shape[0] == 1 and shape[1] * shape[2] * shape[3] <= LARGEST) == (kernel == "slow_conv3d")
    for context, expected in ((None, kernel == "slow_conv3d"), (AvoidSlowConv3d(), False)):
        with torch.profiler.profile() as profile, context or torch.enable_grad():
            layer(torch.zeros(shape))
        assert any("slow_conv3d" in event.key for event in profile.key_averages()) == expected
