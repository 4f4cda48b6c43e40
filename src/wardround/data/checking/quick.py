"""The part of a check that opens no image: files are there, labels, patients in two splits."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from wardround.data import splits
from wardround.data.checking import cross_case as across
from wardround.data.checking.facts import Facts, files_of
from wardround.data.checking.findings import CheckReport, Finding, Severity
from wardround.data.federation_file import FederationFile
from wardround.data.listing import Entry, Listing

Cases = list[tuple[Entry, Facts]]
Verdict = tuple[str, Severity, str]  # code, severity, what is wrong


def quick(listing: Listing, file: FederationFile, *, base: Path | None = None) -> CheckReport:
    """What needs no decoding, microseconds a case: files are there and not empty, labels, leaks, patients."""
    entries, findings = with_splits(listing, file, base)
    cases = [(entry, Facts()) for entry in entries]
    findings += [Finding.at(entry, *verdict) for entry in entries for verdict in file_verdicts(entry)]
    good = without_errors(cases, findings)
    findings += across.leaks(good)
    findings += across.groups(cases, without_errors(good, findings), file)
    return CheckReport.of(entries, findings, {}, listing.notes)


def with_splits(
    listing: Listing, file: FederationFile, base: Path | None
) -> tuple[list[Entry], list[Finding]]:
    """Every case with its split. A patient whom the list itself puts in two splits is a finding, no end."""
    entries = list(listing.entries)
    if base is None:
        return entries, []
    findings = across.leaks([(entry, Facts()) for entry in entries]) if file.splits.by == "column" else []
    leaking = {(found.client, found.case) for found in findings}
    sound = [entry for entry in entries if (entry.client, entry.name) not in leaking]
    assigned = splits.assign(sound, file.splits, base, held_out=file.held_out)
    split = {(entry.client, entry.name): entry.split for entry in assigned}
    return [replace(e, split=split.get((e.client, e.name), e.split)) for e in entries], findings


def without_errors(cases: Cases, findings: Sequence[Finding]) -> Cases:
    wrong = {(found.client, found.case) for found in findings if found.severity == "error"}
    return [(entry, facts) for entry, facts in cases if (entry.client, entry.name) not in wrong]


# One case


def file_verdicts(entry: Entry) -> Iterator[Verdict]:
    """What the file system says of a case, without opening anything."""
    if entry.label is None:
        yield unlabelled()
    for path in files_of(entry):
        trouble = file_trouble(path)
        if trouble is not None:
            yield trouble[0], "error", f"{path} {trouble[1]}."


def file_trouble(path: Path) -> tuple[str, str] | None:
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


def unlabelled() -> Verdict:
    return "no_label", "error", "it has no label; draw one, or take it off the list."
