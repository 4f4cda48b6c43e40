"""What a data-set preset says: one YAML file each, beside this one, checked when it is read.

    name, title, modality, cite, licence, get      what it is, whose it is, where it is
    layout, channels, labels, regions, clients     what the files look like and mean
    parts                                          how to find the cases (or reader: msd)
    splits, partition, held_out, prepare, papers   what to train on, and what the papers did
    notes, unverified                              what to know, and what could not be verified

A part finds its cases by one regular expression on paths such as `BraTS2021_00000/BraTS2021_00000_t1.nii.gz`,
seen from any folder; its named groups fill the templates for channels, label, client and patient.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from wardround.data.federation_file import PartitionSettings, PrepareSettings, SplitSettings
from wardround.data.listing import Entry, Listing
from wardround.data.readers import msd
from wardround.data.readers.common import check_name, is_safe, join_names
from wardround.errors import ConfigError, DataError
from wardround.settings import Settings
from wardround.text import suggest
from wardround.yaml_file import read_yaml

FOLDER = Path(__file__).parent
ANYWHERE = "(?P<at>(?:[^/]+/)*?)"  # the folders above what a part describes
DEEPEST = 10  # folders below the root; the deepest layout has six
Values = dict[str, tuple[int, ...]]


class DatasetPart(Settings):
    """Some clients of a data set, found by the names of their files.

    find: regular expression for the first channel's path, its groups are used below (`case` is needed);
    images: one template a channel; label: templates, the first that exists; more: regular expression for
    further masks of a case (BUSI has some), CASE standing for its name; client, name, group: templates;
    names: what a client is called instead; columns: groups that are carried along with a case; labels: the
    values in this part's files, where they differ from the preset's; grey: whether masks are pictures with
    values between; sequences: first frame of every video, for the group `frame`; run: frames a group, where
    the videos are not known; expects: an example path, for messages.
    """

    client: str
    find: str
    images: tuple[str, ...] = Field(min_length=1)
    label: tuple[str, ...] = Field(min_length=1)
    more: str | None = None
    name: str = "{case}"
    group: str | None = None
    names: dict[str, str] = Field(default_factory=dict)
    columns: tuple[str, ...] = ()
    labels: Values | None = None
    grey: bool = False
    sequences: tuple[int, ...] = ()
    run: int | None = Field(None, ge=1)
    expects: str

    @field_validator("find", "more")
    @classmethod
    def compiles(cls, value: str | None) -> str | None:
        if value is not None:
            re.compile(value)
        return value

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(ANYWHERE + self.find)


class DatasetPreset(Settings):
    """One data set (or a few that papers use together)."""

    name: str
    title: str
    modality: str
    dimensions: Literal[2, 3]
    cases: str
    cite: tuple[str, ...] = Field(min_length=1)
    licence: str
    get: tuple[str, ...] = Field(min_length=1)
    layout: str
    clients: str
    channels: tuple[str, ...] = ()
    labels: Values = Field(default_factory=dict)
    regions: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    reader: Literal["parts", "msd"] = "parts"
    folders: tuple[str, ...] = ()
    parts: tuple[DatasetPart, ...] = ()
    splits: SplitSettings = SplitSettings()
    partition: PartitionSettings = PartitionSettings()
    held_out: tuple[str, ...] = ()
    prepare: PrepareSettings = PrepareSettings()
    papers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @model_validator(mode="after")
    def makes_sense(self) -> Self:
        if (self.reader == "parts") != bool(self.parts):
            raise ValueError("parts are needed where the reader is parts, and only there")
        for part in self.parts:
            if len(part.images) not in (1, len(self.channels)):
                have = f"{part.client} has {len(part.images)} files"
                raise ValueError(f"{have} for {len(self.channels)} channels")
            if part.labels is not None and set(part.labels) != set(self.labels):
                raise ValueError(f"{part.client} has other classes than the preset")
        unknown = {name for names in self.regions.values() for name in names} - set(self.labels)
        if unknown:
            raise ValueError(f"regions name no class: {', '.join(sorted(unknown))}")
        return self

    @property
    def numbered_regions(self) -> dict[str, tuple[int, ...]]:
        """Regions by class number, as federation.yaml has them."""
        order = list(self.labels)
        return {name: tuple(order.index(c) + 1 for c in classes) for name, classes in self.regions.items()}

    def values_of(self, part: DatasetPart) -> Values:
        return self.labels if part.labels is None else part.labels

    @property
    def needs_labels(self) -> bool:
        """Whether `write_labels` makes a difference: grey masks, several a case, values that disagree."""
        return any(part.grey or part.more or part.labels is not None for part in self.parts)


def list_presets() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


@cache
def load_preset(name: str) -> DatasetPreset:
    """The preset of that name; an unknown one is answered with the nearest."""
    known = list_presets()
    if name not in known:
        raise ConfigError(f"'{name}' is not a data set.{suggest(name, known)} List all: wardround datasets")
    file = FOLDER / f"{name}.yaml"
    preset = DatasetPreset.read(read_yaml(file), f"{file}: ")
    if preset.name != name:
        raise ConfigError(f"{file}: name is '{preset.name}'; call it '{name}', as the file.")
    return preset


# The cases of a data set: files are found by its patterns, nothing is opened


@dataclass(frozen=True)
class FoundCase:
    """One case with all its masks (the first is the entry's label) and the part it belongs to."""

    entry: Entry
    masks: tuple[Path, ...]
    part: DatasetPart


@dataclass
class Trouble:
    """Cases left out or incomplete, by kind, for a few sentences."""

    unsafe: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)

    def sentences(self, preset: DatasetPreset) -> list[str]:
        said = {
            "hold a name that cannot be used; left out": self.unsafe,
            "lack a channel; left out": self.incomplete,
            "have no label": self.bare,
            "are there a second time; the first counts": self.twice,
        }
        return [f"{preset.name}: {len(n)} cases {what}: {join_names(n)}." for what, n in said.items() if n]


def read_preset(preset: DatasetPreset, root: Path, client: str | None = None) -> Listing:
    """The cases below a folder, as every reader gives them.

    client: the name all of them get. A case with several masks is left out here, as a listing has one label
    a case; `labels.write_labels` joins them.
    """
    if preset.reader == "msd":
        return from_msd(preset, root, client)
    cases, notes = find_cases(preset, root)
    several = [case.entry.name for case in cases if len(case.masks) > 1]
    if several:
        notes.append(
            f"{preset.name}: {len(several)} cases with several masks are left out: {join_names(several)}. "
            f"Join them with: wardround datasets labels {preset.name} FOLDER -o OUT"
        )
    single = [case.entry for case in cases if len(case.masks) <= 1]
    if client is not None:
        single = rename_client(single, check_name(client, str(root)))
    return Listing(
        f"preset:{preset.name}",
        tuple(sorted(single, key=lambda entry: (entry.client, entry.name))),
        preset.channels,
        join_labels(preset, [case.part for case in cases]),
        tuple(notes),
        preset.numbered_regions,
    )


def find_cases(preset: DatasetPreset, root: Path) -> tuple[list[FoundCase], list[str]]:
    """All cases with all their masks, and notes on how they were read."""
    root = Path(root).resolve()
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; give the one that {preset.title} was unpacked into.")
    files = walk(root)
    trouble = Trouble()
    found: dict[tuple[str, str], FoundCase] = {}
    absent = []
    for part in preset.parts:
        cases = find_part_cases(part, root, files, trouble)
        if not cases:
            absent.append(part)
        for case in cases:
            key = (case.entry.client, case.entry.name)
            if key in found:
                trouble.twice.append(case.entry.name)
            found.setdefault(key, case)
    if not found:
        expected = "; ".join(dict.fromkeys(part.expects for part in preset.parts))
        raise DataError(
            f"{root} does not hold {preset.title} as it is published. Expected: {expected}. "
            f"See: wardround datasets show {preset.name}"
        )
    notes = [*preset.notes, *trouble.sentences(preset), *note_missing_parts(preset, absent, found)]
    return list(found.values()), notes


def note_missing_parts(
    preset: DatasetPreset, absent: Sequence[DatasetPart], found: Mapping[tuple[str, str], FoundCase]
) -> list[str]:
    """Clients of which nothing is there; several parts may be ways to lay out one client."""
    here = {client for client, _ in found}
    lacking = {part.client: part.expects for part in absent if "{" not in part.client}
    return [
        f"{preset.name}: nothing of '{client}' is here (expected: {expects})."
        for client, expects in lacking.items()
        if client not in here
    ]


def walk(root: Path) -> list[str]:
    """Every file below a folder, relative and sorted; folders behind links once, hidden names never."""
    files: list[str] = []
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        where = Path(folder).stat()
        place = os.path.relpath(folder, root).replace(os.sep, "/")
        if (where.st_dev, where.st_ino) in seen or place.count("/") >= DEEPEST:
            folders.clear()
            continue
        seen.add((where.st_dev, where.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        prefix = "" if place == "." else f"{place}/"
        files += [prefix + name for name in names if not name.startswith(".")]
    return sorted(files)


def find_part_cases(part: DatasetPart, root: Path, files: Sequence[str], trouble: Trouble) -> list[FoundCase]:
    """The cases of one part."""
    known = set(files)
    pattern = part.pattern
    cases = []
    for file in files:
        match = pattern.fullmatch(file)
        if match is None:
            continue
        words = {name: value or "" for name, value in match.groupdict().items()}
        entry = make_entry(part, words, known)
        if not (is_safe(entry.client) and is_safe(entry.name)):
            trouble.unsafe.append(file)
        elif any(str(path) not in known for path in entry.images):
            trouble.incomplete.append(entry.name)
        else:
            masks = () if entry.label is None else (entry.label, *find_more_masks(part, words, files))
            if not masks:
                trouble.bare.append(entry.name)
            cases.append(FoundCase(resolve_paths(entry, root), tuple(root / mask for mask in masks), part))
    return cases


def make_entry(part: DatasetPart, words: Mapping[str, str], known: set[str]) -> Entry:
    """A case from its file names, paths still relative."""
    at = words["at"]
    fixed = [template for template in part.label if at + fill(template, words) in known]
    label = Path(at + fill(fixed[0], words)) if fixed else None
    said = fill(part.client, words)
    client = part.names.get(said, said)
    columns = {name: words[name] for name in part.columns if words.get(name)}
    return Entry(
        client,
        fill(part.name, words),
        tuple(Path(at + fill(template, words)) for template in part.images),
        label,
        name_group(part, words, client),
        columns=columns,
    )


def fill(template: str, words: Mapping[str, str]) -> str:
    return template.format_map(words)


def name_group(part: DatasetPart, words: Mapping[str, str], client: str) -> str:
    """The patient or video; names that only count within a client carry its name."""
    if part.group is not None:
        return fill(part.group, words)
    if part.sequences:
        return f"{client}_video{bisect_right(part.sequences, int(words['frame'])):02d}"
    if part.run is not None:
        return f"{client}_run{(int(words['frame']) - 1) // part.run + 1:02d}"
    return f"{client}_{words.get('patient') or fill(part.name, words)}"


def find_more_masks(part: DatasetPart, words: Mapping[str, str], files: Sequence[str]) -> list[Path]:
    """The other masks of a case."""
    if part.more is None:
        return []
    wanted = re.compile(re.escape(words["at"]) + part.more.replace("CASE", re.escape(words["case"])))
    return [Path(file) for file in files if wanted.fullmatch(file)]


def resolve_paths(entry: Entry, root: Path) -> Entry:
    return replace(
        entry,
        images=tuple(root / path for path in entry.images),
        label=None if entry.label is None else root / entry.label,
    )


def rename_client(cases: Sequence[Entry], client: str) -> list[Entry]:
    """All cases as one client's; names that then repeat carry their centre's in front."""
    plain = len({entry.name for entry in cases}) == len(cases)
    return [
        replace(entry, client=client, name=entry.name if plain else f"{entry.client}_{entry.name}")
        for entry in cases
    ]


def join_labels(preset: DatasetPreset, parts: Sequence[DatasetPart]) -> Values:
    """One map for all parts that are here; where a value means two classes, the way out is named."""
    meaning: dict[int, str] = {}
    joined: dict[str, set[int]] = {name: set() for name in preset.labels}
    for part in (part for part in preset.parts if any(part is other for other in parts)):
        for name, own in preset.values_of(part).items():
            for value in own:
                if meaning.setdefault(value, name) != name:
                    raise DataError(
                        f"{preset.name}: label value {value} is '{meaning[value]}' in some of its sets and "
                        f"'{name}' in others. Write labels of one meaning first: "
                        f"wardround datasets labels {preset.name} FOLDER -o OUT"
                    )
                joined[name].add(value)
    return {name: tuple(sorted(values)) for name, values in joined.items()}


# Medical Segmentation Decathlon


def from_msd(preset: DatasetPreset, root: Path, client: str | None) -> Listing:
    """A task in the Decathlon's layout, by the preset's names where it has some."""
    place = find_task_folder(preset, Path(root))
    listing = msd.read(place, client)
    return replace(
        listing,
        reader=f"preset:{preset.name}",
        channels=preset.channels or listing.channels,
        labels=preset.labels or listing.labels,
        notes=(*preset.notes, *listing.notes),
        regions=preset.numbered_regions or listing.regions,
    )


def find_task_folder(preset: DatasetPreset, root: Path) -> Path:
    """The folder with dataset.json: the root, or the task's folder in it."""
    places = [root, *(root / name for name in preset.folders), *(root / n / n for n in preset.folders)]
    here = next((place for place in places if (place / "dataset.json").is_file()), None)
    if here is None:
        wanted = " or ".join(preset.folders) or "the folder of a task"
        raise DataError(
            f"{root} has no dataset.json; give {wanted}, as unpacked. "
            f"See: wardround datasets show {preset.name}"
        )
    return here
