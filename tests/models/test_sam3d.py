"""The SAM-style network: sizes, windows, positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wardround.models import ModelSettings, build
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


# Details, norm layers, settings


def test_details_of_single_voxels_reach_the_logits_where_they_are():
    model = small(2).eval()
    x = image(model, 16, 16)
    changed = x.clone()
    changed[..., 5, 6] += 3
    change = (model.forward_features(changed).decoder - model.forward_features(x).decoder).abs().mean(dim=1)
    nearby = change[:, 4:7, 5:8].mean()
    assert nearby > 3 * change.mean()


def test_layer_norms_count_as_norm_layers():
    model = small(norm="instance")
    kept = norm_names(model)
    assert len(kept) == 2 * 2 * 2  # two blocks, two norms each, scale and shift
    assert all(name.startswith("image_encoder.blocks.") and ".norm" in name for name in kept)
    assert not norm_names(model, (nn.modules.batchnorm._BatchNorm,))


def test_settings_reach_the_network():
    settings = ModelSettings(
        name="sam3d", base_filters=8, levels=3, arguments={"depth": 3, "window": 4, "global_every": 2}
    )
    model = build(settings, in_channels=1, num_outputs=2, dimensions=3)
    assert [block.window for block in model.image_encoder.blocks] == [4, 0, 0]
