"""What a run carries from round to round (`Progress`), gives in the end (`Outcome`), reports (`Listener`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from wardround.config import Config
from wardround.data.federation_file import ClientPartition
from wardround.engine.judging.evaluation import Evaluation
from wardround.files import parse_json
from wardround.messages import ServerState
from wardround.metrics import MM


@dataclass
class Progress:
    """What the loop carries from round to round beside the server's state.

    best_scores: of each client, with the best model so far.
    """

    best_round: int | None = None
    best_value: float | None = None
    best_file: str | None = None
    best_scores: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Progress:
        return cls(**{entry.name: stored[entry.name] for entry in fields(cls) if entry.name in stored})


@dataclass
class Outcome:
    """What a finished (or stopped) run holds.

    status: done, or stopped (by the user, with a checkpoint); cross_site: model of one client on the
    test cases of another; troubles: replies lost or refused after the last round, "task/client": reason;
    units: of distances; partition: how clients were made that the data did not come with; unlabelled: client
    -> its training cases without a label, where there are some; lacks: client -> channel -> number of its
    cases without it.
    """

    status: str
    state: ServerState
    progress: Progress
    test: Evaluation | None = None
    cross_site: dict[str, Evaluation] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    units: str = MM
    partition: ClientPartition | None = None
    unlabelled: dict[str, int] = field(default_factory=dict)
    lacks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


# Who follows a run as it goes: the command line, a browser, a test


class Listener(Protocol):
    """Who wants to know how the run goes: extend it, and write those functions that you need.

    They are called in the process that called `wr.run`, which waits for them. An exception in one stops the
    run; it can be resumed.
    """

    def on_start(self, config: Config, first_round: int) -> None:
        """Once; first_round: how many rounds are done already."""
        return

    def on_round(self, round: int, present: Sequence[str]) -> None:
        """Before each round, counted from 1; present: the clients that train in it."""
        return

    def on_progress(self, client: str, step: int, steps: int) -> None:
        """As a client trains: after some of its optimizer steps of this round."""
        return

    def on_record(self, record: Mapping[str, Any]) -> None:
        """After each round; record: its line of records.jsonl, with losses, weights and validation."""
        return


class SilentListener(Listener):
    """A listener that shows nothing."""


@dataclass(frozen=True)
class SeveralListeners:
    """All of them, in their order."""

    listeners: Sequence[Listener]

    def on_start(self, config: Config, first_round: int) -> None:
        for listener in self.listeners:
            listener.on_start(config, first_round)

    def on_round(self, round: int, present: Sequence[str]) -> None:
        for listener in self.listeners:
            listener.on_round(round, present)

    def on_progress(self, client: str, step: int, steps: int) -> None:
        for listener in self.listeners:
            listener.on_progress(client, step, steps)

    def on_record(self, record: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener.on_record(record)


def read_status(folder: Path) -> str | None:
    """The status in result.json: done, stopped, or None where there is no result."""
    try:
        return str(parse_json((folder / "result.json").read_text(encoding="utf-8"))["status"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
