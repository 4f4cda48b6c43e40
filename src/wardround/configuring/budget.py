"""Budget: how long to train, as a time or in steps, and how many steps a time is on this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from wardround.errors import ConfigError
from wardround.planning.costs import Time
from wardround.text import clipped, format_duration, suggest

LEAST_STEPS = 20  # of each client: fewer train nothing
NNUNET_STEPS = 250_000  # its 1,000 epochs of 250 steps
MOST_STEPS = 10**9
MOST_SECONDS = 366 * 86400.0
UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Budget:
    """How long a run may train.

    seconds: of training, validation and test together, None where steps alone count; steps: of each client;
    total_steps: most of all clients together; tries_methods: a part of it goes to the choice of the method.
    """

    name: str
    seconds: float | None = None
    steps: int | None = None
    total_steps: int | None = None
    tries_methods: bool = False

    def limit_steps(self, clients: int) -> int | None:
        """The most steps of each of so many clients, whatever the time."""
        if self.total_steps is None:
            return self.steps
        return max(LEAST_STEPS, self.total_steps // max(1, clients))


BUDGETS = {
    budget.name: budget
    for budget in (
        Budget("quick", seconds=300, steps=500),
        Budget("standard", seconds=8 * 3600, total_steps=NNUNET_STEPS),
        Budget("full", seconds=24 * 3600, total_steps=2 * NNUNET_STEPS, tries_methods=True),
    )
}


def parse_budget(text: str) -> Budget:
    """
    >>> parse_budget("30m").seconds, parse_budget("400").steps, parse_budget("full").tries_methods
    (1800.0, 400, True)
    """
    word = text.strip().lower()
    if word in BUDGETS:
        return BUDGETS[word]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", word)
    if found is not None and not found[2] and "." not in found[1] and 1 <= float(found[1]) <= MOST_STEPS:
        return Budget(word, steps=int(found[1]))
    if found is not None and found[2] in UNITS and 0 < float(found[1]) * UNITS[found[2]] <= MOST_SECONDS:
        return Budget(word, seconds=float(found[1]) * UNITS[found[2]])
    raise ConfigError(
        f"--budget is '{clipped(text, 20)}'.{suggest(word, BUDGETS)} Give quick, standard or full, a time "
        f"such as 30m or 2h, up to a year, or a number of steps of each client, up to {MOST_STEPS:,}."
    )


# From time to steps


@dataclass(frozen=True)
class Pace:
    """Seconds on this machine: a step of every client, a round beside its steps, a validation.

    once: start and test.
    """

    step: float
    round: float
    validation: float
    once: float

    @classmethod
    def of(cls, time: Time, local_steps: int) -> Pace:
        """From the estimate of a run with so many steps of each client in a round."""
        overhead = max(0.0, time.round - time.training)
        return cls(time.training / local_steps, overhead, time.validation, time.start + time.test)

    def predict(self, steps: int, rounds: int, validations: int) -> float:
        """Seconds of a whole run with so many steps of each client."""
        return self.once + steps * self.step + rounds * self.round + validations * self.validation


def find_steps(
    seconds: float, predict: Callable[[int], float], budget: Budget, most: int | None = None
) -> int:
    """The most steps of each client that end within so many seconds; predict: steps -> seconds.

    Where not even the fewest fit, a budget with a name takes these and one in hours or minutes is refused.
    """
    least = predict(LEAST_STEPS)
    if least > seconds and budget.name in BUDGETS:
        return LEAST_STEPS
    if least > seconds:
        raise ConfigError(
            f"--budget {budget.name} is too short for this plan: {LEAST_STEPS} steps of each client and the "
            f"test take about {format_duration(least)} on this machine. Give --budget "
            f"{format_minutes(least)} or more."
        )
    low, high = LEAST_STEPS, 2 * LEAST_STEPS
    while most is None or high < most:
        if predict(high) > seconds:
            break
        low, high = high, 2 * high
    else:
        if predict(most) <= seconds:
            return most
        high = most
    while high - low > max(1, low // 100):  # to a hundredth
        middle = (low + high) // 2
        low, high = (middle, high) if predict(middle) <= seconds else (low, middle)
    return low


def format_minutes(seconds: float) -> str:
    """A budget of at least so long.

    >>> format_minutes(61), format_minutes(9000)
    ('2m', '150m')
    """
    return f"{math.ceil(seconds / 60)}m"
