"""What `data.checking.check` finds: one sentence each, and the report of them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from wardround.data.checking.facts import CaseFacts, ImageFacts
from wardround.data.listing import SPLITS, Entry
from wardround.data.readers.common import join_names
from wardround.files import jsonable
from wardround.tables import Table, one_line
from wardround.text import format_size

Severity = Literal["error", "warning", "repaired"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "repaired")
LONGEST = 600  # characters of a sentence; names and paths come from elsewhere
COLUMNS = (
    "client", "cases", "train/val/test", "left out", "warnings", "repaired",
    "shape", "spacing", "intensity", "label values",
)  # fmt: skip

# code -> how a summary calls it
CODES = {
    "missing": "missing file",
    "empty": "empty file",
    "unreadable": "unreadable",
    "not_finite": "NaN or infinite voxels",
    "no_label": "no label",
    "unlabelled": "client that trains without labels",
    "not_whole": "label not whole numbers",
    "label_value": "unexpected label value",
    "shape": "image and label of different shape",
    "geometry": "image and label in different places",
    "channels": "wrong channel count",
    "dimensions": "2D among 3D or the reverse",
    "leak": "patient in two splits",
    "duplicate_leak": "identical image in two splits",
    "nothing_left": "client without usable cases",
    "no_training": "client without training cases",
    "no_foreground": "no foreground",
    "no_background": "no background",
    "ignored_voxels": "voxels to be ignored",
    "cut_off": "labelled voxels cut off",
    "constant": "constant image",
    "tiny": "tiny image",
    "duplicate": "identical images",
    "one_patient": "client of one patient",
    "shared_patient": "patient names at two clients",
    "background_value": "label value taken as background",
    "class_absent": "class absent at a client",
    "class_hidden": "labels of a class that its client does not annotate",
    "class_nowhere": "class that no case has",
    "stretched": "shapes that will be stretched",
    "channel_order": "channel order",
    "spacing": "spacing between clients",
    "unit_spacing": "voxel size perhaps lost",
    "intensity": "intensity scale between clients",
}

# What a run says before it trains, of a client or of all
ANNOUNCED = ("unlabelled", "class_absent", "class_nowhere", "background_value", "no_background", "stretched")


@dataclass(frozen=True)
class Finding:
    """client: empty where it is about all; case: empty where it is about a whole client."""

    client: str
    case: str
    code: str
    severity: Severity
    sentence: str

    @classmethod
    def at(cls, entry: Entry, code: str, severity: Severity, sentence: str) -> Finding:
        """About one case, whose name is put in front."""
        return cls(entry.client, entry.name, code, severity, as_line(f"{entry.where}: {sentence}"))


@dataclass(frozen=True)
class CheckReport:
    """What was found, and the cases that remain.

    usable, left_out: cases without and with errors, in the order of the listing; facts: of every case, by
    (client, name), empty after `quick`; notes: what the reader had to say; background: label values of no
    class that are taken as background on purpose, for `prepare_case`.
    """

    findings: tuple[Finding, ...]
    usable: tuple[Entry, ...]
    left_out: tuple[Entry, ...]
    facts: Mapping[tuple[str, str], CaseFacts]
    notes: tuple[str, ...] = ()
    background: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        entries: Sequence[Entry],
        findings: Sequence[Finding],
        facts: Mapping[tuple[str, str], CaseFacts],
        notes: Sequence[str],
        background: Iterable[int] = (),
    ) -> CheckReport:
        wrong = {(found.client, found.case) for found in findings if found.severity == "error"}
        usable = tuple(entry for entry in entries if (entry.client, entry.name) not in wrong)
        left_out = tuple(entry for entry in entries if (entry.client, entry.name) in wrong)
        return cls(tuple(findings), usable, left_out, facts, tuple(notes), tuple(background))

    @property
    def ok(self) -> bool:
        """No errors; warnings and repairs do not count."""
        return self.count("error") == 0

    def count(self, severity: Severity, client: str | None = None) -> int:
        return sum(f.severity == severity and client in (None, f.client) for f in self.findings)

    def reasons(self, entry: Entry) -> list[Finding]:
        """Why a case was left out."""
        key = (entry.client, entry.name)
        return [f for f in self.findings if f.severity == "error" and (f.client, f.case) == key]

    def sentences(self, limit: int = 20) -> list[str]:
        """Findings as lines, most serious first; of each kind and client one before the second of any."""
        seen: Counter[tuple[str, str]] = Counter()
        ranked: list[tuple[int, int, Finding]] = []
        for found in self.findings:
            ranked.append((SEVERITIES.index(found.severity), seen[found.code, found.client], found))
            seen[found.code, found.client] += 1
        ranked.sort(key=lambda item: item[:2])
        lines = [f"{found.severity}: {found.sentence}" for _, _, found in ranked[:limit]]
        rest = len(ranked) - len(lines)
        return [*lines, f"... and {rest} more"] if rest else lines

    def table(self) -> Table:
        """One row a client; shapes, ranges and values are those of its usable cases."""
        entries = [*self.usable, *self.left_out]
        rows = [self._row(client, entries) for client in sorted({entry.client for entry in entries})]
        return Table("Check", COLUMNS, rows, self.summary())

    def _row(self, client: str, entries: Sequence[Entry]) -> list[Any]:
        own = [entry for entry in entries if entry.client == client]
        good = [(client, entry.name) for entry in self.usable if entry.client == client]
        known = [self.facts[key] for key in good if key in self.facts]
        images = [facts.image for facts in known if facts.image is not None]
        values = sorted({value for facts in known if facts.label for value in facts.label.values})
        return [
            client,
            len(own),
            format_split_counts(own),
            sum(entry.client == client for entry in self.left_out),
            self.count("warning", client),
            self.count("repaired", client),
            format_extent([image.shape for image in images]),
            format_extent([tuple(round(side, 3) for side in image.spacing) for image in images]),
            format_intensity(images),
            join_names([str(value) for value in values], 8),
        ]

    def summary(self) -> str:
        """How many cases are usable, and how many findings there are of each kind."""
        kinds = Counter(found.code for found in self.findings)
        parts = [f"{CODES[code]} {number}" for code, number in kinds.most_common()]
        total = len(self.usable) + len(self.left_out)
        nothing = " See the notes." if self.notes else " No findings."
        found = f" Found: {', '.join(parts)}." if parts else nothing
        return f"{len(self.usable)} of {total} cases are usable.{found}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values: counts, who is left out and why, every finding, the table."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for found in self.findings:
            if found.severity == "error":
                reasons.setdefault((found.client, found.case), []).append(found.code)
        plain = {
            "version": 1,
            "ok": self.ok,
            "cases": len(self.usable) + len(self.left_out),
            "usable": len(self.usable),
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "left_out": [
                {"client": entry.client, "case": entry.name, "reasons": reasons[entry.client, entry.name]}
                for entry in self.left_out
            ],
            "findings": [vars(found) for found in self.findings],
            "background": list(self.background),
            "notes": [as_line(note) for note in self.notes],
            "table": self.table().as_dict(),
        }
        return dict(jsonable(plain))


# Words


def as_line(text: str) -> str:
    """One printable line of limited length."""
    return one_line(text, LONGEST)


def format_split_counts(entries: Sequence[Entry]) -> str:
    counts = Counter(entry.split for entry in entries)
    fixed = "/".join(str(counts[split]) for split in SPLITS)
    return f"{fixed}, {counts[None]} open" if counts[None] else fixed


def format_extent(shapes: Sequence[tuple[float, ...]]) -> str:
    """One shape, or the smallest and the largest side along each axis; of 2D and 3D, what most are."""
    if not shapes:
        return ""
    usual = Counter(len(shape) for shape in shapes).most_common(1)[0][0]
    sides = np.asarray([shape for shape in shapes if len(shape) == usual])
    low, high = sides.min(axis=0), sides.max(axis=0)
    return format_size(low) if (low == high).all() else f"{format_size(low)} to {format_size(high)}"


def format_intensity(images: Sequence[ImageFacts]) -> str:
    """The median of the lowest and of the highest values."""
    good = [image for image in images if not image.num_bad]
    if not good:
        return ""
    low, high = np.median([min(image.low) for image in good]), np.median([max(image.high) for image in good])
    return f"{low:.4g} to {high:.4g}"
