"""The GELAN network: blocks, slices of volumes, sizes, features, federated training."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import dice_after_fitting, four_cases, whole_and_resumed
from safetensors.torch import load_file, save_file
from torch import nn

from wardround.models import ModelSettings, build, head_names
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


# What every network promises


@dimensions
@pytest.mark.parametrize("in_channels", [1, 2, 3, 4])
@pytest.mark.parametrize("num_outputs", [1, 2, 5])
def test_logits_have_the_images_size_and_the_outputs_asked_for(dimensions, in_channels, num_outputs):
    model = small(dimensions, in_channels=in_channels, num_outputs=num_outputs)
    x = image(model)
    assert model(x).shape == (2, num_outputs, *x.shape[2:])
    assert head_names(model) == ["head.weight", "head.bias"]
    assert model.output_layer() is model.head


@dimensions
@pytest.mark.parametrize("sides", [(1, 1, 1), (4, 4, 1), (5, 7, 2), (17, 8, 3)])
@pytest.mark.parametrize("norm", NORMS)
def test_any_size_trains_alone_in_its_batch(dimensions, sides, norm):
    model = small(dimensions, norm=norm, dropout=0.1)
    x = image(model, *sides[:dimensions], batch=1)
    output = model.forward_features(x)
    assert output.logits.shape[2:] == output.decoder.shape[2:] == x.shape[2:]
    output.logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("base_filters", [2, 3, 5])
def test_narrow_and_odd_widths_work(base_filters):
    model = small(base_filters=base_filters, levels=4)
    assert model(image(model)).isfinite().all()


@dimensions
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sides", [(16, 12, 8), (13, 11, 3)])
def test_encode_is_exactly_the_bottleneck(dimensions, training, sides):
    model = small(dimensions, dropout=0.5).train(training)
    x = image(model, *sides[:dimensions])
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)


def test_one_pass_gives_logits_and_features():
    model = small().eval()
    output = model.forward_features(image(model))
    assert torch.equal(output.logits, model(image(model)))
    assert torch.equal(model.head(output.decoder), output.logits)


def test_a_size_that_divides_is_not_touched_and_an_odd_one_is_padded_and_cropped():
    model = small().eval()
    x = image(model)
    assert model._pad(x) is x
    odd = x[..., :11]
    padded = torch.cat([odd, odd[..., -1:]], dim=-1)
    torch.testing.assert_close(model(odd), model(padded)[..., :11])


def test_dropout_acts_in_training_only():
    model = small(dropout=0.5)
    x = image(model)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.slow
def test_the_network_compiles_into_one_graph():
    model = small(3, levels=2).eval()
    x = image(model, 13, 9, 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), model(x))


@dimensions
def test_checkpointing_changes_neither_gradients_nor_statistics(dimensions):
    gradients, states = [], []
    for checkpointing in (False, True):
        model = small(dimensions)
        model.checkpointing = checkpointing
        model(image(model)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        states.append(model.state_dict())
    for before, after in (gradients, states):
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name


def test_the_same_seed_gives_the_same_bytes_and_a_forward_pass_draws_none():
    first, second = small(), small()
    assert all(torch.equal(t, second.state_dict()[name]) for name, t in first.state_dict().items())
    before = torch.get_rng_state()
    first.train()(image(first))
    assert torch.equal(torch.get_rng_state(), before)


def test_all_its_norm_layers_are_found():
    model = small(norm="batch")
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(layers) == len(convolutions) - 1  # all but the head
    assert len(norm_names(model)) == 5 * len(layers)
    assert not norm_names(small(norm="instance"))


def test_the_state_goes_through_safetensors(tmp_path):
    model, other = small(), small()
    model(image(model))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = image(model)
    assert torch.equal(model.eval()(x), other.eval()(x))
    parts = {name.split(".")[0] for name in model.state_dict()}
    assert parts == {"encoder", "spp", "top_down", "bottom_up", "fuse", "refine", "head"}


@dimensions
def test_settings_reach_the_network(dimensions):
    settings = ModelSettings(name="gelan", base_filters=4, levels=3, arguments={"depth": 2})
    model = build(settings, in_channels=1, num_outputs=2, dimensions=dimensions)
    assert model.dimensions == dimensions
    assert len(model.encoder[1].elan.first.csp.bottlenecks) == 2


# Learning


def test_four_cases_are_learnt_by_heart():
    model = small(base_filters=8)
    assert dice_after_fitting(model, *four_cases(2, 32), steps=50, learning_rate=1e-2) > 0.9


@pytest.mark.parametrize(("method", "dimensions"), [("fedavg", 2), ("safcf", 3), ("fedevi", 2)])
def test_it_trains_federated_and_resumes_to_the_same_bytes(tmp_path, method, dimensions):
    whole, resumed = whole_and_resumed(
        tmp_path,
        data={"phantom": {"hospitals": 2, "dimensions": dimensions, "size": 16, "cases": 6}},
        model={"name": "gelan", "base_filters": 2, "levels": 2},
        method={"name": method},
        optimizer={"learning_rate": 0.001, "state": "keep"},
    )
    assert len(whole.records) == 2
    assert resumed.outcome.state.params.sha256() == whole.outcome.state.params.sha256()
