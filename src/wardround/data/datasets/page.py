"""docs/reference/datasets.md, made from the presets: python -m wardround.data.datasets.page --write"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from wardround.data.datasets import DATASETS, label_text, load, shown, split_text, use_text
from wardround.data.datasets.preset import Preset

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


def reference() -> str:
    """The whole page."""
    presets = [load(name) for name in DATASETS]
    table = ["| name | data set | data | cases |", "|---|---|---|---|"]
    table += [
        f"| [`{p.name}`](#{p.name}) | {plain(p.title)} | {p.dimensions}D, {plain(p.modality)} "
        f"| {plain(p.cases)} |"
        for p in presets
    ]
    return "\n".join([HEAD, *table, "", *("\n".join(section(preset)) + "\n" for preset in presets)])


def section(preset: Preset) -> Iterator[str]:
    yield f"## `{preset.name}`\n"
    yield f"{plain(preset.title)}. {plain(preset.licence)}\n"
    yield "```"
    yield preset.layout.rstrip()
    yield "```\n"
    yield from (f"- Get it: {plain(text)}" for text in preset.get)
    yield f"- Channels: {', '.join(preset.channels) or 'as dataset.json says'}. Labels: {label_text(preset)}."
    if preset.regions:
        joined = "; ".join(f"{name} = {' + '.join(parts)}" for name, parts in preset.regions.items())
        yield f"- Measured: {joined}."
    yield f"- Clients: {plain(preset.clients)}."
    yield f"- Split: {split_text(preset)}."
    yield f"- Prepared: {shown(preset.prepare.model_dump(exclude_defaults=True, mode='json'))}."
    yield from (f"- {plain(text)}" for text in preset.papers)
    yield from (f"- {plain(text)}" for text in preset.notes)
    yield from (f"- Not verified: {plain(text)}" for text in preset.unverified)
    yield from (f"- Cite: {plain(text)}" for text in preset.cite)
    yield f"- Use: `{use_text(preset)}`"


def plain(text: str) -> str:
    """Text that Markdown leaves alone, code marks kept."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(reference(), encoding="utf-8")
    else:
        sys.stdout.write(reference())
