"""The live view: a local server that shows the report of a running run.

It listens on 127.0.0.1 and answers GET for two paths, both below a random token that is only in the printed
URL, so other users of the machine and other sites in the same browser cannot read the page. Requests for
another host name are refused, which prevents DNS rebinding.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from wardround.comparison import Comparison
from wardround.engine.outcome import read_status
from wardround.errors import WardroundError
from wardround.reporting.page import ReportSource, build_page, open_source

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
GRACE_SECONDS = 30.0  # how long the last page is served to a browser that has not fetched it

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page's own policy says the rest
}


class LivePage:
    """The current page of a folder; rebuilt only when the folder has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._state: str | None = None
        self._page = ""

    @property
    def source(self) -> ReportSource:
        return open_source(self._folder, may_wait=True)

    def status(self) -> dict[str, Any]:
        """What the page polls every two seconds."""
        source = self.source
        return {"state": source.state(), "done": is_done(source)}

    def text(self) -> str:
        with self._lock:
            source = self.source
            state = source.state()
            if state != self._state:
                try:
                    self._page, self._state = build_page([source], live=state), state
                except (WardroundError, OSError, ValueError):  # a file that is being written
                    log.debug("the page could not be built", exc_info=True)
                    if not self._page:
                        raise
            return self._page


def is_done(source: ReportSource) -> bool:
    """Whether the run has ended, or every cell of the comparison has."""
    if source.kind == "comparison":
        found = Comparison.load(source.folder)
        return all(cell.is_done or cell.name in found.failures for cell in found.cells)
    return read_status(source.folder) in ("done", "stopped")


class Handler(BaseHTTPRequestHandler):
    """Answers GET of the page and of its status, nothing else."""

    server: Server
    server_version = "wardround"
    sys_version = ""
    timeout = 10

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "This host name is not served here.\n")
            return
        try:
            if self.path == f"/{self.server.token}/":
                page = self.server.page.text()
                self.server.seen = is_done(self.server.page.source)
                self._answer(HTTPStatus.OK, "text/html", page)
            elif self.path == f"/{self.server.token}/status.json":
                self._answer(HTTPStatus.OK, "application/json", json.dumps(self.server.page.status()))
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "Not found.\n")
        except WardroundError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        for key, value in HEADERS.items():
            self.send_header(key, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class Server(ThreadingHTTPServer):
    """Holds the page. seen: whether a browser has fetched it since the run ended."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.page = LivePage(folder)
        self.token = secrets.token_urlsafe(12)
        self.seen = False
        self.hosts = frozenset(f"{host}:{self.server_port}" for host in ("127.0.0.1", "localhost"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)


class LiveReport:
    """A live view served in the background; a context manager."""

    def __init__(self, folder: Path, *, until_done: bool) -> None:
        self._server = Server(folder)
        self._until_done = until_done
        self._ended = threading.Event()
        self.url = f"http://127.0.0.1:{self._server.server_port}/{self._server.token}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()
        if until_done:
            threading.Thread(target=self._end_when_done, daemon=True).start()

    def _end_when_done(self) -> None:
        deadline: float | None = None
        while not self._ended.wait(POLL_SECONDS):
            if not is_done(self._server.page.source):
                deadline = None
                continue
            deadline = deadline or time.monotonic() + GRACE_SECONDS
            if self._server.seen or time.monotonic() > deadline:
                self._ended.wait(2 * POLL_SECONDS)  # for the response that is being sent
                self.close()

    def wait(self) -> None:
        """Block until the run is done (with until_done) or the server is closed."""
        while not self._ended.wait(POLL_SECONDS):
            pass

    def close(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._server.shutdown()
            self._server.server_close()

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(folder: str | Path, *, open_browser: bool = False, until_done: bool = True) -> LiveReport:
    """Serve the page of a run or comparison at `.url` from a thread; returns at once.

    The folder need not exist yet. until_done: stop once the run is done and a browser has
    fetched the last page; otherwise `close` stops it (or leaving the `with`).
    """
    served = LiveReport(Path(folder), until_done=until_done)
    if open_browser:
        webbrowser.open(served.url)
    return served
