"""The U-Nets: sizes, features, padding, parameter counts."""

import pytest
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wardround.models import MODELS, ModelSettings, build, head_names
from wardround.models.base import crop, pad
from wardround.models.unet import unet2d, unet2d_fedevi, unet3d

NORMS = ["batch", "instance", "instance_affine", "group", "none"]
every_model = pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("unet")])


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


@every_model
@pytest.mark.parametrize("in_channels", [1, 2, 3, 4])
@pytest.mark.parametrize("num_outputs", [1, 2, 5])
def test_logits_have_the_images_size_and_the_outputs_asked_for(name, in_channels, num_outputs):
    model = tiny(name, in_channels=in_channels, num_outputs=num_outputs)
    x = image(model)
    assert model(x).shape == (2, num_outputs, *x.shape[2:])
    assert (model.in_channels, model.num_outputs) == (in_channels, num_outputs)
    assert model.has_features


@every_model
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_trains(name, norm):
    model = tiny(name, norm=norm, dropout=0.1)
    model(image(model)).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name


@every_model
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sides", [(16, 12, 8), (13, 11, 9)])
def test_encode_is_exactly_the_bottleneck(name, training, sides):
    model = tiny(name, dropout=0.5).train(training)
    x = image(model, *sides[: model.dimensions])
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)


@every_model
def test_one_pass_gives_logits_and_features(name):
    model = tiny(name).eval()
    x = image(model)
    output = model.forward_features(x)
    assert torch.equal(output.logits, model(x))
    assert output.bottleneck.shape[2:] == tuple(side // 4 for side in x.shape[2:])
    assert [stage.shape[2] for stage in output.stages] == [8, 16]
    assert output.stages[-1] is output.decoder
    assert torch.equal(model.head(output.decoder), output.logits)


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


@every_model
@pytest.mark.parametrize("first_side", range(1, 18, 4))
def test_any_size_gives_logits_and_decoder_of_that_size(name, first_side):
    model = tiny(name)
    sides = (first_side, 7, 5)[: model.dimensions]
    x = image(model, *sides)
    output = model.forward_features(x)
    assert output.logits.shape[2:] == sides
    assert output.decoder.shape[2:] == sides
    assert output.logits.isfinite().all()


@every_model
def test_a_size_that_divides_is_not_touched(name):
    model = tiny(name, norm="none").eval()
    x = image(model)
    assert model._pad(x) is x


def test_an_odd_image_is_the_cropped_result_of_its_padded_self():
    model = tiny("unet2d").eval()
    x = image(model, 13, 16)
    padded = torch.cat([x, x[:, :, -1:].repeat(1, 1, 3, 1)], dim=2)
    torch.testing.assert_close(model(x), model(padded)[:, :, :13])


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


# First weights, random streams, names


@every_model
def test_the_same_seed_gives_the_same_bytes(name):
    first, second = tiny(name).state_dict(), tiny(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@every_model
def test_first_activations_neither_vanish_nor_explode_without_norm(name):
    model = tiny(name, norm="none", base_filters=16, levels=4)
    output = model.forward_features(image(model, *(32,) * model.dimensions, batch=1))
    assert 0.05 < output.bottleneck.std() < 20
    assert 0.02 < output.logits.std() < 100


@every_model
def test_without_dropout_a_forward_pass_draws_no_random_numbers(name):
    model = tiny(name).train()
    before = torch.get_rng_state()
    model(image(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_acts_in_training_only():
    model = tiny("unet2d", dropout=0.5)
    x = image(model)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@every_model
def test_the_head_is_the_output_layer(name):
    assert head_names(tiny(name)) == ["head.weight", "head.bias"]


@every_model
def test_module_names_say_where_a_tensor_belongs(name):
    parts = {key.split(".")[0] for key in tiny(name, norm="batch").state_dict()}
    assert parts == {"encoder", "decoder", "head"}


@pytest.mark.slow
@every_model
def test_the_network_compiles_into_one_graph(name):
    model = tiny(name).eval()
    x = image(model, *(9,) * model.dimensions)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_nearest_upsampling_commutes_with_the_1x1_unit_before_it():
    stage = unet2d_fedevi(in_channels=1, num_outputs=1, base_filters=4, levels=2).decoder[0].double()
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(stage.up(stage.narrow(x)), stage.narrow(stage.up(x)), rtol=1e-4, atol=1e-4)
