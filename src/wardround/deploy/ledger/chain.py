"""How a line of the ledger is sealed, and egress.head.json, which says where the chain ends.

A line is canonical JSON (keys sorted, no spaces, ASCII) with its hash last. The hash is the SHA-256 of the
line without it; `previous` is the hash of the line before, 64 zeros in the first. egress.head.json beside the
ledger holds the number of lines and the last hash, so that lines cut off at the end are noticed too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wardround.errors import WardroundError
from wardround.files import wait_for_lock, write_json

NAME = "egress.jsonl"
ZEROS = "0" * 64
LOCK_SECONDS = 30.0
SEAL = re.compile(rb',"hash":"([0-9a-f]{64})"}')  # how every line ends
SEAL_LENGTH = len(',"hash":""}') + 64


class LedgerError(WardroundError):
    """The ledger cannot be written or trusted; nothing may leave until that is resolved."""


class LedgerHead(NamedTuple):
    """Where the chain ends."""

    lines: int
    hash: str


EMPTY = LedgerHead(0, ZEROS)


def head_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.head.json")


def encode_line(line: Mapping[str, Any]) -> bytes:
    """The one way to write a line."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_sealed(text: bytes) -> dict[str, Any] | None:
    """A line whose hash is right, else None."""
    seal = SEAL.fullmatch(text, max(0, len(text) - SEAL_LENGTH))
    if seal is None or hashlib.sha256(text[:-SEAL_LENGTH] + b"}").hexdigest() != seal[1].decode():
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    good = type(line.get("number")) is int and isinstance(line.get("previous"), str)
    return line if good else None


def read_head(path: Path) -> LedgerHead | None:
    """What the file beside the ledger says; None where there is none."""
    try:
        found = json.loads(head_path(path).read_text(encoding="utf-8"))
        return LedgerHead(int(found["lines"]), str(found["hash"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return LedgerHead(-1, "damaged")


def write_head(path: Path, head: LedgerHead) -> None:
    try:
        write_json(head_path(path), head._asdict())
    except OSError as error:
        raise LedgerError(
            f"{head_path(path)} cannot be written ({error.strerror}), so nothing leaves. Free some space or "
            "repair the disk."
        ) from None


def describe_difference(found: LedgerHead, kept: LedgerHead | None) -> str:
    """How a ledger and the file beside it disagree, in a sentence."""
    if kept is None:
        return "egress.head.json is missing, so lines cut off at the end would not be noticed."
    if kept.lines < 0:
        return "egress.head.json is damaged, so lines cut off at the end would not be noticed."
    if kept.lines > found.lines:
        return f"it has {found.lines} lines, but {kept.lines} were written; lines at the end are missing."
    if kept.lines < found.lines:
        return f"it has {found.lines} lines, but only {kept.lines} were written."
    return f"line {found.lines} is not the one that was written last."


def lock_ledger(file: int, path: Path) -> None:
    """Wait for the lock, with a limit; closing the file releases it."""
    if not wait_for_lock(file, LOCK_SECONDS):
        raise LedgerError(
            f"{path} has been locked by another process for {LOCK_SECONDS:g} s. End that process."
        )
