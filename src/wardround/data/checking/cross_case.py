"""Checks across cases and clients: leaks between splits, identical images, clients that do not match.

Only names, counts and medians are compared, each from facts of a case (`facts`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from wardround.data.annotation import annotations_of
from wardround.data.checking.facts import CaseFacts, ImageFacts
from wardround.data.checking.findings import Finding, as_line
from wardround.data.federation_file import FederationFile, PrepareSettings
from wardround.data.listing import Entry, Labels
from wardround.data.preparing.grid import reorient_grid
from wardround.data.readers.common import join_names
from wardround.errors import DataError
from wardround.text import format_size

Cases = Sequence[tuple[Entry, CaseFacts]]

SPACING_FACTOR = 3.0
INTENSITY_FACTOR = 10.0
MOST_STRETCH = 1.05  # of one side to another, between images
LOST_FACTOR = 2.0  # extents of scans with unit spacing: no body part differs that much in one data set
CLEAR = 2 / 3  # share of a client's cases that must agree on an order of channels
FEWEST_FOR_ORDER = 3  # cases of a client before its order of channels is worth a word
KEPT = {"test": 0, "val": 1, "train": 2}  # the split whose case stays comes first


def rank(entry: Entry) -> int:
    return KEPT.get(entry.split or "", len(KEPT))


# Between splits


def find_leaks(cases: Cases) -> list[Finding]:
    """Patients (groups) of a client in two splits: all but the cases of the test split go."""
    members: dict[tuple[str, str], list[Entry]] = {}
    for entry, _ in cases:
        if entry.split is not None:
            members.setdefault((entry.client, entry.group), []).append(entry)
    found = []
    for entries in members.values():
        first = min(entries, key=lambda entry: (rank(entry), entry.name))
        found += [
            Finding.at(
                entry, "leak", "error",
                f"patient '{entry.group}' is in {entry.split} and, as case '{first.name}', in {first.split}. "
                f"The {first.split} case stays, this one is left out.",
            )
            for entry in entries
            if entry.split != first.split
        ]  # fmt: skip
    return found


def find_duplicates(cases: Cases) -> list[Finding]:
    """Identical images. In two splits all but the test case go; in one they stay, with a warning."""
    twins: dict[str, list[tuple[Entry, CaseFacts]]] = {}
    for entry, facts in cases:
        # Constant images are alike without being copies, and have a finding of their own.
        if facts.image is not None and len(facts.image.constant) < facts.image.channels:
            twins.setdefault(facts.image.digest, []).append((entry, facts))
    found = []
    for copies in twins.values():
        copies.sort(key=lambda case: (rank(case[0]), case[0].client, case[0].name))
        found += [describe_duplicate(case, copies[0]) for case in copies[1:]]
    return found


def describe_duplicate(case: tuple[Entry, CaseFacts], first: tuple[Entry, CaseFacts]) -> Finding:
    entry, twin = case[0], first[0]
    place = f"case '{twin.name}'" if twin.client == entry.client else twin.where
    labels = [facts.label.digest for _, facts in (case, first) if facts.label is not None]
    other = " (with another label)" if len(set(labels)) == 2 else ""
    same = f"the image is identical to that of {place}{other}"
    if entry.split is not None and twin.split is not None and entry.split != twin.split:
        return Finding.at(
            entry, "duplicate_leak", "error",
            f"{same}, which is in {twin.split}; this one is in {entry.split} and is left out.",
        )  # fmt: skip
    advice = "" if entry.group == twin.group and entry.client == twin.client else advise(entry, twin)
    return Finding.at(entry, "duplicate", "warning", f"{same}.{advice}")


def advise(entry: Entry, twin: Entry) -> str:
    """What to do of copies that a new draw of splits could part."""
    if entry.split is not None and twin.split is not None:
        return ""
    return " Give both one patient, so that no split parts them."


# Between clients


def compare_clients(every: Cases, good: Cases, file: FederationFile, classes: Labels) -> list[Finding]:
    """All rules that compare clients. every: all cases; good: those without errors."""
    images: dict[str, list[ImageFacts]] = {}
    for entry, facts in good:
        if facts.image is not None:
            images.setdefault(entry.client, []).append(facts.image)
    placed = {entry.client for entry, _ in good if entry.places}  # their names say which is which
    return [
        *check_groups(every, good, file),
        *find_absent_classes(good, classes, file),
        *find_stretched([image for facts in images.values() for image in facts], file.prepare),
        *compare_channel_order({n: own for n, own in images.items() if n not in placed}),
        *compare_spacing(images),
        *find_lost_spacing(images),
        *compare_intensity(images, file),
    ]


def check_groups(every: Cases, good: Cases, file: FederationFile) -> list[Finding]:
    """Clients with nothing left, nothing to train on, or one patient; patients at two clients."""
    found: list[Finding] = []
    left: dict[str, list[Entry]] = {entry.client: [] for entry, _ in every}
    for entry, _ in good:
        left[entry.client].append(entry)
    for client, entries in sorted(left.items()):
        patients = {entry.group for entry in entries}
        held_out = client in file.held_out
        split = bool(entries) and all(entry.split is not None for entry in entries)
        if not entries:
            said = f"client '{client}': no usable case is left; it cannot take part."
            found.append(Finding(client, "", "nothing_left", "error", as_line(said)))
        elif split and not held_out and all(entry.split != "train" for entry in entries):
            said = f"client '{client}' has no training case; to test on it, name it under held_out."
            found.append(Finding(client, "", "no_training", "warning", as_line(said)))
        bare = sum(entry.label is None for entry in entries)
        if bare:
            said = (
                f"client '{client}': {bare} of {len(entries)} usable cases have no label and train without."
            )
            found.append(Finding(client, "", "unlabelled", "warning", as_line(said)))
        if len(patients) == 1 and not bare:
            then = "its score rests on that one" if held_out else "it cannot be split; name it under held_out"
            said = f"client '{client}' has a single patient, '{patients.pop()}': {then}."
            found.append(Finding(client, "", "one_patient", "warning", as_line(said)))
    return found + find_shared_patients(good)


def find_shared_patients(cases: Cases) -> list[Finding]:
    """Patient names at two clients, in one finding: they may be the same people, or the same numbering.

    Where a list names no patients the case stands for them, and `case_01` is everywhere; then only a few
    names in common are reported.
    """
    names: dict[str, set[str]] = {}
    has_groups: dict[str, bool] = {}
    for entry, _ in cases:
        names.setdefault(entry.client, set()).add(entry.group)
        has_groups[entry.client] = has_groups.get(entry.client, False) or entry.group != entry.name
    where: dict[str, set[str]] = {}
    for one, other in combinations(sorted(names), 2):
        both = names[one] & names[other]
        if (has_groups[one] and has_groups[other]) or 2 * len(both) < min(len(names[one]), len(names[other])):
            for name in both:
                where.setdefault(name, set()).update((one, other))
    if not where:
        return []
    shown = [f"'{name}' ({join_names(sorted(where[name]), 4)})" for name in sorted(where)]
    number = "1 patient name is" if len(where) == 1 else f"{len(where)} patient names are"
    said = (
        f"{number} at more than one client: {join_names(shown, 3)}. If these are the same people, keep each "
        "at one client; if only the names coincide, do nothing."
    )
    return [Finding("", "", "shared_patient", "warning", as_line(said))]


def find_absent_classes(cases: Cases, classes: Labels, file: FederationFile) -> list[Finding]:
    """A class that no case has, or some clients have and another never has, unless the file says so."""
    known = annotations_of(file.annotates, list(classes), file.regions, list(file.annotates))
    labels = [(entry, facts.label.values) for entry, facts in cases if facts.label is not None]
    if not classes:
        every = sorted({value for _, values in labels for value in values} - {0})
        classes = {f"value {value}": (value,) for value in every}
    found = []
    for number, name in enumerate(classes, start=1):
        meant: dict[str, set[int]] = {}  # client -> the values of this class there
        have = set()
        for entry, values in labels:
            own = set(entry.label_map(classes)[name])
            meant.setdefault(entry.client, set()).update(own)
            if own & set(values):
                have.add(entry.client)
        everywhere, meant = (
            meant,
            {c: v for c, v in meant.items() if c not in known or known[c].tells([number])},
        )
        for client in sorted(have - meant.keys()):
            if not known[client].groups[number]:
                said = f"client '{client}': annotates leaves out class '{name}', so its labels are not used."
                found.append(Finding(client, "", "class_hidden", "warning", as_line(said)))
        if everywhere and not meant:
            said = f"No client annotates class '{name}' by itself, so nothing would teach what it is."
            found.append(Finding("", "", "class_nowhere", "warning", as_line(said)))
        if meant and not have:
            shown = join_names([str(value) for value in classes[name]])
            said = f"No case has class '{name}' ({shown}). Correct it under labels."
            found.append(Finding("", "", "class_nowhere", "warning", as_line(said)))
        for client in sorted(set(meant) - have) if have else ():
            if not meant[client]:
                continue
            values_there = join_names([str(value) for value in sorted(meant[client])])
            said = (
                f"client '{client}' has no case with class '{name}' ({values_there}); "
                f"there are some at {join_names(sorted(have), 4)}. Is its label map the same?"
            )
            found.append(Finding(client, "", "class_absent", "warning", as_line(said)))
    return found


def refuse_absent_classes(findings: Sequence[Finding], file: FederationFile) -> None:
    """End a run whose clients seem to mean different things by their labels, unless the file says so."""
    absent = [found for found in findings if found.code == "class_absent"]
    if absent and not file.labels_differ and file.partition.kind in ("natural", "feature"):
        more = "" if len(absent) == 1 else f" ({len(absent) - 1} more: wardround data check)"
        raise DataError(
            f"{absent[0].sentence}{more} If other values mean it there, give its source a label map, such as "
            "labels: {lesion: [255]}, under sources. If nobody outlined it there, say what was, such as "
            f"annotates: {{{absent[0].client}: [...]}}; if no patient there has it, write "
            "labels_differ: true in federation.yaml."
        )


def find_stretched(images: Sequence[ImageFacts], settings: PrepareSettings) -> list[Finding]:
    """Images of different proportions that `prepare.size` brings to the same."""
    if settings.size is None or settings.spacing is not None:  # otherwise they are padded or cropped
        return []
    shapes = [reorient_grid(image.shape, image.spacing, image.affine)[0] for image in images]
    sides = np.asarray([shape for shape in shapes if len(shape) == len(settings.size)], dtype=float)
    most = measure_stretch(sides)
    if most <= MOST_STRETCH:
        return []
    low, high = format_size(sides.min(axis=0).astype(int)), format_size(sides.max(axis=0).astype(int))
    said = (
        f"Images of different proportions ({low} to {high}) all become {format_size(settings.size)}, so that "
        f"some are stretched, by up to {most:.2g} against others. To pad and crop instead, set "
        "prepare.spacing."
    )
    return [Finding("", "", "stretched", "warning", as_line(said))]


def measure_stretch(sides: NDArray[np.float64]) -> float:
    """By how much one image is stretched along an axis against another, where all get one shape."""
    if len(sides) < 2:
        return 1.0
    ratios = sides / sides[:, :1]  # to the first axis
    return float((ratios.max(axis=0) / ratios.min(axis=0)).max())


def compare_channel_order(images: Mapping[str, Sequence[ImageFacts]]) -> list[Finding]:
    """Channels sorted by brightness in another order than elsewhere: perhaps stored in another order."""
    orders = {client: find_clear_order(facts) for client, facts in images.items()}
    known = {client: order for client, order in orders.items() if order is not None}
    if len(known) < 2:
        return []
    usual, number = Counter(known.values()).most_common(1)[0]
    if number * 2 <= len(known) and len(known) > 2:
        return []  # no order is usual
    found = []
    for client, order in sorted(known.items()):
        if order != usual:
            said = (
                f"client '{client}': from dark to bright its channels are {format_order(order)}, elsewhere "
                f"mostly {format_order(usual)}. They may be stored in another order."
            )
            found.append(Finding(client, "", "channel_order", "warning", as_line(said)))
    return found


def find_clear_order(facts: Sequence[ImageFacts]) -> tuple[int, ...] | None:
    """Channels from dark to bright, where most of a client's cases agree."""
    if len(facts) < FEWEST_FOR_ORDER or facts[0].channels < 2:
        return None
    orders = [tuple(np.argsort(image.typical).tolist()) for image in facts if has_distinct_channels(image)]
    if not orders:
        return None
    order, number = Counter(orders).most_common(1)[0]
    return order if number >= CLEAR * len(facts) else None


def has_distinct_channels(image: ImageFacts) -> bool:
    """Whether no two channels are equally bright, within a hundredth of the image's range."""
    ordered = np.sort(np.asarray(image.typical))
    return bool((np.diff(ordered) > 0.01 * image.scale).all())


def format_order(order: Sequence[int]) -> str:
    return join_names([str(place) for place in order], 8)


def compare_spacing(images: Mapping[str, Sequence[ImageFacts]]) -> list[Finding]:
    """Medians by client, sides sorted by length: scans lie in different directions."""
    medians = {
        client: np.median([sorted(image.spacing) for image in facts], axis=0)
        for client, facts in images.items()
    }
    if len(medians) < 2:
        return []
    sides = np.asarray(list(medians.values()))
    if (sides.max(axis=0) <= SPACING_FACTOR * sides.min(axis=0)).all():
        return []
    texts = [f"{client} {format_size(np.round(medians[client], 2))}" for client in sorted(medians)]
    said = (
        f"Voxel sizes differ between clients by more than {SPACING_FACTOR:g}-fold (medians in mm, sorted: "
        f"{join_names(texts, 8)}). Set prepare.spacing to bring them together."
    )
    return [Finding("", "", "spacing", "warning", as_line(said))]


def find_lost_spacing(images: Mapping[str, Sequence[ImageFacts]]) -> list[Finding]:
    """Volumes of 1x1x1 mm all, and of very different extent: a converter may have lost their voxel size."""
    every = [image for facts in images.values() for image in facts if image.affine is not None]
    volumes = [image for image in every if len(image.shape) == 3]
    if len(volumes) < 2 or not np.allclose([image.spacing for image in volumes], 1.0, atol=1e-6):
        return []
    sides = np.asarray([image.shape for image in volumes])
    low, high = sides.min(axis=0), sides.max(axis=0)
    if (high <= LOST_FACTOR * low).all():
        return []
    said = (
        f"Every volume claims voxels of 1x1x1 mm, but shapes range from {format_size(low)} to "
        f"{format_size(high)}: the voxel size may have been lost. Distances in millimetres would be wrong; "
        "prepare.size is safer than prepare.spacing."
    )
    return [Finding("", "", "unit_spacing", "warning", as_line(said))]


def compare_intensity(images: Mapping[str, Sequence[ImageFacts]], file: FederationFile) -> list[Finding]:
    scales = {client: float(np.median([image.scale for image in facts])) for client, facts in images.items()}
    known = {client: scale for client, scale in scales.items() if scale > 0}
    if len(known) < 2 or max(known.values()) <= INTENSITY_FACTOR * min(known.values()):
        return []
    texts = [f"{client} {known[client]:.3g}" for client in sorted(known)]
    how = file.prepare.normalise
    kept = how in ("none", "window", "ct")
    then = f"normalise: {how} keeps that; zscore would not" if kept else f"normalise: {how} evens that out"
    said = (
        f"Intensity ranges differ between clients by more than {INTENSITY_FACTOR:g}-fold (medians: "
        f"{join_names(texts, 8)}); {then}."
    )
    return [Finding("", "", "intensity", "warning", as_line(said))]
