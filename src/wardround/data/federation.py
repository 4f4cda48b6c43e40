"""The federation: who takes part, what every client has, and what the labels mean.

Any client can be loaded alone, so a worker process or a hospital holds only its own cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from wardround.data.annotation import shared_annotation
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.federation_file import ClientPartition, PrepareSettings
from wardround.data.roles import POOLED, PROXY
from wardround.data.serving.resident import join_splits


@dataclass(frozen=True)
class ScanSummary:
    """What the training scans were like.

    patch: voxels of the parts that are trained on, None for whole images; shape: of the usual prepared scan;
    spacing: lowest and highest voxel sides before preparing, in millimetres, along the prepared axes.
    """

    patch: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    spacing: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True)
class Federation:
    """Names of the clients and the facts they must agree on.

    counts: cases of each client, known without loading them; regions: what is measured, each a set of
    label values (regions may overlap); proxy: the centre whose cases are at the server, not a client;
    left_out_of: cases of a client that are not used, each with its reason; prepare_all: checks and prepares
    every client's cases, where that is to be done once; labels: class name -> its values in the files, in the
    order of classes; channels: their names; prepare: what is done to a file before training;
    summarise_scans: what the training scans were like, once they are prepared; first_images: one file of
    every case, where there are files on this machine; units: of distances, where the cases do not say;
    prepared_shape: of the first scan once it is prepared, estimated; version: text that differs where loading
    would give something else; orientation: of prepared volumes, such as RAS, where files say how the patient
    lies; colours_of: see `read_colours`; partition: how clients were made that
    the data did not come with; lacks: client -> channel -> number of its cases that do not have it.
    """

    names: Sequence[str]
    counts: Mapping[str, int]
    dimensions: int
    in_channels: int
    num_classes: int
    regions: Mapping[str, Sequence[int]]
    load_one: Callable[[str], ClientData]
    proxy: str | None = None
    left_out_of: Callable[[str], Sequence[tuple[str, str]]] | None = None
    prepare_all: Callable[[], object] | None = None
    labels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    channels: Sequence[str] = ()
    prepare: PrepareSettings | None = None
    summarise_scans: Callable[[], ScanSummary] | None = None
    first_images: Callable[[], Iterable[Path]] | None = None
    units: str | None = None
    prepared_shape: tuple[int, ...] | None = None
    version: Callable[[], str] | None = None
    partition: ClientPartition | None = None
    orientation: str | None = None
    colours_of: Callable[[str, str], Tensor | None] | None = None
    lacks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def read_colours(self, client: str, case: str) -> Tensor | None:
        """A colour image (3, H, W) on the prepared grid, its values as in the file; None for other images."""
        return None if self.colours_of is None else self.colours_of(client, case)

    def load(self, name: str) -> ClientData:
        """All cases of one client; the pooled one has everybody's, without their test cases."""
        if name == PROXY and self.proxy is not None:
            data, none = self.load_one(self.proxy), TensorSplit.of([])
            return replace(data, train=join_splits([data.train, data.val]), val=none, test=none)
        if name != POOLED:
            return self.load_one(name)
        loaded = {client: self.load_one(client) for client in sorted(self.names)}
        every = list(loaded.values())
        return ClientData(
            train=join_splits([data.train for data in every]),
            val=join_splits([data.val for data in every]),
            test=TensorSplit.of([]),
            annotation=shared_annotation({client: data.annotation for client, data in loaded.items()}),
            num_unlabelled=sum(data.num_unlabelled for data in every),
            lacking=any(data.lacking for data in every),
        )

    def prepare_clients(self) -> None:
        """Check and prepare all clients once, before several worker processes would."""
        if self.prepare_all is not None:
            self.prepare_all()

    def left_out(self, name: str) -> list[tuple[str, str]]:
        """Cases of a client that are not used, and why; none for the pooled client."""
        if self.left_out_of is None or name == POOLED:
            return []
        return list(self.left_out_of(self.proxy if name == PROXY and self.proxy is not None else name))

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Cases of each client, for dealing work evenly."""
        return {name: self.counts.get(name, sum(self.counts.values())) for name in names}
