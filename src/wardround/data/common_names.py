"""Common names: the classes and channels of a run, for cases whose own files call or order them otherwise.

Hospitals agree on names before they train one model. Values in label files stay each hospital's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wardround.data.federation_file import FederationFile
from wardround.data.listing import Entry, Labels, Listing
from wardround.errors import ConfigError


@dataclass(frozen=True)
class OwnNames:
    """Common name -> the file's own, in the order of the run; what is not named is not used.

    channels: empty where they stay as they are.
    """

    classes: Mapping[str, str]
    channels: Mapping[str, str] = field(default_factory=dict)

    def list_channels(self, file: FederationFile) -> tuple[str, ...]:
        """The file's own channels; where it does not name them, #1, #2 and so on."""
        return file.channels or tuple(f"#{number + 1}" for number in range(len(self.channels)))

    def check(self, file: FederationFile) -> None:
        """Refuse names that the file does not have."""
        for kind, own, there in (
            ("class", self.classes, tuple(file.labels)),
            ("channel", self.channels, self.list_channels(file)),
        ):
            missing = [name for name in own.values() if name not in there]
            if missing:
                raise ConfigError(
                    f"the common names want {kind} '{missing[0]}', which federation.yaml does not have; it "
                    f"has: {', '.join(there) or 'none'}."
                )


def use_common_names(file: FederationFile, found: Listing, names: OwnNames) -> tuple[FederationFile, Listing]:
    """The file and its cases with the classes and channels of the run; other classes are background."""
    names.check(file)
    own = list(file.labels)
    numbers = {own.index(name) + 1: place for place, name in enumerate(names.classes.values(), start=1)}
    back = {name: common for common, name in names.classes.items()}
    regions = {
        back.get(name, name): tuple(sorted(numbers[number] for number in classes))
        for name, classes in file.regions.items()
        if set(classes) <= set(numbers)
    }
    changes: dict[str, Any] = {
        "labels": rename(file.labels, names.classes),
        "regions": regions,
        "annotates": {
            client: tuple(back.get(name, name) for name in told if name in back or name in regions)
            for client, told in file.annotates.items()
        },
    }
    maps = [file.labels, *(entry.labels for entry in found.entries if entry.labels is not None)]
    dropped = {v for own in maps for name, values in own.items() if name not in back for v in values}
    kept = {value for values in changes["labels"].values() for value in values}
    changes["background"] = tuple(sorted({*file.background, *dropped} - kept))
    entries = found.entries
    if names.channels:
        there = names.list_channels(file)
        order = [there.index(name) for name in names.channels.values()]
        entries = tuple(choose_channels(entry, order, len(there)) for entry in entries)
        changes["channels"] = tuple(names.channels)
    entries = tuple(
        entry if entry.labels is None else replace(entry, labels=rename(entry.labels, names.classes))
        for entry in entries
    )
    return file.model_copy(update=changes), replace(found, entries=entries)


def rename(labels: Labels, classes: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    return {common: labels[own] for common, own in classes.items() if own in labels}


def choose_channels(entry: Entry, order: list[int], total: int) -> Entry:
    """The case with some of its channels, in this order; total: how many it has."""
    if order == list(range(total)):
        return entry
    if entry.places:  # some channels are absent: where each is, is said already
        return replace(entry, places=tuple(entry.places[place] for place in order))
    if len(entry.images) != total:
        raise ConfigError(
            "the common names reorder channels or leave some out, but images here have all of them in one "
            "file. Store one file a channel, or agree on the channels as they are."
        )
    return replace(entry, images=tuple(entry.images[place] for place in order))
