"""Method choice: a short list of methods, each trained for a small part of the budget.

Each kind of method that may help where clients differ has one member in the list; all take the plan as it
is, so that they differ in nothing else, with the same seed:

fedavg   the plan's own: the mean by number of cases
fedprox  holds clients near the common model; SCAFFOLD, of the same purpose, is derived for plain SGD
fedavgm  momentum at the server, damped, since the clients have momentum already
safcf    weighs small clients up and outliers down; FedEvi's and FSF3A's rules need their own objectives

They are judged by the mean over clients on validation cases after the last round. Test cases are not opened
(`data.test: false`). FedAvg stays unless another is better by a margin.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wardround.api import Result
from wardround.batch import BatchListener, run_all
from wardround.config_file import load_config
from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.errors import ConfigError
from wardround.metrics import METRICS

log = logging.getLogger(__name__)

METHODS_TRIED: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.01},
    "fedavgm": {"server_lr": 0.3, "beta": 0.9},
    "safcf": {},
}
TRIAL_SHARE = 1 / 16  # of the final run's rounds, for each
TRIALS_SHARE = TRIAL_SHARE * len(METHODS_TRIED)
LEAST_ROUNDS = 3  # memory of a method shows from the second on
MARGIN = 0.005  # of the metric; below it, seeds decide
CHOICE = "choice"  # folder of the trials in the run folder


@dataclass(frozen=True)
class MethodChoice:
    """Which method was taken.

    scores: mean over clients on validation cases; refused: method -> why it could not be tried.
    """

    name: str
    metric: str
    scores: Mapping[str, float]
    rounds: int
    refused: Mapping[str, str]

    def describe(self) -> str:
        """By how much it was better, in a sentence without its first capital."""
        others = {name: score for name, score in self.scores.items() if name != self.name}
        listed = ", ".join(f"{name} {score:.3f}" for name, score in others.items())
        kept = ""
        if self.name == "fedavg" and any(self._gain(name) > 0 for name in others):
            kept = f"; none is better by {MARGIN}"
        return (
            f"validation {self.metric} {self.scores[self.name]:.3f} after {self.rounds} rounds, against "
            f"{listed or 'no other'}{kept}"
        )

    def _gain(self, name: str) -> float:
        sign = 1 if METRICS[self.metric].higher_is_better else -1
        return sign * (self.scores[name] - self.scores["fedavg"])

    def as_dict(self) -> dict[str, Any]:
        """For plan.yaml."""
        scores = {name: round(score, 4) for name, score in self.scores.items()}
        return {
            "taken": self.name,
            f"validation_{self.metric}": scores,
            "rounds": self.rounds,
            "refused": dict(self.refused),
        }


def is_open(plan: ConfigurationPlan) -> bool:
    """Whether the method is still to be chosen: neither the user nor the kind of labels has set one."""
    own = [c for c in plan.choices if c.key.split(".")[0] == "method"]
    is_fedavg = all(c.value == "fedavg" for c in own if c.key == "method.name")
    return is_fedavg and not any(c.reason.startswith("as you") for c in own)


def choose_method(
    plan: ConfigurationPlan, folder: Path, *, watch: BatchListener | None = None
) -> tuple[ConfigurationPlan, MethodChoice]:
    """Try the methods on the plan, in `folder`, and put the best in its place.

    Trials of this plan that are done there are not repeated, and an interrupted one continues.
    """
    trials, refused = list_trials(plan.settings())
    folder.mkdir(parents=True, exist_ok=True)
    results = run_all(trials, folder, jobs=1, watch=watch, resume=True)
    chosen = judge(results, refused)
    return take_method(plan, chosen), chosen


def clear_trials(folder: Path) -> None:
    """Remove models and memories of the trials; what they measured stays."""
    for trial in METHODS_TRIED:
        for name in ("checkpoints", "clients", "exchange"):
            shutil.rmtree(folder / trial / name, ignore_errors=True)


def list_trials(settings: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """A configuration for each method, and why some cannot be tried with this plan."""
    rounds = max(LEAST_ROUNDS, round(settings.get("rounds", 10) * TRIAL_SHARE))
    trials, refused = {}, {}
    for name, own in METHODS_TRIED.items():
        trial = deepcopy(dict(settings))
        trial |= {"name": name, "rounds": rounds}
        trial["data"] = {**trial.get("data", {}), "test": False}
        trial["evaluate"] = {**trial.get("evaluate", {}), "every": rounds, "test_after": []}
        if trial["evaluate"].get("postprocess") == "auto":
            trial["evaluate"]["postprocess"] = (
                "none"  # chosen after the last round, so it says nothing of the method
            )
        if name != "fedavg":
            trial["method"] = {"name": name, **own}
        trial.pop("output", None)
        try:
            load_config(trial)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        trials[name] = trial
    return trials, refused


def judge(results: Mapping[str, Result], refused: Mapping[str, str]) -> MethodChoice:
    """The best on validation cases; FedAvg unless another is better by the margin."""
    metric = next(iter(results.values())).config.evaluate.select
    scores = {name: read_score(result, metric) for name, result in results.items()}
    rounds = next(iter(results.values())).config.rounds
    sign = 1 if METRICS[metric].higher_is_better else -1
    finite = {name: sign * score for name, score in scores.items() if math.isfinite(score)}
    best = max(finite, key=lambda name: finite[name], default="fedavg")
    if "fedavg" in finite and finite[best] - finite["fedavg"] < MARGIN:
        best = "fedavg"
    return MethodChoice(best, metric, scores, rounds, refused)


def read_score(result: Result, metric: str) -> float:
    """The mean over clients on validation cases after the last round."""
    found = result.records[-1].get("validation", {}).get(metric, {}).get("mean", math.nan)
    return float(found)


def take_method(plan: ConfigurationPlan, chosen: MethodChoice) -> ConfigurationPlan:
    """The plan with the method that was chosen, in the place of its own."""
    reason = chosen.describe()
    if chosen.name == "fedavg":
        new: Sequence[Choice] = [
            replace(c, reason=reason) if c.key == "method.name" else c
            for c in plan.choices
            if c.key.startswith("method.")
        ] or [Choice("method.name", "fedavg", reason)]
    else:
        own = METHODS_TRIED[chosen.name]
        new = [Choice("method.name", chosen.name, reason)]
        new += [Choice(f"method.{key}", value, "as it was tried") for key, value in own.items()]
    kept = [c for c in plan.choices if not c.key.startswith("method.")]
    place = next((n for n, c in enumerate(plan.choices) if c.key.startswith("method.")), len(kept))
    return replace(plan, choices=(*kept[:place], *new, *kept[place:]))
