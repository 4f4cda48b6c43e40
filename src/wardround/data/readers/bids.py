"""BIDS: one folder a subject, masks beside the scans or under derivatives/.

    <root>/sub-01/[ses-1/]anat/sub-01[_ses-1]_T1w.nii.gz
    <root>/derivatives/<pipeline>/sub-01/[ses-1/]anat/sub-01[_ses-1]_[label-lesion_]mask.nii.gz | _dseg.nii.gz
    <root>/participants.tsv       optional; a column `site` (centre, institution) names the clients

Gorgolewski et al., Scientific Data 3:160044, 2016. A case is a session of a subject; its group is the
subject. The kinds of scan that most labelled cases of a client have (T1w, FLAIR, ce-gd_T1w ...) are the
channels; a case may lack some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wardround.data.listing import Entry, Listing
from wardround.data.readers.common import (
    CLIENT,
    SPLIT,
    check_name,
    find_first,
    get_cell,
    is_file,
    is_safe,
    join_names,
    list_folders,
    list_images,
    note_names,
    parse_split,
    read_rows,
)

LABELS = ("dseg", "mask", "seg", "roi", "lesion")
NOT_SCANS = ("probseg", "defacemask")
COMMON = 0.8  # of the labelled cases of a client must have a kind of scan that is a channel
KIND = ("acq", "ce", "rec", "desc", "label")  # distinguishes two scans of one suffix


@dataclass(frozen=True)
class Image:
    """One file: its case (sub-01_ses-1), kind (ce-gd_T1w), suffix, and what else its name says."""

    path: Path
    case: str
    subject: str
    kind: str
    suffix: str
    said: Mapping[str, str]

    @property
    def is_label(self) -> bool:
        return self.suffix in LABELS


def recognise(path: Path) -> str | None:
    if not path.is_dir():
        return None
    subjects = [child for child in list_folders(path, []) if child.name.startswith("sub-")]
    if not any((child / "anat").is_dir() or any(child.glob("ses-*/anat")) for child in subjects):
        return None
    return f"{len(subjects)} folders sub-*/anat: BIDS"


def read(path: Path, client: str | None = None) -> Listing:
    """All subjects; clients from participants.tsv where it names sites."""
    root = path.resolve()
    notes: list[str] = []
    people = read_participants(root)
    images = list(find_images(root, notes))
    label_kind = choose_label([image for image in images if image.is_label], notes)
    labels = index_by_case([i for i in images if i.is_label and i.kind == label_kind], notes)
    scans = select_space([i for i in images if not i.is_label], next(iter(labels.values()), None))
    kinds = {
        kind: index_by_case([i for i in scans if i.kind == kind], notes)
        for kind in sorted({i.kind for i in scans})
    }
    every = {i.case: choose_client(people.get(i.subject, {}), client, root) for i in images}
    channels = choose_channels(kinds, {case: every[case] for case in labels} or every, notes)
    entries, lacking = [], []
    for case in sorted({i.case for i in scans} | set(labels)):
        here = {kind: kinds[kind][case] for kind in channels if case in kinds[kind]}
        if not here:
            lacking.append(case)
            continue
        label = labels.get(case)
        found = list(here.values())
        row = people.get(found[0].subject, {})
        entry = make_entry(found, label.path if label else None, row, every[case], root)
        entries.append(entry if len(here) == len(channels) else replace(entry, channels=tuple(here)))
    wanted = " or ".join(channels)
    note_names(notes, f"{root.name}: {len(lacking)} cases do not have {wanted}", lacking, "; left out")
    bare = [entry.name for entry in entries if entry.label is None]
    note_names(notes, f"{root.name}: {len(bare)} cases have no label", bare)
    ordered = tuple(sorted(entries, key=lambda entry: (entry.client, entry.name)))
    return Listing("bids", ordered, tuple(channels), notes=tuple(notes))


def choose_client(row: Mapping[str, str], client: str | None, root: Path) -> str:
    return check_name(client or get_cell(row, find_first(CLIENT, row)) or root.name, str(root))


def make_entry(
    images: list[Image], label: Path | None, row: Mapping[str, str], client: str, root: Path
) -> Entry:
    split = parse_split(get_cell(row, find_first(SPLIT, row)), f"{root.name}/participants.tsv")
    case, subject = images[0].case, images[0].subject
    files = tuple(image.path for image in images)
    return Entry(client, case, files, label, subject, split, dict(row))


def find_images(root: Path, notes: list[str]) -> Iterator[Image]:
    """Every NIfTI file under sub-*/[ses-*/]anat, in the set itself and in its derivatives."""
    pipelines = list_folders(root / "derivatives", notes) if (root / "derivatives").is_dir() else []
    for place in (root, *(p for p in pipelines if not p.name.startswith("sub-")), root / "derivatives"):
        for subject in list_folders(place, []) if place.is_dir() else []:
            if not subject.name.startswith("sub-") or not is_safe(subject.name):
                continue
            sessions = [child for child in list_folders(subject, notes) if child.name.startswith("ses-")]
            for folder in (subject / "anat", *(session / "anat" for session in sessions)):
                files = list_images(folder, notes) if folder.is_dir() else {}
                yield from (image for stem, file in files.items() if (image := parse_name(file, stem)))


def parse_name(path: Path, stem: str) -> Image | None:
    """What a BIDS name says; None for any other file.

    >>> parse_name(Path("x.nii"), "sub-01_ses-2_ce-gd_T1w").kind
    'ce-gd_T1w'
    """
    *parts, suffix = stem.split("_")
    said = dict(part.split("-", 1) for part in parts if "-" in part)
    if "sub" not in said or suffix in NOT_SCANS or not path.name.lower().endswith((".nii", ".nii.gz")):
        return None
    subject = f"sub-{said['sub']}"
    case = f"{subject}_ses-{said['ses']}" if "ses" in said else subject
    kind = "_".join([f"{key}-{said[key]}" for key in KIND if key in said] + [suffix])
    return Image(path, case, subject, kind, suffix, said)


def choose_label(labels: list[Image], notes: list[str]) -> str | None:
    """The kind of mask most cases have; a mask of the brain only where there is no other."""
    counts = Counter(image.kind for image in labels)
    if not counts:
        return None
    kinds = sorted(counts, key=lambda kind: ("brain" in kind.lower(), -counts[kind], kind))
    if len(kinds) > 1:
        notes.append(f"Labels are the files called {kinds[0]}; {join_names(kinds[1:])} are not used.")
    return kinds[0]


def select_space(scans: list[Image], label: Image | None) -> list[Image]:
    """The scans in the space of the labels (`space-`), or those without one."""
    space = label.said.get("space") if label else None
    same = [scan for scan in scans if scan.said.get("space") == space]
    return same or [scan for scan in scans if "space" not in scan.said] or scans


def index_by_case(images: list[Image], notes: list[str]) -> dict[str, Image]:
    """One file a case; of several runs the first."""
    ordered = sorted(images, key=lambda image: (image.case, image.said.get("run", ""), str(image.path)))
    first: dict[str, Image] = {}
    doubled = [image.case for image in ordered if first.setdefault(image.case, image) is not image]
    if doubled:
        cases = join_names(sorted(set(doubled)))
        notes.append(f"{cases}: several runs of {ordered[0].kind}; the first is used.")
    return first


def choose_channels(
    kinds: Mapping[str, Mapping[str, Image]], cases: Mapping[str, str], notes: list[str]
) -> list[str]:
    """The kinds of scan that nearly all cases of a client have; the commonest where there is none.

    cases: those with a label, each with its client; all where none has one.
    """
    sizes = Counter(cases.values())
    counts = {kind: Counter(cases[case] for case in own if case in cases) for kind, own in kinds.items()}
    often = [
        kind
        for kind, own in counts.items()
        if any(count >= COMMON * sizes[client] for client, count in own.items())
    ]
    rare = [kind for kind in kinds if kind not in often]
    if rare and often:
        notes.append(f"Few labelled cases have {join_names(rare)}; these scans are not used.")
    return often or sorted(kinds, key=lambda kind: -counts[kind].total())[:1]


def read_participants(root: Path) -> dict[str, dict[str, str]]:
    """participants.tsv by subject, nothing where there is none."""
    path = root / "participants.tsv"
    rows = read_rows(path) if is_file(path) else []
    return {row.get("participant_id", ""): row for row in rows}
