"""Writing the ledger: one line a message, on the disk before the message leaves.

A line is canonical JSON (keys sorted, no spaces, ASCII) with its hash last. The hash is the SHA-256 of the
line without it; `previous` is the hash of the line before, 64 zeros in the first. egress.head.json beside the
ledger holds the number of lines and the last hash, so that lines cut off at the end are noticed too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from wardround.engine.records import brief
from wardround.errors import WardroundError
from wardround.files import jsonable, parse_json, wait_for_lock, write_json
from wardround.machine import open_file, read_into, sync_folder

NAME = "egress.jsonl"
ZEROS = "0" * 64
LOCK_SECONDS = 30.0
SEAL = re.compile(rb',"hash":"([0-9a-f]{64})"}')  # how every line ends
SEAL_LENGTH = len(',"hash":""}') + 64
CHUNK = 64 * 1024
WHAT_TO_DO = (
    "Nothing leaves until this is resolved; see: wardround egress verify. To start a new ledger, "
    "move egress.jsonl and egress.head.json aside, and keep them."
)
log = logging.getLogger(__name__)


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
    """The canonical bytes of a line."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_sealed(text: bytes) -> dict[str, Any] | None:
    """A line whose hash is right, else None."""
    seal = SEAL.fullmatch(text, max(0, len(text) - SEAL_LENGTH))
    if seal is None or hashlib.sha256(text[:-SEAL_LENGTH] + b"}").hexdigest() != seal[1].decode():
        return None
    line = parse_line(text) or {}
    return line if type(line.get("number")) is int and isinstance(line.get("previous"), str) else None


def parse_line(text: bytes) -> dict[str, Any] | None:
    """The values of a line, None where it is not a JSON object."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def read_head(path: Path) -> LedgerHead | None:
    """What the file beside the ledger says; None where there is none."""
    try:
        found = parse_json(head_path(path).read_text(encoding="utf-8"))
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
    if kept is None or kept.lines < 0:
        what = "missing" if kept is None else "damaged"
        return f"egress.head.json is {what}, so lines cut off at the end would not be noticed."
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


class Ledger:
    """The ledger of one hospital; opening it repairs what a crash leaves behind, and refuses anything else.

    Several processes may hold one: each line is written under a lock, behind whatever line is last by then.
    """

    def __init__(self, path: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.path = Path(path)
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as file:
            # of a process that was killed; heads are written under the lock
            for partial in self.path.parent.glob(f".{head_path(self.path).name}.*.partial"):
                partial.unlink(missing_ok=True)
            self._last(file)

    def append(self, header: Mapping[str, Any], num_bytes: int, *, name: str | None = None) -> dict[str, Any]:
        """Write the line of a parcel that is about to leave, from its header; name: the run's, beside its id.

        Rounds count from 1. What is exchanged before the first is round 0; the test comes one after the last.
        """
        more = dict(header["more"])
        words = {key: more.pop(key, None) for key in ("refused", "failure", "privacy")}
        losses = {f"loss/{term}": value for term, value in dict(more.pop("loss", None) or {}).items()}
        return self.add(
            {
                "run": header["run"],
                **({} if name is None else {"name": name}),
                "round": header["round"] + 1,
                "task": header["task"],
                "tensors": {key: facts["shape"] for key, facts in header["tensors"].items()},
                "types": {key: describe_coding(facts) for key, facts in header["tensors"].items()},
                "bytes": num_bytes,
                "sha256": header["sha256"],
                "scalars": {key: brief(value) for key, value in header["scalars"].items()} | losses,
                "facts": {key: brief(value) for key, value in more.items()},
                **{key: value for key, value in words.items() if value is not None},
            }
        )

    def add(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line and sync it to disk; number, time and the chain are filled in."""
        with self._locked() as file:
            last = self._last(file)
            line = {
                **jsonable(entry),
                "number": last.lines + 1,
                "time": self._clock().isoformat(timespec="milliseconds"),
                "previous": last.hash,
            }
            text = encode_line(line)
            line["hash"] = hashlib.sha256(text).hexdigest()
            whole = text[:-1] + f',"hash":"{line["hash"]}"}}\n'.encode()
            self._write(file, whole)
            write_head(self.path, LedgerHead(last.lines + 1, line["hash"]))  # a crash before this is repaired
        return line

    @property
    def head(self) -> LedgerHead:
        """Number of lines and hash of the last."""
        with self._locked() as file:
            return self._last(file)

    def _write(self, file: int, content: bytes) -> None:
        """The whole line or none of it, as when the disk is full."""
        before = os.fstat(file).st_size
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
            if before == 0:
                sync_folder(self.path.parent)
        except OSError as error:
            os.ftruncate(file, before)
            raise LedgerError(
                f"{self.path} cannot be written ({error.strerror}), so nothing leaves. Free some space or "
                "repair the disk."
            ) from None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file, under its lock."""
        try:
            file = open_file(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be opened ({error.strerror}), so nothing leaves."
            ) from None
        try:
            lock_ledger(file, self.path)
            yield file
        finally:
            os.close(file)

    def _last(self, file: int) -> LedgerHead:
        """Where the chain ends by the last line alone; repairs a crash, refuses anything else."""
        self._repair(file)
        size = os.fstat(file).st_size
        text = None if size == 0 else read_tail(file, size - 1)  # without its line break
        line = None if text is None else parse_sealed(text)
        if text is not None and line is None:
            raise LedgerError(f"{self.path}: the last line is damaged. {WHAT_TO_DO}")
        found = EMPTY if line is None else LedgerHead(line["number"], line["hash"])
        kept = read_head(self.path)
        if kept == found or (kept is None and found == EMPTY):
            return found
        if line is not None and (kept or EMPTY) == LedgerHead(found.lines - 1, line["previous"]):
            write_head(self.path, found)  # a crash came between the line and the head
            return found
        raise LedgerError(f"{self.path}: {describe_difference(found, kept)} {WHAT_TO_DO}")

    def _repair(self, file: int) -> None:
        """Move an incomplete last line aside: its message never left."""
        size = os.fstat(file).st_size
        piece = read_tail(file, size)
        if not piece:
            return
        aside = self.path.with_name(f"{self.path.stem}.damaged")
        with os.fdopen(open_file(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as kept:
            kept.write(piece + b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        os.ftruncate(file, size - len(piece))
        os.fsync(file)
        log.warning("%s ended in an incomplete line, as after a crash; moved to %s", self.path, aside.name)


def describe_coding(facts: Mapping[str, Any]) -> str:
    """How a tensor travels.

    >>> describe_coding({"dtype": "float16", "shape": [3], "coding": "float16", "compress": "zlib"})
    'float16, float16, zlib'
    """
    return ", ".join(str(value) for key, value in facts.items() if key != "shape")


def read_tail(file: int, end: int) -> bytes:
    """The bytes between the last line break before `end` and `end`, read backwards."""
    piece, start = b"", end
    while start > 0 and b"\n" not in piece:
        step = min(CHUNK, start)
        start -= step
        before = bytearray(step)
        read_into(file, memoryview(before), start)
        piece = bytes(before) + piece
    return piece[piece.rfind(b"\n") + 1 :]
