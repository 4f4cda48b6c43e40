"""The README of this folder from files papers.json: printed, measured, difference, and the order of methods.

python benchmarks/papers/summarise.py runs/papers/papers.json > benchmarks/papers/README.md
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from wardround.papers.presets import load

START = """\
# Tables of the papers, measured

Written by `summarise.py` from what `run.py` brought back; see there for the budget. Real data: polyp4 (four
sources of polyps, as in FedEvi, smaller images) and lgg3d (glioma of four hospitals, in place of the brain
and pancreas sets). Budgets are a small part of the papers', so the numbers themselves are not comparable;
the order of the methods may be. Intervals are of the test cases (bootstrap), not of training again.
"""


def main() -> None:
    packed: dict[str, Any] = {}
    for path in sys.argv[1:]:
        packed |= json.loads(Path(path).read_text(encoding="utf-8"))
    parts = [START, *(describe(name, facts) for name, facts in packed.items())]
    print("\n".join(parts).rstrip())


def describe(name: str, facts: dict[str, Any]) -> str:
    preset = load(name)
    lines = [f"## {name}", "", preset.about, "", f"    {shlex.join(facts['command'])}", ""]
    if facts.get("problem") or not facts.get("metrics"):
        return "\n".join([*lines, f"No result. {facts.get('problem', '')}".strip(), ""])
    numbers = next(iter(facts["metrics"].values()))
    lines += [*table(numbers), "", describe_budget(facts), ""]
    for entry in facts["metrics"].values():
        order = (entry["published"] or {}).get("order")
        if order:
            lines.append(f"- {describe_order(entry['label'], order)}")
    unfinished = [f"{cell}: {why}" for cell, why in facts["failures"].items()]
    lines += [f"- Failed: {sentence}" for sentence in unfinished]
    lines += ["", " ".join(facts["notes"]), ""]
    return "\n".join(lines)


def table(numbers: dict[str, Any]) -> list[str]:
    """One line a row: the printed number over all clients, ours with its interval, the difference."""
    printed = printed_means(numbers)
    intervals = {row["label"]: row for row in numbers["statistics"]["rows"]}
    label = numbers["label"]
    lines = [
        f"| row | printed {label} | measured | 95 % interval | difference |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for summary in numbers["summaries"]:
        own = intervals[summary["label"]]
        column, value = printed.get(summary["label"], ("mean", None))
        ours = summary["weighted" if column == "weighted mean" else "mean"]
        cells = [summary["label"], "" if value is None else f"{value:.3f}", show(ours)]
        cells.append(show_interval(own["interval"]) if column != "weighted mean" else "")
        difference = math.nan if value is None else number(ours["mean"]) - value
        cells.append("" if math.isnan(difference) else f"{difference:+.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def printed_means(numbers: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Row -> which mean is printed, and its value; the mean of clients where only those are printed."""
    rows: dict[str, dict[str, float]] = {}
    for entry in (numbers["published"] or {"rows": []})["rows"]:
        rows.setdefault(entry["label"], {})[entry["column"]] = entry["printed"]["mean"]
    found = {}
    for label, columns in rows.items():
        column = next((name for name in ("weighted mean", "mean") if name in columns), None)
        value = columns[column] if column else sum(columns.values()) / len(columns)
        found[label] = (column or "mean", value)
    return found


def describe_order(label: str, order: dict[str, Any]) -> str:
    low, high = map(number, order["interval"])
    verdict = "confirmed" if low > 0 else "reversed" if high < 0 else "not decided"
    share = f"{order['num_same']} of {order['num_pairs']} pairs as printed"
    tau = f"Kendall's tau {order['tau']:.2f}, 95 % interval {low:.2f} to {high:.2f}"
    place = f"{order['best']}, best in print, is number {order['place']} of {order['among']}"
    return f"Order by {label}, on the whole: {verdict} ({share}; {tau}); {place}."


def describe_budget(facts: dict[str, Any]) -> str:
    seeds = ", ".join(map(str, facts["seeds"]))
    return f"{facts['done']} of {facts['cells']} runs in {facts['seconds']:.0f} s; seeds and splits {seeds}."


def show(value: dict[str, Any]) -> str:
    mean, sd = number(value["mean"]), value["sd"]
    if math.isnan(mean):
        return "not run"
    return f"{mean:.3f}" if sd is None else f"{mean:.3f} ± {number(sd):.3f}"


def show_interval(interval: list[Any]) -> str:
    low, high = map(number, interval)
    return "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def number(value: Any) -> float:
    """JSON spells NaN and infinity as words, or null."""
    return math.nan if value is None else float(value)


if __name__ == "__main__":
    main()
