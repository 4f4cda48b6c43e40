"""Budgets: how they are written, and how many steps they are."""

from __future__ import annotations

from pytest import approx, mark, raises

from wardround.configuring.budget import BUDGETS, LEAST_STEPS, Pace, find_steps, parse_budget
from wardround.errors import ConfigError
from wardround.planning.costs import Time


def test_times_steps_and_names_are_budgets() -> None:
    assert (
        parse_budget("30m").seconds == parse_budget("0.5h").seconds == parse_budget("1800s").seconds == 1800
    )
    assert parse_budget("2H").seconds == 7200
    assert parse_budget("400").steps == 400 and parse_budget("400").seconds is None
    assert parse_budget(" Quick ") is BUDGETS["quick"]
    assert [name for name, budget in BUDGETS.items() if budget.tries_methods] == ["full"]


@mark.parametrize(
    "text", ["abc", "", "0", "-5", "2.5", "3 weeks", "1e3", "h", "0m", "9" * 400, "9" * 400 + "h"]
)
def test_anything_else_is_refused_with_what_can_be_given(text: str) -> None:
    with raises(ConfigError, match="Give quick, standard or full, a time such as 30m"):
        parse_budget(text)


def test_a_misspelt_budget_is_recognised() -> None:
    with raises(ConfigError, match="Did you mean 'standard'"):
        parse_budget("standart")


def test_steps_of_all_clients_together_are_shared() -> None:
    standard = BUDGETS["standard"]

    assert standard.limit_steps(4) == 62_500
    assert standard.limit_steps(10**9) == LEAST_STEPS
    assert parse_budget("30m").limit_steps(4) is None
    assert BUDGETS["quick"].limit_steps(2) == BUDGETS["quick"].limit_steps(40) == 500
    assert parse_budget("400").limit_steps(4) == 400


def test_the_pace_separates_steps_from_what_a_round_costs_beside_them() -> None:
    seen = Time(step=0.1, round=11.0, validation=6.0, test=20.0, start=1.0, total=0.0, training=10.0)

    pace = Pace.of(seen, local_steps=50)

    assert pace == Pace(step=0.2, round=1.0, validation=6.0, once=21.0)
    assert pace.predict(steps=500, rounds=10, validations=4) == approx(21 + 100 + 10 + 24)


@mark.parametrize("seconds", [10.0, 33.0, 1000.0])
def test_steps_fill_the_time_and_do_not_exceed_it(seconds: float) -> None:
    def predict(steps: int) -> float:
        return 2.0 + 0.01 * steps

    budget = parse_budget(f"{seconds}s")
    steps = find_steps(seconds, predict, budget)

    assert predict(steps) <= seconds < predict(int(steps * 1.02) + 2)
    assert find_steps(seconds, predict, budget, most=400) == min(400, steps)


def test_a_budget_that_is_too_short_says_what_it_would_need() -> None:
    with raises(
        ConfigError, match="--budget 30s is too short .* 20 steps .* about 2 min .* --budget 2m or more"
    ):
        find_steps(30.0, lambda steps: 5.0 * steps + 20, parse_budget("30s"))
    assert find_steps(30.0, lambda steps: 5.0 * steps + 20, BUDGETS["quick"]) == LEAST_STEPS


def test_few_steps_that_are_allowed_are_taken_in_any_time() -> None:
    assert find_steps(1e6, lambda steps: 0.1 * steps, BUDGETS["standard"], most=20) == LEAST_STEPS
