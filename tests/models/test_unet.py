"""The U-Nets: parameter counts, features, padding; `test_all_networks.py` has what all networks promise."""

import pytest
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wardround.models import MODELS, ModelSettings, build
from wardround.models.base import crop, pad
from wardround.models.unet import unet2d, unet2d_fedevi, unet3d

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
