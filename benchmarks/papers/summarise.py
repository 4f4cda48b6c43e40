"""The README of this folder from the results file of run.py: printed, measured, and the order of methods.

    python benchmarks/papers/summarise.py papers.tar.gz > benchmarks/papers/README.md

Several files are laid over each other: runs of one that another lacks are added.
"""

from __future__ import annotations

import json
import math
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.comparison import Comparison
from wardround.comparison.published import OrderAgreement, compare_order
from wardround.metrics import METRICS
from wardround.papers.cards import TITLES
from wardround.papers.presets import load

START = """\
# Tables of the papers, measured

Written by `summarise.py` from what `run.py` brought back. Real data: polyp4 (the four polyp sources of
FedEvi, smaller images, fewer cases) and lgg3d (glioma of four hospitals) in place of the brain and pancreas
sets.

Rounds, image sizes and networks are a small part of the papers', as said under each table. So the numbers
themselves are not comparable with the printed ones; the order of the methods may be, but a difference that
takes a long training to appear cannot appear here. "Not decided" means that this budget does not tell, not
that the paper is wrong.

- **Measured**: mean ± SD over the splits, each with a seed of its own; one split has no SD.
- **95 % interval**: of the mean, test cases resampled within each client. What training again would change is
  not in it.
- **Difference**: measured minus printed.
- **Against** a row: paired difference on the same test cases, its 95 % interval, and the p value of a
  Wilcoxon test with Holm's correction over the rows. Bold where p is below 0.05.
- **Order**: pairs of printed rows that come in the printed order, with Kendall's tau (1 the same order, 0 no
  relation, -1 the reverse), its 95 % interval over test cases, and tau in every split alone. *As printed*:
  every pair, interval and splits above 0. *Similar*: most pairs, interval and splits above 0. *Reversed*: all
  below 0. Everything else is *not decided*.
- Computed in TF32. Seeds are not enough for a claim about training noise: three at most.
- Learning rates and batch sizes of the 3D tables are ours and were not tuned for them: in a hundredth of the
  printed steps nothing is learnt at the printed rates. All rows of a table have the same.
- Batches of 4 instead of 8 halve the negatives of contrastive objectives.
- Of tables with several data sets, the polyp half (FedEvi) and the T1 half (AAW) is run.
"""
CHOSEN = {"weighted mean": "weighted", "mean": "mean"}  # our columns over clients -> in a summary


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path in sys.argv[1:]:
            with tarfile.open(path) as file:
                file.extractall(folder, filter="data")
        work = Path(folder)
        found = [
            Comparison.load(path.parent) for path in sorted(work.glob("*/comparison.json"), key=order_key)
        ]
        calls = json.loads((work / "calls.json").read_text(encoding="utf-8"))
        tables = [table for table in found if table.results]
        missing = [table.name for table in found if not table.results]
        parts = [START, describe_calls(calls, found), *overview(tables), *map(describe, tables)]
        if missing:
            parts.append(f"Not run: {', '.join(missing)}.")
        print("\n".join(parts).rstrip())


def order_key(path: Path) -> tuple[int, str]:
    names = ("fedevi", "safcf", "aaw")
    return names.index(path.parent.name.partition("-")[0]), path.parent.name


def describe_calls(calls: Sequence[Mapping[str, Any]], found: Sequence[Comparison]) -> str:
    """Where and for how long, and how many runs."""
    folders = {cell.folder.resolve() for table in found for cell in table.cells}
    done = {cell.folder.resolve() for table in found for cell in table.cells if cell.is_done}
    places = " and ".join(dict.fromkeys(f"{call['device']}, PyTorch {call['torch']}" for call in calls))
    commits = {json.loads((folder / "environment.json").read_text())["commit"] for folder in done}
    commit = ", ".join(sorted(str(name)[:7] for name in commits))
    seconds = [call["seconds"] for call in calls]
    spent = " + ".join("ended from outside" if s is None else f"{s} s" for s in seconds)
    small = " A trial with `--small`: no result." if any(call["small"] for call in calls) else ""
    return (
        f"{len(done)} of {len(folders)} runs, {calls[-1]['jobs']} side by side on {places}: {spent}; commit "
        f"{commit}. Rows of several tables with the same settings are one run.{small}\n"
    )


# All tables at a glance


def overview(tables: Sequence[Comparison]) -> list[str]:
    lines = [
        "| table | runs | order by Dice | pairs as printed | tau (95 %) | by split | best in print | here |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for table in tables:
        order = find_order(table, table.metrics[0])
        cells = [f"[{title(table.name)}](#{table.name})", f"{len(table.results)} of {len(table.cells)}"]
        if order is None:
            cells += ["nothing to compare", "", "", "", "", ""]
        else:
            pairs = f"{order.whole.num_same} of {order.whole.num_pairs}"
            place = f"{order.whole.place} of {order.whole.among}"
            cells += [order.verdict, pairs, order.tau, order.by_split, order.whole.best, place]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def title(name: str) -> str:
    return f"{TITLES[name.partition('-')[0]]} {load(name).table}"


@dataclass(frozen=True)
class Order:
    """The order of rows over all splits that every row has, and in each of them."""

    whole: OrderAgreement
    splits: tuple[float, ...]

    @property
    def verdict(self) -> str:
        low = min(self.whole.interval.low, *self.splits)
        high = max(self.whole.interval.high, *self.splits)
        if low > 0:
            return "as printed" if self.whole.num_same == self.whole.num_pairs else "similar"
        return "reversed" if high < 0 else "not decided"

    @property
    def tau(self) -> str:
        return f"{self.whole.tau:.2f} ({self.whole.interval.low:.2f} to {self.whole.interval.high:.2f})"

    @property
    def by_split(self) -> str:
        return ", ".join(f"{tau:.2f}" for tau in self.splits)


def find_order(table: Comparison, metric: str) -> Order | None:
    """Over the splits that are done in every row: others would compare different cases."""
    done = list_common_seeds(table)
    whole = compare_order(restrict(table, done).sheet, metric)
    if whole is None:
        return None
    each = [compare_order(restrict(table, [seed]).sheet, metric) for seed in done]
    return Order(whole, tuple(order.tau for order in each if order is not None))


def list_common_seeds(table: Comparison) -> list[int]:
    """The seeds, and so splits, of which every row that has any is done; all of them where there is none."""
    done = {(cell.row, cell.seed) for cell in table.cells if cell.is_done}
    rows = {row for row, _ in done}
    seeds = list(dict.fromkeys(cell.seed for cell in table.cells))
    return [seed for seed in seeds if all((row, seed) in done for row in rows)] or seeds


def restrict(table: Comparison, seeds: Sequence[int]) -> Comparison:
    cells = [cell for cell in table.facts["cells"] if cell["seed"] in seeds]
    return Comparison(table.folder, {**table.facts, "cells": cells, "seeds": list(seeds)})


# One table


def describe(table: Comparison) -> str:
    preset, metric = load(table.name), table.metrics[0]
    numbers = table.numbers(metric)
    lines = [f"## {table.name}", "", f"{title(table.name)}. {preset.about}", ""]
    lines += [
        *score_lines(numbers, table.reference),
        *print_only_lines(table),
        "",
        *client_lines(numbers),
        *order_lines(table),
    ]
    done = len(table.results)
    splits = len(list_common_seeds(table))
    lines += ["What was different from the paper:", ""]
    lines += [
        f"- {done} of {len(table.cells)} runs; {splits} splits are done in every row and count for order."
    ]
    lines += [f"- {note}" for note in table.facts["notes"] if not note.startswith("Scaled to")]
    lines += [f"- Failed: {cell}: {why}" for cell, why in table.failures.items()]
    if preset.published.cautions:
        lines += ["", "Cautions on the printed numbers:", ""]
        lines += [f"- {sentence}" for sentence in preset.published.cautions]
    return "\n".join([*lines, ""])


def score_lines(numbers: Mapping[str, Any], reference: str) -> list[str]:
    """One line a row: what is printed over all clients, ours, the difference, and against the reference."""
    printed = summarise_print(numbers)
    tested = {row["label"]: row for row in numbers["statistics"]["rows"]}
    label, weighted = numbers["label"], any(column == "weighted" for column, _ in printed.values())
    over = " (over cases)" if weighted else ""
    lines = [
        f"| row | printed {label}{over} | measured | 95 % interval | difference | against {reference} |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for summary in numbers["summaries"]:
        own = tested[summary["label"]]
        column, value = printed.get(summary["label"], ("weighted" if weighted else "mean", None))
        ours = summary[column]
        difference = None if value is None else ours["mean"] - value
        cells = [
            summary["label"],
            show(value),
            "not run" if math.isnan(ours["mean"]) else show(ours["mean"], ours["sd"]),
            show_interval(own["interval"]) if column == "mean" else "",
            show(difference, sign="+"),
            show_test(own["test"]) or own["why_not"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def print_only_lines(table: Comparison) -> list[str]:
    """Printed rows of the same data that no run belongs to."""
    ends = {label.rpartition(", ")[2] for label in table.rows}
    lines = []
    for label, row in load(table.name).published.rows.items():
        if label not in table.rows and label.rpartition(", ")[2] in ends and "mean" in row:
            value = load(table.name).published.comparable(label, "mean", table.metrics[0])
            lines.append(f"| {label} | {show(value and value.mean)} | no run of its own | | | |")
    return lines


def summarise_print(numbers: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Row -> which of our means stands beside the printed one, and that; the mean of clients without one."""
    rows: dict[str, dict[str, float]] = {}
    for entry in (numbers["published"] or {"rows": []})["rows"]:
        rows.setdefault(entry["label"], {})[entry["column"]] = entry["printed"]["mean"]
    found = {}
    for label, columns in rows.items():
        column = next((name for name in CHOSEN if name in columns), None)
        if column is None:
            found[label] = ("mean", sum(columns.values()) / len(columns))
        else:
            found[label] = (CHOSEN[column], columns[column])
    return found


def client_lines(numbers: Mapping[str, Any]) -> list[str]:
    """Client by client, measured and printed, where the clients are the paper's."""
    rows: dict[str, dict[str, str]] = {}
    for entry in (numbers["published"] or {"rows": []})["rows"]:
        if entry["column"] not in CHOSEN:
            both = f"{show(entry['measured']['mean'])} ({show(entry['printed']['mean'])})"
            rows.setdefault(entry["label"], {})[entry["column"]] = both
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return [
        f"Client by client, {numbers['label']} measured (printed):",
        "",
        f"| row | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
        *(f"| {label} | {' | '.join(row.get(c, '') for c in columns)} |" for label, row in rows.items()),
        "",
    ]


def order_lines(table: Comparison) -> list[str]:
    """One sentence for every metric that is printed."""
    lines = []
    for metric in table.metrics:
        order = find_order(table, metric)
        if order is None:
            continue
        whole = order.whole
        place = "also the best here" if whole.place == 1 else f"number {whole.place} of {whole.among} here"
        lines.append(
            f"- Order by {METRICS[metric].label}: **{order.verdict}**. {whole.num_same} of {whole.num_pairs} "
            f"pairs as printed, tau {order.tau}, by split {order.by_split}. {whole.best}, the best in print, "
            f"is {place}."
        )
    return [*lines, ""] if lines else []


# Numbers


def show(value: float | None, sd: float | None = None, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:{sign}.3f}" if sd is None or math.isnan(sd) else f"{value:{sign}.3f} ± {sd:.3f}"


def show_interval(interval: Any) -> str:
    low, high = (interval["low"], interval["high"]) if isinstance(interval, Mapping) else interval
    return "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def show_test(test: Mapping[str, Any] | None) -> str:
    if test is None:
        return ""
    text = f"{test['difference']:+.3f} ({show_interval(test['interval'])}), p {test['p_holm']:.2g}"
    return f"**{text}**" if test["p_holm"] < 0.05 else text


if __name__ == "__main__":
    main()
