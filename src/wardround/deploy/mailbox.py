"""Letters to hospitals and their replies, for channels that hospitals poll.

A hospital asks for its letter, works, and sends a reply. A reply is accepted once, from the hospital that was
asked, before the deadline; any other is a stray, with the reason.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wardround.deploy import limits

Content = TypeVar("Content")
Answered = TypeVar("Answered")

log = logging.getLogger(__name__)


@dataclass
class Letter(Generic[Content]):
    """One request on its way to one hospital; content: what the channel carries."""

    hospital: str
    content: Content
    deadline: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class ClosedLetter:
    """A request whose reply is no longer awaited; reported: whether its late reply is among the strays."""

    hospital: str
    answered: bool
    reported: bool = False


def are_absent(hospitals: Iterable[str], heard: Mapping[str, float], seconds: float) -> bool:
    """Whether none of these was heard from for so long; heard: seconds since each was, if ever."""
    return all(heard.get(hospital, 0.0) >= seconds for hospital in hospitals)


class Mailbox(Generic[Content, Answered]):
    """Open and closed letters, replies in order of arrival, and strays: replies that were not wanted.

    on_close: called with the id of every letter that is closed.
    """

    def __init__(self, on_close: Callable[[str], None] = lambda letter_id: None) -> None:
        self._on_close = on_close
        self._lock = threading.Lock()
        self._open: dict[str, Letter[Content]] = {}  # by letter id
        self._closed: OrderedDict[str, ClosedLetter] = OrderedDict()
        self._arrived: queue.SimpleQueue[tuple[Letter[Content], Answered | None]] = queue.SimpleQueue()
        self._strays: deque[tuple[str, str]] = deque(maxlen=limits.STRAYS)

    def __len__(self) -> int:
        return len(self._open)

    # Strays

    def note_stray(self, hospital: str, why: str) -> None:
        log.warning("%s: %s", hospital, why)
        with self._lock:
            self._strays.append((hospital, why))

    def take_strays(self) -> list[tuple[str, str]]:
        """The strays since the last call."""
        with self._lock:
            found = list(self._strays)
            self._strays.clear()
        return found

    # Letters

    def post(self, letters: Iterable[Letter[Content]]) -> None:
        with self._lock:
            self._open |= {letter.id: letter for letter in letters}

    def find(self, hospital: str) -> Letter[Content] | None:
        """The open letter to a hospital; a hospital that was restarted gets the same one again."""
        now = time.monotonic()
        with self._lock:
            mine = (letter for letter in self._open.values() if letter.hospital == hospital)
            return next((letter for letter in mine if letter.deadline > now), None)

    def close(self, letter_id: str, *, answered: bool = False) -> Letter[Content] | None:
        """Stop waiting for a reply; the letter, if it was open."""
        with self._lock:
            letter = self._open.pop(letter_id, None)
            if letter is None:
                return None
            self._closed[letter_id] = ClosedLetter(letter.hospital, answered)
            while len(self._closed) > limits.CLOSED_LETTERS:
                self._closed.popitem(last=False)
        self._on_close(letter_id)
        return letter

    def close_all(self) -> None:
        for letter_id in list(self._open):
            self.close(letter_id)

    # Replies

    def admit(self, hospital: str, letter_id: str) -> Letter[Content] | None:
        """The open letter that this hospital may answer; any other reply is a stray."""
        with self._lock:
            letter = self._open.get(letter_id)
            closed = self._closed.get(letter_id)
        if letter is None:
            self.refuse(hospital, closed)
        elif letter.hospital != hospital:
            self.note_stray(hospital, f"foreign: a reply to a request made to '{letter.hospital}'")
        else:
            return letter
        return None

    def accept(self, hospital: str, letter_id: str, read: Callable[[], Answered | None]) -> bool:
        """Take a reply in, or say why not; read: what it holds, None where it cannot be read."""
        letter = self.admit(hospital, letter_id)
        if letter is None:
            return False
        reply = read()
        if self.close(letter_id, answered=True) is None:
            self.note_stray(hospital, "duplicate: this request was answered a moment ago")
            return False
        self._arrived.put((letter, reply))
        return True

    def refuse(self, hospital: str, closed: ClosedLetter | None = None) -> None:
        """Note a reply that is not wanted."""
        if closed is None or closed.hospital != hospital:
            self.note_stray(hospital, "unknown: a reply to no request of this run")
        elif closed.answered:
            self.note_stray(hospital, "duplicate: this request was answered before")
        elif not closed.reported:
            closed.reported = True
            self.note_stray(hospital, "late: its reply came after the deadline")

    def take(self, seconds: float) -> tuple[Letter[Content], Answered | None]:
        """The next reply, if one arrives in time; else queue.Empty."""
        return self._arrived.get(timeout=seconds)
