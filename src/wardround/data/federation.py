"""The federation: who takes part, what every client has, and what the labels mean.

Any client can be loaded alone, so a worker process or a hospital holds only its own cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wardround.config import DataSettings
from wardround.data import phantom
from wardround.data.cases import ClientData, TensorSplit
from wardround.engine.seeding import derive

POOLED = "pooled"  # the pseudo-client of the centralised reference


@dataclass(frozen=True)
class Federation:
    """Names of the clients and the facts they must agree on.

    regions: what is measured, each a set of label values (regions may overlap).
    """

    settings: DataSettings
    seed: int
    names: Sequence[str]
    dimensions: int
    in_channels: int
    num_classes: int
    regions: Mapping[str, Sequence[int]]

    def load(self, name: str) -> ClientData:
        """All cases of one client."""
        if name == POOLED:
            every = [self.load(client) for client in self.names]
            return ClientData(
                train=TensorSplit.join([data.train for data in every]),
                val=TensorSplit.join([data.val for data in every]),
                test=TensorSplit.of([]),
            )
        return phantom.make_client(self.settings.phantom, name, self.seed)

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Cases of each client, found without loading them; for dealing work evenly."""
        known = {name: phantom.num_cases(self.settings.phantom, name) for name in self.names}
        return {name: known.get(name, sum(known.values())) for name in names}


def open_federation(settings: DataSettings, seed: int) -> Federation:
    """Look at the data without loading it."""
    made = settings.phantom
    return Federation(
        settings=settings,
        seed=made.seed if made.seed is not None else derive(seed, "data"),
        names=phantom.hospital_names(made),
        dimensions=made.dimensions,
        in_channels=made.channels,
        num_classes=made.num_classes,
        regions={"lesion": [1]} if made.num_classes == 2 else {"lesion": [1, 2], "core": [2]},
    )
