"""What each data set is, how to get it and how it is laid out: as tables, and as docs/reference/datasets.md.

Write that page: python -m wardround.data.datasets.page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wardround.data.datasets.preset import DatasetPreset, list_presets, load_preset
from wardround.tables import Table


def list_datasets() -> Table:
    presets = [load_preset(name) for name in list_presets()]
    rows = [[p.name, p.title, p.modality, f"{p.dimensions}D", p.cases, p.clients] for p in presets]
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
        *(["" if n else "layout", line] for n, line in enumerate(preset.layout.strip().splitlines())),
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


PAGE = Path(__file__).parents[4] / "docs/reference/datasets.md"  # in the repository
HEAD = """\
# Data sets

Made by `python -m wardround.data.datasets.page --write`; edit `src/wardround/data/datasets/*.yaml` instead.

Presets know a published data set: how it is laid out, what its files mean, how the papers split it.
Nothing is fetched; you get it under its own terms. Then

    wardround data init FOLDER --dataset NAME -o federation.yaml

<!-- not run: needs the data sets -->

writes the federation file, as for [your own data](../how-to/own-data.md). A source of a federation file
can be `{path: FOLDER, reader: "preset:NAME"}`, so several sets can be the clients of one federation.
"Not verified" is what could not be checked against the files themselves.
"""


def make_page() -> str:
    """The whole page."""
    presets = [load_preset(name) for name in list_presets()]
    table = ["| name | data set | data | cases |", "|---|---|---|---|"]
    table += [
        f"| [`{p.name}`](#{p.name}) | {escape(p.title)} | {p.dimensions}D, {escape(p.modality)} "
        f"| {escape(p.cases)} |"
        for p in presets
    ]
    return "\n".join([HEAD, *table, "", *("\n".join(format_section(preset)) + "\n" for preset in presets)])


def format_section(preset: DatasetPreset) -> Iterator[str]:
    yield f"## `{preset.name}`\n"
    yield f"{escape(preset.title)}. {escape(preset.licence)}\n"
    yield "```"
    yield preset.layout.rstrip()
    yield "```\n"
    yield from (f"- Get it: {escape(text)}" for text in preset.get)
    channels = ", ".join(preset.channels) or "as dataset.json says"
    yield f"- Channels: {channels}. Labels: {format_labels(preset)}."
    if preset.regions:
        joined = "; ".join(f"{name} = {' + '.join(parts)}" for name, parts in preset.regions.items())
        yield f"- Measured: {joined}."
    yield f"- Clients: {escape(preset.clients)}."
    yield f"- Split: {format_split(preset)}."
    yield f"- Prepared: {format_settings(preset.prepare.model_dump(exclude_defaults=True, mode='json'))}."
    yield from (f"- {escape(text)}" for text in preset.papers)
    yield from (f"- {escape(text)}" for text in preset.notes)
    yield from (f"- Not verified: {escape(text)}" for text in preset.unverified)
    yield from (f"- Cite: {escape(text)}" for text in preset.cite)
    yield f"- Use: `{format_use(preset)}`"


def escape(text: str) -> str:
    """Text that Markdown leaves alone, code marks kept."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(make_page(), encoding="utf-8")
    else:
        sys.stdout.write(make_page())
