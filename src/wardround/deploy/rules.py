"""A hospital's rules applied: every request is checked before any work is done, every reply before it leaves.

A refusal is one sentence that reaches the organiser, so it names the rule and never the data: no paths, no
case names, no case counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from wardround.clients.secure_sum import KEY
from wardround.config import Config
from wardround.data.listing import SPLITS
from wardround.deploy.site_file import ALL, ALWAYS, OWN, TASKS, SiteFile, quiet_minutes
from wardround.engine.judging.aggregates import aggregate_rows
from wardround.messages import Message
from wardround.methods import METHODS, OBJECTIVES, build_method
from wardround.metrics import METRICS
from wardround.models import MODELS
from wardround.models.foreign_networks import MONAI_PREFIX
from wardround.text import format_bytes

SURVEY = frozenset({"fingerprint", "agree"})  # tasks that need neither a network nor a method
LONGEST = 200  # characters of a name that a refusal repeats
# Settings that pull a model back in every step: so much of what earlier steps learned is forgotten.
PULLS = {"fedprox": "mu", "fednova": "mu", "feddyn": "alpha"}


class Rules:
    """A hospital's rules, applied; clock: its local time."""

    def __init__(self, site: SiteFile, clock: Callable[[], datetime] = datetime.now) -> None:
        self.site = site
        self._clock = clock
        self._quiet = quiet_minutes(site.quiet_hours)

    def refuses_request(
        self,
        task: str,
        *,
        config: Config | Mapping[str, Any] | None = None,
        bytes: int = 0,
        now: datetime | None = None,
    ) -> str | None:
        """Why this request is not answered, or None.

        config: the run's settings, where the request has them. As plain values they can be judged before
        they are parsed, which is what keeps a network from being imported that was never allowed.
        """
        return (
            self._too_early(now or self._clock())
            or self.too_large("request", bytes)
            or self._task_refused(task)
            or (None if config is None else self._config_refused(config, is_survey=task in SURVEY))
        )

    def refuses_run(self, config: Config) -> str | None:
        """Why a run with these settings, now parsed, is not taken part in, or None."""
        resources = self.site.resources
        if self.site.threads is not None:  # then the organiser's number does not count
            resources = resources.model_copy(update={"threads": None})
        return resources.refuses_config(config) or self._steps_refused(config) or self._means_refused(config)

    def refuses_rows(self, task: str, message: Message) -> str | None:
        """Why the cases of this split are not scored one by one, or None."""
        split = message.scalars.get("split")
        wanted = SPLITS if split == "all" else (str(split),)
        if task != "evaluate" or set(wanted) <= set(self.site.rows):
            return None
        if self.site.scores == "aggregate" and set(wanted) <= set(SPLITS):
            return None
        asked = str(split)[:LONGEST]
        return f"evaluation of split '{asked}' is not allowed at this hospital (rows in its site.yaml)"

    def refuses_reply(self, task: str, message: Message, num_bytes: int, num_train: int) -> str | None:
        """Why this answer does not leave, or None; num_train: the hospital's training cases."""
        if task != "agree" and (reason := self.too_few(num_train)) is not None:
            return reason
        named = [] if task in ALWAYS else [name for name in message.scalars if name != KEY]
        kept = [name for name in named if not self.may_leave(task, name)]
        if kept:
            listed = ", ".join(f"'{name}'" for name in kept)
            return f"the answer holds {listed}, which may not leave this hospital (scalars in its site.yaml)"
        return self.too_large("answer", num_bytes)

    def too_few(self, num_train: int) -> str | None:
        """Why a hospital with this many training cases does not take part, or None."""
        if num_train >= self.site.min_cases:
            return None
        return (
            f"this hospital takes part only with at least {self.site.min_cases} training cases "
            "(min_cases in its site.yaml)"
        )

    def too_few_behind(self, num_trained: int) -> str | None:
        """Why a model that this many cases trained does not leave, or None; 0: nothing was trained."""
        if not num_trained or num_trained >= self.site.min_cases:
            return None
        return (
            f"the model would have been trained on fewer than {self.site.min_cases} cases of this hospital "
            "(min_cases in its site.yaml)"
        )

    def filter_message(self, task: str, message: Message) -> Message:
        """The message as it may leave: names of cases numbered or their rows summed up, the rest untouched.

        What may not leave at all is for `refuses_reply` to say, so that nothing goes missing silently.
        """
        if task == "evaluate" and self.site.scores == "aggregate":
            rows = list(message.scalars["cases"])
            others = {name: value for name, value in message.scalars.items() if name != "cases"}
            sums = aggregate_rows(rows, self.site.min_count)
            told = {"aggregate": sums.model_dump(mode="json"), "fewest": sums.fewest}
            return replace(message, scalars={**others, **told})
        if self.site.case_names == "keep":
            return message
        scalars = {name: number_cases(value) for name, value in message.scalars.items()}
        same = all(scalars[name] is value for name, value in message.scalars.items())
        return message if same else replace(message, scalars=scalars)

    def filter_loss(self, task: str, loss: Mapping[str, float]) -> dict[str, float]:
        """The training losses that may leave; the rest is left out, for no method needs them."""
        return {term: value for term, value in loss.items() if self.may_leave(task, f"loss/{term}")}

    def may_leave(self, task: str, name: str) -> bool:
        """Whether a scalar may leave, by its name alone or with its task in front."""
        patterns = self.site.scalars
        return "all" in patterns or any(
            fnmatchcase(name, pattern) or fnmatchcase(f"{task}/{name}", pattern) for pattern in patterns
        )

    def redact(self, failure: str, names: Iterable[str] = ()) -> str:
        """A failure's text as the organiser may read it; names: of the hospital's cases.

        A text that names files or cases stays here as a whole: cutting names out of a sentence
        leaves pieces of them sooner or later.
        """
        hides_cases = self.site.case_names == "number"
        of_files = re.search(r"[/\\]|^site\.yaml:|federation\.yaml", failure)
        of_cases = hides_cases and (
            re.search(r"\bcase '", failure)
            or any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", failure) for name in names if name)
        )
        if not of_files and not of_cases:
            return failure
        kind = re.match(r"\w+(?:Error|Exception)(?=: )", failure)
        what = f" ({kind[0]})" if kind else ""
        return f"the task failed{what}; the reason names files or cases and stays in the hospital's log"

    def _too_early(self, now: datetime) -> str | None:
        here = now if now.tzinfo is None else now.astimezone()
        local = here.replace(tzinfo=None, second=0, microsecond=0)
        opens = local
        while 60 * opens.hour + opens.minute in self._quiet:
            opens += timedelta(minutes=1)
        if opens == local:
            return None
        when = opens.astimezone().isoformat(timespec="minutes")
        return f"this hospital is in its quiet hours; they end at {when}"

    def too_large(self, what: str, count: int) -> str | None:
        """Why a request or an answer of this many bytes is refused, or None."""
        if count <= self.site.largest_message:
            return None
        return (
            f"the {what} has {format_bytes(count)}, but messages at this hospital may have at most "
            f"{format_bytes(self.site.largest_message)} (largest_message in its site.yaml)"
        )

    def _task_refused(self, task: str) -> str | None:
        if task == "calibrate" and self.site.scores == "aggregate":
            return (
                "task 'calibrate' is not allowed at this hospital: its histograms show single cases (scores: "
                "aggregate in its site.yaml)"
            )
        if task == "fingerprint" and self.site.privacy.is_on:
            return (
                "a fingerprint has no noise, so it does not leave under privacy.level (in the hospital's "
                "site.yaml); the hospital can share one by hand: wardround data fingerprint"
            )
        if task in ALWAYS or task in self.site.tasks or ("all" in self.site.tasks and task in TASKS):
            return None
        return f"task '{task[:LONGEST]}' is not allowed at this hospital (tasks in its site.yaml)"

    def _config_refused(self, config: Config | Mapping[str, Any], *, is_survey: bool) -> str | None:
        names = list_choices(config)
        run, network = names["run"], names["network"]
        if ALL not in self.site.runs and not any(fnmatchcase(run, pattern) for pattern in self.site.runs):
            return f"run '{run}' is not allowed at this hospital (runs in its site.yaml)"
        if is_survey:  # nothing of the run but its name is used
            return None
        chosen = [  # and the words that allow it where its name does not stand
            ("method", names["method"], [ALL] if names["method"] in METHODS.own else []),
            ("objective", names["objective"], [ALL] if names["objective"] in OBJECTIVES.own else []),
            ("network", network, words_for_network(network)),
            *(("metric", name, [ALL] if name in METRICS.own else []) for name in names["metrics"].split()),
        ]
        for kind, name, words in chosen:
            if not {name, *words} & set(getattr(self.site, f"{kind}s")):
                return f"{kind} '{name}' is not allowed at this hospital ({kind}s in its site.yaml)"
        values = config.model_dump() if isinstance(config, Config) else config
        return self._splits_refused(values) or self.site.resources.refuses_numbers(values)

    @staticmethod
    def _splits_refused(values: Mapping[str, Any]) -> str | None:
        data = values.get("data")
        if not isinstance(data, Mapping) or data.get("splits") is None:
            return None
        return (
            "the run sets data.splits, but which cases train is this hospital's own decision (splits in its "
            "federation.yaml or site.yaml). Leave it out, and ask the hospital for what you need"
        )

    def _steps_refused(self, config: Config) -> str | None:
        """Too few cases in a step, or in those last steps that alone count."""
        least = self.site.min_cases
        if config.batch_size < self.site.min_batch:
            return (
                f"batch_size is {config.batch_size}, but a training step has at least "
                f"{self.site.min_batch} cases at this hospital (min_batch in its site.yaml)"
            )
        seen = math.inf if config.local_steps is None else config.local_steps * config.batch_size
        if seen < least:
            return (
                f"local_steps is {config.local_steps} with batch_size {config.batch_size}, but a training "
                f"task learns from at least {least} cases at this hospital (min_cases in its site.yaml)"
            )
        name = PULLS.get(str(config.method.get("name")))
        pull = config.optimizer.weight_decay + (getattr(build_method(config), name) if name else 0.0)
        forgotten = config.optimizer.learning_rate * pull  # share of what was learned, in every step
        if forgotten * least <= 1:  # the last batch of an epoch may be a single case
            return None
        settings = "optimizer.weight_decay" + (f" and method.{name}" if name else "")
        return (
            f"with this optimizer.learning_rate, {settings} let a task forget all but its last steps, which "
            f"may have fewer than {least} cases (min_cases in its site.yaml). Set them lower"
        )

    def _means_refused(self, config: Config) -> str | None:
        """Means of too few cases, which a method collects before its first round."""
        method, name, least = build_method(config), config.method.get("name"), self.site.min_cases
        group = getattr(method, "group", 1)
        if "contribute" not in method.tasks or group >= least:
            return None
        if group == 1:
            if name in self.site.methods:
                return None
            return (
                f"method '{name}' sends spectra of single images, which this hospital allows only where the "
                "method is named (methods in its site.yaml)"
            )
        return (
            f"method.group is {group}, but a mean image of this hospital has {least} cases or more behind it "
            "(min_cases in its site.yaml)"
        )


def words_for_network(name: str) -> list[str]:
    """The words of `networks` that allow this one."""
    return [OWN, ALL] if name in MODELS else [ALL] if name.startswith(MONAI_PREFIX) else []


def list_choices(config: Config | Mapping[str, Any]) -> dict[str, str]:
    """Run, method, network, objective and metrics by name, from checked or unchecked settings."""
    values: Mapping[str, Any] = (
        {"name": config.name, "method": config.method, "objective": config.objective,
         "model": {"name": config.model.name}, "evaluate": config.evaluate.model_dump()}
        if isinstance(config, Config)
        else config
    )  # fmt: skip
    defaults = Config.model_fields

    def name_in(section: str, default: str) -> str:
        given = values.get(section)
        return str(given.get("name", default) if isinstance(given, Mapping) else default)[:LONGEST]

    method = name_in("method", "fedavg")
    own = METHODS[method].objective if method in METHODS else "none"
    return {
        "run": str(values.get("name", defaults["name"].default))[:LONGEST],
        "method": method,
        "network": name_in("model", defaults["model"].default.name),
        "objective": name_in("objective", own),
        "metrics": " ".join(list_metrics(values.get("evaluate"))),
    }


def list_metrics(section: Any) -> list[str]:
    """The metrics that an `evaluate:` section names, whatever else it holds."""
    if not isinstance(section, Mapping):
        return []
    metrics = section.get("metrics") or ()
    found = [section.get("select", "dice"), *(metrics if isinstance(metrics, list | tuple) else [metrics])]
    return ["".join(str(name).split())[:LONGEST] for name in found]


def case_numbers(names: Iterable[str]) -> dict[str, str]:
    """A number for every name, in alphabetical order: the same in every round, task and run over these cases.

    >>> case_numbers(["p9", "p10", "p9"])
    {'p10': 'case-0001', 'p9': 'case-0002'}
    """
    return {name: f"case-{number:04d}" for number, name in enumerate(sorted(set(names)), start=1)}


def number_cases(value: Any) -> Any:
    """A table with one row a case, its names numbered; anything else as it is.

    Rows keep their order, so means over them stay the same to the last bit.
    """
    rows = value if isinstance(value, list | tuple) else ()
    numbers = case_numbers(str(row["case"]) for row in rows if isinstance(row, Mapping) and "case" in row)
    if not numbers:
        return value
    return [
        {**row, "case": numbers[str(row["case"])]} if isinstance(row, Mapping) and "case" in row else row
        for row in rows
    ]
