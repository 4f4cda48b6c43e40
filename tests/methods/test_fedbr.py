"""FedBR: the contrast and the Dice by hand, pseudo-samples, the projection, whole runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Watcher, config, run, settings
from torch import Tensor, nn

import wardround as wr
from wardround.data.cases import Batch
from wardround.engine.memory_store import MemoryStore
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.segmentation import dice_loss
from wardround.methods import build_objective
from wardround.methods import fedbr as module
from wardround.methods.fedbr import FedBR, contrast, projection, pseudo_dice
from wardround.params import Params
from wardround.training.learner import Step

DATA = {"phantom": {"hospitals": 3, "size": 16, "cases": [10, 12, 20]}}  # 6, 7 and 12 to train on
NONE = nn.Identity()


def fedbr(folder: Path, method: dict[str, Any] | None = None, **changes: Any) -> Any:
    chosen = {"name": "fedbr", "group": 5, **(method or {})}
    return run(folder, **{"method": chosen, "data": DATA, **changes})


def fedavg(folder: Path, **changes: Any) -> Any:
    return run(folder, **{"method": {"name": "fedavg"}, "data": DATA, **changes})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """FedAvg on the same data."""
    return fedavg(tmp_path_factory.mktemp("fedavg") / "run")


def at_one_place(*vector: float) -> Tensor:
    return torch.tensor(vector, dtype=torch.float64).reshape(1, -1, 1, 1)


# The contrast


def test_the_contrast_of_right_angles_by_hand() -> None:
    east, north = at_one_place(2.0, 0.0), at_one_place(0.0, 3.0)

    # like the received model's, unlike the own image's: -log e^2 / (e^2 + e^0)
    assert contrast(east, east, north, 2.0, NONE).item() == pytest.approx(math.log(1 + math.exp(-2)))
    # both alike: -log 1/2
    assert contrast(east, east, east, 2.0, NONE).item() == pytest.approx(math.log(2))
    # the wrong way round: -log e^0 / (e^0 + e^2)
    assert contrast(east, north, east, 2.0, NONE).item() == pytest.approx(math.log(1 + math.exp(2)))


def cosine(a: Any, b: Any) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def looped(u: Any, g: Any, x: Any, scale: float) -> float:
    """The definition, pair by pair and place by place: maps (N, C, V)."""
    values = []
    for one, received in zip(u, g, strict=True):
        for own in x:
            for v in range(one.shape[1]):
                near = math.exp(scale * cosine(one[:, v], received[:, v]))
                far = math.exp(scale * cosine(one[:, v], own[:, v]))
                values.append(-math.log(near / (near + far)))
    return float(np.mean(values))


def test_the_contrast_is_the_mean_over_pairs_and_places() -> None:
    rng = np.random.default_rng(0)
    u, g, x = rng.normal(size=(3, 4, 6)), rng.normal(size=(3, 4, 6)), rng.normal(size=(2, 4, 6))
    maps = [torch.tensor(z).reshape(len(z), 4, 2, 3) for z in (u, g, x)]

    found = contrast(maps[0], maps[1], maps[2], 1.5, NONE)
    assert found.item() == pytest.approx(looped(u, g, x, 1.5), abs=1e-12)


def test_maps_of_unlike_size_are_compared_by_their_means() -> None:
    rng = np.random.default_rng(1)
    u, g, x = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4)), rng.normal(size=(1, 3, 6))
    mean_u, mean_g, mean_x = (z.mean(axis=2, keepdims=True) for z in (u, g, x))

    found = contrast(
        torch.tensor(u).reshape(2, 3, 2, 2),
        torch.tensor(g).reshape(2, 3, 2, 2),
        torch.tensor(x).reshape(1, 3, 2, 3),
        2.0,
        NONE,
    )
    assert found.item() == pytest.approx(looped(mean_u, mean_g, mean_x, 2.0), abs=1e-12)


def test_features_without_direction_give_a_finite_contrast_and_slope() -> None:
    dead = torch.zeros(1, 3, 2, 2, requires_grad=True)
    value = contrast(dead, torch.ones(1, 3, 2, 2), torch.ones(2, 3, 2, 2), 2.0, NONE)
    value.backward()  # type: ignore[no-untyped-call]

    assert value.item() == pytest.approx(math.log(2))
    assert dead.grad is not None and bool(torch.isfinite(dead.grad).all())


# The Dice on pseudo-samples


def test_the_pseudo_dice_by_hand() -> None:
    foreground = torch.tensor([0.5, 1.0, 0.0, 0.0], dtype=torch.float64).reshape(1, 1, 2, 2)
    mask = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64).reshape(1, 1, 2, 2)
    probabilities = torch.cat([1 - foreground, foreground], dim=1)

    expected = (2.5 - 2 * 0.75) / (2.5 + 1e-5)
    assert pseudo_dice(probabilities, mask).item() == pytest.approx(expected)
    every_class = torch.cat([1 - mask, mask], dim=1)  # the mask of an evidential network
    assert pseudo_dice(probabilities, every_class).item() == pytest.approx(expected)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_the_pseudo_dice_is_the_dice_loss(num_outputs: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, num_outputs, 4, 4)
    mask = torch.rand(2, num_outputs, 4, 4)
    objective = build_objective(config(Path("unused"), objective={"name": "dice"}))

    found = pseudo_dice(objective.probabilities(logits), mask)
    assert found.item() == pytest.approx(dice_loss(logits, mask).item(), abs=1e-6)


def test_an_empty_mask_is_no_problem() -> None:
    empty = torch.zeros(1, 1, 2, 2)
    assert pseudo_dice(torch.cat([1 - empty, empty], dim=1), empty).item() == 0


# Pseudo-samples


def test_pseudo_samples_are_shared_out_and_each_client_gets_the_others_once(tmp_path: Path) -> None:
    result = fedbr(tmp_path, {"pseudo": 3})
    one = 2 * 2 * 16 * 16  # image and mask, two bytes each
    (contribute,) = json.loads((tmp_path / "setup.json").read_text())["exchanges"]
    model = result.outcome.state.params.num_bytes
    rounds = [record["exchanges"][0]["bytes_down"] for record in result.records]

    assert contribute["bytes_up"] == dict.fromkeys(["east", "north", "south"], one)
    assert rounds[0] == dict.fromkeys(rounds[0], model + 2 * one)
    assert rounds[1] == dict.fromkeys(rounds[0], model)


def test_a_client_gives_only_disjoint_groups_and_keeps_its_own(tmp_path: Path) -> None:
    result = fedbr(tmp_path)
    bank = result.outcome.state.memory["bank"]

    assert {name: len(part["image"]) for name, part in bank.items()} == {"east": 1, "north": 1, "south": 2}
    for name, part in bank.items():
        memory = MemoryStore(result.folder / "clients" / name).load()
        assert memory["given"].sha256() == Params(dict(part)).sha256()
        assert sorted({key.split("/")[0] for key in memory["bank"]}) == sorted(set(bank) - {name})


def test_groups_below_five_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method.group is 4"):
        config(tmp_path, method={"name": "fedbr", "group": 4})


def test_clients_below_a_group_make_it_fedavg_and_the_records_say_so(plain: Any, tmp_path: Path) -> None:
    result = fedbr(tmp_path / "fedbr", {"group": 20})

    assert result.params_sha256 == plain.params_sha256
    assert "FedBR: no client contributed before the first round" in result.records[0]["warnings"][0]


def test_one_client_has_only_its_own_pseudo_samples_and_trains_as_fedavg(tmp_path: Path) -> None:
    one = {"phantom": {"hospitals": 1, "size": 16, "cases": 12}}
    result = fedbr(tmp_path / "fedbr", data=one)

    assert list(result.outcome.state.memory["bank"]) == ["north"]
    assert result.params_sha256 == fedavg(tmp_path / "fedavg", data=one).params_sha256


# Whole runs


@pytest.mark.parametrize("adversarial", [False, True])
def test_both_weights_zero_is_fedavg(adversarial: bool, plain: Any, tmp_path: Path) -> None:
    off = fedbr(tmp_path / "off", {"mu": 0.0, "lam": 0.0, "adversarial": adversarial})

    assert off.params_sha256 == plain.params_sha256
    assert not (off.folder / "setup.json").exists()


@pytest.mark.parametrize(
    ("mu", "lam", "terms"),
    [
        (0.05, 0.05, {"pseudo_contrast", "pseudo_dice"}),
        (0.05, 0.0, {"pseudo_contrast"}),
        (0.0, 0.05, {"pseudo_dice"}),
    ],
)
def test_each_term_is_used_and_recorded(
    mu: float, lam: float, terms: set[str], plain: Any, tmp_path: Path
) -> None:
    result = fedbr(tmp_path / "fedbr", {"mu": mu, "lam": lam})
    (first, *_) = result.records[0]["loss"].values()

    assert set(first) == {"total", *terms} and all(math.isfinite(first[term]) for term in terms)
    assert result.params_sha256 != plain.params_sha256


@pytest.mark.parametrize("objective", ["evidential", "cfsl", "swav"])
def test_objectives_of_other_kinds_train(objective: str, tmp_path: Path) -> None:
    result = fedbr(tmp_path, {"adversarial": True}, objective={"name": objective}, rounds=1)

    assert result.summary["num_lost"] == 0
    assert all(math.isfinite(value) for loss in result.records[0]["loss"].values() for value in loss.values())


def test_three_classes_train(tmp_path: Path) -> None:
    data = {"phantom": {**DATA["phantom"], "num_classes": 3}}
    result = fedbr(tmp_path, data=data, rounds=1)

    assert result.summary["num_lost"] == 0
    assert result.outcome.state.memory["bank"]["south"]["label"].shape == (2, 3, 16, 16)


@pytest.mark.parametrize("adversarial", [False, True])
def test_pseudo_samples_leave_running_statistics_alone(adversarial: bool, tmp_path: Path) -> None:
    rest: dict[str, Any] = {
        "model": {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"},
        "optimizer": {"name": "sgd", "learning_rate": 0.0},
        "rounds": 1,
    }
    with_them = fedbr(tmp_path / "fedbr", {"adversarial": adversarial}, **rest)
    without = fedavg(tmp_path / "fedavg", **rest).outcome.state.params

    assert with_them.outcome.state.params.only(without).sha256() == without.sha256()


def test_saved_and_resumed_equals_uninterrupted_with_pseudo_samples_in_play(tmp_path: Path) -> None:
    method = {"name": "fedbr", "group": 5, "adversarial": True}
    whole = run(tmp_path / "whole", method=method, data=DATA, rounds=3)
    broken = settings(tmp_path / "broken", method=method, data=DATA, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2, crash_at="north"))

    assert wr.run(broken, resume=True).params_sha256 == whole.params_sha256


# The projection


def test_the_projection_travels_with_the_model_and_only_then(tmp_path: Path) -> None:
    result = fedbr(tmp_path / "with", {"adversarial": True}, rounds=1)
    before, after = Params.of(build_model(result.config)), result.outcome.state.params
    names = [name for name in after if name.startswith("fedbr.")]

    assert len(names) == 4 and all(not torch.equal(before[name], after[name]) for name in names)
    assert not any(
        name.startswith("fedbr.") for name in fedbr(tmp_path / "without", rounds=1).outcome.state.params
    )


def test_the_projection_climbs_the_contrast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    climb, gains = FedBR.climb, []

    def watched(self: FedBR, step: Step, u: Batch) -> None:
        before = value(self, step, u)
        others = Params.of(step.model).without([n for n in step.model.state_dict() if n.startswith("fedbr.")])
        climb(self, step, u)
        gains.append(value(self, step, u) - before)
        assert Params.of(step.model).only(others).sha256() == others.sha256()  # the network rests

    def value(self: FedBR, step: Step, u: Batch) -> float:
        model = step.model
        with torch.no_grad():
            z_u, z_x = model.encode(u.image), model.encode(step.batch.image)
            z_g = step.context.global_.encode(u.image)
            return float(contrast(z_u, z_g, z_x, self.scale, projection(model)))

    monkeypatch.setattr(FedBR, "climb", watched)
    slow = {"name": "sgd", "learning_rate": 0.01}
    fedbr(tmp_path, {"adversarial": True}, rounds=1, optimizer=slow)

    assert len(gains) == 7 and min(gains) > 0  # 2 + 2 + 3 steps


def test_the_projection_does_nothing_but_climb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedBR, "climb", lambda self, step, u: None)
    result = fedbr(tmp_path, {"adversarial": True}, optimizer={"learning_rate": 0.01, "weight_decay": 0.1})
    before = Params.of(build_model(result.config))
    head = before.only([name for name in before if name.startswith("fedbr.")])

    assert result.outcome.state.params.only(head).sha256() == head.sha256()


def test_the_frozen_model_is_the_received_one_in_evaluation_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias, seen = FedBR.bias, []

    def watched(self: FedBR, objective: Any, model: nn.Module, u: Batch, context: Any) -> Tensor:
        frozen = context.global_.model
        seen.append((frozen.training, Params.of(frozen).sha256()))
        return bias(self, objective, model, u, context)

    monkeypatch.setattr(module.FedBR, "bias", watched)
    result = fedbr(tmp_path, rounds=1)

    assert set(seen) == {(False, Params.of(build_model(result.config)).sha256())}
