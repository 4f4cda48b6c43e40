"""The papers' tables as presets: what each one runs, and what was published.

configs/papers/<method>-table<N>.yaml is a configuration with three more keys:

    about     one sentence
    datasets  the federations of the table by name: clients, size, split, seeds; the first is the default
    sweep     rows: {label: {dotted setting: value}} and grid: {dotted setting: [values]}

An override replaces what stands at its dotted name, a whole section too: `method: {name: fedavg}`. The
name `datasets` chooses one of the federations. Every row meets every point of the grid; no rows at all
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

import yaml
from pydantic import BeforeValidator, Field

from wardround.config import Config
from wardround.config_file import parse
from wardround.errors import ConfigError
from wardround.methods import METHODS, OBJECTIVES
from wardround.models import MODELS, resolve
from wardround.models.foreign_networks import is_import_path
from wardround.settings import Settings
from wardround.tables import Table
from wardround.text import suggest
from wardround.yaml_file import read_yaml

PAPERS = {
    "safcf": "Uncertainty and Scale-Calibrated Contrastive Federated Segmentation under Client Heterogeneity",
    "fsf3a": "FSF3A: federated brain tumour segmentation with CLSL and ASWA",
    "fedevi": "FedEvi: Improving Federated Medical Image Segmentation via Evidential Weight Aggregation",
    "aaw": "Adaptive Aggregation Weights for Federated Segmentation of Pancreas MRI",
}
TITLES = {"safcf": "SAFCF", "fsf3a": "FSF3A", "fedevi": "FedEvi", "aaw": "AAW"}

PACKAGED = Path(__file__).parent / "presets" / "papers"  # in an installed wheel
CHECKOUT = Path(__file__).parents[2] / "configs" / "papers"  # in the repository


# What a preset file holds beside a configuration


class Source(Settings):
    """The data of one client in a paper.

    printed: cases the paper states; cases: those of them that can be used, where fewer.
    """

    dataset: str
    printed: int | None = Field(None, ge=1)
    cases: int | None = Field(None, ge=1)
    train: int | None = Field(None, ge=1)
    validation: int | None = Field(None, ge=0)
    test: int | None = Field(None, ge=1)


class Partition(Settings):
    """How the sources are dealt to clients anew, where a source is not a client."""

    rule: str
    clients: int | None = Field(None, ge=1)
    cases: int | None = Field(None, ge=1, description="of each client")
    train: int | None = Field(None, ge=1, description="of each client")


class Federation(Settings):
    """One federation of a table. size: null where the paper does not give it."""

    clients: dict[str, Source] = Field(min_length=1)
    partition: Partition | None = None
    dimensions: Literal[2, 3]
    size: tuple[int, ...] | None
    channels: int = Field(ge=1)
    labels: str
    normalise: str = "zero mean, unit variance"
    split: tuple[float, float, float]
    split_rule: str
    seeds: tuple[int, ...] = Field(min_length=1)


class Sweep(Settings):
    """The runs of a table: every row with every point of the grid; rows left out: the grid alone."""

    rows: dict[str, dict[str, Any]] | None = None
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)


class Extras(Settings):
    """The keys a plain configuration does not have."""

    about: str = Field(min_length=1)
    datasets: dict[str, Federation] = Field(min_length=1)
    sweep: Sweep


# What was published


class Value(Settings):
    """A printed number, with the printed spread where there is one."""

    mean: float
    sd: float | None = None


def as_value(given: Any) -> Any:
    return given if isinstance(given, Mapping) else {"mean": given}


class Published(Settings):
    """A table as printed: label -> column -> metric -> value.

    columns: clients, or `mean` (over clients, all alike), `weighted mean` (by test cases), `merged test
    set` (all test cases pooled), `all clients` (one number, the averaging not said).
    unit: of each metric; share is 0 to 1, percent 0 to 100.
    cautions: what does not add up in the printed numbers.
    """

    columns: tuple[str, ...]
    unit: dict[str, str]
    rows: dict[str, dict[str, dict[str, Annotated[Value, BeforeValidator(as_value)]]]]
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    def comparable(self, label: str, column: str, metric: str) -> Value | None:
        """The printed value in the unit of our own metrics (percent become shares), if there is one."""
        value = self.rows.get(label, {}).get(column, {}).get(metric)
        if value is None or self.unit[metric] != "percent":
            return value
        return Value(mean=value.mean / 100, sd=None if value.sd is None else value.sd / 100)


# Presets


@dataclass(frozen=True)
class Cell:
    """One run of a table. datasets: the name of its federation in the preset."""

    label: str
    changes: Mapping[str, Any]
    settings: dict[str, Any]
    datasets: str


@dataclass(frozen=True)
class Preset:
    """One table of one paper. settings: the configuration its rows and grid lay overrides on."""

    name: str
    paper: str
    table: str
    about: str
    settings: dict[str, Any]
    rows: Mapping[str, Mapping[str, Any]] | None
    grid: Mapping[str, Sequence[Any]]
    datasets: Mapping[str, Federation]
    published: Published

    def cells(self) -> list[Cell]:
        """Every run of the table, in the order of the file."""
        rows: Mapping[str, Mapping[str, Any]] = {"": {}} if self.rows is None else self.rows
        return [
            self._cell(label, {**overrides, **point})
            for label, overrides in rows.items()
            for point in self._points()
        ]

    def _points(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))

    def _cell(self, row: str, changes: dict[str, Any]) -> Cell:
        parts = [row, *(point_label(key, changes[key]) for key in self.grid)]
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
                put(settings, key, copy.deepcopy(value))
        settings["name"] = label if label == self.name else f"{self.name} {label}"
        return Cell(label, changes, settings, chosen)


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set what stands at a dotted name; missing sections are made."""
    *path, last = key.split(".")
    for part in path:
        settings = settings.setdefault(part, {})
    settings[last] = value


def point_label(key: str, value: Any) -> str:
    """How a point of the grid is called.

    >>> point_label("optimizer.learning_rate", 1e-05), point_label("datasets", "polyp")
    ('learning_rate=1e-5', 'polyp')
    """
    if key == "datasets":
        return str(value)
    text = re.sub(r"e([+-])0+", r"e\1", f"{value:g}") if isinstance(value, float) else str(value)
    return f"{key.rsplit('.', 1)[-1]}={text}"


def expand(preset: Preset) -> dict[str, dict[str, Any]]:
    """The full settings of every run by label, checked as far as this version has their parts."""
    cells = preset.cells()
    for cell in cells:
        check(cell.settings, f"{preset.name}, {cell.label}: ")
    return {cell.label: cell.settings for cell in cells}


def check(settings: Mapping[str, Any], label: str = "") -> Config:
    """The settings, parsed; a method, objective or network of a later version is passed over."""
    later = unknown_parts(settings)
    config = parse({key: value for key, value in settings.items() if key not in later}, label)
    try:
        resolve(config.model)
    except ConfigError as error:
        raise ConfigError(label + str(error)) from None
    return config


def unknown_parts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The sections that name something this version does not have: section -> name."""
    registries: dict[str, Mapping[str, Any]] = {"method": METHODS, "objective": OBJECTIVES, "model": MODELS}
    unknown = {}
    for section, registry in registries.items():
        name = str(settings.get(section, {}).get("name", ""))
        if name and name not in registry and not (section == "model" and is_import_path(name)):
            unknown[section] = name
    return unknown


def missing_parts(cell: Cell) -> list[str]:
    """Sentences on what this version lacks to run a cell, data apart."""
    unknown = unknown_parts(cell.settings)
    lacking = [f"{section} '{name}' needs a later version." for section, name in unknown.items()]
    try:
        check(cell.settings)
    except ConfigError as error:
        lacking.append(str(error))
    return lacking


def missing_data(preset: Preset, cell: Cell) -> list[str]:
    """The data sets of a cell: none comes with wardround, each must be given with `data.federation`."""
    return [source.dataset for source in preset.datasets[cell.datasets].clients.values()]


# Files


def folder() -> Path:
    """Where the preset files are: in the installed package, else in the repository."""
    return PACKAGED if PACKAGED.is_dir() else CHECKOUT


def names() -> list[str]:
    """All presets, paper by paper, Table 2 before Table 10, figures last."""
    return sorted((path.stem for path in folder().glob("*.yaml")), key=order)


def order(name: str) -> tuple[int, bool, int, str]:
    paper, _, table = name.partition("-")
    number = re.search(r"\d+", table)
    papers = [*PAPERS, paper]
    return papers.index(paper), number is None, int(number[0]) if number else 0, table


def load(name: str) -> Preset:
    """One preset by name."""
    known = names()
    if name not in known:
        raise ConfigError(f"'{name}' is not a preset.{suggest(name, known)} List all: wardround papers")
    path = folder() / f"{name}.yaml"
    values = read_yaml(path)
    own = {key: values.pop(key) for key in Extras.model_fields if key in values}
    extras = Extras.read(own, f"{path}: ")
    short, _, table = name.partition("-")
    return Preset(
        name=name,
        paper=PAPERS.get(short, short),
        table=table_title(table),
        about=extras.about,
        settings=values,
        rows=extras.sweep.rows,
        grid=extras.sweep.grid,
        datasets=extras.datasets,
        published=published()[name],
    )


def table_title(table: str) -> str:
    """
    >>> table_title("table2"), table_title("figure-delta")
    ('Table 2', 'Figure delta')
    """
    return re.sub(r"(?<=[a-z])(?=\d)|-", " ", table).capitalize()


@cache
def published() -> dict[str, Published]:
    """The printed numbers of every preset."""
    path = folder() / "published.json"
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return {name: Published.model_validate(entry) for name, entry in loaded.items()}


# For the reader


def preset_list() -> Table:
    """One row a preset; `ready`: runs whose method, objective and network this version has."""
    rows = []
    for name in names():
        preset = load(name)
        cells = preset.cells()
        ready = sum(not missing_parts(cell) for cell in cells)
        paper = TITLES.get(name.partition("-")[0], "")
        rows.append([name, f"{paper} {preset.table}", preset.about, len(cells), f"{ready} of {len(cells)}"])
    caption = (
        "ready: runs whose method, objective and network this version has. One preset: wardround papers show "
        "NAME. How to lay out its data sets: wardround datasets"
    )
    return Table("Tables of the papers", ["name", "table", "what", "runs", "ready"], rows, caption)


def run_table(preset: Preset) -> Table:
    """One row a run: what it changes, and whether this version has its method, objective and network."""
    rows = [
        [cell.label, in_words(cell.changes), "no" if missing_parts(cell) else "yes"]
        for cell in preset.cells()
    ]
    return Table("Runs", ["run", "changes", "ready"], rows)


def in_words(changes: Mapping[str, Any]) -> str:
    """Overrides on one line.

    >>> in_words({"method": {"name": "fedavg", "weighting": "uniform"}, "rounds": 10})
    'method.name=fedavg, method.weighting=uniform, rounds=10'
    """
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{inner}": entry for inner, entry in value.items()})
        else:
            flat[key] = value
    return ", ".join(f"{key}={value}" for key, value in flat.items()) or "-"


def federation_table(preset: Preset) -> Table:
    """One row a federation: its sources with their cases, and how these become clients."""
    rows = [
        [name, ", ".join(map(sized, federation.clients.items())), dealt(federation.partition)]
        for name, federation in preset.datasets.items()
    ]
    facts = {name: federation_facts(federation) for name, federation in preset.datasets.items()}
    shared = len(set(facts.values())) == 1
    lines = [next(iter(facts.values()))] if shared else [f"{name}: {fact}" for name, fact in facts.items()]
    return Table("Data", ["federation", "sources", "clients"], rows, " ".join(lines))


def sized(entry: tuple[str, Source]) -> str:
    """A source with its cases, or with those for training, validation and test.

    >>> sized(("MSD Brain", Source(dataset="msd_brain", printed=750, cases=484)))
    'MSD Brain 484'
    """
    name, source = entry
    if source.train is not None:
        return f"{name} {source.train}/{source.validation}/{source.test}"
    cases = source.cases or source.printed
    return f"{name} {cases}" if cases else name


def dealt(partition: Partition | None) -> str:
    """How sources become clients.

    >>> dealt(None), dealt(Partition(rule="dealt at random", clients=5))
    ('one a source', 'dealt at random, 5 clients')
    """
    if partition is None:
        return "one a source"
    facts = {"clients": partition.clients, "cases each": partition.cases, "for training": partition.train}
    return ", ".join([partition.rule, *(f"{number} {what}" for what, number in facts.items() if number)])


def federation_facts(federation: Federation) -> str:
    size = " x ".join(map(str, federation.size)) if federation.size else "size not given"
    shares = ":".join(f"{100 * share:g}" for share in federation.split)
    channels = "1 channel" if federation.channels == 1 else f"{federation.channels} channels"
    seeds = ", ".join(map(str, federation.seeds))
    return (
        f"{federation.dimensions}D, {size}, {channels}, {federation.normalise}; "
        f"labels: {federation.labels}; split {shares}, {federation.split_rule}; seeds {seeds}."
    )


def published_table(preset: Preset) -> Table:
    """The printed numbers, as wide as is readable."""
    published = preset.published
    metrics, columns = list(published.unit), list(published.columns)
    digits = {metric: decimals(published, metric) for metric in metrics}

    def text(label: str, column: str, metric: str) -> str:
        value = published.rows[label].get(column, {}).get(metric)
        if value is None:
            return ""
        spread = "" if value.sd is None else f" ± {value.sd:.{digits[metric]}f}"
        return f"{value.mean:.{digits[metric]}f}{spread}"

    units = ", ".join(f"{metric}: {unit}" for metric, unit in published.unit.items())
    if len(metrics) == 1:
        rows = [[label, *(text(label, column, metrics[0]) for column in columns)] for label in published.rows]
        return Table("Published", ["run", *columns], rows, units)
    rows = [
        [label, column, *(text(label, column, metric) for metric in metrics)]
        for label, entry in published.rows.items()
        for column in columns
        if column in entry
    ]
    return Table("Published", ["run", "column", *metrics], rows, units)


def decimals(published: Published, metric: str) -> int:
    """The most decimals any printed value of the metric has."""
    values = [
        entry[metric].mean for row in published.rows.values() for entry in row.values() if metric in entry
    ]
    return max((len(f"{value:.10f}".rstrip("0").partition(".")[2]) for value in values), default=0)


def settings_text(preset: Preset) -> str:
    """The settings all runs share, as YAML."""
    return yaml.safe_dump(preset.settings, sort_keys=False, default_flow_style=None, width=100).rstrip()


def tables(preset: Preset) -> list[Table]:
    """Data, runs and printed numbers; an empty one is left out."""
    every = [federation_table(preset), run_table(preset), published_table(preset)]
    return [table for table in every if table.rows]


def remarks(preset: Preset) -> dict[str, list[str]]:
    """Sentences under headings: what is missing to run it, notes, cautions."""
    cells = preset.cells()
    lacking = [f"{cell.label}: {' '.join(missing)}" for cell in cells if (missing := missing_parts(cell))]
    data = list(dict.fromkeys(name for cell in cells for name in missing_data(preset, cell)))
    if data:
        dimensions = next(iter(preset.datasets.values())).dimensions
        lacking.append(
            f"Data sets: {', '.join(data)}. None comes with wardround: lay out yours (wardround datasets) "
            "and add --set data.federation=federation.yaml to wardround compare, or try made-up hospitals "
            f"with --set data.phantom.dimensions={dimensions}."
        )
    if not cells:
        lacking.append("Nothing: this table counts data, no run belongs to it.")
    headings = {
        "Missing": lacking,
        "Notes": list(preset.published.notes),
        "Cautions": list(preset.published.cautions),
    }
    return {heading: sentences for heading, sentences in headings.items() if sentences}


def as_dict(preset: Preset) -> dict[str, Any]:
    """A preset as plain values, for --json."""
    return {
        "name": preset.name,
        "paper": preset.paper,
        "table": preset.table,
        "about": preset.about,
        "settings": preset.settings,
        "datasets": {
            name: federation.model_dump(mode="json", exclude_none=True)
            for name, federation in preset.datasets.items()
        },
        "runs": [
            {
                "label": cell.label,
                "settings": cell.settings,
                "datasets": cell.datasets,
                "missing": missing_parts(cell),
                "missing_data": missing_data(preset, cell),
            }
            for cell in preset.cells()
        ],
        "published": preset.published.model_dump(mode="json", exclude_none=True),
    }
