"""The demo: three synthetic hospitals, trained alone, together, and with all data in one place.

A second part puts the four papers' methods beside FedAvg on the same hospitals, with the same budget.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.api import Result
from wardround.batch import BatchListener, run_all
from wardround.config_file import resolve
from wardround.engine.judging.result_tables import method_table
from wardround.machine import cores
from wardround.reporting import write_report
from wardround.tables import Table

TITLE = "Three synthetic hospitals"
SETTINGS: dict[str, Any] = {
    "rounds": 32,
    "local_epochs": 1,
    "batch_size": 4,
    "data": {"phantom": {"hospitals": 3}},
    "model": {"name": "unet2d", "base_filters": 8, "levels": 4},
    "optimizer": {"name": "adam", "learning_rate": 8e-3, "schedule": {"name": "polynomial"}, "state": "keep"},
    "evaluate": {"metrics": ["dice", "hd95"], "every": 4},
    "compute": {"threads": 1, "device": "cpu"},  # runs in parallel, one core each
}

REFERENCES = {"local": "each alone", "fedavg": "together (FedAvg)", "centralised": "all data pooled"}
PAPERS = {"safcf": "SAFCF", "fsf3a": "FSF3A", "fedevi": "FedEvi", "aaw": "FedAvg + AAW"}


@dataclass(frozen=True)
class Demo:
    """What the demo shows: two tables, a sentence, a picture, a page, and the numbers as plain values."""

    references: Table
    papers: Table
    sentence: str
    picture: Path
    report: Path
    facts: dict[str, Any]


def run_demo(folder: Path, *, seed: int = 42, watch: BatchListener | None = None) -> Demo:
    """Train all methods with one budget, two at a time, and compare them."""
    runs = {name: one_run(name, seed) for name in {**REFERENCES, **PAPERS}}
    results = run_all(runs, folder, jobs=min(2, cores()), watch=watch)
    tests = {name: result.test for name, result in results.items() if result.test is not None}
    elsewhere = mean_elsewhere(results["local"])
    shown = {label: tests[name] for name, label in REFERENCES.items()}
    away = {"at other hospitals": [elsewhere, math.nan, math.nan]}
    references = method_table(shown, "dice", "Test Dice at each hospital", away)
    shown = {"FedAvg": tests["fedavg"]} | {label: tests[name] for name, label in PAPERS.items()}
    title = "The four papers' methods, same hospitals, same budget (one seed)"
    own = [resolve(results[name].config)["objective"]["name"] for name in ("fedavg", *PAPERS)]
    papers = method_table(shown, "dice", title, objectives=own)
    fedavg = tests["fedavg"].value("dice")
    sentence = (
        f"A hospital's own model scores {elsewhere:.2f} at the other hospitals; "
        f"the model they trained together, without a scan leaving, scores {fedavg:.2f}."
    )
    facts = {
        "dice": {name: results[name].summary["test"]["dice"] for name in results},
        "local_elsewhere": elsewhere,
        "fedavg_mean": fedavg,
    }
    picture = results["fedavg"].folder / "overlays.png"
    folders = [result.folder for result in results.values()]
    page = write_report(folders, folder / "report.html", title=TITLE)
    return Demo(references, papers, sentence, picture, page, facts)


def one_run(method: str, seed: int) -> dict[str, Any]:
    evaluate = {**SETTINGS["evaluate"], "cross_site": method == "local"}
    return {**SETTINGS, "name": method, "seed": seed, "method": {"name": method}, "evaluate": evaluate}


def mean_elsewhere(local: Result) -> float:
    """Mean Dice of each hospital's own model over the other hospitals' test cases."""
    values = [
        summary.mean
        for owner, evaluation in local.outcome.cross_site.items()
        for client, summary in evaluation.clients["dice"].items()
        if client != owner
    ]
    return statistics.fmean(values)
