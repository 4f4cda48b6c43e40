"""A hospital behind 10 Mbit/s, 100 ms and 2 % loss, in a network namespace. Ten minutes.

python tests/deploy/real/thin_link.py [--only link,drop,large]

Needs root, `ip` (iproute2) and /dev/net/tun; says so and is skipped where they are missing.
"""

import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import (
    Checks,
    Command,
    Deployment,
    fingerprint,
    records,
    settings,
    since,
    trained,
    until,
)

NAME = "north"
ADDRESS = "10.231.77.1"  # of the server
SERVER, HOSPITAL = f"wrs{os.getpid()}", f"wrh{os.getpid()}"  # namespaces, and the device in each
MODEL = {"name": "unet2d", "base_filters": 31, "levels": 5}  # 28.6 MB
LARGE = {"name": "unet2d", "base_filters": 64, "levels": 5}


# The link


class Direction:
    """Packets on their way: a queue in front of a wire of so many bits a second, a delay, random loss."""

    BITS, DELAY, LOSS = 10_000_000, 0.05, 0.02  # both ways together delay by 100 ms
    QUEUE = 0.25  # seconds that wait in front of the wire; what comes beyond is dropped

    def __init__(self, seed: int) -> None:
        self.num_bytes = 0  # that were sent, with what was lost
        self.is_cut = False
        self._random = random.Random(seed)
        self._free = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def put(self, packet: bytes, now: float) -> None:
        self.num_bytes += len(packet)
        lost = self._random.random() < self.LOSS
        if self.is_cut or self._free - now > self.QUEUE:
            return
        self._free = max(self._free, now) + 8 * len(packet) / self.BITS
        if not lost:
            self._waiting.append((self._free + self.DELAY, packet))

    def take(self, now: float) -> Iterator[bytes]:
        while self._waiting and self._waiting[0][0] <= now:
            yield self._waiting.popleft()[1]


class Wire:
    """Two namespaces and what is between them: a TUN device in each, whose packets a thread carries."""

    def __init__(self, congestion: str = "") -> None:
        self.down, self.up = Direction(1), Direction(2)
        self._done = threading.Event()
        self._files = [
            self._connect(SERVER, ADDRESS, congestion),
            self._connect(HOSPITAL, "10.231.77.2", congestion),
        ]
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    @staticmethod
    def _connect(name: str, address: str, congestion: str) -> int:
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, 0x400454CA, struct.pack("16sH", name.encode(), 0x1001))  # TUNSETIFF: IP, no header
        call("ip", "netns", "add", name)
        call("ip", "link", "set", name, "netns", name)
        for words in (f"address add {address}/30 dev {name}", f"link set {name} up", "link set lo up"):
            call("ip", "-n", name, *words.split())
        if congestion:
            call("ip", "netns", "exec", name, "sysctl", "-w", f"net.ipv4.tcp_congestion_control={congestion}")
        return file

    def _carry(self) -> None:
        server, hospital = self._files
        ways = ((server, self.down, hospital), (hospital, self.up, server))
        while not self._done.is_set():
            select.select(self._files, [], [], 0.002)
            for source, way, sink in ways:
                with suppress(BlockingIOError):
                    while True:
                        way.put(os.read(source, 2048), time.monotonic())
                for packet in way.take(time.monotonic()):
                    with suppress(OSError):
                        os.write(sink, packet)

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        for file in self._files:
            os.close(file)
        for name in (SERVER, HOSPITAL):
            subprocess.run(["ip", "netns", "del", name], check=False)


def call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def why_not() -> str:
    """Why no namespace can be made here; empty where it can."""
    if shutil.which("ip") is None:
        return "ip is not installed (apt-get install iproute2)"
    try:
        Wire().close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    except OSError as error:
        return f"/dev/net/tun cannot be used: {error.strerror}"
    return ""


class ThinLink(Deployment):
    """A server, and one hospital at the other end of a thin link."""

    host = ADDRESS

    def __enter__(self) -> "ThinLink":
        self.wire = Wire(os.environ.get("CONGESTION", ""))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.wire.close()

    def start(self, log: str, *arguments: str | Path, inside: Sequence[str] = ()) -> Command:
        inside = {"server": inside_of(SERVER), "join": inside_of(HOSPITAL)}.get(str(arguments[0]), ())
        return super().start(log, *arguments, inside=inside)

    def counted(self) -> dict[str, int]:
        """Bytes that went down to the hospital and up from it, with all that networks add."""
        return {"down": self.wire.down.num_bytes, "up": self.wire.up.num_bytes}


def inside_of(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def model_bytes(run: Path) -> int:
    """Of the model, as a training reply held it."""
    exchanges = [entry for record in records(run) for entry in record["exchanges"]]
    return max(entry["bytes_up"][NAME] for entry in exchanges if entry["task"] == "train")


def run_one(name: str, model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    data = {"phantom": {"hospitals": 1, "size": 32, "cases": 8}}
    return settings(
        name, "fedavg", **{"model": model, "data": data, "rounds": 3, "deadline": 900.0, **changes}
    )


def link(checks: Checks, hospitals: ThinLink) -> None:
    """Three rounds over the thin link."""
    config = run_one("link", MODEL)
    folder = hospitals.run_folder("link")
    command = hospitals.submit(config, names=[NAME])
    marks = [(time.monotonic(), hospitals.counted())]
    for count in range(1, 4):
        until(lambda: len(records(folder)) >= count or not command.is_running, 1200, f"round {count}")
        marks.append((time.monotonic(), hospitals.counted()))
        size = model_bytes(folder)
        (before, first), (after, second) = marks[-2:]
        seconds = after - before
        down, up = ((second[way] - first[way]) / size for way in ("down", "up"))
        checks.note(f"round {count}: {seconds:.1f} s, {down:.2f} models down, {up:.2f} up, {size:,} bytes")
    hospitals.wait_done(command, "link", 1200)
    checks.note(f"{hospitals.counted()}")


def main() -> None:
    with Checks(__doc__) as checks:
        reason = why_not()
        if reason:
            checks.check(True, f"skipped: {reason}")
            return
        with ThinLink([NAME], checks.options.keep) as hospitals:
            hospitals.serve()
            hospitals.join_all()
            for part in (link,):
                if checks.wants(part.__name__):
                    with checks.part(str(part.__doc__)):
                        part(checks, hospitals)


if __name__ == "__main__":
    main()
