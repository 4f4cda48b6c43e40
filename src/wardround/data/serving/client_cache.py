"""Client cache: which cases of a client are usable, remembered beside the prepared cases.

    <cache>/clients/<client>-<key>.json     usable cases and their files, the others with their reasons
    <cache>/labels.json                     how many voxels of each value a label has, for partitions

Checking opens every file; it runs once, as long as files and settings stay the same. All clients of a
process are checked together, because a copy of one client's test case may be among another's training
cases. Both files may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.data.checking.check import check
from wardround.data.checking.cross_case import refuse_absent_classes
from wardround.data.checking.facts import measure_label
from wardround.data.checking.findings import ANNOUNCED
from wardround.data.federation_file import FederationFile
from wardround.data.listing import Entry, Labels, Listing, Watch
from wardround.data.partitions import Description
from wardround.data.preparing.cache import FORMAT, Cache, describe, explain_write_errors, stat_signature
from wardround.data.preparing.pool import prepare_cases
from wardround.data.readers.label_files import read_case_label
from wardround.errors import DataError
from wardround.files import file_name, try_lock, wait_for_lock, write_json
from wardround.machine import cores

log = logging.getLogger(__name__)

WAIT_SECONDS = 3600.0
RULES = 4  # raised when the rules of checking change
LeftOut = tuple[tuple[str, str], ...]  # case and reason


@dataclass(frozen=True)
class PreparedClient:
    """A client's cases: prepared files of the usable ones, reasons why the others are left out; warnings:
    what was found about its labels."""

    paths: Mapping[str, Path]
    left_out: LeftOut
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preparer:
    """Checks and prepares the cases of clients; channels, dimensions: what every image must have; strict: a
    class that some clients do not have is refused."""

    cache: Cache
    file: FederationFile
    channels: int
    dimensions: int
    strict: bool = True

    def prepare_client(self, listing: Listing, client: str, *, refresh: bool = False) -> PreparedClient:
        """A client's cases, looked up if nothing changed; refresh: check every file again."""
        known = None if refresh else self.read(self.locate(client, self.compute_key(listing.entries)))
        return known if known is not None else self.prepare_clients(listing, refresh=refresh)[client]

    def prepare_clients(
        self, listing: Listing, *, refresh: bool = False, watch: Watch | None = None
    ) -> dict[str, PreparedClient]:
        """The cases of every client, looked up or checked and prepared; other processes wait meanwhile."""
        key = self.compute_key(listing.entries)
        with explain_write_errors(self.cache.folder), self.lock():
            known = {} if refresh else {name: self.read(self.locate(name, key)) for name in listing.clients}
            found = {name: client for name, client in known.items() if client is not None}
            if len(found) == len(listing.clients):
                return found
            found = self.check_and_prepare(listing, watch)
            for name, client in found.items():
                paths = {n: str(path.relative_to(self.cache.folder)) for n, path in client.paths.items()}
                plain = {"paths": paths, "left_out": client.left_out, "warnings": client.warnings}
                write_json(self.locate(name, key), plain)
        return found

    def locate(self, client: str, key: str) -> Path:
        return self.cache.folder / "clients" / f"{file_name(client)}-{key}.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time checks and prepares; the lock ends with the process."""
        folder = self.cache.folder / "clients"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            if not try_lock(lock):
                log.warning("waiting for another process that prepares cases in %s", self.cache.folder)
                if not wait_for_lock(lock, WAIT_SECONDS):
                    raise DataError(
                        f"{self.cache.folder}: another process has been preparing these cases for an hour. "
                        "End it, or choose another cache folder in federation.yaml."
                    )
            yield

    def compute_key(self, entries: Sequence[Entry]) -> str:
        """Changes with the files (size, times), the splits and the settings."""
        files = [[[ascii(str(path)), *stat_signature(path)] for path in e.files] for e in entries]
        names = [(ascii(e.client), ascii(e.name), ascii(e.group), e.split) for e in entries]
        codings = [e.coding_text for e in entries]
        cases = [[*name, own, *coding] for name, own, coding in zip(names, files, codings, strict=True)]
        maps = {ascii(e.client): list(e.labels.items()) for e in entries if e.labels is not None}
        rules = [maps, RULES, FORMAT, self.channels, self.dimensions, list(self.file.labels.items())]
        rules += [list(self.file.background)] if self.file.background else []
        if self.file.ignore:
            rules.append(list(self.file.ignore))
        if self.file.annotates:
            rules.append({client: list(names) for client, names in self.file.annotates.items()})
        if self.file.unlabelled:
            rules.append(["unlabelled", *self.file.unlabelled])
        text = json.dumps([rules, self.file.prepare.model_dump(mode="json", exclude={"slices"}), cases])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, path: Path) -> PreparedClient | None:
        """What an earlier process found, if every file it names still exists."""
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            paths = {str(name): self.cache.folder / place for name, place in plain["paths"].items()}
            left_out = tuple((str(case), str(reason)) for case, reason in plain["left_out"])
            warnings = tuple(str(warning) for warning in plain["warnings"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return (
            PreparedClient(paths, left_out, warnings)
            if all(path.exists() for path in paths.values())
            else None
        )

    def check_and_prepare(self, listing: Listing, watch: Watch | None = None) -> dict[str, PreparedClient]:
        """Check the cases, prepare the usable ones, and leave out those unlike the federation's."""
        jobs = cores()  # one process does this at a time, so all cores are its own
        report = check(listing, self.file, jobs=jobs)
        if self.strict:
            refuse_absent_classes(report.findings, self.file)
        reasons = {(e.client, e.name): report.reasons(e)[0].sentence for e in report.left_out}
        outcome = prepare_cases(
            self.cache, report.usable, self.file, jobs=jobs, watch=watch, background=report.background
        )
        reasons |= {(client, case): reason for client, case, reason in outcome.failures}
        paths: dict[str, dict[str, Path]] = {name: {} for name in listing.clients}
        for (client, case), path in outcome.paths.items():
            mismatch = self.find_mismatch(describe(path)["shape"])
            if mismatch:
                reasons[client, case] = f"client '{client}', case '{case}': {mismatch}"
            else:
                paths[client][case] = path
        left_out = {n: sorted((case, why) for (c, case), why in reasons.items() if c == n) for n in paths}
        warnings: dict[str, list[str]] = {name: [] for name in paths}
        for found in report.findings:
            if found.code in ANNOUNCED:
                warnings[found.client or listing.clients[0]].append(found.sentence)
        return {n: PreparedClient(paths[n], tuple(left_out[n]), tuple(warnings[n])) for n in paths}

    def find_mismatch(self, shape: Sequence[int]) -> str | None:
        """Why a prepared image cannot be trained on with the others."""
        if len(shape) - 1 != self.dimensions:
            return f"the image is {len(shape) - 1}D, but the first of the federation is {self.dimensions}D."
        if shape[0] != self.channels:
            return f"the image has {shape[0]} channels, but the federation's images have {self.channels}."
        return None


class LabelDescriptions:
    """Describes labels for partitions, each opened once; `save` keeps the counts for the next process."""

    def __init__(self, path: Path, labels: Labels) -> None:
        self._path = path
        self._labels = labels
        self._known: dict[str, Any] | None = None
        self._changed = False

    def __call__(self, entry: Entry) -> Description:
        """Foreground as a share of the image, and the classes present; none if the label cannot be read."""
        counts = self._counts(entry) if entry.label is not None else {}
        own = entry.label_map(self._labels).values()
        number = {value: n for n, values in enumerate(own, start=1) for value in values}
        inside = {int(value): count for value, count in counts.items() if int(value) in number}
        share = sum(inside.values()) / max(1, sum(counts.values()))
        return Description(share, tuple(sorted({number[value] for value in inside})))

    def _counts(self, entry: Entry) -> Mapping[str, int]:
        if self._known is None:
            self._known = self._read()
        place = ascii(str(entry.label_files[0].absolute()))
        now = [*(part for path in entry.label_files for part in stat_signature(path)), *entry.coding_text]
        known = self._known.get(place)
        if not isinstance(known, dict) or known.get("signature") != now:
            try:
                label = read_case_label(entry)
            except DataError:
                return {}
            values = {} if label is None else measure_label(label).values
            known = {"signature": now, "values": {str(value): count for value, count in values.items()}}
            self._known[place] = known
            self._changed = True
        counts: Mapping[str, int] = known["values"]
        return counts

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            plain = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(plain, dict):
                return plain
        return {}

    def save(self) -> None:
        """Write what is new; where the folder cannot be written, the next process opens the labels again."""
        if self._changed and self._known is not None:
            with contextlib.suppress(OSError):
                write_json(self._path, self._known)
