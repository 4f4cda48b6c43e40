"""Who follows a run as it goes: the command line, a browser, a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from wardround.config import Config


class Listener(Protocol):
    """Who wants to know how the run goes; the command line draws it."""

    def on_start(self, config: Config, first_round: int) -> None: ...

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None: ...


class SilentListener:
    """A listener that shows nothing."""

    def on_start(self, config: Config, first_round: int) -> None: ...

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None: ...
