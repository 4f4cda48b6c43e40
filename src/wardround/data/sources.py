"""The cases a federation.yaml names: every source read by its reader, all of them joined, clients chosen.

list_cases(file, base)       all cases of the file, as a Listing
read_source(source, base)    the cases of one of its sources
join_listings(listings)      several listings as one, where channels and labels agree
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wardround.data import datasets
from wardround.data.channels import check_clients, join_channels, place_channels, rename_channels
from wardround.data.federation_file import FederationFile, Source
from wardround.data.headers import match_names, names_no_class, read_headers
from wardround.data.listing import Entry, LabelCoding, Labels, Listing
from wardround.data.readers import READERS, detect, table
from wardround.data.readers.common import check_name, join_names, note_names
from wardround.data.roles import NOT_HOSPITALS
from wardround.errors import ConfigError, DataError
from wardround.text import suggest

# All cases of a file


def list_cases(file: FederationFile, base: Path) -> Listing:
    """Every source read and joined, then the clients chosen; base: the folder of federation.yaml.

    Cases of held-out clients come with split test.
    """
    listings = read_sources(file, base)
    found = join_listings(listings, file.channels, file.labels)
    known = set(found.clients)
    for name in (*(file.clients or ()), *file.held_out, *file.unlabelled):
        if name not in known:
            raise ConfigError(
                f"federation.yaml names client '{name}', which has no cases.{suggest(name, known)} "
                f"There are: {join_names(sorted(known), 20)}."
            )
    check_client_names(found.clients)
    notes = list(found.notes)
    training = set(file.clients) if file.clients is not None else find_training_clients(file, found, notes)
    if not training:
        raise DataError("No client has training cases; mark some rows of the list with split train.")
    entries = [
        replace(entry, split="test") if entry.client in file.held_out else entry
        for entry in found.entries
        if entry.client in training or entry.client in file.held_out
    ]
    return replace(found, entries=tuple(entries), notes=tuple(notes))


def read_sources(file: FederationFile, base: Path) -> list[Listing]:
    """The cases of every source; masks of single classes whose values nobody wrote down are refused, since
    labels could name others than meant."""
    listings = [read_source(source, base) for source in file.sources]
    clients = sorted({client for own in listings for client in own.clients})
    for where, named in (("channels_of", file.channels_of), ("annotates", file.annotates)):
        check_clients(where, named, clients)
    for client, channels in file.channels_of.items():
        listings = [rename_channels(own, channels, client) for own in listings]
    for number, (source, own) in enumerate(zip(file.sources, listings, strict=True)):
        if file.labels and source.masks is None and any(entry.masks for entry in own.entries):
            names = ", ".join(f"{name}: {values[0]}" for name, values in own.labels.items())
            raise ConfigError(
                f"federation.yaml: every class of sources.{number} has mask files of its own. Say which "
                f"value each has, so that labels can name it: masks: {{{names}}}"
            )
    return listings


def check_client_names(clients: Sequence[str]) -> None:
    for name in clients:
        check_name(name, "federation.yaml")
        if name in NOT_HOSPITALS:
            raise DataError(
                f"A client cannot be called '{name}', which wardround uses itself; rename its folder."
            )


def find_training_clients(file: FederationFile, found: Listing, notes: list[str]) -> set[str]:
    """All clients but the held out and those whose list leaves nothing to train on."""
    clients = [name for name in found.clients if name not in file.held_out]
    if file.splits.by != "column":
        return set(clients)
    idle = [name for name in clients if never_trains(found.of(name))]
    if idle:
        notes.append(
            f"No training cases, so left out: {join_names(idle)}. To test on them, name them in held_out."
        )
    return set(clients) - set(idle)


def never_trains(entries: Sequence[Entry]) -> bool:
    """Whether the list fixes every case, and none for training."""
    return all(entry.split is not None and entry.split != "train" for entry in entries)


# One source


def read_source(source: Source, base: Path) -> Listing:
    """The cases of one source, its folder relative to `base`; clients as the source asks for them."""
    path = base / source.path
    of_preset = source.reader.startswith(datasets.PREFIX)
    if source.reader != "auto" and not of_preset:
        READERS.find(source.reader, "sources: reader")
    if not path.exists():
        raise DataError(f"{path} does not exist; correct its path under sources.")
    name = detect(path)[0] if source.reader == "auto" else source.reader
    folder = path.parent if path.name == "dataset.json" and name in ("msd", "nnunet") else path
    if of_preset:
        listing = datasets.read_dataset(name.removeprefix(datasets.PREFIX), folder, source.client)
    elif source.columns is not None:
        listing = table.read(folder, source.client, source.columns)
    else:
        listing = READERS[name].read(folder, source.client)
    if not listing.entries:
        raise DataError(" ".join([f"{path} has no cases.", *listing.notes]))
    if source.column is not None:
        listing = rename_by_column(listing, source.column, path)
    if source.client is not None:
        listing = rename_client(listing, check_name(source.client, str(path)))
    listing = code_labels(listing, source, path)
    listing = read_headers(listing)
    if source.channels is not None:
        listing = rename_channels(listing, source.channels)
    ordered = tuple(sorted(listing.entries, key=lambda entry: (entry.client, entry.name)))
    if source.labels is None:
        return replace(listing, entries=ordered)
    said = dict(source.labels)
    mapped = tuple(
        e if e.labels and not names_no_class(e, said) else replace(e, labels=said) for e in ordered
    )
    return replace(listing, entries=mapped, labels=dict(source.labels))


def code_labels(listing: Listing, source: Source, path: Path) -> Listing:
    """The cases with what the colours, or the names of the mask files, of their source mean."""
    found = sorted({name for entry in listing.entries for name in entry.masks})
    if source.masks is not None and not found:
        raise ConfigError(f"{path} has no masks of single classes, but its source names some under masks.")
    if not found and source.colours is None:
        return listing
    values = source.masks or {name: number for number, name in enumerate(found, start=1)}
    notes = [
        f"{path}: no mask is called '{name}', which masks names." for name in values if name not in found
    ]
    other = [name for name in found if name not in values]
    note_names(notes, f"{path}: masks that its source does not name are not used", other)
    coding = LabelCoding(source.colours or {}, values if found else {}, source.overlap == "later")
    entries = []
    for entry in listing.entries:
        masks = {name: entry.masks[name] for name in values if name in entry.masks}
        label = next(iter(masks.values()), None) if found else entry.label
        entries.append(replace(entry, coding=coding, masks=masks, label=label))
    named = {name: (value,) for name, value in values.items() if value} if found else listing.labels
    named = named if len(set(named.values())) == len(named) else {}  # several masks are one class
    return replace(listing, entries=tuple(entries), labels=named, notes=(*listing.notes, *notes))


def rename_by_column(listing: Listing, column: str, path: Path) -> Listing:
    """Clients named by a column of the list."""
    head = column.strip().lower()
    without = [entry.name for entry in listing.entries if not entry.columns.get(head)]
    if without:
        known = sorted({name for entry in listing.entries for name in entry.columns})
        if head not in known:
            raise ConfigError(
                f"{path} has no column '{column}'.{suggest(head, known)} It has: "
                f"{join_names(known, 20) or 'none'}."
            )
        raise DataError(f"{path}: column '{column}' is empty for {join_names(without)}; fill it in.")
    entries = tuple(
        replace(entry, client=check_name(entry.columns[head], f"{path}, column '{column}'"))
        for entry in listing.entries
    )
    return replace(listing, entries=disambiguate(entries, listing))


def rename_client(listing: Listing, client: str) -> Listing:
    renamed = tuple(replace(entry, client=client) for entry in listing.entries)
    return replace(listing, entries=disambiguate(renamed, listing))


def disambiguate(entries: tuple[Entry, ...], before: Listing) -> tuple[Entry, ...]:
    """Cases of one name from two centres keep apart by the centre's name in front."""
    if len({(entry.client, entry.name) for entry in entries}) == len(entries):
        return entries
    return tuple(
        replace(entry, name=f"{old.client}_{entry.name}", group=f"{old.client}_{entry.group}")
        for entry, old in zip(entries, before.entries, strict=True)
    )


# Several listings as one


def join_listings(
    listings: Sequence[Listing], channels: tuple[str, ...] = (), labels: Labels | None = None
) -> Listing:
    """All cases. channels and labels are what federation.yaml says; it wins over what the folders say."""
    notes = [note for listing in listings for note in listing.notes]
    wanted = channels or join_channels(listings)
    entries = [entry for listing in listings for entry in place_channels(listing, wanted, notes)]
    check_unique(entries)
    homes = [set(listing.clients) for listing in listings]
    for client in sorted({entry.client for entry in entries}):
        if sum(client in home for home in homes) > 1:
            notes.append(f"client '{client}' is in more than one source; its cases are taken together.")
    if labels:
        for own in listings:
            if all(entry.labels is None for entry in own.entries):
                refuse_contradiction(own, labels)
        notes += [n for own in listings if not has_own_map(own) for n in list_conflicts(own, labels)]
    joined = dict(labels or join_labels(listings))
    unnamed = [entry.where for entry in entries if names_no_class(entry, joined)]
    note_names(notes, "No segment of these labels has the name of a class, so their values count", unnamed)
    entries = [complete_map(entry, joined) for entry in entries]
    return Listing(
        reader="+".join(dict.fromkeys(listing.reader for listing in listings)),
        entries=tuple(sorted(entries, key=lambda entry: (entry.client, entry.name))),
        channels=wanted,
        labels=joined,
        notes=tuple(dict.fromkeys(notes)),
        regions=join_regions(listings, joined),
        ignore=tuple(sorted({value for listing in listings for value in listing.ignore})),
    )


def has_own_map(listing: Listing) -> bool:
    """Whether its source says itself what its label values mean."""
    return any(entry.labels is not None or entry.masks for entry in listing.entries)


def complete_map(entry: Entry, labels: Labels) -> Entry:
    """The case with all classes of the federation in its own map, in their order; absent ones are empty."""
    if entry.labels is None or names_no_class(entry, labels):
        return replace(entry, labels=None)
    return replace(entry, labels=match_names(entry.labels, labels))


def check_unique(entries: Sequence[Entry]) -> None:
    """Refuse two cases of one name in a client, and clients whose names differ by case alone."""
    seen: dict[tuple[str, str], Entry] = {}
    spelt: dict[str, str] = {}
    for entry in entries:
        other = seen.setdefault((entry.client, entry.name), entry)
        if other is not entry:
            raise DataError(
                f"{entry.where} is there twice: {other.images[0]} and {entry.images[0]}. "
                "Rename one, or give one of the sources another client."
            )
        first = spelt.setdefault(entry.client.casefold(), entry.client)
        if first != entry.client:
            # Their folders would be one on some disks.
            raise DataError(f"clients '{first}' and '{entry.client}' differ only in capitals; rename one.")


def join_labels(listings: Sequence[Listing]) -> dict[str, tuple[int, ...]]:
    """One label map: classes of one name joined; a value that means two things is refused."""
    meaning: dict[int, tuple[str, str]] = {}
    values: dict[str, set[int]] = {}
    for listing in listings:
        for name, own in listing.labels.items():
            for value in own:
                first, where = meaning.setdefault(value, (name, listing.clients[0]))
                if first != name:
                    raise DataError(
                        f"label value {value} is '{first}' at client '{where}' and '{name}' at client "
                        f"'{listing.clients[0]}'. Say under labels what it means, or give each "
                        "source its own labels."
                    )
                values.setdefault(name, set()).add(value)
    return {name: tuple(sorted(own)) for name, own in values.items()}


def join_regions(listings: Sequence[Listing], labels: Labels) -> dict[str, tuple[int, ...]]:
    """The regions of the sources as classes of the joined labels; sources that differ are refused."""
    found: dict[str, set[int]] = {}
    first = ""
    for listing in listings:
        named = listing.labels.items()
        mapped = has_own_map(listing)
        classes = [labels.get(name, values) if mapped else values for name, values in named]
        own = {
            name: {v for n in numbers for v in classes[n - 1]} for name, numbers in listing.regions.items()
        }
        if own and found and own != found:
            raise DataError(
                f"clients '{first}' and '{listing.clients[0]}' have different regions: "
                f"{join_names(found, 8)}; {join_names(own, 8)}. Make them equal in their dataset.json."
            )
        if own and not found:
            found, first = own, listing.clients[0]
    numbered = list(enumerate(labels.values(), start=1))
    return {name: tuple(n for n, own in numbered if values & {*own}) for name, values in found.items()}


def refuse_contradiction(listing: Listing, said: Labels) -> None:
    """Refuse a data set, or masks of single classes, whose class of a name of federation.yaml has values that
    are another class there: they would be trained as that one."""
    meant = {value: name for name, values in said.items() for value in values}
    known = {name.casefold(): values for name, values in said.items()}
    for name, values in listing.labels.items():
        here = known.get(name.casefold(), values)
        value = next((value for value in values if value in meant), None)
        if value is not None and not {*here} & {*values}:
            own = ", ".join(f"{other}: {list(numbers)}" for other, numbers in listing.labels.items())
            raise ConfigError(
                f"client '{listing.clients[0]}' calls label value {value} '{name}', but labels gives it to "
                f"'{meant[value]}' and '{name}' the value {join_names(map(str, here))}. Say under sources "
                f"what its values mean, such as labels: {{{own}}}"
            )


def list_conflicts(listing: Listing, said: Labels) -> list[str]:
    """Where a data set's own label map gives a value another meaning than federation.yaml does."""
    meant = {value: name for name, values in said.items() for value in values}
    return [
        f"client '{listing.clients[0]}' calls label value {value} '{name}'; the federation calls "
        f"it '{meant[value]}'."
        for name, values in listing.labels.items()
        for value in values
        if meant.get(value, name) != name
    ]
