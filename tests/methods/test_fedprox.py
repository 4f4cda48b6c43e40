"""FedProx: two rounds by hand, the off switch, whole runs."""

from pathlib import Path

from helpers import run
from pytest import approx, raises

from toy import client, pull_to, rounds, state, weights
from wardround.errors import ConfigError
from wardround.methods.fedprox import FedProx


def test_two_rounds_are_those_worked_out_by_hand() -> None:
    """F_north = (w - 1)²/2, F_east = (w + 1)², mu = 1, rate 0.1, two steps: w - 0.1 (F' + (w - w^t)).

    Round 1 from 0.  north: -0.1 (-1) = 0.1, then 0.1 - 0.1 (-0.9 + 0.1) = 0.18
                     east:  -0.1 (2) = -0.2, then -0.2 - 0.1 (1.6 - 0.2) = -0.34     mean -0.08
    Round 2 from -0.08. north: -0.08 + 0.108 = 0.028, then 0.028 - 0.1 (-0.972 + 0.108) = 0.1144
                     east: -0.08 - 0.184 = -0.264, then -0.264 - 0.1 (1.472 - 0.184) = -0.3928   mean -0.1392
    """
    north = client("north", gradient=pull_to(1.0), steps=2, num_weights=1)
    east = client("east", gradient=pull_to(-1.0, curvature=2.0), steps=2, num_weights=1)
    first, second = rounds(FedProx(mu=1.0), state([0.0]), [north, east], 2, num_weights=1)

    assert weights(first.params) == approx([-0.08], abs=1e-12)
    assert weights(second.params) == approx([-0.1392], abs=1e-12)


def test_the_pull_is_zero_in_the_first_step_and_recorded_as_a_mean_over_steps() -> None:
    north = client(gradient=lambda w, step: [1.0, 0.0], steps=2)
    list(rounds(FedProx(mu=0.5), state([0.0, 0.0]), [north], 1))

    assert north.fitted is not None
    assert north.fitted.loss["proximal"] == approx((0 + 0.5 / 2 * 0.1**2) / 2)


def test_fedprox_with_mu_zero_is_fedavg(tmp_path: Path) -> None:
    fedprox = run(tmp_path / "fedprox", method={"name": "fedprox", "mu": 0.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})

    assert fedprox.params_sha256 == fedavg.params_sha256
    assert "proximal" not in fedprox.records[0]["loss"]["north"]


def test_the_pull_changes_the_model_and_is_recorded(tmp_path: Path) -> None:
    fedprox = run(tmp_path / "fedprox", method={"name": "fedprox", "mu": 10.0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})

    assert fedprox.params_sha256 != fedavg.params_sha256
    assert all(loss["proximal"] > 0 for loss in fedprox.records[0]["loss"].values())


def test_a_negative_mu_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="method.mu is -1"):
        run(tmp_path, method={"name": "fedprox", "mu": -1})
