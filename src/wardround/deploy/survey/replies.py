"""Replies: what hospitals answered to a survey, checked and bounded before anything of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from wardround.data.fingerprint.measure import Fingerprint
from wardround.deploy import limits
from wardround.deploy.agreement import DataFacts

DECISIONS = ("accepted", "waiting", "declined")


class Surveyed(NamedTuple):
    """One hospital: its fingerprint, and what its federation.yaml says."""

    fingerprint: Fingerprint
    facts: DataFacts


def read_surveyed(client: str, scalars: Mapping[str, Any]) -> Surveyed:
    """The answer to "fingerprint", under the name of who sent it; an error says what is wrong."""
    found = Fingerprint.from_dict(scalars["fingerprint"])
    counts = [found.cases if isinstance(found.cases, int) else 0, *found.count_bins()]
    if max(counts) > limits.CASES:
        raise ValueError(f"more than {limits.CASES} cases")
    facts = DataFacts.model_validate({**scalars["facts"], "patch": None, "shape": None, "spacing": None})
    if found.is_open and (len(found.shape), len(found.intensity)) != (facts.dimensions, facts.in_channels):
        raise ValueError("the fingerprint has other dimensions or channels than its federation.yaml")
    return Surveyed(found.model_copy(update={"client": client}), facts)


def read_decision(scalars: Mapping[str, Any]) -> str:
    decision = scalars["decision"]
    if decision not in DECISIONS:
        raise ValueError("its decision is not one of accepted, waiting and declined")
    return str(decision)
