"""A secure sum in one process, phase by phase; who is lost in a phase says nothing from then on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from wardround.privacy.secure_sum import Coordinator, LocalIdentity, Member

CONTEXT, BINDING = b"run 1, round 1", b"weights"
PHASES = ("advertise", "share", "mask", "confirm", "unmask")


class Sum:
    """values: the vector of each member; names in order."""

    def __init__(self, count: int = 5, threshold: int = 3, length: int = 40, bits: int = 32) -> None:
        self.names = [f"hospital-{number}" for number in range(count)]
        self.alive = list(self.names)
        self.members = {
            name: Member(name, context=CONTEXT, identity=LocalIdentity(), threshold=threshold)
            for name in self.names
        }
        self.coordinator = Coordinator(CONTEXT, threshold, length, bits)
        draws, dtype = np.random.default_rng(count), {32: np.uint32, 64: np.uint64}[bits]
        most = np.iinfo(dtype).max
        self.values = {name: draws.integers(0, most, length, dtype, endpoint=True) for name in self.names}

    def lose(self, names: Collection[str]) -> None:
        self.alive = [name for name in self.alive if name not in names]

    def advertise(self) -> None:
        for name in self.alive:
            self.coordinator.add_advert(name, self.members[name].advertise())

    def share(self) -> None:
        adverts = self.coordinator.adverts()
        for name in self.alive:
            self.coordinator.add_shares(name, self.members[name].share(adverts))

    def mask_one(self, name: str, binding: bytes = BINDING) -> np.ndarray:
        shares = self.coordinator.shares_for(name)
        return self.members[name].mask(self.values[name], shares, binding=binding)

    def mask(self) -> None:
        self.coordinator.begin(BINDING)
        for name in self.alive:
            self.coordinator.add_masked(name, self.mask_one(name))

    def confirm(self) -> None:
        survivors = self.coordinator.survivors()
        for name in self.alive:
            self.coordinator.add_confirmation(name, self.members[name].confirm(survivors))

    def unmask(self) -> None:
        confirmations = self.coordinator.confirmations()
        for name in self.alive:
            self.coordinator.add_unmasked(name, self.members[name].unmask(confirmations))

    def run(self, upto: str = "unmask", lost: Mapping[str, Collection[str]] | None = None) -> None:
        """All phases as far as this one; lost: by the phase before which they fall silent."""
        for phase in PHASES[: PHASES.index(upto) + 1]:
            self.lose((lost or {}).get(phase, ()))
            getattr(self, phase)()

    def plain(self, names: Collection[str]) -> np.ndarray:
        """What the total must be."""
        return np.sum(
            [self.values[name] for name in names], axis=0, dtype=next(iter(self.values.values())).dtype
        )
