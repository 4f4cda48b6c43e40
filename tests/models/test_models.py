"""The registry, and MONAI's networks by name."""

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from wardround.errors import ConfigError
from wardround.models import MODELS, ModelSettings, build, head_names, resolve


def monai(name, dimensions=2, in_channels=1, num_outputs=2, **arguments):
    torch.manual_seed(0)
    settings = ModelSettings(name=f"monai:{name}", arguments=arguments)
    return build(settings, in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions)


def error_of(settings, dimensions=2):
    with pytest.raises(ConfigError) as caught:
        build(ModelSettings(**settings), in_channels=1, num_outputs=1, dimensions=dimensions)
    return str(caught.value)


# Settings


def test_resolved_settings_show_the_networks_own_defaults():
    resolved = resolve(ModelSettings(name="unet3d", levels=3))
    assert (resolved.base_filters, resolved.levels, resolved.norm) == (32, 3, "instance")
    assert resolve(ModelSettings()).base_filters == 64
    assert resolve(ModelSettings(name="unet2d_fedevi")).base_filters == 16


@pytest.mark.parametrize("name", list(MODELS))
def test_a_builders_defaults_are_those_listed(name):
    info = MODELS[name]
    with torch.device("meta"):
        listed = build(ModelSettings(name=name), in_channels=1, num_outputs=1, dimensions=info.dimensions[0])
        both = {"dimensions": info.dimensions[0]} if len(info.dimensions) > 1 else {}
        plain = info.builder(in_channels=1, num_outputs=1, **both)
    assert str(listed) == str(plain)
    assert info.title and info.paper


@pytest.mark.parametrize(
    "wrong",
    [
        {"nrom": "batch"},
        {"norm": "bn"},
        {"base_filters": 0},
        {"levels": 1},
        {"dropout": 1.0},
        {"bn_stats": "none"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ModelSettings(**wrong)


def test_settings_are_frozen_and_default_arguments_are_not_shared():
    first, second = ModelSettings(), ModelSettings()
    assert first.arguments is not second.arguments
    with pytest.raises(ValidationError):
        first.name = "unet3d"


def test_a_misspelt_name_gets_a_suggestion():
    message = error_of({"name": "unet2"})
    assert "model.name is 'unet2'. Did you mean 'unet2d'?" in message
    assert "monai:SegResNet" in message


def test_the_wrong_dimensions_name_both_and_the_right_network():
    message = error_of({"name": "unet3d"})
    assert message.startswith("model.name is 'unet3d', a 3D network, but the data are 2D. Use 'unet2d' or ")
    assert (
        "'unet3d' or " in error_of({"name": "unet2d"}, dimensions=3).partition("but the data are 3D. Use ")[2]
    )


def test_a_network_without_arguments_of_its_own_takes_none():
    message = error_of({"arguments": {"dropout_prob": 0.1}})
    assert message == "model.arguments.dropout_prob is not known to 'unet2d'. It takes: none"
    message = error_of({"arguments": {"levels": 3}})
    assert message == "model.arguments.levels: write it as model.levels, as for all our networks."


@pytest.mark.parametrize("setting", [{"base_filters": 8}, {"levels": 3}, {"norm": "batch"}, {"dropout": 0.1}])
def test_our_settings_are_not_for_monai_networks(setting):
    message = error_of({"name": "monai:SegResNet", **setting})
    assert message.startswith(f"model.{next(iter(setting))} is for our own networks")


def test_importing_models_does_not_import_monai():
    code = "import sys, wardround.models; sys.exit('monai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# MONAI


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_monai_network_takes_any_size(dimensions):
    model = monai("SegResNet", dimensions, in_channels=3, num_outputs=4, init_filters=8)
    sides = (33, 20, 7)[:dimensions]
    x = torch.randn(1, 3, *sides)
    assert model(x).shape == (1, 4, *sides)
    assert model.divisor == 32


def test_a_monai_network_is_the_network_monai_builds():
    from monai.networks.nets import BasicUNet

    model = monai("BasicUNet", features=[4] * 6).eval()
    torch.manual_seed(0)
    theirs = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=[4] * 6).eval()
    x = torch.randn(2, 1, 32, 64)
    assert torch.equal(model(x), theirs(x))


def test_the_channel_arguments_are_found_by_signature():
    from wardround.models import registry

    class Old(nn.Conv2d):
        def __init__(self, dimensions: int, in_channels: int, num_classes: int) -> None:
            assert dimensions == 2
            super().__init__(in_channels, num_classes, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "find_monai_network", lambda name: Old)
        model = monai("Old", in_channels=3, num_outputs=5)
    assert model(torch.randn(1, 3, 8, 8)).shape == (1, 5, 8, 8)


def test_of_several_outputs_the_first_counts():
    settings = {
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
        "deep_supervision": True,
    }
    model = monai("DynUNet", **settings).train()  # stacks them in training
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 2, 32, 32)
    model = monai("SegResNetDS", init_filters=8, blocks_down=[1, 1, 1], dsdepth=2).train()  # lists them
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 2, 32, 32)


def test_an_unknown_monai_network_gets_a_suggestion():
    message = error_of({"name": "monai:segresnt"})
    assert (
        "model.name is 'monai:segresnt', which MONAI does not have. Did you mean 'monai:SegResNet'" in message
    )


def test_a_misspelt_monai_argument_gets_a_suggestion():
    message = error_of({"name": "monai:SegResNet", "arguments": {"init_filter": 8}})
    assert "model.arguments.init_filter is not known to 'monai:SegResNet'." in message
    assert "Did you mean 'init_filters'?" in message
    assert "in_channels" not in message


def test_an_argument_the_data_decide_is_refused():
    message = error_of({"name": "monai:SegResNet", "arguments": {"out_channels": 8}})
    assert "model.arguments.out_channels is 8; leave it out" in message


def test_missing_monai_arguments_are_named():
    assert error_of({"name": "monai:UNet"}) == ("model.arguments: 'monai:UNet' also needs channels, strides.")


def test_what_monai_says_about_wrong_values_reaches_the_user():
    message = error_of({"name": "monai:SegResNet", "arguments": {"upsample_mode": "magic"}})
    assert message.startswith("model.arguments: 'monai:SegResNet' cannot be built with them: ")


def test_a_network_without_channel_arguments_is_refused():
    assert "takes no numbers of input and output channels" in error_of({"name": "monai:Generator"})


def test_a_classifier_is_found_out_when_it_is_built():
    arguments = {"init_features": 4, "growth_rate": 4, "block_config": [1, 1]}
    message = error_of({"name": "monai:DenseNet", "arguments": arguments})
    assert (
        "'monai:DenseNet', which turns an image of (2, 1, 32, 32) into (2, 1), not (2, 1, 32, 32)" in message
    )


# Heads found by type


def test_the_head_of_monai_networks_is_found_by_type():
    names = head_names(monai("BasicUNet", features=[4] * 6))
    assert names == ["network.final_conv.weight", "network.final_conv.bias"]
    names = head_names(monai("SegResNet", init_filters=8))
    assert names == ["network.conv_final.2.conv.weight", "network.conv_final.2.conv.bias"]


def test_the_head_of_a_plain_module_is_its_last_layer():
    assert head_names(nn.Linear(2, 1)) == ["weight", "bias"]
    assert head_names(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 1, 1, bias=False))) == [
        "2.weight"
    ]
    with pytest.raises(ConfigError, match="no convolution or linear layer"):
        head_names(nn.ReLU())
