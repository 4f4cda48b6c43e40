"""The demo: three made-up hospitals, trained alone, together, and with all data in one place."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.api import Result, run
from wardround.engine.experiment import Listener
from wardround.reporting.tables import Table, method_table

SETTINGS: dict[str, Any] = {
    "rounds": 12,
    "local_epochs": 1,
    "batch_size": 8,
    "data": {"phantom": {"hospitals": 3}},
    "model": {"name": "unet2d", "base_filters": 8, "levels": 4},
    "objective": {"name": "dice_bce"},
    "optimizer": {"name": "adam", "learning_rate": 3e-3},
    "evaluate": {"metrics": ["dice", "hd95"], "every": 2},
}

REFERENCES = {"local": "each alone", "fedavg": "together (FedAvg)", "centralised": "all data pooled"}


@dataclass(frozen=True)
class Demo:
    """What the demo shows: a table, a sentence, a picture, and the same as plain facts."""

    table: Table
    sentence: str
    picture: Path
    facts: dict[str, Any]


def run_demo(folder: Path, *, seed: int = 42, listener: Listener | None = None) -> Demo:
    """Train the three references with one budget and compare them."""
    results = {name: one_run(folder, name, seed, listener) for name in REFERENCES}
    elsewhere = mean_elsewhere(results["local"])
    evaluations = {
        REFERENCES[name]: result.test for name, result in results.items() if result.test is not None
    }
    table = method_table(
        evaluations,
        "dice",
        "Test Dice at each hospital",
        {"at other hospitals": [elsewhere, math.nan, math.nan]},
    )
    fedavg = evaluations[REFERENCES["fedavg"]].value("dice")
    sentence = (
        f"A hospital's own model scores {elsewhere:.2f} at the other hospitals; "
        f"the model they trained together, without a scan leaving, scores {fedavg:.2f}."
    )
    facts = {
        "dice": {name: results[name].summary["test"]["dice"] for name in REFERENCES},
        "local_elsewhere": elsewhere,
        "fedavg_mean": fedavg,
        "seconds": sum(result.summary["seconds"] for result in results.values()),
    }
    return Demo(table, sentence, results["fedavg"].folder / "overlays.png", facts)


def one_run(folder: Path, method: str, seed: int, listener: Listener | None) -> Result:
    settings = {
        **SETTINGS,
        "name": method,
        "output": str(folder / method),
        "seed": seed,
        "method": {"name": method},
        "evaluate": {**SETTINGS["evaluate"], "cross_site": method == "local"},
    }
    return run(settings, overwrite=True, listener=listener)


def mean_elsewhere(local: Result) -> float:
    """Mean Dice of each hospital's own model over the other hospitals' test cases."""
    values = [
        summary.mean
        for owner, evaluation in local.outcome.cross_site.items()
        for client, summary in evaluation.clients["dice"].items()
        if client != owner
    ]
    return statistics.fmean(values)
