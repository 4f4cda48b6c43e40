"""The average of the last models, against one written out; and that everything but training uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Watcher, config, run, settings

import wardround as wr
from wardround.config import AverageSettings
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.model_average import PLAIN, ModelAverage
from wardround.errors import ConfigError
from wardround.prediction.trained import read_params

ROUNDS = 4
LAST = {"metrics": ["dice"], "overlays": 0, "calibrate": False, "model": "last"}
BATCH_NORM = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}


def models(folder: Path, **changes: Any) -> list[dict[str, torch.Tensor]]:
    """The plain model after each round: of a run that ends there, since rounds do not depend on later ones."""
    every = [run(folder / f"{n}", rounds=n, evaluate=LAST, **changes) for n in range(1, ROUNDS + 1)]
    return [dict(result.outcome.state.params) for result in every]


def averaged(plain: Sequence[dict[str, torch.Tensor]], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """A weighted sum in float64; integers are those of the last model."""
    return {
        name: sum(w * model[name].double() for w, model in zip(weights, plain, strict=True))
        if last.is_floating_point()
        else last
        for name, last in plain[-1].items()
    }


@pytest.mark.parametrize(
    ("how", "weights"),
    [
        ({"name": "ema", "decay": 0.5}, [0.125, 0.125, 0.25, 0.5]),  # the first two as their mean
        ({"name": "ema", "decay": 0.0}, [0, 0, 0, 1]),
        ({"name": "ema", "decay": 0.99}, [0.25] * 4),  # fewer rounds than it remembers: their mean
        ({"name": "swa", "share": 0.5}, [0, 0, 0.5, 0.5]),
        ({"name": "swa", "share": 0.01}, [0, 0, 0, 1]),
        ({"name": "swa", "share": 1.0}, [0.25] * 4),
    ],
)
def test_the_judged_model_is_the_average_and_the_plain_one_trains(
    tmp_path: Path, how: dict[str, Any], weights: list[float]
) -> None:
    plain = models(tmp_path / "plain", model=BATCH_NORM)
    result = run(tmp_path / "run", rounds=ROUNDS, evaluate=LAST, model=BATCH_NORM, model_average=how)
    expected = averaged(plain, weights)
    found, stored = result.outcome.state.params, Checkpoints(tmp_path / "run/checkpoints").load()

    for name, tensor in expected.items():  # running statistics among them
        assert torch.allclose(found[name].double(), tensor.double(), atol=1e-6), name
    assert {name: tensor.tolist() for name, tensor in stored[2][PLAIN].items()} == {
        name: tensor.tolist() for name, tensor in plain[-1].items()
    }
    assert stored[1].sha256() == found.sha256() == read_params(tmp_path / "run", result.config)[0].sha256()


def test_weights_of_rounds_sum_to_one_whatever_the_settings() -> None:
    for how in (AverageSettings(name="ema", decay=0.8), AverageSettings(name="swa", share=0.3)):
        average, shares = ModelAverage(how, 20), [0.0] * 20
        for number in range(1, 21):
            weight = average.weigh(number)
            shares = [share * (1 - weight) for share in shares]
            shares[number - 1] += weight
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        assert how.name == "ema" or shares == pytest.approx([0] * 14 + [1 / 6] * 6)


@pytest.mark.parametrize("how", ["ema", "swa"])
def test_a_resumed_run_has_the_average_of_the_uninterrupted_one(tmp_path: Path, how: str) -> None:
    changes = {"rounds": ROUNDS, "model_average": {"name": how, "share": 0.75}, "method": {"name": "fedavgm"}}
    whole = run(tmp_path / "whole", **changes)
    with pytest.raises(KeyboardInterrupt):
        wr.run(settings(tmp_path / "run", **changes), listener=Watcher(crash_in_round=4))
    resumed = wr.run(settings(tmp_path / "run", **changes), resume=True)

    assert resumed.params_sha256 == whole.params_sha256
    assert resumed.test.as_dict() == whole.test.as_dict()


def test_reestimated_statistics_are_measured_for_the_average_too(tmp_path: Path) -> None:
    model = {**BATCH_NORM, "bn_stats": "reestimate"}
    result = run(tmp_path / "run", rounds=3, model=model, model_average={"name": "ema"}, evaluate=LAST)
    tasks = [exchange["task"] for exchange in result.records[-1]["exchanges"]]

    assert tasks.count("norm_stats") == 2
    assert [e["task"] for e in result.records[0]["exchanges"]].count("norm_stats") == 1  # the model itself


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "ditto"}},
        {"method": {"name": "fedper"}},
        {"method": {"name": "fedbn"}, "model": BATCH_NORM},
        {"method": {"name": "local"}},
        {"method": {"name": "fedproto", "aggregate_weights": False}},
        {"model": {**BATCH_NORM, "bn_stats": "local"}},
    ],
)
def test_models_that_are_in_part_the_clients_own_are_not_averaged(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="in part its own, and an average of the server's would not fit it"):
        config(tmp_path, model_average={"name": "ema"}, **changes)
    config(tmp_path, **changes)
