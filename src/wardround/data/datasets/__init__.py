"""Data sets of the literature: what they are, how to get them, and how wardround reads them as published.

    make_federation_file("polyp", folder)   a federation.yaml for it, ready to train
    read_dataset("polyp", folder)           its cases: the reader `preset:polyp` of a source
    write_labels("polyp", folder, out)      labels of one meaning, for sets whose masks have several
    page                                    tables of all sets and of one; the page of the documentation

Nothing is downloaded. A new data set is one YAML file in this folder (`preset.DatasetPreset` describes it).
"""

from __future__ import annotations

from pathlib import Path

from wardround.data.datasets.labels import LIST, write_labels
from wardround.data.datasets.preset import DatasetPreset, list_presets, load_preset, read_preset
from wardround.data.federation_file import FederationFile, Source
from wardround.data.listing import Listing
from wardround.data.readers import table

__all__ = ["list_presets", "load_preset", "make_federation_file", "read_preset", "write_labels"]

PREFIX = "preset:"  # of a reader's name in federation.yaml


def read_dataset(name: str, path: Path, client: str | None = None) -> Listing:
    """The cases of a data set below a folder; what the reader `preset:<name>` of a source does."""
    return read_preset(load_preset(name), path, client)


def make_federation_file(name: str, root: Path) -> FederationFile:
    """A federation.yaml for a data set that lies in a folder, as published or as `write_labels` wrote it.

    Clients, classes, split and preparation are the preset's; held-out clients only where they are there.
    """
    preset = load_preset(name)
    root = Path(root).absolute()
    if (root / LIST).is_file() and (root / "labels").is_dir():
        listing, source = read_written_labels(preset, root), Source(path=root / LIST, reader="table")
    else:
        listing, source = read_preset(preset, root), Source(path=root, reader=PREFIX + name)
    classes = dict(listing.labels)
    return FederationFile(
        sources=(source,),
        held_out=tuple(client for client in preset.held_out if client in listing.clients),
        channels=listing.channels,
        labels=classes,
        labels_differ=True,  # what their values mean is known
        regions=dict(listing.regions) or {key: (n,) for n, key in enumerate(classes, start=1)},
        splits=preset.splits,
        partition=preset.partition,
        prepare=preset.prepare,
        about={"dataset": preset.title, "cite": list(preset.cite), "licence": preset.licence},
    )


def read_written_labels(preset: DatasetPreset, folder: Path) -> Listing:
    """The list of `write_labels`, whose values are class numbers."""
    listing = table.read(Path(folder) / LIST)
    return Listing(
        listing.reader,
        listing.entries,
        preset.channels,
        {key: (number,) for number, key in enumerate(preset.labels, start=1)},
        listing.notes,
        preset.numbered_regions,
    )
