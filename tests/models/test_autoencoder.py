"""The autoencoder: a U-Net in which everything passes the bottleneck."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from wardround.models.autoencoder import Autoencoder, autoencoder
from wardround.models.channel_groups import channel_groups, permute
from wardround.models.norm import Norm
from wardround.params import Params

both = pytest.mark.parametrize("dimensions", [2, 3])


def tiny(dimensions: int = 2, **settings: Any) -> Autoencoder:
    torch.manual_seed(0)
    small = {"in_channels": 1, "num_outputs": 1, "base_filters": 2, "levels": 3}
    return autoencoder(dimensions=dimensions, **{**small, **settings})


def image(model: Autoencoder, *sides: int, batch: int = 2) -> Tensor:
    sides = sides or (16, 12, 8)[: model.dimensions]
    return torch.randn(batch, model.in_channels, *sides, generator=torch.Generator().manual_seed(1))


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Layers


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
    model = tiny().eval()
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
    model = tiny(dimensions, norm=norm, base_filters=4, in_channels=2, num_outputs=3).double().eval()
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
