"""What a round of each row costs."""

from pathlib import Path
from typing import Any

from pytest import approx

from wardround.comparison.costs import cost_table, measure_costs
from wardround.comparison.runs import Records, Run
from wardround.comparison.scores import Replicate, RowScores, Sheet
from wardround.comparison.statistics import CaseKey


def run_of(*rounds: dict[str, Any]) -> Run:
    return Run(Path("run"), "a", {}, {}, Records(rounds), {})


def round_of(seconds: float, **clients: tuple[float, int, int]) -> dict[str, Any]:
    """clients: seconds of work, bytes up and down, half of each in either of two exchanges."""
    half = {
        key: {name: entry[place] / 2 for name, entry in clients.items()}
        for place, key in enumerate(("seconds", "bytes_up", "bytes_down"))
    }
    return {"seconds": seconds, "exchanges": [{"task": "train", **half}, {"task": "score", **half}]}


def sheet_of(**scores: float) -> Sheet:
    rows = [
        RowScores(label, {(0, None): Replicate(0, None, {"dice": {CaseKey("x", "1", "all"): value}})})
        for label, value in scores.items()
    ]
    return Sheet("toy", rows, next(iter(scores)), ["dice"])


def test_a_row_costs_the_median_round_of_all_its_clients() -> None:
    slow_start = [
        round_of(9.0, x=(5.0, 8, 8)),
        *[round_of(2.0, x=(1.0, 10**6, 10**6), y=(0.5, 10**6, 0))] * 2,
    ]
    (cost,) = measure_costs({"a": [run_of(*slow_start)]}, sheet_of(a=0.75))

    assert (cost.seconds.mean, cost.work.mean) == (2.0, 1.5)
    assert (cost.sent.mean, cost.received.mean) == (2.0, 1.0)
    assert cost.score.mean == 0.75


def test_seeds_are_averaged_and_rows_without_a_result_left_out() -> None:
    rows = {"a": [run_of(round_of(1.0)), run_of(round_of(3.0))], "failed": [run_of(round_of(1.0))]}
    found = measure_costs(rows, sheet_of(a=0.5))

    assert [cost.label for cost in found] == ["a"]
    assert found[0].seconds.mean == 2.0 and found[0].seconds.sd == approx(2**0.5)
    table = cost_table(found, sheet_of(a=0.5))
    assert table.columns[1:3] == ["mean Dice", "s a round"] and "--jobs 1" in table.caption
