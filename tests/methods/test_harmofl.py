"""HarmoFL: the input layer wherever a model is used, the perturbation, whole runs."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, settings, spoil
from torch import Tensor

import wardround as wr
from wardround.clients import Answer
from wardround.config import OptimizerSettings
from wardround.data.cases import TensorSplit, as_stack
from wardround.data.opening import open_federation
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.losses.objective import Context, Dice
from wardround.messages import Message
from wardround.methods.frequency import amplitude_window, restyle
from wardround.methods.harmofl import AMPLITUDE, HarmoFL
from wardround.models import ModelSettings
from wardround.models import build as build_network
from wardround.models.unet import unet2d
from wardround.params import Params
from wardround.training.learner import Step
from wardround.training.workbench import Workbench

WIDE = {"name": "harmofl", "window": 2}
ONE = {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}


def pictures(*shape: Any, seed: Any = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def networks() -> Any:
    """Each without the layer, and with one that is unset."""
    for changes in (
        {"name": "unet2d", "base_filters": 2, "levels": 2},
        {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"},
        {"name": "unet2d", "base_filters": 2, "levels": 2, "stem": "variational"},
    ):
        torch.manual_seed(0)
        plain = build_network(ModelSettings(**changes), in_channels=1, num_outputs=1, dimensions=2).eval()
        harmonised = copy.deepcopy(plain)
        HarmoFL(window=1).start_model(harmonised)
        yield plain, harmonised.eval()


# The input layer


def test_an_unset_layer_is_the_identity_bit_for_bit() -> None:
    image = pictures(2, 1, 13, 16)
    for plain, harmonised in networks():
        assert torch.equal(harmonised(image), plain(image))
        assert torch.equal(harmonised.forward_features(image).logits, plain(image))


def test_every_way_into_a_model_takes_the_common_amplitude() -> None:
    image, amplitude = pictures(2, 1, 13, 16), amplitude_window(5 * pictures(1, 1, 13, 16, seed=1) + 3, 1)
    for plain, harmonised in networks():
        changed = plain(restyle(image, amplitude))
        state = {**harmonised.state_dict(), AMPLITUDE: amplitude[0]}
        assert torch.equal(torch.func.functional_call(harmonised, state, (image,)), changed)
        assert torch.equal(harmonised(image), plain(image))  # functional_call left the model alone

        harmonised.load_state_dict(state)
        again = copy.deepcopy(harmonised)  # as references are made
        for model in (harmonised, again):
            assert torch.equal(model(image), changed) and not torch.equal(changed, plain(image))
            assert torch.equal(model.forward_features(image).logits, changed)
            if model.has_features:
                assert torch.equal(model.encode(image), plain.encode(restyle(image, amplitude)))


def test_a_copy_has_a_layer_of_its_own() -> None:
    _, harmonised = next(networks())
    again = copy.deepcopy(harmonised)
    again.get_buffer(AMPLITUDE).fill_(1.0)
    assert not harmonised.get_buffer(AMPLITUDE).any()


def test_the_layer_learns_nothing_and_is_part_of_the_state() -> None:
    plain, harmonised = next(networks())
    assert set(harmonised.state_dict()) - set(plain.state_dict()) == {AMPLITUDE}
    assert list(Params.trainable(harmonised)) == list(Params.trainable(plain))


def test_frequency_zero_alone_moves_the_mean_and_keeps_the_sign() -> None:
    torch.manual_seed(0)
    model = unet2d(in_channels=2, num_outputs=1, base_filters=2, levels=2)
    HarmoFL().start_model(model)
    model.get_buffer(AMPLITUDE).copy_(torch.tensor([2.0, 3.0]).reshape(2, 1, 1))
    bright = pictures(1, 2, 8, 8) + torch.tensor([1.0, -1.0]).reshape(1, 2, 1, 1)
    seen = model.get_submodule("amplitude_norm")(bright)
    assert seen.mean(dim=(2, 3))[0].tolist() == pytest.approx([2.0, -3.0], abs=1e-5)
    centred = bright - bright.mean(dim=(2, 3), keepdim=True)
    assert torch.allclose(seen - seen.mean(dim=(2, 3), keepdim=True), centred, atol=1e-5)


# The perturbation


def test_a_step_takes_the_gradient_a_little_uphill() -> None:
    """One parameter vector w, loss |w - t|²: g = 2(w - t), step along 2(w + alpha g/||g|| - t)."""
    torch.manual_seed(0)
    model = unet2d(in_channels=1, num_outputs=1, base_filters=2, levels=2).double()
    bench = Workbench(
        model, Dice(), OptimizerSettings(name="sgd", learning_rate=0.1), device=torch.device("cpu")
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    target = {name: torch.randn_like(p) for name, p in before.items()}

    def loss(model: Any, batch: Any, context: Any) -> Any:
        return torch.stack([(p - target[n]).square().sum() for n, p in model.named_parameters()]).sum()

    context = Context(round=0, rounds=1, num_examples=1, memory={}, generator=torch.Generator())
    batch = TensorSplit(["a"], torch.zeros(1, 1, 4, 4), torch.zeros(1, 4, 4), [(1.0, 1.0)]).batch([0])

    class One:
        def fit(self, start: Any, step: Any) -> Any:
            for group in bench.optimizer.param_groups:
                group["lr"] = 0.1
            step(Step(bench, batch, context, loss, taken_apart=True))
            return self

        params = Params()

    client: Any = One()
    HarmoFL(alpha=0.5).train(client, wr.messages.Message(params=Params()))

    gradient = {n: 2 * (before[n] - target[n]).numpy() for n in before}
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    for name, parameter in model.named_parameters():
        uphill = before[name].numpy() + 0.5 * gradient[name] / norm
        expected = before[name].numpy() - 0.1 * 2 * (uphill - target[name].numpy())
        assert np.allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-12)


# Whole runs


def test_with_both_off_it_is_fedavg_with_uniform_weights(tmp_path: Path) -> None:
    off = run(tmp_path / "off", method={"name": "harmofl", "alpha": 0, "normalise": False})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg", "weighting": "uniform"})
    assert off.params_sha256 == fedavg.params_sha256
    assert not (tmp_path / "off" / "setup.json").exists()


@pytest.mark.parametrize("half", [{"alpha": 0.0}, {"normalise": False}])
def test_either_half_alone_changes_the_model(half: Any, tmp_path: Path) -> None:
    result = run(tmp_path / "half", rounds=1, method={**WIDE, **half})
    fedavg = run(tmp_path / "fedavg", rounds=1, method={"name": "fedavg", "weighting": "uniform"})
    learned = list(Params.trainable(build_model(fedavg.config)))
    both = [entry.outcome.state.params.only(learned).sha256() for entry in (result, fedavg)]
    assert both[0] != both[1]


def test_the_amplitude_is_the_plain_mean_of_the_clients_and_stays(tmp_path: Path) -> None:
    """Clients of unlike size count alike; NumPy measures the same."""
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": [4, 8, 11]}}
    result = run(tmp_path / "run", rounds=3, method=WIDE, data=data)
    federation = open_federation(result.config.data, result.config.seed)
    means = []
    for name in federation.names:
        spectra = (
            np.abs(np.fft.fft2(as_stack(federation.load(name).train, name).images[:, 0].double().numpy()))
            / 256
        )
        centred = np.fft.fftshift(spectra.mean(axis=0))
        means.append(centred[6:11, 6:11])
    expected = np.mean(means, axis=0)

    for params in (result.params, result.outcome.state.params):
        assert np.allclose(params[AMPLITUDE][0].numpy(), expected, atol=1e-6)
    once = run(tmp_path / "once", rounds=1, method=WIDE, data=data)
    assert torch.equal(once.outcome.state.params[AMPLITUDE], result.outcome.state.params[AMPLITUDE])
    assert set(result.records[0]["weights"].values()) == {1 / 3}


def test_the_amplitude_is_measured_once(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1, method=WIDE)
    (measured,) = json.loads((tmp_path / "run" / "setup.json").read_text())["exchanges"]
    assert measured["task"] == "measure" and set(measured["bytes_up"].values()) == {5 * 5 * 4}


def test_evaluation_and_a_loaded_model_see_normalised_images(tmp_path: Path) -> None:
    """A network without the layer, on images normalised beforehand, gives the same logits and losses."""
    result = run(tmp_path / "run", rounds=1, method=WIDE)
    host = Host(result.config, result.folder / "clients", ["north"])
    client = host.client("north")
    val, test = as_stack(client.data.val, "north"), as_stack(client.data.test, "north")
    amplitude = result.params[AMPLITUDE][None]
    torch.manual_seed(0)
    plain = build_model(config(tmp_path, method={"name": "fedavg"})).eval()
    result.params.without([AMPLITUDE]).load_into(plain)
    expected = plain(restyle(test.images, amplitude))
    assert not torch.allclose(plain(test.images), expected, atol=1e-3)

    (logits, _), *rest = client.predictions(test, result.params)
    assert not rest and torch.allclose(logits, expected, atol=1e-5)
    assert torch.allclose(wr.Result.load(tmp_path / "run").model(test.images), expected, atol=1e-5)
    evaluated = client.evaluate(
        result.params, lambda logits, batch: Dice().sample_losses(logits, batch.label)
    )
    again = plain(restyle(val.images, amplitude))
    assert evaluated == pytest.approx(Dice().sample_losses(again, val.labels).mean().item(), abs=1e-5)


def test_references_see_normalised_images(tmp_path: Path) -> None:
    """An objective that compares with the received model sees it exactly as it trains."""
    result = run(tmp_path / "run", rounds=1, method=WIDE)
    host = Host(result.config, result.folder / "clients", ["north"])
    image = as_stack(host.client("north").data.train, "north").images
    frozen = host.bench.reference("global", result.params)
    result.params.load_into(host.bench.model)
    assert torch.equal(frozen.encode(image), host.bench.model.eval().encode(image))
    assert not torch.equal(frozen.encode(image), frozen.model._bottleneck(image))


def test_a_client_lost_at_first_leaves_the_mean_of_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    spoil(monkeypatch, "east", lambda a: Answer(a.client, failure="gone"), "measure")
    result = run(tmp_path / "run", rounds=1, method=WIDE)
    assert result.params[AMPLITUDE].any() and set(result.records[0]["weights"]) == {"east", "north", "south"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (AMPLITUDE, torch.ones(())),
        (AMPLITUDE, torch.ones(2, 5, 5)),
        (AMPLITUDE, torch.ones(1, 5, 5, dtype=torch.complex64)),
        (AMPLITUDE, -torch.ones(1, 5, 5)),
        (AMPLITUDE, torch.full((1, 5, 5), 3e38)),
        ("head.bias", torch.full((1,), 100.0)),  # a tensor of the model, which everybody would start from
    ],
)
def test_what_is_no_amplitude_is_refused(tmp_path: Path, monkeypatch: Any, name: str, value: Tensor) -> None:
    bad = Message(extras={"amplitude": Params({name: value})})
    spoil(monkeypatch, "east", lambda a: replace(a, message=bad), "measure")
    spoiled = run(tmp_path / "spoiled", rounds=1, method=WIDE)
    spoil(monkeypatch, "east", lambda a: Answer(a.client, failure="gone"), "measure")
    lost = run(tmp_path / "lost", rounds=1, method=WIDE)

    assert spoiled.params_sha256 == lost.params_sha256
    assert set(spoiled.records[0]["weights"]) == {"east", "north", "south"}


def test_with_nobody_measuring_images_stay_as_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    for client in ("east", "north", "south"):
        spoil(monkeypatch, client, lambda a: Answer(a.client, failure="gone"), "measure")
    unset = run(tmp_path / "unset", method={**WIDE, "alpha": 0})
    plain = run(tmp_path / "plain", method={"name": "harmofl", "normalise": False, "alpha": 0})
    learned = list(plain.outcome.state.params)
    assert unset.outcome.state.params.only(learned).sha256() == plain.params_sha256


def test_one_client_alone_normalises_to_its_own_mean(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, method=WIDE, data=ONE)
    assert result.records[0]["weights"] == {"north": 1.0} and result.params[AMPLITUDE].any()


def test_works_with_an_objective_that_looks_inside(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method=WIDE, objective={"name": "clsl", "patch": 2})
    assert all(loss["contrast"] > 0 for loss in result.records[1]["loss"].values())


def test_z_scored_images_are_warned_of_in_the_first_round(tmp_path: Path) -> None:
    first, second = run(tmp_path / "run", method={"name": "harmofl"}).records
    assert "z-scored" in first["warnings"][0] and second["warnings"] == []
    assert run(tmp_path / "wide", rounds=1, method=WIDE).records[0]["warnings"] == []


def test_a_window_that_does_not_fit_stops_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        wr.errors.TooFewClients, match="a window of 19 frequencies does not fit an image of 16x16"
    ):
        wr.run(settings(tmp_path / "run", retries=0, method={"name": "harmofl", "window": 9}))
