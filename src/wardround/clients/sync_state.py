"""SyncState: keeps the clients' memories in step with the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SyncState:
    """What every request says about the run, so that a client's memory follows the server's.

    rewinds: rounds that were restarted, in the order in which that happened; what a client remembers of
    them since then does not count. best: the round (from 0) of the best model so far.
    """

    rewinds: tuple[int, ...] = ()
    best: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"rewinds": list(self.rewinds), "best": self.best}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> SyncState:
        best = facts["best"]
        return cls(tuple(int(round) for round in facts["rewinds"]), None if best is None else int(best))
