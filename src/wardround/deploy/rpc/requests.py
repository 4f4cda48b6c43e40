"""Requests on their way into files of a hospital: resumed where a connection broke, and no model comes twice.

The numbers of a request are often those of the one before: what was judged is what is trained next. The last
of them are kept, and those of the model that a run begins with, which the hospital builds itself; the
organiser is told which. What is put together has the SHA-256 that the organiser announced, or is refused.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.deploy import limits
from wardround.deploy.rpc.service import (
    CutShort,
    MessageError,
    Transfer,
    read_count,
    read_sha256,
    read_text,
    write_chunks,
)
from wardround.files import compute_sha256
from wardround.text import format_bytes

KEPT = 2  # models; a run alternates between few
SMALLEST_KEPT = limits.CHUNK_BYTES  # a smaller one costs nothing to send
OnTransfer = Callable[[Transfer], None]


@dataclass(frozen=True)
class Request:
    """A request that arrived, in a file."""

    job: str
    letter: str
    path: Path


class RequestTooLarge(MessageError):
    """A request larger than this hospital takes; the sentence is for the organiser."""

    def __init__(self, request: Request, num_bytes: int, largest: int) -> None:
        super().__init__(
            f"the request has {format_bytes(num_bytes)}, but messages at this hospital may have at most "
            f"{format_bytes(largest)} (largest_message in its site.yaml)"
        )
        self.request = request


class Requests:
    """What arrives. folder: for files; largest: bytes of a request."""

    def __init__(self, folder: Path, largest: int) -> None:
        self._folder = folder
        self._largest = largest
        self._lock = threading.Lock()  # of what is kept: a model may be added while a request arrives
        self._part: Request | None = None  # of which some has come
        self._kept: dict[
            str, tuple[Path, int]
        ] = {}  # by SHA-256 of its numbers: a file, and where they begin

    def describe(self) -> dict[str, Any]:
        """What is here already, for the organiser."""
        with self._lock:
            known: dict[str, Any] = {"known": list(self._kept)}
        if self._part is None or not self._part.path.exists():
            return known
        return known | {"part": self._part.letter, "here": self._part.path.stat().st_size}

    def receive(
        self, info: dict[str, Any], chunks: Iterator[bytes], on_transfer: OnTransfer = lambda transfer: None
    ) -> Request | None:
        """Write a request as it arrives; info: what the organiser says of it.

        None where there is none, or where its numbers were added since the organiser was told what is here.
        """
        if "job" not in info:
            self._drop_part()
            return None
        request = Request(read_text(info, "job"), read_text(info, "letter"), self._choose_path(info))
        num_bytes = read_count(info, "bytes", limits.REPLY_BYTES)
        if num_bytes > self._largest:
            raise RequestTooLarge(request, num_bytes, self._largest)
        info = {"head": 0, "from": 0, "until": num_bytes, **info}
        head, sha256 = read_count(info, "head", num_bytes), read_sha256(info)
        start, end = read_count(info, "from", num_bytes), read_count(info, "until", num_bytes)
        is_known = sha256 in self._kept and end == head
        if end != num_bytes and not is_known:
            raise MessageError("a request of which not all is to come, though it is not here")
        if sha256 in self._kept and not is_known and not start:
            return None
        here = request.path.stat().st_size if request.path.exists() else 0
        if start > min(here, end):
            raise MessageError("a request that begins after what is here")
        self._part = request if sha256 else None
        transfer = Transfer(end, start)
        try:
            write_chunks(request.path, watch(transfer, chunks, on_transfer), end, start)
        except CutShort:  # by a server that says it has sent all
            request.path.unlink()
            raise
        self._part = None
        with self._lock:
            self._complete(request.path, head, sha256, is_known)
        return request

    def add(self, path: Path) -> None:
        """Keep a file of numbers that were made here, for a request that would bring the same."""
        with self._lock:
            if path.stat().st_size >= SMALLEST_KEPT:
                self._keep(path, 0, compute_sha256(path))

    def _choose_path(self, info: dict[str, Any]) -> Path:
        """The file of the part that is here, if this is the same request; else a new one."""
        if self._part is not None and info.get("letter") == self._part.letter and info.get("from"):
            return self._part.path
        self._drop_part()
        return self._folder / f"{secrets.token_hex(16)}.request"

    def _complete(self, path: Path, head: int, sha256: str, is_known: bool) -> None:
        """Add numbers that were here before, check all of them, keep them for the next request."""
        if is_known and sha256 in self._kept:
            before, start = self._kept[sha256]
            with before.open("rb") as source, path.open("ab") as file:
                source.seek(start)
                shutil.copyfileobj(source, file, limits.CHUNK_BYTES)
        if not sha256:
            return
        if compute_sha256(path, head) != sha256:
            path.unlink()
            self._forget(sha256)
            raise MessageError("a request that does not have the SHA-256 that was announced")
        if path.stat().st_size - head >= SMALLEST_KEPT:
            self._keep(path, head, sha256)

    def _keep(self, path: Path, head: int, sha256: str) -> None:
        kept = path.with_name(f"{sha256}.kept")
        if sha256 not in self._kept:
            with suppress(OSError):  # a file system without links
                os.link(path, kept)  # the request's own name goes when it is answered
                self._kept[sha256] = kept, head
        else:
            self._kept[sha256] = self._kept.pop(sha256)  # last, so that the first is the one used longest ago
        for old in list(self._kept)[:-KEPT]:
            self._forget(old)

    def _forget(self, sha256: str) -> None:
        path, _ = self._kept.pop(sha256, (None, 0))
        if path is not None:
            path.unlink(missing_ok=True)

    def _drop_part(self) -> None:
        if self._part is not None:
            self._part.path.unlink(missing_ok=True)
            self._part = None


def watch(transfer: Transfer, chunks: Iterator[bytes], on_transfer: OnTransfer) -> Iterator[bytes]:
    for chunk in transfer.count(chunks):
        on_transfer(transfer)
        yield chunk
