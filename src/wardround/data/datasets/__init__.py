"""Data sets of the literature: what they are, how to get them, and how wardround reads them as published.

    dataset_list()                     all of them, in a table
    dataset_card("polyp")              one of them: citation, licence, how to get it, layout, classes, split
    federation_file("polyp", folder)   a federation.yaml for it, ready to train
    read("polyp", folder)              its cases: the reader `preset:polyp` of a source
    write_labels("polyp", folder, out) labels of one meaning, for sets whose masks are not

Nothing is fetched. A new data set is one YAML file in this folder (`preset.Preset` says what it holds).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround.data.datasets.labels import LIST, WrittenLabels, write_labels
from wardround.data.datasets.preset import DatasetPart, DatasetPreset, list_presets, load_preset
from wardround.data.datasets.reading import read_preset
from wardround.data.federation_file import FederationFile, Source
from wardround.data.listing import Listing
from wardround.data.readers import table
from wardround.tables import Table

__all__ = [
    "DATASETS",
    "PREFIX",
    "DatasetPart",
    "DatasetPreset",
    "WrittenLabels",
    "describe_dataset",
    "list_datasets",
    "load_preset",
    "make_federation_file",
    "read_dataset",
    "read_preset",
    "write_labels",
]

PREFIX = "preset:"  # of a reader's name in federation.yaml
DATASETS = {name: f"{name}.yaml" for name in list_presets()}


def read_dataset(name: str, path: Path, client: str | None = None) -> Listing:
    """The cases of a data set below a folder; what the reader `preset:<name>` of a source does."""
    return read_preset(load_preset(name), path, client)


def make_federation_file(name: str, root: Path) -> FederationFile:
    """A federation.yaml for a data set that lies in a folder, as published or as `write_labels` wrote it.

    Clients, classes, split and preparation are the preset's; held-out clients only where they are there.
    """
    preset = load_preset(name)
    root = Path(root).absolute()
    if (root / LIST).is_file() and (root / "labels").is_dir():
        listing, source = read_written_labels(preset, root), Source(path=root / LIST, reader="table")
    else:
        listing, source = read_preset(preset, root), Source(path=root, reader=PREFIX + name)
    classes = dict(listing.labels)
    return FederationFile(
        sources=(source,),
        held_out=tuple(client for client in preset.held_out if client in listing.clients),
        channels=listing.channels,
        labels=classes,
        regions=dict(listing.regions) or {key: (n,) for n, key in enumerate(classes, start=1)},
        splits=preset.splits,
        partition=preset.partition,
        prepare=preset.prepare,
        about={"dataset": preset.title, "cite": list(preset.cite), "licence": preset.licence},
    )


def read_written_labels(preset: DatasetPreset, folder: Path) -> Listing:
    """The list of `write_labels`, whose values are class numbers."""
    listing = table.read(Path(folder) / LIST)
    return Listing(
        listing.reader,
        listing.entries,
        preset.channels,
        {key: (number,) for number, key in enumerate(preset.labels, start=1)},
        listing.notes,
        preset.numbered_regions,
    )


# Tables


def list_datasets() -> Table:
    rows = []
    for name in DATASETS:
        preset = load_preset(name)
        kind = f"{preset.dimensions}D"
        rows.append([name, preset.title, preset.modality, kind, preset.cases, preset.clients])
    caption = "How to get one and lay it out: wardround datasets show NAME"
    return Table("Data sets", ["name", "data set", "modality", "data", "cases", "clients"], rows, caption)


def describe_dataset(name: str) -> Table:
    """What to know before getting it: one row a fact."""
    preset = load_preset(name)
    rows: list[list[Any]] = [
        ["data", f"{preset.modality}, {preset.dimensions}D; {preset.cases}"],
        *(["cite", text] for text in preset.cite),
        ["licence", preset.licence],
        *(["get it", text] for text in preset.get),
        *format_layout(preset),
        ["channels", ", ".join(preset.channels) or "as dataset.json says"],
        ["labels", format_labels(preset)],
        *(["region", f"{key}: {' + '.join(parts)}"] for key, parts in preset.regions.items()),
        ["clients", preset.clients],
        *(["papers", text] for text in preset.papers),
        ["split", format_split(preset)],
        ["prepare", format_settings(preset.prepare.model_dump(exclude_defaults=True, mode="json"))],
        *(["note", text] for text in preset.notes),
        *(["not verified", text] for text in preset.unverified),
        ["use it", format_use(preset)],
    ]
    return Table(f"{preset.title} ({name})", ["", name], rows)


def format_layout(preset: DatasetPreset) -> list[list[Any]]:
    lines = preset.layout.strip().splitlines()
    return [["layout" if number == 0 else "", line] for number, line in enumerate(lines)]


def format_use(preset: DatasetPreset) -> str:
    use = f"wardround data init FOLDER --dataset {preset.name} -o federation.yaml"
    if not preset.needs_labels:
        return use
    return f"wardround datasets labels {preset.name} FOLDER -o OUT, then {use.replace('FOLDER', 'OUT')}"


def format_labels(preset: DatasetPreset) -> str:
    """Class names with the values that mean them, part by part where they differ."""
    if not preset.labels:
        return "as dataset.json says"
    texts = [format_values(preset.labels)]
    for part in preset.parts:
        if part.labels is not None:
            who = ", ".join(dict.fromkeys(part.names.values())) or part.client
            texts.append(f"{who}: {format_values(part.labels)}")
    return "; ".join(dict.fromkeys(texts))


def format_values(values: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} = {' '.join(map(str, own))}" for key, own in values.items())


def format_split(preset: DatasetPreset) -> str:
    train, val, test = (round(100 * part) for part in preset.splits.ratios)
    how = f"{train}/{val}/{test} % for training, validation and test, by patient, seed {preset.splits.seed}"
    kind = preset.partition.kind
    one = f"; one site, dealt to {preset.partition.clients} clients ({kind})"
    return how if kind == "natural" else how + one


def format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items()) or "as it is"
