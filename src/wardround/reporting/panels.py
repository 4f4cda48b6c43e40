"""The panel: the same test cases under every row of a comparison, beside the truth.

Each client keeps a few cases that its model had no part in choosing (pictures.py), so all runs on the same
data keep the same ones. A scan is in the page once; every row adds its outline, its uncertainty and its
features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wardround.comparison.groups import MOST_DETAILED, RunGroup
from wardround.comparison.runs import Run
from wardround.engine.judging.pictures import Picture
from wardround.reporting.html import Child, Html, name, plain, section, tag
from wardround.reporting.overlays import colour, draw_keys, encode_data_url, trace_outlines
from wardround.tables import shown

MOST_CASES = 8  # on a page
PALETTES = {"uncertainty": "magma", "features": "viridis"}  # readable without colour too

CaseName = tuple[str, str]  # client, case


@dataclass(frozen=True)
class PanelCase:
    """One test case under several rows. scan: what all rows share, the image and the truth."""

    client: str
    scan: Picture
    rows: Mapping[str, Picture]


def collect_panel(rows: Mapping[str, Sequence[Run]], most: int = MOST_CASES) -> list[PanelCase]:
    """The cases that the first run of every row kept; where they are many, one of each client first.

    A row that kept none, such as one with evaluate.overlays 0, is left out.
    """
    kept = {label: index_panel(runs[0]) for label, runs in list(rows.items())[:MOST_DETAILED] if runs}
    kept = {label: cases for label, cases in kept.items() if cases}
    if len(kept) < 2:
        return []
    first = next(iter(kept.values()))
    shared = [
        key
        for key, picture in first.items()
        if all(key in cases and np.array_equal(cases[key].truth, picture.truth) for cases in kept.values())
    ]
    clients = [client for client, _ in shared]
    turns = {key: clients[:place].count(key[0]) for place, key in enumerate(shared)}
    chosen = sorted(shared, key=lambda key: turns[key])[:most]
    return [
        PanelCase(key[0], first[key], {label: cases[key] for label, cases in kept.items()})
        for key in shared
        if key in chosen
    ]


def index_panel(run: Run) -> dict[CaseName, Picture]:
    return {(client, case.name): case for client, files in run.files.items() for case in files.panel}


# On the page


def panel_section(group: RunGroup, prefix: str) -> Html:
    """Every case of the panel with the truth and each row's prediction, uncertainty and features."""
    cases = collect_panel(group.replicates)
    if not cases:
        return Html("")
    blocks = [draw_case(case, f"{prefix}-case{number}") for number, case in enumerate(cases)]
    some = [picture for case in cases for picture in case.rows.values()]
    lead = (
        "The same test cases under every row (of its first seed): a smaller and a larger one of each client, "
        "chosen by the truth alone, in the slice with most foreground. Beside a row's name: the Dice of the "
        "case. Below each prediction: where the model was uncertain (entropy, dark is confident)"
        + (
            "; then the mean activation of its deepest features, from the weakest (dark) to the strongest in "
            "this picture."
            if any(picture.features is not None for picture in some)
            else "."
        )
    )
    return section(f"{prefix}-panel", "The same cases", draw_keys(), *blocks, lead=lead)


def draw_case(case: PanelCase, identifier: str) -> Html:
    scan = case.scan
    words = f"{plain(scan.name)} of {plain(case.client)}"
    image = tag(
        "image", href=encode_data_url(scan.image[0], "JPEG"), width=str(scan.image.shape[2]),
        height=str(scan.image.shape[1]), preserveAspectRatio="none", id=identifier,
    )  # fmt: skip
    truth = [frame(scan, [image, outline(scan, "truth")], f"Scan with the outline of the truth; {words}")]
    figures = [draw_row(truth, "truth")]
    for label, picture in case.rows.items():
        dice = None if math.isnan(picture.dice) else tag("span", shown(picture.dice), class_="case-score")
        figures.append(draw_row(draw_layers(picture, identifier, f"{words}; {plain(label)}"), label, dice))
    title = tag("h4", name(case.client), ": ", name(scan.name), f", {scan.plane}" if scan.plane else None)
    return tag("div", title, tag("div", figures, class_="panel"), class_="client-cases")


def draw_row(parts: Sequence[Html], label: str, dice: Html | None = None) -> Html:
    """One column of a case: what it shows, and its pictures below each other."""
    caption = tag("figcaption", tag("span", name(label, 28), class_="case-name"), dice)
    return tag("figure", tag("div", *parts, class_="stack"), caption, class_="case")


def draw_layers(picture: Picture, scan: str, words: str) -> list[Html]:
    """Outlines on the scan, then the uncertainty, then the features. scan: identifier of its image."""
    both = [tag("use", href=f"#{scan}"), outline(picture, "truth"), outline(picture, "prediction")]
    parts = [frame(picture, both, f"Scan with outlines of truth and prediction; {words}")]
    for kind, said in (("uncertainty", "Where the model was uncertain"), ("features", "Deepest features")):
        layer = getattr(picture, kind)
        if layer is not None:
            height, width = picture.size
            image = tag(
                "image", href=encode_data_url(colour(layer[0], PALETTES[kind]), "PNG"), width=str(width),
                height=str(height), preserveAspectRatio="none",
            )  # fmt: skip
            parts.append(frame(picture, [image, outline(picture, "prediction")], f"{said}; {words}"))
    return parts


def outline(picture: Picture, kind: str) -> Html:
    path = trace_outlines(getattr(picture, kind)[0])
    drawn = [tag("path", d=path, class_=f"{what} {kind}") for what in ("casing", "outline")] if path else []
    return tag("g", drawn, class_="slice")


def frame(picture: Picture, content: Child, words: str) -> Html:
    """A picture in the aspect of its pixels."""
    height, width = picture.size
    tall = height * picture.aspect
    inner = tag(
        "svg", content, viewBox=f"0 0 {width} {height}", width=str(width), height=f"{tall:g}",
        preserveAspectRatio="none",
    )  # fmt: skip
    return tag("svg", inner, viewBox=f"0 0 {width} {tall:g}", role="img", aria_label=words, class_="scan")
