"""What a partition made of the cases: a table of the clients, and a figure."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wardround.data.listing import SPLITS, Entry
from wardround.data.partitions import Describe, assign_quartiles, describe_case, find_rarest_classes
from wardround.files import write_bytes
from wardround.tables import Table
from wardround.text import clipped


def summarise(entries: Iterable[Entry], describe: Describe | None = None) -> Table:
    """One row a client: cases, groups, splits where they are known, median foreground where asked."""
    clients = group_by_client(entries)
    rows = []
    for client, cases in clients.items():
        row: list[Any] = [client, len(cases), len({case.group for case in cases})]
        row += [sum(case.split == split for case in cases) for split in SPLITS]
        if describe is not None:
            row.append(float(np.median([describe_case(case, describe).foreground for case in cases])))
        rows.append(row)
    heads = ["client", "cases", "groups", *SPLITS, *(["foreground (median)"] if describe else [])]
    total = sum(len(cases) for cases in clients.values())
    return Table("Clients", heads, rows, f"{total} cases at {len(clients)} clients.", width=40)


def group_by_client(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    clients: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.client, entry.name)):
        clients.setdefault(entry.client, []).append(entry)
    return clients


COLOURS = ("#2f6f9f", "#7fb7d8", "#f2b880", "#d1603d", "#8f6bb3", "#5a9e6f", "#b8b8b8")


def draw(entries: Sequence[Entry], describe: Describe | None, path: Path) -> None:
    """Stacked bars of each client's cases: by split, by quartile of foreground size, and by class."""
    from matplotlib.figure import Figure

    clients = group_by_client(entries)
    ordered = [case for cases in clients.values() for case in cases]
    panels = {"split": [case.split or "not yet split" for case in ordered]}
    if describe is not None:
        described = [describe_case(case, describe) for case in ordered]
        panels["foreground size, quartiles of all cases"] = assign_quartiles(
            [d.foreground for d in described]
        )
        panels["rarest class in the case"] = find_rarest_classes([d.classes for d in described])
    panels = {title: kinds for title, kinds in panels.items() if title == "split" or len(set(kinds)) > 1}
    figure = Figure(figsize=(max(6.0, 2.6 + 0.2 * len(clients)), 2.4 * len(panels) + 0.9), dpi=110)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (title, kinds) in zip(axes, panels.items(), strict=True):
        stack_bars(axis, clients, kinds, title)
    many = sum(min(len(name), 24) + 2 for name in clients) > 70  # characters that fit side by side
    axes[-1].set_xlim(-0.6, len(clients) - 0.4)
    axes[-1].set_xticks(
        range(len(clients)),
        [clipped(name) for name in clients],
        rotation=90 if many else 0,
        fontsize=7 if many else 9,
    )
    save_figure(figure, path)


def save_figure(figure: Any, path: Path, margin: float = 0.0) -> None:
    """Write a figure as PNG, whole or not at all; margin: share of its height left free below."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name may be written in any script
        figure.tight_layout(rect=(0, margin, 1, 1))
        figure.savefig(content, format="png")
    write_bytes(Path(path), content.getvalue())


def stack_bars(axis: Any, clients: Mapping[str, Sequence[Entry]], kinds: Sequence[str], title: str) -> None:
    """One bar a client; kinds: of all cases, client after client."""
    place = iter(kinds)
    own = [[next(place) for _ in cases] for cases in clients.values()]
    order = [*SPLITS, *sorted(set(kinds) - set(SPLITS))]
    base = np.zeros(len(own))
    for number, kind in enumerate(kind for kind in order if kind in kinds):
        height = np.array([cases.count(kind) for cases in own])
        axis.bar(range(len(own)), height, bottom=base, color=COLOURS[number % len(COLOURS)], label=kind)
        base += height
    axis.set_ylabel("cases")
    axis.set_title(title, fontsize=10, loc="left")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, reverse=True)
    axis.spines[["top", "right"]].set_visible(False)
