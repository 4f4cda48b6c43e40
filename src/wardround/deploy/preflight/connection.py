"""The way to the organiser: name, port, TLS in both directions, its answer, and the organiser's own port."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime
from typing import Any

from wardround.deploy import limits
from wardround.deploy.kits.kit import LOOPBACK, Kit
from wardround.deploy.kits.private_key import find_passphrase, read_pem
from wardround.deploy.preflight import NEW_KIT, CheckFailed, PreflightContext, TrustFailed
from wardround.deploy.proxy import connect, find_proxy
from wardround.deploy.rpc.client import use_proxy
from wardround.deploy.rpc.service import INSTANCE, PREFLIGHT, SERVICE, MessageError, decode, encode
from wardround.errors import ConfigError
from wardround.text import clipped
from wardround.version import __version__

import grpc  # isort: skip  # after service, which quiets it

FOR_REFUSAL = 0.3  # seconds in which a server that refuses our certificate says so
LATEST = 32_503_680_000  # seconds since 1970: the year 3000
OPTIONS = [
    ("grpc.max_receive_message_length", limits.INFO_BYTES),
    ("grpc.max_metadata_size", limits.METADATA_BYTES),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: some versions inflate before they measure
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),
]
REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
SAME_KITS = (
    "Check that your kit and the server are of the same project. If they are, a device on the way opens "
    "encrypted connections: ask your network department to let this one through unopened."
)
# numbers of OpenSSL's verify errors
NOT_YET_VALID, EXPIRED, OTHER_HOST, OTHER_ADDRESS = 9, 10, 62, 64


def check_name(context: PreflightContext) -> str:
    kit = context.kit
    proxy = find_proxy(kit)  # which resolves the organiser's name itself
    name, port = (kit.server, kit.port) if proxy is None else (proxy.host, proxy.port)
    found: list[str] = []
    trouble: list[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            trouble.append(str(error.strerror or error))

    asking = threading.Thread(target=ask, daemon=True)  # the resolver takes no deadline
    asking.start()
    asking.join(context.timeout)
    if not found:
        why = trouble[0] if trouble else f"no answer within {context.timeout:g} s"
        raise CheckFailed(
            f"the name {name} cannot be resolved here ({why}).",
            "Ask your network department (DNS), or the organiser whether the name is right.",
        )
    return f"{name} is {found[0]}" if proxy is None else f"the proxy {name} is {found[0]}"


def check_port(context: PreflightContext) -> str:
    kit = context.kit
    proxy = find_proxy(kit)
    try:
        connect(kit, context.timeout).close()
    except OSError as error:
        if proxy is None:
            raise explain_closed_port(kit, context.timeout, error) from None
        raise CheckFailed(
            f"the proxy {proxy} does not lead to {kit.server} port {kit.port} ({error.strerror or error}).",
            "Ask your network department to let CONNECT to that host and port through, and what the proxy "
            "wants (proxy in site.yaml); then the organiser whether the server runs.",
        ) from None
    through = "" if proxy is None else f" through the proxy {proxy}"
    return f"{kit.server} port {kit.port} answers{through}"


def explain_closed_port(kit: Kit, timeout: float, error: OSError) -> CheckFailed:
    if isinstance(error, TimeoutError):
        return CheckFailed(
            f"{kit.server} port {kit.port} did not answer within {timeout:g} s.",
            f"A firewall may drop it: ask your network department to allow outbound TCP to {kit.server} "
            f"port {kit.port}, or for the proxy (proxy in site.yaml); and the organiser whether the port is "
            "open.",
        )
    return CheckFailed(
        f"{kit.server} port {kit.port} cannot be reached ({error.strerror or error}).",
        "Ask the organiser whether the server runs (wardround server KIT); then whether a firewall "
        f"between you refuses TCP port {kit.port}.",
    )


def check_tls(context: PreflightContext) -> str:
    """Both sides prove who they are, and what answers is this project's server."""
    kit = context.kit
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks chain and host name
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.set_alpn_protocols(["h2"])
    tls.load_verify_locations(kit.authority)
    tls.load_cert_chain(kit.own_certificate, kit.own_key, find_passphrase(kit.own_key))
    where = f"{kit.server} port {kit.port}"
    try:
        with (
            connect(kit, context.timeout) as plain,
            tls.wrap_socket(plain, server_hostname=kit.server) as connection,
        ):
            await_refusal(connection, where)
            version, is_grpc = connection.version(), connection.selected_alpn_protocol() == "h2"
    except ssl.SSLCertVerificationError as error:
        raise explain_distrust(where, error) from None
    except ssl.SSLEOFError:
        raise CheckFailed(
            f"{where} closed the connection before either side had proved who it is.",
            "Ask the organiser whether the server is overloaded; look for a firewall or proxy on the way.",
        ) from None
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
    if not is_grpc:
        raise not_wardround(where, "it does not speak HTTP/2")
    say_hello(context, where)
    return f"{version}, the server proved to be {kit.server} and accepts our certificate"


def await_refusal(connection: ssl.SSLSocket, where: str) -> None:
    """Raise if the server does not accept our certificate.

    A server checks our certificate after the handshake has ended for us, so a refusal comes now.
    """
    connection.settimeout(FOR_REFUSAL)
    try:
        is_open = bool(connection.recv(1))
    except TimeoutError:
        return
    except (ssl.SSLEOFError, ConnectionError):
        is_open = False
    if not is_open:
        raise TrustFailed(
            f"the server at {where} closed the connection when it saw our certificate: it does not "
            "accept it.",
            f"{SAME_KITS} Check the clocks here and there too: the certificate may have expired there.",
        )


def say_hello(context: PreflightContext, where: str) -> None:
    """Ask the server for its project, version and time; keep the last two."""
    kit = context.kit
    pair = (read_pem(kit.own_key), kit.own_certificate.read_bytes())
    credentials = grpc.ssl_channel_credentials(kit.authority.read_bytes(), *pair)
    try:
        options = [*OPTIONS, *use_proxy(kit)]
        with grpc.secure_channel(f"{kit.server}:{kit.port}", credentials, options) as channel:
            answer = channel.unary_unary(f"/{SERVICE}/Hello")(
                encode({"wardround": __version__}),
                timeout=context.timeout,
                metadata=[(INSTANCE, PREFLIGHT)],
            )
    except grpc.RpcError as error:
        raise explain_failed_call(where, error, context.timeout) from None
    found = read_answer(answer)
    if found is None:
        raise not_wardround(where, "its answer cannot be read")
    if found["project"] != kit.project_id:
        raise TrustFailed(f"the server at {where} is the server of another project.", SAME_KITS)
    context.clock = datetime.fromtimestamp(found["time"], UTC) - datetime.now(UTC)
    context.server_version = found["wardround"]


def read_answer(answer: bytes) -> dict[str, Any] | None:
    """What the server said, if it is what it should be."""
    try:
        values = decode(answer)
        time, version, project = values["time"], values["wardround"], values["project"]
    except (MessageError, KeyError):
        return None
    is_time = isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time < LATEST
    is_text = all(isinstance(text, str) and 0 < len(text) <= 64 for text in (version, project))
    return values if is_time and is_text else None


def explain_failed_call(where: str, error: grpc.RpcError, timeout: float) -> CheckFailed:
    code, details = error.code(), clipped(str(error.details()), 200)
    if code in REFUSALS:
        todo = f"Call the organiser. {NEW_KIT}" if "certificate of" in details else SAME_KITS
        return TrustFailed(f"the server at {where} refuses this kit ({details}).", todo)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return CheckFailed(
            f"{where} accepts our certificate but did not answer within {timeout:g} s.",
            "Ask the organiser whether the server is busy or hangs (its log is in logs/ of its kit).",
        )
    return not_wardround(where, f"{code.name.lower().replace('_', ' ')}: {details}")


def not_wardround(where: str, reason: str) -> CheckFailed:
    return CheckFailed(
        f"{where} does not answer as the server of wardround does ({reason}).",
        "Ask the organiser whether it runs wardround server, and of which version.",
    )


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
    """The organiser's port is free, or this kit's server has it."""
    kit = context.kit
    if is_free(kit):
        return f"port {kit.port} is free"
    trouble = identify_listener(context)
    if trouble:
        raise CheckFailed(
            f"port {kit.port} is taken by another program ({trouble}).",
            f"Find it with: ss -ltnp | grep :{kit.port}",
        )
    return f"this project's server is running on port {kit.port}"


def refuse_taken_port(kit: Kit) -> None:
    """The server's port must be free: beside another program it would start and never be reached."""
    if not is_free(kit):
        raise ConfigError(
            f"port {kit.port} is taken by another program here. Find it with: ss -ltnp | grep :{kit.port}; "
            "end it, then start the server again."
        )


def is_free(kit: Kit) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((kit.listen or LOOPBACK, kit.port))
        except PermissionError:
            raise CheckFailed(
                f"port {kit.port} cannot be used by this account.",
                "Ports below 1024 need a right, which the unit of organiser setup gives (systemd). Or take a "
                "higher one in project.yaml, and make new kits.",
            ) from None
        except OSError:
            return False
    return True


def identify_listener(context: PreflightContext) -> str:
    """Why what listens on the organiser's port is not the server of its kit; empty if it is.

    The organiser's certificate is for serving only, so none is shown here.
    """
    kit = context.kit
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.minimum_version = ssl.TLSVersion.TLSv1_3  # in which a server proves itself first
    tls.set_alpn_protocols(["h2"])
    tls.load_verify_locations(kit.authority)
    try:
        with (
            socket.create_connection((LOOPBACK, kit.port), timeout=context.timeout) as plain,
            tls.wrap_socket(plain, server_hostname=kit.server) as connection,
        ):
            own = ssl.PEM_cert_to_DER_cert(kit.own_certificate.read_text(encoding="ascii"))
            return "" if connection.getpeercert(binary_form=True) == own else "it has another certificate"
    except TimeoutError:
        return "it does not speak TLS"
    except OSError as error:
        return str(getattr(error, "reason", None) or error.strerror or error).lower().replace("_", " ")
