"""A hospital's rules applied: every request is checked before any work is done, every reply before it leaves.

A refusal is one sentence that reaches the organiser, so it names the rule and never the data: no paths, no
case names, no case counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from wardround.config import Config
from wardround.deploy.site_file import ALWAYS, TASKS, SiteFile, quiet_minutes
from wardround.messages import Message
from wardround.methods import METHODS, OBJECTIVES
from wardround.metrics import METRICS
from wardround.models import MODELS
from wardround.models.foreign_networks import MONAI_PREFIX
from wardround.text import format_bytes

LONGEST = 200  # characters of a name that a refusal repeats


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
            or (None if config is None else self._config_refused(list_choices(config)))
        )

    def refuses_reply(self, task: str, message: Message, num_bytes: int, num_train: int) -> str | None:
        """Why this answer does not leave, or None; num_train: the hospital's training cases."""
        if (reason := self.too_few(num_train)) is not None:
            return reason
        kept = [name for name in message.scalars if task not in ALWAYS and not self.may_leave(task, name)]
        if kept:
            named = ", ".join(f"'{name}'" for name in kept)
            return f"the answer holds {named}, which may not leave this hospital (scalars in its site.yaml)"
        return self.too_large("answer", num_bytes)

    def too_few(self, num_train: int) -> str | None:
        """Why a hospital with this many training cases does not take part, or None."""
        if num_train >= self.site.min_cases:
            return None
        return (
            f"this hospital takes part only with at least {self.site.min_cases} training cases "
            "(min_cases in its site.yaml)"
        )

    def filter_message(self, task: str, message: Message) -> Message:
        """The message as it may leave: names of cases numbered, tensors and numbers untouched.

        What may not leave at all is for `refuses_reply` to say, so that nothing goes missing silently.
        """
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
        if task in ALWAYS or task in self.site.tasks or ("all" in self.site.tasks and task in TASKS):
            return None
        return f"task '{task[:LONGEST]}' is not allowed at this hospital (tasks in its site.yaml)"

    def _config_refused(self, names: Mapping[str, str]) -> str | None:
        run, network = names["run"], names["network"]
        if "all" not in self.site.runs and not any(fnmatchcase(run, pattern) for pattern in self.site.runs):
            return f"run '{run}' is not allowed at this hospital (runs in its site.yaml)"
        ours = {
            "method": names["method"] in METHODS.own,
            "objective": names["objective"] in OBJECTIVES.own,
            "network": network in MODELS or network.startswith(MONAI_PREFIX),
        }
        chosen = [(kind, names[kind], is_ours) for kind, is_ours in ours.items()]
        chosen += [("metric", name, name in METRICS.own) for name in names["metrics"].split()]
        for kind, name, is_ours in chosen:
            allowed = getattr(self.site, f"{kind}s")
            if name not in allowed and not ("all" in allowed and is_ours):
                return f"{kind} '{name}' is not allowed at this hospital ({kind}s in its site.yaml)"
        return None


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
