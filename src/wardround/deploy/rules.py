"""site.yaml: what a hospital allows. It lies on the hospital's machine and is never sent.

Every request is held against it before any work is done, every reply before anything leaves. A refusal is
one sentence that reaches the organiser, so it speaks of the rule and never of the data: no paths, no names
of cases, no counts of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from wardround.config import Config
from wardround.deploy.settings_file import not_a_truth_value, read_settings
from wardround.errors import ConfigError
from wardround.messages import Message
from wardround.models import MODELS
from wardround.models.foreign_networks import MONAI_PREFIX, is_import_path
from wardround.settings import Settings
from wardround.text import suggest
from wardround.yaml_file import commented, dumped

ALL = ("all",)
PHANTOM = "phantom"

# What a hospital can be asked for, and what the answer holds.
TASKS = {
    "train": "train the model that was sent; it comes back with training losses and the number of cases",
    "score": "numbers that a method weighs hospitals by, such as a mean loss",
    "measure": "the mean amplitude spectrum of the training images (harmofl)",
    "contribute": "mean images or spectra of images, once before the first round (fedmix, fedbr, feddg)",
    "tune": "weights learned on cases at the server (fedlaw)",
    "norm_stats": "means and variances inside the network, over the training cases",
    "evaluate": "scores of the model, one row for each validation or test case",
    "calibrate": "how sure the model is: sums over cases, and one row for each test case",
    "pictures": "nothing leaves; pictures of test cases are written to this hospital's own folder",
    "personal_model": "the hospital's own model, for tests at the others",
}
ALWAYS = frozenset({"register"})  # names and shapes of tensors, numbers of cases: what taking part means

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DAY = 24 * 60  # minutes
LONGEST = 200  # characters of a name that a refusal repeats


class SiteFile(Settings):
    """The whole file; every key has a default.

    Lists of names may hold `all`: [all, mypackage.nets:MyNet] allows every network of ours and that one.
    """

    version: Literal[1] = 1
    data: Literal["phantom"] | Path = Path("federation.yaml")
    client: str | None = Field(None, min_length=1)
    device: str = "auto"
    threads: int | None = Field(None, ge=1)
    tasks: tuple[str, ...] = tuple(task for task in TASKS if task != "personal_model")
    methods: tuple[str, ...] = ALL
    networks: tuple[str, ...] = ALL
    objectives: tuple[str, ...] = ALL
    runs: tuple[str, ...] = ALL
    largest_message: int = Field(2 * 10**9, ge=1)
    scalars: tuple[str, ...] = ALL
    case_names: Literal["number", "keep"] = "number"
    min_cases: int = Field(0, ge=0)
    quiet_hours: tuple[str, ...] = ()

    _numbers = field_validator("version", "threads", "min_cases", mode="before")(not_a_truth_value)

    @field_validator("data", mode="before")
    @classmethod
    def path_or_phantom(cls, value: Any) -> Any:
        if not isinstance(value, str | Path):
            raise ValueError(f"it is {value!r}; give the path of a federation.yaml, or the word {PHANTOM}")
        return value

    @field_validator("tasks", "methods", "networks", "objectives", "runs", "scalars", mode="before")
    @classmethod
    def listed(cls, value: Any) -> Any:
        """One word stands for a list of it."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"it is {value!r}; give all, or a list of names")
        return tuple(names)

    @field_validator("tasks", "methods", "objectives")
    @classmethod
    def known(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        from wardround.methods import METHODS, OBJECTIVES

        registries: dict[str, Iterable[str]] = {"methods": METHODS, "objectives": OBJECTIVES}
        there = [*registries.get(info.field_name or "", [*TASKS, *ALWAYS]), "all"]
        for name in names:
            if name not in there:
                raise ValueError(f"'{name}' is none that wardround knows.{suggest(name, there)}")
        return names

    @field_validator("networks")
    @classmethod
    def known_network(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in (*MODELS, *ALL) and not is_import_path(name):
                raise ValueError(
                    f"'{name}' is no network.{suggest(name, [*MODELS, *ALL])} Write MONAI's as "
                    "monai:SegResNet, your own as package.module:Class"
                )
        return names

    @field_validator("device")
    @classmethod
    def a_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"it is '{value}'; use auto, cpu, cuda or cuda:0")
        return value

    @field_validator("largest_message", mode="before")
    @classmethod
    def in_bytes(cls, value: Any) -> int:
        return num_bytes(value)

    @field_validator("quiet_hours", mode="before")
    @classmethod
    def hours(cls, value: Any) -> tuple[str, ...]:
        spans = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(spans, list | tuple):
            raise ValueError(f'it is {value!r}; give a list such as ["22:00-06:00"]')
        if len(quiet_minutes(spans)) == DAY:
            raise ValueError("they cover the whole day, so no request would ever be answered")
        return tuple(spans)


def num_bytes(value: Any) -> int:
    """A size in bytes, from a number or from text with a unit.

    >>> num_bytes("500 MB"), num_bytes("1.5GiB"), num_bytes(1000)
    (500000000, 1610612736, 1000)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*", str(value).lower())
    unit = None if found is None else UNITS.get(found[2] or "b")
    if found is None or unit is None:
        raise ValueError(f"it is {value!r}; give a size such as 500 MB or 2 GB, or a number of bytes")
    return int(float(found[1]) * unit)


def size_text(count: int) -> str:
    """
    >>> size_text(532), size_text(2_000_000_000)
    ('532 B', '2.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def quiet_minutes(spans: Sequence[Any]) -> frozenset[int]:
    """The minutes of a day inside these spans of time; one may pass midnight.

    >>> sorted(quiet_minutes(["23:59-00:02"]))
    [0, 1, 1439]
    """
    minutes: set[int] = set()
    for span in spans:
        found = re.fullmatch(r"\s*(\d{1,2}):([0-5]\d)\s*-\s*(\d{1,2}):([0-5]\d)\s*", str(span))
        times = [] if found is None else [minute_of(*found.group(1, 2)), minute_of(*found.group(3, 4))]
        if not times or max(times) > DAY:
            raise ValueError(f'{span!r} is no span of time; write it as "22:00-06:00"')
        start, end = times
        if start % DAY == end % DAY and end - start != DAY:
            raise ValueError(f"{span!r} starts and ends at the same time")
        minutes |= {minute % DAY for minute in range(start, end if end > start else end + DAY)}
    return frozenset(minutes)


def minute_of(hours: str, minutes: str) -> int:
    return 60 * int(hours) + int(minutes)


# Reading and writing the file


def load_site(path: Path) -> SiteFile:
    """The checked file, its data path made absolute; the first mistake is named with its key."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist. It holds the rules of this hospital and comes with its kit: unpack it "
            "again from there."
        )
    values = read_settings(path, "data: federation.yaml")
    site = SiteFile.read(values, f"{path}: ")
    if not isinstance(site.data, Path):
        return site
    return site.model_copy(update={"data": (path.parent / site.data.expanduser()).resolve()})


def client_of(site: SiteFile, names: Sequence[str], own: str) -> str:
    """Which client of the data this hospital is: the one named, the only one, or the one called `own`."""
    there = f"The data hold: {', '.join(sorted(names)) or 'no client'}."
    if site.client is not None:
        if site.client not in names:
            raise ConfigError(
                f"site.yaml: client is '{site.client}', which has no cases.{suggest(site.client, names)} "
                f"{there}"
            )
        return site.client
    if len(names) == 1:
        return names[0]
    if own in names:
        return own
    raise ConfigError(
        f"site.yaml: it is not clear which client '{own}' is. {there} Where all cases of federation.yaml are "
        "this hospital's, set partition: {kind: natural} there; else name one with client in site.yaml."
    )


ABOUT = """\
The rules of hospital '{name}'. This file stays on this machine and is never sent.
A request outside them is refused with a reason that the organiser sees, and nothing leaves.
What did leave: wardround egress show .    Is that list whole: wardround egress verify ."""

COMMENTS = {
    "data": "Where the cases are: a federation.yaml (`wardround data init FOLDER` writes one), relative to\n"
    "this file. The word phantom stands for made-up cases, for rehearsals.",
    "client": "Which client of federation.yaml this hospital is; null: the only one there, or the one with\n"
    "this hospital's name.",
    "device": "auto, cpu, cuda or cuda:0.",
    "threads": "Processor threads for training; null: all of them.",
    "tasks": "What may be asked for: all, or any of these, and what the answer holds.\n{tasks}\n"
    "Taking part at all tells the organiser how many training, validation and test cases there are.",
    "methods": "Federated methods: all, or a list such as [fedavg, fedprox]. See: wardround methods",
    "networks": "Networks: all (wardround's and MONAI's), or a list such as [unet3d, monai:SegResNet]. A\n"
    "network of somebody's own is code on this machine and runs only if it is named here,\n"
    "as package.module:Class; [all, package.module:Class] allows it beside the others.",
    "objectives": "Training objectives: all, or a list. See: wardround objectives",
    "runs": "Names of runs to take part in: all, or a list of patterns such as [prostate-*].",
    "largest_message": "Largest message that may come in or go out.",
    "scalars": "Numbers and tables that may leave beside the model: all, or a list of patterns such as\n"
    "[loss/*, evaluate/cases]: a name alone, or task/name. An answer that holds another one is\n"
    "refused; a training loss (loss/...) that is not allowed is left out, for it is only shown.",
    "case_names": "number: tables of scores leave with case-0001, case-0002 ... instead of the names of\n"
    "cases, in the alphabetical order of the names of the split. keep: with their names.",
    "min_cases": "With fewer training cases than this, the hospital does not take part: a model trained\n"
    "on a handful of cases may give them away. The organiser is told the minimum, not the number.",
    "quiet_hours": 'Times of day, on this machine\'s clock, at which requests are refused: ["22:00-06:00"].\n'
    "What was begun before may still be finished and sent.",
}


def template(name: str) -> str:
    """A site.yaml with all defaults written out and explained."""
    plain = SiteFile().model_dump(mode="json")
    plain["largest_message"] = size_text(SiteFile().largest_message).replace(".0 ", " ")
    tasks = "\n".join(f"  {task}: {what}" for task, what in TASKS.items())
    parts = [commented(ABOUT.format(name=name)) + "version: 1\n"]
    for key, comment in COMMENTS.items():
        value = "all" if plain[key] == list(ALL) else plain[key]
        parts.append(commented(comment.replace("{tasks}", tasks)) + dumped(key, value).removesuffix("...\n"))
    return "\n".join(parts)


# Holding requests and replies against it


class Rules:
    """A hospital's rules at work; clock: its local time."""

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

        config: the run's settings, where the request brings them. As plain values they can be judged before
        they are parsed, which is what keeps a network from being imported that was never allowed.
        """
        return (
            self._too_early(now or self._clock())
            or self.too_large("request", bytes)
            or self._task_refused(task)
            or (None if config is None else self._config_refused(chosen(config)))
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
        """Why a hospital with so many training cases takes no part, or None."""
        if num_train >= self.site.min_cases:
            return None
        return (
            f"this hospital takes part only with at least {self.site.min_cases} training cases "
            "(min_cases in its site.yaml)"
        )

    def filtered(self, task: str, message: Message) -> Message:
        """The message as it may leave: names of cases numbered, tensors and numbers untouched.

        What may not leave at all is for `refuses_reply` to say, so that nothing goes missing silently.
        """
        if self.site.case_names == "keep":
            return message
        scalars = {name: numbered(value) for name, value in message.scalars.items()}
        same = all(scalars[name] is value for name, value in message.scalars.items())
        return message if same else replace(message, scalars=scalars)

    def filtered_loss(self, task: str, loss: Mapping[str, float]) -> dict[str, float]:
        """The training losses that may leave; the rest is left out, for no method needs them."""
        return {term: value for term, value in loss.items() if self.may_leave(task, f"loss/{term}")}

    def may_leave(self, task: str, name: str) -> bool:
        """Whether a scalar may leave, by its name alone or with its task in front."""
        patterns = self.site.scalars
        return "all" in patterns or any(
            fnmatchcase(name, pattern) or fnmatchcase(f"{task}/{name}", pattern) for pattern in patterns
        )

    def tellable(self, failure: str, names: Iterable[str] = ()) -> str:
        """A failure's text as the organiser may read it; names: of the hospital's cases.

        A text that speaks of files or cases stays here as a whole: cutting names out of a sentence
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
        return f"the task failed{what}; the reason speaks of files or cases and stays in the hospital's log"

    def _too_early(self, now: datetime) -> str | None:
        here = now if now.tzinfo is None else now.astimezone()
        local = here.replace(tzinfo=None, second=0, microsecond=0)
        opens = local
        while 60 * opens.hour + opens.minute in self._quiet:
            opens += timedelta(minutes=1)
        if opens == local:
            return None
        when = opens.astimezone().isoformat(timespec="minutes")
        return f"this hospital has quiet hours now; it opens again at {when}"

    def too_large(self, what: str, count: int) -> str | None:
        """Why a request or an answer of so many bytes is refused, or None."""
        if count <= self.site.largest_message:
            return None
        return (
            f"the {what} has {size_text(count)}, but messages at this hospital have at most "
            f"{size_text(self.site.largest_message)} (largest_message in its site.yaml)"
        )

    def _task_refused(self, task: str) -> str | None:
        if task in ALWAYS or task in self.site.tasks or ("all" in self.site.tasks and task in TASKS):
            return None
        return f"task '{task[:LONGEST]}' is not allowed at this hospital (tasks in its site.yaml)"

    def _config_refused(self, names: Mapping[str, str]) -> str | None:
        from wardround.methods import METHODS, OBJECTIVES

        run, network = names["run"], names["network"]
        if "all" not in self.site.runs and not any(fnmatchcase(run, pattern) for pattern in self.site.runs):
            return f"run '{run}' is not allowed at this hospital (runs in its site.yaml)"
        ours = {
            "method": names["method"] in METHODS,
            "objective": names["objective"] in OBJECTIVES,
            "network": network in MODELS or network.startswith(MONAI_PREFIX),
        }
        for kind, is_ours in ours.items():
            name, allowed = names[kind], getattr(self.site, f"{kind}s")
            if name not in allowed and not ("all" in allowed and is_ours):
                return f"{kind} '{name}' is not allowed at this hospital ({kind}s in its site.yaml)"
        return None


def chosen(config: Config | Mapping[str, Any]) -> dict[str, str]:
    """Run, method, network and objective by name, from checked settings or from plain ones nobody checked."""
    from wardround.methods import METHODS

    values: Mapping[str, Any] = (
        {"name": config.name, "method": config.method, "objective": config.objective,
         "model": {"name": config.model.name}}
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
    }


def case_numbers(names: Iterable[str]) -> dict[str, str]:
    """A number for every name, in alphabetical order: the same in every round, task and run over these cases.

    >>> case_numbers(["p9", "p10", "p9"])
    {'p10': 'case-0001', 'p9': 'case-0002'}
    """
    return {name: f"case-{number:04d}" for number, name in enumerate(sorted(set(names)), start=1)}


def numbered(value: Any) -> Any:
    """A table with one row a case, its names numbered; anything else as it is.

    Rows keep their order, so means over them stay the same to the last bit.
    """
    if not isinstance(value, list | tuple):
        return value
    if not any(isinstance(row, Mapping) and "case" in row for row in value):
        return value
    numbers = case_numbers(str(row["case"]) for row in value if isinstance(row, Mapping) and "case" in row)
    return [
        {**row, "case": numbers[str(row["case"])]} if isinstance(row, Mapping) and "case" in row else row
        for row in value
    ]
