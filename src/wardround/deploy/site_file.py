"""site.yaml: what a hospital allows. It stays on the hospital's machine and is never sent.

`load_site` reads and checks the file, `render_template` makes one with every default explained; rules.py
applies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from wardround.clients.secure_sum import SUM_TASKS
from wardround.data.federation_file import SplitSettings, expand_home
from wardround.deploy.proxy import NONE as NO_PROXY
from wardround.deploy.proxy import parse_proxy
from wardround.deploy.resources import Resources
from wardround.errors import ConfigError
from wardround.methods import METHODS, OBJECTIVES
from wardround.metrics import METRICS
from wardround.models import MODELS
from wardround.plugins import is_import_path
from wardround.privacy import PrivacySettings
from wardround.settings import Settings, refuse_boolean
from wardround.text import format_bytes, parse_size, suggest
from wardround.yaml_file import commented, dumped, read_yaml

ALL, OWN = "all", "own"
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
    "calibrate": "how well the model is calibrated: sums over cases, and one row for each test case",
    "pictures": "nothing leaves; pictures of test cases are written to this hospital's own folder",
    "personal_model": "the hospital's own model, for tests at the others",
    "fingerprint": "numbers and histograms of the cases (wardround survey); never with privacy.level",
    "agree": "whether the names and the preparation that the organiser proposes are used here",
}
ON_REQUEST = ("contribute", "personal_model")  # tasks that a hospital allows by name, or with all
# Names and shapes of tensors, numbers of cases, and what a secure sum needs: what taking part means.
ALWAYS = frozenset({"register", *SUM_TASKS})
DAY = 24 * 60  # minutes


class SiteFile(Settings):
    """The whole file; every key has a default.

    Lists of names may hold `all`: [all, mypackage.nets:MyNet] allows every network of ours and that one.
    """

    version: Literal[1] = 1
    data: Literal["phantom"] | Path = Path("federation.yaml")
    client: str | None = Field(None, min_length=1)
    splits: SplitSettings | None = None
    device: str = "auto"
    threads: int | None = Field(None, ge=1)
    tasks: tuple[str, ...] = tuple(task for task in TASKS if task not in ON_REQUEST)
    methods: tuple[str, ...] = (ALL,)
    networks: tuple[str, ...] = (OWN,)
    objectives: tuple[str, ...] = (ALL,)
    metrics: tuple[str, ...] = (ALL,)
    runs: tuple[str, ...] = (ALL,)
    largest_message: int = Field(2 * 10**9, ge=1)
    scalars: tuple[str, ...] = (ALL,)
    rows: tuple[Literal["train", "val", "test"], ...] = ("val", "test")
    scores: Literal["rows", "aggregate"] = "rows"
    case_names: Literal["number", "keep"] = "number"
    min_count: int = Field(5, ge=1)
    accept: Literal["ask", "auto"] = "ask"
    min_cases: int = Field(10, ge=0)
    min_batch: int = Field(2, ge=1)
    privacy: PrivacySettings = PrivacySettings()
    resources: Resources = Resources()
    quiet_hours: tuple[str, ...] = ()
    proxy: str | None = None

    _numbers = field_validator("version", "threads", "min_count", "min_cases", "min_batch", mode="before")(
        refuse_boolean
    )
    _bytes = field_validator("largest_message", mode="before")(parse_size)

    @field_validator("data", mode="before")
    @classmethod
    def path_or_phantom(cls, value: Any) -> Any:
        if not isinstance(value, str | Path):
            raise ValueError(f"it is {value!r}; give the path of a federation.yaml, or the word {PHANTOM}")
        return value

    @field_validator(
        "tasks", "methods", "networks", "objectives", "metrics", "runs", "scalars", "rows", mode="before"
    )
    @classmethod
    def listed(cls, value: Any) -> Any:
        """One word stands for a list of it."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"it is {value!r}; give all, or a list of names")
        return tuple(names)

    @field_validator("tasks", "methods", "objectives", "metrics")
    @classmethod
    def known(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        registries: dict[str, Iterable[str]] = {
            "methods": METHODS.own,
            "objectives": OBJECTIVES.own,
            "metrics": METRICS.own,
        }
        own = registries.get(info.field_name or "")
        there = [*([*TASKS, *ALWAYS] if own is None else own), ALL]
        for name in names:
            if name not in there and (own is None or not is_import_path(name)):
                raise ValueError(f"'{name}' is unknown.{suggest(name, there)}")
        return names

    @field_validator("networks")
    @classmethod
    def known_network(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in (*MODELS, OWN, ALL) and not is_import_path(name):
                raise ValueError(
                    f"'{name}' is not a network.{suggest(name, [*MODELS, OWN, ALL])} Write MONAI's as "
                    "monai:SegResNet, your own as package.module:Class"
                )
        return names

    @field_validator("privacy")
    @classmethod
    def declared(cls, value: PrivacySettings) -> PrivacySettings:
        if value.is_on and value.cases is None:
            raise ValueError(
                "cases is missing. Give the number of training cases that others are told, about the true one"
            )
        return value

    @field_validator("device")
    @classmethod
    def a_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", value):
            raise ValueError(f"it is '{value}'; use auto, cpu, cuda, cuda:0 or mps")
        return value

    @field_validator("proxy", mode="before")
    @classmethod
    def address(cls, value: Any) -> Any:
        if value not in (None, NO_PROXY):
            parse_proxy(str(value))
        return value

    @field_validator("quiet_hours", mode="before")
    @classmethod
    def hours(cls, value: Any) -> tuple[str, ...]:
        spans = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(spans, list | tuple):
            raise ValueError(f'it is {value!r}; give a list such as ["22:00-06:00"]')
        if len(quiet_minutes(spans)) == DAY:
            raise ValueError("they cover the whole day, so no request would ever be answered")
        return tuple(spans)


def quiet_minutes(spans: Sequence[Any]) -> frozenset[int]:
    """The minutes of a day inside these spans of time; one may pass midnight.

    >>> sorted(quiet_minutes(["23:59-00:02"]))
    [0, 1, 1439]
    """
    minutes: set[int] = set()
    for span in spans:
        found = re.fullmatch(r"\s*(\d{1,2}):([0-5]\d)\s*-\s*(\d{1,2}):([0-5]\d)\s*", str(span))
        times = [] if found is None else [60 * int(found[n]) + int(found[n + 1]) for n in (1, 3)]
        if not times or max(times) > DAY:
            raise ValueError(f'{span!r} is not a time span; write it as "22:00-06:00"')
        start, end = times
        if start % DAY == end % DAY and end - start != DAY:
            raise ValueError(f"{span!r} starts and ends at the same time")
        minutes |= {minute % DAY for minute in range(start, end if end > start else end + DAY)}
    return frozenset(minutes)


def load_site(path: Path) -> SiteFile:
    """The checked file, its data path made absolute; the first mistake is named with its key."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist. It holds the rules of this hospital and comes with its kit: unpack it "
            "again from there."
        )
    site = SiteFile.read(read_yaml(path, "data: federation.yaml", largest=10**6), f"{path}: ")
    if not isinstance(site.data, Path):
        return site
    return site.model_copy(update={"data": (path.parent / expand_home(site.data)).resolve()})


def find_client(site: SiteFile, names: Sequence[str], own: str) -> str:
    """Which client of the data this hospital is: the one named, the only one, or the one called `own`."""
    there = f"Its clients: {', '.join(sorted(names)) or 'none'}."
    if site.client is not None:
        if site.client not in names:
            raise ConfigError(
                f"site.yaml: client is '{site.client}', which is not in federation.yaml."
                f"{suggest(site.client, names)} {there}"
            )
        return site.client
    if len(names) == 1:
        return names[0]
    if own in names:
        return own
    raise ConfigError(
        f"site.yaml: it is not clear which client of federation.yaml '{own}' is. {there} If all its cases "
        "are this hospital's, set partition: {kind: natural} there; else name one with client in site.yaml."
    )


ABOUT = """\
The rules of hospital '{name}'. This file stays on this machine and is never sent.
A request outside them is refused with a reason that the organiser sees, and nothing leaves.
What did leave: wardround egress show .    Is that list complete: wardround egress verify ."""
COMMENTS = {
    "data": "Where the cases are: a federation.yaml (`wardround data init FOLDER` writes one), relative to\n"
    "this file. The word phantom stands for synthetic cases, for rehearsals.",
    "client": "Which client of federation.yaml this hospital is; null: the only one there, or the one with\n"
    "this hospital's name.",
    "splits": "Settings laid over the splits of federation.yaml, such as {by: kfold, fold: 1}; null: none.\n"
    "Which cases train is decided here and there alone: a run that sets data.splits is refused.",
    "device": "auto, cpu, cuda, cuda:0 or mps.",
    "threads": "Processor threads for training; null: what the run asks for, else all of them.",
    "tasks": "What may be asked for: all, or any of these, and what the answer holds.\n{tasks}\n"
    "Taking part at all shows the organiser how many training, validation and test cases there are.\n"
    "The two that are not in the list send more than a trained model: from mean images of several\n"
    "runs, single ones can be computed.",
    "methods": "Federated methods: all (wardround's), or a list such as [fedavg, fedprox]. Other code\n"
    "of this machine runs only if it is named, as package.module:Class. See: wardround methods",
    "networks": "Networks: own (wardround's), all (MONAI's too), or a list such as [own, monai:SegResNet].\n"
    "A network made for it copies scans into its weights: MONAI's take such shapes by their\n"
    "arguments. A custom network is code on this machine and runs only if it is named here, as\n"
    "package.module:Class; [own, package.module:Class] allows it beside the others.",
    "objectives": "Training objectives: all (wardround's), or a list. See: wardround objectives",
    "metrics": "Metrics of evaluations: all (wardround's), or a list such as [dice, hd95].",
    "runs": "Names of runs to take part in: all, or a list of patterns such as [prostate-*].",
    "largest_message": "Largest message that may come in or go out.",
    "scalars": "Numbers and tables that may leave beside the model: all, or a list of patterns such as\n"
    "[loss/*, evaluate/cases]: a name alone, or task/name. An answer that holds another one is\n"
    "refused; a training loss (loss/...) that is not allowed is left out, for it is only shown.",
    "rows": "Splits whose cases may be scored one by one, a row for each. With train, the organiser sees\n"
    "how well the model knows each training case.",
    "scores": "rows: an evaluation leaves as a table with a row for each case. aggregate: as sums and\n"
    "histograms over cases, never a row; calibration, whose histograms show single cases, is refused.",
    "min_count": "Fewest patients behind any number of a survey (task fingerprint), and fewest cases behind\n"
    "any number of aggregated scores; what has fewer is withheld.",
    "accept": "What to do with names of classes and channels that the organiser proposes for all. ask: a\n"
    "person here decides, with `wardround confirm .`. auto: they are accepted where no class or channel\n"
    "is left out and names differ in spelling at most (Lesion, lesion); else a person is asked.",
    "case_names": "number: tables of scores leave with case-0001, case-0002 ... instead of the names of\n"
    "cases, in the alphabetical order of the names of the split. keep: with their names.",
    "min_cases": "Least number of training cases behind whatever leaves: a model trained on a handful gives\n"
    "them away. With fewer, the hospital does not take part. A training task goes through at least as\n"
    "many, a mean image has as many behind it, and settings under which only the last few steps of a\n"
    "task count are refused. The organiser is told the minimum, not the number.",
    "min_batch": "Least number of cases in one training step (batch_size). A higher one protects single\n"
    "cases better; volumes are usually trained on with 2.",
    "privacy": "Differential privacy of what leaves; a run may ask for more of it, never for less.\n"
    "  {level: client, epsilon: 8, delta: 1e-5, cases: 100}\n"
    "level none: as the run asks; case: covers whether any one training case took part; client: covers\n"
    "whatever this hospital trained on. epsilon and delta: what all answers of all runs may spend\n"
    "together; then nothing more is answered. See: wardround privacy status . clip: largest norm of a\n"
    "case's gradient, or of an update. cases: training cases that others are told of, about the true\n"
    "number. scores: withhold keeps scores and calibration here, show lets them leave uncovered.\n"
    "secure_sum: true answers only runs with secure summation, in which the organiser sees the sum of at\n"
    "least three hospitals' updates and no single one; with any level, none too.",
    "resources": "How much of this machine a run may take; null: no limit.",
    "quiet_hours": 'Times of day, on this machine\'s clock, at which requests are refused: ["22:00-06:00"].\n'
    "A task that started before may still finish and be sent.",
    "proxy": "HTTP proxy on the way to the organiser, such as http://proxy.example.org:3128; none: past\n"
    "every proxy; null: what https_proxy of the environment says. A password in it is in no message.",
}


LIMITS = {
    "threads": "processor threads that a run may ask for",
    "memory": "for training, as estimated before it starts, beside the cases",
    "parameters": "of the network",
    "filters": "of its first layer: the more, the more of a scan fits into them",
    "width": "of its widest layer; no number in model, method or objective may be higher",
    "layers": "or blocks, where a setting says how many",
    "kernel": "longest side of a convolution",
    "voxels": "of a patch, or of a scan prepared as the run asks",
    "batch": "cases at once, in training or evaluation, and passes of one case",
    "epochs": "in one training task",
    "steps": "in one training task",
    "seconds": "one task; it ends at the next step",
}


def render_template(name: str) -> str:
    """A site.yaml with all defaults written out and explained."""
    plain = SiteFile().model_dump(mode="json")
    plain["largest_message"] = short_size(SiteFile().largest_message)
    tasks = "\n".join(f"  {task}: {what}" for task, what in TASKS.items())
    parts = [commented(ABOUT.format(name=name)) + "version: 1\n"]
    for key, comment in COMMENTS.items():
        is_word = isinstance(plain[key], list) and plain[key] in ([ALL], [OWN])
        value = plain[key][0] if is_word else plain[key]
        lines = render_limits() if key == "resources" else dumped(key, value, 90).removesuffix("...\n")
        parts.append(commented(comment.replace("{tasks}", tasks)) + lines)
    return "\n".join(parts)


def render_limits() -> str:
    """The resources, each with its meaning behind it."""
    plain = Resources().model_dump(mode="json")
    values = {key: short_size(plain[key]) if key == "memory" else plain[key] for key in plain}
    lines = [f"  {f'{key}: {value}':<24}# {LIMITS[key]}\n" for key, value in values.items()]
    return "resources:\n" + "".join(lines)


def short_size(count: int) -> str:
    return format_bytes(count).replace(".0 ", " ")
