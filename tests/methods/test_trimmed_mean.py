"""Trimmed mean and median: golden vectors, NumPy, edge cases, whole runs."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from helpers import config, run, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch, approx, mark, raises

from wardround.aggregation import mean as module
from wardround.aggregation.robust import median_cut, trimmed_mean
from wardround.clients import Clients
from wardround.errors import ConfigError
from wardround.messages import Reply, ServerState
from wardround.methods.trimmed_mean import CoordinateWise, Median, TrimmedMean
from wardround.params import Params

TRIMMED, MEDIAN = vectors("trimmed_mean"), vectors("median")


def models(rows: Sequence[Sequence[float]]) -> list[Params]:
    return [Params({"w": torch.tensor(row, dtype=torch.float64)}) for row in rows]


def after_round(method: CoordinateWise, sent: Sequence[Params], start: Params | None = None) -> ServerState:
    """One round in which the clients return these models; their sizes differ, which must not matter."""
    replies = [Reply(params, client=f"client {k}", num_examples=k + 1) for k, params in enumerate(sent)]
    state = ServerState(params=start or sent[0].zeros(), trainable=("w",))
    return method.run_round(state, cast(Clients, SimpleNamespace(ask=lambda task, message: replies)))


# Golden vectors


@mark.parametrize("name", TRIMMED)
def test_the_trimmed_mean_is_the_golden_one(name: str) -> None:
    inputs, expected = TRIMMED[name]["inputs"], TRIMMED[name]["expected"]
    method = TrimmedMean(beta=inputs["beta"])

    assert method.cut(len(inputs["client_w"])) == expected["cut_each_side"]
    after = after_round(method, models(inputs["client_w"]))
    assert after.params["w"].tolist() == approx(expected["state"], abs=1e-6)


@mark.parametrize("name", MEDIAN)
def test_the_median_is_the_golden_one(name: str) -> None:
    after = after_round(Median(), models(MEDIAN[name]["inputs"]["client_w"]))

    assert after.params["w"].tolist() == approx(MEDIAN[name]["expected"]["state"], abs=1e-6)


# The rule


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**31))
def test_any_cut_agrees_with_numpy(num: int, seed: int) -> None:
    rows = np.random.default_rng(seed).normal(size=(num, 7))
    sent = models(rows.tolist())

    for cut in range(median_cut(num) + 1):
        mean, weights = trimmed_mean(sent, cut)
        assert mean["w"].numpy() == approx(np.sort(rows, axis=0)[cut : num - cut].mean(axis=0))
        assert min(weights) >= 0 and sum(weights) == approx(1, abs=1e-12)
    assert trimmed_mean(sent, median_cut(num))[0]["w"].numpy() == approx(np.median(rows, axis=0))


def test_a_weight_is_the_share_of_coordinates_a_client_gave() -> None:
    sent = models([[1, 1, 5, 5], [2, 2, 2, 2], [9, 3, 3, -9]])

    assert trimmed_mean(sent, 1)[1] == [0.0, 0.75, 0.25]  # the middle ones are 2, 2, 3, 2


def test_an_outlier_has_no_weight_and_no_effect_however_large() -> None:
    honest = [[1.0, 2.0], [1.1, 2.1], [0.9, 1.9], [1.0, 2.2]]
    for size in (1e3, 1e30):
        after = after_round(TrimmedMean(beta=0.2), models([*honest, [-size, size]]))
        assert after.notes["weights"]["client 4"] == 0
        assert after.params["w"].tolist() == approx([0.966667, 2.1], abs=1e-6)


def test_a_large_tensor_is_sorted_in_parts_with_the_same_result(monkeypatch: MonkeyPatch) -> None:
    sent = [Params({"w": torch.randn(5, 7, 3), "none": torch.empty(0)}) for _ in range(5)]
    whole = trimmed_mean(sent, 1)
    monkeypatch.setattr(module, "PIECE", 4)
    parts = trimmed_mean(sent, 1)

    assert parts[0].sha256() == whole[0].sha256() and parts[1] == whole[1]
    assert whole[0]["w"].shape == (5, 7, 3) and whole[0]["none"].numel() == 0


def test_running_statistics_are_robust_and_counters_take_the_maximum() -> None:
    sent = [
        Params({"w": torch.tensor([x]), "running_var": torch.tensor([x]), "count": torch.tensor(int(x))})
        for x in (1.0, 2.0, 900.0)
    ]
    after = after_round(Median(), sent)

    assert after.params["running_var"].tolist() == [2.0]
    assert after.params["count"].item() == 900 and after.params["count"].dtype == torch.int64


def test_identical_replies_come_back_bit_for_bit() -> None:
    item = Params({"w": torch.randn(50)})
    for count in (1, 2, 3, 4, 5, 6):
        assert trimmed_mean([item] * count, median_cut(count))[0].sha256() == item.sha256()


def test_one_client_alone_is_taken_as_it_is_without_a_warning() -> None:
    sent = models([[1.0, -3.0]])
    for method in (TrimmedMean(), Median()):
        after = after_round(method, sent)
        assert after.params.sha256() == sent[0].sha256()
        assert after.notes == {"weights": {"client 0": 1.0}}


def test_what_does_not_travel_stays() -> None:
    start = Params({"w": torch.zeros(2, dtype=torch.float64), "head": torch.ones(3)})
    after = after_round(Median(), models([[1, 2], [3, 4], [5, 6]]), start)

    assert after.params["w"].tolist() == [3, 4] and after.params["head"].tolist() == [1, 1, 1]


def test_the_cut_is_rounded_down_but_not_by_rounding_errors() -> None:
    assert [TrimmedMean(beta=0.2).cut(num) for num in (1, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]
    assert TrimmedMean(beta=0.29).cut(100) == 29  # 0.29 * 100 is 28.999999999999996
    assert all(2 * TrimmedMean(beta=0.4999).cut(num) < num for num in range(1, 200))


# Whole runs


def test_trimming_nothing_at_beta_zero_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    off = run(tmp_path / "off", method={"name": "trimmed_mean", "beta": 0.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg", "weighting": "uniform"})

    assert off.params_sha256 == fedavg.params_sha256
    assert not any(record["warnings"] for record in off.records)


def test_a_cut_below_one_client_is_told_in_the_records(tmp_path: Path) -> None:
    three = run(tmp_path / "three", method={"name": "trimmed_mean"}, rounds=1)
    enough = run(tmp_path / "enough", method={"name": "trimmed_mean", "beta": 0.4}, rounds=1)
    median = run(tmp_path / "median", method={"name": "median"}, rounds=1)

    assert "0.2 of 3 replies is less than one, so nothing was trimmed" in three.records[0]["warnings"][0]
    assert not enough.records[0]["warnings"]
    assert enough.params_sha256 == median.params_sha256  # of three, one is left


def test_batch_norm_is_trained_too(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    result = run(tmp_path / "run", method={"name": "median"}, model=model)

    variances = [t for name, t in result.outcome.state.params.items() if name.endswith("running_var")]
    assert variances and all(bool((variance > 0).all()) for variance in variances)


@mark.parametrize("method", ["trimmed_mean", "median", "krum", "multikrum"])
def test_pooled_statistics_are_refused(method: str, tmp_path: Path) -> None:
    with raises(ConfigError, match="model.bn_stats is 'pooled'.*Use model.bn_stats=average"):
        config(tmp_path, method={"name": method}, model={"norm": "batch", "bn_stats": "pooled"})


def test_half_or_more_cannot_be_trimmed(tmp_path: Path) -> None:
    with raises(ConfigError, match="method.beta"):
        config(tmp_path, method={"name": "trimmed_mean", "beta": 0.5})
