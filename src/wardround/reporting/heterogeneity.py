"""How far the clients' data differ: numbers of cases, foreground, and fingerprint.json where there is one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from wardround.comparison.runs import Run, mapping, number, validation_of
from wardround.reporting.html import Html, details, section, tag
from wardround.reporting.strips import Spot, strip_chart
from wardround.reporting.tabular import NumberCell, plain_table


def heterogeneity(run: Run, prefix: str, places: Mapping[str, int]) -> Html:
    """How far the clients' data differ, as far as the run knows."""
    if run.is_evaluation:  # nothing was trained here, so the rest is unknown
        counts = [[client, num_tested(run, client)] for client in run.clients]
        table = plain_table("Cases of each client", ["client", "cases"], counts)
        return section(f"{prefix}-data", "How the clients differ", table, level=3)
    columns = ["client", "training cases", "validation", "test", "foreground", "last weight"]
    rows = [client_row(run, client) for client in run.clients]
    note = "Foreground: mean share of a test case."
    parts = [plain_table("Cases of each client", columns, rows, note), *foreground_chart(run, places)]
    if run.fingerprint:
        parts.append(fingerprint(run))
    return section(f"{prefix}-data", "How the clients differ", *parts, level=3)


def client_row(run: Run, client: str) -> list[Any]:
    shares = run.files[client].foreground
    mean = sum(shares) / len(shares) if shares else math.nan
    weights = run.records.series("weights").get(client, [])
    return [
        client,
        run.num_trained.get(client, "n/a"),
        num_validation(run, client),
        num_tested(run, client),
        NumberCell(percent_of(mean), mean),
        weights[-1][1] if weights else math.nan,
    ]


def num_tested(run: Run, client: str) -> int:
    return len({key.case for values in run.cases.values() for key in values if key.client == client})


def foreground_chart(run: Run, places: Mapping[str, int]) -> list[Html]:
    """One dot a test case: how much of it is what we look for."""
    rows = {
        client: [
            Spot(100 * value, f"{client}, case {place}", places.get(client, 0))
            for place, value in enumerate(files.foreground, start=1)
        ]
        for client, files in run.files.items()
        if files.foreground
    }
    title = "Foreground of every test case (%)"
    return [strip_chart(title, rows, within=(0.0, 100.0), class_="wide unnamed")] if rows else []


def percent_of(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{100 * share:.1f} %"


def num_validation(run: Run, client: str) -> int:
    for record in reversed(run.records):
        entry = mapping(mapping(validation_of(record, "loss").get("clients")).get(client))
        if entry:
            return int(number(entry.get("num")) or 0)
    return 0


def fingerprint(run: Run) -> Html:
    """fingerprint.json, if the run has one: client -> fact -> value, or anything else as it is."""
    clients = mapping(run.fingerprint.get("clients"))
    if not clients or not all(isinstance(entry, Mapping) for entry in clients.values()):
        text = json.dumps(run.fingerprint, indent=2, ensure_ascii=False)
        return details("Data fingerprint", tag("pre", text, tabindex="0"))
    facts = list(dict.fromkeys(key for entry in clients.values() for key in entry))
    rows = [[client, *(plain_fact(entry.get(key, "")) for key in facts)] for client, entry in clients.items()]
    return plain_table("Data fingerprint", ["client", *facts], rows)


def plain_fact(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return value
