"""Reuse: cases that one run has loaded serve the next in the same process, if they are the same.

Nothing changes a case once it is loaded: batches are copies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from wardround.data.cases import ClientData, Split, TensorSplit
from wardround.data.federation import Federation, ScanSummary
from wardround.data.serving.resident import CachedSplit, Residence
from wardround.machine import free_memory

KEPT_SHARE = 0.1  # of the free memory


class LoadedCases:
    """The clients of one federation at a time, and what their scans were like.

    is_on: whether they are kept for the next run.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._version: str | None = None
        self._clients: dict[tuple[str, Residence], ClientData] = {}
        self._scans: ScanSummary | None = None

    def wrap(self, federation: Federation, resident: Residence) -> Federation:
        """The federation, whose clients are taken from here where its `version` is the same."""
        if not self.is_on or federation.version is None:
            return federation
        version, summarise = cache(federation.version), federation.summarise_scans

        def load_one(name: str) -> ClientData:
            self._begin(version())
            if (name, resident) in self._clients:
                return self._clients[name, resident]
            data = federation.load_one(name)
            if sum(map(count_bytes, [*self._clients.values(), data])) <= KEPT_SHARE * free_memory():
                self._clients[name, resident] = data
            return data

        def summarise_scans() -> ScanSummary:
            self._begin(version())
            assert summarise is not None
            self._scans = self._scans or summarise()
            return self._scans

        return replace(
            federation, load_one=load_one, summarise_scans=None if summarise is None else summarise_scans
        )

    def _begin(self, version: str) -> None:
        """Forget what is of another federation."""
        if self._version != version:
            self._version = version
            self._clients.clear()
            self._scans = None


def count_bytes(data: ClientData) -> int:
    """What a client's cases take in memory, or would take."""

    def count(split: Split) -> int:
        if isinstance(split, TensorSplit):
            return split.images.nbytes + split.labels.nbytes
        return sum(case.num_bytes for case in split.cases) if isinstance(split, CachedSplit) else 0

    return count(data.train) + count(data.val) + count(data.test)
