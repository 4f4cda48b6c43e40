"""Which model is the best one, and what is tested."""

import json
from pathlib import Path

import numpy as np
from helpers import run, settings
from pytest import approx

import wardround as wr
from wardround.api import Result
from wardround.engine.judging.judge import is_better
from wardround.reporting import write_report


def test_the_best_model_is_chosen_on_validation_cases_alone(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=4)

    values = [record["validation"]["dice"]["mean"] for record in result.records]
    assert result.summary["best_validation"] == max(values)
    assert result.summary["best_round"] == values.index(max(values)) + 1
    files = [path.name for path in (tmp_path / "run/checkpoints").glob("best-*")]
    assert files == [f"best-{result.summary['best_round']:05d}.safetensors"]


def test_validation_can_be_rarer_but_always_ends_the_run(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=5, evaluate={"every": 2, "metrics": ["dice"], "overlays": 0})

    assert ["validation" in record for record in result.records] == [False, True, False, True, True]


def test_personal_models_of_the_best_round_are_the_ones_tested(tmp_path: Path) -> None:
    """A `local` run whose best round is not its last must test the memories of that round."""
    whole = run(tmp_path / "long", rounds=5, method={"name": "local"}, optimizer={"learning_rate": 0.05})
    best = whole.summary["best_round"]
    short = run(
        tmp_path / "short",
        rounds=best,
        method={"name": "local"},
        optimizer={"learning_rate": 0.05},
        evaluate={"metrics": ["dice"], "model": "last", "overlays": 0},
    )

    assert whole.summary["test"]["dice"] == short.summary["test"]["dice"]


def test_better_follows_the_metric() -> None:
    assert is_better("dice", 0.9, 0.8) and not is_better("dice", 0.7, 0.8)
    assert is_better("hd95", 3.0, 4.0)
    assert is_better("volume_difference", -0.1, 0.5)


def test_a_hospital_that_takes_no_part_does_not_choose_the_best_round(tmp_path: Path) -> None:
    result = run(tmp_path / "run", participation=["north", "east"])

    assert all(set(r["validation"]["dice"]["clients"]) == {"north", "east"} for r in result.records)
    assert set(result.summary["test"]["dice"]["clients"]) == {"north", "east", "south"}


def test_a_hospital_that_takes_no_part_has_a_line_of_its_own_and_is_in_no_mean(tmp_path: Path) -> None:
    result = run(tmp_path / "run", participation=["north", "east"])
    dice = result.summary["test"]["dice"]
    means = {name: entry["mean"] for name, entry in dice["clients"].items()}

    assert result.summary["held_out"] == ["south"]
    assert dice["mean"] == approx((means["north"] + means["east"]) / 2)
    assert dice["num_clients"] == 2 and dice["worst"][0] != "south"
    assert dice["held_out"]["clients"] == ["south"] and dice["held_out"]["mean"] == means["south"]
    assert {row[0]: row[1] for row in result.table.rows}["south (held out)"] == means["south"]
    assert "took no part in training" in result.table.caption
    assert Result.load(tmp_path / "run").table == result.table


def test_a_client_without_training_cases_is_held_out_also_of_pooled_training(tmp_path: Path) -> None:
    shape = (16, 16)
    cases = [(np.random.default_rng(n).random(shape), np.eye(16, dtype=int)) for n in range(8)]
    data = {"north": cases, "east": cases, "west": {"train": [], "val": [], "test": cases[:1]}}
    for method in ("fedavg", "centralised"):
        changes = settings(tmp_path / method, rounds=1, method={"name": method})
        del changes["data"]
        result = wr.run(changes, data=data)

        assert result.summary["held_out"] == ["west"]


def test_a_result_from_before_finds_who_was_held_out_in_its_records(tmp_path: Path) -> None:
    table = run(tmp_path / "run", participation=["north", "east"]).table
    path = tmp_path / "run" / "result.json"
    stored = json.loads(path.read_text())
    del stored["held_out"]
    for entry in stored["test"].values():
        del entry["held_out"]
        entry["mean"] = 0.0  # was over all three
    path.write_text(json.dumps(stored))

    assert Result.load(tmp_path / "run").table == table
    assert "south (held out)" in write_report([tmp_path / "run"]).read_text()


def test_cross_site_scores_every_model_at_every_site(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run",
        method={"name": "local"},
        evaluate={"metrics": ["dice"], "cross_site": True, "overlays": 0},
    )

    matrix = result.outcome.cross_site
    assert set(matrix) == {"east", "north", "south"}
    for name, evaluation in matrix.items():
        at_home = evaluation.clients["dice"][name].mean
        assert at_home == result.test.clients["dice"][name].mean
