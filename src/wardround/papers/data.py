"""The data of a preset: from folders to a federation.yaml for each of its federations.

    published sets, as their cards lay them out    the paper's clients, channel, classes
    any other folder, or a federation.yaml         in their place, and the notes say so
    synthetic                                      the layout of the cards, made here

Each federation becomes a list of cases with the paper's split, partition and preparation:

    <out>/<federation>.csv  .yaml    .json (what it is made of)    .wardround-cache
    <out>/labels-<set>/              where masks had to be joined or cut (`wardround datasets labels`)
    <out>/channels-<set>/            one channel of files that hold several
    <out>/<federation>-slices/       where a paper cuts volumes for a 2D network
"""

from __future__ import annotations

import csv
import io
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import nibabel

from wardround.data import datasets, federation_file
from wardround.data.datasets.preset import DatasetPreset, load_preset, read_preset, rename_client
from wardround.data.federation_file import (
    FederationFile,
    PartitionSettings,
    PrepareSettings,
    SliceSettings,
    Source,
    SplitSettings,
)
from wardround.data.listing import Entry, Labels
from wardround.data.proposing.proposal import propose
from wardround.data.readers.image_files import read_image
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.data.slices.cutting import FILE, cut
from wardround.data.sources import list_cases
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, write_text
from wardround.papers.origin import check_origin, note_origin
from wardround.papers.presets import PaperFederation, PaperPreset, PaperSource, Partition
from wardround.papers.scaling import Scale, limit, limit_clients
from wardround.papers.synthetic import write_dataset
from wardround.text import format_count, format_size

log = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
SEED = 42  # of splits and of dealing cases
MANY_VOXELS = 10**9  # more take longer than a few minutes
FEWEST_LETTERS = 3  # of a client's name that is found inside another


@dataclass(frozen=True)
class FoundData:
    """The cases of a federation, their classes and channels, and what a reader must know of them."""

    entries: Sequence[Entry]
    labels: Labels
    regions: Mapping[str, tuple[int, ...]]
    channels: tuple[str, ...]
    dimensions: int
    notes: tuple[str, ...] = ()
    size: tuple[int, ...] | None = None  # the card's own, where the paper gives none


@dataclass(frozen=True)
class PaperData:
    """One federation, and how it differs from the paper's.

    path: its federation.yaml, None for phantoms; cases: of every client, before they are dealt.
    """

    path: Path | None
    size: tuple[int, ...] | None
    notes: tuple[str, ...] = ()
    cases: Mapping[str, int] = field(default_factory=dict)


def prepare_data(
    preset: PaperPreset, names: Sequence[str], places: Sequence[str], out: Path, scale: Scale
) -> tuple[dict[str, PaperData], list[str]]:
    """The federations that can be made from the places given, and notes: why others cannot be.

    names: which federations; places: folders, files federation.yaml, or `synthetic`.
    """
    for place in places:
        if place != SYNTHETIC and not (place and Path(place).exists()):
            raise ConfigError(f"--data: '{place}' does not exist. Give a folder, or: --data {SYNTHETIC}")
    out = out.absolute()
    given = [place if place == SYNTHETIC else str(Path(place).absolute()) for place in places]
    for name in names:
        check_origin(out, name, given, scale)
    out.mkdir(parents=True, exist_ok=True)
    folders = [make_synthetic(preset, out, scale) if place == SYNTHETIC else Path(place) for place in places]
    made: dict[str, PaperData] = {}
    notes = []
    if SYNTHETIC in places:
        notes = ["Data: synthetic, in the layout of the paper's sets. Printed numbers are not comparable."]
    sources = {name: list_sources(preset.datasets[name]) for name in names}
    stand_in = all(own == sources[names[0]] for own in sources.values())
    read = cache(read_own)
    for name in names:
        try:
            others = {key for own in sources.values() if own != sources[name] for _, key in own}
            found = find_data(preset.datasets[name], folders, out, read, stand_in=stand_in, shared=others)
            if SYNTHETIC not in places:  # those are made as few as wanted
                found = replace(found, entries=limit_clients(found.entries, scale))
            made[name] = write_federation(name, preset.datasets[name], found, out, scale)
            note_origin(out, name, given, scale)
        except DataError as error:
            notes.append(f"Not run: {name} ({str(error).rstrip('.')}).")
    if not made:
        if not stand_in:
            notes.append(f"Your data in place of one of them: --set datasets='{names[0]}'.")
        raise DataError(" ".join(notes))
    return made, notes


def make_synthetic(preset: PaperPreset, out: Path, scale: Scale) -> Path:
    """All sets of a preset in the layout of their cards; made once, so that a later call may take others."""
    folder = out / SYNTHETIC
    if folder.exists():
        return folder
    sets: dict[str, dict[str, int]] = {}
    sides: dict[str, tuple[int, ...]] = {}
    for federation in preset.datasets.values():
        for source in federation.clients.values():
            count = 12 if federation.slices is not None else source.size or 100  # of slices: volumes
            sets.setdefault(source.dataset, {})[source.key] = scale.count("cases", count)
            size = federation.size or load_preset(source.dataset).prepare.size or ()
            sides[source.dataset] = tuple(side + 8 for side in scale.size(size))
    cases = sum(sum(clients.values()) for clients in sets.values())
    voxels = sum(sum(clients.values()) * math.prod(sides[dataset]) for dataset, clients in sets.items())
    if voxels > MANY_VOXELS:
        log.warning(
            "%s of synthetic data are made, which takes long. To see that a table runs: --scale 0.01",
            format_count(cases, "case"),
        )
    partial = out / f"partial-{SYNTHETIC}"
    shutil.rmtree(partial, ignore_errors=True)
    for dataset, clients in sets.items():
        write_dataset(load_preset(dataset), partial, clients, sides[dataset])
    return partial.rename(folder)


# Finding the cases


def find_data(
    federation: PaperFederation,
    folders: Sequence[Path],
    out: Path,
    read: Callable[[Path], FoundData],
    *,
    stand_in: bool,
    shared: Collection[str],
) -> FoundData:
    """The published sets of a federation, else other data in their place.

    read: reads a folder that is no published set; stand_in: whether data whose clients are none of the
    paper's may take their place; shared: clients of federations of other sets, as of T1 and T2: such a name
    does not say which of them is meant.
    """
    troubles: dict[str, str] = {}
    found: dict[str, FoundData] = {}
    for dataset in dict.fromkeys(source.dataset for source in federation.clients.values()):
        for folder in folders:
            try:
                found[dataset] = read_card(load_preset(dataset), folder, out)
                break
            except DataError as error:
                troubles[dataset] = str(error)
    if found:
        return join_sets(federation, found)
    for folder in folders:
        own = read(folder)
        clients = match_clients(federation, sorted({entry.client for entry in own.entries}))
        whole = stand_in and len(folders) == 1
        if (clients and not {*clients.values()} & set(shared)) or whole:
            return stand_in_for(federation, own, clients, all_clients=whole and len(clients) < 2)
    raise DataError(next(iter(troubles.values())))


def list_sources(federation: PaperFederation) -> list[tuple[str, str]]:
    return [(source.dataset, source.key) for source in federation.clients.values()]


def read_card(card: DatasetPreset, folder: Path, out: Path) -> FoundData:
    """A published set below a folder, its masks joined or cut first where that is needed."""
    if folder.is_file():
        raise DataError(f"{folder} is a file, not the folder of {card.title}.")
    if card.needs_labels:
        written = out / f"labels-{card.name}"
        if not written.exists():
            datasets.write_labels(card.name, folder, written)
        listing = datasets.read_written_labels(card, written)
    else:
        listing = read_preset(card, folder)
    entries = [entry for entry in listing.entries if entry.label is not None]
    places = listing.labels, listing.regions, card.channels, card.dimensions
    return FoundData(entries, *places, size=card.prepare.size)


def read_own(place: Path) -> FoundData:
    """The cases of a federation.yaml, or of a folder or list that `wardround data init` reads."""
    if place.suffix in (".yaml", ".yml"):
        file, base = federation_file.load(place), place.parent
    else:
        file, base = propose([place], watch=log.info).file, Path()
    listing = list_cases(file, base)
    entries = [e for e in listing.entries if e.label is not None and e.client not in file.held_out]
    labels = dict(file.labels) or dict(listing.labels)
    regions = dict(file.regions) or dict(listing.regions)
    if not entries:
        raise DataError(f"{place} has no case with a label.")
    dimensions = len(read_image(entries[0].images).spatial)
    channels = file.channels or tuple(listing.channels)
    notes = [f"Data: {place.resolve().name}, in place of the paper's."]
    if file.held_out:
        notes.append(f"Left out, as held out: {', '.join(sorted(file.held_out))}.")
    return FoundData(entries, labels, regions, channels, dimensions, tuple(notes), file.prepare.size)


def join_sets(federation: PaperFederation, found: Mapping[str, FoundData]) -> FoundData:
    """The paper's clients, each from its set."""
    entries: list[Entry] = []
    notes = []
    for label, source in federation.clients.items():
        data = found.get(source.dataset)
        own = [] if data is None else choose_entries(source, data)
        if not own:
            notes.append(f"Without {label}: its cases are not there.")
        entries += rename_client(own, source.key)
    first = next(iter(found.values()))
    channels = first.channels[:1] if federation.channels == 1 else first.channels
    return replace(
        first,
        entries=entries,
        channels=channels,
        labels=join_classes(federation, found.values()),
        regions={} if federation.one_class else first.regions,
        notes=tuple(notes),
    )


def choose_entries(source: PaperSource, data: FoundData) -> list[Entry]:
    """The cases of one client, with the one channel the paper uses."""
    own = [entry for entry in data.entries if source.client in (None, entry.client)]
    if source.channel is None:
        return own
    place = data.channels.index(source.channel)
    return [
        replace(entry, images=(entry.images[place],))
        if len(entry.images) > 1
        else replace(entry, columns={**entry.columns, "channel": str(place)})
        for entry in own
    ]


def join_classes(federation: PaperFederation, found: Iterable[FoundData]) -> Labels:
    """The classes of the sets, or one of all their values."""
    sets = list(found)
    if federation.one_class is None:
        return sets[0].labels
    values = {value for data in sets for own in data.labels.values() for value in own}
    return {federation.one_class: tuple(sorted(values))}


def match_clients(federation: PaperFederation, names: Sequence[str]) -> dict[str, str]:
    """Our client -> what the paper's is called in a run; a name may be part of another (CVC_ColonDB)."""
    matched = {}
    for label, source in federation.clients.items():
        keys = {squeeze(label), squeeze(source.key)}
        alike = [name for name in names if squeeze(name) in keys]
        if not alike:
            alike = [n for n in names if any(k in squeeze(n) for k in keys if len(k) >= FEWEST_LETTERS)]
        if len(alike) == 1 and alike[0] not in matched:
            matched[alike[0]] = source.key
    return matched


def squeeze(name: str) -> str:
    """
    >>> squeeze("CVC-ColonDB")
    'cvccolondb'
    """
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def stand_in_for(
    federation: PaperFederation, own: FoundData, clients: Mapping[str, str], *, all_clients: bool
) -> FoundData:
    """Other data: clients that are the paper's take their names.

    all_clients: keep the others too, as where one client or none is the paper's.
    """
    notes = list(own.notes)
    others = [] if all_clients else sorted({entry.client for entry in own.entries} - set(clients))
    notes += [f"Left out, as none of the paper's clients: {', '.join(others)}."] if others else []
    entries = [
        replace(e, client=clients.get(e.client, e.client)) for e in own.entries if e.client not in others
    ]
    read = [f"{old} as {new}" for old, new in clients.items() if old != new]
    notes += [f"Clients: {', '.join(read)}."] if read else []
    labels, regions = own.labels, own.regions
    if federation.one_class is not None:
        labels, regions = join_classes(federation, [own]), {}
    notes.append(f"Classes: {', '.join(labels)}; the paper's: {federation.labels}.")
    if own.channels and len(own.channels) != federation.channels:
        notes.append(f"{len(own.channels)} channels instead of {federation.channels}.")
    count = len({entry.client for entry in entries})
    if federation.partition is None and count != len(federation.clients):
        notes.append(f"{format_count(count, 'client')} instead of {len(federation.clients)}.")
    return replace(own, entries=entries, labels=labels, regions=regions, notes=tuple(notes))


# Writing the federation


def write_federation(
    name: str, federation: PaperFederation, found: FoundData, out: Path, scale: Scale
) -> PaperData:
    """The list and the federation.yaml, with the paper's split, partition and preparation."""
    cuts = federation.slices if found.dimensions == 3 else None
    if found.dimensions != federation.dimensions and cuts is None:
        hint = "wardround data slices cuts volumes" if found.dimensions == 3 else "choose another table"
        raise DataError(
            f"its images are {federation.dimensions}D, those given are {found.dimensions}D; {hint}"
        )
    entries = list(found.entries)
    notes = [*found.notes, *count_cases(federation, entries)]
    partition = PartitionSettings(seed=SEED)
    if federation.partition is not None:
        entries, partition = plan_partition(federation.partition, entries, scale, notes)
    entries = [choose_channel(entry, out) for entry in entries]
    stem = file_name(name)
    list_file = out / f"{stem}.csv"
    write_text(list_file, format_list(entries, by_case=federation.split_by == "case"))
    notes.append(f"Splits are drawn at random, one for each seed. The paper's: {federation.split_rule}.")
    if federation.split_by == "case":
        notes.append(
            "Cases are drawn one by one, as in the paper; one patient or video may be in two splits."
        )
    size = federation.size or found.size
    scaled = None if size is None else scale.size(size)
    prepare = PrepareSettings(size=scaled, normalise=federation.normalise)
    file = FederationFile(
        sources=(Source(path=list_file, reader="table"),),
        channels=found.channels,
        labels=dict(found.labels),
        regions=dict(found.regions) or {key: (n,) for n, key in enumerate(found.labels, start=1)},
        splits=SplitSettings(by="repeated", ratios=federation.split, seed=SEED),
        partition=partition,
        prepare=prepare if cuts is None else PrepareSettings(),
    )
    path = out / f"{stem}.yaml"
    federation_file.write(file, path, overwrite=True)
    if cuts is not None:
        path = cut_slices(path, out / f"{stem}-slices", cuts)
    if federation.size is None and scaled is not None:
        notes.append(f"The paper gives no image size; {format_size(scaled)} here.")
    RealData(path, DataSettings(federation=path))  # refuses what cannot be dealt to so many clients
    return PaperData(path, scaled, tuple(notes), Counter(entry.client for entry in found.entries))


def count_cases(federation: PaperFederation, entries: Sequence[Entry]) -> list[str]:
    """Which of the paper's clients have another number of cases here."""
    if federation.slices is not None:  # the paper counts slices
        return []
    have = Counter(entry.client for entry in entries)
    other = [
        f"{label} {have[source.key]} instead of {source.size}"
        for label, source in federation.clients.items()
        if source.size is not None and have[source.key] not in (0, source.size)
    ]
    return [f"Cases: {', '.join(other)}."] if other else []


def cut_slices(volumes: Path, target: Path, settings: SliceSettings) -> Path:
    """The federation.yaml of the slices; cut once."""
    if not target.exists():
        cut(volumes, target, along=settings.along, clip=settings.clip)
    return target / FILE


def plan_partition(
    rule: Partition, entries: list[Entry], scale: Scale, notes: list[str]
) -> tuple[list[Entry], PartitionSettings]:
    """The cases that are dealt, and to how many clients: as many as printed, or as the cases make."""
    if rule.clients is not None:
        clients = scale.count("clients", rule.clients)
        if clients != rule.clients:
            notes.append(f"{rule.clients} clients are {clients} here.")
    else:
        each = scale.count("cases", rule.cases or len(entries))
        clients = len(entries) // each
        if clients < 2:
            clients, each = 2, len(entries) // 2
            notes.append(f"{len(entries)} cases make two clients of {each}, not of {rule.cases}.")
        entries = limit(entries, clients * each)
    return entries, PartitionSettings(kind="iid", clients=clients, seed=SEED)


def choose_channel(entry: Entry, out: Path) -> Entry:
    """The case with one channel of a file that holds several, written once."""
    place = entry.columns.get("channel")
    if place is None:
        return entry
    target = out / f"channels-{file_name(entry.client)}" / f"{file_name(entry.name)}.nii.gz"
    if not target.exists():
        tools: Any = nibabel
        image = tools.load(entry.images[0])
        if len(image.shape) < 4:
            return entry
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"partial-{target.name}")
        tools.save(tools.Nifti1Image(image.dataobj[..., int(place)], image.affine), partial)
        partial.replace(target)
    return replace(entry, images=(target,))


def format_list(entries: Sequence[Entry], *, by_case: bool) -> str:
    """The list of cases, as the reader `table` takes it; by_case: every case is a patient of its own."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("image", "label", "case", "patient", "centre"))
    for entry in entries:
        images = ";".join(str(path.absolute()) for path in entry.images)
        label = "" if entry.label is None else entry.label.absolute()
        group = entry.name if by_case else entry.group
        table.writerow((images, label, entry.name, group, entry.client))
    return text.getvalue()
