"""Scores as sums: the same summary as of rows, and no number with fewer cases behind it than the minimum."""

import math
from typing import Any

import pytest

from wardround.engine.judging.aggregates import Aggregate, aggregate_rows
from wardround.engine.judging.evaluation import gather, summarise_cases
from wardround.engine.judging.result_tables import client_table
from wardround.messages import Message, Reply
from wardround.params import Params


def make_rows(dice: list[float], gland: list[float]) -> list[dict[str, Any]]:
    return [
        {"case": f"p{number}", "loss": 0.1 * number, "regions": {"lesion": {"dice": a}, "gland": {"dice": b}}}
        for number, (a, b) in enumerate(zip(dice, gland, strict=True))
    ]


ROWS = make_rows([0.2, 0.4, 0.6, 0.8, 0.9, 1.0], [0.5, 0.6, 0.6, 0.7, 0.8, 0.9])


def reply(client: str, **scalars: Any) -> Reply:
    message = Message(scalars=scalars)
    return Reply(Params({}), message.extras, message.scalars, client=client, num_examples=1)


def test_sums_give_the_table_that_rows_give() -> None:
    rows = summarise_cases({"north": ROWS}, ["dice"])
    sums = gather([reply("north", aggregate=aggregate_rows(ROWS, 3).model_dump())], ["dice"])

    for one, other in zip(
        client_table(rows, ["dice"], "").rows, client_table(sums, ["dice"], "").rows, strict=True
    ):
        assert one[:2] == other[:2]
        assert [v for v in other[2:] if isinstance(v, float)] == pytest.approx(
            [v for v in one[2:] if isinstance(v, float)], nan_ok=True
        )
        assert (other[3] == "") == (one[3] == "")
        if other[3] != "":
            assert tuple(other[3]) == pytest.approx(tuple(one[3]))
    assert not sums.cases
    assert "north sent sums over cases" in client_table(sums, ["dice"], "").caption


@pytest.mark.parametrize("few", [math.nan, math.inf])
def test_a_score_that_few_cases_lack_is_withheld_as_a_whole(few: float) -> None:
    found = aggregate_rows(make_rows([few, 0.4, 0.6, 0.8, 0.9, 1.0], [0.5] * 6), 3)

    assert found.scores["lesion"]["dice"] is None
    assert found.scores["gland"]["dice"] is not None
    assert "dice of lesion" in found.list_withheld()
    assert found.fewest >= 3


def test_too_few_cases_tell_nothing() -> None:
    found = aggregate_rows(ROWS[:2], 3)

    assert found.fewest == 0
    assert all(one is None for own in found.scores.values() for one in own.values())
    assert math.isnan(gather([reply("north", aggregate=found.model_dump())], ["dice"]).value("dice"))


def test_no_bin_of_a_histogram_has_fewer_cases_than_the_minimum() -> None:
    found = aggregate_rows(ROWS, 3)

    counts = [c for own in found.scores.values() for one in own.values() if one for c in one.histogram.counts]
    assert min(counts) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num": 2, "histogram": None}, "fewer than 3 cases"),
        ({"num": -1}, "greater than or equal to 0"),
        ({"sum": math.nan}, "finite"),
        ({"squares": -1.0}, "greater than or equal to 0"),
        ({"num": 5}, "another number of cases"),
        ({"name": "p001"}, "not permitted"),
    ],
)
def test_sums_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    plain = aggregate_rows(ROWS, 3).model_dump()
    plain["scores"]["lesion"]["dice"] |= change

    with pytest.raises(ValueError, match=said):
        Aggregate.read(plain)
