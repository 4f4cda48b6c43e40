"""Replies on their way into files of the organiser: one for each letter, resumed where a connection broke."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.deploy import limits
from wardround.deploy.rpc.service import Transfer, write_chunks
from wardround.files import compute_sha256


class ReplyRefused(Exception):
    """A reply that cannot be taken now; the hospital tries again."""


@dataclass(frozen=True)
class Announced:
    """A reply as its hospital announces it; sha256: empty where it is not to be resumed."""

    num_bytes: int
    sha256: str = ""


@dataclass
class ReplyFile:
    """A reply that is not whole yet; call: the one that brings it now, None while there is none."""

    path: Path
    announced: Announced
    call: Any
    transfer: Transfer

    def count(self) -> int:
        """Bytes that are here."""
        return self.path.stat().st_size if self.path.exists() else 0


class Replies:
    """What arrives, by letter. A part is kept until its letter is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._files: dict[str, ReplyFile] = {}

    def find_start(self, letter: str, announced: Announced) -> int:
        """Bytes of this reply that are here.

        Who asks has lost a connection: a call that still waits for the rest there is ended.
        """
        with self._changed:
            reply = self._files.get(letter)
            if reply is None or reply.announced != announced or not announced.sha256:
                return 0
            self._end_call(reply)
            return reply.count()

    def receive(self, letter: str, reply: ReplyFile, start: int, chunks: Iterator[bytes]) -> Path:
        """Write a reply as it arrives, from a byte on, and return its file when it is whole.

        reply: with the path for a new file; a part that is here is continued in its own.
        """
        self._enter(letter, reply, start)
        announced, is_whole = reply.announced, False
        try:
            write_chunks(reply.path, reply.transfer.count(chunks), announced.num_bytes, start)
            if announced.sha256 and compute_sha256(reply.path) != announced.sha256:
                reply.path.unlink()
                raise ReplyRefused("the reply does not have the SHA-256 that was announced")
            is_whole = True
            return reply.path
        finally:
            with self._changed:
                reply.call = None
                is_wanted = self._files.get(letter) is reply
                if is_whole or not announced.sha256:
                    self._files.pop(letter, None)
                if not is_whole and not (is_wanted and announced.sha256):
                    reply.path.unlink(missing_ok=True)
                self._changed.notify_all()

    def _enter(self, letter: str, reply: ReplyFile, start: int) -> None:
        with self._changed:
            before = self._files.get(letter)
            if before is not None and before.call is not None:
                raise ReplyRefused("a reply to this request is on its way")
            if before is not None and start and before.announced == reply.announced:
                reply.path = before.path
            elif before is not None:
                before.path.unlink(missing_ok=True)
            if start > reply.count():
                raise ReplyRefused("less of this reply is here")
            self._files[letter] = reply

    def end(self, letter: str) -> None:
        """A reply that is no longer wanted is not received to its end."""
        with self._changed:
            reply = self._files.pop(letter, None)
            if reply is not None:
                cancel(reply.call)
                if reply.call is None:
                    reply.path.unlink(missing_ok=True)

    def end_stalled(self) -> None:
        """End calls that bring nothing: the place that one takes is lent, and comes back."""
        now = time.monotonic()
        with self._changed:
            for reply in self._files.values():
                if now - reply.transfer.moved > limits.STALL_SECONDS:
                    cancel(reply.call)

    def _end_call(self, reply: ReplyFile) -> None:
        cancel(reply.call)
        self._changed.wait_for(lambda: reply.call is None, limits.HANDSHAKE_SECONDS)


def cancel(call: Any) -> None:
    with suppress(Exception):
        call.cancel()
