"""A hospital's connection to the organiser: outbound only, and nothing listens."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wardround.deploy import limits
from wardround.deploy.kits import Kit
from wardround.deploy.private_key import read_pem
from wardround.deploy.proxy import find_proxy
from wardround.deploy.rpc.service import (
    DISPLACED,
    IN_USE,
    INSTANCE,
    MESSAGE_BYTES,
    SERVICE,
    WAIT_SECONDS,
    MessageError,
    decode,
    encode,
    read_chunks,
    read_count,
    read_text,
    write_chunks,
)
from wardround.errors import WardroundError
from wardround.text import clipped, format_bytes
from wardround.version import __version__

import grpc  # isort: skip  # after service, which quiets it

CALL_SECONDS = 10.0
SLOWEST = 50_000  # bytes a second of a request; a slower one is given up and asked for again
FINAL = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message cannot become a large one
    ("grpc.max_metadata_size", limits.METADATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 10_000),
]


class NoConnection(WardroundError):
    """The organiser does not answer, or not for now."""


class CallRefused(WardroundError):
    """The organiser's server does not take this call, now or later."""


class KitRefused(CallRefused):
    """The organiser's server does not take this kit: revoked, expired, or not a hospital's."""


class KitInUse(WardroundError):
    """Another process takes part with the same kit."""


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


class Connection:
    """Calls of one process of a hospital; instance: what tells it from another one with the same kit.

    has_double: whether the organiser refused such another one since the last sign of life.
    """

    def __init__(self, kit: Kit, instance: str | None = None) -> None:
        pair = (read_pem(kit.own_key), kit.own_certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(kit.authority.read_bytes(), *pair)
        where = f"[{kit.server}]" if ":" in kit.server else kit.server
        self._channel = grpc.secure_channel(
            f"{where}:{kit.port}", credentials, options=[*OPTIONS, *use_proxy(kit)]
        )
        self.has_double = False
        self._metadata = ((INSTANCE, instance or secrets.token_hex(16)),)

    def close(self) -> None:
        self._channel.close()

    def hello(self, seconds: float = CALL_SECONDS) -> dict[str, Any]:
        """The organiser's clock, version and project."""
        return self._ask("Hello", {"wardround": __version__}, seconds)

    def beat(self) -> list[str]:
        """Give a sign of life; returns the runs in progress."""
        found = self._ask("Beat", {}, CALL_SECONDS)
        jobs = found.get("jobs")
        if not isinstance(jobs, list) or len(jobs) > limits.JOBS:
            raise MessageError("'jobs' is not a list of runs")
        self.has_double = bool(found.get("doubles"))
        return [str(job) for job in jobs]

    def wait(self, held: Sequence[str], folder: Path, largest: int) -> Request | None:
        """The next request, written into the folder; None where there is none for a while.

        held: letters that this hospital is working on; largest: bytes of a request.
        """
        call = self._method(self._channel.unary_stream, "Wait")
        with translate_errors():
            chunks = call(encode({"held": list(held)}), metadata=self._metadata)
            try:
                with cancel_after(WAIT_SECONDS + CALL_SECONDS, chunks):
                    info = decode(next(chunks, b""))
                return receive(info, chunks, folder, largest, SLOWEST)
            finally:
                chunks.cancel()

    def answer(
        self, request: Request, reply: Path | None, failed: str = "", seconds: float | None = None
    ) -> None:
        """Send the reply, or that there is none and why."""
        call = self._method(self._channel.stream_unary, "Answer")
        info: dict[str, Any] = {"job": request.job, "letter": request.letter}
        info |= {"failed": failed[:300]} if reply is None else {"bytes": reply.stat().st_size}

        def parts() -> Iterator[bytes]:
            yield encode(info)
            if reply is not None:
                yield from read_chunks(reply)

        with translate_errors():
            call(parts(), metadata=self._metadata, timeout=seconds)

    def _ask(self, method: str, info: dict[str, Any], seconds: float) -> dict[str, Any]:
        call = self._method(self._channel.unary_unary, method)
        with translate_errors():
            return decode(call(encode(info), metadata=self._metadata, timeout=seconds))

    @staticmethod
    def _method(kind: Callable[[str], Any], name: str) -> Any:
        return kind(f"/{SERVICE}/{name}")


def receive(
    info: dict[str, Any], chunks: Iterator[bytes], folder: Path, largest: int, slowest: float = 0.0
) -> Request | None:
    """Write a request into the folder as it arrives; info: what was said of it; slowest: bytes a second."""
    if "job" not in info:
        return None
    path = folder / f"{secrets.token_hex(16)}.request"
    request = Request(read_text(info, "job"), read_text(info, "letter"), path)
    num_bytes = read_count(info, "bytes", limits.REPLY_BYTES)
    if num_bytes > largest:
        raise RequestTooLarge(request, num_bytes, largest)
    with cancel_after(CALL_SECONDS + num_bytes / slowest, chunks) if slowest else nullcontext():
        write_chunks(path, chunks, num_bytes)
    return request


@contextmanager
def cancel_after(seconds: float, call: Any) -> Iterator[None]:
    timer = threading.Timer(seconds, call.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def translate_errors() -> Iterator[None]:
    """gRPC's errors as ours."""
    try:
        yield
    except ValueError:  # of gRPC, after `close`
        raise NoConnection("the connection was closed") from None
    except grpc.RpcError as error:
        code, details = error.code(), str(error.details() or "")
        if code == grpc.StatusCode.FAILED_PRECONDITION and details in (DISPLACED, IN_USE):
            raise KitInUse("another process takes part with this kit, here or elsewhere") from None
        if code == grpc.StatusCode.PERMISSION_DENIED:
            raise KitRefused(clipped(details, 200)) from None
        raise (CallRefused if code in FINAL else NoConnection)(details or code.name) from None


def use_proxy(kit: Kit) -> list[tuple[str, str | int]]:
    """Options of a channel that goes through the hospital's proxy, or past every other."""
    proxy = find_proxy(kit)
    return [("grpc.enable_http_proxy", 0)] if proxy is None else [("grpc.http_proxy", proxy.url)]
