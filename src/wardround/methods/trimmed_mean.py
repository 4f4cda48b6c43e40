"""Trimmed mean and median: Byzantine-Robust Distributed Learning, Towards Optimal Statistical Rates.

Yin, Chen, Ramchandran and Bartlett, ICML 2018. https://proceedings.mlr.press/v80/yin18a.html

Each coordinate of the model is averaged on its own, without its smallest and largest values (trimmed mean)
or with the middle one alone (median), so that a few clients cannot pull it anywhere.

Symbols: K replies; β share of them that is dropped at each end, floor(βK) values.
What leaves a client: its model. Numbers of cases play no part.
What the server needs: all models at once, a piece of each in memory at a time.

Differs: models are averaged instead of gradients, and running statistics by the same rule; counters take
the maximum. The recorded weight of a client is the share of coordinates its values were taken for.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from wardround.aggregation.mean import collect_params
from wardround.aggregation.robust import median_cut, trimmed_mean
from wardround.clients import Clients
from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.messages import Message, ServerState
from wardround.methods.base import Method

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinateWise(Method):
    """A mean of the middle values of each coordinate."""

    paper = "Yin et al., ICML"
    year = 2018
    link = "https://proceedings.mlr.press/v80/yin18a.html"
    kind = "robust"
    secure_sum = False
    needs_each_model = "it sorts the clients' own numbers"

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        sent, weights = trimmed_mean(collect_params(replies), self.cut(len(replies)))
        warnings = self.round_warnings(len(replies))
        for warning in warnings:
            log.warning("round %d: %s", state.round + 1, warning)
        notes = self.notes(replies, weights, **({"warnings": warnings} if warnings else {}))
        return state.next(params=state.params.updated(sent), notes=notes)

    def cut(self, num_replies: int) -> int:
        """How many values are dropped at each end."""
        return median_cut(num_replies)

    def round_warnings(self, num_replies: int) -> list[str]:
        return []

    def check(self, config: Config, objective: Objective) -> None:
        refuse_pooled(config)


@dataclass(frozen=True)
class TrimmedMean(CoordinateWise):
    """Drops the smallest and largest values of each coordinate and averages the rest.

    beta: share of the clients dropped at each end, rounded down; 0 gives FedAvg with equal weights.
    """

    title = "Trimmed mean"

    beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.2

    def cut(self, num_replies: int) -> int:
        return math.floor(self.beta * num_replies + 1e-9)  # 0.29 * 100 is 28.999999999999996

    def round_warnings(self, num_replies: int) -> list[str]:
        if self.cut(num_replies) or not self.beta or num_replies == 1:
            return []
        return [
            f"trimmed mean: {self.beta:g} of {num_replies} replies is less than one, so nothing was trimmed "
            "and no client is guarded against. Raise method.beta, or choose median."
        ]


@dataclass(frozen=True)
class Median(CoordinateWise):
    """Takes the middle value of each coordinate, of an even number the mean of the two."""

    title = "Median"


def refuse_pooled(config: Config) -> None:
    """Second moments and means, each robust on its own, no longer belong together."""
    if config.model.bn_stats == "pooled":
        raise ConfigError(
            "model.bn_stats is 'pooled', which needs a mean of all clients; a robust rule takes each number "
            "by itself, and variances could become negative. Use model.bn_stats=average."
        )
