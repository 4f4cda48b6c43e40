"""The README's tables from the files that run.py leaves.

    python benchmarks/autopilot/summarise.py benchmarks/autopilot --write    # into README.md

Dice is the mean over test cases, of each the mean over classes. Seconds are those of seconds.json, which
seconds.py writes; beside other runs they mean nothing. What stands outside the markers of the README is left
alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

README = Path(__file__).parent / "README.md"
MARKS = "<!-- runs: begin -->", "<!-- runs: end -->"
SETS = ("hippocampus", "lgg3d", "fundus_odoc", "polyp4")
PARTS = {
    "federated": "federated",
    "pooled": "pooled",
    "local": "local",
    "nnunet": "nnU-Net 2.8.1, pooled",
}
Results = dict[tuple[str, str], list[dict[str, Any]]]  # set and part -> a result for each seed


def read_results(folder: Path) -> Results:
    found: Results = defaultdict(list)
    for path in sorted((folder / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found[result["set"], result["part"]].append(result)
    return dict(found)


def mean_dice(result: dict[str, Any]) -> float:
    return statistics.fmean(case["dice"] for case in result["cases"])


def mean_of_clients(result: dict[str, Any]) -> float:
    """Every client counts the same, however many test cases it has."""
    clients: dict[str, list[float]] = defaultdict(list)
    for case in result["cases"]:
        clients[case["client"]].append(case["dice"])
    return statistics.fmean(statistics.fmean(own) for own in clients.values())


def describe_values(values: list[float]) -> str:
    """Mean and standard deviation of the seeds."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def tabulate(results: Results) -> list[str]:
    lines = [
        "| set | part | seeds | steps | batch | test cases | Dice | Dice, mean of clients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SETS:
        for part, title in PARTS.items():
            runs = results.get((name, part), [])
            if runs:
                steps = join({run["steps"] for run in runs})
                batch, cases = (
                    join({run["batch_size"] for run in runs}),
                    join({len(run["cases"]) for run in runs}),
                )
                dice = describe_values([mean_dice(run) for run in runs])
                clients = describe_values([mean_of_clients(run) for run in runs])
                row = [name, title, len(runs), steps, batch, cases, dice, clients]
                lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines


def join(numbers: set[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def compare(results: Results) -> list[str]:
    """Federated against nnU-Net, and the share of the gap between local and pooled that it closes."""
    lines = [
        "| set | federated - nnU-Net | within 0.01 | pooled - local | share of the gap closed |",
        "|---|---|---|---|---|",
    ]
    for name in SETS:
        means = {
            part: statistics.fmean(mean_dice(run) for run in results[name, part])
            for part in PARTS
            if (name, part) in results
        }
        if "federated" not in means:
            continue
        row = [name, "", "", "", ""]
        if "nnunet" in means:
            apart = means["federated"] - means["nnunet"]
            row[1:3] = [f"{apart:+.4f}", "yes" if apart >= -0.01 else "no"]
        if "local" in means and "pooled" in means:
            gap = means["pooled"] - means["local"]
            share = (means["federated"] - means["local"]) / gap if gap > 0 else float("nan")
            row[3:5] = [f"{gap:+.4f}", f"{share:.2f}" if gap > 0.005 else "no gap to close"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def list_seconds(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| set | steps | federated: seconds a step | nnU-Net | federated: whole run | nnU-Net | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SETS:
        own = {entry["part"]: entry for entry in found if entry["set"] == name}
        if len(own) == 2:
            pair = own["federated"], own["nnunet"]
            steps = [f"{entry['step_seconds']:.4f}" for entry in pair]
            whole = [f"{entry['seconds']:.0f} s" for entry in pair]
            ratio = f"{pair[0]['seconds'] / pair[1]['seconds']:.2f}"
            row = [name, f"{pair[0]['steps']:,}", *steps, *whole, ratio]
            lines.append("| " + " | ".join(row) + " |")
    places = sorted({f"{entry['device']}, commit {entry['commit']}" for entry in found})
    return [*lines, "", f"Alone on {'; '.join(places)}."]


def describe(results: Results, seconds: Sequence[Mapping[str, Any]]) -> str:
    runs = [run for own in results.values() for run in own]
    if not runs:
        return "No runs yet."
    places = sorted({f"{run['device']}, commit {run['commit']}" for run in runs})
    parts = [f"Measured on {'; '.join(places)}.", "", *tabulate(results), "", *compare(results)]
    return "\n".join([*parts, *(["", *list_seconds(seconds)] if seconds else [])])


def put(text: str, readme: str) -> str:
    """The README with the text between the marks."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="holds results/: benchmarks/autopilot, or OUT of run.py")
    parser.add_argument("--write", action="store_true", help="into README.md, in place of what was there")
    options = parser.parse_args()
    seconds = options.folder / "seconds.json"
    found = json.loads(seconds.read_text(encoding="utf-8")) if seconds.exists() else []
    text = describe(read_results(options.folder), found)
    if options.write:
        README.write_text(put(text, README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
