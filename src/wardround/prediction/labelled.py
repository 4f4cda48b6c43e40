"""Labelled sets: their cases, what their labels mean, and which cases a model has seen in training."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wardround.data.checking.check import assign_splits
from wardround.data.federation_file import FederationFile, load
from wardround.data.listing import SPLITS, Entry, Listing
from wardround.data.preparing.cache import DigestIndex, hash_file, stat_signature
from wardround.data.proposing.proposal import propose
from wardround.data.serving.loading import RealData, add_label_meaning, override_sections
from wardround.data.settings import DataSettings
from wardround.data.slices.cutting import CUT_FROM, VOLUME, hash_volume
from wardround.data.sources import join_listings, read_sources
from wardround.errors import ConfigError, DataError, WardroundError
from wardround.prediction.trained import TrainedModel, read_config
from wardround.yaml_file import read_yaml

Classes = Mapping[str, tuple[int, ...]]  # name -> values in a file


@dataclass(frozen=True)
class LabelledSet:
    """A labelled set: its cases by centre, and the values of its classes; notes: for the user.

    ignore: label values of voxels that nobody annotated; annotates: centre -> what it annotates, if not all;
    channels: their names, if known.
    """

    path: Path
    entries: tuple[Entry, ...]
    labels: Classes
    notes: tuple[str, ...] = ()
    ignore: tuple[int, ...] = ()
    annotates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    channels: tuple[str, ...] = ()


def open_labelled(path: Path, split: str, settings: DataSettings | None = None) -> LabelledSet:
    """The labelled cases of a federation.yaml or of a folder, in the order of centres and names.

    settings: of the run whose own file it is, laid over the file as the run did.
    """
    notes: list[str] = []
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        file, found = read_federation(path)
    else:
        proposal = propose([path])
        file, found = proposal.file, proposal.listing
        notes += proposal.guesses
    if split != "all":
        file = file if settings is None else override_sections(file, settings)
        entries, _ = assign_splits(found, file, path.parent if path.is_file() else path)
        found = replace(found, entries=tuple(entry for entry in entries if (entry.split or "train") == split))
    annotated = tuple(entry for entry in found.entries if entry.label is not None)
    if len(annotated) < len(found.entries):
        notes.append(f"{len(found.entries) - len(annotated)} cases have no label and are left out.")
    if not annotated:
        which = "" if split == "all" else f" in split '{split}'"
        raise DataError(f"{path} has no labelled cases{which}.")
    ignore = file.ignore or found.ignore
    return LabelledSet(path, annotated, file.labels, tuple(notes), ignore, file.annotates, file.channels)


def read_federation(path: Path) -> tuple[FederationFile, Listing]:
    """All centres that a file names, or every centre if it names none, whether it can train or not."""
    file = load(path)
    found = join_listings(read_sources(file, path.parent), file.channels, file.labels)
    if file.clients is not None:
        chosen = {*file.clients, *file.held_out}
        found = replace(found, entries=tuple(entry for entry in found.entries if entry.client in chosen))
    return add_label_meaning(file, found, path), found


def match_classes(wanted: Classes, given: Classes, path: Path) -> tuple[Classes, list[str]]:
    """The values of each class of the run in these labels: by name, else in order if the counts agree."""
    known = {name.casefold(): values for name, values in given.items()}
    if all(name.casefold() in known for name in wanted):
        return {name: known[name.casefold()] for name in wanted}, []
    if len(given) == len(wanted):
        pairs = ", ".join(f"{theirs} is {ours}" for ours, theirs in zip(wanted, given, strict=True))
        renamed = dict(zip(wanted, given.values(), strict=True))
        return renamed, [f"The data and the run name their classes differently; matched in order: {pairs}."]
    raise ConfigError(
        f"{path} has the classes {', '.join(given)}, but the run was trained on {', '.join(wanted)}. "
        "Use the run's class names under labels in a federation.yaml."
    )


# Cases the model was trained on or selected by

SEEN = "the model has seen before (split train or val of its run)"


class RunCases:
    """The cases of a run's data as they are now, each with its split in the run.

    path: its federation.yaml, or its folder; tested: client -> the cases of its own test, usable or not;
    assumed: these are taken for its data by their names alone.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry], cache: Path, tested: Mapping[str, set[str]], assumed: bool
    ) -> None:
        self.path = path
        self.tested = tested
        self.assumed = assumed
        self._known = DigestIndex(cache)
        self._digests: dict[Path, str] = {}
        self._named = {(entry.client, entry.name): entry for entry in entries}
        self._at: dict[Path, Entry] = {}
        self._of_size: dict[tuple[int, ...], list[Entry]] = {}
        # Of two copies the run leaves out the training case, so the test case counts.
        for entry in sorted(entries, key=lambda entry: SPLITS.index(entry.split or "train")):
            self._at |= {image.resolve(): entry for image in entry.images}
            self._of_size.setdefault(file_sizes(entry.images), []).append(entry)
        self._of_content: dict[tuple[int, ...], dict[tuple[str, ...], Entry]] = {}
        cut = [entry for entry in entries if entry.columns.get(CUT_FROM)]
        self._slices = {entry.columns[CUT_FROM]: entry for entry in cut}  # all of a volume have one split
        self._volumes = {(entry.client, entry.columns.get(VOLUME, "")): entry for entry in cut}

    def match(self, entry: Entry) -> Entry | None:
        """The case of the run with the same files, copies of them, or slices cut from them."""
        for image in entry.images:
            if image.resolve() in self._at:
                return self._at[image.resolve()]
        copied = self._copied(entry)
        if copied is not None:
            return copied
        if self._slices and (cut := self._slices.get(hash_volume(self._content(entry.images)))):
            return cut
        namesake = self._named.get((entry.client, entry.name))
        return namesake if namesake is not None and self._same_label(entry, namesake) else None

    def has_namesake(self, entry: Entry) -> bool:
        """Whether a case it has seen has the same client and name."""
        key = entry.client, entry.name
        other = self._named.get(key) or self._volumes.get(key)
        return other is not None and is_seen(other)

    def may_be_seen(self, own: Entry) -> bool:
        """Whether one of its cases is a test case now but was not when the run was tested."""
        return own.client in self.tested and not is_seen(own) and own.name not in self.tested[own.client]

    def _copied(self, entry: Entry) -> Entry | None:
        """The case whose images have the same bytes; only files of equal size are read."""
        size = file_sizes(entry.images)
        if size not in self._of_size:
            return None
        if size not in self._of_content:
            self._of_content[size] = {self._content(own.images): own for own in self._of_size[size]}
        content = self._content(entry.images)
        return self._of_content[size].get(content) if all(content) else None

    def _same_label(self, one: Entry, other: Entry) -> bool:
        if one.label is None or other.label is None:
            return False
        content = self._content(one.label_files)
        return all(content) and content == self._content(other.label_files)

    def _content(self, paths: Sequence[Path]) -> tuple[str, ...]:
        return tuple(sorted(map(self._digest, paths)))

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            self._digests[path] = self._known.get(path) or hash_file(path)
        return self._digests[path]


def file_sizes(paths: Sequence[Path]) -> tuple[int, ...]:
    return tuple(sorted(stat_signature(path)[0] for path in paths))


def is_seen(own: Entry) -> bool:
    """Whether the model was trained on a case of its run, or selected by it."""
    return own.split != "test"


def note_seen_cases(
    labelled: LabelledSet, run_cases: Mapping[Path, RunCases | None], *, leave_out: bool
) -> LabelledSet:
    """The set with notes about cases the model has seen; leave_out: without those cases."""
    path, entries, notes = labelled.path, labelled.entries, list(labelled.notes)
    found = [past for past in run_cases.values() if past is not None]
    matches = [[(past, past.match(entry)) for past in found] for entry in entries]
    seen = [any(own is not None and is_seen(own) for _, own in matched) for matched in matches]
    number, of = sum(seen), len(entries)
    if number and leave_out:
        if number == of:
            raise DataError(f"{path}: all {of} labelled cases are ones {SEEN}. --split all evaluates them.")
        notes.append(
            f"{path}: {number} of {of} cases, which {SEEN}, are left out. --split all evaluates them too."
        )
        entries = tuple(entry for entry, known in zip(entries, seen, strict=True) if not known)
        matches = [matched for matched, known in zip(matches, seen, strict=True) if not known]
    elif number:
        notes.append(
            f"{path}: {number} of {of} cases are ones {SEEN}, so their scores say little about new scans. "
            "Without --split they are left out."
        )
    changed = sum(any(own is not None and past.may_be_seen(own) for past, own in m) for m in matches)
    if changed:
        notes.append(
            f"{path}: {changed} of {len(entries)} cases were not test cases when the run was tested. "
            "Its data or splits have changed since, and it may have been trained on them."
        )
    alike = sum(
        any(own is None and past.has_namesake(entry) for past, own in matched)
        for entry, matched in zip(entries, matches, strict=True)
    )
    if alike:
        notes.append(
            f"{path}: {alike} of {len(entries)} cases have the client and name of cases {SEEN}, but other "
            "files. They count as new; leave them out of the data if they are the same scans."
        )
    for folder, past in run_cases.items():
        notes += note_doubts(folder, past, path)
    return replace(labelled, entries=entries, notes=tuple(notes))


def note_doubts(run: Path, past: RunCases | None, path: Path) -> list[str]:
    """Notes where a run's data cannot be identified for certain."""
    data = read_config(run).data
    if past is not None and past.assumed:
        return [f"{path} is taken for the data of {run}: its test cases have the same names."]
    if past is not None or (data.federation is None and not data.hospitals):
        return []
    where = f"{data.federation}, which is not found" if data.federation else "cases at hospitals"
    return [f"{run} was trained on {where}; whether it has seen cases of {path} is unknown."]


def find_run_cases(model: TrainedModel, given: Path) -> RunCases | None:
    """The cases of a run, if its data are on this machine; given: a set that may be them."""
    data = model.config.data
    tested = read_tested(model.folder)
    left_out = read_left_out(model.folder)
    named = data.federation
    sure, others = ([], []) if named is None else list_places(named, model.folder)
    is_file = given.is_file() and given.suffix.lower() in (".yaml", ".yml")
    for place in dict.fromkeys([*sure, *others, *([given.resolve()] if is_file and tested else [])]):
        try:
            found = RealData(place, data)
            entries, cache = list(found.listing.entries), found.cache.folder
        except (WardroundError, OSError):
            continue
        used = [entry for entry in entries if entry.name not in left_out.get(entry.client, ())]
        certain = place in sure or not (sure or tested)
        if certain or has_same_tests(used, tested):
            judged = {client: names | left_out.get(client, set()) for client, names in tested.items()}
            return RunCases(place, entries, cache, judged, assumed=place not in (*sure, *others))
    return None


def list_places(named: Path, run: Path) -> tuple[list[Path], list[Path]]:
    """Where a relative path in a run's settings leads, certain places first, then possible ones.

    It is relative to where the run was started, which the run's folder and its `output` setting give, unless
    the folder was moved or named by an absolute path.
    """
    if named.is_absolute():
        return [named.resolve()], []
    called = Path(str(read_yaml(run / "config.yaml").get("output") or run))
    above, start = [Path()], []
    for folder in (run.absolute(), run.resolve()):
        above += folder.parents
        if called.parts and folder.parts[-len(called.parts) :] == called.parts and not called.is_absolute():
            start.append(folder.parents[len(called.parts) - 1])
    return [(folder / named).resolve() for folder in start], [(folder / named).resolve() for folder in above]


def read_tested(run: Path) -> dict[str, set[str]]:
    """Client -> its cases that the run was tested on; empty before the test."""
    found: dict[str, set[str]] = {}
    try:
        with (run / "cases.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["client"], set()).add(row["case"])
    except (OSError, ValueError, KeyError, csv.Error):
        return {}
    return found


def read_left_out(run: Path) -> dict[str, set[str]]:
    """Client -> its cases that the run could not use."""
    try:
        plain = json.loads((run / "left_out.json").read_text(encoding="utf-8"))
        return {client: set(cases) for client, cases in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def has_same_tests(entries: Sequence[Entry], tested: Mapping[str, set[str]]) -> bool:
    """Whether each client has the test cases it had in the run."""
    tests: dict[str, set[str]] = {}
    for entry in entries:
        if entry.split == "test":
            tests.setdefault(entry.client, set()).add(entry.name)
    both = tests.keys() & tested.keys()
    return bool(both) and all(tests[client] == tested[client] for client in both)
