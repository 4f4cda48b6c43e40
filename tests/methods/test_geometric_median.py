"""Geometric median: an explicit Weiszfeld in NumPy, breakdown, edge cases, whole runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import config, run
from numpy.typing import NDArray
from pytest import approx, mark, raises

from wardround.aggregation.robust import distances_from, inner_products
from wardround.errors import ConfigError
from wardround.messages import Reply, ServerState
from wardround.methods.geometric_median import GeometricMedian
from wardround.params import Params

Array = NDArray[np.float64]


def state_of(start: Array) -> ServerState:
    params = Params({"w": torch.tensor(start), "running_mean": torch.zeros(1)})
    return ServerState(params=params, trainable=("w",))


def replies_of(points: Array, sizes: Sequence[int] | None = None, statistic: float = 0.0) -> list[Reply]:
    numbers = sizes or [1] * len(points)
    return [
        Reply(
            Params({"w": torch.tensor(point), "running_mean": torch.full((1,), statistic * k)}),
            client=str(k),
            num_examples=number,
        )
        for k, (point, number) in enumerate(zip(points, numbers, strict=True))
    ]


def median_of(points: Array, sizes: Sequence[int] | None = None, **settings: Any) -> Array:
    method, state, replies = GeometricMedian(**settings), state_of(0 * points[0]), replies_of(points, sizes)
    result = method.average(state, replies, method.weigh(state, replies))["w"]
    return np.asarray(result.numpy())


def explicit_weiszfeld(points: Array, alpha: Array, iterations: int, nu: float) -> Array:
    """The paper's algorithm with the median itself at hand, not its weights."""
    v: Array = (alpha[:, None] * points).sum(axis=0)
    for _ in range(iterations):
        beta = alpha / np.maximum(nu, np.linalg.norm(points - v, axis=1))
        v = (beta[:, None] * points).sum(axis=0) / beta.sum()
    return v


POINTS = np.random.default_rng(3).normal(size=(6, 9)) + 5


@mark.parametrize("iterations", [1, 2, 3, 100])
def test_weights_give_the_point_that_the_papers_algorithm_gives(iterations: int) -> None:
    sizes = [5, 1, 4, 2, 2, 6]
    expected = explicit_weiszfeld(POINTS, np.array(sizes) / sum(sizes), iterations, 1e-6)

    found = median_of(POINTS, sizes, iterations=iterations, weighting="samples")
    assert found == approx(expected, abs=1e-9)


def test_no_point_nearby_has_a_smaller_sum_of_distances() -> None:
    def cost(v: Array) -> float:
        return float(np.linalg.norm(POINTS - v, axis=1).sum())

    found, random = median_of(POINTS), np.random.default_rng(0)
    assert all(cost(found) <= cost(found + 1e-3 * random.normal(size=9)) for _ in range(200))
    assert cost(found) < cost(POINTS.mean(axis=0))


def test_on_a_line_it_is_the_median() -> None:
    points = np.array([[0.0], [1.0], [2.0], [7.0], [1000.0]])
    assert median_of(points) == approx([2.0], abs=1e-4)


def test_distances_follow_from_inner_products_of_the_changes() -> None:
    start = POINTS[0] + 0.3
    products = inner_products(state_of(start), replies_of(POINTS))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.1, 0.2], dtype=torch.float64)

    expected = np.linalg.norm(POINTS - weights.numpy() @ POINTS, axis=1)
    assert distances_from(products, weights).numpy() == approx(expected, abs=1e-12)
    assert products.numpy() == approx((POINTS - start) @ (POINTS - start).T, abs=1e-12)


@mark.parametrize("size", [1e2, 1e8, 1e30])
def test_an_outlier_moves_the_result_less_than_honest_clients_differ(size: float) -> None:
    honest = np.random.default_rng(1).normal(size=(4, 50)) * 0.1
    bad = size * np.random.default_rng(2).normal(size=(1, 50))

    moved = median_of(np.concatenate([honest, bad])) - median_of(honest)
    assert np.linalg.norm(moved) < np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()


def test_the_weights_sum_to_one_and_are_those_of_running_statistics_too() -> None:
    method, state = GeometricMedian(), state_of(0 * POINTS[0])
    replies = replies_of(POINTS, statistic=1.0)
    weights = method.weigh(state, replies)

    assert min(weights) > 0 and sum(weights) == approx(1, abs=1e-12)
    average = method.average(state, replies, weights)
    assert average["running_mean"].item() == approx(sum(k * w for k, w in enumerate(weights)), rel=1e-6)


def test_a_client_with_most_of_the_cases_decides_unless_all_count_alike() -> None:
    points = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])

    assert median_of(points, [8, 1, 1], weighting="samples") == approx([0, 0], abs=1e-5)
    assert np.linalg.norm(median_of(points, [8, 1, 1])) > 0.5


def test_identical_replies_and_a_client_alone_come_back_bit_for_bit() -> None:
    for count in (1, 2, 5):
        replies = replies_of(np.repeat(POINTS[:1], count, axis=0))
        method, state = GeometricMedian(), state_of(POINTS[0])
        weights = method.weigh(state, replies)
        assert weights == approx([1 / count] * count)
        assert median_of(np.repeat(POINTS[:1], count, axis=0)) == approx(POINTS[0], rel=1e-15)


def test_without_iterations_it_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    uneven = {"phantom": {"hospitals": 3, "size": 16, "cases": [4, 8, 11]}}
    off = run(tmp_path / "off", method={"name": "geometric_median", "iterations": 0}, data=uneven)
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg", "weighting": "uniform"}, data=uneven)
    on = run(tmp_path / "on", method={"name": "geometric_median"}, data=uneven)

    assert off.params_sha256 == fedavg.params_sha256 != on.params_sha256
    assert on.records[0]["weights"] != fedavg.records[0]["weights"]


@mark.parametrize("wrong", [{"nu": 0.0}, {"iterations": -1}, {"weighting": "cases"}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with raises(ConfigError, match=f"method.{next(iter(wrong))}"):
        config(tmp_path, method={"name": "geometric_median", **wrong})
