"""preflight: before the first round, the first thing that would go wrong, and what to do about it.

    checks = preflight(Path("kits/north"), data=Path("federation.yaml"))

Checks run in the order in which things would fail: the kit, its certificates, the way to the organiser, the
encrypted connection with both certificates, the clock, the disk, the versions, the data. The first that is
wrong ends it, and those after it are "not reached". Nothing about the data leaves this machine.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from wardround.deploy.kits import Kit, open_kit
from wardround.deploy.nvflare.provisioning import (
    ADMIN,
    MANIFEST_SCHEMA,
    SIGNATURE,
    authority_of,
    fingerprint,
    manifest_text,
)
from wardround.errors import ConfigError, WardroundError
from wardround.version import __version__

State = Literal["ok", "warning", "wrong", "not reached"]

FOR_REFUSAL = 0.3  # seconds in which a server that refuses our certificate says so
TIMEOUT = 5.0  # seconds for a connection, and for the handshake after it
LARGEST_DRIFT = timedelta(minutes=5)
SOON = timedelta(days=14)
ENOUGH_DISK = 5_000_000_000
# what this version of wardround was tested with: from, up to but without
TESTED = {"torch": ((2, 6), (3,)), "nvflare": ((2, 9), (2, 10))}

NEW_KIT = "Ask the organiser for a new kit (wardround provision --renew)."
SAME_KITS = (
    "Check that your kit and the server are of the same project. If they are, a device on the way opens "
    "encrypted connections: ask your network department to let this one through unopened."
)


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do."""

    name: str
    state: State
    found: str = ""
    todo: str = ""


class Wrong(Exception):
    """A check that ends the preflight."""

    def __init__(self, found: str, todo: str = "") -> None:
        super().__init__(found)
        self.found, self.todo = found, todo


class Distrust(Wrong):
    """One side does not believe the other: it will not get better by waiting."""


@dataclass
class Place:
    """What the checks share; clock: what the server said the time is, less what it is here."""

    kit: Kit
    data: Path | None
    now: datetime
    timeout: float
    clock: timedelta | None = None


Step = tuple[str, Callable[[Place], Check | str]]


def preflight(
    folder: Path, *, data: Path | None = None, now: datetime | None = None, timeout: float = TIMEOUT
) -> list[Check]:
    """Every check in order; none runs after one that is wrong."""
    try:
        kit = open_kit(folder)
    except WardroundError as error:
        return [Check("kit", "wrong", str(error)), *unreached(HOSPITAL[1:])]
    place = Place(kit, data, now or datetime.now(UTC), timeout)
    steps = HOSPITAL if kit.role == "hospital" else ORGANISER
    done: list[Check] = []
    for number, (name, look) in enumerate(steps):
        try:
            seen = look(place)
            done.append(Check(name, "ok", seen) if isinstance(seen, str) else replace(seen, name=name))
        except Wrong as wrong:
            done.append(Check(name, "wrong", wrong.found, wrong.todo))
        except WardroundError as error:
            done.append(Check(name, "wrong", str(error)))
        if done[-1].state == "wrong":
            return [*done, *unreached(steps[number + 1 :])]
    return done


def unreached(steps: Sequence[Step]) -> list[Check]:
    return [Check(name, "not reached") for name, _ in steps]


def first_wrong(checks: Sequence[Check]) -> Check | None:
    return next((check for check in checks if check.state == "wrong"), None)


def warning(found: str, todo: str = "") -> Check:
    return Check("", "warning", found, todo)


# The kit and its certificates


def check_kit(place: Place) -> Check | str:
    """All files are there and as they were signed; a changed file in local/ is the owner's to answer for."""
    kit = place.kit
    again = "Unpack the kit again, or ask the organiser for a new one."
    try:
        manifest = json.loads((kit.folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != MANIFEST_SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}")
        files, signature = dict(manifest["files"]), base64.b64decode(manifest["signature"])
        authority = authority_of(kit)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Wrong(
            f"{kit.folder} is not whole: manifest.json or rootCA.pem cannot be read ({first_words(error)}).",
            again,
        ) from None
    public = authority.public_key()
    assert isinstance(public, rsa.RSAPublicKey)
    try:
        public.verify(signature, manifest_text(kit.project_id, kit.name, files), SIGNATURE, hashes.SHA256())
    except InvalidSignature:
        raise Wrong(
            f"{kit.folder}/manifest.json does not have the signature of the project's authority.", again
        ) from None
    changed = []
    for name, digest in files.items():
        file = kit.folder / name
        if not file.is_file():
            raise Wrong(f"{file} is missing.", again)
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            changed.append(name)
    grave = [name for name in changed if "/local/" not in name and name != "README.txt"]
    if grave:
        raise Wrong(f"{kit.folder / grave[0]} is not as it was signed.", again)
    keys = {key.relative_to(kit.folder).as_posix() for key in kit.keys}
    lost = {name.removesuffix(".crt") + ".key" for name in files if name.endswith(".crt")} - keys
    if lost:
        raise Wrong(f"{kit.folder / min(lost)} is missing.", again)
    if changed:
        return warning(f"changed since the kit was made: {', '.join(changed)}", "See that you changed it.")
    return (
        f"{kit.role} '{kit.name}' of project '{kit.project}', {len(files)} files as signed; "
        f"authority {fingerprint(authority)}"
    )


def check_certificates(place: Place) -> Check | str:
    """Each certificate comes from the project's authority, fits its key and its owner, and is in date."""
    kit, authority = place.kit, authority_of(place.kit)
    if kit.role == "hospital":
        pairs = [(kit.startup / "client.crt", kit.name)]
    else:
        pairs = [(kit.startup / "server.crt", kit.server), (kit.admin / "startup" / "client.crt", ADMIN)]
    ends = [check_dates(kit.startup / "rootCA.pem", authority, place.now)]
    for path, owner in pairs:
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            key = serialization.load_pem_private_key(path.with_suffix(".key").read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise Wrong(f"{path} or its key cannot be read ({first_words(error)}).", NEW_KIT) from None
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise Wrong(f"{path} was not issued by this project's authority (rootCA.pem).", NEW_KIT) from None
        if certificate.public_key() != key.public_key():
            raise Wrong(f"{path.with_suffix('.key')} is not the key of {path.name}.", NEW_KIT)
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if [name.value for name in names] != [owner]:
            raise Wrong(f"{path} is the certificate of {names[0].value!r}, not of '{owner}'.", NEW_KIT)
        ends.append(check_dates(path, certificate, place.now))
    left = min(ends) - place.now
    if left < SOON:
        return warning(f"good for {left.days} more days, until {day(min(ends))}", NEW_KIT)
    return f"good until {day(min(ends))}"


def first_words(error: Exception) -> str:
    """Why a file cannot be read, in short; OpenSSL's reasons go on with advice for programmers."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error).partition(". See ")[0]


def refuse_broken(kit: Kit, now: datetime | None = None) -> None:
    """A kit that is not whole, or whose certificates do not hold, is an error before anything is started."""
    place = Place(kit, None, now or datetime.now(UTC), TIMEOUT)
    try:
        check_kit(place)
        check_certificates(place)
    except Wrong as wrong:
        raise ConfigError(f"{wrong.found} {wrong.todo}") from None


def check_dates(path: Path, certificate: x509.Certificate, now: datetime) -> datetime:
    """The end of a certificate that is in date."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        raise Wrong(
            f"{path} is valid from {start:%Y-%m-%d %H:%M} UTC on, but this machine says it is "
            f"{now:%Y-%m-%d %H:%M} UTC.",
            "Set this machine's clock.",
        )
    if now > end:
        raise Wrong(f"{path} expired on {day(end)} (this machine says it is {day(now)}).", NEW_KIT)
    return end


def day(time: datetime) -> str:
    return f"{time:%Y-%m-%d}"


# The way to the organiser


def check_name(place: Place) -> str:
    kit = place.kit
    found: list[str] = []
    trouble: list[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(kit.server, kit.port, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            trouble.append(str(error.strerror or error))

    asking = threading.Thread(target=ask, daemon=True)  # the resolver takes no deadline
    asking.start()
    asking.join(place.timeout)
    if not found:
        why = trouble[0] if trouble else f"no answer within {place.timeout:g} s"
        raise Wrong(
            f"the name {kit.server} is not known here ({why}).",
            "Ask your network department (DNS), or the organiser whether the name is right.",
        )
    return f"{kit.server} is {found[0]}"


def check_port(place: Place) -> str:
    kit = place.kit
    try:
        socket.create_connection((kit.server, kit.port), timeout=place.timeout).close()
    except TimeoutError:
        raise Wrong(
            f"{kit.server} port {kit.port} did not answer within {place.timeout:g} s.",
            f"A firewall may drop it: ask your network department to allow outbound TCP to {kit.server} "
            f"port {kit.port}, and the organiser whether the port is open.",
        ) from None
    except OSError as error:
        raise Wrong(
            f"{kit.server} port {kit.port} cannot be reached ({error.strerror or error}).",
            "Ask the organiser whether the server runs (wardround server KIT); then whether a firewall "
            f"between you refuses TCP port {kit.port}.",
        ) from None
    return f"{kit.server} port {kit.port} answers"


def check_tls(place: Place) -> str:
    """Both sides prove who they are."""
    kit = place.kit
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks chain and host name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(kit.startup / "rootCA.pem")
    context.load_cert_chain(kit.startup / "client.crt", kit.startup / "client.key")
    where = f"{kit.server} port {kit.port}"
    try:
        with (
            socket.create_connection((kit.server, kit.port), timeout=place.timeout) as plain,
            context.wrap_socket(plain, server_hostname=kit.server) as connection,
        ):
            place.clock = clock_of(answered(connection, where, place))
            return f"{connection.version()}, the server proved to be {kit.server} and accepts our certificate"
    except ssl.SSLCertVerificationError as error:
        raise distrusted(where, error) from None
    except ssl.SSLError as error:
        raise refused(where, error) from None
    except TimeoutError:
        raise Wrong(
            f"{where} takes connections but does not speak TLS (no answer within {place.timeout:g} s).",
            "Ask the organiser whether another program uses the port; look for a proxy on the way.",
        ) from None
    except OSError as error:
        raise Wrong(
            f"{where} closed the connection ({error.strerror or error}).",
            "Ask the organiser whether the server runs; look for a firewall or proxy on the way.",
        ) from None


def answered(connection: ssl.SSLSocket, where: str, place: Place) -> bytes:
    """What the server says to a request it does not know; empty if it listens and says nothing.

    A server looks at our certificate after the handshake has ended for us, so a refusal comes now.
    """
    answer = b""
    try:
        connection.settimeout(
            FOR_REFUSAL
        )  # first, since writing to a closed connection would lose the reason
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
        connection.settimeout(place.timeout)
        connection.sendall(
            f"GET / HTTP/1.1\r\nHost: {place.kit.server}\r\nConnection: close\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in answer and len(answer) < 65536:
            part = connection.recv(4096)
            if not part:
                break
            answer += part
    except TimeoutError:
        return answer
    except (ssl.SSLEOFError, ConnectionError):
        answer = b""
    if not answer:
        raise Distrust(
            f"the server at {where} closed the connection when it saw our certificate: it does not "
            "accept it.",
            SAME_KITS,
        )
    return answer


def clock_of(answer: bytes) -> timedelta | None:
    """How far ahead the server's clock is, if its answer says the time."""
    for line in answer.decode("latin-1").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "date":
            try:
                told = parsedate_to_datetime(value.strip())
            except ValueError:
                return None
            return told.replace(tzinfo=told.tzinfo or UTC) - datetime.now(UTC)
    return None


# numbers of OpenSSL's verify errors
NOT_YET_VALID, EXPIRED, OTHER_HOST, OTHER_ADDRESS = 9, 10, 62, 64


def distrusted(where: str, error: ssl.SSLCertVerificationError) -> Wrong:
    """We do not believe the server."""
    if error.verify_code == EXPIRED:
        return Distrust(
            f"the certificate of the server at {where} has expired.",
            "The organiser needs a new kit; check also that this machine's clock is right.",
        )
    if error.verify_code == NOT_YET_VALID:
        return Distrust(
            f"the certificate of the server at {where} is not valid yet.", "Set this machine's clock."
        )
    if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        return Distrust(f"the server at {where} has a certificate for another host.", SAME_KITS)
    return Distrust(
        f"the server at {where} has a certificate of another authority ({error.verify_message}): it is the "
        "server of another project, or not the organiser's at all.",
        SAME_KITS,
    )


def refused(where: str, error: ssl.SSLError) -> Wrong:
    """The server does not believe us, or is no TLS server."""
    reason = (error.reason or "").upper()
    if "ALERT" not in reason:
        return Wrong(
            f"{where} does not speak TLS ({error.reason or error}): the connection is plain.",
            "Ask the organiser whether another program uses the port; look for a proxy on the way.",
        )
    if "EXPIRED" in reason:
        return Distrust(f"the server at {where} says that our certificate has expired.", NEW_KIT)
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return Distrust(
            f"the server at {where} does not accept our certificate ({reason.lower().replace('_', ' ')}).",
            SAME_KITS,
        )
    return Distrust(f"the server at {where} refused the encrypted connection ({error.reason}).", SAME_KITS)


def check_own_port(place: Place) -> str:
    """The organiser's two ports are free, or this project's server has them."""
    kit = place.kit
    ports = [port for port in (kit.port, kit.admin_port) if port is not None]
    taken = [port for port in ports if not is_free(port)]
    for port in taken:
        trouble = stranger(place, port)
        if trouble:
            raise Wrong(
                f"port {port} is taken by another program ({trouble}).",
                f"Find it with: ss -ltnp | grep :{port}",
            )
    if taken:
        return f"this project's server is running on port {' and '.join(map(str, taken))}"
    return f"port {' and '.join(map(str, ports))} free"


def refuse_taken_ports(kit: Kit) -> None:
    """The server's two ports must be free: beside another program it would start and never be heard."""
    for port in (kit.port, kit.admin_port):
        try:
            if port is None or is_free(port):
                continue
        except Wrong as wrong:
            raise ConfigError(f"{wrong.found} {wrong.todo}") from None
        raise ConfigError(
            f"port {port} is taken by another program here. Find it with: ss -ltnp | grep :{port}; end it, "
            "then start the server again."
        )


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            raise Wrong(
                f"port {port} cannot be used by this account.",
                "Ports below 1024 need rights; take a higher one in project.yaml, and make new kits.",
            ) from None
        except OSError:
            return False
    return True


def stranger(place: Place, port: int) -> str:
    """Why what listens on a port is not this project's server; empty if it is."""
    admin = place.kit.admin / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is asked for at 127.0.0.1
    context.load_verify_locations(place.kit.startup / "rootCA.pem")
    context.load_cert_chain(admin / "client.crt", admin / "client.key")
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=place.timeout) as plain,
            context.wrap_socket(plain),
        ):
            return ""
    except TimeoutError:
        return "it does not speak TLS"
    except OSError as error:
        return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")


# This machine


def check_clock(place: Place) -> Check | str:
    if place.clock is None:
        return "within the dates of the certificates; the server does not tell the time"
    seconds = place.clock.total_seconds()
    if abs(place.clock) > LARGEST_DRIFT:
        ahead = "ahead of" if seconds < 0 else "behind"
        return warning(
            f"{abs(seconds) / 60:.0f} minutes {ahead} the server's clock", "Set this machine's clock (NTP)."
        )
    return f"{abs(seconds):.0f} s from the server's"


def check_disk(place: Place) -> Check | str:
    free = shutil.disk_usage(place.kit.folder).free
    text = f"{free / 1e9:.0f} GB free" if free >= 1e10 else f"{free / 1e9:.1f} GB free"
    if free < ENOUGH_DISK:
        return warning(
            f"{text} where the kit is", f"Models and prepared cases want {ENOUGH_DISK / 1e9:g} GB or more."
        )
    return text


def check_versions(place: Place) -> Check | str:
    """Installed, of the tested range, and wardround the same as the organiser's."""
    found, odd = {"wardround": __version__}, []
    for name, (first, end) in TESTED.items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Wrong(f"{name} is not installed.", "pip install 'wardround[nvflare]'") from None
        if not first <= numbers(found[name]) < end:
            tested = f"{'.'.join(map(str, first))} up to, not including, {'.'.join(map(str, end))}"
            odd.append(f"{name} {found[name]} was not tested ({tested})")
    if numbers(place.kit.version)[:2] != numbers(__version__)[:2]:
        odd.append(f"wardround is {__version__} here and {place.kit.version} where the kit was made")
    if odd:
        return warning("; ".join(odd), f"pip install 'wardround[nvflare]=={place.kit.version}'")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def numbers(version: str) -> tuple[int, ...]:
    """
    >>> numbers("2.9.0"), numbers("2.13.0+cu126"), numbers("2.10rc1")
    ((2, 9, 0), (2, 13, 0), (2, 10))
    """
    found: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)


def check_device(place: Place) -> str:
    """site.yaml can be read, and what it says to train on is here."""
    from wardround.deploy.rules import load_site
    from wardround.deploy.site import refuse_device_not_here

    return f"training runs on {refuse_device_not_here(load_site(place.kit.site_file))}"


def check_data(place: Place) -> Check | str:
    """The data contract: the file opens, this hospital is in it and has training cases. Said here alone."""
    from wardround.data import federation_file
    from wardround.data.checking.findings import format_split_counts
    from wardround.data.checking.quick import check_quickly
    from wardround.data.sources import list_cases
    from wardround.deploy.rules import client_of, load_site

    site = load_site(place.kit.site_file)
    source = place.data if place.data is not None else site.data
    if not isinstance(source, Path):
        return "made-up cases (site.yaml: data is phantom)"
    if place.data is None and not source.exists():
        return warning(
            f"not looked at: {source} is not there yet",
            "Name your federation.yaml in site.yaml, or give it with --data.",
        )
    file = federation_file.load(source)
    base = source.parent
    listing = list_cases(file, base)
    training = [name for name in listing.clients if name not in file.held_out]
    inside = client_of(site, training, place.kit.name)
    report = check_quickly(listing, file, base=base)
    own = [entry for entry in report.usable if entry.client == inside]
    if not any(entry.split == "train" for entry in own):
        raise Wrong(
            f"{source}: client '{inside}' has no usable training case.",
            f"See why with: wardround data check {source}",
        )
    left = sum(entry.client == inside for entry in report.left_out)
    text = f"client '{inside}': {len(own)} usable cases ({format_split_counts(own)})"
    if left:
        return warning(f"{text}, {left} left out", f"See why with: wardround data check {source}")
    return text


HOSPITAL: list[Step] = [
    ("kit", check_kit),
    ("certificate", check_certificates),
    ("name", check_name),
    ("port", check_port),
    ("encryption", check_tls),
    ("clock", check_clock),
    ("disk", check_disk),
    ("versions", check_versions),
    ("device", check_device),
    ("data", check_data),
]
ORGANISER: list[Step] = [
    ("kit", check_kit),
    ("certificate", check_certificates),
    ("port", check_own_port),
    ("disk", check_disk),
    ("versions", check_versions),
]
