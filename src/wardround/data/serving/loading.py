"""Loading: from federation.yaml to the clients of a run.

    list -> split -> partition      for every client, without opening more than one image (`federation_of`)
    check -> prepare -> load        for one client, when it is loaded; looked up in its cache where possible

Unusable cases are left out, each with its reason. Every process that opens the same file over the same
folders finds the same clients and cases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.data import partitions
from wardround.data.annotation import annotations_of
from wardround.data.cases import ClientData, Split, TensorSplit, blank_label
from wardround.data.channels import count_lacking
from wardround.data.checking.check import assign_splits
from wardround.data.checking.facts import ImageFacts, read_facts
from wardround.data.common_names import OwnNames, use_common_names
from wardround.data.federation import Federation, ScanSummary
from wardround.data.federation_file import (
    ClientPartition,
    FederationFile,
    PrepareSettings,
    check_settings,
    load,
)
from wardround.data.listing import SPLITS, Entry, Listing, Places, Watch
from wardround.data.preparing.cache import Cache, describe
from wardround.data.preparing.cache import load as load_prepared
from wardround.data.preparing.grid import reorient_grid
from wardround.data.preparing.prepare import prepare_case
from wardround.data.readers.image_files import COLOURS, read_image
from wardround.data.readers.label_files import read_case_label
from wardround.data.serving.client_cache import LabelDescriptions, LeftOut, PreparedClient, Preparer
from wardround.data.serving.resident import (
    CachedSplit,
    HostSplit,
    PatchSplit,
    Residence,
    StoredCase,
    choose_patch,
    fits_in_memory,
)
from wardround.data.settings import DataSettings
from wardround.data.sources import list_cases
from wardround.errors import ConfigError, DataError
from wardround.settings import Settings
from wardround.text import suggest

__all__ = ["CachedSplit", "RealData", "federation_of"]

log = logging.getLogger(__name__)


def federation_of(
    path: Path,
    settings: DataSettings,
    seed: int,
    resident: Residence = "auto",
    only: str | None = None,
    names: OwnNames | None = None,
) -> Federation:
    """The federation of a federation.yaml, cheap to open; each client is checked and prepared when loaded.

    only: the one client served by this process, as at a hospital; names: what the run calls its classes and
    channels, where that is not what the file says.
    seed: of the run, unused: splits and partitions have seeds in the file, so that runs of all seeds have
    the same cases at the same clients.
    """
    data = RealData(Path(path), settings, resident, only, names)
    clients = data.listing.clients
    return Federation(
        names=clients,
        counts={name: len(data.listing.of(name)) for name in clients},
        dimensions=data.dimensions,
        in_channels=data.in_channels,
        num_classes=len(data.file.labels) + 1,
        regions=data.regions,
        load_one=data.load,
        left_out_of=data.left_out,
        prepare_all=data.prepare,
        labels=data.file.labels,
        channels=data.file.channels,
        lacks=data.lacks,
        prepare=data.file.prepare,
        summarise_scans=data.look_back,
        first_images=lambda: (entry.images[0] for entry in data.listing.entries),
        prepared_shape=data.prepared_shape,
        version=data.describe_version,
        orientation=data.file.prepare.orientation if data.has_orientation else None,
        colours_of=data.read_colours,
        partition=ClientPartition.find(data.file),
    )


class RealData:
    """The cases of a federation.yaml, each at its client and in its split."""

    def __init__(
        self,
        path: Path,
        settings: DataSettings,
        resident: Residence = "auto",
        only: str | None = None,
        names: OwnNames | None = None,
    ) -> None:
        self.path = path
        self.settings = settings
        self.resident: Residence = resident
        file = override_sections(load(path), settings)
        found = list_cases(file, path.parent)
        self.file = add_label_meaning(file, found, path)
        if names is not None:
            self.file, found = use_common_names(self.file, found, names)
        self.cache = Cache(path.parent / (file.cache or ".wardround-cache"))
        self.describe = LabelDescriptions(self.cache.folder / "labels.json", self.file.labels)
        self.listing = replace(found, entries=tuple(self._place(found)))
        self.annotations = annotations_of(
            {name: told for name, told in self.file.annotates.items() if name in self.listing.clients},
            list(self.file.labels),
            self.regions,
            self.listing.clients,
            ignores=bool(self.file.ignore),
        )
        self.lacks = {
            name: lacking
            for name in self.listing.clients
            if (lacking := count_lacking(self.listing.of(name), self.file.channels))
        }
        self.first_image = first = self._read_first_image()
        if only is not None:  # after the split and the partition, which need all
            self.listing = replace(self.listing, entries=tuple(self.listing.of(only)))
        self.dimensions = len(first.shape)
        self.in_channels = len(self.file.channels) or first.channels
        self._check_numbers()
        self.prepared_shape = estimate_shape(first, self.file.prepare)
        self.default_patch = choose_patch([self.prepared_shape])
        strict = settings.test  # without test cases a class may be missing by chance
        self._preparer = Preparer(self.cache, self.file, self.in_channels, self.dimensions, strict)
        self._prepared: dict[str, PreparedClient] = {}  # asked for often; looking at all files takes time
        self._summary: ScanSummary | None = None

    @property
    def has_orientation(self) -> bool:
        """Whether files say how the patient lies, as the first one does or not."""
        return self.dimensions == 3 and self.first_image.affine is not None

    def read_colours(self, client: str, case: str) -> Tensor | None:
        """A colour image (3, H, W) on the prepared grid, its values as in the file; None for other images."""
        entry = next((entry for entry in self.listing.of(client) if entry.name == case), None)
        names = {name.lower() for name in self.file.channels}
        if entry is None or self.dimensions != 2 or self.in_channels != 3 or not names <= COLOURS:
            return None
        image = read_image(entry.images)
        if -1 in entry.places or image.affine is not None or image.data.min() < 0:
            return None
        settings = self.file.prepare.model_copy(update={"normalise": "none"})
        label = None
        if settings.crop == "foreground" and entry.label is not None:  # it keeps what is labelled
            label = read_case_label(entry)
        labels = self.file.labels if entry.labels is None else entry.labels
        return prepare_case(image, label, settings, labels, background=None, places=entry.places).image

    @property
    def regions(self) -> Mapping[str, Sequence[int]]:
        """What is measured; left out: each class."""
        return self.file.regions or {name: (n,) for n, name in enumerate(self.file.labels, start=1)}

    def _place(self, found: Listing) -> list[Entry]:
        entries, _ = assign_splits(found, self.file, self.path.parent)  # leaks are found again when checking
        held_out = self.file.held_out
        placed = partitions.partition(entries, self.file.partition, self.describe, held_out=held_out)
        self.describe.save()
        return placed if self.settings.test else [entry for entry in placed if entry.split != "test"]

    def _read_first_image(self) -> ImageFacts:
        """Facts of the first readable image, which all others are compared with."""
        reason = ""
        for entry in self.listing.entries:
            facts = read_facts(entry)
            if facts.image is not None:
                return facts.image
            reason = reason or facts.troubles[0][1]
        raise DataError(f"{self.path}: none of {len(self.listing.entries)} images can be read. {reason}")

    def _check_numbers(self) -> None:
        """Refuse sizes with another number of axes than the images."""
        for name, sides in (("data.patch", self.settings.patch), ("prepare.size", self.file.prepare.size)):
            if sides is not None and len(sides) != self.dimensions:
                raise ConfigError(
                    f"{name} is {list(sides)}, but the images of {self.path} are {self.dimensions}D; "
                    f"give {self.dimensions} numbers."
                )
        settings = self.file.prepare
        rows = settings.intensities if settings.normalise == "ct" else None
        if rows is not None and len(rows) != self.in_channels:
            raise ConfigError(
                f"prepare.intensities has {len(rows)} rows, but the images of {self.path} have "
                f"{self.in_channels} channels; give a row each."
            )

    def prepare(self, watch: Watch | None = None) -> dict[str, PreparedClient]:
        """Check and prepare the cases of all clients, unless that is done already."""
        self._prepared = self._preparer.prepare_clients(self.listing, watch=watch)
        return self._prepared

    def describe_version(self) -> str:
        """What loaded cases depend on: files, splits, settings and shifts."""
        files = self._preparer.compute_key(self.listing.entries)
        shifts = [entry.columns.get("shift") for entry in self.listing.entries]
        return f"{self.cache.folder} {files} {self.settings!r} {shifts} {self.file.annotates} {self.lacks}"

    # One client

    def load(self, name: str) -> ClientData:
        """All usable cases of a client, where `resident` wants them."""
        client = self._prepare_client(name)
        try:
            stored = self._load_cases(name, client)
        except DataError:  # a prepared file was damaged since
            client = self._prepare_client(name, refresh=True)
            stored = self._load_cases(name, client)
        every = [case for cases in stored.values() for case in cases]
        self._warn(name, client, len(every))
        patch = self._choose_patch(every)
        in_memory = fits_in_memory(every, self.resident)
        return ClientData(
            train=self._make_split(stored["train"], patch, in_memory, trains=True),
            val=self._make_split(stored["val"], patch, in_memory),
            test=self._make_split(stored["test"], patch, in_memory),
            annotation=self.annotations.get(name),
            num_unlabelled=sum(e.label is None and e.name in client.paths for e in self.listing.of(name)),
            lacking=bool(self.lacks),
        )

    def left_out(self, name: str) -> LeftOut:
        """Cases of a client that are not used, each with its reason."""
        return self._prepare_client(name).left_out

    def _prepare_client(self, name: str, *, refresh: bool = False) -> PreparedClient:
        """A client's cases; refresh: every file is checked again."""
        if refresh or name not in self._prepared:
            self._prepared[name] = self._preparer.prepare_client(self.listing, name, refresh=refresh)
        return self._prepared[name]

    def look_back(self) -> ScanSummary:
        """What the training scans were like."""
        if self._summary is None:
            self._summary = self._summarise()
        return self._summary

    def _summarise(self) -> ScanSummary:
        """The same, from the metadata of the prepared files."""
        shapes: list[tuple[int, ...]] = []
        sides: list[list[float]] = []
        differ = False
        for name in self.listing.clients:
            paths = self._prepare_client(name).paths
            metadata = {case: describe(path) for case, path in paths.items()}
            differ |= len({tuple(facts["shape"]) for facts in metadata.values()}) > 1
            for entry in self.listing.of(name):
                if entry.split in (None, "train") and entry.name in metadata:
                    geometry = metadata[entry.name]["geometry"]
                    shapes.append(tuple(metadata[entry.name]["shape"][1:]))
                    sides.append([geometry["spacing"][axis] for axis in geometry["order"]])
        if not shapes:
            return ScanSummary(self.settings.patch, None)
        typical = tuple(int(side) for side in np.median(shapes, axis=0))
        low, high = np.min(sides, axis=0).tolist(), np.max(sides, axis=0).tolist()
        patch = self.settings.patch or (self.default_patch if differ else None)
        return ScanSummary(patch, typical, (tuple(low), tuple(high)))

    def _warn(self, name: str, client: PreparedClient, count: int) -> None:
        for warning in client.warnings:
            log.warning("%s", warning)
        if count and client.left_out:
            log.warning(
                "client '%s': %d of %d cases are left out. The first: %s",
                name, len(client.left_out), count + len(client.left_out), client.left_out[0][1],
            )  # fmt: skip
        if not count:
            reason = client.left_out[0][1] if client.left_out else "It has none."
            log.warning(
                "client '%s' has no usable case of %d and takes no part. %s "
                "Correct its files, or leave it out of clients in %s.",
                name, len(client.left_out), reason, self.path.name,
            )  # fmt: skip

    def _load_cases(self, name: str, client: PreparedClient) -> dict[str, list[StoredCase]]:
        """The prepared cases by split, mapped from their files."""
        stored: dict[str, list[StoredCase]] = {split: [] for split in SPLITS}
        annotation = self.annotations.get(name)
        for entry in self.listing.of(name):
            if entry.name not in client.paths:
                continue
            loaded = load_prepared(client.paths[entry.name])
            shift = partitions.read_shift(entry)
            change = None if shift is None else partial(shift_present, shift=shift, places=entry.places)
            case, foreground = replace(loaded.case, name=entry.name), loaded.foreground
            if entry.label is None:
                case = replace(case, label=blank_label(case.image))
            elif annotation is not None and any(map(annotation.merges, foreground)):
                case = replace(case, label=annotation.hide(case.label))
                foreground = annotation.hide_voxels(foreground)
            stored[entry.split or "train"].append(StoredCase(case, foreground, change))
        return stored

    def _choose_patch(self, cases: Sequence[StoredCase]) -> tuple[int, ...] | None:
        """The patch of the settings; without one, whole images, unless their shapes differ."""
        if self.settings.patch is not None:
            return self.settings.patch
        return self.default_patch if len({case.shape for case in cases}) > 1 else None

    def _make_split(
        self,
        cases: Sequence[StoredCase],
        patch: tuple[int, ...] | None,
        in_memory: bool,
        *,
        trains: bool = False,
    ) -> Split:
        residence = self.resident
        if not cases:
            return TensorSplit.of([])
        if patch is None and in_memory:
            return HostSplit.from_cases(cases, residence)
        if in_memory:
            cases = [case.load_to(torch.device("cpu")) for case in cases]
        if patch is not None and trains:
            settings = self.settings
            return PatchSplit(
                cases, patch, settings.foreground, by=settings.foreground_by, residence=residence
            )
        return CachedSplit(cases, together=patch is None, residence=residence)


def shift_present(image: Tensor, shift: Mapping[str, Any], places: Places) -> Tensor:
    """An image shifted, its absent channels left as they are."""
    shifted = partitions.apply_shift(image, shift)
    absent = [number for number, place in enumerate(places) if place < 0]
    return shifted.index_fill(0, torch.tensor(absent), 0) if absent else shifted


# The file


def override_sections(file: FederationFile, settings: DataSettings) -> FederationFile:
    """The file with the `prepare` and `splits` settings of the run in place of its own."""
    changes = {"prepare": settings.prepare, "splits": settings.splits}
    sections = {n: override_section(getattr(file, n), given, n) for n, given in changes.items() if given}
    return file.model_copy(update=sections)


def override_section(section: Settings, changes: Mapping[str, Any], name: str) -> Settings:
    """A section of the file with some settings replaced, checked like the file's own."""
    kind = type(section)
    for key in changes:
        if key not in kind.model_fields:
            raise ConfigError(
                f"data.{name}.{key} is not a setting.{suggest(str(key), kind.model_fields)} "
                f"There are: {', '.join(kind.model_fields)}."
            )
    return kind.read({**section.model_dump(), **changes}, f"data.{name}.")


def add_label_meaning(file: FederationFile, found: Listing, path: Path) -> FederationFile:
    """The file with channels, labels and regions of its folders where it names none itself."""
    if not found.labels:
        raise ConfigError(
            f"{path} does not say what the labels mean; add, for example, labels: {{lesion: [1]}}. "
            "`wardround data init` inspects them and writes it for you."
        )
    regions = file.regions or found.regions
    meaning = {"labels": dict(found.labels), "channels": found.channels, "regions": dict(regions)}
    return file.model_copy(update={**meaning, "ignore": file.ignore or found.ignore})


def estimate_shape(image: ImageFacts, settings: PrepareSettings) -> tuple[int, ...]:
    """Estimate the shape of an image after preparing."""
    check_settings(settings)  # a run may have overridden those of the file
    if settings.size is not None:
        return settings.size
    shape, spacing = image.shape, image.spacing
    if settings.orientation is not None:
        shape, spacing = reorient_grid(shape, spacing, image.affine)
    if settings.spacing is None or len(settings.spacing) != len(shape):
        return shape
    return tuple(
        max(1, round(side * old / new))
        for side, old, new in zip(shape, spacing, settings.spacing, strict=True)
    )
