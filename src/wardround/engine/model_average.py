"""ModelAverage: the average of the last models, which is judged and used while the plain one trains on.

A checkpoint has the average in the model's place, where everybody looks for the model of a run, and the plain
model in its memory, where only a resumed run looks. Running statistics are averaged like weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wardround.aggregation.mean import mean
from wardround.config import AverageSettings
from wardround.messages import ServerState
from wardround.params import Params

PLAIN = "model_that_trains"  # in the memory of a checkpoint


class ModelAverage:
    """The average so far; params: None before the first round, or where nothing is averaged."""

    def __init__(self, settings: AverageSettings, rounds: int) -> None:
        self.params: Params | None = None
        self._settings = settings
        self._rounds = rounds

    def weigh(self, round: int) -> float:
        """The share of the model of a round (from 1) in the average after it."""
        if self._settings.name == "ema":
            return max(1 - self._settings.decay, 1 / round)  # a plain mean, as long as that is longer
        before = self._rounds - max(1, int(self._settings.share * self._rounds + 0.5))
        return 1.0 if round <= before else 1 / (round - before)

    def after(self, state: ServerState) -> Params | None:
        """The average with the model of a completed round; None where nothing is averaged."""
        if self._settings.name == "none":
            return None
        weight = self.weigh(state.round)
        if self.params is None or weight == 1:
            return state.params
        return mean([self.params, state.params], [1 - weight, weight])

    def judged(self, state: ServerState) -> ServerState:
        """The state with the model that is judged and used: the average, where there is one."""
        return state if self.params is None else replace(state, params=self.params)

    # In a checkpoint

    def pack(self, state: ServerState) -> tuple[Params, Mapping[str, Any]]:
        """Params and memory as a checkpoint has them."""
        if self.params is None:
            return state.params, state.memory
        return self.params, {**state.memory, PLAIN: state.params}

    def unpack(self, params: Params, memory: Mapping[str, Any]) -> tuple[Params, dict[str, Any]]:
        """Take the average from a checkpoint; params and memory of the method."""
        rest = dict(memory)
        plain: Params | None = rest.pop(PLAIN, None)
        if plain is None:
            return params, rest
        self.params = params
        return plain, rest
