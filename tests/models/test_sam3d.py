"""The SAM-style network: windows, positions, sizes, features, federated training."""

import pytest
import torch
import torch.nn.functional as F
from helpers import dice_after_fitting, four_cases, whole_and_resumed
from safetensors.torch import load_file, save_file
from torch import nn

from wardround.models import ModelSettings, build, head_names
from wardround.models.norm import norm_names
from wardround.models.sam3d import (
    PLACES,
    Block,
    Position,
    balance_window,
    from_windows,
    interpolate_places,
    is_global,
    sam3d,
    to_windows,
)

NORMS = ["batch", "instance", "instance_affine", "group", "none"]
dimensions = pytest.mark.parametrize("dimensions", [2, 3])
SMALL = {"base_filters": 12, "levels": 3, "depth": 2, "global_every": 2, "window": 2}


def small(dimensions=3, *, in_channels=1, num_outputs=1, **settings):
    torch.manual_seed(0)
    chosen = SMALL | settings
    return sam3d(in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions, **chosen)


def image(model, *sides, batch=2):
    generator = torch.Generator().manual_seed(1)
    sides = sides or (16, 12, 8)[: model.dimensions]
    return torch.randn(batch, model.in_channels, *sides, generator=generator)


# Sizes


@pytest.mark.parametrize(
    ("size", "expected"), [("tiny", 6_151_553), ("small", 23_114_401), ("base", 88_404_609)]
)
def test_the_sizes_have_the_parameters_the_file_says(size, expected):
    width, neck = {"tiny": (192, 128), "small": (384, 192), "base": (768, 256)}[size]
    block = 2 * 2 * width + (width + 1) * 3 * width + (width + 1) * width + 8 * width**2 + 5 * width
    encoder = 8**3 * width + width + 3 * PLACES * width + 12 * block
    encoder += width * neck + 27 * neck**2
    last = neck // 8
    decoder = 27 * last + last + 1  # the image's details, the head
    for below, above in [(neck, neck // 2), (neck // 2, neck // 4), (neck // 4, last)]:
        decoder += 8 * below * above + 27 * above**2
    decoder += 27 * last**2  # the details' half of the last stage
    with torch.device("meta"):
        model = sam3d(in_channels=1, num_outputs=1, dimensions=3, size=size)
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder == expected


def test_base_has_the_blocks_of_sam_vit_b():
    with torch.device("meta"):
        blocks = sam3d(in_channels=1, num_outputs=1, size="base").image_encoder.blocks
    assert [number for number, block in enumerate(blocks) if not block.window] == [2, 5, 8, 11]
    assert {block.attn.heads for block in blocks} == {12}
    shapes = {name: tuple(tensor.shape) for name, tensor in blocks[0].state_dict().items()}
    assert shapes == {
        "norm1.weight": (768,),
        "norm1.bias": (768,),
        "attn.qkv.weight": (2304, 768),
        "attn.qkv.bias": (2304,),
        "attn.proj.weight": (768, 768),
        "attn.proj.bias": (768,),
        "norm2.weight": (768,),
        "norm2.bias": (768,),
        "mlp.lin1.weight": (3072, 768),
        "mlp.lin1.bias": (3072,),
        "mlp.lin2.weight": (768, 3072),
        "mlp.lin2.bias": (768,),
    }


def test_the_last_block_is_always_global():
    assert [is_global(block, 5, 3) for block in range(5)] == [False, False, True, False, True]
    assert all(is_global(block, 4, 1) for block in range(4))


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (768, 12), (4, 1), (200, 2), (67, 1)])
def test_a_head_has_64_channels_where_the_width_allows(width, heads):
    with torch.device("meta"):
        assert Block(width, 0).attn.heads == heads


@pytest.mark.parametrize(("levels", "patch"), [(2, 2), (4, 8), (5, 16)])
def test_levels_say_how_large_a_patch_is(levels, patch):
    with torch.device("meta"):
        model = sam3d(in_channels=1, num_outputs=1, levels=levels)
        assert model.image_encoder.patch_embed.proj.kernel_size == (patch,) * 3
        output = model.forward_features(torch.empty(1, 1, 32, 32, 64))
    assert output.bottleneck.shape == (1, 128, 32 // patch, 32 // patch, 64 // patch)
    assert [stage.shape[2] for stage in output.stages] == [32 * 2**n // patch for n in range(1, levels)]


# Windows


def by_hand(block, x):
    """Attention written out, window after window, head after head; windows at the border are cut off."""
    _, *grid, width = x.shape
    out = torch.empty_like(x)
    steps = [balance_window(side, block.window or side) for side in grid]
    corners = torch.cartesian_prod(*[torch.arange(0, n, s) for n, s in zip(grid, steps, strict=True)])
    for case in range(len(x)):
        for corner in corners.tolist():
            place = (case, *(slice(c, c + s) for c, s in zip(corner, steps, strict=True)))
            tokens = x[place].reshape(-1, width)
            weight, bias = block.attn.qkv.weight, block.attn.qkv.bias
            q, k, v = (tokens @ w.T + b for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True))
            heads = []
            for a, b, c in zip(*(t.chunk(block.attn.heads, dim=1) for t in (q, k, v)), strict=True):
                heads.append((a @ b.T / a.shape[1] ** 0.5).softmax(dim=1) @ c)
            mixed = torch.cat(heads, dim=1) @ block.attn.proj.weight.T + block.attn.proj.bias
            out[place] = mixed.reshape(x[place].shape)
    return out


@pytest.mark.parametrize("window", [0, 2, 3])
@pytest.mark.parametrize("grid", [(6, 6), (5, 7), (1, 4), (4, 2, 6), (3, 5, 1)])
def test_windowed_attention_is_a_loop_over_windows(window, grid):
    torch.manual_seed(0)
    block = Block(128, window).double()
    x = torch.randn(2, *grid, 128, dtype=torch.float64)
    assert block.attn.heads == 2
    torch.testing.assert_close(block.attend(x), by_hand(block, x))


def test_a_window_sees_nothing_of_its_neighbours_and_a_global_block_sees_all():
    torch.manual_seed(0)
    x = torch.randn(1, 4, 4, 12)
    changed = x.clone()
    changed[0, 0, 0] += torch.randn(12)
    for window, reach in [(2, 4), (0, 16)]:
        block = Block(12, window)
        touched = (block(x) != block(changed)).any(dim=-1)[0]
        assert touched.sum() == reach
        assert touched[:2, :2].all()


@pytest.mark.parametrize(
    ("side", "window", "balance"), [(16, 8, 8), (9, 8, 5), (5, 8, 5), (17, 8, 6), (1, 8, 1), (7, 1, 1)]
)
def test_windows_share_the_patches_evenly(side, window, balance):
    assert balance_window(side, window) == balance


@pytest.mark.parametrize(("grid", "sides"), [((4, 6), [2, 3]), ((4, 6), [4, 6]), ((2, 4, 6), [1, 2, 6])])
def test_windows_are_put_back_where_they_were(grid, sides):
    x = torch.arange(2 * torch.Size(grid).numel() * 3).reshape(2, *grid, 3)
    windows = to_windows(x, sides)
    assert windows.shape[1] == torch.Size(sides).numel()
    first = x[(0, *(slice(side) for side in sides))]
    assert torch.equal(windows[0], first.reshape(-1, 3))
    assert torch.equal(from_windows(windows, sides, [2, *grid]), x)


# Positions


@pytest.mark.parametrize("side", [1, 2, 7, 16, 23, 40])
def test_positions_are_stretched_as_pytorch_interpolates(side):
    embedding = torch.randn(PLACES, 5)
    expected = F.interpolate(embedding.T[None], size=side, mode="linear", align_corners=False)[0].T
    torch.testing.assert_close(interpolate_places(embedding, side), expected, rtol=1e-4, atol=1e-5)


def test_every_axis_adds_its_own_position():
    position = Position(4, 3)
    for embedding in position.axes:
        nn.init.normal_(embedding)
    total = position((2, PLACES, 5))
    assert total.shape == (2, PLACES, 5, 4)
    parts = [interpolate_places(e, side) for e, side in zip(position.axes, (2, PLACES, 5), strict=True)]
    torch.testing.assert_close(total[1, 3, 4], parts[0][1] + parts[1][3] + parts[2][4])
    assert torch.equal(parts[1], position.axes[1])


def test_a_patch_is_told_where_it_lies():
    model = small(2).eval()
    flat = torch.zeros(1, 1, 16, 16)
    assert model.encode(flat).std() > 0
    for embedding in model.image_encoder.position.axes:
        nn.init.zeros_(embedding)
    tokens = model.image_encoder.blocks[0](model.image_encoder.patch_embed(flat).movedim(1, -1))
    assert torch.equal(tokens, tokens[:, :1, :1].expand_as(tokens))


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
@pytest.mark.parametrize("sides", [(1, 1, 1), (4, 4, 4), (5, 7, 9), (17, 8, 3)])
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


@dimensions
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sides", [(16, 12, 8), (13, 11, 9)])
def test_encode_is_exactly_the_bottleneck(dimensions, training, sides):
    model = small(dimensions, dropout=0.5).train(training)
    x = image(model, *sides[:dimensions])
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)


@dimensions
def test_one_pass_gives_logits_and_features(dimensions):
    model = small(dimensions).eval()
    x = image(model)
    output = model.forward_features(x)
    assert torch.equal(output.logits, model(x))
    assert output.bottleneck.shape[2:] == tuple(side // 4 for side in x.shape[2:])
    assert [stage.shape[2] for stage in output.stages] == [8, 16]
    assert output.stages[-1] is output.decoder
    assert torch.equal(model.head(output.decoder), output.logits)


def test_a_size_that_divides_is_not_touched_and_an_odd_one_is_padded_and_cropped():
    model = small().eval()
    x = image(model)
    assert model._pad(x) is x
    odd = x[..., :7]
    padded = torch.cat([odd, odd[..., -1:]], dim=-1)
    torch.testing.assert_close(model(odd), model(padded)[..., :7])


def test_details_of_single_voxels_reach_the_logits_where_they_are():
    model = small(2).eval()
    x = image(model, 16, 16)
    changed = x.clone()
    changed[..., 5, 6] += 3
    change = (model.forward_features(changed).decoder - model.forward_features(x).decoder).abs().mean(dim=1)
    nearby = change[:, 4:7, 5:8].mean()
    assert nearby > 3 * change.mean()


@pytest.mark.slow
@dimensions
def test_the_network_compiles_into_one_graph(dimensions):
    model = small(dimensions).eval()
    x = image(model, *(13, 9, 11)[:dimensions])
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), model(x))


@dimensions
def test_checkpointing_changes_no_gradient(dimensions):
    gradients = []
    for checkpointing in (False, True):
        model = small(dimensions, norm="batch")
        model.checkpointing = checkpointing
        model(image(model)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_the_same_seed_gives_the_same_bytes_and_a_forward_pass_draws_none():
    first, second = small(), small()
    assert all(torch.equal(t, second.state_dict()[name]) for name, t in first.state_dict().items())
    before = torch.get_rng_state()
    first.train()(image(first))
    assert torch.equal(torch.get_rng_state(), before)


def test_layer_norms_count_as_norm_layers():
    model = small(norm="instance")
    kept = norm_names(model)
    assert len(kept) == 2 * 2 * 2  # two blocks, two norms each, scale and shift
    assert all(name.startswith("image_encoder.blocks.") and ".norm" in name for name in kept)
    assert not norm_names(model, (nn.modules.batchnorm._BatchNorm,))


def test_the_state_goes_through_safetensors(tmp_path):
    model, other = small(norm="batch"), small(norm="batch")
    model(image(model))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = image(model)
    assert torch.equal(model.eval()(x), other.eval()(x))
    parts = {name.split(".")[0] for name in model.state_dict()}
    assert parts == {"image_encoder", "detail", "decoder", "head"}


def test_settings_reach_the_network():
    settings = ModelSettings(
        name="sam3d", base_filters=8, levels=3, arguments={"depth": 3, "window": 4, "global_every": 2}
    )
    model = build(settings, in_channels=1, num_outputs=2, dimensions=3)
    assert [block.window for block in model.image_encoder.blocks] == [4, 0, 0]


# Learning


@pytest.mark.parametrize(
    ("dimensions", "size", "steps"), [(2, 32, 40), pytest.param(3, 16, 80, marks=pytest.mark.slow)]
)
def test_four_cases_are_learnt_by_heart(dimensions, size, steps):
    model = small(dimensions, base_filters=32, levels=4)
    cases = four_cases(dimensions, size)
    assert dice_after_fitting(model, *cases, steps=steps, learning_rate=1e-2) > 0.9


@pytest.mark.parametrize("method", ["fedavg", "safcf", "fedevi"])
def test_it_trains_federated_and_resumes_to_the_same_bytes(tmp_path, method):
    own = {key: SMALL[key] for key in ("depth", "global_every", "window")}
    whole, resumed = whole_and_resumed(
        tmp_path,
        data={"phantom": {"hospitals": 2, "dimensions": 3, "size": 16, "cases": 6}},
        model={"name": "sam3d", "base_filters": 8, "levels": 4, "arguments": own},
        method={"name": method},
        optimizer={"learning_rate": 0.001, "state": "keep"},
    )
    assert len(whole.records) == 2
    assert resumed.outcome.state.params.sha256() == whole.outcome.state.params.sha256()
