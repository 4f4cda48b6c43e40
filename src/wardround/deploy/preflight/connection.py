"""The way to the organiser: name, port, TLS in both directions, and the organiser's own ports."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from wardround.deploy.kits import Kit
from wardround.deploy.preflight import NEW_KIT, CheckFailed, PreflightContext, TrustFailed
from wardround.errors import ConfigError

FOR_REFUSAL = 0.3  # seconds in which a server that refuses our certificate says so
SAME_KITS = (
    "Check that your kit and the server are of the same project. If they are, a device on the way opens "
    "encrypted connections: ask your network department to let this one through unopened."
)
# numbers of OpenSSL's verify errors
NOT_YET_VALID, EXPIRED, OTHER_HOST, OTHER_ADDRESS = 9, 10, 62, 64


def check_name(context: PreflightContext) -> str:
    kit = context.kit
    found: list[str] = []
    trouble: list[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(kit.server, kit.port, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            trouble.append(str(error.strerror or error))

    asking = threading.Thread(target=ask, daemon=True)  # the resolver takes no deadline
    asking.start()
    asking.join(context.timeout)
    if not found:
        why = trouble[0] if trouble else f"no answer within {context.timeout:g} s"
        raise CheckFailed(
            f"the name {kit.server} cannot be resolved here ({why}).",
            "Ask your network department (DNS), or the organiser whether the name is right.",
        )
    return f"{kit.server} is {found[0]}"


def check_port(context: PreflightContext) -> str:
    kit = context.kit
    try:
        socket.create_connection((kit.server, kit.port), timeout=context.timeout).close()
    except TimeoutError:
        raise CheckFailed(
            f"{kit.server} port {kit.port} did not answer within {context.timeout:g} s.",
            f"A firewall may drop it: ask your network department to allow outbound TCP to {kit.server} "
            f"port {kit.port}, and the organiser whether the port is open.",
        ) from None
    except OSError as error:
        raise CheckFailed(
            f"{kit.server} port {kit.port} cannot be reached ({error.strerror or error}).",
            "Ask the organiser whether the server runs (wardround server KIT); then whether a firewall "
            f"between you refuses TCP port {kit.port}.",
        ) from None
    return f"{kit.server} port {kit.port} answers"


def check_tls(context: PreflightContext) -> str:
    """Both sides prove who they are."""
    kit = context.kit
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks chain and host name
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.load_verify_locations(kit.startup / "rootCA.pem")
    tls.load_cert_chain(kit.startup / "client.crt", kit.startup / "client.key")
    where = f"{kit.server} port {kit.port}"
    try:
        with (
            socket.create_connection((kit.server, kit.port), timeout=context.timeout) as plain,
            tls.wrap_socket(plain, server_hostname=kit.server) as connection,
        ):
            context.clock = read_clock_difference(probe_server(connection, where, context))
            return f"{connection.version()}, the server proved to be {kit.server} and accepts our certificate"
    except ssl.SSLCertVerificationError as error:
        raise explain_distrust(where, error) from None
    except ssl.SSLError as error:
        raise explain_refusal(where, error) from None
    except TimeoutError:
        raise CheckFailed(
            f"{where} accepts connections but does not speak TLS (no answer within {context.timeout:g} s).",
            "Ask the organiser whether another program uses the port; look for a proxy on the way.",
        ) from None
    except OSError as error:
        raise CheckFailed(
            f"{where} closed the connection ({error.strerror or error}).",
            "Ask the organiser whether the server runs; look for a firewall or proxy on the way.",
        ) from None


def probe_server(connection: ssl.SSLSocket, where: str, context: PreflightContext) -> bytes:
    """What the server says to a request it does not know; empty if it listens and says nothing.

    A server checks our certificate after the handshake has ended for us, so a refusal comes now.
    """
    answer = b""
    try:
        connection.settimeout(FOR_REFUSAL)  # first: writing to a closed connection would lose the reason
        with contextlib.suppress(TimeoutError):
            connection.recv(1)
        connection.settimeout(context.timeout)
        host = context.kit.server
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
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
        raise TrustFailed(
            f"the server at {where} closed the connection when it saw our certificate: it does not "
            "accept it.",
            SAME_KITS,
        )
    return answer


def read_clock_difference(answer: bytes) -> timedelta | None:
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


def explain_distrust(where: str, error: ssl.SSLCertVerificationError) -> CheckFailed:
    """Why we do not trust the server."""
    if error.verify_code == EXPIRED:
        return TrustFailed(
            f"the certificate of the server at {where} has expired.",
            "The organiser needs a new kit; check also that this machine's clock is right.",
        )
    if error.verify_code == NOT_YET_VALID:
        return TrustFailed(
            f"the certificate of the server at {where} is not valid yet.", "Set this machine's clock."
        )
    if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        return TrustFailed(f"the server at {where} has a certificate for another host.", SAME_KITS)
    return TrustFailed(
        f"the server at {where} has a certificate of another authority ({error.verify_message}): it is the "
        "server of another project, or not the organiser's at all.",
        SAME_KITS,
    )


def explain_refusal(where: str, error: ssl.SSLError) -> CheckFailed:
    """Why the server does not trust us, or is not a TLS server."""
    reason = (error.reason or "").upper()
    if "ALERT" not in reason:
        return CheckFailed(
            f"{where} does not speak TLS ({error.reason or error}): the connection is plain.",
            "Ask the organiser whether another program uses the port; look for a proxy on the way.",
        )
    if "EXPIRED" in reason:
        return TrustFailed(f"the server at {where} says that our certificate has expired.", NEW_KIT)
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return TrustFailed(
            f"the server at {where} does not accept our certificate ({reason.lower().replace('_', ' ')}).",
            SAME_KITS,
        )
    return TrustFailed(f"the server at {where} refused the encrypted connection ({error.reason}).", SAME_KITS)


def check_own_port(context: PreflightContext) -> str:
    """The organiser's two ports are free, or this project's server has them."""
    kit = context.kit
    ports = [port for port in (kit.port, kit.admin_port) if port is not None]
    taken = [port for port in ports if not is_free(port)]
    for port in taken:
        trouble = identify_listener(context, port)
        if trouble:
            raise CheckFailed(
                f"port {port} is taken by another program ({trouble}).",
                f"Find it with: ss -ltnp | grep :{port}",
            )
    if taken:
        return f"this project's server is running on port {' and '.join(map(str, taken))}"
    return f"port {' and '.join(map(str, ports))} free"


def refuse_taken_ports(kit: Kit) -> None:
    """The server's two ports must be free: beside another program it would start and never be reached."""
    for port in (kit.port, kit.admin_port):
        try:
            if port is None or is_free(port):
                continue
        except CheckFailed as wrong:
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
            raise CheckFailed(
                f"port {port} cannot be used by this account.",
                "Ports below 1024 need root rights; take a higher one in project.yaml, and make new kits.",
            ) from None
        except OSError:
            return False
    return True


def identify_listener(context: PreflightContext, port: int) -> str:
    """Why what listens on a port is not this project's server; empty if it is."""
    admin = context.kit.admin / "startup"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False  # it is asked for at 127.0.0.1
    tls.load_verify_locations(context.kit.startup / "rootCA.pem")
    tls.load_cert_chain(admin / "client.crt", admin / "client.key")
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=context.timeout) as plain,
            tls.wrap_socket(plain),
        ):
            return ""
    except TimeoutError:
        return "it does not speak TLS"
    except OSError as error:
        return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")
