"""The README of this folder from the results file of run.py: printed, measured, and the order of methods.

    python benchmarks/papers/summarise.py papers.tar.gz > benchmarks/papers/README.md

Several files are laid over each other: runs of one that another lacks are added.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wardround.comparison import Comparison
from wardround.comparison.headline import is_reference
from wardround.comparison.published import OrderAgreement, compare_order, find_printed
from wardround.comparison.published import summarise_print as printed_value
from wardround.comparison.scores import RowScores
from wardround.comparison.tables import format_count
from wardround.metrics import METRICS
from wardround.papers.cards import TITLES
from wardround.papers.presets import load

START = """\
# Tables of the papers, measured

Written by `summarise.py` from `results.tar.gz`, which `run.py` brought back. To go on where it ended:

    python benchmarks/papers/run.py --data DATA --before benchmarks/papers/results.tar.gz --results new.tar.gz
    python benchmarks/papers/summarise.py new.tar.gz > benchmarks/papers/README.md

<!-- not run: needs the data sets and hours of a GPU -->

and new.tar.gz takes the place of `results.tar.gz`. A call ends after `--minutes` (9); called again, the first
goes on in its folder, `--work`. With `--list` it says which runs are left and how long they will take.

Real data: polyp4 (the four polyp sources of FedEvi, smaller images, fewer cases) and lgg3d (glioma of four
hospitals, few cases) in place of the brain and pancreas sets. Rounds, image sizes and networks are a small
part of the papers', as said under each table. So the numbers themselves are not comparable with the printed
ones; the order of the methods may be, but a difference that takes a long training to appear cannot appear
here. "Not decided" means that this budget does not tell, not that the paper is wrong.
"""
LEGEND = """\
How to read the tables:

- **Measured**: mean ± SD over the splits, each with a seed of its own; one split has no SD. How many splits
  stands beside a row that has fewer than others. It is the mean over clients, all alike, or over cases where
  the paper prints that, which the heading then says.
- **95 % interval**: of the mean over clients, seeds and test cases both random (Hillis 2007): wide, as two or
  three seeds say little of seeds. Of one split, test cases resampled within each client: that does not hold
  what training again would change. A client with one test case adds nothing to it. It is left out where
  clients have fewer than two test cases on average, and where the mean is over cases.
- **Difference**: measured minus printed.
- **Against** a row: paired difference on the same test cases of the splits that both have, mean over
  clients, its 95 % interval, and the p value of a signed-rank test, seeds and cases both random as well, with
  Holm's correction over the rows. The test ranks cases, so large clients count more than in the mean, and the
  two may disagree. Bold where p is below 0.05 and the interval is on one side of 0.
- **Order**: pairs of printed rows that come in the printed order, with Kendall's tau (1 the same order, 0 no
  relation, -1 the reverse), its 95 % interval over test cases, and tau in every split alone. *(Mostly) as
  printed*: all (most) pairs, interval and splits above 0. *(Mostly) reversed*: no pair (the fewer), interval
  and splits below 0. Everything else is *not decided*.
- Training again with another seed can change the order, and three seeds at most are too few to say how much.
  One split holds none of that.
- HD95 is in pixels of the files, the printed one of 384x384 images: only their order is compared.
- Computed in TF32.
- Learning rates and batch sizes of the 3D tables are ours and were not tuned for them. In the 120 to 320
  steps that a client of SAFCF Tables 1 to 4 takes here, Adam moves no weight by more than about 0.003 at the
  printed rate, 1e-5. All rows of a table have the same.
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
        parts = [START, describe_calls(calls, found), *summarise(tables), *overview(tables), LEGEND]
        parts += map(describe, tables)
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
    commits = Counter(json.loads((folder / "environment.json").read_text())["commit"] for folder in done)
    commit = ", ".join(f"{str(name)[:7]} ({count} runs)" for name, count in commits.most_common())
    spent = " + ".join(map(describe_call, calls))
    rows = {table.name: [cell.row for cell in table.cells] for table in found}
    begun = {table.name: {cell.row for cell in table.cells if cell.is_done} for table in found}
    missing = [
        f"{title(name)}: {', '.join(row for row in dict.fromkeys(own) if row not in begun[name])}"
        for name, own in rows.items()
        if set(own) - begun[name]
    ]
    lacking = f" No run yet of {'; '.join(missing)}." if missing else ""
    small = " A trial with `--small`: no result." if any(call["small"] for call in calls) else ""
    return (
        f"{len(done)} of {len(folders)} runs on {places}: {spent}; commits {commit}. Rows of several tables "
        f"with the same settings are one run. {count_splits(found)}{lacking}{small}\n"
    )


def describe_call(call: Mapping[str, Any]) -> str:
    spent = "ended from outside" if call["seconds"] is None else f"{call['seconds']} s"
    return f"{spent} ({call['jobs']} side by side)"


def count_splits(found: Sequence[Comparison]) -> str:
    planned = max(len(table.facts["seeds"]) for table in found)
    if all(cell.is_done for table in found for cell in table.cells):
        return f"All {planned} splits are done."
    counts = {len(find_common_seeds(table)) for table in found if table.results}
    done = " or ".join(map(str, sorted(counts)))
    return f"**{done} of {planned} splits, not every row: what follows is preliminary.**"


# All tables at a glance


def summarise(tables: Sequence[Comparison]) -> list[str]:
    """The result in a few sentences, by the first metric."""
    verdicts: dict[str, list[str]] = {}
    places: dict[str, list[str]] = {"also the best here": [], "not the best here": []}
    claims: dict[str, list[str]] = {"it is better": [], "it is worse": [], "no difference is shown": []}
    for table in tables:
        order = find_order(table, table.metrics[0])
        if order is not None:
            verdicts.setdefault(order.verdict, []).append(title(table.name))
        claim = find_claim(table)
        if claim is None:
            continue
        own = f"{title(table.name)} ({claim.label}"
        if claim.place == 1:
            places["also the best here"].append(f"{own})")
        else:
            places["not the best here"].append(f"{own}, number {claim.place} of {claim.among})")
        if claim.test is not None:
            sign = claim.test["difference"] if is_clear(claim.test) else 0
            kinds = "it is better", "it is worse", "no difference is shown"
            kind = kinds[0] if sign > 0 else kinds[1] if sign < 0 else kinds[2]
            claims[kind].append(f"{own} against {claim.reference})")
    order_parts = [f"{verdict} in {', '.join(names)}" for verdict, names in sorted(verdicts.items())]
    place_parts = [f"{kind} in {', '.join(names)}" for kind, names in places.items() if names]
    claim_parts = [f"{kind} in {', '.join(names)}" for kind, names in claims.items() if names]
    splits = min(len(find_common_seeds(table)) for table in tables)
    alone = " One split and one seed are no finding about a method." if splits < 2 else ""
    return [
        f"- The order of the rows by Dice is {'; '.join(order_parts)}.",
        f"- The federated row that is best in print is {'; '.join(place_parts)}.",
        f"- Against the row that its table compares with, {'; '.join(claim_parts)}.{alone}",
        "",
    ]


def overview(tables: Sequence[Comparison]) -> list[str]:
    lines = [
        "| table | runs | order by Dice | pairs as printed | tau (95 %) | by split | best in print | "
        "its place here | against | difference here |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- | ---: | --- | ---: |",
    ]
    for table in tables:
        order, claim = find_order(table, table.metrics[0]), find_claim(table)
        cells = [f"[{title(table.name)}](#{table.name})", f"{len(table.results)} of {len(table.cells)}"]
        if order is None or claim is None:
            cells += ["nothing to compare", *[""] * 7]
        else:
            cells += [order.verdict, f"{order.whole.num_same} of {order.whole.num_pairs}", order.tau]
            cells += [order.by_split, claim.label, f"{claim.place} of {claim.among}", claim.reference]
            cells.append(show_test(claim.test) or "other test cases")
        lines.append(f"| {' | '.join(cells)} |")
    notes = (
        "Best in print: of the federated rows, after most rounds. Difference: paired, see below. All of it "
        "over the splits that every row has."
    )
    return [*lines, "", notes, ""]


@dataclass(frozen=True)
class Claim:
    """The federated row that is best in print: its place among those here, and against the reference."""

    label: str
    place: int
    among: int
    reference: str
    test: Mapping[str, Any] | None


@cache
def find_claim(table: Comparison) -> Claim | None:
    """Of the rows after most rounds, over the splits that every row has."""
    part = split_by_rounds(restrict(table, list_common_seeds(table)))[-1]
    numbers = part.numbers(part.metrics[0])
    printed = {label: value for label, (_, value) in summarise_print(numbers).items()}
    federated = [
        row["label"]
        for row in part.facts["rows"]
        if row["label"] in printed and not is_reference(row["method"])
    ]
    if not federated:
        return None
    best = max(federated, key=lambda label: printed[label])
    columns = {label: column for label, (column, _) in summarise_print(numbers).items()}
    ours = {
        row["label"]: row[columns[row["label"]]]["mean"]
        for row in numbers["summaries"]
        if row["label"] in columns
    }
    place = 1 + sum(ours[label] > ours[best] for label in federated)
    tests = {row["label"]: row["test"] for row in numbers["statistics"]["rows"]}
    return Claim(best, place, len(federated), part.reference, tests[best])


def split_by_rounds(table: Comparison) -> list[Comparison]:
    """One part for every number of rounds that rows are read off after; mostly there is one."""
    parts: dict[Any, list[Any]] = {}
    for row in table.facts["rows"]:
        parts.setdefault(row["changes"].get("rounds"), []).append(row)
    if len(parts) == 1:
        return [table]
    first = [row["label"] for row in next(iter(parts.values()))].index(table.reference)
    return [
        Comparison(table.folder, {**table.facts, "rows": rows, "reference": rows[first]["label"]})
        for rows in parts.values()
    ]


def title(name: str) -> str:
    return f"{TITLES[name.partition('-')[0]]} {load(name).table}"


@dataclass(frozen=True)
class Order:
    """The order of rows over all splits that every row has, and in each of them."""

    whole: OrderAgreement
    splits: tuple[float, ...]
    has_interval: bool

    @property
    def verdict(self) -> str:
        if not self.has_interval:
            return "not decided"
        low = min(self.whole.interval.low, *self.splits)
        high = max(self.whole.interval.high, *self.splits)
        if low > 0:
            return "as printed" if self.whole.num_same == self.whole.num_pairs else "mostly as printed"
        return "not decided" if high >= 0 else "mostly reversed" if self.whole.num_same else "reversed"

    @property
    def tau(self) -> str:
        low, high = self.whole.interval.low, self.whole.interval.high
        return (
            f"{self.whole.tau:.2f} ({low:.2f} to {high:.2f})"
            if self.has_interval
            else f"{self.whole.tau:.2f}"
        )

    @property
    def by_split(self) -> str:
        return ", ".join(f"{tau:.2f}" for tau in self.splits) if len(self.splits) > 1 else "one split"


@cache
def find_order(table: Comparison, metric: str) -> Order | None:
    """Over the splits that are done in every row: others would compare different cases."""
    done = list_common_seeds(table)
    whole = compare_order(restrict(table, done).sheet, metric)
    if whole is None:
        return None
    each = [compare_order(restrict(table, [seed]).sheet, metric) for seed in done]
    has_interval = all(has_several_cases(row, metric) for row in table.sheet.rows)
    return Order(whole, tuple(order.tau for order in each if order is not None), has_interval)


def has_several_cases(row: RowScores, metric: str) -> bool:
    """Whether resampling cases within clients says something: two test cases a client or more, on average."""
    keys = {key for scores in row.scores(metric) for key in scores}
    cases = {(key.client, key.case) for key in keys}
    return len(cases) >= 2 * len({key.client for key in keys})


def list_common_seeds(table: Comparison) -> list[int]:
    """What rows are compared over: the seeds that they have in common, or all where there is none."""
    return find_common_seeds(table) or list(dict.fromkeys(cell.seed for cell in table.cells))


def find_common_seeds(table: Comparison) -> list[int]:
    """The seeds, and so splits, of which every row that has any is done."""
    done = {(cell.row, cell.seed) for cell in table.cells if cell.is_done}
    rows = {row for row, _ in done}
    seeds = list(dict.fromkeys(cell.seed for cell in table.cells))
    return [seed for seed in seeds if all((row, seed) in done for row in rows)]


def restrict(table: Comparison, seeds: Sequence[int]) -> Comparison:
    cells = [cell for cell in table.facts["cells"] if cell["seed"] in seeds]
    return Comparison(table.folder, {**table.facts, "cells": cells, "seeds": list(seeds)})


# One table


def describe(table: Comparison) -> str:
    preset, metric = load(table.name), table.metrics[0]
    lines = [f"## {table.name}", "", f"{title(table.name)}. {preset.about}", ""]
    for part in split_by_rounds(table):
        lines += [*score_lines(part, metric), *print_only_lines(part), ""]
    lines += [*client_lines(table.numbers(metric)), *order_lines(table)]
    lines += ["What was different from the paper:", ""]
    lines += [
        f"- {sentence}"
        for sentence in [*count_runs(table), *table.facts["notes"]]
        if "Scaled to" not in sentence
    ]
    lines += [f"- Failed: {cell}: {why}" for cell, why in table.failures.items()]
    if preset.published.cautions:
        lines += ["", "Cautions on the printed numbers:", ""]
        lines += [f"- {sentence}" for sentence in preset.published.cautions]
    return "\n".join([*lines, ""])


def count_runs(table: Comparison) -> list[str]:
    """How many runs and test cases there are, and whether training had come to its end."""
    done = [cell for cell in table.cells if cell.is_done]
    splits = format_count(len(find_common_seeds(table)), "split")
    sentences = [
        f"{len(done)} of {len(table.cells)} runs. Order: {splits}, where every row with a run is done."
    ]
    counts = set()
    for cell in done:
        with (cell.folder / "cases.csv").open(encoding="utf-8", newline="") as file:
            keys = {(line["client"], line["case"]) for line in csv.DictReader(file)}
        counts.add((len({client for client, _ in keys}), len(keys)))
    sizes = ", ".join(
        f"{format_count(cases, 'test case')} at {format_count(clients, 'client')}"
        for clients, cases in sorted(counts)
    )
    sentences.append(f"Tested in a split: {sizes}.")
    results = [cell.read_result() for cell in done]
    last = sum(result["best_round"] == result["rounds"] for result in results)
    sentences.append(
        f"In {last} of {len(results)} runs the last round was the best on validation cases: there, training "
        "was not at its end."
    )
    return sentences


def score_lines(table: Comparison, metric: str) -> list[str]:
    """One line a row: what is printed over all clients, ours, the difference, and against the reference."""
    numbers = table.numbers(metric)
    printed = summarise_print(numbers)
    unmeasured = {
        row.label: find_printed(table.sheet, row.label, metric)
        for row in table.sheet.rows
        if not row.replicates
    }
    several = {row.label for row in table.sheet.rows if has_several_cases(row, metric)}
    most = max(len(row.replicates) for row in table.sheet.rows)
    tested = {row["label"]: row for row in numbers["statistics"]["rows"]}
    label, weighted = numbers["label"], any(column == "weighted" for column, _ in printed.values())
    over = " (over cases)" if weighted else ""
    lines = [
        f"| row | printed {label}{over} | measured | 95 % interval | difference "
        f"| against {table.reference} |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for summary in numbers["summaries"]:
        own = tested[summary["label"]]
        column, value = printed.get(summary["label"], ("weighted" if weighted else "mean", None))
        ours = summary[column]
        difference = None if value is None else ours["mean"] - value
        if value is None and unmeasured.get(summary["label"]):
            value = printed_value(unmeasured[summary["label"]])
        fewer = f" ({format_count(summary['num_replicates'], 'split')})"
        cells = [
            summary["label"],
            show(value),
            "not run"
            if math.isnan(ours["mean"])
            else show(ours["mean"], ours["sd"]) + (fewer if summary["num_replicates"] < most else ""),
            show_interval(own["interval"]) if column == "mean" and summary["label"] in several else "",
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
            f"pairs as printed, tau {order.tau}{split_words(order)}. {whole.best}, the best in print, "
            f"is {place}."
        )
    return [*lines, ""] if lines else []


def split_words(order: Order) -> str:
    return f", by split {order.by_split}" if len(order.splits) > 1 else ""


# Numbers


def show(value: float | None, sd: float | None = None, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:{sign}.3f}" if sd is None or math.isnan(sd) else f"{value:{sign}.3f} ± {sd:.3f}"


def show_interval(interval: Any) -> str:
    low, high = read_interval(interval)
    return "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def show_test(test: Mapping[str, Any] | None) -> str:
    if test is None:
        return ""
    text = f"{test['difference']:+.3f} ({show_interval(test['interval'])}), p {test['p_holm']:.2g}"
    return f"**{text}**" if is_clear(test) else text


def is_clear(test: Mapping[str, Any]) -> bool:
    """Whether test and interval agree that there is a difference, and which."""
    low, high = read_interval(test["interval"])
    return bool(test["p_holm"] < 0.05 and low * high > 0 and low * test["difference"] > 0)


def read_interval(interval: Any) -> tuple[float, float]:
    return (interval["low"], interval["high"]) if isinstance(interval, Mapping) else interval


if __name__ == "__main__":
    main()
