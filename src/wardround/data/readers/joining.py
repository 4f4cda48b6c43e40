"""Several listings as one: cases together, names told apart, channels and labels that must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wardround.data.listing import Entry, Listing
from wardround.data.readers.common import named
from wardround.errors import DataError

Labels = Mapping[str, tuple[int, ...]]


def join(
    listings: Sequence[Listing], channels: tuple[str, ...] = (), labels: Labels | None = None
) -> Listing:
    """All cases. channels and labels are what federation.yaml says; it wins over what the folders say."""
    notes = [note for listing in listings for note in listing.notes]
    wanted = channels or next((listing.channels for listing in listings if listing.channels), ())
    entries = [entry for listing in listings for entry in ordered(listing, wanted, notes)]
    check_unique(entries)
    homes = [set(listing.clients) for listing in listings]
    for client in sorted({entry.client for entry in entries}):
        if sum(client in home for home in homes) > 1:
            notes.append(f"client '{client}' is in more than one source; its cases are taken together.")
    if labels:
        notes += [note for listing in listings for note in disagreements(listing, labels)]
    return Listing(
        reader="+".join(dict.fromkeys(listing.reader for listing in listings)),
        entries=tuple(sorted(entries, key=lambda entry: (entry.client, entry.name))),
        channels=wanted,
        labels=dict(labels or agree(listings)),
        notes=tuple(dict.fromkeys(notes)),
        regions=next((listing.regions for listing in listings if listing.regions), {}),
    )


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


def ordered(listing: Listing, wanted: tuple[str, ...], notes: list[str]) -> list[Entry]:
    """The cases with their channels in the order all clients share."""
    own = listing.channels
    if not own or own == wanted:
        return list(listing.entries)
    where = listing.clients[0]
    if sorted(own) != sorted(wanted) or len(set(own)) < len(own):
        notes.append(
            f"client '{where}' calls its channels {named(own)}; the federation's are {named(wanted)}."
        )
        return list(listing.entries)
    if any(len(entry.images) != len(own) for entry in listing.entries):
        raise DataError(
            f"client '{where}' has its channels in the order {', '.join(own)}, the federation "
            f"{', '.join(wanted)}. "
            "They lie in one file a case, so they must be reordered there."
        )
    notes.append(f"client '{where}': channels {', '.join(own)} are taken in the order {', '.join(wanted)}.")
    places = [own.index(channel) for channel in wanted]
    return [replace(e, images=tuple(e.images[place] for place in places)) for e in listing.entries]


def agree(listings: Sequence[Listing]) -> dict[str, tuple[int, ...]]:
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
                        f"'{listing.clients[0]}'. Say under labels what it means, or change the files of one."
                    )
                values.setdefault(name, set()).add(value)
    return {name: tuple(sorted(own)) for name, own in values.items()}


def disagreements(listing: Listing, said: Labels) -> list[str]:
    """Where a data set's own label map gives a value another meaning than federation.yaml does."""
    meant = {value: name for name, values in said.items() for value in values}
    return [
        f"client '{listing.clients[0]}' calls label value {value} '{name}'; the federation calls "
        f"it '{meant[value]}'."
        for name, values in listing.labels.items()
        for value in values
        if meant.get(value, name) != name
    ]
