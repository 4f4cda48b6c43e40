"""What organiser and hospitals say to each other, and the limits of it.

    Hello    who I am and which version          ->  the organiser's clock and version
    Beat     a sign of life                      ->  the runs in progress
    Wait     a request for me?                   ->  JSON, then the request in chunks; or JSON alone
    Answer   JSON, then the reply in chunks      ->  whether it was taken

A message is JSON of a few fields; a request or reply is a file that both ends stream and do not read. Who
calls is what the TLS certificate says, in every call. There is no other method, and nothing that arrives here
is passed on to another hospital.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from wardround.deploy import limits
from wardround.errors import WardroundError

# grpc is told before it is imported: what it has to say is for its developers
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

SERVICE = "wardround.Hospitals"
METHODS = ("Hello", "Beat", "Wait", "Answer")
INSTANCE = "wardround-instance"  # metadata of every call: which process of a hospital calls
PREFLIGHT = "preflight"  # the instance of a call that only looks
DISPLACED = "displaced"
IN_USE = "in use"
UNKNOWN_INSTANCE = "say hello first"

MESSAGE_BYTES = limits.CHUNK_BYTES + 2**16
BEAT_SECONDS = 2.0
WAIT_SECONDS = 20.0


class MessageError(WardroundError):
    """What arrived is not what the protocol says."""


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


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file in pieces."""
    with path.open("rb") as file:
        while chunk := file.read(limits.CHUNK_BYTES):
            yield chunk


def write_chunks(path: Path, chunks: Iterable[bytes], num_bytes: int) -> None:
    """Write pieces into a file of exactly so many bytes, or leave no file."""
    left = num_bytes
    try:
        with path.open("xb") as file:
            for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    raise MessageError(f"more than the {num_bytes:,} bytes that were announced")
                file.write(chunk)
        if left:
            raise MessageError(f"{left:,} bytes less than were announced")
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
