"""What each data set is, how to get it and how it is laid out, as tables."""

from __future__ import annotations

from typing import Any

from wardround.data.datasets.preset import DatasetPreset, list_presets, load_preset
from wardround.tables import Table


def list_datasets() -> Table:
    rows = []
    for name in list_presets():
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
