"""The federation: who takes part, what every client has, and what the labels mean.

Any client can be loaded alone, so a worker process or a hospital holds only its own cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from wardround.data.cases import ClientData, TensorSplit, join
from wardround.data.federation_file import PrepareSettings
from wardround.data.folders import Folders
from wardround.data.phantom import cases as phantom
from wardround.data.roles import POOLED, PROXY
from wardround.data.serving.resident import Residence
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError
from wardround.seeds import derive
from wardround.text import suggest


@dataclass(frozen=True)
class Seen:
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
    order of classes; channels: their names; prepare: what is done to a file before training; look_back: what
    the training scans were like, known once they are prepared; first_images: one file of every case, where
    there are files on this machine.
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
    look_back: Callable[[], Seen] | None = None
    first_images: Callable[[], Iterable[Path]] | None = None

    def load(self, name: str) -> ClientData:
        """All cases of one client; the pooled one has everybody's, without their test cases."""
        if name == PROXY and self.proxy is not None:
            data, none = self.load_one(self.proxy), TensorSplit.of([])
            return ClientData(train=join([data.train, data.val]), val=none, test=none)
        if name != POOLED:
            return self.load_one(name)
        every = [self.load_one(client) for client in sorted(self.names)]
        return ClientData(
            train=join([data.train for data in every]),
            val=join([data.val for data in every]),
            test=TensorSplit.of([]),
        )

    def get_ready(self) -> None:
        """Do what need be done once for all clients, before worker processes each ask for it."""
        if self.prepare_all is not None:
            self.prepare_all()

    def left_out(self, name: str) -> list[tuple[str, str]]:
        """Cases of a client that are not used, and why; the pooled one's are told with their clients."""
        if self.left_out_of is None or name == POOLED:
            return []
        return list(self.left_out_of(self.proxy if name == PROXY and self.proxy is not None else name))

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Cases of each client, for dealing work evenly."""
        return {name: self.counts.get(name, sum(self.counts.values())) for name in names}


def open_federation(settings: DataSettings, seed: int, resident: Residence = "auto") -> Federation:
    """Look at the data without loading it; resident: where loaded cases will be."""
    found = all_centres(settings, seed, resident)
    if settings.proxy is None:
        return found
    if settings.proxy not in found.names:
        raise ConfigError(
            f"data.proxy is '{settings.proxy}', which is not a centre."
            f"{suggest(settings.proxy, found.names)} There are: {', '.join(found.names)}."
        )
    clients = [name for name in found.names if name != settings.proxy]
    if not clients:
        raise ConfigError(f"data.proxy is '{settings.proxy}', the only centre; no client is left.")
    return replace(found, names=clients, proxy=settings.proxy)


def all_centres(settings: DataSettings, seed: int, resident: Residence) -> Federation:
    """Every centre of the data, the server's own included."""
    if settings.hospitals:
        raise ConfigError(
            "data.hospitals: the cases are at the hospitals. Run it there with: wardround submit CONFIG; or "
            "set data.federation to cases on this machine."
        )
    if settings.federation is not None:
        from wardround.data.serving.loading import federation_of  # it needs this module

        return federation_of(settings.federation, settings, seed, resident)
    if settings.folders is not None:
        found = Folders(settings.folders)
        return Federation(
            names=found.names,
            counts=found.counts(),
            dimensions=len(settings.folders.size),
            in_channels=found.channels,
            num_classes=settings.folders.num_classes,
            regions=found.regions,
            load_one=found.load,
            prepare=PrepareSettings(
                orientation=None, size=settings.folders.size, normalise=settings.folders.normalise
            ),
            look_back=partial(Seen, None, settings.folders.size),
            first_images=found.first_images,
        )
    made = settings.phantom
    names = phantom.list_hospitals(made)
    data_seed = made.seed if made.seed is not None else derive(seed, "data")
    return Federation(
        names=names,
        counts={name: phantom.count_cases(made, name) for name in names},
        dimensions=made.dimensions,
        in_channels=made.channels,
        num_classes=made.num_classes,
        regions={"lesion": [1]} if made.num_classes == 2 else {"lesion": [1, 2], "core": [2]},
        load_one=lambda name: phantom.make_client(made, name, data_seed),
        labels={"lesion": [1]} if made.num_classes == 2 else {"rim": [1], "core": [2]},
        prepare=PrepareSettings(orientation="PLS"),  # the axes of a made-up head, scaled like them
        look_back=lambda: Seen(None, made.shape),
    )
