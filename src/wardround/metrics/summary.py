"""Means of one metric: over the cases of a client, and over clients.

Values that are NaN are skipped and counted; infinite ones are counted and, unless asked for,
left out of the mean. Nothing here fails or warns on empty input: its mean is NaN.

>>> summarise([0.5, 0.7, float("nan")])
Summary(mean=0.6, sd=0.1414..., num=2, num_skipped=1, num_infinite=0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

SurfaceMean = Literal["finite", "all"]


@dataclass(frozen=True)
class Summary:
    """One metric over some cases.

    num: how many values the mean is over; num_skipped: how many were NaN;
    num_infinite: how many were infinite, whether in the mean or not.
    sd: the sample standard deviation (n - 1); 0 for one value, NaN for none or an infinite mean.
    """

    mean: float
    sd: float
    num: int
    num_skipped: int
    num_infinite: int


class WorstClient(NamedTuple):
    """The client farthest from the best value, with its mean."""

    client: str
    value: float


@dataclass(frozen=True)
class ClientsSummary:
    """One metric over clients.

    mean: every client counts the same; weighted_mean: every case counts the same;
    sd: between clients, as in `Summary`; worst: None if no client has a value;
    num_clients: in the mean; num_left_out: clients without a value for it;
    num_cases: behind the means; num_skipped, num_infinite: over all clients, left out or not.
    """

    mean: float
    weighted_mean: float
    sd: float
    worst: WorstClient | None
    num_clients: int
    num_left_out: int
    num_cases: int
    num_skipped: int
    num_infinite: int


def summarise(values: Sequence[float], surface_mean: SurfaceMean = "finite") -> Summary:
    """Summarise the values of some cases.

    surface_mean: "finite" leaves infinite values out of the mean; with "all" one makes it infinite.
    """
    valid = [float(value) for value in values if not math.isnan(value)]
    finite = [value for value in valid if math.isfinite(value)]
    used = finite if surface_mean == "finite" else valid
    return Summary(_mean(used), _sd(used), len(used), len(values) - len(valid), len(valid) - len(finite))


def across_clients(per_client: Mapping[str, Summary], *, best: float) -> ClientsSummary:
    """Summarise the clients' means; a client without one is left out and counted.

    best: the metric's best value, e.g. 1 for Dice and 0 for HD95; the worst client is farthest from
    it. A client with infinite values only is left out of the means, yet it is the worst.
    """
    used = {client: summary for client, summary in per_client.items() if summary.num}
    means = [summary.mean for summary in used.values()]
    num_cases = sum(summary.num for summary in used.values())
    weighted = [summary.num / num_cases * summary.mean for summary in used.values()]
    return ClientsSummary(
        mean=_mean(means),
        weighted_mean=sum(weighted) if used else math.nan,
        sd=_sd(means),
        worst=_worst(per_client, best),
        num_clients=len(used),
        num_left_out=len(per_client) - len(used),
        num_cases=num_cases,
        num_skipped=sum(summary.num_skipped for summary in per_client.values()),
        num_infinite=sum(summary.num_infinite for summary in per_client.values()),
    )


def _worst(per_client: Mapping[str, Summary], best: float) -> WorstClient | None:
    """The first of the clients farthest from the best value."""
    candidates = [
        WorstClient(client, summary.mean if summary.num else math.inf)
        for client, summary in per_client.items()
        if summary.num or summary.num_infinite
    ]
    return max(candidates, key=lambda candidate: abs(candidate.value - best), default=None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _sd(values: Sequence[float]) -> float:
    mean = _mean(values)
    if not math.isfinite(mean):
        return math.nan
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
