"""docs/reference/datasets.md, made from the presets: python -m wardround.data.datasets.page --write"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from wardround.data.datasets.cards import format_labels, format_settings, format_split, format_use
from wardround.data.datasets.preset import DatasetPreset, list_presets, load_preset

PAGE = Path(__file__).parents[4] / "docs/reference/datasets.md"  # in the repository
HEAD = """\
# Data sets

Made by `python -m wardround.data.datasets.page --write`; edit `src/wardround/data/datasets/*.yaml` instead.

Presets know a published data set: how it is laid out, what its files mean, how the papers split it.
Nothing is fetched; you get it under its own terms. Then

    wardround data init FOLDER --dataset NAME -o federation.yaml

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
