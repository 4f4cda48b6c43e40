"""The U-Nets: parameter counts, features, padding; `test_all_networks.py` has what all networks promise."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wardround.models import MODELS, ModelSettings, build
from wardround.models.base import crop, pad
from wardround.models.channel_groups import channel_groups, permute
from wardround.models.norm import Norm
from wardround.models.unet import Autoencoder, autoencoder, unet2d, unet2d_fedevi, unet3d
from wardround.params import Params

NORMS = ["batch", "instance", "instance_affine", "group", "none"]


def tiny(name, *, in_channels=1, num_outputs=1, **settings):
    torch.manual_seed(0)
    settings = {"base_filters": 4, "levels": 3} | settings
    return build(
        ModelSettings(name=name, **settings),
        in_channels=in_channels,
        num_outputs=num_outputs,
        dimensions=MODELS[name].dimensions[0],
    )


def image(model, *sides, batch=2):
    generator = torch.Generator().manual_seed(1)
    sides = sides or (16, 12, 8)[: model.dimensions]
    return torch.randn(batch, model.in_channels, *sides, generator=generator)


def num_parameters(model):
    return sum(p.numel() for p in model.parameters())


# Parameter counts


def test_unet3d_has_the_published_number_of_weights():
    with torch.device("meta"):
        model = unet3d(in_channels=3, num_outputs=3, norm="none")
    convolutions = [m for m in model.modules() if isinstance(m, _ConvNd)]
    weights = sum(m.weight.numel() for m in convolutions)
    biases = sum(
        m.bias.numel() for m in convolutions if m.bias is not None and not isinstance(m, _ConvTransposeNd)
    )
    assert weights + biases == 19_069_955
    assert num_parameters(model) == 19_069_955


def test_unet2d_has_the_weights_of_the_2015_paper():
    def conv(source, width, size):
        return source * width * size**2 + width

    expected = conv(64, 2, 1)
    for source, width in [(1, 64), (64, 128), (128, 256), (256, 512), (512, 1024)]:
        expected += conv(source, width, 3) + conv(width, width, 3)
    for width in (512, 256, 128, 64):
        expected += conv(2 * width, width, 2) + conv(2 * width, width, 3) + conv(width, width, 3)
    with torch.device("meta"):
        model = unet2d(in_channels=1, num_outputs=2, norm="none")
    assert num_parameters(model) == expected == 31_030_658


def test_unet2d_fedevi_has_the_weights_of_its_public_code():
    # 3,179,890 there, of which 2,432 are biases in front of an InstanceNorm, which we leave out
    with torch.device("meta"):
        assert num_parameters(unet2d_fedevi(in_channels=3, num_outputs=2, norm="none")) == 3_179_890
        assert num_parameters(unet2d_fedevi(in_channels=3, num_outputs=2)) == 3_179_890 - 2_432
        assert unet2d_fedevi(in_channels=3, num_outputs=2).head.in_channels == 32


def test_unet3d_doubles_its_width_before_pooling():
    with torch.device("meta"):
        model = unet3d(in_channels=1, num_outputs=1)
    widths = [(m.first.conv.out_channels, m.second.conv.out_channels) for m in model.encoder]
    assert widths == [(32, 64), (64, 128), (128, 256), (256, 512)]
    assert [stage.up.out_channels for stage in model.decoder] == [512, 256, 128]
    assert [stage.convs.second.conv.out_channels for stage in model.decoder] == [256, 128, 64]


@pytest.mark.parametrize("norm", ["batch", "instance", "instance_affine"])
def test_no_bias_stands_before_a_norm_that_removes_it(norm):
    model = tiny("unet2d", norm=norm)
    assert all(unit.conv.bias is None for level in model.encoder for unit in level)
    assert model.head.bias is not None


def test_affine_free_instance_norm_has_no_state():
    assert not [name for name in tiny("unet2d", norm="instance").state_dict() if "norm" in name]


# Shapes and features


def test_the_bottleneck_of_the_full_3d_unet_has_512_channels_at_an_eighth():
    with torch.device("meta"):
        model = unet3d(in_channels=1, num_outputs=1)
        assert model.encode(torch.empty(1, 1, 128, 128, 128)).shape == (1, 512, 16, 16, 16)


def test_features_are_taken_after_the_activation_and_before_dropout():
    model = tiny("unet2d", dropout=0.5).train()
    output = model.forward_features(image(model))
    assert (output.bottleneck >= 0).all()
    assert (output.decoder.amax(dim=(2, 3)) > 0).all()


# Odd sizes


@pytest.mark.parametrize("norm", NORMS)
def test_an_image_as_small_as_the_divisor_trains_alone_in_its_batch(norm):
    model = tiny("unet2d", norm=norm)
    assert model.divisor == 4
    assert model(image(model, 4, 4, batch=1)).shape == (1, 1, 4, 4)
    assert model.encode(image(model, 4, 4, batch=1)).shape[2:] == (1, 2)


def test_padding_repeats_the_last_voxels_and_cropping_undoes_it():
    x = torch.arange(6.0).reshape(1, 1, 2, 3)
    padded = pad(x, [3, 5])
    assert padded[0, 0].tolist() == [[0, 1, 2, 2, 2], [3, 4, 5, 5, 5], [3, 4, 5, 5, 5]]
    assert torch.equal(crop(padded, [2, 3]), x)


def test_padding_agrees_with_pytorchs_replication_padding():
    x = torch.randn(2, 3, 4, 5, 6)
    assert torch.equal(pad(x, [8, 6, 6]), nn.functional.pad(x, (0, 0, 0, 1, 0, 4), mode="replicate"))


# Blocks


def test_nearest_upsampling_commutes_with_the_1x1_unit_before_it():
    stage = unet2d_fedevi(in_channels=1, num_outputs=1, base_filters=4, levels=2).decoder[0].double()
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(stage.up(stage.narrow(x)), stage.narrow(stage.up(x)), rtol=1e-4, atol=1e-4)


# The autoencoder: everything passes the bottleneck


both = pytest.mark.parametrize("dimensions", [2, 3])


def tiny_autoencoder(dimensions: int = 2, **settings: Any) -> Autoencoder:
    torch.manual_seed(0)
    small = {"in_channels": 1, "num_outputs": 1, "base_filters": 2, "levels": 3}
    return autoencoder(dimensions=dimensions, **{**small, **settings})


def test_it_has_the_3d_unets_weights_without_those_that_read_skips() -> None:
    # 19,069,955 of the 3D U-Net; the first convolution of each decoder stage reads 256, 128 and 64
    # channels of the encoder into as many: 27 * (256² + 128² + 64²) = 2,322,432 weights fewer.
    with torch.device("meta"):
        model = autoencoder(in_channels=3, num_outputs=3, dimensions=3, norm="none")
    assert num_parameters(model) == 19_069_955 - 2_322_432 == 16_747_523


def test_in_2d_it_has_the_same_widths() -> None:
    # per level 9 * (in * width/2 + width/2 * width) + 3/2 width, decoder 4 * below² for the doubling and
    # 9 * (below * width + width²) + 2 width, head 64 + 1
    expected = 64 + 1
    for source, width in [(1, 64), (64, 128), (128, 256), (256, 512)]:
        expected += 9 * (source * width // 2 + width // 2 * width) + 3 * width // 2
    for below, width in [(512, 256), (256, 128), (128, 64)]:
        expected += 4 * below**2 + 9 * (below * width + width**2) + 2 * width
    with torch.device("meta"):
        model = autoencoder(in_channels=1, num_outputs=1, dimensions=2, norm="none")
    assert num_parameters(model) == expected


def test_the_bottleneck_is_all_the_decoder_sees() -> None:
    model = tiny_autoencoder().eval()
    output = model.forward_features(image(model))
    assert output.bottleneck is not None
    x = output.bottleneck
    for stage in model.decoder:
        x = stage(x)
    assert torch.equal(model.head(x), output.logits)


# FedMA


@both
@pytest.mark.parametrize("norm", get_args(Norm))
def test_reordered_channels_leave_the_function_as_it_is(dimensions: int, norm: Norm) -> None:
    model = (
        tiny_autoencoder(dimensions, norm=norm, base_filters=4, in_channels=2, num_outputs=3).double().eval()
    )
    before = params = Params.of(model)
    generator = torch.Generator().manual_seed(2)
    groups = channel_groups(model)
    for group in groups.values():
        size = group.size // group.blocks
        blocks = torch.randperm(group.blocks, generator=generator).tolist()
        order = torch.cat([block * size + torch.randperm(size, generator=generator) for block in blocks])
        params = permute(params, group, order)

    def logits(params: Params) -> Tensor:
        result: Tensor = torch.func.functional_call(model, dict(params), (image(model).double(),))
        return result

    assert params.sha256() != before.sha256()
    torch.testing.assert_close(logits(params), logits(before))
    layers = [tensor for group in groups.values() for tensor in group.layer]
    assert sorted([*layers, "head.weight", "head.bias"]) == sorted(n for n, _ in model.named_parameters())
