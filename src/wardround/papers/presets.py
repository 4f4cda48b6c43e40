"""The papers' tables and figures as presets: what each one runs, and what was published.

configs/papers/<method>-table<N>.yaml is a configuration with more keys:

    about     one sentence
    datasets  the federations of the table by name: clients, size, split, seeds; the first is the default
    sweep     rows: {label: {dotted setting: value}} and grid: {dotted setting: [values]}
    figures   the pictures a figure is of: names of figures/*.png beside the report
    like      another preset that this one takes everything from that it does not say

An override replaces what stands at its dotted name, a whole section too: `method: {name: fedavg}`. Only
`model` keeps what it does not say: another network has the stem and norm of the others. The name `datasets`
chooses one of the federations. Every row meets every point of the grid; no rows at all
(`rows: {}`) runs nothing, for tables that only count data.

published.json holds the printed numbers under the same labels, with notes and cautions.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from wardround import builtin_configs
from wardround.config import Config
from wardround.config_file import parse
from wardround.data.federation_file import SliceSettings
from wardround.errors import ConfigError
from wardround.methods import METHODS, OBJECTIVES
from wardround.models import MODELS, resolve
from wardround.plugins import is_import_path
from wardround.settings import Settings
from wardround.text import suggest
from wardround.yaml_file import read_yaml

PAPERS = {
    "safcf": "Uncertainty and Scale-Calibrated Contrastive Federated Segmentation under Client Heterogeneity",
    "fsf3a": "FSF3A: federated brain tumour segmentation with CLSL and ASWA",
    "fedevi": "FedEvi: Improving Federated Medical Image Segmentation via Evidential Weight Aggregation",
    "aaw": "Adaptive Aggregation Weights for Federated Segmentation of Pancreas MRI",
}

Figure = Literal["scores", "curves", "losses", "weights", "cost", "cases", "uncertainty", "features"]
OF_ONE_NETWORK = ("arguments", "features", "divisor", "weights")  # in `model`


# What a preset file holds beside a configuration


class PaperSource(Settings):
    """The data of one client in a paper.

    dataset: name of its card (`wardround datasets`); client: what the card calls the client, where the set
    has several; channel: the one that is used, where the images have several; printed: cases the paper
    states; cases: those of them that can be used, where fewer.
    """

    dataset: str
    client: str | None = None
    channel: str | None = None
    printed: int | None = Field(None, ge=1)
    cases: int | None = Field(None, ge=1)
    train: int | None = Field(None, ge=1)
    validation: int | None = Field(None, ge=0)
    test: int | None = Field(None, ge=1)

    @property
    def key(self) -> str:
        """What the client is called in a run: as its card does."""
        return self.client or self.dataset

    @property
    def size(self) -> int | None:
        """How many cases there are, where the paper says so."""
        if self.train is not None:
            return self.train + (self.validation or 0) + (self.test or 0)
        return self.cases or self.printed


class Partition(Settings):
    """How the sources are divided among clients, where a source is not a client."""

    rule: str
    clients: int | None = Field(None, ge=1)
    cases: int | None = Field(None, ge=1, description="of each client")
    train: int | None = Field(None, ge=1, description="of each client")


class PaperFederation(Settings):
    """One federation of a table.

    size: null where the paper does not give it; one_class: what every label above 0 becomes, where the paper
    tells no classes apart; split_by: case where the paper draws images, not patients; slices: how volumes
    are cut for a 2D network.
    """

    clients: dict[str, PaperSource] = Field(min_length=1)
    partition: Partition | None = None
    dimensions: Literal[2, 3]
    size: tuple[int, ...] | None
    channels: int = Field(ge=1)
    labels: str
    one_class: str | None = None
    normalise: Literal["zscore", "maximum"] = "zscore"
    split: tuple[float, float, float]
    split_by: Literal["patient", "case"] = "patient"
    split_rule: str
    slices: SliceSettings | None = None
    seeds: tuple[int, ...] = Field(min_length=1)


class PresetSweep(Settings):
    """The runs of a table: every row with every point of the grid; rows left out: the grid alone."""

    rows: dict[str, dict[str, Any]] | None = None
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)


class PresetKeys(Settings):
    """The keys a plain configuration does not have."""

    about: str = Field(min_length=1)
    datasets: dict[str, PaperFederation] = Field(min_length=1)
    sweep: PresetSweep
    figures: tuple[Figure, ...] = ()


# What was published


class PublishedValue(Settings):
    """A printed number, with the printed spread where there is one."""

    mean: float
    sd: float | None = None


def to_value(given: Any) -> Any:
    """A number, or [mean, SD]."""
    if isinstance(given, list):
        mean, sd = given
        return {"mean": mean, "sd": sd}
    return {"mean": given}


class PublishedTable(Settings):
    """A table as printed: label -> column -> metric -> value.

    columns: clients, or `mean` (over clients, all alike), `weighted mean` (by test cases), `merged test
    set` (all test cases pooled), `all clients` (one number, the averaging not said; read as the mean).
    unit: of each metric; share is 0 to 1, percent 0 to 100, `not said` where the paper gives none.
    cases: which cases the numbers are of.
    cautions: what does not add up in the printed numbers.
    """

    columns: tuple[str, ...]
    unit: dict[str, str]
    cases: Literal["test", "validation"] = "test"
    rows: dict[str, dict[str, dict[str, Annotated[PublishedValue, BeforeValidator(to_value)]]]]
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    def comparable(self, label: str, column: str, metric: str) -> PublishedValue | None:
        """The printed value in the unit of our own metrics (percent become shares), if there is one."""
        value = self.rows.get(label, {}).get(column, {}).get(metric)
        if value is None or self.unit[metric] != "percent":
            return value
        return PublishedValue(mean=value.mean / 100, sd=None if value.sd is None else value.sd / 100)


# Presets


@dataclass(frozen=True)
class PresetRun:
    """One run of a table. row: its row, whatever the point of the grid; datasets: its federation's name."""

    label: str
    row: str
    changes: Mapping[str, Any]
    settings: dict[str, Any]
    datasets: str


@dataclass(frozen=True)
class PaperPreset:
    """One table of one paper. settings: the configuration its rows and grid lay overrides on."""

    name: str
    paper: str
    table: str
    about: str
    settings: dict[str, Any]
    rows: Mapping[str, Mapping[str, Any]] | None
    grid: Mapping[str, Sequence[Any]]
    datasets: Mapping[str, PaperFederation]
    published: PublishedTable
    figures: tuple[Figure, ...] = ()

    def list_runs(self) -> list[PresetRun]:
        """Every run of the table, in the order of the file."""
        rows: Mapping[str, Mapping[str, Any]] = {"": {}} if self.rows is None else self.rows
        return [
            self._run(label, {**overrides, **point})
            for label, overrides in rows.items()
            for point in self._points()
        ]

    def _points(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def _run(self, row: str, changes: dict[str, Any]) -> PresetRun:
        parts = [row, *(label_point(key, changes[key]) for key in self.grid)]
        label = ", ".join(part for part in parts if part) or self.name
        chosen = str(changes.get("datasets", next(iter(self.datasets))))
        if chosen not in self.datasets:
            raise ConfigError(
                f"{self.name}, {label}: datasets is '{chosen}'.{suggest(chosen, self.datasets)} "
                f"The preset has: {', '.join(self.datasets)}."
            )
        settings = copy.deepcopy(self.settings)
        for key, value in changes.items():
            if key != "datasets":
                change_settings(settings, key, copy.deepcopy(value))
        settings["name"] = label if label == self.name else f"{self.name} {label}"
        return PresetRun(label, row or label, changes, settings, chosen)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "paper": self.paper,
            "table": self.table,
            "about": self.about,
            "figures": self.figures,
            "settings": self.settings,
            "datasets": {
                name: federation.model_dump(mode="json", exclude_none=True)
                for name, federation in self.datasets.items()
            },
            "runs": [
                {
                    "label": cell.label,
                    "settings": cell.settings,
                    "datasets": cell.datasets,
                    "missing": list_missing_parts(cell),
                    "missing_data": list_missing_data(self, cell),
                }
                for cell in self.list_runs()
            ],
            "published": self.published.model_dump(mode="json", exclude_none=True),
        }


def change_settings(settings: dict[str, Any], key: str, value: Any) -> None:
    """Lay a row's override over the settings: it replaces what stands there, but `model` is merged.

    Stem, norm and size belong to a table, not to a network; what only the old network has is dropped.

    >>> settings = {"model": {"name": "unet3d", "stem": "variational", "arguments": {"a": 1}}}
    >>> change_settings(settings, "model", {"name": "gelan"})
    >>> settings["model"]
    {'name': 'gelan', 'stem': 'variational'}
    """
    before = settings.get("model")
    if key == "model" and isinstance(value, Mapping) and isinstance(before, Mapping):
        if value.get("name", before.get("name")) != before.get("name"):
            before = {name: entry for name, entry in before.items() if name not in OF_ONE_NETWORK}
        value = {**before, **value}
    set_dotted(settings, key, value)


def set_dotted(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set what stands at a dotted name; missing sections are made."""
    *path, last = key.split(".")
    for part in path:
        settings = settings.setdefault(part, {})
    settings[last] = value


def get_dotted(settings: Mapping[str, Any], key: str) -> Any:
    """What stands at a dotted name, or None."""
    found: Any = settings
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def label_point(key: str, value: Any) -> str:
    """How a point of the grid is called.

    >>> label_point("optimizer.learning_rate", 1e-05), label_point("datasets", "polyp")
    ('learning_rate=1e-5', 'polyp')
    """
    if key == "datasets":
        return str(value)
    text = re.sub(r"e([+-])0+", r"e\1", f"{value:g}") if isinstance(value, float) else str(value)
    return f"{key.rsplit('.', 1)[-1]}={text}"


def format_changes(changes: Mapping[str, Any]) -> str:
    """Overrides on one line.

    >>> format_changes({"method": {"name": "fedavg", "weighting": "uniform"}, "rounds": 10})
    'method.name=fedavg, method.weighting=uniform, rounds=10'
    """
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": entry for inner, entry in value.items()})
        else:
            flat[key] = value
    return ", ".join(f"{key}={value}" for key, value in flat.items()) or "-"


def expand(preset: PaperPreset) -> dict[str, dict[str, Any]]:
    """The full settings of every run by label, checked as far as this version has their parts."""
    cells = preset.list_runs()
    for cell in cells:
        check_settings(cell.settings, f"{preset.name}, {cell.label}: ")
    return {cell.label: cell.settings for cell in cells}


def check_settings(settings: Mapping[str, Any], label: str = "") -> Config:
    """The settings, parsed; a method, objective or network of a later version is passed over."""
    later = find_unknown_parts(settings)
    config = parse({key: value for key, value in settings.items() if key not in later}, label)
    try:
        resolve(config.model)
    except ConfigError as error:
        raise ConfigError(label + str(error)) from None
    return config


def find_unknown_parts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The sections that name something this version does not have: section -> name."""
    registries: dict[str, Mapping[str, Any]] = {"method": METHODS, "objective": OBJECTIVES, "model": MODELS}
    unknown = {}
    for section, registry in registries.items():
        name = str(settings.get(section, {}).get("name", ""))
        if name and name not in registry and not (section == "model" and is_import_path(name)):
            unknown[section] = name
    return unknown


def list_missing_parts(cell: PresetRun) -> list[str]:
    """Sentences on what this version lacks to run a cell, data apart."""
    unknown = find_unknown_parts(cell.settings)
    lacking = [f"{section} '{name}' needs a later version." for section, name in unknown.items()]
    try:
        check_settings(cell.settings)
    except ConfigError as error:
        lacking.append(str(error))
    return lacking


def list_missing_data(preset: PaperPreset, cell: PresetRun) -> list[str]:
    """The data sets of a cell: none comes with wardround, each must be given with `data.federation`."""
    sources = preset.datasets[cell.datasets].clients.values()
    return list(dict.fromkeys(source.dataset for source in sources))


# Files


def find_folder() -> Path:
    """Where the preset files are."""
    return builtin_configs.find_folder() / "papers"


def list_names() -> list[str]:
    """All presets, paper by paper, Table 2 before Table 10, figures last."""
    return sorted((path.stem for path in find_folder().glob("*.yaml")), key=sort_key)


def sort_key(name: str) -> tuple[int, bool, int, str]:
    paper, _, table = name.partition("-")
    number = re.search(r"\d+", table)
    papers = [*PAPERS, paper]
    return papers.index(paper), table.startswith("figure"), int(number[0]) if number else 0, table


def load(name: str) -> PaperPreset:
    """One preset by name."""
    known = list_names()
    if name not in known:
        raise ConfigError(f"'{name}' is not a preset.{suggest(name, known)} List all: wardround papers")
    path = find_folder() / f"{name}.yaml"
    values = read_yaml(path)
    if "like" in values:
        base = read_yaml(find_folder() / f"{values.pop('like')}.yaml")
        values = {**base, **values, "sweep": {**base["sweep"], **values.get("sweep", {})}}
    own = {key: values.pop(key) for key in PresetKeys.model_fields if key in values}
    extras = PresetKeys.read(own, f"{path}: ")
    short, _, table = name.partition("-")
    return PaperPreset(
        name=name,
        paper=PAPERS.get(short, short),
        table=table_title(table),
        about=extras.about,
        settings=values,
        rows=extras.sweep.rows,
        grid=extras.sweep.grid,
        datasets=extras.datasets,
        published=load_published()[name],
        figures=extras.figures,
    )


def table_title(table: str) -> str:
    """
    >>> table_title("table2"), table_title("figure-delta"), table_title("figure-a1")
    ('Table 2', 'Figure delta', 'Figure A1')
    """
    kind, _, rest = re.sub(r"^(table|figure)-?", r"\1 ", table).partition(" ")
    return f"{kind.capitalize()} {rest.upper() if rest[-1:].isdigit() else rest}"


@cache
def load_published() -> dict[str, PublishedTable]:
    """The printed numbers of every preset."""
    path = find_folder() / "published.json"
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return {name: PublishedTable.model_validate(entry) for name, entry in loaded.items()}
