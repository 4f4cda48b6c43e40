"""Measuring: the fingerprints of all clients of a federation.yaml, and the facts they give together.

Only training cases are measured, by the splits that the run will use, and only those that the check allows.
Every file is read once; the check of the run that follows finds what it needs in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from wardround.configuring.facts import Facts
from wardround.configuring.joining import join_fingerprints
from wardround.configuring.preparation_rules import ORIENTATION
from wardround.data.checking.check import check
from wardround.data.checking.cross_case import refuse_absent_classes
from wardround.data.checking.facts import describe_error, read_and_remember
from wardround.data.checking.findings import CheckReport
from wardround.data.fingerprint.case import CaseStatistics, measure_case
from wardround.data.fingerprint.hardware import describe_hardware
from wardround.data.fingerprint.measure import Fingerprint, summarise
from wardround.data.listing import Entry, Watch, map_cases
from wardround.data.readers.common import join_names
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.errors import DataError
from wardround.machine import cores


def measure_federation(
    path: Path,
    settings: DataSettings | None = None,
    *,
    minimum: int = 1,
    device: str = "auto",
    jobs: int | None = None,
    on_progress: Watch | None = None,
) -> tuple[list[Fingerprint], Facts]:
    """Measure every client that trains, on this machine; `jobs` threads (default: one a core).

    settings: of the run, which may change the splits; minimum: fewest patients to tell more of a client than
    that it has fewer; 1 where all cases are the user's own, 5 as hospitals do; device: that trains.
    """
    data = RealData(Path(path), settings or DataSettings())
    cases, report = measure_training_cases(data, jobs=jobs, on_progress=on_progress)
    bare = {name: sum(case.voxels is None for case in own) for name, own in cases.items()}
    hardware = {"hardware": describe_hardware(device)}
    told = [summarise(own, minimum).model_copy(update=hardware) for own in cases.values()]
    fingerprints = [Fingerprint.from_bytes(one.as_bytes()) for one in told]  # as at hospitals: bytes alone
    facts = join_fingerprints(
        fingerprints, channels=data.file.channels, labels=data.file.labels, regions=data.regions
    )
    clients = tuple(
        replace(client, num_unlabelled=bare[client.name], annotates=list_annotated(data, client.name))
        for client in facts.clients
    )
    notes = (*describe_idle(data, report, cases), *facts.notes)
    return fingerprints, replace(facts, clients=clients, notes=notes)


def describe_idle(data: RealData, report: CheckReport, trains: Collection[str]) -> list[str]:
    """A sentence for each client with cases that are left out, and for those that do not train."""
    held_out = [name for name in data.file.held_out if name in data.listing.clients]
    notes = [f"Held out for testing, so they do not train: {join_names(held_out)}."] if held_out else []
    for name in data.listing.clients:
        lost = [entry for entry in report.left_out if entry.client == name]
        count = len(data.listing.of(name))
        if lost:
            which = "none" if len(lost) == count else f"{count - len(lost)}"
            first = report.reasons(lost[0])[0].sentence
            notes.append(f"Of the {count} cases of client '{name}', {which} can be used. The first: {first}")
        elif name not in trains and name not in held_out:
            notes.append(f"Client '{name}' has no training case, so it does not train.")
    return notes


def list_annotated(data: RealData, client: str) -> tuple[str, ...]:
    """What a client annotates, where that is not everything."""
    annotation = data.annotations.get(client)
    is_partial = annotation is not None and annotation.num_groups < len(annotation.groups)
    return tuple(data.file.annotates.get(client, ())) if is_partial else ()


def measure_training_cases(
    data: RealData, *, jobs: int | None = None, on_progress: Watch | None = None, strict: bool = True
) -> tuple[dict[str, list[CaseStatistics]], CheckReport]:
    """The usable training cases of every client, measured, and what the check found in all cases.

    Along the axes that a plan gives scans, or that the settings of the run do, whatever federation.yaml says.
    strict: a class that nobody has is an error.
    """
    jobs = jobs or cores()
    orientation = (data.settings.prepare or {}).get("orientation", ORIENTATION)

    def measure(entry: Entry) -> CaseStatistics | Exception:
        try:
            image, label = read_and_remember(entry)
            return measure_case(entry, image, label, data.file.labels, orientation)
        except Exception as error:  # a file can be broken in ways no reader foresaw; the check judges it
            return error

    trained = [entry for entry in data.listing.entries if entry.split in (None, "train")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once for all threads, as `checking.facts` does
        found = list(map_cases(measure, trained, jobs, on_progress))
    report = check(data.listing, data.file, jobs=jobs)
    if strict and data.settings.test:
        refuse_absent_classes(report.findings, data.file)
    usable = {(entry.client, entry.name) for entry in report.usable}
    cases: dict[str, list[CaseStatistics]] = {}
    for entry, case in zip(trained, found, strict=True):
        if (entry.client, entry.name) not in usable:
            continue
        if isinstance(case, Exception):
            said = describe_error(case, entry.images[:1])
            raise DataError(f"{entry.where} could not be measured: {said}") from case
        cases.setdefault(entry.client, []).append(case)
    if not cases:
        first = f" The first: {report.reasons(report.left_out[0])[0].sentence}" if report.left_out else ""
        raise DataError(f"{data.path}: no training case is usable.{first}")
    return cases, report
