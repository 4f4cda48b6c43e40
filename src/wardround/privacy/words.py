"""What epsilon covers, and what it does not, in words: for report, model card, plan and status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.privacy.settings import PrivacySettings

MEASURED = Path(__file__).with_name("measured.json")  # written by benchmarks/privacy/dice.py --write
COVERS = {
    "case": "whether any one training case took part",
    "client": "whatever a hospital trained on",
}
SHARED = (
    "Hospitals share the noise of a secure sum: epsilon holds for whoever sees sums alone, while all others "
    "in them add their share."
)


def describe_covered(level: str) -> str:
    """What answers of a level cover, or together of both, as `status` joins them."""
    return COVERS["case" if "case" in level else "client"]


def describe_privacy(records: Sequence[Mapping[str, Any]], clients: Mapping[str, str]) -> str | None:
    """What was done in a run so that updates give less away; None where nothing was.

    clients: everybody who took part, and what they are called here.
    """
    told = {clients.get(name, name): entry for name, entry in gather_told(records).items()}
    found = [describe_told(told, clients.values()), describe_sums(records)]
    return " ".join(text for text in found if text) or None


def describe_sums(records: Iterable[Mapping[str, Any]]) -> str | None:
    """What the server saw of updates under secure summation; None where there was none."""
    sums = [told for record in records for told in record.get("secure_sum") or ()]
    if not sums:
        return None
    counts = sorted({len(told["clients"]) for told in sums})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"Secure summation: the server saw weighted sums of the updates of {many} hospitals and no single "
        f"one; rounding changed numbers by at most {max(told['error'] for told in sums):.1g}. It could check "
        "shapes, counts and the size of sums, not single updates."
    )


def gather_told(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each client last said of its privacy, from the records of a run."""
    told: dict[str, dict[str, Any]] = {}
    for record in records:
        for client, entry in (record.get("privacy") or {}).items():
            if isinstance(entry, Mapping):
                told[client] = dict(entry)
    return told


def describe_told(told: Mapping[str, Mapping[str, Any]], clients: Iterable[str] = ()) -> str | None:
    """One paragraph about a run, None where nothing was private; clients: everybody who took part."""
    if not told:
        return None
    sentences = []
    for level, covered in COVERS.items():
        spent = [entry for entry in told.values() if entry.get("level") == level]
        if spent:
            most = max(spent, key=lambda entry: float(entry["epsilon"]))
            sentences.append(
                f"Differential privacy at {level} level: epsilon {float(most['epsilon']):.2f} at delta "
                f"{float(most['delta']):g} in this run, at the hospital that spent most. It covers {covered}."
            )
    if any(entry.get("shared") for entry in told.values()):
        sentences.append(SHARED)
    left = []
    if any(entry.get("counts") == "given" for entry in told.values()):
        left.append("numbers of training cases")
    if any(entry.get("scores") == "show" for entry in told.values()):
        left.append("scores and calibration, which are of validation and test cases")
    left.append("that a hospital took part, and when it answered")
    sentences.append(f"It does not cover {'; '.join(left)}.")
    without = sorted(set(clients) - set(told))
    if without:
        sentences.append(f"Without privacy: {', '.join(without)}.")
    return " ".join(sentences)


def describe_cost(settings: PrivacySettings) -> list[str]:
    """What such a setting cost where it was measured, for `wardround plan`."""
    if not settings.is_on:
        return []
    measured = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}
    parts = []
    level = "shared" if settings.secure_sum and settings.level == "client" else settings.level
    for title, table in measured.items():
        row = table.get(level, {})
        if row:
            nearest = min(row, key=lambda epsilon: abs(float(epsilon) - settings.epsilon))
            without, with_ = (
                f"{cell['dice']:.2f} (seeds: {cell['runs']})" for cell in (table["none"]["inf"], row[nearest])
            )
            parts.append(f"{title}: Dice {without} without, {with_} at epsilon {nearest}")
    cost = (
        f"Measured with small networks and four hospitals: {'; '.join(parts)}." if parts else "Not measured."
    )
    shared = ", its noise shared in a secure sum" if level == "shared" else ""
    return [
        f"privacy.level is {settings.level} with epsilon {settings.epsilon:g}{shared}. {cost} Yours "
        "will differ; more cases, fewer parameters and fewer rounds lose less."
    ]
