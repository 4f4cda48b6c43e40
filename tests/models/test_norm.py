"""Norm layers found by type; pooled moments; re-estimated statistics."""

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wardround.models import ModelSettings, build
from wardround.models.norm import (
    from_moments,
    frozen_statistics,
    make_norm,
    norm_names,
    reestimate,
    running_stats,
    to_moments,
)

BATCH_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def unet(norm="batch", dropout=0.0):
    torch.manual_seed(0)
    settings = ModelSettings(base_filters=4, levels=3, norm=norm, dropout=dropout)
    return build(settings, in_channels=1, num_outputs=1, dimensions=2)


def monai(name, **arguments):
    settings = ModelSettings(name=f"monai:{name}", arguments=arguments)
    return build(settings, in_channels=1, num_outputs=2, dimensions=2)


def small_dynunet():
    """Registers every block twice, so its state dict holds every tensor under two names."""
    return monai(
        "DynUNet",
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 8],
        norm_name="batch",
    )


# Made by name


@pytest.mark.parametrize("dimensions", [2, 3])
def test_norms_are_made_by_name(dimensions):
    x = torch.randn(2, 12, *[4] * dimensions)
    assert isinstance(make_norm("batch", 12, dimensions), _BatchNorm)
    assert not make_norm("instance", 12, dimensions).state_dict()
    assert set(make_norm("instance_affine", 12, dimensions).state_dict()) == {"weight", "bias"}
    assert make_norm("group", 12, dimensions).num_groups == 4
    assert make_norm("group", 32, dimensions).num_groups == 8
    assert make_norm("none", 12, dimensions)(x) is x
    for norm in ("batch", "instance", "instance_affine"):
        values = make_norm(norm, 12, dimensions)(x)
        torch.testing.assert_close(values.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)


# Found by type


def test_all_batch_norm_tensors_of_our_unet_are_found():
    model = unet("batch")
    names = norm_names(model)
    assert len(names) == 10 * len(BATCH_TENSORS)  # 3 levels and 2 stages of two units
    assert set(names) == {name for name in model.state_dict() if ".norm." in name}
    assert norm_names(model, (_BatchNorm,)) == names
    assert norm_names(model, (_InstanceNorm, nn.GroupNorm)) == []


def test_instance_norm_without_affine_has_no_tensor_to_find():
    assert norm_names(unet("instance")) == []
    assert len(norm_names(unet("instance_affine"), (_InstanceNorm,))) == 20
    assert len(norm_names(unet("group"), (nn.GroupNorm,))) == 20


@pytest.mark.parametrize(
    "model",
    [
        monai("BasicUNet", features=[4] * 6, norm="batch"),
        monai("SegResNet", init_filters=8, norm=("group", {"num_groups": 4})),
        small_dynunet(),
    ],
    ids=["BasicUNet", "SegResNet", "DynUNet"],
)
def test_norm_tensors_of_monai_networks_are_found(model):
    names = norm_names(model)
    norm_layers = {
        prefix
        for prefix, module in model.named_modules(remove_duplicate=False)
        if "Norm" in type(module).__name__
    }
    expected = {name for name in model.state_dict() if name.rpartition(".")[0] in norm_layers}
    assert expected
    assert set(names) == expected
    assert len(names) == len(expected)


def test_layer_norm_is_found():
    assert norm_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == ["1.weight", "1.bias"]


def test_running_statistics_are_named_in_pairs():
    model = unet("batch")
    stats = running_stats(model)
    assert stats[0] == ("encoder.0.first.norm.running_mean", "encoder.0.first.norm.running_var")
    assert len(stats) == 10
    assert all(name in model.state_dict() for pair in stats for name in pair)
    assert running_stats(unet("instance")) == []
    assert running_stats(nn.BatchNorm2d(3)) == [("running_mean", "running_var")]
    assert running_stats(nn.BatchNorm2d(3, track_running_stats=False)) == []
    assert len(running_stats(nn.InstanceNorm2d(3, track_running_stats=True))) == 1


def test_statistics_registered_twice_are_named_twice():
    model = small_dynunet()
    stats = running_stats(model)
    expected = [name for name in model.state_dict() if name.endswith("running_var")]
    assert sorted(var for _, var in stats) == sorted(expected)


# Pooled moments


def test_averaged_moments_pool_the_variances_exactly():
    # golden case "batchnorm_buffers" of fedavg.json: n = 10 and 30
    stats = [("running_mean", "running_var")]
    clients = [
        {"running_mean": torch.tensor([0.0, 1.0]), "running_var": torch.tensor([1.0, 2.0])},
        {"running_mean": torch.tensor([2.0, -1.0]), "running_var": torch.tensor([3.0, 1.0])},
    ]
    sent = [to_moments(client, stats) for client in clients]
    mean = {name: 0.25 * sent[0][name] + 0.75 * sent[1][name] for name in sent[0]}
    pooled = from_moments(mean, stats)
    assert pooled["running_mean"].tolist() == [1.5, -0.5]
    assert pooled["running_var"].tolist() == [3.25, 2.0]


def test_moments_there_and_back_leave_a_models_state_as_it_was():
    model = unet("batch")
    model(torch.randn(2, 1, 16, 16))
    state, stats = model.state_dict(), running_stats(model)
    sent = to_moments(state, stats)
    assert any(not torch.equal(sent[var], state[var]) for _, var in stats)
    back = from_moments(sent, stats)
    assert list(back) == list(state)
    for name in state:
        assert back[name].dtype == state[name].dtype
        torch.testing.assert_close(back[name], state[name])


def test_a_variance_below_zero_becomes_zero():
    tensors = {"mean": torch.tensor([2.0]), "var": torch.tensor([3.9])}
    assert from_moments(tensors, [("mean", "var")])["var"].tolist() == [0.0]


def test_statistics_that_stay_home_are_passed_over():
    tensors = {"w": torch.ones(2)}
    assert to_moments(tensors, [("mean", "var")]) == tensors
    assert from_moments(tensors, [("mean", "var")]) == tensors


# Re-estimated statistics


def test_reestimated_statistics_are_the_plain_mean_over_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5))
    batches = [torch.randn(4, 3, 5, 5) + shift for shift in (0.0, 1.0, 5.0)]
    reestimate(model, batches)
    means = torch.stack([batch.mean(dim=(0, 2, 3)) for batch in batches])
    variances = torch.stack([batch.var(dim=(0, 2, 3)) for batch in batches])
    torch.testing.assert_close(model[0].running_mean, means.mean(dim=0))
    torch.testing.assert_close(model[0].running_var, variances.mean(dim=0))
    assert model[0].num_batches_tracked == 3


def test_reestimating_forgets_what_was_there():
    model = nn.BatchNorm2d(2)
    model.running_mean.fill_(1e6)
    x = torch.randn(8, 2, 4, 4)
    reestimate(model, [x])
    torch.testing.assert_close(model.running_mean, x.mean(dim=(0, 2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_reestimating_restores_everything_else(training):
    model = unet("batch", dropout=0.5).train(training)
    model.encoder[0].eval()
    model.decoder[0].convs.first.norm.momentum = 0.3
    stats = {name for pair in running_stats(model) for name in pair}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    momenta = [m.momentum for m in model.modules() if isinstance(m, _BatchNorm)]
    random_state = torch.get_rng_state()

    generator = torch.Generator().manual_seed(0)
    reestimate(model, (torch.randn(2, 1, 16, 16, generator=generator) for _ in range(2)))

    assert [module.training for module in model.modules()] == flags
    assert [m.momentum for m in model.modules() if isinstance(m, _BatchNorm)] == momenta
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    for name, tensor in model.state_dict().items():
        if name in stats:
            assert not torch.equal(tensor, before[name]), name
        elif not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, before[name]), name


def test_flags_and_momentum_come_back_after_a_failure():
    model = unet("batch").train()
    with pytest.raises(RuntimeError):
        reestimate(model, [torch.randn(2, 5, 16, 16)])  # five channels, one expected
    assert all(module.training for module in model.modules())
    assert model.encoder[0].first.norm.momentum == 0.1


def test_reestimating_without_batches_or_statistics_changes_nothing():
    model = unet("batch")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reestimate(model, [])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    untouched = iter([torch.randn(1, 1, 16, 16)])
    reestimate(unet("instance"), untouched)


def test_frozen_statistics_normalise_by_the_batch_but_remember_nothing():
    model = unet().train()
    images = torch.randn(3, 1, 16, 16) + 2
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with frozen_statistics(model):
        frozen = model(images)

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(images), frozen)  # in training mode the batch's own statistics count
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
