"""The accountant is the library's; the search for noise ends where it should."""

from __future__ import annotations

import warnings

from opacus.accountants import PRVAccountant, RDPAccountant
from pytest import approx, mark

from wardround.privacy.accountant import ORDERS, Release, calibrate_noise, count_epsilon

DELTA = 1e-5
HISTORIES = [
    [Release(1.2)] * 5,
    [Release(0.8, 0.1, 30)],
    [Release(1.1, 0.25, 40), Release(2.0), Release(1.4, 0.1, 7)],
]


def library_epsilon(history: list[Release]) -> float:
    accountant = RDPAccountant()
    accountant.history = [(entry.noise, entry.rate, entry.steps) for entry in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(DELTA, alphas=ORDERS))


@mark.parametrize("history", HISTORIES)
def test_epsilon_is_the_librarys_to_a_millionth(history: list[Release]) -> None:
    assert count_epsilon(history, DELTA) == approx(library_epsilon(history), abs=1e-6)


def test_the_tighter_accountant_of_the_library_finds_less_spent() -> None:
    history = HISTORIES[1]
    tight = PRVAccountant()
    tight.history = [(entry.noise, entry.rate, entry.steps) for entry in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tight.get_epsilon(DELTA) <= count_epsilon(history, DELTA)


@mark.parametrize("epsilon", [0.5, 1.0, 8.0, 70.0])
def test_the_noise_that_is_found_spends_epsilon_and_not_more(epsilon: float) -> None:
    noise = calibrate_noise([], 1.0, 20, epsilon, DELTA)

    assert noise is not None
    assert epsilon * (1 - 1e-5) <= count_epsilon([Release(noise, 1.0, 20)], DELTA) <= epsilon


def test_rounds_that_go_as_planned_keep_their_noise_and_end_at_epsilon() -> None:
    history: list[Release] = []
    for left in (3, 2, 1):
        noise = calibrate_noise(history, 1.0, left, 4.0, DELTA)
        assert noise is not None
        history.append(Release(noise))

    assert len({entry.noise for entry in history}) == 1
    assert count_epsilon(history, DELTA) == approx(4.0, rel=1e-5)
    assert calibrate_noise(history, 1.0, 1, 4.0, DELTA) is None


def test_a_repeated_round_raises_the_noise_of_those_to_come() -> None:
    first = calibrate_noise([], 1.0, 3, 4.0, DELTA)
    assert first is not None
    again = calibrate_noise([Release(first)], 1.0, 3, 4.0, DELTA)

    assert again is not None and again > first


def test_no_answers_spend_nothing() -> None:
    assert count_epsilon([], DELTA) == 0.0
