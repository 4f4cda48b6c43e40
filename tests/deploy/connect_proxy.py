"""An HTTP proxy that knows CONNECT and nothing else, for tests; `python connect_proxy.py PORT` runs one."""

from __future__ import annotations

import base64
import socket
import sys
import threading
from contextlib import suppress


class ConnectProxy:
    """Listens from the start; asked: the hosts and ports that were asked for; user: user:password it wants."""

    def __init__(self, port: int = 0, user: str = "") -> None:
        self.asked: list[str] = []
        self._wanted = (
            f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}" if user else ""
        )
        self._listening = socket.create_server(("0.0.0.0", port))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with suppress(OSError, ValueError), near:
            request = b""
            while b"\r\n\r\n" not in request and (part := near.recv(4096)):
                request += part
            text = request.decode("latin-1")
            method, target, _ = text.split(" ", 2)
            if method != "CONNECT" or self._wanted.lower() not in text.lower():
                near.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            self.asked.append(target)
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as far:
                far.settimeout(None)
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=carry, args=(far, near), daemon=True)
                back.start()
                carry(near, far)
                back.join()


def carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    proxy = ConnectProxy(int(sys.argv[1]))
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    seen = 0
    while True:
        threading.Event().wait(0.2)
        for target in proxy.asked[seen:]:
            sys.stdout.write(f"CONNECT {target}\n")
            sys.stdout.flush()
            seen += 1
