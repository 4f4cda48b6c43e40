"""What organiser and hospitals say to each other, and the limits of it.

    Hello    who I am and which version          ->  the organiser's clock and version
    Beat     a sign of life                      ->  the runs in progress
    Wait     a request for me?                   ->  JSON, then the request in chunks; or JSON alone
    Answer   JSON, then the reply in chunks      ->  whether it was taken

A connection that breaks costs what had not arrived: both ends keep the part they have, and what is put
together has the SHA-256 that was announced. `Wait` names the part of a request that is there, and models that
came before or that the hospital built itself, which do not come; `Answer` with `ask` says how much of a reply
arrived.

A message is JSON of a few fields; a request or reply is a file that both ends stream and do not read. Who
calls is what the TLS certificate says, in every call. There is no other method, and nothing that arrives here
is passed on to another hospital.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from wardround.deploy import limits
from wardround.errors import WardroundError
from wardround.text import format_bytes, format_duration

# grpc is told before it is imported: what it has to say is for its developers
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

SERVICE = "wardround.Hospitals"
METHODS = ("Hello", "Beat", "Wait", "Answer")
INSTANCE = "wardround-instance"  # metadata of every call: which process of a hospital calls
PREFLIGHT = "preflight"  # the instance of a call that only looks
DISPLACED = "displaced"
IN_USE = "in use"
UNKNOWN_INSTANCE = "say hello first"

MESSAGE_BYTES = limits.PIECE_BYTES + 2**16
BEAT_SECONDS = 2.0
WAIT_SECONDS = 20.0


class MessageError(WardroundError):
    """What arrived is not what the protocol says."""


class CutShort(MessageError):
    """Less arrived than was announced."""


def encode(info: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(info)).encode()


def decode(content: bytes) -> dict[str, Any]:
    """The fields of a message; anything else is refused."""
    if len(content) > limits.INFO_BYTES:
        raise MessageError(f"a message of {len(content):,} bytes, at most {limits.INFO_BYTES:,} are allowed")
    try:
        info = json.loads(content)
    except (ValueError, RecursionError):
        raise MessageError("a message that is not JSON") from None
    if not isinstance(info, dict):
        raise MessageError("a message that is not a JSON object")
    return info


def read_text(info: Mapping[str, Any], key: str, longest: int = 100) -> str:
    value = info.get(key)
    if not isinstance(value, str) or not value.isprintable() or len(value) > longest:
        raise MessageError(f"'{key}' is not text of at most {longest} characters")
    return value


def read_count(info: Mapping[str, Any], key: str, most: int) -> int:
    value = info.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise MessageError(f"'{key}' is not a number from 0 to {most:,}")
    return value


def read_sha256(info: Mapping[str, Any]) -> str:
    """Empty where none is given."""
    value = info.get("sha256", "")
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}|", value):
        raise MessageError("'sha256' is not a SHA-256")
    return value


# Files on their way


class Transfer:
    """How far a file is, and how long the rest will take; start: bytes that were there before."""

    def __init__(self, num_bytes: int, start: int = 0) -> None:
        self.num_bytes = num_bytes
        self.done = self._start = start
        self.began = self.moved = time.monotonic()

    def __str__(self) -> str:
        """
        >>> str(Transfer(2_500_000, start=500_000))
        '0.5 MB of 2.5 MB'
        """
        shown = f"{format_bytes(self.done)} of {format_bytes(self.num_bytes)}"
        rate = (self.done - self._start) / max(1e-3, self.moved - self.began)
        if not rate or self.done == self.num_bytes:
            return shown
        return f"{shown}, about {format_duration((self.num_bytes - self.done) / rate)} left"

    def count(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces as they are, counted."""
        for chunk in chunks:
            self.done += len(chunk)
            self.moved = time.monotonic()
            yield chunk


class Transfers:
    """What is on its way from and to each hospital."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, Transfer]] = {}

    @contextlib.contextmanager
    def show(self, hospital: str, what: str, transfer: Transfer) -> Iterator[Transfer]:
        """Among the others as long as the block lasts."""
        self._open[hospital] = what, transfer
        try:
            yield transfer
        finally:
            self._open.pop(hospital, None)

    def describe(self) -> dict[str, str]:
        """Of each hospital, how far it is, in words."""
        return {hospital: f"{what} {transfer}" for hospital, (what, transfer) in self._open.copy().items()}


def read_chunks(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """A file in pieces, from one byte up to another."""
    with path.open("rb") as file:
        left = (os.fstat(file.fileno()).st_size if end is None else end) - file.seek(start)
        while left > 0 and (chunk := file.read(min(left, limits.CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def write_chunks(path: Path, chunks: Iterable[bytes], num_bytes: int, start: int = 0) -> None:
    """Write pieces into a file, from a byte on, until it has exactly so many bytes.

    More of them leave no file; where fewer come, or the connection breaks, what has come stays.
    """
    left = num_bytes - start
    try:
        with path.open("r+b" if start else "xb") as file:
            file.truncate(file.seek(start))
            for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    raise MessageError(f"more than the {num_bytes:,} bytes that were announced")
                file.write(chunk)
        if left:
            raise CutShort(f"{left:,} bytes less than were announced")
    except CutShort:  # a call that was cancelled looks like this, too
        raise
    except (MessageError, OSError):
        with contextlib.suppress(OSError):
            path.unlink()
        raise
