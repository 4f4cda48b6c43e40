"""Instance norm that leaves maps in their layout: the same numbers as PyTorch's, and the same model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wardround.models.instance_norm import (
    FusableUnit,
    QuickNorm,
    apply_slope,
    by_definition,
    fits_kernels,
    keep_layout,
)
from wardround.models.unet import unet2d, unet3d

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(2, 5, 7, 9), (3, 16, 33, 20), (1, 70, 5, 6, 7), (2, 3, 40, 41), (4, 1024, 6, 6), (1, 1, 30, 31)]


def case(shape: tuple[int, ...], *, learns: bool, device: str = "cpu", kind: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=draw) * 3 + 5).to(device, kind)
    gradient = torch.randn(shape, generator=draw).to(device, kind)
    weights = [torch.randn(shape[1], generator=draw).to(device) for _ in range(2)] if learns else [None, None]
    layout = LAYOUTS[len(shape)]
    return x.contiguous(memory_format=layout), gradient.contiguous(memory_format=layout), weights


def results(function, x, gradient, weights):
    """The map and its gradients."""
    inputs = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (x, *weights)]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, [t for t in inputs if t is not None], gradient)]


def exact(slope):
    """PyTorch's own layer, in float64 and its own layout."""

    def function(x, weight, bias):
        weight, bias = (None if t is None else t.double() for t in (weight, bias))
        return apply_slope(F.instance_norm(x.double().contiguous(), weight=weight, bias=bias), slope)

    return function


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slope", [None, 0.0, 0.1])
@pytest.mark.parametrize("learns", [False, True])
def test_the_definition_is_pytorchs_layer(shape, slope, learns) -> None:
    given = case(shape, learns=learns)
    ours = results(lambda x, w, b: by_definition(x, w, b, 1e-5, slope), *given)
    x, gradient, weights = given
    theirs = results(exact(slope), x, gradient.double().contiguous(), weights)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left.double(), right.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (8, 16, 160, 160), (2, 48, 32, 33, 34)])
@pytest.mark.parametrize("slope", [None, 0.0, 0.1])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_kernels_are_pytorchs_layer(shape, slope, learns, kind) -> None:
    x, gradient, weights = case(shape, learns=learns, device="cuda", kind=kind)
    assert fits_kernels(x)
    layer = quick(shape, slope, weights)
    ours = results(lambda x, w, b: layer(x), x, gradient, [None, None])
    theirs = results(exact(slope), x, gradient.double().contiguous(), weights)[:2]
    assert ours[0].stride() == x.stride() and ours[0].dtype == kind
    limit = 2e-2 if kind == torch.bfloat16 else 1e-4
    for left, right in zip(ours, theirs, strict=True):
        away = (left.double() - right.double()).abs() > limit * (1 + right.double().abs())
        assert away.double().mean() < 1e-4  # a value at the ReLU's corner may fall on its other side
    again = results(lambda x, w, b: layer(x), x, gradient, [None, None])
    assert all(torch.equal(left, right) for left, right in zip(ours, again, strict=True))
    if learns and kind == torch.float32:
        y = layer(x)
        found = torch.autograd.grad(y, [layer.weight, layer.bias], gradient)
        for left, right in zip(
            found, results(exact(slope), x, gradient.double().contiguous(), weights)[2:], strict=True
        ):
            torch.testing.assert_close(left, right.float(), rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
def test_the_kernels_have_a_second_derivative() -> None:
    x, _, weights = case((2, 6, 9, 8), learns=True, device="cuda")
    layer = quick(x.shape, 0.1, weights)
    found = []
    for function, at in ((layer, x), (lambda z: exact(0.1)(z, *weights), x.double())):
        at = at.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(at).pow(3).sum(), at, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), at)[0].double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-2)


def quick(shape, slope, weights) -> QuickNorm:
    kind = nn.InstanceNorm2d if len(shape) == 4 else nn.InstanceNorm3d
    model = nn.Sequential(kind(shape[1], affine=weights[0] is not None))
    keep_layout(model)
    (layer,) = model
    assert isinstance(layer, QuickNorm)
    layer.slope = slope
    if weights[0] is not None:
        layer.weight, layer.bias = (nn.Parameter(tensor) for tensor in weights)
    return layer


@pytest.mark.parametrize("build", [unet2d, unet3d])
@pytest.mark.parametrize("norm", ["instance", "instance_affine", "batch", "group"])
def test_a_model_stays_what_it_is(build, norm) -> None:
    torch.manual_seed(0)
    model = build(in_channels=1, num_outputs=2, base_filters=4, levels=3, norm=norm)
    image = torch.randn(2, 1, *[16] * (2 if build is unet2d else 3))
    before, names = model(image), list(model.state_dict())
    keep_layout(model)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(image), before)
    merged = sum(isinstance(m, QuickNorm) and m.slope == 0 for m in model.modules())
    assert merged == (0 if norm in ("batch", "group") else sum("norm" in n for n, _ in model.named_modules()))
    assert any(isinstance(module, nn.ReLU) for module in model.modules()) == (merged == 0)


def test_the_slope_of_a_leaky_relu_is_taken_over() -> None:
    model = FusableUnit(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3), nn.LeakyReLU(0.2), nn.Conv2d(3, 1, 1))
    image = torch.randn(2, 1, 8, 8)
    before = model(image)
    keep_layout(model)
    assert model[1].slope == 0.2 and isinstance(model[2], nn.Identity)
    torch.testing.assert_close(model(image), before)


def test_layers_of_other_peoples_networks_keep_their_relu() -> None:
    """Their code may use what stands between a norm and its ReLU."""
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU())
    keep_layout(model)
    assert isinstance(model[0], QuickNorm) and model[0].slope is None and isinstance(model[1], nn.ReLU)


def test_layers_with_running_statistics_are_left_alone() -> None:
    model = FusableUnit(nn.InstanceNorm2d(3, track_running_stats=True), nn.ReLU())
    keep_layout(model)
    assert type(model[0]) is nn.InstanceNorm2d and isinstance(model[1], nn.ReLU)


def test_the_gradient_of_a_single_channels_last_volume_is_right() -> None:
    """PyTorch's own layer fails here: a batch of one, and the gradient channels last."""
    x, gradient, weights = case((1, 16, 8, 8, 8), learns=False)
    layer = quick(x.shape, None, weights)
    ours = results(lambda x, w, b: layer(x), x, gradient, weights)
    theirs = results(exact(None), x, gradient.double().contiguous(), weights)
    torch.testing.assert_close(ours[1].double(), theirs[1].double(), rtol=1e-4, atol=1e-5)


def test_a_single_voxel_is_refused_as_pytorch_does() -> None:
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        quick((1, 4, 1, 1), None, [None, None])(torch.randn(1, 4, 1, 1))
