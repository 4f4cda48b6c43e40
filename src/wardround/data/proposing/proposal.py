"""Proposal: inspect folders and propose a federation.yaml (`wardround data init`).

    proposal = propose([Path("north"), Path("south")])
    describe(proposal)                          what was found and chosen, and why
    write(proposal.file, Path("federation.yaml"))

Every choice is stated with its reason and can be edited.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from wardround.data import federation_file
from wardround.data.checking.check import check_labels
from wardround.data.checking.cross_case import MOST_STRETCH, measure_stretch
from wardround.data.federation_file import FederationFile, PartitionSettings, PrepareSettings, SplitSettings
from wardround.data.listing import FOLD, Entry, Listing
from wardround.data.preparing.grid import round_to_multiple
from wardround.data.proposing.codings import code_colours, code_masks
from wardround.data.proposing.inspection import Inspection, inspect_files
from wardround.data.proposing.label_maps import (
    guess_annotates,
    join_by_name,
    map_values,
    note_unnamed,
    place_again,
    spell_as,
    zip_all,
)
from wardround.data.readers import detect, table
from wardround.data.readers.common import is_safe, join_names
from wardround.data.sources import join_listings, never_trains, read_source
from wardround.errors import DataError
from wardround.text import format_count, format_size

FEWEST_TO_SPLIT = 3  # patients: one each for training, validation and test
MOST_WARNINGS = 6
LARGEST_PICTURE = 512
LARGEST_VOLUME = 128**3  # voxels; above it, patches

Labels = dict[str, tuple[int, ...]]
GridProposal = tuple[tuple[int, ...] | None, tuple[float, ...] | None, str]
Sources = list[federation_file.Source]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A federation.yaml, the reader recognised for each folder, a sentence on every choice, and what a check
    of the labels that were opened found.

    proposed: annotates and channels_of, what each client seems to annotate and to have, where that is not
    everything, and unlabelled, clients with images that have no label; for the user to confirm.
    """

    file: FederationFile
    listing: Listing
    recognised: tuple[str, ...]
    choices: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    proposed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """What to look at before training: guesses, what the readers left out, and warnings."""
        told = (*self.guesses, *self.listing.notes, *self.warnings)
        return list(dict.fromkeys(told))

    @property
    def guesses(self) -> list[str]:
        """Choices that the files suggest but do not say."""
        told = (*self.recognised, *self.choices, *self.listing.notes)
        return [said for said in told if "a guess" in said]


def propose(
    folders: Sequence[Path],
    *,
    columns: Mapping[str, str] | None = None,
    watch: Callable[[str], None] = log.info,
) -> Proposal:
    """Read folders, inspect a few files of each client, and choose settings.

    columns: of lists, what is needed -> the column that has it; watch: called with each step.
    """
    if not folders:
        raise DataError("Give the folders to inspect: wardround data init FOLDER... -o federation.yaml")
    places = [Path(folder).absolute() for folder in folders]
    if len({place.resolve() for place in places}) < len(places):
        raise DataError("A folder is given twice; give each once.")
    recognised = []
    sources = []
    for place in places:
        reader, why = detect(place)
        own = (columns or table.find_guess(place)) if reader == "table" else None
        why = f"{place}: {table.describe_list(place, columns)}." if own and columns else why
        recognised.append(f"{why} Reader: {reader}.")
        sources.append(federation_file.Source(path=place, reader=reader, columns=own))
    if columns and not any(source.columns for source in sources):
        raise DataError("Columns are those of a list (CSV, TSV, JSON); none is given.")
    listings = [read_source(source, Path()) for source in sources]
    sources, listings = name_clients(sources, listings)
    said: list[str] = []
    sources, listings = code_colours(sources, listings, said)
    sources, listings = code_masks(sources, listings, said)
    common = join_by_name(listings)
    if common is not None:
        sources = [
            s.model_copy(update={"labels": spell_as(own.labels, common) or None})
            for s, own in zip_all(sources, listings)
        ]
        listings = [read_source(source, Path()) for source in sources]
        said.append(
            f"Data sets number or spell their classes differently. They are joined by name "
            f"({join_names(common)}), each source with its own labels."
        )
    listing = join_listings(listings, labels=common)
    note_unnamed(listings, said)
    found = inspect_files(listing, watch)
    if not listing.labels:
        sources, listing = map_values(sources, listings, listing, found.labelled, said)
        found = replace(found, labelled=place_again(found.labelled, listing))
    return choose(sources, listing, found, [*recognised, *said])


def name_clients(sources: Sources, listings: list[Listing]) -> tuple[Sources, list[Listing]]:
    """Folders that are one client each get their folder's name, made unique where names repeat."""
    single = [len(listing.clients) == 1 for listing in listings]
    if len(sources) == 1 or not any(single):
        return sources, listings
    names = [listing.clients[0] if one else "" for one, listing in zip(single, listings, strict=True)]
    counts = Counter(name for name in names if name)
    taken = {client for listing in listings if len(listing.clients) != 1 for client in listing.clients}
    named_sources = []
    for source, name in zip(sources, names, strict=True):
        longer = f"{source.path.parent.name}-{source.path.name}"
        repeated = counts[name] > 1 or name in taken
        client = longer if name and repeated and is_safe(longer) else name
        named_sources.append(source.model_copy(update={"client": client}) if client else source)
    return named_sources, [read_source(source, Path()) for source in named_sources]


def choose(sources: Sources, listing: Listing, found: Inspection, recognised: Sequence[str]) -> Proposal:
    """Choose every setting, each with a sentence that says why."""
    choices: list[str] = []
    channels = choose_channels(listing, found, choices)
    labels = choose_labels(listing, found, choices)
    held_out = choose_held_out(listing, choices)
    training = [name for name in listing.clients if name not in held_out]
    partition = choose_partition(listing, training, choices)
    prepare = choose_prepare(found, channels, choices)
    splits = choose_splits(listing, choices)
    if found.notes:
        files = format_count(len(found.notes), "file")
        choices.append(f"{files} could not be used; the first: {found.notes[0]}")
    file = FederationFile(
        sources=tuple(sources),
        clients=tuple(training) if partition.kind == "natural" else None,
        held_out=tuple(held_out),
        channels=channels,
        labels=labels,
        regions=dict(listing.regions) or {name: (number,) for number, name in enumerate(labels, start=1)},
        ignore=listing.ignore,
        splits=splits,
        partition=partition,
        prepare=prepare,
    )
    warnings = check_labels(found.labelled, listing, file).sentences(MOST_WARNINGS)
    annotates = guess_annotates(found.labelled, labels)
    if annotates:
        choices.append(
            "Clients hold different classes. If the others were not outlined there, take the # from the line "
            "annotates; otherwise they are taken for background, and train asks for labels_differ: true."
        )
    proposed = {
        "annotates": annotates,
        "channels_of": guess_channels(found, channels, choices),
        "unlabelled": find_unlabelled(listing, training, choices) if partition.kind == "natural" else [],
    }
    return Proposal(file, listing, tuple(recognised), tuple(choices), tuple(warnings), proposed)


def find_unlabelled(listing: Listing, training: Sequence[str], choices: list[str]) -> list[str]:
    """Clients with images that have no label: these are left out, unless the user confirms them."""
    found = {name: [entry.label is None for entry in listing.of(name)] for name in training}
    counts = [f"{name} ({sum(bare)} of {len(bare)})" for name, bare in found.items() if any(bare)]
    if counts:
        choices.append(
            f"Images without a label: {join_names(counts, 20)}. They are left out. To train on them without "
            "labels, take the # from the line unlabelled."
        )
    return [name for name, bare in found.items() if any(bare)]


def choose_channels(listing: Listing, found: Inspection, choices: list[str]) -> tuple[str, ...]:
    count = found.channels
    if found.is_named:
        return listing.channels
    if listing.channels:
        said = f"The data set names {len(listing.channels)} channels, its images have {count}; "
        choices.append(f"{said}the images are right.")
    if found.pictures and count == 3:
        return ("red", "green", "blue")
    return ("grey",) if found.pictures and count == 1 else tuple(f"channel_{n}" for n in range(count))


def guess_channels(found: Inspection, channels: Sequence[str], choices: list[str]) -> dict[str, list[str]]:
    """The channels of clients whose images have fewer than others, where no name says which these are."""
    if found.is_named or found.pictures:
        return {}
    few = {client: count for client, count in found.counts.items() if count < len(channels)}
    if few:
        told = join_names((f"{client} {count}" for client, count in few.items()), 8)
        choices.append(
            f"Images have {len(channels)} channels, but fewer at some clients ({told}). Say under "
            "channels_of which these are, in the order of the files, and take the # away; what is written "
            "there is a guess. Until then these clients are left out."
        )
    return {client: list(channels[:count]) for client, count in few.items()}


def choose_labels(listing: Listing, found: Inspection, choices: list[str]) -> Labels:
    """The data set's own names, or class_1, class_2 ... for the values seen in the labels."""
    if listing.labels:
        maps = [listing.labels, *(entry.labels for entry in listing.entries if entry.labels is not None)]
        known = {value for own in maps for values in own.values() for value in values}
        other = sorted(set(found.values) - known - {0} - set(listing.ignore))
        if other:
            names = join_names(map(str, other))
            choices.append(f"Labels hold values the data set does not name: {names}; background.")
        if all(name == f"class_{n}" for n, name in enumerate(listing.labels, start=1)):
            choices.append("Give classes their names under labels, regions and the labels of each source.")
        return dict(listing.labels)
    values = [value for value in found.values if value > 0]
    if not values and not any(entry.label for entry in listing.entries):
        raise DataError(" ".join(["No image has a label.", *listing.notes[:2]]))
    if not found.labelled and found.notes:
        raise DataError(f"None of the labels that were opened can be used. {found.notes[0]}")
    if not values:
        first = " ".join(found.notes[:1])
        raise DataError(
            "The labels that were opened hold no class values; store 0 for background and 1, 2 "
            f"... for classes. {first}".strip()
        )
    labels: Labels = {f"class_{number}": (value,) for number, value in enumerate(values, start=1)}
    choices.append(
        f"Labels hold the values {join_names(map(str, values), 10)} besides background: "
        f"{join_names(labels, 10)}. Give them their names under labels and regions."
    )
    return labels


def choose_held_out(listing: Listing, choices: list[str]) -> list[str]:
    """Clients that cannot train: all cases are fixed for testing, or there are fewer than three patients."""
    few = {name: count_patients(listing.of(name)) for name in listing.clients}
    held = [
        name
        for name in listing.clients
        if never_trains(listing.of(name))
        or (0 < few[name] < FEWEST_TO_SPLIT and None in {entry.split for entry in listing.of(name)})
    ]
    if len(held) == len(listing.clients):
        return []
    for name in held:
        choices.append(
            f"Client '{name}' has {format_count(few[name], 'patient')} and cannot train; it is held "
            "out for testing."
        )
    return held


def count_patients(entries: Sequence[Entry]) -> int:
    return len({entry.group for entry in entries if entry.label is not None})


def choose_splits(listing: Listing, choices: list[str]) -> SplitSettings:
    fixed = sum(entry.split is not None for entry in listing.entries)
    total = len(listing.entries)
    folds = {entry.columns.get(FOLD, "") for entry in listing.entries} - {""}
    if folds:
        choices.append(
            f"splits_final.json has {len(folds)} folds, which are kept: splits.fold chooses the one that is "
            "not trained on. It "
            + ("validates." if fixed else "is tested; validation cases are drawn from the rest.")
        )
        return SplitSettings(by="kfold", folds=max(2, *(int(fold) + 1 for fold in folds)))
    said = "Cases are drawn 70/10/20 for training, validation and test, by patient, with seed 42."
    if fixed == total:
        said = "The list says which cases are for training, validation and test; this is kept."
    elif fixed:
        said = f"The list fixes the split of {fixed} of {total} cases; "
        said += "the others are drawn 70/10/20 by patient."
    choices.append(said)
    return SplitSettings(by="column" if fixed else "ratios")


def choose_partition(listing: Listing, training: Sequence[str], choices: list[str]) -> PartitionSettings:
    """Natural clients; a lone one is split into up to four, so that there is a federation."""
    if len(training) > 1:
        return PartitionSettings()
    name = training[0]
    entries = listing.of(name)
    clients = min(4, count_patients(entries) // FEWEST_TO_SPLIT)
    if clients < 2:
        choices.append(f"There is one client, '{name}', too small to be split into several; it trains alone.")
        return PartitionSettings()
    alone = len(listing.clients) == 1
    found = "All cases are of one client," if alone else "Only one client has enough cases to train,"
    choices.append(
        f"{found} '{name}'. For a simulation {'they' if alone else 'its cases'} are distributed "
        f"at random to {clients} clients (partition: iid); report such results as artificially partitioned."
    )
    columns = find_client_columns(entries)
    if columns:
        first = next(iter(columns))
        kinds = join_names((f"{column} ({count} values)" for column, count in columns.items()), 6)
        choices.append(
            f"Columns that could make the clients instead: {kinds}. Write partition: "
            f"{{kind: column, column: {first}}}"
        )
    return PartitionSettings(kind="iid", clients=clients)


def find_client_columns(entries: Sequence[Entry]) -> dict[str, int]:
    """Text columns with a few values, each of several cases: natural ways to form clients."""
    found = {}
    for name in entries[0].columns:
        values = Counter(entry.columns.get(name, "") for entry in entries)
        in_words = "" not in values and not all(is_number(value) for value in values)
        if in_words and 2 <= len(values) <= 20 and min(values.values()) >= FEWEST_TO_SPLIT:
            found[name] = len(values)
    return found


def choose_prepare(found: Inspection, channels: Sequence[str], choices: list[str]) -> PrepareSettings:
    size, spacing, why = propose_grid(found)
    choices.append(why)
    if is_ct(found, channels):
        choices.append("Values are those of CT: the soft-tissue window (centre 40, width 400) is proposed.")
        return PrepareSettings(size=size, spacing=spacing, normalise="window", window=(40.0, 400.0))
    return PrepareSettings(size=size, spacing=spacing, normalise="zscore")


def describe(proposal: Proposal) -> list[str]:
    """What was found and chosen, the most important first."""
    file, listing = proposal.file, proposal.listing
    sizes = (f"{name} ({len(listing.of(name))})" for name in listing.clients)
    cases, clients = format_count(len(listing.entries), "case"), format_count(len(listing.clients), "client")
    found = f"Found {cases} of {clients}: {join_names(sizes, 20)}."
    images = f"Channels: {', '.join(file.channels)}. Classes: {', '.join(file.labels)}."
    return [*proposal.recognised, found, images, *proposal.choices, *listing.notes, *proposal.warnings]


# The grid of prepared cases


def propose_grid(found: Inspection) -> GridProposal:
    """Size, spacing, and a sentence that says why."""
    middle = np.median(np.asarray(found.shapes), axis=0)
    median = format_size(round(side) for side in middle)
    if found.dimensions == 2:
        return propose_picture_grid(found, median)
    if found.has_spacing:
        spacing = tuple(round(float(side), 4) for side in np.median(np.asarray(found.spacings), axis=0))
        how = f"resampled to their median spacing, {format_size(spacing)} mm"
        return None, spacing, f"Volumes are {how}; training takes patches."
    if np.prod(middle) > LARGEST_VOLUME:
        why = (
            f"Volumes of {median} voxels are large: they keep theirs, no spacing, and training takes patches."
        )
        return None, (1.0, 1.0, 1.0), why
    size = tuple(round_to_multiple(side) for side in middle)
    uneven = measure_stretch(np.asarray(found.shapes)) > MOST_STRETCH
    stretched = " Their proportions differ, so that some are stretched." if uneven else ""
    why = f"Volumes have no spacing and a median size of {median}: all become {format_size(size)}.{stretched}"
    return size, None, why


def propose_picture_grid(found: Inspection, median: str) -> GridProposal:
    """Pictures of one shape keep it; otherwise a square of the median short side."""
    shapes = np.asarray(found.shapes)
    sides = shapes[0] if len(set(found.shapes)) == 1 else np.repeat(np.median(shapes.min(axis=1)), 2)
    shrink = min(1.0, LARGEST_PICTURE / float(max(sides)))
    size = tuple(round_to_multiple(side * shrink) for side in sides)
    low, high = format_size(shapes.min(axis=0)), format_size(shapes.max(axis=0))
    uneven = measure_stretch(shapes) > MOST_STRETCH
    stretched = f" Their shapes differ ({low} to {high}), so that some are stretched." if uneven else ""
    why = f"Pictures have a median size of {median}: all become {format_size(size)}.{stretched}"
    return size, None, why


def is_ct(found: Inspection, channels: Sequence[str]) -> bool:
    """Whether values reach air in Hounsfield units, or the channel is called CT."""
    is_named = any(name.strip().upper() == "CT" for name in channels)
    return found.channels == 1 and (found.low <= -500 or is_named)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
