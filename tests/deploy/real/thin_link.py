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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    Checks,
    Command,
    Deployment,
    Failed,
    fingerprint,
    records,
    settings,
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
        self.wire = Wire(os.environ.get("CONGESTION", ""))  # else as the machine has it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.wire.close()

    def start(self, log: str, *arguments: str | Path, inside: Sequence[str] = ()) -> Command:
        inside = {"server": inside_of(SERVER), "join": inside_of(HOSPITAL)}.get(str(arguments[0]), ())
        return super().start(log, *arguments, inside=inside)


def inside_of(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


class Round(NamedTuple):
    """What a round took; down, up: bytes on the wire, with all that networks add and repeat."""

    seconds: float
    down: int
    up: int


def run_one(name: str, model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    data = {"phantom": {"hospitals": 1, "size": 32, "cases": 8}}
    return settings(
        name, "fedavg", **{"model": model, "data": data, "rounds": 3, "deadline": None, **changes}
    )


def wait_rounds(hospitals: ThinLink, command: Command, name: str, count: int) -> Iterator[Round]:
    """Each round as it ends."""
    wire, folder = hospitals.wire, hospitals.run_folder(name)
    before = time.monotonic(), wire.down.num_bytes, wire.up.num_bytes

    def is_there(number: int) -> bool:
        if not command.is_running and len(records(folder)) < number:
            raise Failed(f"submit ended: {command.text[-500:]}")
        return len(records(folder)) >= number

    for number in range(1, count + 1):
        until(partial(is_there, number), 1500, f"round {number} of '{name}'")
        now = time.monotonic(), wire.down.num_bytes, wire.up.num_bytes
        yield Round(now[0] - before[0], now[1] - before[1], now[2] - before[2])
        before = now


def model_bytes(run: Path) -> int:
    """Of the model, as a training reply held it."""
    exchanges = [entry for record in records(run) for entry in record["exchanges"]]
    return max(entry["bytes_up"][NAME] for entry in exchanges if entry["task"] == "train")


def compare(checks: Checks, what: str, found: Round, size: int) -> None:
    """Bytes and time of a round against the model."""
    down, up = found.down / size, found.up / size
    ideal = 8 * size / Direction.BITS * 2
    facts = {
        "down": round(down, 2),
        "up": round(up, 2),
        "seconds": round(found.seconds, 1),
        "MB": round(size / 1e6, 1),
    }
    checks.check(down <= 1.3 and up <= 1.3, f"{what}: at most 1.3 times the model each way", **facts)
    times = round(found.seconds / ideal, 2)
    checks.check(times <= 2.5, f"{what}: at most 2.5 times what is sent over the bandwidth", times=times)


def link(checks: Checks, hospitals: ThinLink) -> None:
    """Three rounds over the thin link."""
    config = run_one("link", MODEL)
    expected = trained(hospitals.folder, config)
    command = hospitals.submit(config, names=[NAME])
    for number, found in enumerate(wait_rounds(hospitals, command, "link", 3), 1):
        # the model to train is there: in the first round the hospital builds it, later it was evaluated before
        compare(checks, f"round {number}", found, model_bytes(hospitals.run_folder("link")))
    hospitals.wait_done(command, "link", 600)
    found_bytes = fingerprint(hospitals.run_folder("link"))
    checks.check(found_bytes == expected, f"{found_bytes[:12]} over the link, {expected[:12]} with train")
    said = [line for line in hospitals.joined[NAME].text.splitlines() if " left" in line and "about" in line]
    checks.check(bool(said), "join says how long it takes", said=said[:1])


def drop(checks: Checks, hospitals: ThinLink) -> None:
    """The connection is lost in the middle of a request, and in the middle of a reply."""
    config = run_one("drop", MODEL, rounds=2, absent_after=120)
    expected = trained(hospitals.folder, config)
    wire = hospitals.wire
    begun = wire.down.num_bytes, wire.up.num_bytes
    command = hospitals.submit(config, names=[NAME])
    for way in (wire.down, wire.up):
        start = way.num_bytes
        until(partial(has_moved, way, start + 12_000_000), 300, "half of the model is on its way")
        wire.down.is_cut = wire.up.is_cut = True
        time.sleep(45)  # both ends give the connection up after 30
        wire.down.is_cut = wire.up.is_cut = False
        checks.note("the wire passed nothing for 45 s")
    hospitals.wait_done(command, "drop", 600)
    size = model_bytes(hospitals.run_folder("drop"))
    down, up = (wire.down.num_bytes - begun[0]) / size, (wire.up.num_bytes - begun[1]) / size
    lost = [line for line in hospitals.joined[NAME].text.splitlines() if "connection lost" in line]
    checks.check(len(lost) >= 2, "the connection was lost twice", lost=len(lost))
    checks.check(  # two models up, two averages down
        down <= 1.3 * 2 and up <= 1.3 * 2, "what had arrived stays", down=round(down, 2), up=round(up, 2)
    )
    found_bytes = fingerprint(hospitals.run_folder("drop"))
    checks.check(found_bytes == expected, f"{found_bytes[:12]} over the link, {expected[:12]} with train")


def has_moved(way: Direction, num_bytes: int) -> bool:
    return way.num_bytes >= num_bytes


def large(checks: Checks, hospitals: ThinLink) -> None:
    """A model of four times the size, one round."""
    config = run_one("large", LARGE, rounds=1)
    command = hospitals.submit(config, names=[NAME])
    for found in wait_rounds(hospitals, command, "large", 1):
        compare(checks, "large", found, model_bytes(hospitals.run_folder("large")))
    hospitals.wait_done(command, "large", 600)


def main() -> None:
    with Checks(__doc__) as checks:
        reason = why_not()
        if reason:
            checks.check(True, f"skipped: {reason}")
            return
        with ThinLink([NAME], checks.options.keep) as hospitals:
            hospitals.serve()
            hospitals.join_all()
            for part in (link, drop, large):
                if checks.wants(part.__name__):
                    with checks.part(str(part.__doc__)):
                        part(checks, hospitals)


if __name__ == "__main__":
    main()
