"""Participants that do not keep to the protocol: a caller with any kit, a server with the organiser's kit.

Both use the channel's real TLS and no code of wardround's own ends, so that they can say anything.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from wardround.deploy.kits.kit import Kit
from wardround.deploy.rpc.service import INSTANCE, SERVICE, decode, encode

import grpc  # isort: skip  # after service, which quiets it

Stream = Callable[[], Iterable[bytes]]


class Said(NamedTuple):
    """How a call ended: gRPC's code, and the reason or the answer."""

    code: str
    text: str


class Caller:
    """Calls of any method with a kit's certificate, on a connection of its own."""

    def __init__(self, kit: Kit, instance: str | None = None, **more: Any) -> None:
        pair = (kit.own_key.read_bytes(), kit.own_certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(kit.authority.read_bytes(), *pair)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        options += [("grpc.enable_http_proxy", 0), ("grpc.max_metadata_size", 2**24)]
        self.channel = grpc.secure_channel(f"{kit.server}:{kit.port}", credentials, options=options, **more)
        self.metadata = ((INSTANCE, instance or secrets.token_hex(16)),)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def hello(self) -> Said:
        return self.call("Hello", encode({"wardround": "0"}))

    def call(self, method: str, *messages: bytes, seconds: float = 5.0, metadata: Any = None) -> Said:
        """Send these messages; a name without a slash is a method of ours."""
        return self.stream(method, iter(messages), seconds, metadata)[0]

    def stream(
        self, method: str, messages: Iterator[bytes], seconds: float = 5.0, metadata: Any = None
    ) -> tuple[Said, list[bytes]]:
        """The same, and all messages that came back."""
        path = method if method.startswith("/") else f"/{SERVICE}/{method}"
        found: list[bytes] = []
        try:
            call = self.channel.stream_stream(path)(
                messages, timeout=seconds, metadata=self.metadata if metadata is None else metadata
            )
            found.extend(call)
        except grpc.RpcError as error:
            return Said(error.code().name, str(error.details() or "")), found
        except ValueError as error:  # of gRPC's own client
            return Said("NOT_SENT", str(error)), found
        return Said("OK", b"".join(found)[:100].decode(errors="replace")), found

    def open_silently(self, method: str, seconds: float) -> Any:
        """A call that never sends its message."""

        def nothing() -> Iterator[bytes]:
            time.sleep(seconds)
            yield from ()

        return self.channel.stream_stream(f"/{SERVICE}/{method}")(
            nothing(), timeout=seconds, metadata=self.metadata
        )

    def wait(self, seconds: float = 20.0, held: Sequence[str] = ()) -> tuple[dict[str, Any], bytes] | None:
        """The next request to this hospital: what is said of it, and its content."""
        said, found = self.stream("Wait", iter([encode({"held": list(held)[-50:]})]), seconds)
        if said.code != "OK" or not found or not (info := decode(found[0])):
            return None
        return info, b"".join(found[1:])

    def answer(self, info: Mapping[str, Any], *chunks: bytes, num_bytes: int | None = None) -> Said:
        size = sum(map(len, chunks)) if num_bytes is None else num_bytes
        first = encode({"job": info["job"], "letter": info["letter"], "bytes": size})
        return self.call("Answer", first, *chunks, seconds=30)


def connect_tls(kit: Kit, seconds: float = 5.0) -> ssl.SSLSocket:
    """A connection with the kit's certificate, as far as HTTP/2, without a call."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(kit.own_certificate, kit.own_key)
    made = context.wrap_socket(socket.create_connection(("127.0.0.1", kit.port), timeout=seconds))
    made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    return made


# An organiser's server that was modified


class HostileServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Sends one hospital what it is given, and keeps what comes back.

    beat: its answer to Beat, hello: to Hello, in bytes, so that both can be anything.
    """

    def __init__(self, kit: Kit, hospital: str) -> None:
        self.kit, self.hospital = kit, hospital
        self.beat: bytes | None = None
        self.hello: bytes | None = None
        self.jobs: list[str] = []
        self.answers: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self.num_waits = self.num_beats = self.num_hellos = 0
        self._streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self._busy = threading.Lock()

    def __enter__(self) -> HostileServer:
        pair = (self.kit.own_key.read_bytes(), self.kit.own_certificate.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], self.kit.authority.read_bytes(), True)
        options = [("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(ThreadPoolExecutor(100), options=options)
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_secure_port(f"127.0.0.1:{self.kit.port}", credentials)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=0.5).wait()

    @property
    def queued(self) -> int:
        """What the hospital has not asked for yet."""
        return self._streams.qsize()

    def send(self, stream: Stream) -> None:
        """Give this to the hospital's next Wait."""
        self._streams.put(stream)

    def post(self, content: bytes, job: str = "job", letter: str | None = None, **more: Any) -> str:
        """A request in proper form; more: other fields of what is said of it."""
        letter = letter or secrets.token_hex(16)
        info = {"job": job, "letter": letter, "bytes": len(content), **more}
        chunks = [content[start : start + 2**20] for start in range(0, len(content), 2**20)]
        self.send(lambda: [encode(info), *chunks])
        return letter

    def ask(self, content: bytes, seconds: float = 60.0, **more: Any) -> tuple[dict[str, Any], bytes]:
        """Post, and the hospital's answer to it."""
        letter = self.post(content, **more)
        deadline = time.monotonic() + seconds
        while True:
            info, reply = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if info.get("letter") == letter:
                return info, reply

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = str(details.method).rpartition("/")[2]
        handler = {"Hello": self._hello, "Beat": self._beat, "Wait": self._wait, "Answer": self._answer}[name]
        return grpc.stream_stream_rpc_method_handler(handler)

    def _hello(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if self._is_it(context):
            self.num_hellos += 1
        plain = {"time": time.time(), "wardround": "0", "project": self.kit.project_id}
        yield encode(plain) if self.hello is None else self.hello

    def _beat(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if self._is_it(context):
            self.num_beats += 1
        yield encode({"jobs": self.jobs}) if self.beat is None else self.beat

    def _wait(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        deadline = time.monotonic() + 20
        if not self._is_it(context):
            while context.is_active() and time.monotonic() < deadline:
                time.sleep(0.5)
        else:
            self.num_waits += 1
            while context.is_active() and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty), self._busy:
                    stream = self._streams.get(timeout=0.1)
                    break
            else:
                stream = None
            if stream is not None:
                yield from stream()
                return
        yield encode({})

    def _answer(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        info = decode(next(chunks))
        self.answers.put((info, b"".join(chunks)))
        yield encode({})

    def _is_it(self, context: Any) -> bool:
        return f"CN={self.hospital}".encode() in subject_of(context)


def subject_of(context: Any) -> bytes:
    names = context.auth_context().get("x509_common_name", [b""])
    return b"CN=" + bytes(names[0])
