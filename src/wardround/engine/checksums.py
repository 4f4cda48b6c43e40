"""SHA-256 in what a run writes for itself, so that damage on the disk is noticed where it is read.

A tensor file has its checksum at a fixed place of its header, a JSON file under the key `sha256`. Both
cover the whole content, and both are replaced together with it, so a crash cannot part the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wardround.errors import CheckpointError
from wardround.files import jsonable, parse_json, write_json

BLANK = "0" * 64  # in the place of a checksum while it is computed
OPENING = b'{"__metadata__": {"sha256": "'
START = 8 + len(OPENING)  # after the length of the header
END = START + len(BLANK)
CHUNK_BYTES = 1 << 22


def seal(parts: Iterable[bytes | memoryview]) -> tuple[list[bytes | memoryview], str]:
    """A safetensors file with its checksum put in, and the checksum.

    The first of its metadata is `sha256`, and blank. Hashed before it is written: nothing is read back.
    """
    first, *rest = parts
    opening = bytes(first)
    digest = hashlib.sha256(opening)
    for part in rest:
        digest.update(part)
    found = digest.hexdigest()
    return [opening[:START] + found.encode() + opening[END:], *rest], found


def read_checksum(path: Path) -> str | None:
    """The checksum that a tensor file claims; None for one of an earlier version."""
    try:
        with path.open("rb") as file:
            return parse_checksum(file.read(END))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def parse_checksum(opening: bytes) -> str | None:
    if opening[8:START] != OPENING:
        return None
    return opening[START:].decode("ascii", "replace")


def check_whole(path: Path, expected: str | None = None) -> None:
    """Refuse a tensor file that is missing, is not the expected one, or whose bytes have changed."""
    claimed = read_checksum(path)
    if expected is not None and claimed != expected:
        raise CheckpointError(f"{path} is damaged, or not of this checkpoint: its SHA-256 is another.")
    if claimed is None:
        return
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(END)[:START] + BLANK.encode())
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if digest.hexdigest() != claimed:
        raise CheckpointError(f"{path} is damaged: its bytes do not match its SHA-256.")


def write_guarded(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum over all of it."""
    plain = jsonable(content)
    write_json(path, {**plain, "sha256": hash_json(plain)})


def read_guarded(path: Path) -> dict[str, Any]:
    """What `write_guarded` wrote, or a CheckpointError that names the file."""
    content = read_object(path)
    claimed = content.pop("sha256", None)
    if claimed != hash_json(content):
        raise CheckpointError(f"{path} is damaged: its content does not match its SHA-256.")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, not checked."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} cannot be read (it is not a JSON object).")
    return content


def hash_json(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
