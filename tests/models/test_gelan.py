"""The GELAN network: parameter counts, blocks, slices of volumes."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wardround.models import ModelSettings, build
from wardround.models.gelan import SPP, ADown, Fuse, from_slices, gelan, to_slices
from wardround.models.norm import norm_names

NORMS = ["batch", "instance", "instance_affine", "group", "none"]
dimensions = pytest.mark.parametrize("dimensions", [2, 3])


def small(dimensions=2, *, in_channels=1, num_outputs=1, **settings):
    torch.manual_seed(0)
    chosen = {"base_filters": 4, "levels": 3} | settings
    return gelan(in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions, **chosen)


def image(model, *sides, batch=2):
    generator = torch.Generator().manual_seed(1)
    sides = sides or (16, 12, 3)[: model.dimensions]
    return torch.randn(batch, model.in_channels, *sides, generator=generator)


# Parameter counts


def conv(source, width, size, norm=2):
    """Weights of a convolution without bias, and scale and shift of its norm."""
    return source * width * size**2 + norm * width


def elan(source, width, depth=1):
    half, quarter = width // 2, width // 4
    bottleneck = 2 * conv(quarter, quarter, 3) + conv(quarter, quarter, 1)
    csp = 2 * conv(half, quarter, 1) + depth * bottleneck + conv(half, half, 1)
    return conv(source, width, 1) + 2 * (csp + conv(half, half, 3)) + conv(2 * width, width, 1)


def adown(source, width):
    return conv(source // 2, width // 2, 3) + conv(source // 2, width // 2, 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_default_has_the_parameters_the_file_says(depth):
    widths = [32, 64, 128, 256, 512, 512]
    expected = conv(1, 32, 3) + conv(32, 64, 3) + conv(64, 128, 3)
    expected += sum(adown(widths[n - 1], widths[n]) for n in (3, 4, 5))
    expected += sum(elan(width, width, depth) for width in widths[1:])
    expected += conv(512, 256, 1) + conv(1024, 512, 1)  # SPP
    pairs = list(pairwise(widths[2:]))
    expected += sum(elan(fine + coarse, fine, depth) for fine, coarse in pairs)
    expected += sum(adown(fine, fine) + elan(fine + coarse, coarse, depth) for fine, coarse in pairs)
    expected += sum(conv(width, 128, 1) for width in widths[2:]) + conv(128, 128, 3)  # mask head
    expected += conv(128 + 64, 64, 3) + conv(64 + 32, 32, 3) + 33
    with torch.device("meta"):
        model = gelan(in_channels=1, num_outputs=1, depth=depth)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert depth > 1 or expected == 20_839_169


def test_a_volume_needs_no_more_parameters_than_an_image():
    shapes = [{name: t.shape for name, t in small(d).state_dict().items()} for d in (2, 3)]
    assert shapes[0] == shapes[1]


# Blocks


@pytest.mark.parametrize("side", [2, 4, 10])
def test_adown_halves_one_half_by_convolution_and_the_other_by_its_maximum(side):
    torch.manual_seed(0)
    block = ADown(5, 7, "none")
    x = torch.randn(2, 5, side, side)
    mean = (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4
    edged = F.pad(mean[:, 3:], (1, 1, 1, 1), value=-torch.inf)
    highest = edged.unfold(2, 3, 2).unfold(3, 3, 2).amax(dim=(-1, -2))
    convolved = F.silu(F.conv2d(mean[:, :3], block.conv.conv.weight, block.conv.conv.bias, 2, padding=1))
    pooled = F.silu(F.conv2d(highest, block.point.conv.weight, block.point.conv.bias))
    assert block(x).shape == (2, 7, side // 2, side // 2)
    torch.testing.assert_close(block(x), torch.cat([convolved, pooled], dim=1))


def test_spp_joins_the_maxima_over_1_5_9_and_13_voxels():
    torch.manual_seed(0)
    block = SPP(4, "none")
    x = torch.randn(1, 4, 15, 16)
    narrow = block.narrow(x)
    maps = [F.max_pool2d(narrow, size, stride=1, padding=size // 2) for size in (1, 5, 9, 13)]
    torch.testing.assert_close(block(x), block.join(torch.cat(maps, dim=1)))


def test_the_mask_head_adds_up_all_levels_at_the_finest_size():
    torch.manual_seed(0)
    fuse = Fuse([4, 6, 8], "none")
    maps = [torch.randn(1, width, side, side) for width, side in ((4, 8), (6, 4), (8, 2))]
    total = fuse.laterals[0](maps[0])
    total = total + fuse.laterals[1](maps[1]).repeat_interleave(2, 2).repeat_interleave(2, 3)
    total = total + fuse.laterals[2](maps[2]).repeat_interleave(4, 2).repeat_interleave(4, 3)
    torch.testing.assert_close(fuse(*maps), fuse.smooth(total))


@pytest.mark.parametrize("levels", range(2, 7))
def test_every_number_of_levels_gives_stages_from_coarse_to_fine(levels):
    model = small(levels=levels).eval()
    output = model.forward_features(image(model, 64, 32, batch=1))
    assert output.bottleneck.shape[2:] == (64 >> levels - 1, 32 >> levels - 1)
    assert [stage.shape[2] for stage in output.stages] == [64 >> n for n in reversed(range(levels - 1))]
    assert output.stages[-1] is output.decoder


@pytest.mark.parametrize("levels", [2, 4, 6])
def test_every_part_of_the_network_is_used(levels):
    model = small(levels=levels)
    model(image(model, 64, 64)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


# Slices


def test_slices_are_those_of_the_last_axis():
    x = torch.arange(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)
    slices = to_slices(x)
    assert slices.shape == (12, 3, 4, 5)
    assert torch.equal(slices[6 + 2], x[1, ..., 2])
    assert torch.equal(from_slices(slices, (6,)), x)
    flat = x[..., 0]
    assert to_slices(flat) is flat
    assert from_slices(flat, ()) is flat


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sides", [(16, 12, 3), (13, 9, 5), (3, 4, 1)])
def test_a_volume_is_its_slices_one_by_one(norm, sides):
    volume, flat = small(3, num_outputs=2, norm=norm).eval(), small(2, num_outputs=2, norm=norm).eval()
    flat.load_state_dict(volume.state_dict())
    x = image(volume, *sides)
    whole = volume.forward_features(x)
    for number in range(sides[2]):
        one = flat.forward_features(x[..., number])
        torch.testing.assert_close(whole.logits[..., number], one.logits)
        torch.testing.assert_close(whole.bottleneck[..., number], one.bottleneck)
        torch.testing.assert_close(whole.decoder[..., number], one.decoder)
        for stage, flat_stage in zip(whole.stages, one.stages, strict=True):
            torch.testing.assert_close(stage[..., number], flat_stage)


def test_no_slice_is_added_or_merged():
    model = small(3)
    assert model.padded_size((13, 16, 5)) == [16, 16, 5]
    assert model.padded_size((4, 3, 1)) == [4, 8, 1]
    assert model.encode(image(model, 13, 16, 5)).shape == (2, 16, 4, 4, 5)


def test_batch_norm_counts_all_slices_together():
    volume, flat = small(3), small(2)
    x = image(volume)
    volume(x)
    flat(to_slices(x))
    for name, tensor in flat.state_dict().items():
        torch.testing.assert_close(volume.state_dict()[name], tensor)


# Widths, norm layers, settings


@pytest.mark.parametrize("base_filters", [2, 3, 5])
def test_narrow_and_odd_widths_work(base_filters):
    model = small(base_filters=base_filters, levels=4)
    assert model(image(model)).isfinite().all()


def test_all_its_norm_layers_are_found():
    model = small(norm="batch")
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(layers) == len(convolutions) - 1  # all but the head
    assert len(norm_names(model)) == 5 * len(layers)
    assert not norm_names(small(norm="instance"))


@dimensions
def test_settings_reach_the_network(dimensions):
    settings = ModelSettings(name="gelan", base_filters=4, levels=3, arguments={"depth": 2})
    model = build(settings, in_channels=1, num_outputs=2, dimensions=dimensions)
    assert model.dimensions == dimensions
    assert len(model.encoder[1].elan.first.csp.bottlenecks) == 2
