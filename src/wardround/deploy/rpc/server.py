"""The organiser's port: the only place where anything from a hospital arrives.

This process reads a few fields of JSON and streams replies into files of a bounded size; what is in them is
for the run's own process to read. A call is refused, and logged with the name in the caller's certificate,
unless it is one of four methods, from a hospital's certificate, from the one process of that hospital that
takes part, and about a request that this hospital was sent.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wardround.deploy import limits
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.private_key import read_pem
from wardround.deploy.mailbox import Letter, Mailbox
from wardround.deploy.rpc.callers import Callers, Refusal, describe_caller
from wardround.deploy.rpc.replies import Announced, Replies, ReplyFile, ReplyRefused
from wardround.deploy.rpc.service import (
    INSTANCE,
    MESSAGE_BYTES,
    METHODS,
    SERVICE,
    WAIT_SECONDS,
    MessageError,
    Transfer,
    Transfers,
    decode,
    encode,
    read_chunks,
    read_count,
    read_sha256,
    read_text,
)
from wardround.errors import ConfigError
from wardround.version import __version__

import grpc  # isort: skip  # after service, which quiets it

log = logging.getLogger(__name__)
OPTIONS = [
    ("grpc.max_allowed_incoming_connections", limits.CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", limits.HANDSHAKE_SECONDS * 1000),
    ("grpc.max_connection_idle_ms", limits.IDLE_SECONDS * 1000),
    ("grpc.max_concurrent_streams", limits.STREAMS),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a small message cannot become a large one
    ("grpc.max_metadata_size", limits.METADATA_BYTES),
    ("grpc.keepalive_time_ms", 15_000),  # notices a connection that died silently
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a second server on the port is an error
]


@dataclass(frozen=True)
class RequestFile:
    """A request that waits for its hospital; limit: bytes of the reply.

    head, sha256: bytes before its numbers, and the SHA-256 of the numbers.
    """

    path: Path
    limit: int
    head: int = 0
    sha256: str = ""


Mail = Mailbox[RequestFile, Path]
Handler = Callable[[str, Iterator[bytes], Any], Any]  # hospital, what it sends, the call


class HospitalServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The service. exchange: the folder where replies are written, in a folder for each job."""

    def __init__(self, kit: Kit, exchange: Path) -> None:
        self._kit = kit
        self._exchange = exchange
        self._changed = threading.Condition()
        self._jobs: dict[str, Mail] = {}
        self.callers = Callers(kit)
        self._calls: Counter[str] = Counter()
        self.replies = Replies()
        self.transfers = Transfers()
        self._server: grpc.Server | None = None
        self._stopping = False

    # Starting and ending

    def start(self) -> None:
        """Listen; a port that is taken is an error."""
        kit = self._kit
        self.callers.revoked.refresh()
        pair = (read_pem(kit.own_key), kit.own_certificate.read_bytes())
        credentials = grpc.ssl_server_credentials(
            [pair], kit.authority.read_bytes(), require_client_auth=True
        )
        pool = ThreadPoolExecutor(limits.CALLS, thread_name_prefix="wardround-call")
        server = grpc.server(pool, options=OPTIONS, maximum_concurrent_rpcs=limits.CALLS)
        server.add_generic_rpc_handlers((self,))
        try:
            server.add_secure_port(f"{kit.listen}:{kit.port}", credentials)
        except RuntimeError:
            raise ConfigError(
                f"{kit.listen} port {kit.port} cannot be opened: another program may use it."
            ) from None
        server.start()
        self._server = server

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._server is not None:
            self._server.stop(grace=1.0).wait()

    # Runs

    def open_job(self, job: str) -> Mail:
        """Letters of a run, until it is closed."""
        mailbox = Mail(self.replies.end)
        (self._exchange / job).mkdir(exist_ok=True)
        with self._changed:
            self._jobs[job] = mailbox
        return mailbox

    def close_job(self, job: str) -> None:
        with self._changed:
            mailbox = self._jobs.pop(job, None)
            self._changed.notify_all()
        if mailbox is not None:
            mailbox.close_all()
            shutil.rmtree(self._exchange / job, ignore_errors=True)

    def post(self, job: str, letter: Letter[RequestFile]) -> None:
        """Hold a letter ready for its hospital; one of a job that is closed is dropped."""
        with self._changed:
            if job in self._jobs:
                self._jobs[job].post([letter])
                self._changed.notify_all()

    def alive(self) -> dict[str, float]:
        """Seconds since each hospital was last heard from."""
        now = time.monotonic()
        return {hospital: now - heard for hospital, heard in self.callers.heard().items()}

    # Every call

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The handler of a method; an unknown one is refused by name."""
        name = str(details.method).removeprefix(f"/{SERVICE}/")
        metadata = dict(details.invocation_metadata or ())
        instance = str(metadata.get(INSTANCE, ""))[:64]
        handlers: dict[str, Handler] = {
            "Hello": self._hello,
            "Beat": self._beat,
            "Wait": self._wait,
            "Answer": self._answer,
        }
        assert tuple(handlers) == METHODS
        # As streams, even where one message comes: gRPC would wait for it before the call is admitted, and
        # calls that never send one would take all threads.
        if name not in handlers:
            return grpc.stream_unary_rpc_method_handler(refuse_unknown(str(details.method)[:100]))
        if name == "Wait":
            return grpc.stream_stream_rpc_method_handler(self._stream(name, instance, handlers[name]))
        return grpc.stream_unary_rpc_method_handler(self._single(name, instance, handlers[name]))

    def _single(self, method: str, instance: str, handler: Handler) -> Callable[[Any, Any], bytes]:
        def call(request: Any, context: Any) -> bytes:
            with self._admit(method, instance, context) as hospital:
                return encode(handler(hospital, request, context))
            raise AssertionError  # abort raises

        return call

    def _stream(self, method: str, instance: str, handler: Handler) -> Callable[[Any, Any], Iterator[bytes]]:
        def call(request: Any, context: Any) -> Iterator[bytes]:
            with self._admit(method, instance, context) as hospital:
                yield from handler(hospital, request, context)

        return call

    @contextmanager
    def _admit(self, method: str, instance: str, context: Any) -> Iterator[str]:
        """Who calls, if the call is in order; a refusal ends it."""
        hospital = ""
        try:
            with self.callers.admit(method, instance, context) as hospital:
                self._count(hospital, 1)
                try:
                    yield hospital
                finally:
                    self._count(hospital, -1)
        except Refusal as refusal:
            code, reason = refusal.code, str(refusal)
        except MessageError as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except grpc.RpcError:  # the caller has gone, or gRPC itself refused a message that is too large
            log.warning("%s: %s ended before all of it was received", hospital, method)
            raise
        except OSError as error:  # a full disk, a file that was removed
            code, reason = grpc.StatusCode.INTERNAL, "the organiser's disk could not be used"
            log.error("%s: %s", hospital, error)
        else:
            return
        who = hospital or describe_caller(context)
        log.warning("%s: %s refused: %s", who, method, reason)
        context.abort(code, reason)

    def _count(self, hospital: str, change: int) -> None:
        with self._changed:
            if change > 0 and self._calls[hospital] >= limits.CALLS_OF_ONE:
                raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at the same time")
            self._calls[hospital] += change

    # The four methods

    def _hello(self, hospital: str, chunks: Iterator[bytes], context: Any) -> dict[str, Any]:
        read_text(decode(next(chunks, b"")), "wardround")
        return {"time": time.time(), "wardround": __version__, "project": self._kit.project_id}

    def _beat(self, hospital: str, chunks: Iterator[bytes], context: Any) -> dict[str, Any]:
        decode(next(chunks, b""))
        return {"jobs": sorted(self._jobs), "doubles": self.callers.take_doubles(hospital)}

    def _wait(self, hospital: str, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        info = decode(next(chunks, b""))
        held, known = info.get("held"), info.get("known", [])
        if (
            not isinstance(held, list)
            or len(held) > limits.HELD
            or not all(isinstance(one, str) for one in held)
        ):
            raise MessageError(f"'held' is not a list of at most {limits.HELD} letters")
        if not isinstance(known, list) or len(known) > limits.KNOWN:
            raise MessageError(f"'known' is not a list of at most {limits.KNOWN} models")
        part = read_text(info, "part") if "part" in info else ""
        here = read_count(info, "here", limits.REPLY_BYTES) if part else 0
        found = self._find(hospital, held, context)
        if found is None:
            yield encode({})
            return
        job, letter = found
        content = letter.content
        size = content.path.stat().st_size
        end = content.head if content.sha256 and content.sha256 in known else size
        start = min(here, end) if part == letter.id else 0
        facts = {"bytes": size, "head": content.head, "sha256": content.sha256, "from": start, "until": end}
        yield encode({"job": job, "letter": letter.id, **facts})
        with self.transfers.show(hospital, "receives a request:", Transfer(end, start)) as transfer:
            yield from self._hear(hospital, transfer.count(read_chunks(content.path, start, end)))

    def _hear(self, hospital: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Every piece that moves is a sign of life: on a thin link others come late."""
        for chunk in chunks:
            self.callers.hear(hospital)
            yield chunk

    def _find(self, hospital: str, held: list[str], context: Any) -> tuple[str, Letter[RequestFile]] | None:
        """The next letter to a hospital, as soon as there is one; None after a while.

        held: letters it has. A letter that was lost on the way, or with its process, is not among them and
        is sent again.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while not self._stopping and context.is_active() and time.monotonic() < deadline:
                for job, mailbox in self._jobs.items():
                    letter = mailbox.find(hospital)
                    if letter is not None and letter.id not in held:
                        return job, letter
                self._changed.wait(1.0)
        return None

    def _answer(self, hospital: str, chunks: Iterator[bytes], context: Any) -> dict[str, Any]:
        info = decode(next(chunks, b""))
        job, letter_id = read_text(info, "job"), read_text(info, "letter")
        mailbox = self._jobs.get(job)
        if mailbox is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "this run is not in progress")
        letter = mailbox.admit(hospital, letter_id)
        if letter is None:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "this reply is not wanted, or no longer")
        if "failed" in info:
            mailbox.note_stray(hospital, f"failed: {read_text(info, 'failed', 300)}")
            mailbox.accept(hospital, letter_id, lambda: None)
            return {}
        num_bytes = read_count(info, "bytes", limits.REPLY_BYTES)
        if num_bytes > letter.content.limit:
            mailbox.note_stray(hospital, f"too large: a reply of {num_bytes:,} bytes")
            mailbox.accept(hospital, letter_id, lambda: None)
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {letter.content.limit:,} bytes")
        announced = Announced(num_bytes, read_sha256(info))
        if info.get("ask") is True:
            return {"from": self.replies.find_start(letter_id, announced)}
        start = read_count(info, "from", num_bytes) if "from" in info else 0
        path = self._exchange / job / f"{secrets.token_hex(16)}.reply"
        with self.transfers.show(hospital, "sends a reply:", Transfer(num_bytes, start)) as transfer:
            reply = ReplyFile(path, announced, context, transfer)
            try:
                path = self.replies.receive(letter_id, reply, start, self._hear(hospital, chunks))
            except ReplyRefused as error:
                raise Refusal(grpc.StatusCode.ALREADY_EXISTS, str(error)) from None
        if not mailbox.accept(hospital, letter_id, lambda: path):
            path.unlink(missing_ok=True)
        return {}


def refuse_unknown(method: str) -> Callable[[Any, Any], NoReturn]:
    """The handler of a method that there is not."""

    def call(request: Any, context: Any) -> NoReturn:
        log.warning("%s: refused: there is no method %s", describe_caller(context), ascii(method))
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
        raise AssertionError

    return call
