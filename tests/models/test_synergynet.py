"""SynergyNet: layers, attention, what the quantiser adds to training, federated runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, get_args

import helpers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.errors import ConfigError
from wardround.models.channel_groups import channel_groups
from wardround.models.norm import Norm
from wardround.models.synergynet import Attends, CrossAttention, SynergyNet, synergynet
from wardround.models.variational import VariationalSegmenter, VariationalSettings
from wardround.storage import StoredTensors, save_tensors

both = pytest.mark.parametrize("dimensions", [2, 3])
kinds = pytest.mark.parametrize("attention", get_args(Attends))


def tiny(dimensions: int = 2, **settings: Any) -> SynergyNet:
    torch.manual_seed(0)
    small = {"in_channels": 1, "num_outputs": 1, "base_filters": 4, "levels": 3, "codes": 16}
    return synergynet(dimensions=dimensions, **{**small, **settings})


def image(model: SynergyNet, *sides: int, batch: int = 2) -> Tensor:
    sides = sides or (16, 12, 8)[: model.dimensions]
    return torch.randn(batch, model.in_channels, *sides, generator=torch.Generator().manual_seed(1))


def total(model: SynergyNet, x: Tensor) -> Tensor:
    """A loss with the network's own terms, as the training loop forms it."""
    loss: Tensor = model(x).square().mean()
    return loss + torch.stack([*model.extra_losses(len(x)).values()]).sum()


# Layers


@both
def test_it_has_the_parameters_counted_by_hand(dimensions: int) -> None:
    # 3D, one channel in and one out:
    #   encoder 27*16                                        432
    #     16-32   8*16*32   + 2 * 27*32²                  59,392
    #     32-64   8*32*64   + 3 * 27*64²                 348,160
    #     64-128  8*64*128  + 3 * 27*128²              1,392,640
    #     128-256 8*128*256 + 3 * 27*256²              5,570,560
    #   decoder, the same doubled: 3, 3, 2, 1 convolutions
    #     256-128 262,144 + 1,327,104;  128-64 65,536 + 331,776;  64-32 16,384 + 55,296;  32-16 4,096 + 6,912
    #   norm, scale and shift: 2 * (16 + 3*32 + 4*64 + 4*128 + 4*256 + 4*128 + 4*64 + 3*32 + 2*16) = 5,600
    #   two attentions: 2 * (3 * 256² + 2 * 256) = 394,240;  codebook 256 * 256 = 65,536;  head 17
    three, two = 3**dimensions, 2**dimensions
    expected = three * 16 + 17 + 256 * 256 + 2 * (3 * 256**2 + 2 * 256) + 5600
    for narrow, wide, down, up in [(16, 32, 2, 1), (32, 64, 3, 2), (64, 128, 3, 3), (128, 256, 3, 3)]:
        expected += 2 * two * narrow * wide + three * (down * wide**2 + up * narrow**2)
    with torch.device("meta"):
        model = synergynet(in_channels=1, num_outputs=1, dimensions=dimensions)
    assert sum(p.numel() for p in model.parameters()) == expected
    if dimensions == 3:
        assert expected == 9_905_825


def test_defaults_are_those_of_8s2h() -> None:
    with torch.device("meta"):
        model = synergynet(in_channels=1, num_outputs=1, dimensions=3)
    assert (model.synergy.heads, model.refinement.heads) == (8, 2)
    assert model.quantiser.codebook.shape == (256, 256)
    assert model.quantiser.commitment == 0.25
    assert model.dropout.p == 0.5
    assert [len(level[1]) if number else len(level) for number, level in enumerate(model.encoder)] == [
        *(1, 2, 3, 3, 3)
    ]
    assert [len(stage.convs) for stage in model.decoder] == [3, 3, 2, 1]
    assert sum(isinstance(module, nn.BatchNorm3d) for module in model.modules()) == 12 + 9 + 4 + 4
    assert model.divisor == 16


def test_a_scan_of_the_paper_has_1280_tokens() -> None:
    with torch.device("meta"):
        model = synergynet(in_channels=1, num_outputs=1, dimensions=3)
        assert model.encode(torch.empty(1, 1, 80, 256, 256)).shape == (1, 256, 5, 16, 16)


def test_heads_that_do_not_divide_the_channels_are_fewer() -> None:
    assert tiny(base_filters=1, levels=2).synergy.heads == 2
    assert tiny(base_filters=3).synergy.heads == 4


# Attention


@kinds
def test_attention_is_the_one_written_out(attention: Attends) -> None:
    torch.manual_seed(0)
    layer = CrossAttention(12, 3, attention).double()
    asking, asked = torch.randn(2, 2, 7, 12, dtype=torch.float64).unbind()

    def project(linear: nn.Linear, x: Tensor) -> Tensor:  # (B, N, C) -> (B, N, heads, C / heads)
        shift = 0 if linear.bias is None else linear.bias
        return (torch.einsum("bnc,dc->bnd", x, linear.weight) + shift).reshape(2, 7, 3, 4)

    q, k, v = project(layer.query, asking), project(layer.key, asked), project(layer.value, asked)
    if attention == "token":
        scores = torch.einsum("bnhc,bmhc->bhnm", q, k) / 4**0.5
        expected = torch.einsum("bhnm,bmhc->bnhc", scores.softmax(dim=-1), v)
    else:
        scores = torch.einsum("bnhc,bnhd->bhcd", q, k) / 7**0.5
        expected = torch.einsum("bhcd,bnhd->bnhc", scores.softmax(dim=-1), v)
    torch.testing.assert_close(layer(asking, asked), expected.reshape(2, 7, 12))


def test_codes_ask_and_continuous_features_answer() -> None:
    model = tiny().eval()
    bottleneck = model.encode(image(model))
    z = bottleneck.flatten(2).transpose(1, 2)
    codes = model.quantiser.codebook[model.quantiser.nearest(z.reshape(-1, 16))].reshape(z.shape)
    mixed = model.synergy(codes, z)
    expected = model.refinement(mixed, mixed)
    combined = model._combine(bottleneck)
    torch.testing.assert_close(combined.flatten(2).transpose(1, 2), expected)
    assert combined.shape == bottleneck.shape
    assert combined.is_contiguous()


def test_between_voxels_the_order_of_voxels_does_not_matter() -> None:
    model = tiny().double().eval()
    bottleneck = model.encode(image(model, 16, 16).double())
    turned = model._combine(bottleneck.transpose(2, 3)).transpose(2, 3)
    torch.testing.assert_close(turned, model._combine(bottleneck))


# Shapes


@both
@kinds
@pytest.mark.parametrize("first_side", [1, 4, 9])
def test_any_size_and_a_batch_of_one_train(dimensions: int, attention: str, first_side: int) -> None:
    model = tiny(dimensions, attention=attention)
    sides = (first_side, 4, 3)[:dimensions]  # 4, 4: one voxel in the bottleneck, were it not for the padding
    output = model.forward_features(image(model, *sides, batch=1))
    assert output.logits.shape[2:] == sides
    assert output.decoder is not None
    assert output.decoder.shape[2:] == sides
    output.logits.sum().backward()  # type: ignore[no-untyped-call]


@both
@pytest.mark.parametrize("training", [True, False])
def test_encode_is_exactly_the_continuous_bottleneck(dimensions: int, training: bool) -> None:
    model = tiny(dimensions).train(training)
    x = image(model, *(9, 7, 5)[:dimensions])
    output = model.forward_features(x)
    assert output.bottleneck is not None
    assert torch.equal(model.encode(x), output.bottleneck)
    assert (output.bottleneck >= 0).all()  # after the activation, before dropout and quantiser
    assert not torch.isin(output.bottleneck, model.quantiser.codebook).any()
    assert [stage.shape[1] for stage in output.stages] == [8, 4]
    assert output.stages[-1] is output.decoder


@pytest.mark.parametrize("norm", get_args(Norm))
@kinds
def test_every_parameter_learns_under_every_norm(norm: Norm, attention: str) -> None:
    model = tiny(norm=norm, attention=attention)
    total(model, image(model)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# The quantiser in training


def test_its_loss_exists_in_training_only() -> None:
    model = tiny(dropout=0.0)
    x = image(model)
    assert model.extra_losses(2) == {}
    model(x)
    model.eval()
    assert model.extra_losses(2) == {}  # never in a validation loss, not even a left-over one
    model(x)
    assert model.train().extra_losses(2) == {}
    model(x)
    losses = model.extra_losses(2)
    assert list(losses) == ["quantiser"]
    assert losses["quantiser"].requires_grad


def test_its_loss_is_that_of_the_bottleneck() -> None:
    model = tiny(dropout=0.0, norm="instance", commitment=0.5)
    x = image(model)
    model(x)
    z = model.encode(x).flatten(2).transpose(1, 2).reshape(-1, 16)
    distance = torch.cdist(z, model.quantiser.codebook).amin(dim=1)
    torch.testing.assert_close(model.extra_losses(2)["quantiser"], 1.5 * distance.square().mean() / 16)


def test_encoding_alone_leaves_the_quantiser_alone() -> None:
    model = tiny()
    model.encode(image(model))
    assert model.extra_losses(2) == {}
    assert model.notes() == {}


def test_notes_tell_how_the_codebook_is_used() -> None:
    model = tiny()
    model(image(model))
    notes = model.notes()
    assert set(notes) == {"codebook_perplexity", "codebook_share"}
    assert 1 <= notes["codebook_perplexity"] <= 16
    assert 1 / 16 <= notes["codebook_share"] <= 1
    assert not any(value.requires_grad for value in notes.values())


def test_a_frozen_reference_can_be_copied_in_the_middle_of_a_step() -> None:
    model = tiny()
    x = image(model)
    model(x)
    reference = copy.deepcopy(model).eval()
    assert model.extra_losses(2)
    assert torch.equal(reference.encode(x), model.eval().encode(x))


@pytest.mark.parametrize("revive", [0, 1])
def test_recomputed_blocks_count_codes_once_and_give_the_same_gradients(revive: int) -> None:
    def step(checkpointing: bool) -> tuple[SynergyNet, dict[str, Tensor]]:
        model = tiny(revive=revive, dropout=0.2)
        model.checkpointing = checkpointing
        torch.manual_seed(5)
        total(model, image(model)).backward()  # type: ignore[no-untyped-call]
        return model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (kept, gradients), (again, same) = step(False), step(True)
    torch.testing.assert_close(same, gradients)
    assert torch.equal(again.quantiser.codebook, kept.quantiser.codebook)
    assert torch.equal(again.quantiser.idle, kept.quantiser.idle)
    torch.testing.assert_close(again.notes(), kept.notes())


def test_it_trains_in_bfloat16_with_its_loss_in_float32() -> None:
    model = tiny()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(image(model))
        loss = model.extra_losses(2)["quantiser"]
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    (logits.float().mean() + loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    model = tiny(dropout=0.0)
    x = image(model, 9, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for training in (False, True):
        model.train(training)
        expected = model(x)
        theirs = model.extra_losses(2)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(model.extra_losses(2), theirs)


def test_the_variational_stem_stands_in_front() -> None:
    model = VariationalSegmenter(tiny(in_channels=3), VariationalSettings(channels=3), in_channels=2)
    model(torch.randn(2, 2, 8, 8))
    assert set(model.extra_losses(4)) == {"quantiser", "kl"}


@pytest.mark.parametrize("stem", ["none", "variational"])
def test_its_channels_cannot_be_matched_and_it_says_why(tmp_path: Path, stem: str) -> None:
    model = {"name": "synergynet", "base_filters": 4, "levels": 3, "stem": stem}
    with pytest.raises(ConfigError, match="SynergyNet cannot be matched: its skips are added"):
        helpers.config(tmp_path, model=model, method={"name": "fedma"})
    with pytest.raises(ConfigError, match="attention heads and its codebook"):
        channel_groups(tiny())


# Training


@kinds
def test_it_overfits_four_cases_with_more_than_two_codes(attention: str) -> None:
    model = tiny(base_filters=8, codes=256, dropout=0.0, attention=attention)
    assert helpers.dice_after_fitting(model, *helpers.four_cases(2, 32), steps=90, learning_rate=0.02) > 0.9
    assert model.notes()["codebook_perplexity"] > 2


def test_revival_uses_more_of_the_codebook() -> None:
    shares = []
    for revive in (0, 3):
        model = tiny(codes=64, dropout=0.0, revive=revive)
        helpers.dice_after_fitting(model, *helpers.four_cases(2, 32), steps=12, learning_rate=0.01)
        shares.append(float(model.notes()["codebook_share"]))
    assert shares[1] > 1.5 * shares[0]


@pytest.mark.slow
def test_it_overfits_four_volumes() -> None:
    model = tiny(3, base_filters=8, codes=256, dropout=0.0)
    assert helpers.dice_after_fitting(model, *helpers.four_cases(3, 16), steps=100, learning_rate=0.01) > 0.9


def test_its_state_goes_through_safetensors(tmp_path: Path) -> None:
    model, other = tiny(), tiny()
    x = image(model)
    F.mse_loss(model(x), x)
    save_tensors(tmp_path / "model.safetensors", model.state_dict(), {})
    stored = dict(StoredTensors(tmp_path / "model.safetensors"))
    assert "quantiser.codebook" in stored
    assert not [name for name in stored if "idle" in name]
    other.load_state_dict(stored)
    assert torch.equal(model.eval()(x), other.eval()(x))


@pytest.mark.parametrize("method", ["fedavg", "safcf", "fedevi"])
def test_it_trains_federated_and_resumes_to_the_same_bytes(tmp_path: Path, method: str) -> None:
    changes = {
        "data": {"phantom": {"hospitals": 2, "size": 16, "cases": 8}},
        "model": {
            "name": "synergynet",
            "base_filters": 2,
            "levels": 3,
            "dropout": 0.5,
            "arguments": {"codes": 8, "revive": 1},
        },
        "method": {"name": method},
    }
    whole, resumed = helpers.whole_and_resumed(tmp_path, **changes)
    assert resumed.params_sha256 == whole.params_sha256
    numbers = whole.records[-1]["loss"]["north"]
    assert numbers["quantiser"] > 0
    assert 1 <= numbers["codebook_perplexity"] <= 8


def test_it_trains_on_volumes_through_the_settings(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 2, "dimensions": 3, "size": 16, "cases": 6}}
    arguments = {"attention": "channel", "codes": 8}
    model = {"name": "synergynet", "base_filters": 2, "levels": 2, "arguments": arguments}
    assert helpers.run(tmp_path, rounds=1, data=data, model=model).status == "done"


@pytest.mark.parametrize(
    "wrong", [{"heads": 0}, {"attention": "voxel"}, {"commitment": -1}, {"revive": -1}, {"codes": 0.5}]
)
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"model.arguments.{next(iter(wrong))} is "):
        helpers.config(tmp_path, model={"name": "synergynet", "arguments": wrong})
