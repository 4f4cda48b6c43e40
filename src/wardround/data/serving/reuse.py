"""Reuse: cases that one run has loaded serve the next in the same process, if they are the same.

Nothing changes a case once it is loaded: batches are copies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from wardround.data.cases import ClientData, Split, TensorSplit
from wardround.data.federation import Federation
from wardround.data.serving.resident import CachedSplit
from wardround.machine import free_memory

KEPT_SHARE = 0.1  # of the free memory


class LoadedCases:
    """The clients of one federation at a time. is_on: whether they are kept for the next run."""

    def __init__(self) -> None:
        self.is_on = False
        self._version: str | None = None
        self._clients: dict[str, ClientData] = {}

    def wrap(self, federation: Federation) -> Federation:
        """The federation, whose clients are taken from here where its `version` is the same."""
        if not self.is_on or federation.version is None:
            return federation
        version = cache(federation.version)

        def load_one(name: str) -> ClientData:
            if self._version != version():
                self._version = version()
                self._clients.clear()
            if name in self._clients:
                return self._clients[name]
            data = federation.load_one(name)
            if sum(map(count_bytes, [*self._clients.values(), data])) <= KEPT_SHARE * free_memory():
                self._clients[name] = data
            return data

        return replace(federation, load_one=load_one)


def count_bytes(data: ClientData) -> int:
    """What a client's cases take in memory, or would take."""

    def count(split: Split) -> int:
        if isinstance(split, TensorSplit):
            return split.images.nbytes + split.labels.nbytes
        return sum(case.num_bytes for case in split.cases) if isinstance(split, CachedSplit) else 0

    return count(data.train) + count(data.val) + count(data.test)
