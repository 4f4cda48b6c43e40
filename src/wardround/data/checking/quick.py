"""The part of a check that opens no image: files are there, labels, patients in two splits."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from wardround.data import splits
from wardround.data.checking import cross_case as across
from wardround.data.checking.facts import CaseFacts, list_files
from wardround.data.checking.findings import CheckReport, Finding, Severity
from wardround.data.federation_file import FederationFile
from wardround.data.listing import Entry, Listing

Cases = list[tuple[Entry, CaseFacts]]
Verdict = tuple[str, Severity, str]  # code, severity, what is wrong
NO_LABEL: Verdict = ("no_label", "error", "it has no label; add one, or take it off the list.")


def check_quickly(listing: Listing, file: FederationFile, *, base: Path | None = None) -> CheckReport:
    """What needs no decoding, microseconds a case: files are there and not empty, labels, leaks, patients."""
    entries, findings = assign_splits(listing, file, base)
    cases = [(entry, CaseFacts()) for entry in entries]
    findings += [Finding.at(entry, *verdict) for entry in entries for verdict in judge_files(entry)]
    good = drop_errors(cases, findings)
    findings += across.find_leaks(good)
    findings += across.check_groups(cases, drop_errors(good, findings), file)
    return CheckReport.of(entries, findings, {}, listing.notes)


def assign_splits(
    listing: Listing, file: FederationFile, base: Path | None
) -> tuple[list[Entry], list[Finding]]:
    """Every case with its split. A patient whom the list itself puts in two splits is a finding, no end."""
    entries = list(listing.entries)
    if base is None:
        return entries, []
    fixed = file.splits.by == "column"
    findings = across.find_leaks([(entry, CaseFacts()) for entry in entries]) if fixed else []
    leaking = {(found.client, found.case) for found in findings}
    sound = [entry for entry in entries if (entry.client, entry.name) not in leaking]
    assigned = splits.assign(sound, file.splits, base, held_out=file.held_out)
    split = {(entry.client, entry.name): entry.split for entry in assigned}
    return [replace(e, split=split.get((e.client, e.name), e.split)) for e in entries], findings


def drop_errors(cases: Cases, findings: Sequence[Finding]) -> Cases:
    wrong = {(found.client, found.case) for found in findings if found.severity == "error"}
    return [(entry, facts) for entry, facts in cases if (entry.client, entry.name) not in wrong]


# One case


def judge_files(entry: Entry) -> Iterator[Verdict]:
    """What the file system says of a case, without opening anything."""
    if entry.label is None:
        yield NO_LABEL
    for path in list_files(entry):
        trouble = inspect_file(path)
        if trouble is not None:
            yield trouble[0], "error", f"{path} {trouble[1]}."


def inspect_file(path: Path) -> tuple[str, str] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return "missing", "does not exist"
    except (OSError, ValueError) as error:
        return "unreadable", f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not stat.S_ISREG(found.st_mode):
        return "unreadable", "is not a file"
    if found.st_size == 0:
        return "empty", "is empty (0 bytes)"
    return None if os.access(path, os.R_OK) else ("unreadable", "cannot be read: Permission denied")
