"""A hospital's connection to the organiser: outbound only, and nothing listens."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wardround.deploy import limits
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.private_key import read_pem
from wardround.deploy.proxy import find_proxy
from wardround.deploy.rpc.requests import OnTransfer, Request, Requests, watch
from wardround.deploy.rpc.service import (
    DISPLACED,
    IN_USE,
    INSTANCE,
    MESSAGE_BYTES,
    SERVICE,
    WAIT_SECONDS,
    MessageError,
    Transfer,
    decode,
    encode,
    read_chunks,
    read_count,
)
from wardround.errors import WardroundError
from wardround.files import compute_sha256
from wardround.text import clipped
from wardround.version import __version__

import grpc  # isort: skip  # after service, which quiets it

CALL_SECONDS = 10.0
SLOWEST = 5_000  # bytes a second; what is slower is given up, and continued with another call
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
        self._requests: Requests | None = None  # with the first wait
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

    def wait(
        self,
        held: Sequence[str],
        folder: Path,
        largest: int,
        on_transfer: OnTransfer = lambda transfer: None,
    ) -> Request | None:
        """The next request, written into the folder; None where there is none for a while.

        held: letters that this hospital is working on; largest: bytes of a request. Where a connection
        breaks, the next call continues what had arrived.
        """
        call = self._method(self._channel.unary_stream, "Wait")
        self._requests = self._requests or Requests(folder, largest)
        asked = {"held": list(held), **self._requests.describe()}
        with translate_errors():
            chunks = call(encode(asked), metadata=self._metadata)
            try:
                with cancel_after(WAIT_SECONDS + CALL_SECONDS, chunks):
                    info = decode(next(chunks, b""))
                with cancel_after(give_seconds(info.get("bytes")), chunks):
                    return self._requests.receive(info, chunks, on_transfer)
            finally:
                chunks.cancel()

    def add_model(self, path: Path) -> None:
        """A file of numbers that the organiser need not send: this hospital made them itself."""
        if self._requests is not None:
            self._requests.add(path)

    def answer(
        self,
        request: Request,
        reply: Path | None,
        failed: str = "",
        *,
        again: bool = False,
        on_transfer: OnTransfer = lambda transfer: None,
    ) -> None:
        """Send the reply, or that there is none and why; again: continue where the last call broke off."""
        call = self._method(self._channel.stream_unary, "Answer")
        info: dict[str, Any] = {"job": request.job, "letter": request.letter}
        start, size = 0, 0 if reply is None else reply.stat().st_size
        info |= (
            {"failed": failed[:300]} if reply is None else {"bytes": size, "sha256": compute_sha256(reply)}
        )
        if reply is not None and again:
            start = read_count(self._ask("Answer", {**info, "ask": True}, CALL_SECONDS), "from", size)

        def parts() -> Iterator[bytes]:
            yield encode(info if reply is None else {**info, "from": start})
            if reply is not None:
                yield from watch(Transfer(size, start), read_chunks(reply, start), on_transfer)

        with translate_errors():
            call(parts(), metadata=self._metadata, timeout=give_seconds(size))

    def _ask(self, method: str, info: dict[str, Any], seconds: float) -> dict[str, Any]:
        call = self._method(self._channel.unary_unary, method)
        with translate_errors():
            return decode(call(encode(info), metadata=self._metadata, timeout=seconds))

    @staticmethod
    def _method(kind: Callable[[str], Any], name: str) -> Any:
        return kind(f"/{SERVICE}/{name}")


def give_seconds(num_bytes: Any) -> float:
    """For a file of so many bytes to come or go; beyond it the connection is of no use."""
    return CALL_SECONDS + (num_bytes if type(num_bytes) is int else 0) / SLOWEST


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
