"""The budget file: a line for every answer that spends privacy, on the disk before the answer leaves.

Lines are only ever added, under a lock, so that processes, restarts, retries and runs share one account. A
line stands for its answer whether or not that arrived: a task that is done again is charged again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from wardround.errors import WardroundError
from wardround.files import parse_json, wait_for_lock
from wardround.machine import open_file, read_into, sync_folder, write_at
from wardround.privacy.accountant import Release, calibrate_noise, count_epsilon
from wardround.privacy.settings import Policy, PrivacySettings

NAME = "privacy.jsonl"
LOCK_SECONDS = 60.0


class PrivacyRefusal(WardroundError):
    """Nothing leaves: epsilon is spent or cannot be counted, or no filter covers what was asked for."""


class Line(NamedTuple):
    """One answer in the file; is_shared: its noise is in a secure sum once, in parts from all."""

    run: str
    round: int
    level: str
    release: Release
    time: str = ""
    is_shared: bool = False


class PrivacyBudget:
    """The account of one client's training cases, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def read(self) -> list[Line]:
        """Every line; one that a crash cut off stands for nothing, for its answer never left."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(str(error)) from None
        return [self._parse(line, number) for number, line in enumerate(text.split("\n")[:-1], start=1)]

    def charge(
        self, policy: Policy, run: str, round: int, *, rounds_left: int, rate: float = 1.0, steps: int = 1
    ) -> float:
        """The noise of this answer, written down before it is returned.

        It is the least with which this and the rounds to come end within the epsilon of the run, and of the
        hospital. rounds_left: with this one.
        """
        with self._locked() as file:
            lines = self.read()
            noise = choose_noise(policy, run, lines, rate, steps * rounds_left)
            line = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "run": run,
                "round": round + 1,
                "level": policy.run.level,
                **Release(noise, rate, steps)._asdict(),
                **({"shared": True} if policy.run.shares_noise else {}),
            }
            self._append(file, json.dumps(line).encode() + b"\n")
        return noise

    def spent(self, settings: PrivacySettings, run: str | None = None) -> float:
        """Epsilon of a run's answers, or of all."""
        lines = [line for line in self.read() if run is None or line.run == run]
        return count_epsilon([line.release for line in lines], settings.delta)

    def _parse(self, text: str, number: int) -> Line:
        try:
            values: Mapping[str, Any] = parse_json(text)
            release = Release(float(values["noise"]), float(values["rate"]), int(values["steps"]))
            if not (release.noise > 0 and 0 < release.rate <= 1 and release.steps > 0):
                raise ValueError("a number is outside of its range")
            told = (str(values["run"]), int(values["round"]), str(values["level"]))
            return Line(*told, release, str(values["time"]), values.get("shared") is True)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise self._damaged(f"line {number}: {error}") from None

    def _damaged(self, what: str) -> PrivacyRefusal:
        return PrivacyRefusal(
            f"{self.path} is damaged ({what}), so nobody knows what was spent, and nothing leaves. Restore "
            "it from a backup made after the last answer: what an older one lacks would not be counted."
        )

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open_file(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not wait_for_lock(file, LOCK_SECONDS):
                raise PrivacyRefusal(
                    f"{self.path} has been locked by another process for {LOCK_SECONDS:g} s."
                )
            yield file
        finally:
            os.close(file)

    def _append(self, file: int, content: bytes) -> None:
        """The line, on the disk; what a crash left of another goes first."""
        size = os.fstat(file).st_size
        before = bytearray(size)
        read_into(file, memoryview(before), 0)
        end = before.rfind(b"\n") + 1
        try:
            os.ftruncate(file, end)
            write_at(file, content, end)
            os.fsync(file)
            if size == 0:
                sync_folder(self.path.parent)
        except OSError as error:
            raise PrivacyRefusal(
                f"{self.path} cannot be written ({error.strerror}), so nothing leaves."
            ) from None


def choose_noise(policy: Policy, run: str, lines: Sequence[Line], rate: float, steps: int) -> float:
    """The noise for so many steps from here on; refused where epsilon is spent or cannot be counted."""
    accounts = [(policy.run, [line for line in lines if line.run == run], "this run")]
    if policy.total is not None:
        accounts.append((policy.total, list(lines), "this hospital"))
    chosen = 0.0
    for settings, those, whose in accounts:
        if policy.run.level == "client" and any(line.level != "client" for line in those):
            raise PrivacyRefusal(
                "earlier answers about these training cases had case-level privacy, which does not add up to "
                "a client-level epsilon (privacy.level)"
            )
        noise = calibrate_noise(
            [line.release for line in those], rate, steps, settings.epsilon, settings.delta
        )
        if noise is None:
            limit = f"epsilon {settings.epsilon:g} at delta {settings.delta:g} (privacy.epsilon)"
            raise PrivacyRefusal(
                f"the privacy budget of {whose} is spent: {limit}, so nothing more is answered"
                if those
                else f"{limit} of {whose} is so small that nothing would be left of an answer, so nothing is "
                "answered"
            )
        chosen = max(chosen, noise)
    return chosen
