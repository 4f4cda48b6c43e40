"""What is known of a client's cases from an earlier process: kept beside the prepared cases.

    <cache>/clients/<client>-<key>.json     which cases are good and where they are, which are not and why
    <cache>/labels.json                     how many voxels of each value a label has, for partitions

Checking opens every file; this is done once, as long as files and settings stay as they are. All clients
of the federation that lie here are checked together, because a copy of one client's test case may be among
another's training cases. Both files may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.data.checking.check import check
from wardround.data.checking.facts import Watch, measure_label
from wardround.data.federation_file import FederationFile
from wardround.data.listing import Entry, Listing
from wardround.data.partitions import Description
from wardround.data.preparing.cache import FORMAT, Cache, explained, signature
from wardround.data.preparing.prepared_file import describe, files_of
from wardround.data.readers.image_files import read_label
from wardround.errors import DataError
from wardround.files import file_name, try_lock, write_json
from wardround.machine import cores

log = logging.getLogger(__name__)

WAIT_SECONDS = 3600.0
RULES = 2  # raised when checking judges differently
LeftOut = tuple[tuple[str, str], ...]  # case and reason


@dataclass(frozen=True)
class Ready:
    """A client's cases, checked and prepared: files of the good ones, reasons of the others."""

    paths: Mapping[str, Path]
    left_out: LeftOut


@dataclass(frozen=True)
class Kitchen:
    """All that preparing a client needs, besides its cases; channels, dimensions: of every image."""

    cache: Cache
    file: FederationFile
    channels: int
    dimensions: int

    def ready(self, listing: Listing, client: str, *, afresh: bool = False) -> Ready:
        """A client's cases, looked up if nothing changed since; afresh: look at every file again."""
        key = self.key(listing.entries)
        known = None if afresh else self.read(self.note(client, key))
        return known if known is not None else self.all_ready(listing, afresh=afresh)[client]

    def all_ready(
        self, listing: Listing, *, afresh: bool = False, watch: Watch | None = None
    ) -> dict[str, Ready]:
        """The cases of every client, looked up or checked and prepared; another process waits meanwhile."""
        key = self.key(listing.entries)
        with explained(self.cache.folder), self.alone():
            known = {} if afresh else {name: self.read(self.note(name, key)) for name in listing.clients}
            found = {name: ready for name, ready in known.items() if ready is not None}
            if len(found) == len(listing.clients):
                return found
            found = self.prepared(listing, watch)
            for name, ready in found.items():
                places = {
                    case: str(path.relative_to(self.cache.folder)) for case, path in ready.paths.items()
                }
                write_json(self.note(name, key), {"paths": places, "left_out": ready.left_out})
        return found

    def note(self, client: str, key: str) -> Path:
        return self.cache.folder / "clients" / f"{file_name(client)}-{key}.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time checks and prepares; the lock goes with the process."""
        folder = self.cache.folder / "clients"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            deadline, said = time.monotonic() + WAIT_SECONDS, False
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{self.cache.folder}: another process has been preparing these cases for an hour. "
                        "End it, or choose another cache folder in federation.yaml."
                    )
                if not said:
                    log.warning("waiting for another process that prepares cases in %s", self.cache.folder)
                said = True
                time.sleep(0.2)
            yield

    def key(self, entries: Sequence[Entry]) -> str:
        """Changes with the files (size, times), the splits and the settings."""
        cases = [
            [
                ascii(e.client),
                ascii(e.name),
                ascii(e.group),
                e.split,
                [[ascii(str(p)), *signature(p)] for p in files_of(e)],
            ]
            for e in entries
        ]
        rules = [RULES, FORMAT, self.channels, self.dimensions, list(self.file.labels.items())]
        text = json.dumps([rules, self.file.prepare.model_dump(mode="json", exclude={"slices"}), cases])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, note: Path) -> Ready | None:
        """What was noted, if every file it names is still there."""
        try:
            plain = json.loads(note.read_text(encoding="utf-8"))
            paths = {str(name): self.cache.folder / place for name, place in plain["paths"].items()}
            left_out = tuple((str(case), str(reason)) for case, reason in plain["left_out"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Ready(paths, left_out) if all(path.exists() for path in paths.values()) else None

    def prepared(self, listing: Listing, watch: Watch | None = None) -> dict[str, Ready]:
        """Check the cases, prepare the good ones, and hold them against what the federation agreed on."""
        jobs = cores()  # one process does this at a time, so all cores are its own
        report = check(listing, self.file, jobs=jobs)
        reasons = {(e.client, e.name): report.reasons(e)[0].sentence for e in report.left_out}
        outcome = self.cache.ensure(
            report.usable, self.file, jobs=jobs, watch=watch, background=report.background
        )
        reasons |= {(client, case): reason for client, case, reason in outcome.failures}
        paths: dict[str, dict[str, Path]] = {name: {} for name in listing.clients}
        for (client, case), path in outcome.paths.items():
            mismatch = self.mismatch(describe(path)["shape"])
            if mismatch:
                reasons[client, case] = f"client '{client}', case '{case}': {mismatch}"
            else:
                paths[client][case] = path
        left_out = {n: sorted((case, why) for (c, case), why in reasons.items() if c == n) for n in paths}
        return {name: Ready(paths[name], tuple(left_out[name])) for name in paths}

    def mismatch(self, shape: Sequence[int]) -> str | None:
        """Why a prepared image cannot be trained on with the others."""
        if len(shape) - 1 != self.dimensions:
            return f"the image is {len(shape) - 1}D, but the first of the federation is {self.dimensions}D."
        if shape[0] != self.channels:
            return f"the image has {shape[0]} channels, but the federation's images have {self.channels}."
        return None


class Described:
    """What labels show, each opened once; call `save` to keep it for the next process."""

    def __init__(self, path: Path, labels: Mapping[str, tuple[int, ...]]) -> None:
        self._path = path
        self._number = {v: n for n, values in enumerate(labels.values(), start=1) for v in values}
        self._seen: dict[str, Any] | None = None
        self._new = False

    def __call__(self, entry: Entry) -> Description:
        """Foreground as a share of the image; a label that cannot be read has none."""
        counts = self._counts(entry.label) if entry.label is not None else {}
        inside = {int(value): count for value, count in counts.items() if int(value) in self._number}
        share = sum(inside.values()) / max(1, sum(counts.values()))
        return Description(share, tuple(sorted({self._number[value] for value in inside})))

    def _counts(self, label: Path) -> Mapping[str, int]:
        if self._seen is None:
            self._seen = self._read()
        place, now = ascii(str(label.absolute())), list(signature(label))
        known = self._seen.get(place)
        if not isinstance(known, dict) or known.get("signature") != now:
            try:
                values = measure_label(read_label(label)).values
            except DataError:
                return {}
            known = {"signature": now, "values": {str(value): count for value, count in values.items()}}
            self._seen[place] = known
            self._new = True
        counts: Mapping[str, int] = known["values"]
        return counts

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            plain = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(plain, dict):
                return plain
        return {}

    def save(self) -> None:
        """Keep what is new; where the folder cannot be written, the next process looks again."""
        if self._new and self._seen is not None:
            with contextlib.suppress(OSError):
                write_json(self._path, self._seen)
