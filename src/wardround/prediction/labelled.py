"""Labelled sets: the cases of a federation.yaml or of a folder, and what their labels mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wardround.data.checking.quick import assign_splits
from wardround.data.federation_file import FederationFile, load
from wardround.data.listing import Entry, Listing
from wardround.data.proposing.proposal import propose
from wardround.data.serving.loading import add_label_meaning, override_sections
from wardround.data.settings import DataSettings
from wardround.data.sources import join_listings, read_source
from wardround.errors import ConfigError, DataError


@dataclass(frozen=True)
class Labelled:
    """A labelled set: its cases by centre, and what its labels mean; notes: what a person should know."""

    path: Path
    entries: tuple[Entry, ...]
    labels: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()


def open_labelled(path: Path, split: str, settings: DataSettings | None = None) -> Labelled:
    """The labelled cases of a federation.yaml or of a folder, in the order of centres and names.

    settings: of the run whose own file it is, laid over the file as the run did.
    """
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        file, found = of_file(path)
    else:
        proposal = propose([path])
        file, found = proposal.file, proposal.listing
    if split != "all":
        file = file if settings is None else override_sections(file, settings)
        entries, _ = assign_splits(found, file, path.parent if path.is_file() else path)
        found = replace(found, entries=tuple(entry for entry in entries if (entry.split or "train") == split))
    drawn = tuple(entry for entry in found.entries if entry.label is not None)
    notes = []
    if len(drawn) < len(found.entries):
        notes.append(f"{len(found.entries) - len(drawn)} cases have no label and are left out.")
    if not drawn:
        which = "" if split == "all" else f" in split '{split}'"
        raise DataError(f"{path} has no labelled cases{which}.")
    return Labelled(path, drawn, file.labels, tuple(notes))


def of_file(path: Path) -> tuple[FederationFile, Listing]:
    """All centres it names; with none named, all there are, whether they could train or not."""
    file = load(path)
    listings = [read_source(source, path.parent) for source in file.sources]
    found = join_listings(listings, file.channels, file.labels)
    if file.clients is not None:
        chosen = {*file.clients, *file.held_out}
        found = replace(found, entries=tuple(entry for entry in found.entries if entry.client in chosen))
    return add_label_meaning(file, found, path), found


def values_of(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], path: Path
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The values that mean each class of the run in these labels: by name, else by order where counts fit."""
    known = {name.casefold(): values for name, values in given.items()}
    if all(name.casefold() in known for name in wanted):
        return {name: known[name.casefold()] for name in wanted}, []
    if len(given) == len(wanted):
        pairs = ", ".join(f"{theirs} is {ours}" for ours, theirs in zip(wanted, given, strict=True))
        renamed = dict(zip(wanted, given.values(), strict=True))
        return renamed, [f"classes of the data have other names than the run's; taken in order: {pairs}."]
    raise ConfigError(
        f"{path} has the classes {', '.join(given)}, but the run was trained on {', '.join(wanted)}. "
        "Give classes the run's names under labels of a federation.yaml."
    )
