"""Listing: the cases a reader finds on disk, before any image is opened.

A reader (`data/readers/`) knows one folder layout and returns a `Listing`; checking, splitting and preparing
are the same for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

SPLITS = ("train", "val", "test")
FOLD = "splits_final"  # the column that says in which fold of nnU-Net a case is not trained on
Watch = Callable[[int, int, str], None]  # called with cases done, cases in all, which one
Places = tuple[int, ...]  # of each channel of the federation in an image, -1 where absent; (): as they are
T = TypeVar("T")
Labels = Mapping[str, tuple[int, ...]]  # class name -> the values in the files that mean it


@dataclass(frozen=True)
class LabelCoding:
    """How label files tell classes apart where the number of a voxel does not.

    colours: colour (#rrggbb) -> value; masks: name of a mask -> value, where every class has a file of its
    own; overlap: whether later masks are painted over earlier ones, else a voxel in two is an error.
    """

    colours: Mapping[str, int] = field(default_factory=dict)
    masks: Mapping[str, int] = field(default_factory=dict)
    overlap: bool = False


@dataclass(frozen=True)
class Entry:
    """One case.

    name: unique within its client; images: one file with all channels, or one file a channel in channel
    order; label: None for an unlabelled case; group: the patient (or video), never split apart;
    split: where the list fixes it; columns: what else the list says; labels: its own label map with every
    class, where its source or label has one, so that its files have other values than the federation's;
    masks: name -> file, where every class has one, and `label` is the first of them; coding: what their
    names, or the colours of the label, mean; data_files: beside headers (.mhd) that hold no voxels;
    channels: names of what its images hold, in their order, where that is not what its listing has; places:
    where each channel of the federation is among them (`data.channels`).
    """

    client: str
    name: str
    images: tuple[Path, ...]
    label: Path | None
    group: str
    split: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Labels | None = None
    masks: Mapping[str, Path] = field(default_factory=dict)
    coding: LabelCoding | None = None
    data_files: tuple[Path, ...] = ()
    channels: tuple[str, ...] = ()
    places: Places = ()

    def label_map(self, common: Labels) -> Labels:
        """What the values of its label mean; common: where its source does not say."""
        return common if self.labels is None else self.labels

    @property
    def files(self) -> list[Path]:
        """Its images and, where it has one, its label, with all that they consist of."""
        return [*self.images, *self.label_files, *self.data_files]

    @property
    def label_files(self) -> list[Path]:
        """Its label, or its masks."""
        return list(self.masks.values()) or ([] if self.label is None else [self.label])

    @property
    def coding_text(self) -> list[str]:
        """How its label and channels are read, for whoever keeps what was read; nothing for plain numbers and
        channels as they are."""
        label = [] if self.coding is None else [f"{self.coding} {list(self.masks)}"]
        return [*label, f"channels {self.places}"] if self.places else label

    @property
    def where(self) -> str:
        """How messages call it."""
        return f"client '{self.client}', case '{self.name}'"


@dataclass(frozen=True)
class Listing:
    """All cases of some folders, sorted by client and name.

    reader: the layout that was recognised; channels: their names; labels: class name -> the values in
    the files that mean it, without background; regions: class numbers (1 is the first of labels) joined
    under a name; all three where the layout gives them. notes: remarks on how it was read, a sentence each;
    ignore: label values of voxels that nobody annotated.
    """

    reader: str
    entries: tuple[Entry, ...]
    channels: tuple[str, ...] = ()
    labels: Labels = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignore: tuple[int, ...] = ()

    @property
    def clients(self) -> list[str]:
        return sorted({entry.client for entry in self.entries})

    def of(self, client: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.client == client]


def map_cases(
    function: Callable[[Entry], T], entries: Sequence[Entry], jobs: int, watch: Watch | None = None
) -> Iterator[T]:
    """The function of every case, in order, in `jobs` threads: unpacking and NumPy let others run."""
    pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="cases")
    try:
        for number, (entry, found) in enumerate(zip(entries, pool.map(function, entries), strict=True), 1):
            if watch is not None:
                watch(number, len(entries), entry.where)
            yield found
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C, too
