"""The HTTP proxy of a hospital's network: it passes the connection on (CONNECT) and cannot look into it.

`proxy` in site.yaml, else https_proxy of the environment; no_proxy is heeded. A password is in no message.
"""

from __future__ import annotations

import base64
import http.client
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from wardround.deploy.kits.kit import Kit
from wardround.errors import ConfigError
from wardround.machine import is_loopback, others_may
from wardround.yaml_file import read_yaml

NONE = "none"
EXAMPLE = "write it as http://proxy.example.org:3128, or http://user:password@proxy.example.org:3128"


@dataclass(frozen=True)
class Proxy:
    """Shown without what proves who uses it; url: with it."""

    host: str
    port: int
    url: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What proves who uses it, as HTTP says it."""
        parts = urlsplit(self.url)
        if parts.username is None:
            return {}
        plain = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Proxy-Authorization": f"Basic {base64.b64encode(plain.encode()).decode()}"}


def parse_proxy(text: str) -> Proxy:
    """The proxy at an address; a ValueError that repeats nothing of it."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        raise ValueError(f"it is not an address; {EXAMPLE}") from None
    if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query or not text.isprintable():
        raise ValueError(f"it is not the address of an HTTP proxy; {EXAMPLE}")
    return Proxy(host, port, f"http://{parts.netloc}")


def find_proxy(kit: Kit) -> Proxy | None:
    """The proxy on the way to the organiser, None where there is none."""
    said = read_yaml(kit.site_file, largest=10**6).get("proxy") if kit.site_file.exists() else None
    where, text = f"{kit.site_file}: proxy", said
    if said is None and not is_loopback(kit.server):
        found = getproxies_environment()
        where, text = "https_proxy of the environment", found.get("https") or found.get("http")
    if text is None or text == NONE or proxy_bypass(kit.server):
        return None
    try:
        proxy = parse_proxy(str(text))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None
    if said is not None and proxy.headers and others_may(kit.site_file, 0o077):
        raise ConfigError(
            f"{kit.site_file} holds the password of a proxy, and others on this machine may read it. Close "
            f"it: chmod 600 {kit.site_file}"
        )
    return proxy


def connect(kit: Kit, timeout: float) -> socket.socket:
    """A plain connection to the organiser, through the proxy if there is one."""
    proxy = find_proxy(kit)
    if proxy is None:
        return socket.create_connection((kit.server, kit.port), timeout=timeout)
    tunnel = http.client.HTTPConnection(proxy.host, proxy.port, timeout=timeout)
    try:
        tunnel.set_tunnel(kit.server, kit.port, proxy.headers)
        tunnel.connect()
    except http.client.HTTPException as error:
        tunnel.close()
        raise OSError(f"it is not an HTTP proxy: {type(error).__name__}") from None
    return tunnel.sock
