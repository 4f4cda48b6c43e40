"""egress.jsonl: the hospital's own list of every message that left it, each line chained to the one before.

A line is canonical JSON (keys sorted, no spaces, ASCII) with its hash put last. The hash is the SHA-256 of
the line without it, and `previous` is the hash of the line before, 64 zeros in the first. egress.head.json
beside it holds the number of lines and the last hash, so that lines cut off at the end are missed too.

A line is on the disk before its message leaves. Whoever can write both files can write a new chain; note the
last hash elsewhere from time to time, and even that shows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wardround.engine.records import brief
from wardround.errors import ConfigError, WardroundError
from wardround.files import jsonable, wait_for_lock, write_json

if TYPE_CHECKING:
    from wardround.deploy.wire import Parcel

log = logging.getLogger(__name__)

NAME = "egress.jsonl"
ZEROS = "0" * 64
LOCK_SECONDS = 30.0
CHUNK = 64 * 1024
SEAL = re.compile(rb',"hash":"([0-9a-f]{64})"}')  # how every line ends
SEAL_LENGTH = len(',"hash":""}') + 64


class LedgerError(WardroundError):
    """The ledger cannot be written or trusted; nothing may leave before somebody has looked."""


class Head(NamedTuple):
    """Where the chain ends."""

    lines: int
    hash: str


EMPTY = Head(0, ZEROS)


def head_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.head.json")


def damaged_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.damaged")


# Writing


class Ledger:
    """The ledger of one hospital; opening it heals what a crash leaves behind, and refuses anything else.

    Several processes may hold one: each line is written under a lock, behind whatever line is last by then.
    """

    def __init__(self, path: Path, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.path = Path(path)
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as file:
            for partial in self.path.parent.glob(f".{head_path(self.path).name}.*.partial"):
                partial.unlink(
                    missing_ok=True
                )  # of a process that was killed; heads are written under the lock
            self._last(file)

    def append(self, parcel: Parcel, *, name: str | None = None) -> dict[str, Any]:
        """Write the line of a parcel that is about to leave; name: the run's, beside its id.

        Rounds count from 1. What is exchanged before the first is round 0; the test comes one after the last.
        """
        header = parcel.header
        more = dict(header["more"])
        words = {key: more.pop(key, None) for key in ("refused", "failure")}
        losses = {f"loss/{term}": value for term, value in dict(more.pop("loss", None) or {}).items()}
        return self.add(
            {
                "run": header["run"],
                **({} if name is None else {"name": name}),
                "round": header["round"] + 1,
                "task": header["task"],
                "tensors": {key: facts["shape"] for key, facts in header["tensors"].items()},
                "types": {key: sent_as(facts) for key, facts in header["tensors"].items()},
                "bytes": parcel.num_bytes,
                "sha256": header["sha256"],
                "scalars": {key: brief(value) for key, value in header["scalars"].items()} | losses,
                "facts": {key: brief(value) for key, value in more.items()},
                **{key: value for key, value in words.items() if value is not None},
            }
        )

    def add(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Add a line and bring it to the disk; number, time and the chain are filled in."""
        with self._locked() as file:
            last = self._last(file)
            line = {
                **jsonable(entry),
                "number": last.lines + 1,
                "time": self._clock().isoformat(timespec="milliseconds"),
                "previous": last.hash,
            }
            text = canonical(line)
            line["hash"] = hashlib.sha256(text).hexdigest()
            whole = text[:-1] + f',"hash":"{line["hash"]}"}}\n'.encode()
            self._write(file, whole)
            write_head(self.path, Head(last.lines + 1, line["hash"]))  # a crash before it is healed
        return line

    @property
    def head(self) -> Head:
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
                f"{self.path} cannot be written ({error.strerror}), so nothing leaves. Make room or mend the "
                "disk."
            ) from None

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file, with nobody else writing."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be opened ({error.strerror}), so nothing leaves."
            ) from None
        try:
            lock(file, self.path)
            yield file
        finally:
            os.close(file)

    def _last(self, file: int) -> Head:
        """Where the chain ends by the last line alone; heals a crash, refuses anything else."""
        self._heal(file)
        text = last_line(file)
        line = None if text is None else sealed(text)
        if text is not None and line is None:
            raise LedgerError(f"{self.path}: the last line is damaged. {WHAT_TO_DO}")
        found = EMPTY if line is None else Head(line["number"], line["hash"])
        kept = read_head(self.path)
        if kept == found or (kept is None and found == EMPTY):
            return found
        if line is not None and (kept or EMPTY) == Head(found.lines - 1, line["previous"]):
            write_head(self.path, found)  # a crash came between the line and the head
            return found
        raise LedgerError(f"{self.path}: {difference(found, kept)} {WHAT_TO_DO}")

    def _heal(self, file: int) -> None:
        """Move a last line without its end aside: its message never left."""
        size = os.fstat(file).st_size
        piece = tail(file, size)
        if not piece:
            return
        aside = damaged_path(self.path)
        with open(os.open(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as kept:  # noqa: PTH123
            kept.write(piece + b"\n")
            kept.flush()
            os.fsync(kept.fileno())
        os.ftruncate(file, size - len(piece))
        os.fsync(file)
        log.warning("%s ended in the middle of a line, as after a crash; moved to %s", self.path, aside.name)


def lock(file: int, path: Path) -> None:
    """Wait for the lock, but not for ever; closing the file releases it."""
    if not wait_for_lock(file, LOCK_SECONDS):
        raise LedgerError(
            f"{path} has been locked by another process for {LOCK_SECONDS:g} s. End that process."
        )


WHAT_TO_DO = (
    "Nothing leaves before somebody has looked: wardround egress verify says more. To begin a new ledger, "
    "move egress.jsonl and egress.head.json aside, and keep them."
)


def canonical(line: Mapping[str, Any]) -> bytes:
    """The one way to write a line."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sent_as(facts: Mapping[str, Any]) -> str:
    """How a tensor travels.

    >>> sent_as({"dtype": "float16", "shape": [3], "coding": "float16", "compress": "zlib"})
    'float16, float16, zlib'
    """
    return ", ".join(str(value) for key, value in facts.items() if key != "shape")


def write_head(path: Path, head: Head) -> None:
    try:
        write_json(head_path(path), head._asdict())
    except OSError as error:
        raise LedgerError(
            f"{head_path(path)} cannot be written ({error.strerror}), so nothing leaves. Make room or mend "
            "the disk."
        ) from None


def read_head(path: Path) -> Head | None:
    """What the file beside the ledger says; None where there is none."""
    try:
        found = json.loads(head_path(path).read_text(encoding="utf-8"))
        return Head(int(found["lines"]), str(found["hash"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return Head(-1, "damaged")


def difference(found: Head, kept: Head | None) -> str:
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


def sync_folder(folder: Path) -> None:
    """Bring a new file's name to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def tail(file: int, end: int) -> bytes:
    """What stands between the last line break before `end` and `end`, read from behind."""
    piece, start = b"", end
    while start > 0 and b"\n" not in piece:
        step = min(CHUNK, start)
        start -= step
        piece = os.pread(file, step, start) + piece
    return piece[piece.rfind(b"\n") + 1 :]


def last_line(file: int) -> bytes | None:
    """The last line, without its line break; None for an empty file."""
    size = os.fstat(file).st_size
    return None if size == 0 else tail(file, size - 1)


def sealed(text: bytes) -> dict[str, Any] | None:
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


# Reading


def find(path: Path) -> Path:
    """The egress.jsonl that a kit, a kit's state folder, a run folder or the file itself stands for.

    A hospital's kit from which nothing has left yet has none; then it is the place where it will be.
    """
    path = Path(path)
    if not path.exists() and not head_path(path).exists():
        raise ConfigError(f"{path} does not exist. Give a kit, its state folder, or an {NAME}.")
    if not path.is_dir():
        return path
    for place in (path / "state" / NAME, path / NAME):
        if place.exists() or head_path(place).exists():
            return place
    if (path / "kit.json").exists():
        if role_of(path) == "organiser":
            raise ConfigError(
                f"{path} is the organiser's kit; hospitals keep the ledger. What reached the organiser is in "
                f"each run: {path}/runs/NAME/{NAME}"
            )
        return path / "state" / NAME
    raise ConfigError(f"{path} holds no {NAME}. Give a hospital's kit, its state folder, or a run folder.")


def role_of(kit: Path) -> str | None:
    try:
        role = json.loads((kit / "kit.json").read_text(encoding="utf-8")).get("role")
    except (OSError, ValueError, AttributeError):
        return None
    return str(role)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, one at a time; a last one that a crash cut off is left out."""
    try:
        with Path(path).open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if not isinstance(line, dict):
                    raise LedgerError(
                        f"{path}, line {number} cannot be read. See: wardround egress verify {path}"
                    )
                yield line
    except FileNotFoundError:
        return


def is_organisers(path: Path) -> bool:
    """Whether this is a run's plain list of what reached the organiser, which has no chain."""
    if head_path(path).exists() or not path.exists():
        return False
    with path.open("rb") as file:
        first = file.readline()
    try:
        line = json.loads(first)
    except ValueError:
        return False
    return (
        isinstance(line, dict)
        and "phase" in line
        and "client" in line
        and not {"hash", "previous"} & set(line)
    )


# Checking

What = Literal["edited", "removed", "inserted", "reordered", "truncated", "unsure"]
EDITED: What = "edited"
INSERTED: What = "inserted"


@dataclass(frozen=True)
class Verdict:
    """What a look at the whole chain found.

    lines: whole lines in the file; line: the first that is wrong, from 1; what: what was done to it
    (unsure: the end cannot be checked); sentence: the same in words; hash: of the last line, if all is well.
    """

    ok: bool
    lines: int
    sentence: str
    line: int | None = None
    what: What | None = None
    hash: str | None = None


@dataclass(frozen=True)
class Link:
    """What the chain needs of a line; intact: whether its own hash is right."""

    place: int
    intact: bool
    number: int = 0
    previous: str = ""
    hash: str = ""


def verify(path: Path) -> Verdict:
    """Follow the chain from the first line to the last; the file is read once and never held in memory."""
    path = Path(path)
    if is_organisers(path):
        raise ConfigError(
            f"{path} is the organiser's list of what reached it and has no chain to verify. The ledger with "
            "a chain is at each hospital, in its kit."
        )
    size, kept = state_of(path)
    expected, links = Head(1, ZEROS), Links(path, size)
    before: Link | None = None
    for link in links:
        if not link.intact or (link.number, link.previous) != (expected.lines, expected.hash):
            return broken(before, link, expected, links, kept)
        before, expected = link, Head(link.number + 1, link.hash)
    found = Head(expected.lines - 1, expected.hash)
    return ended(found, kept, before, links.is_cut)


def state_of(path: Path) -> tuple[int, Head | None]:
    """Length of the file and what its head says, at one moment between two lines."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0, read_head(path)
    try:
        lock(file, path)
        return os.fstat(file).st_size, read_head(path)
    finally:
        os.close(file)


def ended(found: Head, kept: Head | None, last: Link | None, is_cut: bool) -> Verdict:
    """The verdict on a chain without a gap: does it end where it should?"""
    lines = found.lines
    one_behind = last is not None and (kept or EMPTY) == Head(lines - 1, last.previous)
    if (kept or EMPTY) == found or one_behind:
        words = (
            "no line yet" if not lines else "1 line, unbroken" if lines == 1 else f"{lines} lines, unbroken"
        )
        cut = "; a piece of one more was cut off by a crash, and its message never left" if is_cut else ""
        return Verdict(True, lines, f"{words}{cut}.", hash=found.hash if lines else None)
    why = difference(found, kept)
    if kept is None or kept.lines < 0:
        return Verdict(False, lines, f"the end cannot be checked: {why}", what="unsure")
    if kept.lines > lines:
        return Verdict(False, lines, sentence(lines + 1, "truncated", why), lines + 1, "truncated")
    line, what = (lines, EDITED) if kept.lines == lines else (kept.lines + 1, INSERTED)
    return Verdict(False, lines, sentence(line, what, why), line, what)


def broken(before: Link | None, link: Link, expected: Head, links: Links, kept: Head | None) -> Verdict:
    """The verdict on the first line that does not fit; what follows tells what was done."""
    following = next(links, None)
    line, what, why = judged(before, link, expected, following, kept)
    rest = chain([] if following is None else [following], links)
    if what == "removed" and any(later.intact and later.number == expected.lines for later in rest):
        what, why = "reordered", f"line {expected.lines} of the chain comes later"
    links.count()
    return Verdict(False, links.lines, sentence(line, what, why + "."), line, what)


def judged(
    before: Link | None, link: Link, expected: Head, following: Link | None, kept: Head | None
) -> tuple[int, What, str]:
    """Place, kind and reason of the first fault."""
    place = link.place
    if not link.intact:
        fits = following is not None and (following.number, following.previous) == expected
        return place, "inserted" if fits else "edited", "its content does not match its hash"
    next_hash = following.previous if following is not None else kept.hash if kept is not None else ""
    goes_on = next_hash == link.hash  # what comes after was written after this very line
    if link.number > expected.lines:
        missing = link.number - expected.lines
        gone = f"line {expected.lines}" if missing == 1 else f"lines {expected.lines} to {link.number - 1}"
        return place, "removed", f"{gone} of the chain {'is' if missing == 1 else 'are'} missing before it"
    if link.number < expected.lines:
        if before is not None and is_rival(before, link) and goes_on:
            return before.place, "inserted", "the chain goes on from the line after it"
        return place, "inserted", f"the chain already has a line {link.number}"
    if following is not None and following.intact and following.number == link.number:
        return place, "inserted", "the chain goes on from the line after it"
    if goes_on and before is not None:
        return before.place, "edited", "its hash was formed anew after the next line was written"
    return place, "edited", "it was not written after the line before it"


def is_rival(first: Link, second: Link) -> bool:
    """Whether two different lines claim the same place in the chain."""
    return (first.number, first.previous) == (second.number, second.previous) and first.hash != second.hash


def sentence(line: int, what: What, why: str) -> str:
    words: dict[What, str] = {
        "edited": f"line {line} was edited",
        "removed": f"lines before line {line} were removed",
        "inserted": f"line {line} was inserted",
        "reordered": f"line {line} stands in the wrong place",
        "truncated": f"the file was cut off before line {line}",
    }
    return f"{words[what]}: {why}"


class Links(Iterator[Link]):
    """The lines in the first `size` bytes of a file as links, one at a time.

    lines: whole lines so far; is_cut: whether the file ends in the middle of one.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.lines = 0
        self.is_cut = False
        self._texts = self._read(path, size)

    def __iter__(self) -> Links:
        return self

    def __next__(self) -> Link:
        text = next(self._texts)
        self.lines += 1
        line = sealed(text)
        if line is None:
            return Link(self.lines, intact=False)
        return Link(self.lines, True, line["number"], line["previous"], line["hash"])

    def count(self) -> None:
        """Go to the end without looking."""
        self.lines += sum(1 for _ in self._texts)

    def _read(self, path: Path, size: int) -> Iterator[bytes]:
        if not size:
            return
        with path.open("rb") as file:
            while size > 0 and (text := file.readline(size)):
                size -= len(text)
                if not text.endswith(b"\n"):
                    self.is_cut = True
                    return
                yield text[:-1]
