"""What every network of ours promises: sizes, features, random streams, checkpointing, storage, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers import dice_after_fitting, four_cases, whole_and_resumed
from torch import Tensor

from wardround.models import MODELS, Segmenter, head_names
from wardround.models.foreign_networks import parameters_of
from wardround.models.norm import Norm
from wardround.storage import StoredTensors, save_tensors

OWN: dict[str, dict[str, Any]] = {  # beside 4 filters and 3 levels
    "autoencoder": {"base_filters": 2},
    "synergynet": {"codes": 16, "dropout": 0.0},
    "sam3d": {"base_filters": 12, "depth": 2, "global_every": 2, "window": 2},
}
PARTS = {
    "synergynet": {"encoder", "quantiser", "synergy", "refinement", "decoder", "head"},
    "sam3d": {"image_encoder", "detail", "decoder", "head"},
    "gelan": {"encoder", "spp", "top_down", "bottom_up", "fuse", "refine", "head"},
}
EVERY = [
    (name, dimensions)
    for name, info in MODELS.items()
    for dimensions in (2, 3)
    if dimensions in info.dimensions or "dimensions" in parameters_of(info.builder)
]
every_network = pytest.mark.parametrize(("name", "dimensions"), EVERY)


def small(name: str, dimensions: int, **settings: Any) -> Segmenter:
    torch.manual_seed(0)
    chosen = {"in_channels": 1, "num_outputs": 1, "base_filters": 4, "levels": 3, **OWN.get(name, {})}
    builder = MODELS[name].builder
    both = {"dimensions": dimensions} if "dimensions" in parameters_of(builder) else {}
    return builder(**both, **{**chosen, **settings})


def image(model: Segmenter, *sides: int, batch: int = 2) -> Tensor:
    sides = (sides or (16, 12, 8))[: model.dimensions]
    return torch.randn(batch, model.in_channels, *sides, generator=torch.Generator().manual_seed(1))


def backward(model: Segmenter, logits: Tensor) -> None:
    """Gradients of a loss with the network's own terms, as the training loop forms it."""
    torch.stack([logits.square().mean(), *model.extra_losses(2).values()]).sum().backward()  # type: ignore[no-untyped-call]


# Sizes and features


@every_network
def test_images_that_lack_channels_give_finite_logits_and_gradients(name: str, dimensions: int) -> None:
    model = small(name, dimensions, in_channels=3)
    x = image(model)
    x[0, 1:] = 0
    x[1, 0] = 0
    logits = model(x)
    backward(model, logits)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert torch.isfinite(logits).all() and all(bool(torch.isfinite(grad).all()) for grad in grads)


@every_network
@pytest.mark.parametrize(("in_channels", "num_outputs"), [(1, 1), (2, 5), (3, 2), (4, 1)])
def test_logits_have_the_images_size_and_the_outputs_asked_for(
    name: str, dimensions: int, in_channels: int, num_outputs: int
) -> None:
    model = small(name, dimensions, in_channels=in_channels, num_outputs=num_outputs)
    x = image(model)
    assert model(x).shape == (2, num_outputs, *x.shape[2:])
    assert (model.in_channels, model.num_outputs, model.dimensions) == (in_channels, num_outputs, dimensions)
    assert model.has_features


@every_network
@pytest.mark.parametrize("norm", get_args(Norm))
def test_any_size_trains_alone_in_its_batch_under_every_norm(name: str, dimensions: int, norm: Norm) -> None:
    for sides in [(1, 1, 1), (4, 4, 4), (5, 7, 9), (17, 8, 3)]:  # 4: one voxel in the bottleneck, unpadded
        model = small(name, dimensions, norm=norm, dropout=0.1)
        x = image(model, *sides, batch=1)
        output = model.forward_features(x)
        assert output.decoder is not None
        assert output.logits.shape[2:] == output.decoder.shape[2:] == x.shape[2:]
        backward(model, output.logits)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key


@every_network
@pytest.mark.parametrize("training", [True, False])
def test_encode_is_exactly_the_bottleneck(name: str, dimensions: int, training: bool) -> None:
    for sides in [(16, 12, 8), (13, 11, 9)]:
        model = small(name, dimensions, dropout=0.5).train(training)
        x = image(model, *sides)
        expected = model.forward_features(x).bottleneck
        assert expected is not None
        assert torch.equal(model.encode(x), expected)


@every_network
def test_one_pass_gives_logits_and_features(name: str, dimensions: int) -> None:
    model = small(name, dimensions).eval()
    x = image(model)
    output = model.forward_features(x)
    halved = 2 if name == "gelan" else dimensions  # whose slices are not halved
    assert output.bottleneck is not None
    assert output.bottleneck.shape[2 : 2 + halved] == tuple(side // 4 for side in x.shape[2 : 2 + halved])
    assert [stage.shape[2] for stage in output.stages] == [8, 16]
    assert output.stages[-1] is output.decoder
    assert torch.equal(output.logits, model(x))
    if halved == dimensions:
        assert torch.equal(model.output_layer()(output.decoder), output.logits)


@every_network
def test_a_size_that_divides_is_not_touched_and_another_is_padded_and_cropped(
    name: str, dimensions: int
) -> None:
    model = small(name, dimensions).eval()
    x = image(model)
    assert model._pad(x) is x
    cut = x[:, :, :13]
    padded = torch.cat([cut, cut[:, :, -1:].repeat_interleave(3, dim=2)], dim=2)
    torch.testing.assert_close(model(cut), model(padded)[:, :, :13])


# Weights and random streams


@every_network
def test_the_same_seed_gives_the_same_bytes_and_a_forward_pass_draws_none(name: str, dimensions: int) -> None:
    first, second = small(name, dimensions), small(name, dimensions).state_dict()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.state_dict().items())
    before = torch.get_rng_state()
    first.train()(image(first))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "dimensions"), [entry for entry in EVERY if entry[0] not in ("gelan", "sam3d")]
)
def test_first_activations_neither_vanish_nor_explode_without_norm(name: str, dimensions: int) -> None:
    model = small(name, dimensions, norm="none", base_filters=16, levels=4)
    output = model.forward_features(image(model, 32, 32, 32, batch=1))
    assert output.bottleneck is not None
    assert 0.05 < output.bottleneck.std() < 20
    assert 0.02 < output.logits.std() < 100


@every_network
def test_dropout_acts_in_training_only(name: str, dimensions: int) -> None:
    model = small(name, dimensions, dropout=0.5)
    x = image(model)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@every_network
def test_checkpointing_changes_neither_gradients_nor_statistics(name: str, dimensions: int) -> None:
    gradients, states = [], []
    for checkpointing in (False, True):
        model = small(name, dimensions, norm="batch")
        model.checkpointing = checkpointing
        backward(model, model(image(model)))
        gradients.append({key: p.grad for key, p in model.named_parameters()})
        states.append(model.state_dict())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


# Names and storage


@every_network
def test_names_say_where_a_tensor_belongs_and_which_layer_is_the_head(name: str, dimensions: int) -> None:
    model = small(name, dimensions, norm="batch")
    parts = {key.split(".")[0] for key in model.state_dict()}
    assert parts == PARTS.get(name, {"encoder", "decoder", "head"})
    assert head_names(model) == ["head.weight", "head.bias"]
    assert model.output_layer() is model.head


@every_network
def test_the_state_goes_through_safetensors(tmp_path: Path, name: str, dimensions: int) -> None:
    model, other = small(name, dimensions, norm="batch"), small(name, dimensions, norm="batch")
    x = image(model)
    model(x)  # moves the running statistics
    save_tensors(tmp_path / "model.safetensors", model.state_dict(), {})
    other.load_state_dict(dict(StoredTensors(tmp_path / "model.safetensors")))
    assert torch.equal(model.eval()(x), other.eval()(x))


@pytest.mark.slow
@every_network
def test_the_network_compiles_into_one_graph(name: str, dimensions: int) -> None:
    torch.compiler.reset()  # which keeps a limited number of variants of one function
    model = small(name, dimensions).eval()
    x = image(model, 13, 9, 11)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), model(x))


# Learning


@pytest.mark.parametrize(
    ("name", "dimensions", "settings", "steps", "learning_rate"),
    [
        ("autoencoder", 2, {"base_filters": 4}, 60, 0.01),
        pytest.param("autoencoder", 3, {"base_filters": 4, "levels": 2}, 90, 0.03, marks=pytest.mark.slow),
        ("gelan", 2, {"base_filters": 8}, 50, 0.01),
        ("sam3d", 2, {"base_filters": 32, "levels": 4}, 40, 0.01),
        pytest.param("sam3d", 3, {"base_filters": 32, "levels": 4}, 80, 0.01, marks=pytest.mark.slow),
    ],
)
def test_four_cases_are_learnt_by_heart(
    name: str, dimensions: int, settings: dict[str, Any], steps: int, learning_rate: float
) -> None:
    cases = four_cases(dimensions, 32 if dimensions == 2 else 16)
    model = small(name, dimensions, **settings)
    assert dice_after_fitting(model, *cases, steps=steps, learning_rate=learning_rate) > 0.9


SAM3D = {"base_filters": 8, "levels": 4, "arguments": {"depth": 2, "global_every": 2, "window": 2}}
TINY = {"base_filters": 2, "levels": 2}


@pytest.mark.parametrize(
    ("name", "dimensions", "settings", "method"),
    [
        *(("autoencoder", 2, TINY, method) for method in ("fedavg", "safcf", "fedevi", "fedma")),
        *(("gelan", *rest) for rest in ((2, TINY, "fedavg"), (3, TINY, "safcf"), (2, TINY, "fedevi"))),
        *(("sam3d", 3, SAM3D, method) for method in ("fedavg", "safcf", "fedevi")),
    ],
)
def test_it_trains_federated_and_resumes_to_the_same_bytes(
    tmp_path: Path, name: str, dimensions: int, settings: dict[str, Any], method: str
) -> None:
    whole, resumed = whole_and_resumed(
        tmp_path,
        data={"phantom": {"hospitals": 2, "dimensions": dimensions, "size": 16, "cases": 6}},
        model={"name": name, **settings},
        method={"name": method},
        optimizer={"learning_rate": 0.001, "state": "keep"},
    )
    assert len(whole.records) == 2
    assert resumed.outcome.state.params.sha256() == whole.outcome.state.params.sha256()
