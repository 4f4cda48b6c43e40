"""`wardround data check`: whether the cases of all clients can be used, and fit together.

    report = check(listing, file, base=folder_of_the_file, jobs=2)
    report.usable           the cases to train on, with their splits; those with an error are left out
    report.sentences()      what was found, most serious first

Each case is opened once (`facts`) and judged by itself here, then against the others (`cross_case`).

- error: the case is left out. warning: it stays, but deserves a look. repaired: it stays, and preparing
  takes the image's geometry for the label's.
- Where a patient, or an identical image, is in two splits, the test case stays (then the validation case)
  and the training case is left out, so that scores stay honest.
- A label value that federation.yaml does not name is an error, unless most cases have it beside named ones:
  then it was left out on purpose and is background, which is reported once.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from wardround.data import splits
from wardround.data.checking import cross_case as across
from wardround.data.checking.facts import CaseFacts, ImageFacts, LabelFacts, gather_facts
from wardround.data.checking.findings import CheckReport, Finding, Severity, as_line
from wardround.data.federation_file import FederationFile, PrepareSettings
from wardround.data.listing import Entry, Labels, Listing, Watch
from wardround.data.preparing.prepare import MOST_CUT, cut_off, plan
from wardround.data.readers.common import join_names
from wardround.data.readers.image_files import Volume, read_image
from wardround.data.readers.label_files import read_case_label
from wardround.errors import DataError
from wardround.text import format_size

SAME_AFFINE = 1e-5  # rounding of a header
TINY_AFFINE = 1e-3  # repaired: the image's affine is taken
FEWEST_PIXELS = 8  # a side of a 2D image
FEWEST_VOXELS = 4  # a side of a 3D image
LARGEST_CLASS = 255  # prepared labels are bytes
MANY_VALUES = 32  # more are the greys of a picture

Cases = list[tuple[Entry, CaseFacts]]
Verdict = tuple[str, Severity, str]  # code, severity, what is wrong


def check(
    listing: Listing,
    file: FederationFile,
    *,
    base: Path | None = None,
    jobs: int = 1,
    watch: Watch | None = None,
) -> CheckReport:
    """Open every case and judge it, in `jobs` threads; watch: see `facts`.

    base: the folder of federation.yaml; splits are then assigned as the file says. Without it the cases are
    judged with the splits they carry.
    """
    entries, findings = assign_splits(listing, file, base)
    facts = gather_facts(entries, jobs=jobs, watch=watch)
    cases = list(zip(entries, facts, strict=True))
    norms = Norms.of(cases, listing, file)
    findings += [Finding.at(entry, *said) for entry, own in cases for said in judge_case(entry, own, norms)]
    good = drop_errors(cases, findings)
    findings += find_cut_labels(good, file.prepare, norms, jobs)
    findings += across.find_leaks(good) + across.find_duplicates(good)
    good = drop_errors(good, findings)
    findings += [
        *report_background(norms),
        *report_no_background(cases, norms),
        *across.compare_clients(cases, good, file, norms.classes),
    ]
    known = {(entry.client, entry.name): own for entry, own in cases}
    return CheckReport.of(entries, findings, known, listing.notes, norms.background)


def check_labels(cases: Cases, listing: Listing, file: FederationFile) -> CheckReport:
    """What the labels of some cases say by themselves, for whoever has opened them already."""
    norms = Norms.of(cases, listing, file)
    findings = [
        Finding.at(entry, *said)
        for entry, facts in cases
        if facts.label is not None
        for said in judge_label(facts.label, norms, norms.named(entry))
    ]
    findings += [
        *report_background(norms),
        *report_no_background(cases, norms),
        *across.find_absent_classes(drop_errors(cases, findings), norms.classes, file),
    ]
    return CheckReport.of([entry for entry, _ in cases], findings, {}, (), norms.background)


# What is usual


@dataclass(frozen=True)
class Norms:
    """What a case is measured by.

    channels: how many, and how a message names their source; dimensions: of most images; classes: name ->
    values, empty where none are named; background: values of no class that most cases have, with counts;
    ignore: values of voxels that nobody annotated; unlabelled: clients whose cases may train without label.
    """

    channels: tuple[int, str]
    dimensions: int
    classes: Labels
    background: Mapping[int, int]
    ignore: tuple[int, ...] = ()
    unlabelled: tuple[str, ...] = ()

    @classmethod
    def of(cls, cases: Cases, listing: Listing, file: FederationFile) -> Norms:
        images = [facts.image for _, facts in cases if facts.image is not None]
        channels = find_most_frequent(image.channels for image in images), "most images have"
        if file.channels:
            channels = len(file.channels), f"federation.yaml names {join_names(file.channels)}:"
        classes = file.labels or listing.labels
        dimensions = find_most_frequent(len(image.shape) for image in images)
        ignore = file.ignore or listing.ignore
        usual = find_background_values(cases, classes, file.background)
        background = {value: count for value, count in usual.items() if value not in ignore}
        return cls(channels, dimensions, classes, background, ignore, file.unlabelled)

    def named(self, entry: Entry) -> set[int]:
        """Label values that mean a class in this case."""
        return list_named(entry.label_map(self.classes))


def list_named(classes: Labels) -> set[int]:
    return {value for values in classes.values() for value in values}


def find_most_frequent(numbers: Iterable[int]) -> int:
    """The most frequent number, the larger of two that are equally so."""
    counts = Counter(numbers)
    return max(counts, key=lambda number: (counts[number], number)) if counts else 0


def find_background_values(cases: Cases, classes: Labels, meant: Collection[int] = ()) -> dict[int, int]:
    """Values of no class in more than half of the labels, and there mostly beside a class; or meant so."""
    labels = [(entry, facts.label) for entry, facts in cases if facts.label is not None]
    counts: Counter[int] = Counter()
    beside: Counter[int] = Counter()
    for entry, label in labels:
        named = list_named(entry.label_map(classes))
        others = {value for value in label.values if value > 0} - named
        counts.update(others)
        if named & set(label.values):
            beside.update(others)
    usual = {v for v, n in counts.items() if 2 * n > len(labels) and 2 * beside[v] > n}
    return {v: n for v, n in sorted(counts.items()) if v in usual or v in meant}


def report_background(norms: Norms) -> list[Finding]:
    said = "Label value {} is in {} cases and in no class of federation.yaml: it counts as background."
    return [
        Finding("", "", "background_value", "warning", said.format(value, number))
        for value, number in norms.background.items()
    ]


def report_no_background(cases: Cases, norms: Norms) -> list[Finding]:
    """A class of value 0 is right where another value is background, as in some fundus labels."""
    labels = [(entry, facts.label) for entry, facts in cases if facts.label is not None]
    maps = [norms.classes, *(entry.labels for entry, _ in labels if entry.labels is not None)]
    name = next((name for own in maps for name, values in own.items() if 0 in values), None)
    if name is None or not labels or any(set(label.values) - norms.named(entry) for entry, label in labels):
        return []
    said = (
        f"Label value 0 is class '{name}', so that no voxel is background. If 0 is background, leave it out."
    )
    return [Finding("", "", "no_background", "warning", as_line(said))]


def find_cut_labels(cases: Cases, settings: PrepareSettings, norms: Norms, jobs: int) -> list[Finding]:
    """Cases whose labelled voxels `prepare.size` cuts off; labels of larger scans are opened again."""
    if settings.size is None or settings.spacing is None:  # otherwise whole images are resized
        return []
    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, jobs)) as pool:
        warnings.simplefilter("ignore")  # once for all threads, as `facts.gather` does
        shares = list(pool.map(lambda case: measure_cut(case[0], case[1], settings, norms), cases))
    return [
        Finding.at(entry, "cut_off", "warning", cut_off(share))
        for (entry, _), share in zip(cases, shares, strict=True)
        if share > MOST_CUT
    ]


def measure_cut(entry: Entry, facts: CaseFacts, settings: PrepareSettings, norms: Norms) -> float:
    if facts.image is None or entry.label is None:
        return 0.0
    image = facts.image
    grid = np.broadcast_to(np.float32(0), (1, *image.shape))  # takes no room
    shown = Volume(grid, image.affine, image.spacing)
    try:
        if not plan(shown, None, settings.model_copy(update={"crop": "none"})).cuts:
            return 0.0
        label = read_case_label(entry)
        assert label is not None
        values = label.data
        named = norms.named(entry)
        labelled = np.isin(values, list(named)) if named else values > 0
        if settings.crop != "none":  # where the box lies shows only in the image
            shown = read_image(entry.images)
        return plan(shown, labelled, settings).share_cut(labelled)
    except DataError:  # preparing says why
        return 0.0


# One case


def judge_case(entry: Entry, facts: CaseFacts, norms: Norms) -> Iterator[Verdict]:
    for code, sentence in facts.troubles:
        yield code, "error", sentence
    if entry.label is None:
        yield from judge_unlabelled(entry, norms.unlabelled)
    if facts.image is not None:
        yield from judge_image(facts.image, norms, entry.channels)
    if facts.label is not None:
        yield from judge_label(facts.label, norms, norms.named(entry))
    if facts.image is not None and facts.label is not None:
        yield from judge_pair(facts.image, facts.label)


def judge_unlabelled(entry: Entry, unlabelled: Sequence[str]) -> Iterator[Verdict]:
    """A case without a label trains where federation.yaml says so, and is never tested."""
    if entry.client not in unlabelled:
        said = "it has no label; add one, take it off the list, or name its client under unlabelled."
        yield "no_label", "error", said
    elif entry.split not in (None, "train"):
        yield (
            "no_label",
            "error",
            f"it has no label, so it cannot be in {entry.split}; add one, or train on it.",
        )


def judge_image(image: ImageFacts, norms: Norms, named: Sequence[str]) -> Iterator[Verdict]:
    """named: its channels, where they are not those of all."""
    wanted, who = (len(named), f"its channels are {join_names(named, 8)}:") if named else norms.channels
    if image.num_bad:
        yield "not_finite", "error", f"the image holds {image.num_bad} NaN or infinite voxels."
    if image.channels != wanted:
        number = "1 channel" if image.channels == 1 else f"{image.channels} channels"
        ask = " If it lacks some, say which it has under channels_of." if image.channels < wanted else ""
        yield "channels", "error", f"the image has {number}; {who} {wanted}.{ask}"
    if len(image.shape) != norms.dimensions:
        said = f"the image is {len(image.shape)}D ({format_size(image.shape)}); most are {norms.dimensions}D."
        yield "dimensions", "error", said
    if image.constant:
        every = len(image.constant) == image.channels
        which = "image" if every else f"image's channel {image.constant[0]}"
        yield "constant", "warning", f"the {which} is {image.low[image.constant[0]]:g} everywhere."
    if min(image.shape) < (FEWEST_PIXELS if len(image.shape) == 2 else FEWEST_VOXELS):
        yield "tiny", "warning", f"the image is tiny, {format_size(image.shape)}."


def judge_label(label: LabelFacts, norms: Norms, named: set[int]) -> Iterator[Verdict]:
    """named: the values that mean a class."""
    values = set(label.values) - set(norms.ignore)
    ignored = sum(label.values.get(value, 0) for value in norms.ignore)
    if ignored and not values:
        value = join_names(map(str, norms.ignore))
        yield "ignored_voxels", "error", f"all voxels of the label are to be ignored (value {value})."
    allowed = named | {0} | set(norms.background) if named else {v for v in values if 0 <= v <= LARGEST_CLASS}
    unexpected = sorted(values - allowed)
    if not unexpected and label.num_values > len(label.values):
        unexpected = sorted(values)
    if unexpected:
        meant = f"; federation.yaml names {join_names([str(v) for v in sorted(named)], 8)}" if named else ""
        many = f" ({label.num_values} values: is this a picture?)" if label.num_values > MANY_VALUES else ""
        plural = "value" if len(unexpected) == 1 else "values"
        shown = join_names([str(value) for value in unexpected])
        yield "label_value", "error", f"the label has the {plural} {shown}{many}{meant}."
    elif not ignored and not values & (named or values - {0}):
        yield "no_foreground", "warning", "the label has no foreground."


def judge_pair(image: ImageFacts, label: LabelFacts) -> Iterator[Verdict]:
    if image.shape != label.shape:
        said = f"image is {format_size(image.shape)} but label is {format_size(label.shape)}. Resample one."
        yield "shape", "error", said
    elif image.affine is not None and label.affine is not None:
        apart = float(np.abs(image.affine - label.affine).max())
        if apart > TINY_AFFINE:
            said = f"image and label lie in different places: their affines differ by up to {apart:.3g}. "
            yield "geometry", "error", said + "Resample one, or correct its header."
        elif apart > SAME_AFFINE:
            said = f"the affines of image and label differ by {apart:.1g}; the image's is taken."
            yield "geometry", "repaired", said
    if label.placed:
        said = "the label stores the image's voxels in another order, or a part of them; they are put right."
        yield "geometry", "repaired", said


# Without opening an image: files are there, labels, patients in two splits


def check_quickly(listing: Listing, file: FederationFile, *, base: Path | None = None) -> CheckReport:
    """What needs no decoding, microseconds a case: files are there and not empty, labels, leaks, patients."""
    entries, findings = assign_splits(listing, file, base)
    cases = [(entry, CaseFacts()) for entry in entries]
    findings += [Finding.at(e, *said) for e in entries for said in judge_files(e, file.unlabelled)]
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


def judge_files(entry: Entry, unlabelled: Sequence[str] = ()) -> Iterator[Verdict]:
    """What the file system says of a case, without opening anything."""
    if entry.label is None:
        yield from judge_unlabelled(entry, unlabelled)
    for path in entry.files:
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
