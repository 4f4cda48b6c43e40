"""The federation: who takes part, what every client has, and what the labels mean.

Any client can be loaded alone, so a worker process or a hospital holds only its own cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wardround.config import DataSettings
from wardround.data import phantom
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.folders import Folders
from wardround.engine.seeding import derive

POOLED = "pooled"  # the pseudo-client of the centralised reference


@dataclass(frozen=True)
class Federation:
    """Names of the clients and the facts they must agree on.

    counts: cases of each client, known without loading them; regions: what is measured, each a set of
    label values (regions may overlap).
    """

    names: Sequence[str]
    counts: Mapping[str, int]
    dimensions: int
    in_channels: int
    num_classes: int
    regions: Mapping[str, Sequence[int]]
    load_one: Callable[[str], ClientData]

    def load(self, name: str) -> ClientData:
        """All cases of one client; the pooled one has everybody's, without their test cases."""
        if name != POOLED:
            return self.load_one(name)
        every = [self.load_one(client) for client in sorted(self.names)]
        return ClientData(
            train=TensorSplit.join([data.train for data in every]),
            val=TensorSplit.join([data.val for data in every]),
            test=TensorSplit.of([]),
        )

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Cases of each client, for dealing work evenly."""
        return {name: self.counts.get(name, sum(self.counts.values())) for name in names}


def open_federation(settings: DataSettings, seed: int) -> Federation:
    """Look at the data without loading it."""
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
        )
    made = settings.phantom
    names = phantom.hospital_names(made)
    data_seed = made.seed if made.seed is not None else derive(seed, "data")
    return Federation(
        names=names,
        counts={name: phantom.num_cases(made, name) for name in names},
        dimensions=made.dimensions,
        in_channels=made.channels,
        num_classes=made.num_classes,
        regions={"lesion": [1]} if made.num_classes == 2 else {"lesion": [1, 2], "core": [2]},
        load_one=lambda name: phantom.make_client(made, name, data_seed),
    )
