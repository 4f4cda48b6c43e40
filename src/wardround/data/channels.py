"""Channels: which of the federation's a case has, by their names.

    federation: t1, t2, flair      north's files: flair, t1      places: (1, -1, 0)

A case's places say for each channel of the federation which channel of its image shows it; -1: none does.
What a case does not have is absent: zeros in the prepared image, put there after everything was normalised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wardround.data.listing import Entry, Listing, Places
from wardround.data.readers.common import join_names
from wardround.errors import ConfigError
from wardround.text import suggest

NOT_USED = "-"  # in place of the name of a channel

# Names in federation.yaml


def check_channel_names(channels: Sequence[str], given: Mapping[str, Sequence[str]]) -> None:
    """Refuse names that are there twice, or that `channels` does not have; given: by where they stand."""
    for where, names in [("channels", channels), *given.items()]:
        used = [name for name in names if name != NOT_USED]
        twice = next((name for name in used if used.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"{where} names '{twice}' twice; give every channel a name of its own.")
        unknown = next((name for name in used if name not in channels), None)
        if unknown is not None:
            raise ConfigError(
                f"{where} names '{unknown}', which is none of channels.{suggest(unknown, channels)} Give "
                f"some of: {', '.join(channels) or '(name them under channels)'}; or '{NOT_USED}' for one "
                "that is not used."
            )
        if where in given and not used:
            raise ConfigError(f"{where} is {list(names)}; name one channel or more.")


def check_clients(where: str, named: Mapping[str, Sequence[str]], clients: Sequence[str]) -> None:
    for client in named:
        if client not in clients:
            raise ConfigError(
                f"{where} names client '{client}', which does not exist.{suggest(client, clients)} "
                f"There are: {', '.join(clients)}."
            )


# Names of several sources as one


def join_channels(listings: Sequence[Listing]) -> tuple[str, ...]:
    """Every channel that a source names, those of the source with most first.

    As many names, all of them others, are taken for other words for the same.
    """
    joined: list[str] = []
    for own in sorted((listing.channels for listing in listings), key=len, reverse=True):
        known = {name.casefold() for name in joined}
        new = [name for name in own if name.casefold() not in known]
        joined += new if not joined or len(new) < len(joined) else []
    return tuple(joined)


def rename_channels(listing: Listing, said: Sequence[str], client: str | None = None) -> Listing:
    """The cases (of one client) with the channels that federation.yaml says their images hold, in order."""
    matches = len(listing.channels) == len(said)
    names = dict(zip(listing.channels, said, strict=True)) if matches else {}
    entries = []
    for entry in listing.entries:
        if client in (None, entry.client):
            own = tuple(names.get(name, name) for name in entry.channels) if matches else ()
            entry = replace(entry, channels=own or tuple(said))
        entries.append(entry)
    channels = listing.channels if client is not None else tuple(name for name in said if name != NOT_USED)
    return replace(listing, entries=tuple(entries), channels=channels)


def place_channels(listing: Listing, wanted: tuple[str, ...], notes: list[str]) -> list[Entry]:
    """The cases with the place of each channel of the federation, wherever that is not the image's own."""
    found = [place_entry(entry, entry.channels or listing.channels, wanted) for entry in listing.entries]
    for client in listing.clients:
        note_channels(client, [(e, own) for e, own in found if e.client == client], wanted, notes)
    return [entry for entry, _ in found]


def place_entry(entry: Entry, own: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[Entry, tuple[str, ...]]:
    """The case, and the names of its channels as its source has them."""
    places = find_places(own, wanted, entry.client)
    if len(entry.images) == len(own) > 1 and places:  # a file a channel: only those that are used are read
        images = tuple(entry.images[place] for place in places if place >= 0)
        names = tuple(name for name, place in zip(wanted, places, strict=True) if place >= 0)
        entry = replace(entry, images=images, channels=names, places=find_places(names, wanted, entry.client))
        return entry, own
    return replace(entry, channels=own if places else (), places=places), own


def find_places(own: Sequence[str], wanted: Sequence[str], client: str = "") -> Places:
    """Of each wanted channel among one's own, whatever the capitals; empty where they are the same, or other
    words for the same.

    >>> find_places(["FLAIR", "t1"], ["t1", "t2", "flair"])
    (1, -1, 0)
    """
    names = [name.casefold() for name in own]
    places = tuple(names.index(name) if name in names else -1 for name in map(str.casefold, wanted))
    if max(places, default=-1) < 0 or has_twins(names) or places == tuple(range(len(names))):
        return ()
    unknown = [name for place, name in enumerate(own) if place not in places and name != NOT_USED]
    if unknown and -1 in places:
        meant = ", ".join(name if name not in unknown else NOT_USED for name in own)
        raise ConfigError(
            f"client '{client}' names its channels {join_names(own, 8)}; the federation has "
            f"{join_names(wanted, 8)}. Is '{unknown[0]}' one of them? Say what its images hold, in their "
            f"order: channels_of: {{{client}: [{meant}]}}"
        )
    return places


def has_twins(names: Sequence[str]) -> bool:
    used = [name for name in names if name != NOT_USED]
    return len(set(used)) < len(used)


def note_channels(
    client: str, found: Sequence[tuple[Entry, Sequence[str]]], wanted: tuple[str, ...], notes: list[str]
) -> None:
    """Say whose channels are called otherwise, in another order, or absent."""
    for own in dict.fromkeys(own for _, own in found if own):
        known = {name.casefold(): name for name in wanted}
        here = [known[name.casefold()] for name in own if name.casefold() in known]
        ordered = sorted(here, key=wanted.index)
        if not here:
            notes.append(
                f"client '{client}' names its channels {join_names(own)}; the federation has "
                f"{join_names(wanted)}."
            )
        elif here != ordered:
            notes.append(
                f"client '{client}': channels {', '.join(own)} are taken in the order {', '.join(ordered)}."
            )
    lacking = count_lacking([entry for entry, _ in found], wanted)
    if lacking:
        told = join_names((f"{name} ({number} of {len(found)} cases)" for name, number in lacking.items()), 8)
        notes.append(f"client '{client}' lacks channels: {told}. They count as absent there.")


def count_lacking(entries: Sequence[Entry], names: Sequence[str]) -> dict[str, int]:
    """Channels that cases do not have, each with their number."""
    counts = Counter(n for entry in entries for n, place in enumerate(entry.places) if place < 0)
    return {names[number]: counts[number] for number in sorted(counts)}
