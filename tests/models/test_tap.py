"""Feature taps: what is found in MONAI's and users' networks, and that catching it changes nothing."""

import copy

import pytest
import torch
from torch import nn

from user_nets import Small
from wardround.errors import ConfigError
from wardround.models import ModelSettings, build
from wardround.models.probe import meta_copy
from wardround.models.tap import TappedSegmenter, decoder_names, step_of

MONAI = {
    "BasicUNet": {"features": [4] * 6},
    "SegResNet": {"init_filters": 8},
    "SegResNetDS": {"init_filters": 8, "blocks_down": [1, 1, 1], "dsdepth": 2},
    "DynUNet": {
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
        "deep_supervision": True,
    },
    "AttentionUnet": {"channels": [4, 8, 16], "strides": [2, 2]},
    "UNet": {"channels": [4, 8, 16], "strides": [2, 2]},
    "BasicUNetPlusPlus": {"features": [4] * 6},
}
BOTTLENECKS = {  # the module that MONAI's own code calls its deepest level, and its channels
    "BasicUNet": ("down_4", 4),
    "SegResNet": ("down_layers.3", 64),
    "SegResNetDS": ("encoder.layers.2.downsample", 32),
    "DynUNet": ("bottleneck", 8),
    "AttentionUnet": ("model.1.submodule.1.submodule", 16),
    "UNet": ("model.1.submodule.1", 24),  # its skip joins what comes in and the deepest map
    "BasicUNetPlusPlus": ("conv_4_0", 4),
}


def made(name, dimensions=2, in_channels=1, num_outputs=2, **settings):
    torch.manual_seed(0)
    chosen = ModelSettings(name=name, **settings)
    return build(chosen, in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions)


def monai(name, **changes):
    return made(f"monai:{name}", arguments=MONAI[name], **changes)


# What is found


@pytest.mark.parametrize("name", MONAI)
def test_the_deepest_map_of_monais_networks_is_found(name):
    model = monai(name)
    module, channels = BOTTLENECKS[name]
    assert model.has_features and model.tap.bottleneck.module == module
    output = model.eval().forward_features(torch.randn(2, 1, 32, 32))
    assert output.bottleneck.shape[:2] == (2, channels)


@pytest.mark.parametrize("name", MONAI)
def test_stages_grow_from_the_bottleneck_to_the_image(name):
    model = monai(name).eval()
    output = model.forward_features(torch.randn(1, 1, 33, 20))
    if name == "UNet":  # its output layer itself doubles the size
        assert output.decoder is None and output.stages == ()
        return
    sides = [stage.shape[-1] for stage in output.stages]
    assert output.stages[-1] is output.decoder and output.decoder.shape[2:] == (33, 20)
    assert sides[:-1] == sorted(set(sides[:-1])) and output.bottleneck.shape[-1] < sides[0]
    assert all(stage.shape[1] != model.num_outputs for stage in output.stages)  # no heads of deep supervision


def test_vnet_and_volumes():
    pytest.importorskip("monai")
    model = made("monai:VNet", dimensions=3, in_channels=2, num_outputs=3).eval()
    assert model.tap.bottleneck.module == "down_tr256" and model.tap.head == "out_tr.conv2"
    model = monai("SegResNet", dimensions=3, in_channels=4, num_outputs=5).eval()
    assert model.encode(torch.randn(1, 4, 9, 33, 20)).shape == (1, 64, 4, 8, 4)


def test_swin_transformers_bottleneck_is_a_map():
    pytest.importorskip("einops")
    model = made("monai:SwinUNETR", arguments={"feature_size": 12}).eval()
    assert model.tap.bottleneck.module == "encoder10" and model.needs_two
    assert model.encode(torch.randn(1, 1, 32, 32)).shape == (1, 192, 1, 2)


def test_unetrs_tokens_become_a_map():
    pytest.importorskip("einops")
    small = {"img_size": 32, "feature_size": 4, "hidden_size": 24, "mlp_dim": 24, "num_heads": 2}
    model = made("monai:UNETR", arguments=small).eval()
    assert (model.tap.bottleneck.module, model.tap.bottleneck.step) == ("vit.norm", 16)
    assert model.encode(torch.randn(1, 1, 32, 32)).shape == (1, 24, 2, 2)


def test_global_pooling_is_no_map():
    class Squeeze(Small):
        def __init__(self, in_channels, num_classes):
            super().__init__(in_channels, num_classes)
            self.squeeze = nn.AdaptiveAvgPool2d(1)

        def forward(self, x):
            return super().forward(x) * self.squeeze(self.one(x)).mean(dim=1, keepdim=True)

    assert wrapped(Squeeze(1, 2)).tap.bottleneck.module == "deep"


def wrapped(network, **changes):
    sizes = {"in_channels": 1, "num_outputs": 2, "dimensions": 2, **changes}
    return TappedSegmenter(network, name="test:Net", **sizes)


def test_padding_and_shared_modules_do_not_mislead():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.halve, self.pad, self.conv = nn.AvgPool2d(2), nn.ZeroPad2d(1), nn.Conv2d(1, 1, 3)
            self.up, self.out = nn.Upsample(scale_factor=2), nn.Conv2d(1, 2, 1)

        def forward(self, x):
            x = self.halve(x)
            for _ in range(3):  # one convolution, three times
                x = self.conv(self.pad(x))
            return self.out(self.up(x))

    model = wrapped(Padded()).eval()
    assert (model.tap.bottleneck.module, model.tap.bottleneck.call) == ("conv", 2)
    x = torch.randn(1, 1, 8, 8)
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)


def test_a_map_that_is_written_over_is_copied():
    model = made("user_nets:Rgb", in_channels=3).eval()
    assert model.tap.bottleneck.is_overwritten
    x = torch.randn(1, 3, 8, 8)
    plain = nn.functional.conv2d(x, model.network.down.weight, model.network.down.bias, stride=2)
    assert torch.allclose(model.forward_features(x).bottleneck, plain) and plain.min() < 0
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)


def test_tokens_become_the_map_of_their_patches():
    model = made("user_nets:Tokens", divisor=32).eval()
    assert (model.tap.bottleneck.module, model.tap.bottleneck.step) == ("block", 4)
    x = torch.randn(2, 1, 32, 32)
    tokens = model.network.block(model.network.embed(x).flatten(2).transpose(1, 2) + model.network.places)
    grid = model.forward_features(x).bottleneck
    assert torch.allclose(grid[1, :, 2, 5], tokens[1, 2 * 8 + 5], atol=1e-6)


def test_tokens_without_a_known_grid_are_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match=r"'block', which gives \(2, 65, 8\) for an image of \(2, 1, 32, 32\)"
    ):
        made("user_nets:Tokens", divisor=32, arguments={"class_token": True}, features="block")


def test_patches_are_found_by_their_number():
    assert step_of(4 * 2, (64, 32)) == 16 and step_of(9, (64, 64)) is None and step_of(64, (4, 4, 4)) == 1


def test_the_user_may_name_the_module():
    model = made("user_nets:Small", features="two").eval()
    x = torch.randn(1, 1, 8, 8)
    assert model.encode(x).shape == (1, 4, 4, 4)
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)


def test_a_module_that_does_not_run_is_refused_and_others_are_named():
    with pytest.raises(ConfigError, match="model.features is 'tow', which is not a module that runs.*deep"):
        made("user_nets:Small", features="tow")


def test_a_network_without_inside_has_no_features_and_says_why():
    model = made("user_nets:Flat")
    assert not model.has_features and model(torch.randn(1, 1, 5, 7)).shape == (1, 2, 5, 7)
    with pytest.raises(ConfigError, match="'user_nets:Flat', which shows no features: no module gives a map"):
        model.encode(torch.randn(1, 1, 8, 8))


def test_our_own_networks_know_their_features():
    with pytest.raises(ConfigError, match="model.features is for networks of MONAI's or your own"):
        made("unet2d", features="encoder.0")


# Catching changes nothing


@pytest.mark.parametrize("training", [False, True])
def test_logits_are_those_of_the_network_and_encode_is_exact(training):
    model = monai("SegResNet").train(training)
    x = torch.randn(2, 1, 32, 64)
    output = model.forward_features(x)
    assert torch.equal(output.logits, model.network(x)) and torch.equal(model(x), output.logits)
    assert torch.equal(model.encode(x), output.bottleneck)


def test_nothing_stays_behind_after_a_pass():
    model = made("user_nets:Small")
    state = {name: tensor.clone() for name, tensor in model.eval().state_dict().items()}
    model.encode(torch.randn(1, 1, 8, 8))
    model.forward_features(torch.randn(1, 1, 8, 8))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_an_error_inside_leaves_no_hooks():
    model = made("user_nets:Small")
    with pytest.raises(RuntimeError):
        model.encode(torch.randn(1, 2, 8, 8))
    assert all(not module._forward_hooks for module in model.modules())


def test_building_draws_no_more_random_numbers_than_the_network():
    torch.manual_seed(0)
    Small(1, 2)
    expected = torch.rand(1)
    made("user_nets:Small")
    assert torch.equal(torch.rand(1), expected)


def test_running_statistics_do_not_see_the_probe():
    model = made("user_nets:Small")
    assert model.network.one[1].num_batches_tracked == 0 and not model.network.one[1].running_mean.any()


def test_early_stop_leaves_the_decoders_statistics_alone():
    model = made("user_nets:Small").train()
    model.encode(torch.randn(2, 1, 8, 8))
    assert model.network.deep[1].num_batches_tracked == 1 and model.network.four[1].num_batches_tracked == 0


def test_copies_have_taps_of_their_own():
    model = made("user_nets:Small").eval()
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.network.deep[0].weight.zero_()
    x = torch.randn(1, 1, 8, 8)
    assert not torch.equal(model.encode(x), again.encode(x))
    assert torch.equal(again.encode(x), again.forward_features(x).bottleneck)


def test_functional_calls_show_the_given_tensors():
    model, other = made("user_nets:Small").eval(), made("user_nets:Small").eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    x = torch.randn(1, 1, 8, 8)
    logits = torch.func.functional_call(model, other.state_dict(), (x,))
    assert torch.equal(logits, other(x))


def test_gradients_flow_through_the_caught_map():
    model = made("user_nets:Small").train()
    output = model.forward_features(torch.randn(2, 1, 8, 8))
    output.bottleneck.square().mean().backward()
    assert model.network.deep[0].weight.grad.abs().sum() > 0 and model.network.four[0].weight.grad is None


def test_it_compiles_and_gives_the_same():
    model = made("user_nets:Small").eval()
    compiled = torch.compile(model.forward_features, backend="eager")
    x = torch.randn(1, 1, 8, 8)
    with torch.no_grad():
        ours, theirs = model.forward_features(x), compiled(x)
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.bottleneck, theirs.bottleneck)
    torch._dynamo.reset()


# Heads and decoders


def test_the_head_is_the_layer_that_runs_last_not_the_one_registered_last():
    model = monai("DynUNet")
    assert model.output_layer() is model.network.output_block.conv.conv


def test_the_decoder_is_what_runs_behind_the_encoder():
    names = decoder_names(made("user_nets:Small"))
    assert {name.split(".")[1] for name in names} == {"four", "five", "out"}
    unet = made("unet2d", base_filters=2, levels=2)
    assert {name.split(".")[0] for name in decoder_names(unet)} == {"decoder", "head"}
    unet.projection = nn.Linear(2, 2)  # as objectives add them
    assert {name.split(".")[0] for name in decoder_names(unet)} == {"decoder", "head"}


def test_a_ghost_has_shapes_and_no_numbers():
    model = made("user_nets:Small")
    copied = meta_copy(model)
    assert {p.device.type for p in copied.parameters()} == {"meta"} and not copied.training
    assert {p.device.type for p in model.parameters()} == {"cpu"} and model.training
