"""nnU-Net's networks: the numbers of its own package, plans with sides of their own, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wardround.errors import ConfigError
from wardround.models import ModelSettings, build
from wardround.models.base import Segmenter
from wardround.models.channel_groups import channel_groups
from wardround.models.nnunet import ResidualBlock

ANISOTROPIC = {"kernels": [[1, 3, 3], 3, 3, 3, 3, 3], "strides": [1, [1, 2, 2], 2, 2, 2, [1, 2, 2]]}


def network(dimensions: int, arguments: dict[str, Any] | None = None, **settings: Any) -> Segmenter:
    sizes = {key: settings.pop(key, value) for key, value in (("in_channels", 1), ("num_outputs", 3))}
    chosen = ModelSettings(name="nnunet", arguments=arguments or {}, **settings)
    return build(chosen, dimensions=dimensions, **sizes)


# Parameters of PlainConvUNet and ResidualEncoderUNet of dynamic-network-architectures 0.4.4 with these plans;
# biases in front of a norm, and the head of the coarsest stage, which ours leave out.
@pytest.mark.parametrize(
    ("dimensions", "settings", "theirs", "biases", "coarsest"),
    [
        (3, {}, 31_196_399, 3_840, 963),
        (3, {"arguments": ANISOTROPIC, "in_channels": 2}, 30_704_591, 3_840, 963),
        (2, {"levels": 8, "in_channels": 3, "num_outputs": 2}, 46_325_134, 9_088, 1_026),
        (3, {"arguments": {"encoder": "residual"}}, 102_350_575, 13_056, 963),
    ],
    ids=["3d", "anisotropic", "2d", "residual"],
)
def test_a_plan_has_nnunets_own_number_of_parameters(
    dimensions: int, settings: dict[str, Any], theirs: int, biases: int, coarsest: int
) -> None:
    with torch.device("meta"):
        model = network(dimensions, deep_supervision=True, **settings)

    assert sum(parameter.numel() for parameter in model.parameters()) == theirs - biases - coarsest


@pytest.mark.parametrize("encoder", ["plain", "residual"])
def test_sides_shrink_by_the_strides_of_their_axis_alone(encoder: str) -> None:
    torch.manual_seed(0)
    plan = {"encoder": encoder, "kernels": [[1, 3, 3], 3, 3, 3], "strides": [1, [1, 2, 2], [1, 2, 2], 2]}
    model = network(3, plan, levels=4, base_filters=4, deep_supervision=True)
    output = model.train().forward_features(torch.randn(1, 1, 6, 24, 20))

    assert model.padded_size((6, 24, 20)) == [6, 24, 24]
    assert output.bottleneck is not None and output.bottleneck.shape == (1, 32, 3, 3, 3)
    assert [tuple(logits.shape[2:]) for logits in output.deep] == [(6, 12, 12)]
    assert output.logits.shape == (1, 3, 6, 24, 20)
    torch.stack([logits.square().mean() for logits in (output.logits, *output.deep)]).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_widths_are_capped_and_relus_leak() -> None:
    model = network(2, {"most_filters": 12}, levels=4, base_filters=4)
    widths = [level[0].conv.out_channels for level in model.encoder]  # type: ignore[union-attr,index]

    assert widths == [4, 8, 12, 12]
    assert {layer.negative_slope for layer in model.modules() if isinstance(layer, nn.LeakyReLU)} == {0.01}
    assert not any(isinstance(layer, nn.ReLU) for layer in model.modules())


def test_a_residual_block_begins_as_its_skip() -> None:
    torch.manual_seed(0)
    model = network(2, {"encoder": "residual", "blocks": [1, 2]}, levels=2, base_filters=4)
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    x = torch.randn(1, 4, 8, 8)

    assert len(blocks) == 3
    assert torch.equal(blocks[0](x), nn.functional.leaky_relu(x, 0.01))


def test_a_plan_that_cannot_be_built_is_refused() -> None:
    for arguments, reason in (
        ({"strides": [1, 2, 2]}, "strides has 3 entries, but model.levels is 4"),
        ({"strides": [2, 2, 2, 2]}, r"strides begins with \[2, 2\]"),
        ({"kernels": [3, 3, [2, 3], 3]}, r"kernels has \[2, 3\]; give odd numbers"),
        ({"kernels": [3, 3, [3, 3, 3], 3]}, r"kernels has \[3, 3, 3\]; give 2 numbers"),
        ({"blocks": [1, 0, 1, 1]}, r"blocks is \[1, 0, 1, 1\]; give 4 numbers"),
    ):
        with pytest.raises(ConfigError, match=reason):
            network(2, arguments, levels=4)
    with pytest.raises(ConfigError, match="channels of a residual encoder cannot be matched"):
        channel_groups(network(2, {"encoder": "residual"}, levels=3, base_filters=4))
    assert len(channel_groups(network(2, levels=3, base_filters=4))) == 6 + 2 + 4
