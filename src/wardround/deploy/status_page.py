"""The organiser's status in a browser: one page on 127.0.0.1 that shows and changes nothing.

A page of another site cannot read it: the state needs a token that is only in the address (behind #, which
browsers never send), the Host header must be ours, and the page loads nothing from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import secrets
from collections.abc import Callable
from typing import Any

from wardround.deploy.kits.kit import LOOPBACK

STYLE = """
body { font: 15px system-ui, sans-serif; margin: 2rem; max-width: 70rem }
table { border-collapse: collapse; margin: .5rem 0 2rem }
caption { text-align: left; font-weight: 600 }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid #8884 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } }
"""
SCRIPT = """
const say = text => document.getElementById("said").textContent = text;
function fill(id, rows, columns) {
  const body = document.querySelector("#" + id + " tbody");
  body.replaceChildren(...rows.map(row => {
    const line = document.createElement("tr");
    line.append(...columns.map(key => {
      const cell = document.createElement("td");
      cell.textContent = row[key] ?? "";
      return cell;
    }));
    return line;
  }));
}
async function look() {
  try {
    const answer = await fetch("/state", {headers: {Authorization: "Bearer " + location.hash.slice(1)}});
    if (answer.status == 401) throw new Error("open the address that the command printed");
    if (!answer.ok) throw new Error(answer.status);
    const state = await answer.json();
    fill("hospitals", state.hospitals, ["hospital", "heard of", "certificate"]);
    fill("runs", state.runs, ["run", "state", "round", "now"]);
    say("server: " + state.server + ", " + new Date().toLocaleTimeString());
  } catch (error) { say("no news: " + error.message); }
}
look(); setInterval(look, 3000);
"""


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY = (
    f"default-src 'none'; script-src 'sha256-{digest(SCRIPT)}'; style-src 'sha256-{digest(STYLE)}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def render_table(name: str, title: str, *columns: str) -> str:
    heads = "".join(f"<th scope=col>{column}</th>" for column in columns)
    return (
        f"<table id={name}><caption>{title}</caption><thead><tr>{heads}</tr></thead><tbody></tbody></table>"
    )


PAGE = f"""<!doctype html><html lang=en><head><meta charset=utf-8><title>wardround</title>
<style>{STYLE}</style></head><body><h1>wardround</h1><p id=said role=status>...</p>
{render_table("hospitals", "Hospitals", "hospital", "heard of", "certificate")}
{render_table("runs", "Runs", "run", "state", "round", "now")}
<script>{SCRIPT}</script></body></html>
"""


class StatusPage:
    """Serves from `serve` on; look: the state now, as plain values."""

    def __init__(self, look: Callable[[], dict[str, Any]], port: int = 0) -> None:
        self._token = secrets.token_urlsafe(24)
        self._server = http.server.ThreadingHTTPServer((LOOPBACK, port), make_handler(look, self._token))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/#{self._token}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def make_handler(look: Callable[[], dict[str, Any]], token: str) -> type[http.server.BaseHTTPRequestHandler]:
    class StatusHandler(http.server.BaseHTTPRequestHandler):
        timeout = 5.0  # for a request to be read

        def do_GET(self) -> None:
            port = self.connection.getsockname()[1]
            asked = self.headers.get("Authorization", "").encode("latin-1", "replace")
            if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
                self._answer(403, "text/plain", "this is not the address of the page")
            elif self.path == "/":
                self._answer(200, "text/html; charset=utf-8", PAGE)
            elif self.path != "/state":
                self._answer(404, "text/plain", "there is no such page")
            elif not hmac.compare_digest(asked, f"Bearer {token}".encode()):
                self._answer(401, "text/plain", "the token is missing or wrong")
            else:
                self._answer(200, "application/json", json.dumps(look()))

        def _answer(self, code: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(code)
            headers = {
                "Content-Type": kind,
                "Content-Length": str(len(content)),
                "Content-Security-Policy": POLICY,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cross-Origin-Resource-Policy": "same-origin",
                "Cache-Control": "no-store",
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Requests are not logged."""

    return StatusHandler
