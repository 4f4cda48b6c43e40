"""Label maps of sources that store the same classes under different values, for `data init`.

join_by_name(listings)           data sets that name their classes and number them differently
match_values(values_of_clients)  masks of 0 and 1 here, of 0 and 255 there
list_values(values_of_clients)   masks of 0 and 1 here, of 0 and 2 there: maps to be corrected
split_centres(source, listing)   a source for each centre of a folder, so that each can have a map
guess_annotates(labelled, labels) which classes each client has, where some have fewer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from itertools import combinations
from pathlib import Path

from wardround.data.checking.facts import CaseFacts
from wardround.data.federation_file import Source
from wardround.data.listing import Entry, Listing
from wardround.data.readers.common import join_names
from wardround.data.sources import join_listings, read_source

GREY = 128  # a highest value from here on is a grey level, not a count of classes

Labels = dict[str, tuple[int, ...]]
Cases = list[tuple[Entry, CaseFacts]]
zip_all = partial(zip, strict=True)


def join_by_name(listings: Sequence[Listing]) -> Labels | None:
    """The classes of all data sets, if they number or spell them differently; None where one map is right
    for all. Names are the same whatever their capitals.

    A class has the spelling and values of the first data set that names it, or a number that is free.
    """
    named = [(name, tuple(values)) for listing in listings for name, values in listing.labels.items()]
    meant: dict[int, str] = {}
    known: dict[str, tuple[str, tuple[int, ...]]] = {}
    if all(
        known.setdefault(name.casefold(), (name, values)) == (name, values)
        and all(meant.setdefault(value, name) == name for value in values)
        for name, values in named
    ):
        return None
    joined: Labels = {}
    for name, values in named:
        if name.casefold() not in map(str.casefold, joined):
            taken = {value for own in joined.values() for value in own}
            joined[name] = values if not taken & set(values) else (max(taken) + 1,)
    return joined


def spell_as(own: Mapping[str, tuple[int, ...]], joined: Labels) -> Labels:
    """A map of one data set with the names as all spell them."""
    spelling = {name.casefold(): name for name in joined}
    return {spelling[name.casefold()]: tuple(values) for name, values in own.items()}


def note_unnamed(listings: Sequence[Listing], said: list[str]) -> None:
    """Say whose label values are taken to mean what another data set calls them."""
    named = [own.clients[0] for own in listings if own.labels]
    plain = [own.clients[0] for own in listings if not own.labels]
    if named and plain:
        said.append(
            f"{join_names(plain)} does not say what its label values mean; they are taken for those of "
            f"{named[0]}: a guess. Otherwise give its source labels of its own."
        )


def match_values(clients: Mapping[str, Set[int]]) -> dict[str, Labels] | None:
    """A map for each client, if their values are the same classes: as many, all different, grey levels at all
    clients but those that count 1, 2 ...; None where that is not so.

    >>> match_values({"north": {1}, "south": {255}})
    {'north': {'class_1': (1,)}, 'south': {'class_1': (255,)}}
    """
    kinds = {tuple(sorted(values)) for values in clients.values() if values}
    every = [value for values in kinds for value in values]
    counted = [values for values in kinds if max(values) < GREY]
    alike = len({len(values) for values in kinds}) == 1 and len(set(every)) == len(every)
    if len(kinds) < 2 or not alike or len(counted) > 1:
        return None
    numbers = range(1, 1 + len(next(iter(kinds))))
    if any(values != tuple(numbers) for values in counted):
        return None
    usual = counted[0] if counted else min(kinds)
    return {
        client: {f"class_{n}": (value,) for n, value in zip(numbers, sorted(own) or usual, strict=True)}
        for client, own in clients.items()
    }


def list_values(clients: Mapping[str, Set[int]]) -> dict[str, Labels] | None:
    """The same map for each client, a class for every value, to be corrected for each; None where no two
    clients have values that the other lacks, so that a class may merely be rare.

    >>> list_values({"north": {1}, "south": {2}})["south"]
    {'class_1': (1,), 'class_2': (2,)}
    """
    if not any(one - other and other - one for one, other in combinations(clients.values(), 2)):
        return None
    every = sorted({value for values in clients.values() for value in values})
    return {client: {f"class_{n}": (value,) for n, value in enumerate(every, start=1)} for client in clients}


def split_centres(source: Source, listing: Listing) -> list[Source] | None:
    """A source for each client; None where they are not folders of their own."""
    if len(listing.clients) == 1:
        return [source]
    folders = {client: source.path / client for client in listing.clients}
    if source.reader not in ("centres", "beside") or not all(map(Path.is_dir, folders.values())):
        return None
    return [source.model_copy(update={"path": at, "client": client}) for client, at in folders.items()]


def map_values(
    sources: list[Source], listings: list[Listing], listing: Listing, labelled: Cases, said: list[str]
) -> tuple[list[Source], Listing]:
    """A label map for each source where clients store the same classes as other values; said if so."""
    values: dict[str, set[int]] = {client: set() for client in listing.clients}
    for entry, facts in labelled:
        values[entry.client] |= {value for value in facts.label.values if value > 0} if facts.label else set()
    matched = match_values(values)
    maps = matched or list_values(values)
    if maps is None:
        return sources, listing
    seen = {name: join_names(map(str, sorted(own))) for name, own in values.items() if own}
    shown = join_names((f"{name} {own}" for name, own in seen.items()), 8)
    split = [split_centres(source, own) for source, own in zip_all(sources, listings)]
    if None in split:
        said.append(
            f"Clients have different label values ({shown}). If they mean the same, give each client a "
            "source (a list or folder) of its own, with its labels."
        )
        return sources, listing
    if matched is not None:
        told = (
            "They are taken for the same classes, in this order, each source with its own labels: a guess, "
        )
        told += "correct it if it is wrong."
    else:
        told = "Each source has its own labels: put values that mean the same under one name. If they are "
        told += "different classes, remove these labels and confirm annotates, or write labels_differ: true. "
        told += "`train` refuses them until then."
    said.append(f"Clients have different label values ({shown}). {told}")
    mapped = [
        source.model_copy(update={"labels": maps[find_client(source, own)]})
        for own, parts in zip_all(listings, split)
        for source in parts or ()
    ]
    first = next(iter(maps.values()))
    return mapped, join_listings([read_source(source, Path()) for source in mapped], labels=first)


def find_client(source: Source, listing: Listing) -> str:
    return source.client or listing.clients[0]


def place_again(cases: Cases, listing: Listing) -> Cases:
    """The same cases as a listing has them now."""
    known = {(entry.client, entry.name): entry for entry in listing.entries}
    return [(known[entry.client, entry.name], facts) for entry, facts in cases]


def guess_annotates(labelled: Cases, labels: Labels) -> dict[str, list[str]]:
    """The classes seen at each client that lacks one which others have; empty where all have the same."""
    seen: dict[str, set[str]] = {}
    for entry, facts in labelled:
        values = set(facts.label.values) if facts.label is not None else set()
        own = {name for name, meant in entry.label_map(labels).items() if values & set(meant)}
        seen.setdefault(entry.client, set()).update(own)
    every = set().union(*seen.values())
    lacking = {client: own for client, own in sorted(seen.items()) if own and own != every}
    return {client: [name for name in labels if name in own] for client, own in lacking.items()}
