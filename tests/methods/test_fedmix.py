"""FedMix (mean-augmented): golden vectors, the three terms, which objectives fit, whole runs."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import Tensor, nn

from wardround.clients import Answer
from wardround.data.cases import Batch
from wardround.engine.memory_store import MemoryStore
from wardround.errors import ConfigError, DataError
from wardround.losses.objective import Context, CrossEntropy, Dice, Objective, Supervised
from wardround.messages import Message
from wardround.methods import METHODS, OBJECTIVES, build_objective
from wardround.methods.fedevi import Evidential
from wardround.methods.fedmix import FedMix, differentiable_twice
from wardround.params import Params

GOLDEN = vectors("fedmix_mafl")
DATA = {"phantom": {"hospitals": 3, "size": 16, "cases": [10, 12, 20]}}  # 6, 7 and 12 to train on
WITHOUT_SECOND_DERIVATIVE = {("evidential", 3), ("feduaa_evidential", 3)}  # the KL of three classes
ONE_GIVER = {"phantom": {"hospitals": 3, "size": 16, "cases": [6, 6, 20]}}  # only south has five


def context() -> Context:
    return Context(round=0, rounds=1, num_examples=1, memory={}, generator=torch.Generator())


def linear(W: Any, b: Any) -> nn.Conv2d:
    """Logits W x + b at every voxel."""
    model = nn.Conv2d(2, 2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(W, dtype=torch.float64).reshape(2, 2, 1, 1))
        model.bias.copy_(torch.tensor(b, dtype=torch.float64))  # type: ignore[union-attr]
    return model


def point(values: Any) -> Tensor:
    """An image (or soft mask) of two channels and one voxel."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, 2, 1, 1)


def mixed(method: FedMix, model: nn.Module, batch: Batch, mean: Batch, at: Context | None = None) -> Tensor:
    return method.mixed_loss(CrossEntropy().loss, model, batch, mean, at or context())


def fedmix(folder: Path, method: dict[str, Any] | None = None, **changes: Any) -> Any:
    return run(folder, **{"method": {"name": "fedmix", **(method or {})}, "data": DATA, **changes})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """FedAvg on the same data."""
    return run(tmp_path_factory.mktemp("fedavg") / "run", method={"name": "fedavg"}, data=DATA)


# Golden vectors


@pytest.mark.parametrize("name", GOLDEN)
def test_the_three_terms_are_the_golden_ones(name: str) -> None:
    given, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    model, at = linear(given["W"], given["b"]), context()
    batch = Batch(point(given["x"]), torch.tensor([[[given["y"]]]]))
    mean = Batch(point(given["xbar"]), point(given["ybar"]))

    loss = mixed(FedMix(lam=given["lambda"]), model, batch, mean, at)
    exact = mixed(FedMix(lam=given["lambda"], form="naive"), model, batch, mean)

    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert at.terms["mix_mask"].item() == pytest.approx(expected["term_label"], abs=1e-6)
    assert at.terms["mix_slope"].item() == pytest.approx(expected["term_input_gradient"], abs=1e-6)
    local = loss - at.terms["mix_mask"] - at.terms["mix_slope"]
    assert local.item() == pytest.approx(expected["term_local"], abs=1e-6)
    assert exact.item() == pytest.approx(expected["exact_global_mixup"], abs=1e-6)


# The loss


def test_a_batch_gives_what_explicit_loops_over_its_samples_give() -> None:
    rng = np.random.default_rng(0)
    W, b, lam = rng.normal(size=(2, 2)), rng.normal(size=2), 0.2
    x, y = rng.normal(size=(3, 2)), [0, 1, 1]
    x_bar, y_bar = rng.normal(size=2), np.array([0.25, 0.75])

    own = foreign = slope = 0.0
    for sample, label in zip(x, y, strict=True):
        z = W @ ((1 - lam) * sample) + b
        p = np.exp(z) / np.exp(z).sum()
        own += -math.log(p[label]) / 3
        foreign += -(y_bar * np.log(p)).sum() / 3
        slope += (W.T @ (p - np.eye(2)[label])) @ x_bar / 3  # of the batch mean, so 1/3 once
    expected = (1 - lam) * own + lam * foreign + lam * (1 - lam) * slope

    images, labels = torch.tensor(x).reshape(3, 2, 1, 1), torch.tensor(y).reshape(3, 1, 1)
    mean = Batch(point(x_bar), point(y_bar))
    found = mixed(FedMix(lam=lam), linear(W, b), Batch(images, labels), mean)
    assert found.item() == pytest.approx(expected, abs=1e-12)


def smooth_case() -> tuple[nn.Module, Batch, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1)).double()
    batch = Batch(torch.randn(2, 1, 6, 6).double(), torch.randint(2, (2, 6, 6)))
    return model, batch, Batch(torch.randn(1, 1, 6, 6).double(), torch.rand(1, 1, 6, 6).double())


def test_the_expansion_leaves_out_only_the_second_order() -> None:
    model, batch, mean = smooth_case()

    def error(lam: float) -> float:
        taylor = mixed(FedMix(lam=lam), model, batch, mean)
        exact = mixed(FedMix(lam=lam, form="naive"), model, batch, mean)
        return abs((taylor - exact).item())

    assert error(0.02) / error(0.01) == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("form", ["taylor", "naive"])
def test_gradients_of_the_loss_are_those_of_finite_differences(form: Any) -> None:
    model, batch, mean = smooth_case()
    method, weight = FedMix(lam=0.3, form=form), model[0].weight  # type: ignore[index]
    mixed(method, model, batch, mean).backward()  # type: ignore[no-untyped-call]
    step, found = 1e-5, weight.grad[1, 0, 2, 0].item()

    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[1, 0, 2, 0] += sign * step
        values.append(mixed(method, model, batch, mean).item())
        with torch.no_grad():
            weight[1, 0, 2, 0] -= sign * step
    assert found == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)


def test_both_masks_share_one_forward_pass() -> None:
    model, batch, mean = smooth_case()
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))

    mixed(FedMix(), model, batch, mean)

    assert len(passes) == 1


def test_an_empty_mean_mask_and_an_empty_label_stay_finite() -> None:
    model, batch, mean = smooth_case()
    batch.label.zero_()
    mean.label.zero_()
    loss = FedMix().mixed_loss(Dice().loss, model, batch, mean, context())
    loss.backward()  # type: ignore[no-untyped-call]

    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# Which objectives fit


@dataclass(frozen=True)
class Indexed(Supervised):
    """Takes whole classes only."""

    title = "Indexed"

    def function(self) -> Callable[..., Tensor]:
        def loss(logits: Tensor, label: Tensor, reduce: bool = True) -> Tensor:
            each = nn.functional.cross_entropy(logits, label.long(), reduction="none").flatten(1).mean(dim=1)
            return each.mean() if reduce else each

        return loss


def test_an_objective_without_soft_masks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES.own, "indexed", Indexed)

    with pytest.raises(ConfigError, match="method 'fedmix' gives soft masks, which objective 'indexed'"):
        config(tmp_path, method={"name": "fedmix"}, objective={"name": "indexed"})
    config(tmp_path, method={"name": "fedmix", "lam": 0}, objective={"name": "indexed"})


def test_an_objective_without_second_derivative_is_refused_in_the_expansion(tmp_path: Path) -> None:
    """The KL of three classes has a slope, but its slope pretends to be a constant."""
    three = {"phantom": {"num_classes": 3}}
    evidential = {"name": "evidential"}

    with pytest.raises(ConfigError, match="'evidential' does not have for 3 classes. Use method.form=naive"):
        config(tmp_path, method={"name": "fedmix"}, objective=evidential, data=three)
    config(tmp_path, method={"name": "fedmix", "form": "naive"}, objective=evidential, data=three)
    config(tmp_path, method={"name": "fedmix"}, objective={**evidential, "lam": 0.0}, data=three)
    config(tmp_path, method={"name": "fedmix"}, objective=evidential)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "region_dice_bce"])
def test_every_other_objective_is_accepted(name: str, num_classes: int, tmp_path: Path) -> None:
    form = "naive" if (name, num_classes) in WITHOUT_SECOND_DERIVATIVE else "taylor"
    data = {"phantom": {"num_classes": num_classes}}
    made = config(tmp_path, method={"name": "fedmix", "form": form}, objective={"name": name}, data=data)

    assert isinstance(build_objective(made), OBJECTIVES[name])


def test_regions_do_not_take_soft_masks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="soft masks, which objective 'region_dice_bce' does not take"):
        config(tmp_path, method={"name": "fedmix"}, objective={"name": "region_dice_bce"})


def test_the_trial_tells_true_second_derivatives_from_missing_ones() -> None:
    logits = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(1, 3, 2, 2)

    assert differentiable_twice(Dice(), logits)
    assert differentiable_twice(Evidential(lam=0.0), logits)
    assert not differentiable_twice(Evidential(), logits)


@pytest.mark.parametrize("name", ["evidential", "cfsl", "clsl", "local_cl", "swav"])
def test_objectives_with_terms_of_their_own_train(name: str, tmp_path: Path) -> None:
    two = {"phantom": {"hospitals": 2, "size": 16, "cases": 10}}
    result = fedmix(tmp_path, objective={"name": name}, data=two, rounds=1)

    assert result.summary["num_lost"] == 0
    for loss in result.records[0]["loss"].values():
        assert loss["mix_mask"] > 0 and all(math.isfinite(value) for value in loss.values())


def test_an_objective_s_memory_moves_once_a_step(tmp_path: Path) -> None:
    """CFSL divides its alpha by three in every step; the second mask must not do it again."""
    two = {"phantom": {"hospitals": 2, "size": 16, "cases": 10}}
    result = fedmix(tmp_path, objective={"name": "cfsl"}, data=two, rounds=1)
    memory = MemoryStore(result.folder / "clients" / "north").load()

    assert memory["objective"]["alpha"].item() == pytest.approx(0.5 / 3**2)  # 6 cases, 2 steps of 4


def test_running_statistics_count_each_batch_once(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    two = {"phantom": {"hospitals": 2, "size": 16, "cases": 10}}
    rest = {"optimizer": {"name": "sgd", "learning_rate": 0.0}, "model": model, "data": two, "rounds": 1}
    mixing = fedmix(tmp_path / "fedmix", {"lam": 1e-9}, objective={"name": "infonce"}, **rest)
    plain = run(tmp_path / "fedavg", method={"name": "fedavg"}, objective={"name": "infonce"}, **rest)

    for name, tensor in plain.outcome.state.params.items():
        assert torch.allclose(mixing.outcome.state.params[name], tensor, rtol=1e-5, atol=1e-6), name


# Whole runs


def test_lam_zero_is_fedavg(plain: Any, tmp_path: Path) -> None:
    off = fedmix(tmp_path / "off", {"lam": 0.0})

    assert off.params_sha256 == plain.params_sha256
    assert not (off.folder / "setup.json").exists()


@pytest.mark.parametrize("form", ["taylor", "naive"])
def test_mixing_changes_the_model_and_its_terms_are_recorded(form: str, plain: Any, tmp_path: Path) -> None:
    mixing = fedmix(tmp_path / "fedmix", {"form": form})

    assert mixing.params_sha256 != plain.params_sha256
    for loss in mixing.records[1]["loss"].values():
        assert loss["mix_mask"] > 0 and ("mix_slope" in loss) == (form == "taylor")


def test_clients_below_a_group_contribute_nothing_and_all_train_as_fedavg(tmp_path: Path) -> None:
    few = {"phantom": {"hospitals": 3, "size": 16, "cases": 6}}  # 4 to train on
    mixing = fedmix(tmp_path / "fedmix", data=few)
    plain = run(tmp_path / "fedavg", method={"name": "fedavg"}, data=few)

    assert mixing.params_sha256 == plain.params_sha256
    assert "FedMix: no client contributed before the first round" in mixing.records[0]["warnings"][0]


def test_the_only_giver_mixes_with_nobody(tmp_path: Path) -> None:
    losses = fedmix(tmp_path, data=ONE_GIVER).records[0]["loss"]

    assert {name: "mix_mask" in loss for name, loss in losses.items()} == {
        "east": True,
        "north": True,
        "south": False,
    }


def test_means_travel_once_as_float16(tmp_path: Path) -> None:
    result = fedmix(tmp_path)
    voxels = 16 * 16
    (contribute,) = json.loads((tmp_path / "setup.json").read_text())["exchanges"]
    one = 2 * 2 * voxels  # image and mask, two bytes each
    given = {"north": one, "east": one, "south": 2 * one}  # 6, 7 and 5 + 7 cases
    model = result.outcome.state.params.num_bytes
    rounds = [record["exchanges"][0]["bytes_down"] for record in result.records]

    assert contribute["bytes_up"] == given
    assert rounds[0] == {name: model + 4 * one - given[name] for name in given}
    assert rounds[1] == dict.fromkeys(given, model)


@pytest.mark.parametrize(
    ("objective", "num_classes", "channels"), [("dice", 2, 1), ("evidential", 2, 2), ("dice", 3, 3)]
)
def test_mean_masks_have_the_channels_of_the_network(
    objective: str, num_classes: int, channels: int, tmp_path: Path
) -> None:
    data = {"phantom": {**DATA["phantom"], "num_classes": num_classes}}
    bank = fedmix(tmp_path, objective={"name": objective}, data=data, rounds=1).outcome.state.memory["bank"]

    label = bank["south"]["label"]
    assert label.shape == (2, channels, 16, 16) and bool((label >= 0).all()) and bool((label <= 1).all())
    if channels > 1:
        assert torch.allclose(label.float().sum(dim=1), torch.ones(2, 16, 16), atol=2e-3)


def test_a_client_of_many_cases_makes_larger_groups(tmp_path: Path) -> None:
    bank = fedmix(tmp_path, {"max_means": 1}, rounds=1).outcome.state.memory["bank"]

    assert {name: len(part["image"]) for name, part in bank.items()} == {"north": 1, "east": 1, "south": 1}


def test_groups_below_five_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method.group is 4; it must be greater than or equal to 5"):
        config(tmp_path, method={"name": "fedmix", "group": 4})


def bank_of(image: Tensor, label: Tensor, **more: Tensor) -> Params:
    return Params({"image": image.half(), "label": label.half(), **more})


ONE_MEAN = torch.zeros(1, 1, 16, 16)


@pytest.mark.parametrize("method", ["fedmix", "fedbr"])
@pytest.mark.parametrize(
    ("bank", "reason"),
    [
        (Params(), "not of image and label"),
        (Params({"image": ONE_MEAN.half()}), "not of image and label"),
        (bank_of(ONE_MEAN, ONE_MEAN, more=ONE_MEAN), "not of image and label"),
        (bank_of(ONE_MEAN, ONE_MEAN[..., 0]), "do not belong together"),
        (bank_of(torch.zeros(()), torch.zeros(())), "do not belong together"),
        (bank_of(ONE_MEAN[:0], ONE_MEAN[:0]), "do not belong together"),
        (bank_of(ONE_MEAN.expand(2, 1, 16, 16), ONE_MEAN.expand(2, 1, 16, 16)), "fewer than 5 each"),
        (bank_of(ONE_MEAN, ONE_MEAN + 6e4), "not between 0 and 1"),
        (Params({"image": ONE_MEAN, "label": ONE_MEAN}), "not float16"),
    ],
)
def test_means_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, bank: Params, reason: str
) -> None:
    bad = Message(extras={"bank": bank})
    spoil(monkeypatch, "east", lambda answer: replace(answer, message=bad), "contribute")
    result = run(tmp_path, rounds=1, method={"name": method, "group": 5}, data=DATA)

    refused = json.loads((result.folder / "setup.json").read_text())["refused"]
    assert list(refused) == ["contribute/east"] and reason in refused["contribute/east"]
    assert not result.records[0]["lost"] and len(result.records[0]["weights"]) == 3


@pytest.mark.parametrize(
    ("method", "image", "label"),
    [
        ("fedmix", (1, 1, 16, 16), (1, 3, 16, 16)),
        ("fedbr", (1, 1, 16, 16), (1, 3, 16, 16)),
        ("fedbr", (1, 2, 16, 16), (1, 1, 16, 16)),
        ("fedbr", (1, 1, 16, 16, 16), (1, 1, 16, 16, 16)),
    ],
)
def test_means_that_no_network_here_takes_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, image: Any, label: Any
) -> None:
    """Else one client could shut all others out, and the model would be its own."""
    bad = Message(extras={"bank": bank_of(torch.zeros(image), torch.zeros(label))})
    spoil(monkeypatch, "east", lambda answer: replace(answer, message=bad), "contribute")
    result = run(tmp_path, rounds=1, method={"name": method, "group": 5}, data=DATA)

    assert not result.records[0]["lost"] and len(result.records[0]["weights"]) == 3


def halved(answer: Answer) -> Answer:
    """The same contribution on a coarser grid."""
    coarse = Params({name: tensor[..., ::2, ::2] for name, tensor in answer.message.extras["bank"].items()})
    return replace(answer, message=Message(extras={"bank": coarse}))


def test_means_of_different_grids_stop_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "north", halved, "contribute")

    with pytest.raises(DataError, match="'fedmix'.*'east' are 16x16 and those of 'north' 8x8"):
        fedmix(tmp_path)


def test_a_client_of_another_grid_leaves_the_round_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "south", halved, "contribute")  # the only giver
    result = fedmix(tmp_path, data=ONE_GIVER, rounds=1)

    assert set(result.records[0]["lost"]) == {"train/east", "train/north"}
    assert "'north' are 16x16 and those of 'other clients' 8x8" in result.records[0]["lost"]["train/north"]


def test_the_promises_are_tested_with_means_in_play(tmp_path: Path) -> None:
    """The federation of test_methods.py gives every client a mean of others."""
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 10, 14]}}
    assert len(fedmix(tmp_path, data=data, rounds=1).outcome.state.memory["bank"]) >= 2
    assert METHODS["fedmix"] is FedMix and issubclass(OBJECTIVES[FedMix.objective], Objective)
