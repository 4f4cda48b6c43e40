"""Finding a ledger, reading it, and verifying its chain: what was edited, removed, inserted or cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from wardround.deploy.ledger.writing import (
    EMPTY,
    NAME,
    ZEROS,
    LedgerError,
    LedgerHead,
    describe_difference,
    head_path,
    lock_ledger,
    parse_line,
    parse_sealed,
    read_head,
)
from wardround.errors import ConfigError
from wardround.machine import open_file


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
        if read_role(path) == "organiser":
            raise ConfigError(
                f"{path} is the organiser's kit; hospitals keep the ledger. What reached the organiser is in "
                f"each run: {path}/runs/NAME/{NAME}"
            )
        return path / "state" / NAME
    raise ConfigError(f"{path} holds no {NAME}. Give a hospital's kit, its state folder, or a run folder.")


def read_role(kit: Path) -> str | None:
    try:
        role = json.loads((kit / "kit.json").read_text(encoding="utf-8")).get("role")
    except (OSError, ValueError, AttributeError):
        return None
    return str(role)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, one at a time; a last one that a crash cut off is left out."""
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        for place, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            line = parse_line(text)
            if line is None:
                raise LedgerError(f"{path}, line {place} cannot be read. See: wardround egress verify {path}")
            yield line


def is_organisers(path: Path) -> bool:
    """Whether this is a run's plain list of what reached the organiser, which has no chain."""
    if head_path(path).exists() or not path.exists():
        return False
    with path.open("rb") as file:
        keys = set(parse_line(file.readline()) or ())
    return {"phase", "client"} <= keys and not {"hash", "previous"} & keys


What = Literal["edited", "removed", "inserted", "reordered", "truncated", "unsure"]


@dataclass(frozen=True)
class Verdict:
    """The result of checking the whole chain.

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
    """One line as part of the chain; intact: whether its own hash is right."""

    place: int
    intact: bool
    number: int = 0
    previous: str = ""
    hash: str = ""


def verify(path: Path) -> Verdict:
    """Check the chain from the first line to the last; the file is read once and never held in memory."""
    path = Path(path)
    if is_organisers(path):
        raise ConfigError(
            f"{path} is the organiser's list of what reached it and has no chain to verify. The ledger with "
            "a chain is at each hospital, in its kit."
        )
    size, kept = read_state(path)
    expected, links = LedgerHead(1, ZEROS), Links(path, size)
    before: Link | None = None
    for link in links:
        if not link.intact or (link.number, link.previous) != (expected.lines, expected.hash):
            return judge_break(before, link, expected, links, kept)
        before, expected = link, LedgerHead(link.number + 1, link.hash)
    found = LedgerHead(expected.lines - 1, expected.hash)
    return judge_end(found, kept, before, links.is_cut)


def read_state(path: Path) -> tuple[int, LedgerHead | None]:
    """Length of the file and what its head says, at one moment between two lines."""
    try:
        file = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0, read_head(path)
    try:
        lock_ledger(file, path)
        return os.fstat(file).st_size, read_head(path)
    finally:
        os.close(file)


def judge_end(found: LedgerHead, kept: LedgerHead | None, last: Link | None, is_cut: bool) -> Verdict:
    """The verdict on a chain without a gap: does it end where it should?"""
    lines = found.lines
    one_behind = last is not None and (kept or EMPTY) == LedgerHead(lines - 1, last.previous)
    if (kept or EMPTY) == found or one_behind:
        words = f"{lines} line{'s' if lines > 1 else ''}, unbroken" if lines else "no lines yet"
        cut = "; a crash cut off one more, and its message never left" if is_cut else ""
        return Verdict(True, lines, f"{words}{cut}.", hash=found.hash if lines else None)
    why = describe_difference(found, kept)
    if kept is None or kept.lines < 0:
        return Verdict(False, lines, f"the end cannot be checked: {why}", what="unsure")
    if kept.lines > lines:
        return Verdict(False, lines, sentence(lines + 1, "truncated", why), lines + 1, "truncated")
    what: What = "edited" if kept.lines == lines else "inserted"
    line = min(lines, kept.lines + 1)
    return Verdict(False, lines, sentence(line, what, why), line, what)


def judge_break(
    before: Link | None, link: Link, expected: LedgerHead, links: Links, kept: LedgerHead | None
) -> Verdict:
    """The verdict on the first line that does not fit; what follows shows what was done."""
    following = next(links, None)
    line, what, why = find_fault(before, link, expected, following, kept)
    rest = chain([] if following is None else [following], links)
    if what == "removed" and any(later.intact and later.number == expected.lines for later in rest):
        what, why = "reordered", f"line {expected.lines} of the chain comes later"
    links.count()
    return Verdict(False, links.lines, sentence(line, what, why + "."), line, what)


def find_fault(
    before: Link | None, link: Link, expected: LedgerHead, following: Link | None, kept: LedgerHead | None
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
            return before.place, "inserted", "the chain continues from the line after it"
        return place, "inserted", f"the chain already has a line {link.number}"
    if following is not None and following.intact and following.number == link.number:
        return place, "inserted", "the chain continues from the line after it"
    if goes_on and before is not None:
        return before.place, "edited", "its hash was recomputed after the next line was written"
    return place, "edited", "it was not written after the line before it"


def is_rival(first: Link, second: Link) -> bool:
    """Whether two different lines claim the same place in the chain."""
    return (first.number, first.previous) == (second.number, second.previous) and first.hash != second.hash


def sentence(line: int, what: What, why: str) -> str:
    words: dict[What, str] = {
        "edited": f"line {line} was edited",
        "removed": f"lines before line {line} were removed",
        "inserted": f"line {line} was inserted",
        "reordered": f"line {line} is in the wrong place",
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

    def __next__(self) -> Link:
        text = next(self._texts)
        self.lines += 1
        line = parse_sealed(text)
        if line is None:
            return Link(self.lines, intact=False)
        return Link(self.lines, True, line["number"], line["previous"], line["hash"])

    def count(self) -> None:
        """Count the remaining lines without parsing them."""
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
