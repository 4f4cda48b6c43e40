"""Whether a machine is ready to use its kit: the checks, by what they look at, and here what they share.

`sequence.preflight` runs them all; commands that check before they start use kit.py and connection.py alone,
which do not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from wardround.deploy.kits.kit import Kit
from wardround.errors import ConfigError

State = Literal["ok", "warning", "wrong", "not reached"]
TIMEOUT = 5.0  # seconds for a connection, and for the handshake after it
NEW_KIT = (
    "Renew it: wardround enrol KIT --renew at a hospital, wardround provision --renew organiser at the "
    "organiser."
)


@dataclass(frozen=True)
class Check:
    """What was checked, its state, and what to do."""

    name: str
    state: State
    found: str = ""
    todo: str = ""


class CheckFailed(ConfigError):
    """A check that ends the preflight."""

    def __init__(self, found: str, todo: str = "") -> None:
        super().__init__(f"{found} {todo}")
        self.found, self.todo = found, todo


class TrustFailed(CheckFailed):
    """One side does not trust the other: waiting will not help."""


@dataclass
class PreflightContext:
    """What the checks share; clock: what the server said the time is, less what it is here.

    server_version: of the wardround there.
    """

    kit: Kit
    data: Path | None = None
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    timeout: float = TIMEOUT
    clock: timedelta | None = None
    server_version: str | None = None


def warn(found: str, todo: str = "") -> Check:
    return Check("", "warning", found, todo)
