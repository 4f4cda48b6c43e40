"""A hospital's process for one run: reads a request from a file, has the site answer it, writes the reply.

`wardround join` starts it. It has no network of its own, and reads no key: `join` signs for it.
"""

from __future__ import annotations

import base64
import logging
import queue
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wardround.child_process import Line, connect, listen
from wardround.deploy.kits.kit import open_kit
from wardround.deploy.parcel_file import read_parcel, write_numbers, write_parcel
from wardround.deploy.site import Site, choose_device, describe_data, open_site, read_site_of
from wardround.deploy.wire import ParcelError
from wardround.errors import WardroundError

log = logging.getLogger(__name__)
Send = Callable[[Mapping[str, Any]], None]
Receive = Callable[[], Line]


def check(kit: Path, send: Send) -> None:
    """Say what this hospital takes part with, or what is wrong with it."""
    try:
        opened = open_kit(kit, "hospital")
        site = read_site_of(opened)
        choose_device(site)
        words = describe_data(site, opened.name)
        limit = site.resources.seconds
        send({"ready": words, "largest": site.largest_message, "seconds": limit})
    except WardroundError as error:
        send({"wrong": str(error)})


class HospitalWorker:
    """Answers requests; the site is opened with the first of them, so that its rules are those of now."""

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send = send
        self._receive = receive
        self._site: Site | None = None

    def answer(self, line: Line) -> None:
        request, reply = Path(line["request"]), Path(line["reply"])
        try:
            if self._site is None:
                self._site = open_site(self.sign)
            answered = self._site.answer(read_parcel(request, int(line["largest"])))
            write_parcel(reply, answered)
            if self._site.first_model is not None:
                with suppress(OSError):  # where it does not fit, the organiser sends it
                    write_numbers(Path(line["model"]), self._site.first_model)
            self._send({"reply": str(reply)})
        except ParcelError as error:
            log.warning("a request could not be read: %s", error)
            self._send({"failed": f"the request could not be read: {error}"})
        except Exception as error:  # a site answers even its failures; this is for what is wrong around it
            log.exception("the request could not be answered")
            self._send({"failed": f"its process could not answer ({type(error).__name__})"})

    def sign(self, data: bytes) -> bytes:
        """A signature with the hospital's key, by the process that has it; while a request is answered."""
        self._send({"sign": base64.b64encode(data).decode()})
        found = self._receive()
        if "signature" not in found:
            raise WardroundError(f"the hospital's key cannot sign: {found.get('failed')}")
        return base64.b64decode(found["signature"])


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    requests, send = connect()
    lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
    listen(requests, lines.put)
    worker = HospitalWorker(send, lines.get)
    while True:
        line = lines.get()
        if "check" in line:
            check(Path(line["check"]), send)
        else:
            worker.answer(line)


if __name__ == "__main__":
    sys.exit(main())
