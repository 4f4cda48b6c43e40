"""Presets for readers: tables of runs, data and printed numbers, and what is missing to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from wardround.papers.data import PaperData
from wardround.papers.presets import (
    PaperFederation,
    PaperPreset,
    PaperSource,
    Partition,
    PublishedTable,
    format_changes,
    list_missing_data,
    list_missing_parts,
    list_names,
    load,
)
from wardround.tables import Table

NORMALISED = {"zscore": "zero mean, unit variance", "maximum": "divided by the image's maximum"}
TITLES = {"safcf": "SAFCF", "fsf3a": "FSF3A", "fedevi": "FedEvi", "aaw": "AAW"}


def list_presets() -> Table:
    """One row a preset; `ready`: runs whose method, objective and network this version has."""
    rows = []
    for name in list_names():
        preset = load(name)
        cells = preset.list_runs()
        ready = sum(not list_missing_parts(cell) for cell in cells)
        paper = TITLES.get(name.partition("-")[0], "")
        rows.append([name, f"{paper} {preset.table}", preset.about, len(cells), f"{ready} of {len(cells)}"])
    caption = (
        "ready: runs whose method, objective and network this version has. One preset: wardround papers show "
        "NAME. How to lay out its data sets: wardround datasets"
    )
    return Table(
        "Tables and figures of the papers", ["name", "table", "what", "runs", "ready"], rows, caption
    )


def run_table(preset: PaperPreset) -> Table:
    """One row a run: what it changes, and whether this version has its method, objective and network."""
    rows = [
        [cell.label, format_changes(cell.changes), "no" if list_missing_parts(cell) else "yes"]
        for cell in preset.list_runs()
    ]
    return Table("Runs", ["run", "changes", "ready"], rows)


def federation_table(preset: PaperPreset) -> Table:
    """One row a federation: its sources with their cases, and how these become clients."""
    rows = [
        [
            name,
            ", ".join(map(describe_source, federation.clients.items())),
            describe_partition(federation.partition),
        ]
        for name, federation in preset.datasets.items()
    ]
    facts = {name: describe_federation(federation) for name, federation in preset.datasets.items()}
    shared = len(set(facts.values())) == 1
    lines = [next(iter(facts.values()))] if shared else [f"{name}: {fact}" for name, fact in facts.items()]
    return Table("Data", ["federation", "sources", "clients"], rows, " ".join(lines))


def describe_source(entry: tuple[str, PaperSource]) -> str:
    """A source with its cases, or with those for training, validation and test.

    >>> describe_source(("MSD Brain", PaperSource(dataset="msd_brain", printed=750, cases=484)))
    'MSD Brain 484'
    """
    name, source = entry
    if source.train is not None:
        return f"{name} {source.train}/{source.validation}/{source.test}"
    return f"{name} {source.size}" if source.size else name


def describe_partition(partition: Partition | None) -> str:
    """How sources become clients.

    >>> describe_partition(None), describe_partition(Partition(rule="dealt at random", clients=5))
    ('one a source', 'dealt at random, 5 clients')
    """
    if partition is None:
        return "one a source"
    facts = {"clients": partition.clients, "cases a client": partition.cases, "for training": partition.train}
    return ", ".join([partition.rule, *(f"{number} {what}" for what, number in facts.items() if number)])


def describe_federation(federation: PaperFederation) -> str:
    size = " x ".join(map(str, federation.size)) if federation.size else "size not given"
    shares = ":".join(f"{100 * share:g}" for share in federation.split)
    channels = "1 channel" if federation.channels == 1 else f"{federation.channels} channels"
    seeds = ", ".join(map(str, federation.seeds))
    return (
        f"{federation.dimensions}D, {size}, {channels}, {NORMALISED[federation.normalise]}; "
        f"labels: {federation.labels}; split {shares}, {federation.split_rule}; seeds {seeds}."
    )


def published_tables(preset: PaperPreset) -> list[Table]:
    """The printed numbers, as wide as is readable; rows of other clients are a table of their own."""
    published = preset.published
    groups: dict[tuple[str, ...], list[str]] = {}
    for label, row in published.rows.items():
        groups.setdefault(tuple(name for name in published.columns if name in row), []).append(label)
    return [published_table(published, labels, columns) for columns, labels in groups.items()]


def published_table(published: PublishedTable, labels: Sequence[str], columns: Sequence[str]) -> Table:
    metrics = list(published.unit)
    digits = {metric: count_decimals(published, metric) for metric in metrics}

    def text(label: str, column: str, metric: str) -> str:
        value = published.rows[label][column].get(metric)
        if value is None:
            return ""
        spread = "" if value.sd is None else f" ± {value.sd:.{digits[metric]}f}"
        return f"{value.mean:.{digits[metric]}f}{spread}"

    units = ", ".join(f"{metric}: {unit}" for metric, unit in published.unit.items())
    if len(metrics) == 1:
        rows = [[label, *(text(label, column, metrics[0]) for column in columns)] for label in labels]
        return Table("Published", ["run", *columns], rows, units)
    rows = [
        [label, column, *(text(label, column, metric) for metric in metrics)]
        for label in labels
        for column in columns
    ]
    return Table("Published", ["run", "column", *metrics], rows, units)


def count_table(preset: PaperPreset, made: Mapping[str, PaperData], notes: Sequence[str]) -> Table:
    """A table that counts data: what is printed, and what is there; notes: those of `prepare_data`."""
    rows = []
    for label, columns in preset.published.rows.items():
        for column, values in columns.items():
            if column in made:
                source = preset.datasets[column].clients.get(label)
                have = made[column].cases
                count = sum(have.values()) if source is None else have.get(source.key, 0)
                printed = round(next(iter(values.values())).mean)
                rows.append([label, column, printed, count, count - printed])
    own = dict.fromkeys(note for data in made.values() for note in data.notes)
    heads = ["row", "column", "printed", "counted", "difference"]
    return Table(f"{preset.name}: images", heads, rows, " ".join([*notes, *own, *preset.published.notes]))


def count_decimals(published: PublishedTable, metric: str) -> int:
    """The most decimals any printed value of the metric has."""
    values = [
        entry[metric].mean for row in published.rows.values() for entry in row.values() if metric in entry
    ]
    return max((len(f"{value:.10f}".rstrip("0").partition(".")[2]) for value in values), default=0)


def format_settings(preset: PaperPreset) -> str:
    """The settings all runs share, as YAML."""
    return yaml.safe_dump(preset.settings, sort_keys=False, default_flow_style=None, width=100).rstrip()


def list_tables(preset: PaperPreset) -> list[Table]:
    """Data, runs and printed numbers; an empty one is left out."""
    every = [federation_table(preset), run_table(preset), *published_tables(preset)]
    return [table for table in every if table.rows]


def list_remarks(preset: PaperPreset) -> dict[str, list[str]]:
    """Sentences under headings: what is missing to run it, notes, cautions."""
    cells = preset.list_runs()
    lacking = [
        f"{cell.label}: {' '.join(missing)}" for cell in cells if (missing := list_missing_parts(cell))
    ]
    data = list(dict.fromkeys(name for cell in cells for name in list_missing_data(preset, cell)))
    if data:
        lacking.append(
            f"Data sets: {', '.join(data)}. None comes with wardround: put yours below a folder (wardround "
            f"datasets show NAME), then: wardround papers run {preset.name} --data FOLDER. Or --data "
            "synthetic --scale 0.01, to see that it runs."
        )
    if not cells:
        lacking.append("Nothing: this table counts data, no run belongs to it.")
    headings = {
        "Missing": lacking,
        "Notes": [*preset.published.notes, *list_readings(preset)],
        "Cautions": list(preset.published.cautions),
    }
    return {heading: sentences for heading, sentences in headings.items() if sentences}


def list_readings(preset: PaperPreset) -> list[str]:
    """What the settings of all runs mean where the paper leaves it open."""
    objective, model = preset.settings.get("objective", {}), preset.settings.get("model", {})
    found = []
    if preset.figures:
        files = ", ".join(f"figures/{name}.png" for name in preset.figures)
        found.append(f"The pictures are in the report, and as {files} beside it.")
    if objective.get("contrast") == "guarded":
        found.append(
            "contrast: guarded puts the features through a sigmoid, takes the mean in place of the sum in "
            "Eq. 6, and divides by at least 1 in Eq. 9; as printed the term swamps Dice and can change sign "
            "(S4-S6)."
        )
    if model.get("stem") == "variational":
        found.append(
            "The paper prints no divergence term for the variational stem. Runs here have one "
            "(model.variational.kl_weight: auto, 1 / training cases); without it: the row kl_weight=0 of "
            "safcf-table4, or --set model.variational.kl_weight=0."
        )
    return found
