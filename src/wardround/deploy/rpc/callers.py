"""Who calls: the name in the certificate, whether that certificate is still good, and one process at a time.

TLS has verified that a certificate is of the project's authority. What TLS looks at only when a connection
begins, or not at all, is looked at here in every call and every second: that it is not revoked or expired.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil

from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.revocation import Revocations
from wardround.deploy.rpc.service import (
    BEAT_SECONDS,
    DISPLACED,
    IN_USE,
    INSTANCE,
    PREFLIGHT,
    UNKNOWN_INSTANCE,
    MessageError,
)
from wardround.errors import ConfigError

import grpc  # isort: skip  # after service, which quiets it
from cryptography import x509
from cryptography.x509.oid import NameOID

log = logging.getLogger(__name__)
LEASE_SECONDS = 2.5 * BEAT_SECONDS  # without a call, before another process may take part with the same kit
TOLD_SECONDS = 60.0  # between two lines about the same hospital's second process


class Refusal(Exception):
    """A call that is not answered; the reason reaches the caller and the log."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Caller:
    """A process of a hospital; serial, expires: of its certificate; peer: its address, as gRPC writes it."""

    hospital: str
    instance: str
    serial: int
    expires: datetime
    peer: str


class Callers:
    """The calls that are open, and the process of each hospital that takes part."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._lock = threading.Lock()
        self._open: dict[Any, Caller] = {}  # by call
        self._instances: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._expires: dict[str, datetime] = {}
        self._doubles: Counter[str] = Counter()  # refused second processes, until the first is told
        self._told: dict[str, float] = {}
        self._lines: list[str] = []
        self._unwelcome: set[str] = set()
        self.revoked = Revocations(kit)

    def heard(self) -> dict[str, float]:
        """When each hospital was last heard from, of time.monotonic."""
        with self._lock:
            return dict(self._heard)

    def hear(self, hospital: str) -> None:
        """A sign of life in the middle of a call; of a hospital that was refused meanwhile it is none."""
        with self._lock:
            if hospital in self._heard:
                self._heard[hospital] = time.monotonic()

    def expires(self) -> dict[str, datetime]:
        """When the certificate of each hospital that was heard from expires."""
        with self._lock:
            return {name: self._expires[name] for name in self._heard}

    def take_doubles(self, hospital: str) -> int:
        """How many other processes were refused since the last time."""
        with self._lock:
            return self._doubles.pop(hospital, 0)

    # Every call

    @contextmanager
    def admit(self, method: str, instance: str, context: Any) -> Iterator[str]:
        """The hospital that calls, as long as its call lasts; a Refusal where it may not."""
        caller = identify(context, instance)
        self._check_certificate(caller)
        with self._lock:
            self._check_instance(caller, method)
            if instance != PREFLIGHT:
                self._heard[caller.hospital] = time.monotonic()
                self._expires[caller.hospital] = caller.expires
            self._open[context] = caller
        try:
            yield caller.hospital
        finally:
            with self._lock:
                self._open.pop(context, None)

    def _check_certificate(self, caller: Caller) -> None:
        why = self._find_fault(caller)
        if why:
            with self._lock:
                self._forget(caller)
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"the certificate of '{caller.hospital}' {why}")

    def _forget(self, caller: Caller) -> None:
        """Its hospital may come again, with another certificate."""
        self._unwelcome.add(caller.peer)
        if self._instances.get(caller.hospital) == caller.instance:
            del self._instances[caller.hospital]
            self._heard.pop(caller.hospital, None)

    def _find_fault(self, caller: Caller) -> str:
        if caller.serial in self.revoked:
            return "was revoked"
        return f"expired on {caller.expires:%Y-%m-%d}" if caller.expires < datetime.now(UTC) else ""

    def _check_instance(self, caller: Caller, method: str) -> None:
        """One process of a hospital at a time: the one that came first, until it is gone."""
        known = self._instances.get(caller.hospital)
        if method != "Hello":
            if known is None:
                raise Refusal(grpc.StatusCode.UNAUTHENTICATED, UNKNOWN_INSTANCE)
            if known != caller.instance:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, DISPLACED)
        elif caller.instance != PREFLIGHT:
            if len(caller.instance) != 32 or not caller.instance.isalnum():
                raise MessageError(f"'{INSTANCE}' is not 32 letters and digits")
            if known not in (None, caller.instance) and self._is_in_use(caller.hospital, str(known)):
                self._note_second(caller)
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, IN_USE)
            if known != caller.instance:  # it was itself refused, as long as the one before seemed alive
                self._doubles.pop(caller.hospital, None)
            self._instances[caller.hospital] = caller.instance

    def _is_in_use(self, hospital: str, instance: str) -> bool:
        """A process that was killed loses its calls with its connection, and is gone after the lease."""
        if time.monotonic() - self._heard.get(hospital, -LEASE_SECONDS) < LEASE_SECONDS:
            return True
        own = [
            call
            for call, caller in self._open.items()
            if (caller.hospital, caller.instance) == (hospital, instance)
        ]
        return any(call.is_active() for call in own)

    def _note_second(self, caller: Caller) -> None:
        hospital, now = caller.hospital, time.monotonic()
        self._doubles[hospital] += 1
        if now - self._told.get(hospital, -TOLD_SECONDS) >= TOLD_SECONDS:
            self._told[hospital] = now
            self._lines.append(f"{hospital}: a second process with the same kit was refused ({caller.peer})")

    # Every second

    def refresh(self) -> list[str]:
        """End what certificates that are no longer good have open; returns lines for the organiser."""
        try:
            self.revoked.refresh()
        except ConfigError as error:  # the list before stays in force
            log.error("%s", error)
            self._lines.append(str(error))
        with self._lock:
            ended = {call: caller for call, caller in self._open.items() if self._find_fault(caller)}
            for caller in ended.values():
                self._forget(caller)
            facts = {caller.hospital: self._find_fault(caller) for caller in ended.values()}
            self._lines += [
                f"{name}: its certificate {why}; its connection is closed" for name, why in facts.items()
            ]
            peers, self._unwelcome = self._unwelcome, set()
            lines, self._lines = self._lines, []
        for call in ended:
            with suppress(Exception):
                call.cancel()
        if peers:
            close_connections(peers, self._kit.port)
        return lines


def identify(context: Any, instance: str) -> Caller:
    """The hospital whose certificate the caller proved to have."""
    certificate = read_certificate(context)
    subject = certificate.subject
    names = [str(part.value) for part in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    units = [str(part.value) for part in subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)]
    if units != ["hospital"] or len(names) != 1:
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, "this certificate is not a hospital's")
    serial, expires = certificate.serial_number, certificate.not_valid_after_utc
    return Caller(names[0], instance, serial, expires, str(context.peer()))


def read_certificate(context: Any) -> x509.Certificate:
    facts: Mapping[str, Any] = context.auth_context()
    (pem,) = facts["x509_pem_cert"]  # TLS has verified it
    return x509.load_pem_x509_certificate(pem)


def describe_caller(context: Any) -> str:
    try:
        return read_certificate(context).subject.rfc4514_string()[:100]
    except (KeyError, ValueError):
        return "an unknown caller"


def close_connections(peers: set[str], port: int) -> None:
    """Close connections to our port from these addresses: gRPC itself cannot close a single one."""
    for found in psutil.Process().net_connections("tcp"):
        if not found.raddr or found.laddr.port != port:
            continue
        host = str(found.raddr.ip).removeprefix("::ffff:")  # gRPC's sockets are of both kinds
        if f"ipv4:{host}:{found.raddr.port}" in peers:
            with suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
                if connection.getpeername()[1] == found.raddr.port:
                    connection.shutdown(socket.SHUT_RDWR)
