"""Reordering the channels of a group must not change what a network computes."""

from typing import Any, get_args

import torch
from pytest import mark, raises
from torch import Tensor, nn

from wardround import models
from wardround.errors import ConfigError
from wardround.models import ModelSettings, Segmenter
from wardround.models.channel_groups import ChannelGroup, channel_groups, permute
from wardround.models.norm import Norm
from wardround.params import Params

UNETS = [name for name in models.MODELS if name.startswith("unet")]
NETWORKS = [(name, norm) for name in UNETS for norm in get_args(Norm)]


def network(name: str, norm: Any, **changes: Any) -> Segmenter:
    """A network in float64 whose tensors, statistics too, all differ from channel to channel."""
    torch.manual_seed(0)
    chosen = ModelSettings(name=name, norm=norm, **{"base_filters": 4, "levels": 3, **changes})
    dimensions = models.MODELS[name].dimensions[0]
    model = models.build(chosen, in_channels=2, num_outputs=3, dimensions=dimensions).double().eval()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor += 0.1 * torch.rand_like(tensor) if "var" in name else 0.1 * torch.randn_like(tensor)
    return model


def random_order(group: ChannelGroup, generator: torch.Generator) -> Tensor:
    """Blocks in a random order, and channels inside them."""
    size = group.size // group.blocks
    blocks = torch.randperm(group.blocks, generator=generator).tolist()
    return torch.cat([block * size + torch.randperm(size, generator=generator) for block in blocks])


def logits(model: Segmenter, params: Params) -> Tensor:
    image = torch.rand(2, 2, *[8] * model.dimensions, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        result: Tensor = torch.func.functional_call(model, dict(params), (image,))
    return result


@mark.parametrize("name, norm", NETWORKS)
@mark.parametrize("stem", ["none", "variational"])
def test_reordered_groups_leave_the_function_as_it_is(name: str, norm: str, stem: str) -> None:
    model = network(name, norm, stem=stem, variational={"channels": 3})
    before = params = Params.of(model)
    generator = torch.Generator().manual_seed(2)
    for group in channel_groups(model).values():
        params = permute(params, group, random_order(group, generator))

    assert params.sha256() != before.sha256()
    assert {key: t.shape for key, t in params.items()} == {key: t.shape for key, t in before.items()}
    assert (logits(model, params) - logits(model, before)).abs().max() < 1e-9


@mark.parametrize("name, norm", NETWORKS)
def test_every_parameter_but_the_head_belongs_to_one_layer(name: str, norm: str) -> None:
    model = network(name, norm)
    layers = [tensor for group in channel_groups(model).values() for tensor in group.layer]

    assert sorted([*layers, "head.weight", "head.bias"]) == sorted(
        name for name, _ in model.named_parameters()
    )


def test_heads_of_deep_supervision_follow_the_channels_they_read() -> None:
    model = network("unet2d", "instance", levels=4, deep_supervision=True)
    params = Params.of(model)
    image = torch.rand(2, 2, 16, 16).double()
    model.train()
    before = model.forward_features(image).deep
    for group in channel_groups(model).values():
        params = permute(params, group, random_order(group, torch.Generator().manual_seed(2)))
    params.load_into(model)

    assert len(before) == 1
    assert (model.forward_features(image).deep[0] - before[0]).abs().max() < 1e-9


def test_a_skip_is_read_in_two_blocks() -> None:
    groups = channel_groups(network("unet2d", "instance", levels=2))

    skip, up = groups["encoder.0.second.conv"], groups["decoder.0.up"]
    assert ("decoder.0.convs.first.conv.weight", 1, 0) in skip.places
    assert up.places == [
        ("decoder.0.up.weight", 1, 0),
        ("decoder.0.up.bias", 0, 0),
        ("decoder.0.convs.first.conv.weight", 1, 4),
    ]


def test_running_statistics_follow_and_the_counter_of_batches_does_not() -> None:
    groups = channel_groups(network("unet2d", "batch", levels=2))

    places = [tensor for tensor, _, _ in groups["encoder.0.first.conv"].places]
    assert places == [
        "encoder.0.first.conv.weight",
        "encoder.0.first.norm.weight",
        "encoder.0.first.norm.bias",
        "encoder.0.first.norm.running_mean",
        "encoder.0.first.norm.running_var",
        "encoder.0.second.conv.weight",
    ]


def test_channels_that_leave_their_block_of_a_group_norm_change_the_function() -> None:
    model = network("unet2d", "group")
    group = channel_groups(model)["encoder.2.first.conv"]
    assert (group.size, group.blocks) == (16, 8)
    before = Params.of(model)
    order = torch.arange(16).roll(1)  # every second channel leaves

    assert (logits(model, permute(before, group, order)) - logits(model, before)).abs().max() > 1e-3


def test_an_unknown_network_is_refused() -> None:
    with raises(ConfigError, match="network 'Linear' cannot be matched"):
        channel_groups(nn.Linear(2, 2))


def test_a_layer_that_was_added_is_refused_by_name() -> None:
    model = network("unet2d", "instance")
    model.projection = nn.Linear(16, 4)

    with raises(ConfigError, match=r"tensor 'projection\.weight' was added"):
        channel_groups(model)
