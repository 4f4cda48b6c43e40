"""What a running server and its hospitals refuse, each within five seconds and by name; no pickle ever runs.

    python tests/deploy/real/refusals.py [--keep FOLDER] [--only WORD]

A server and four hospitals on loopback, each with `wardround server` and `wardround join`, mutual TLS. One
line for each attack: the seconds until it was refused, and what was said. Exit code 0 if all of them were.

A changed or repeated message is tried twice: on the wire, where TLS finds it, and inside a parcel, where
nothing but the SHA-256 and the number of the request can. For the second the real hospital (`Site`) and the
real organiser (`conduct`) speak over a channel of this process, since FLARE would have to be broken first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import yaml

from wardround.config_file import load_config
from wardround.deploy import provisioning
from wardround.deploy.authority import Authority, write_manifest
from wardround.deploy.conducting import conduct
from wardround.deploy.kits import Kit, read_kit
from wardround.deploy.nvflare.session import Session
from wardround.deploy.nvflare.shareable import from_shareable, to_shareable
from wardround.deploy.preflight import CheckFailed, PreflightContext
from wardround.deploy.preflight.connection import check_tls
from wardround.deploy.processes import free_ports, wait_for_hospitals, wait_for_port
from wardround.deploy.project import Project
from wardround.deploy.provisioning import provision, put_certificate
from wardround.deploy.site import Site
from wardround.deploy.site_file import SiteFile
from wardround.deploy.wire import Parcel
from wardround.errors import WardroundError
from wardround.messages import Message

SECONDS = 5.0  # in which a refusal must come
PAUSE = 0.2  # between the end of a handshake and the first data
PATIENCE = 40.0  # in which we stop waiting for one
LOOPBACK = "127.0.0.1"
NAMES = ("east", "north", "south", "west")
RULES: dict[str, dict[str, Any]] = {
    "east": {"largest_message": "50 kB"},
    "north": {},
    "south": {"tasks": ["evaluate"]},
    "west": {"methods": ["fedprox"]},
}


class NotRefused(Exception):
    """An attack went through, or nobody said what was wrong."""


# Pickles


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@dataclass(eq=False)
class Place:
    """Where everything is: kits of the project, those of another one, and the mark of a pickle that ran."""

    folder: Path
    kits: dict[str, Kit]
    others: dict[str, Kit]
    authority: Authority
    mark: Path

    @property
    def bomb(self) -> bytes:
        return pickle.dumps(Bomb(self.mark))

    @property
    def tag(self) -> str:
        """The same in YAML."""
        return f'!!python/object/apply:os.system ["touch {self.mark}"]'

    @property
    def address(self) -> tuple[str, int]:
        return LOOPBACK, self.kits["organiser"].port

    def scratch(self, name: str) -> Path:
        path = self.folder / "scratch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def prepared(folder: Path) -> Place:
    port, admin_port = free_ports(2)
    values = {
        "project": "refusals",
        "organiser": {"host": "localhost", "port": port, "admin_port": admin_port},
        "hospitals": list(NAMES),
    }
    kits = provision(Project.model_validate(values), folder / "kits", bind=LOOPBACK)
    others = provision(
        Project.model_validate(values | {"project": "another"}), folder / "others", bind=LOOPBACK
    )
    for kit in (*kits[1:], *others[1:]):
        rules = {"data": "phantom", "tasks": ["all"], "min_cases": 0, **RULES[kit.name]}
        kit.site_file.write_text(yaml.safe_dump(rules))
    authority = Authority.open(folder / "kits" / ".authority", Project.model_validate(values), LOOPBACK)
    return Place(
        folder,
        {kit.name: kit for kit in kits},
        {kit.name: kit for kit in others},
        authority,
        folder / "a-pickle-ran",
    )


# Commands


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "wardround", *map(str, words)]


def said_by(*words: str | Path, cwd: Path | None = None) -> str:
    """What a command that must fail says."""
    done = subprocess.run(
        command(*words), capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, check=False
    )
    text = " ".join((done.stderr or done.stdout).split())
    if done.returncode == 0:
        raise NotRefused(f"`wardround {words[0]}` ended well: {text[-300:]}")
    if "Traceback" in text:
        raise NotRefused(f"`wardround {words[0]}` broke down: {text[-300:]}")
    return text


def seconds_to_start() -> float:
    """Of a command that ends at once: interpreter and libraries."""
    started = time.monotonic()
    said_by("preflight", "no-such-folder")
    return time.monotonic() - started


@contextmanager
def running(*words: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that goes on, ended with the block; what it says is in the log."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(*words), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_words(files: list[Path], words: str, seconds: float) -> str:
    """The line with these words (a regular expression), as soon as one of the files has it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for file in files:
            for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
                if re.search(words, line, re.IGNORECASE):
                    return line.strip()
        time.sleep(0.05)
    raise NotRefused(f"no word of it within {seconds:.0f} s in {', '.join(file.name for file in files)}")


# Connections


def context_of(kit: Kit, certificate: bool = True) -> ssl.SSLContext:
    """What a hospital with this kit connects with; the server's name is believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(kit.startup / "client.crt", kit.startup / "client.key")
    return context


def alert_from(address: tuple[str, int], context: ssl.SSLContext, *, speak: bool = False) -> str:
    """How the server ends an encrypted connection. speak: send a request first; otherwise listen, since a
    server looks at our certificate after the handshake has ended for us, and writing would lose its word."""
    try:
        with (
            socket.create_connection(address, timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            if speak:
                time.sleep(2 * PAUSE)  # so that what follows is data, not the end of the handshake
                connection.sendall(b"GET /f3 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = connection.recv(4096)
    except ssl.SSLEOFError:
        return "closed without a word"
    except ssl.SSLError as error:
        return str(error.reason or error)
    except TimeoutError:
        raise NotRefused("the connection stays open") from None
    except ConnectionError as error:
        return f"closed: {error.strerror}"
    if answer:
        raise NotRefused(f"the server answered: {answer[:100]!r}")
    return "closed without a word"


def seen_from(kit: Kit, place: Place) -> str:
    """How the server ends the connection, and how the refused side names it."""
    ended = alert_from(place.address, context_of(kit))
    try:
        check_tls(PreflightContext(kit, None, datetime.now(UTC), SECONDS))
    except CheckFailed as wrong:
        return f"{ended}; {wrong.found}"
    raise NotRefused(f"{ended}, but preflight finds nothing wrong")


def wrong_authority(place: Place) -> str:
    """A certificate of another project's authority, by somebody who trusts this one's server."""
    folder = place.scratch("wrong-authority")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.others["north"].folder, folder)
    kit = read_kit(folder)
    shutil.copyfile(place.kits["north"].startup / "rootCA.pem", kit.startup / "rootCA.pem")
    return seen_from(kit, place)


def expired(place: Place) -> str:
    return seen_from(expired_kit(place), place)


def expired_kit(place: Place) -> Kit:
    """North's kit as it was two days after its certificate ran out."""
    folder = place.scratch("expired")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.kits["north"].folder, folder, ignore=shutil.ignore_patterns("state"))
    (folder / "state").mkdir()
    kit = read_kit(folder)
    start = datetime.now(UTC) - timedelta(days=12)
    issued = place.authority.issue("north", "north", use="client", valid=timedelta(days=10), start=start)
    for file in kit.startup.glob("client.*"):
        file.unlink()
    put_certificate(kit.startup, "client", *issued, place.authority)
    write_manifest(kit, place.authority)
    provisioning.make_private(kit.folder)
    return kit


def no_certificate(place: Place) -> str:
    return alert_from(place.address, context_of(place.kits["north"], certificate=False))


def plain(place: Place) -> str:
    """Without TLS: the first bytes are answered with the end of the connection, and with nothing else."""
    with socket.create_connection(place.address, timeout=SECONDS) as connection:
        connection.sendall(b"GET /f3 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n\r\n")
        try:
            answer = connection.recv(4096)
        except TimeoutError:
            raise NotRefused("the connection stays open") from None
        except ConnectionError as error:
            return f"closed: {error.strerror}"
    # one TLS record that says goodbye is all it may be: 21 is an alert
    if answer and answer[0] != 21:
        raise NotRefused(f"the server answered: {answer[:100]!r}")
    return "closed with a TLS alert" if answer else "closed without a byte"


# On the wire: a device between hospital and organiser that changes or repeats an encrypted record


@contextmanager
def between(address: tuple[str, int], spoil: Callable[[bytes], bytes]) -> Iterator[tuple[str, int]]:
    """A port that passes on what comes, but for the first record towards the server after a pause."""
    listening = socket.create_server((LOOPBACK, 0))
    listening.settimeout(SECONDS)

    def work() -> None:
        with listening.accept()[0] as near, socket.create_connection(address) as far:
            back = threading.Thread(target=pass_on, args=(far, near), daemon=True)
            back.start()
            last, spoilt = time.monotonic(), False
            for record in records_of(near):
                if time.monotonic() - last > PAUSE and not spoilt:
                    record, spoilt = spoil(record), True
                last = time.monotonic()
                try:
                    far.sendall(record)
                except OSError:  # the server has gone, which is what we are here for
                    break
            back.join(timeout=SECONDS)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield (LOOPBACK, int(listening.getsockname()[1]))
    finally:
        listening.close()


def pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def records_of(source: socket.socket) -> Iterator[bytes]:
    """TLS records: type, version, length, content."""
    buffer = b""
    while True:
        while len(buffer) >= 5 and len(buffer) >= 5 + struct.unpack(">H", buffer[3:5])[0]:
            size = 5 + struct.unpack(">H", buffer[3:5])[0]
            yield buffer[:size]
            buffer = buffer[size:]
        try:
            data = source.recv(65536)
        except OSError:
            return
        if not data:
            return
        buffer += data


def changed_on_the_wire(place: Place) -> str:
    return past_the_device(place, lambda record: record[:-1] + bytes([record[-1] ^ 1]))


def repeated_on_the_wire(place: Place) -> str:
    return past_the_device(place, lambda record: record + record)


def past_the_device(place: Place, spoil: Callable[[bytes], bytes]) -> str:
    """How the server ends the connection; it must answer what passes the device unchanged."""
    context = context_of(place.kits["north"])
    try:
        with between(place.address, lambda record: record) as address:
            ended = alert_from(address, context, speak=True)
    except NotRefused as answer:
        if "HTTP/1.1 " not in str(answer):
            raise
    else:
        raise NotRefused(f"an honest connection was {ended}")
    with between(place.address, spoil) as address:
        return alert_from(address, context, speak=True)


# A kit of another project, with this server's address in it


def other_preflight(place: Place) -> str:
    return said_by("preflight", place.others["north"].folder)


def other_join(place: Place) -> str:
    return joined(place, place.others["north"])


def joined(place: Place, kit: Kit) -> str:
    """What `wardround join` says itself; its log is for those who look for more."""
    log = place.scratch(f"join-{kit.project}-{kit.folder.name}.txt")
    with running("join", kit.folder, log=log) as process:
        line = wait_for_words([log], REFUSED, PATIENCE)
        if process.poll() == 0:
            raise NotRefused("the command ended well")
        return line


REFUSED = r"another (project|authority)|does not accept|expired|certificate"


def other_submit(place: Place) -> str:
    return said_by("submit", run_file(place), "--kit", place.others["organiser"].folder)


def expired_preflight(place: Place) -> str:
    return said_by("preflight", expired_kit(place).folder)


def expired_join(place: Place) -> str:
    return joined(place, expired_kit(place))


def run_file(place: Place) -> Path:
    file = place.scratch("run.yaml")
    file.write_text(yaml.safe_dump(run_values("refusals")))
    return file


def run_values(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "rounds": 1,
        "batch_size": 4,
        "min_clients": 1,
        "deadline": 60,
        "data": {"phantom": {"hospitals": 4, "size": 16, "cases": 8}},
        "model": {"name": "unet2d", "base_filters": 8, "levels": 3},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"threads": 1, "device": "cpu"},
        **changes,
    }


# Inside a parcel: the hospital and the organiser themselves, over a channel of this process


class Channel:
    """Two hospitals; `change` gets each reply to a training request of the first, and the one before it."""

    def __init__(self, folder: Path, change: Callable[[Parcel, Parcel], Parcel]) -> None:
        rules = SiteFile.model_validate({"data": "phantom", "tasks": "all", "min_cases": 0})
        self.sites = {name: Site(name, rules, folder / name) for name in ("east", "north")}
        self.requests: list[Parcel] = []
        self._change = change
        self._last: dict[str, Parcel] = {}

    def alive(self) -> Mapping[str, float]:
        return dict.fromkeys(self.sites, 0.0)

    def strays(self) -> list[tuple[str, str]]:
        return []

    def exchange(self, requests: Mapping[str, Parcel], deadline: float) -> Iterator[tuple[str, Parcel]]:
        for name, request in requests.items():
            reply = self.sites[name].answer(request)
            if name == "east":
                self.requests.append(request)
            sent = reply
            if name == "east" and request.header["task"] == "train":
                sent = self._change(reply, self._last.get("train", reply))
                self._last["train"] = reply
            yield name, sent


def conducted(place: Place, name: str, change: Callable[[Parcel, Parcel], Parcel]) -> tuple[Channel, str]:
    """A run of two rounds; what the records say of the second one's refused reply."""
    folder = place.scratch(name)
    shutil.rmtree(folder, ignore_errors=True)
    values = run_values(name, rounds=2, output=str(folder / "run"))
    channel = Channel(folder, change)
    conduct(channel, load_config(values | {"data": {"phantom": {"hospitals": 2, "size": 16, "cases": 8}}}),
            names=["east", "north"])  # fmt: skip
    lines = (folder / "run" / "records.jsonl").read_text().splitlines()
    refused = json.loads(lines[-1])["refused"]
    if "train/east" not in refused:
        raise NotRefused(f"the records of round 2 say {refused}")
    return channel, str(refused["train/east"])


def with_another_byte(parcel: Parcel) -> Parcel:
    arrays = {key: np.array(array) for key, array in parcel.arrays.items()}
    next(array for array in arrays.values() if array.size).reshape(-1).view(np.uint8)[0] ^= 1
    return replace(parcel, arrays=arrays)


def tampered_reply(place: Place) -> str:
    return conducted(place, "tampered", lambda reply, last: with_another_byte(reply))[1]


def replayed_reply(place: Place) -> str:
    return conducted(place, "replayed", lambda reply, last: last)[1]


def at_the_hospital(place: Place, change: Callable[[Parcel], Parcel]) -> str:
    """What a hospital answers to a request that was made from one it has seen."""
    rules = SiteFile.model_validate({"data": "phantom", "tasks": "all", "min_cases": 0})
    reply = Site("east", rules, place.scratch("asked") / "east").answer(change(request_of(place)))
    words = reply.header["more"].get("refused")
    if not words or reply.arrays:
        raise NotRefused(f"the hospital answered {reply.header['more']}, {len(reply.arrays)} arrays")
    return str(words)


@cache
def request_of(place: Place) -> Parcel:
    """A training request of a run that went well, and was answered."""
    folder = place.scratch("asked")
    shutil.rmtree(folder, ignore_errors=True)
    channel = Channel(folder, lambda reply, last: reply)
    values = run_values("asked", output=str(folder / "run"))
    conduct(channel, load_config(values | {"data": {"phantom": {"hospitals": 2, "size": 16, "cases": 8}}}),
            names=["east", "north"])  # fmt: skip
    return next(parcel for parcel in channel.requests if parcel.header["task"] == "train")


def tampered_request(place: Place) -> str:
    return at_the_hospital(place, lambda request: renumbered(with_another_byte(request)))


def replayed_request(place: Place) -> str:
    return at_the_hospital(place, lambda request: request)


def renumbered(parcel: Parcel) -> Parcel:
    return replace(parcel, header={**parcel.header, "request": "f" * 32})


# A pickle, offered as anything


def pickle_as_array(place: Place) -> str:
    """Objects in an array; a row of bytes that is a pickle; both past FLARE's own form and back."""
    bomb = np.array([Bomb(place.mark)], dtype=object)
    first = at_the_hospital(place, lambda request: with_array(request, bomb))
    second = at_the_hospital(
        place, lambda request: with_array(request, np.frombuffer(place.bomb, np.uint8).copy())
    )
    shareable = to_shareable(renumbered(request_of(place)))
    shareable["DXO"]["data"] = {"0": bomb}
    try:
        from_shareable(shareable)
    except ValueError as error:
        return f"{first}; {second}; {error}"
    raise NotRefused("an array of objects was taken")


def with_array(parcel: Parcel, array: Any) -> Parcel:
    key = next(iter(parcel.arrays))
    return replace(renumbered(parcel), arrays={**parcel.arrays, key: array})


def pickle_as_header(place: Place) -> str:
    try:
        Parcel.read(place.bomb.decode("latin-1"), {})
    except WardroundError as error:
        first = str(error)
    else:
        raise NotRefused("a pickle was read as a header")
    bomb = {"more": {**request_of(place).header["more"], "loss": Bomb(place.mark)}}
    second = at_the_hospital(
        place, lambda request: replace(request, header={**renumbered(request).header, **bomb})
    )
    return f"{first} {second}"


def pickle_on_the_port(place: Place) -> str:
    """Raw frames by somebody with a valid certificate: FLARE's own form around what is no such thing."""
    frames = asyncio.run(speak(place, hostile_frames(place)))
    time.sleep(0.5)
    log = (place.kits["organiser"].flare / "log.txt").read_text(errors="replace")
    said = {word: len(re.findall(word, log)) for word in REFUSING}
    if not said["unauthenticated msg"] or not said["Error processing"]:
        raise NotRefused(f"the server's log says {said}")
    return f"{frames} frames; the server's log: {said}"


REFUSING = ("unauthenticated msg", "Error processing", "no registration session", "is not allowed")


async def speak(place: Place, frames: list[bytes]) -> int:
    """Each frame in a connection of its own, after a proper greeting; how many were sent."""
    import aiohttp

    host, port = place.address
    sent = 0
    async with aiohttp.ClientSession() as session:
        for frame in frames:
            async with session.ws_connect(
                f"wss://{host}:{port}/f3",
                ssl=context_of(place.kits["north"]),
                timeout=aiohttp.ClientWSTimeout(),
            ) as connection:
                await connection.send_bytes(framed(4, {}, msgpack.packb({"endpoint_name": "north.probe"})))
                await connection.receive()  # its own greeting: from now on it listens
                await connection.send_bytes(frame)
                sent += 1
                try:
                    async with asyncio.timeout(0.15):
                        while (await connection.receive()).type != aiohttp.WSMsgType.CLOSED:
                            pass
                except TimeoutError:
                    pass
    return sent


def framed(kind: int, headers: dict[str, Any] | bytes, payload: bytes) -> bytes:
    """One frame of FLARE's: 16 bytes in front, headers in msgpack, then the payload."""
    packed = headers if isinstance(headers, bytes) else msgpack.packb(headers) if headers else b""
    start = struct.pack(">IHBBHHHH", 16 + len(packed) + len(payload), len(packed), kind, 0, 0, 1, 1, 1)
    return bytes(start + packed + payload)


def hostile_frames(place: Place) -> list[bytes]:
    bomb = place.bomb
    frames = [bomb, framed(4, {}, bomb), framed(1, bomb, bomb), framed(2, bomb, b"")]
    objects = place.scratch("objects.npy")
    with objects.open("wb") as file:
        np.save(file, np.array([Bomb(place.mark)], dtype=object), allow_pickle=True)
    bodies = [
        bomb,
        msgpack.packb({"__fobs_type__": "os.system", "__fobs_data__": f"touch {place.mark}"}),
        msgpack.packb(fobs("builtins.eval", f"__import__('os').system('touch {place.mark}')")),
        msgpack.packb(fobs("numpy.ndarray", objects.read_bytes())),
        msgpack.packb(fobs("nvflare.apis.shareable.Shareable", {"a": bomb})),
        msgpack.packb({"__fobs_dc__": "pickle.loads", **fobs("collections.OrderedDict", bomb)}),
    ]
    channels = [("server_command", "request"), ("task", "get_task"), ("task", "register"), ("stream", "data"),
                ("aux_communication", "wardround.slot"), ("_sm_", "sm_cert"), ("admin", "x")]  # fmt: skip
    for channel, topic in channels:
        for body in bodies:
            # as it is, and with FLARE's mark of a message's main part in front
            for content in (body, struct.pack(">BBQ", 100, 0, len(body)) + body):
                for encoding in ("fobs", "bytes"):
                    frames.append(framed(1, message_headers(channel, topic, encoding), content))
    return frames


def fobs(kind: str, data: Any) -> dict[str, Any]:
    return {
        "__fobs_type__": kind,
        "__fobs_data__": data,
        "__fobs_dc__": "nvflare.fuel.utils.fobs.decomposer.DataClassDecomposer",
    }


def message_headers(channel: str, topic: str, encoding: str) -> dict[str, Any]:
    plain = {
        "msg_type": "req",
        "req_id": "1",
        "reply_expected": True,
        "topic": topic,
        "channel": channel,
        "origin": "north",
        "destination": "server",
        "from": "north",
        "to": "server",
        "payload_encoding": encoding,
    }
    return {f"cn__{key}": value for key, value in plain.items()}


def job_with(place: Place, name: str, change: Callable[[Path], None]) -> str:
    """What the server says to a job folder; one it takes must end without a run."""
    from wardround.deploy.nvflare.job import jobs_folder, write_job

    folder = jobs_folder(place.kits["organiser"].folder)
    job = write_job(folder, name=name, args={"config": run_values(name), "names": ["north"]})
    change(job)
    with Session(place.kits["organiser"].folder) as session:
        try:
            number = session.submit(job)
        except WardroundError as error:
            return str(error)
        deadline = time.monotonic() + PATIENCE
        while not (state := session.job_state(number)).startswith("FINISHED"):
            if time.monotonic() > deadline:
                session.abort(number)
                raise NotRefused(f"the job is still {state}")
            time.sleep(0.2)
        if "COMPLETED" in state:
            raise NotRefused("the job ran")
        return f"the job ended: {state}"


def job_is_a_pickle(place: Place) -> str:
    return job_with(place, "pickled-meta", lambda job: write(job / "meta.json", place.bomb))


def job_brings_code(place: Place) -> str:
    return job_with(place, "with-code", lambda job: write(job / "app" / "custom" / "evil.py", code(place)))


def job_names_a_class(place: Place) -> str:
    """Another class than ours; FLARE would make an object of it with any arguments."""

    def change(job: Path) -> None:
        file = job / "app" / "config" / "config_fed_server.json"
        values = json.loads(file.read_text())
        values["components"] = [
            {"id": "evil", "path": "subprocess.Popen", "args": {"args": ["touch", str(place.mark)]}}
        ]
        file.write_text(json.dumps(values))

    return job_with(place, "with-a-class", change)


def job_with_pickled_parts(place: Place) -> str:
    def change(job: Path) -> None:
        write(job / "app" / "config" / "run.json", place.bomb)
        write(job / "app" / "config" / "model.pt", place.bomb)

    return job_with(place, "with-pickles", change)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def code(place: Place) -> bytes:
    return f"import os\nos.system('touch {place.mark}')\n".encode()


def copied(place: Place, name: str, file: str, content: bytes) -> Path:
    """A hospital's kit with another file in it."""
    folder = place.scratch(name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.kits["north"].folder, folder, ignore=shutil.ignore_patterns("state"))
    (folder / "state").mkdir()
    (folder / file).write_bytes(content)
    return folder


def pickled_site(place: Place) -> str:
    return said_by("join", copied(place, "site-pickle", "site.yaml", place.bomb))


def tagged_site(place: Place) -> str:
    return said_by("join", copied(place, "site-tag", "site.yaml", f"data: {place.tag}\n".encode()))


def pickled_kit(place: Place) -> str:
    return said_by("preflight", copied(place, "kit-pickle", "kit.json", place.bomb))


def file_with(place: Place, name: str, content: bytes) -> Path:
    path = place.scratch(name)
    path.write_bytes(content)
    return path


def pickled_project(place: Place) -> str:
    file = file_with(place, "project-pickle.yaml", place.bomb)
    return said_by("provision", file, "-o", place.scratch("kits-of-nobody"))


def tagged_project(place: Place) -> str:
    file = file_with(place, "project-tag.yaml", f"project: {place.tag}\n".encode())
    return said_by("provision", file, "-o", place.scratch("kits-of-nobody"))


def pickled_config(place: Place) -> str:
    file = file_with(place, "config-pickle.yaml", place.bomb)
    return said_by("submit", file, "--kit", place.kits["organiser"].folder)


def tagged_config(place: Place) -> str:
    file = file_with(place, "config-tag.yaml", f"name: {place.tag}\n".encode())
    return said_by("submit", file, "--kit", place.kits["organiser"].folder)


def pickled_tensors(place: Place) -> str:
    """As start weights, as a message and as what a hospital remembers."""
    file = place.scratch("weights.safetensors")
    file.write_bytes(place.bomb)
    config = run_values("weights", output=str(place.scratch("weights-run")))
    config["model"] = {**config["model"], "weights": str(file)}
    yaml_file = place.scratch("weights.yaml")
    yaml_file.write_text(yaml.safe_dump(config))
    first = said_by("train", yaml_file, "--quiet")
    try:
        Message.load(file)
    except Exception as error:
        return f"{first} As a message: {type(error).__name__}: {error}"
    raise NotRefused("a pickle was read as a message")


# One run at the hospitals, three of which refuse something


@dataclass
class Refusals:
    """What live.json showed of a run: when each hospital was asked, and when it had answered."""

    asked: dict[tuple[str, str], float]
    answered: dict[tuple[str, str], float]
    records: dict[str, Any]
    away: dict[str, str]

    def seconds(self, task: str, name: str) -> float:
        return self.answered[task, name] - self.asked[task, name]


def watched_run(place: Place) -> Refusals:
    kit = place.kits["organiser"]
    folder, log = kit.runs / "refusals", place.scratch("submit.txt")
    seen = Refusals({}, {}, {}, {})
    with log.open("wb") as file:
        process = subprocess.Popen(
            command("submit", run_file(place), "--kit", kit.folder), stdout=file, stderr=subprocess.STDOUT
        )
    deadline = time.monotonic() + 180
    while process.poll() is None and time.monotonic() < deadline:
        note(folder / "live.json", seen)
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        raise NotRefused("the run did not end within 180 s")
    if process.returncode:
        raise NotRefused(f"the run failed: {log.read_text(errors='replace')[-500:]}")
    seen.records = json.loads((folder / "records.jsonl").read_text().splitlines()[0])
    seen.away = json.loads((folder / "live.json").read_text())["away"]
    return seen


def note(live: Path, seen: Refusals) -> None:
    if not live.exists():
        return
    facts = json.loads(live.read_text())
    now, task, waiting = time.monotonic(), str(facts.get("task")), facts.get("waiting_for") or []
    for name in waiting:
        seen.asked.setdefault((task, name), now)
    for known, name in seen.asked:
        if known != task or name not in waiting:
            seen.answered.setdefault((known, name), now)


def left(place: Place, name: str, task: str) -> None:
    """The hospital's ledger has the refusal, and no tensor with it."""
    lines = (place.kits[name].state / "egress.jsonl").read_text().splitlines()
    own = [entry for entry in map(json.loads, lines) if entry["task"] == task]
    if not own or any(entry["tensors"] or not entry.get("refused") for entry in own):
        raise NotRefused(f"the ledger of '{name}' says {own}")


def in_a_run(place: Place, report: Report) -> None:
    """Four hospitals: one refuses the method, one the task, one the size, one trains."""
    seen = watched_run(place)
    lost = seen.records["lost"]
    report.add("a message over the cap (east)", seen.seconds("train", "east"), lost.get("train/east", ""),
               "largest_message")  # fmt: skip
    report.add("a disallowed task (south)", seen.seconds("train", "south"), lost.get("train/south", ""),
               "task 'train' is not allowed")  # fmt: skip
    report.add("a disallowed method (west)", seen.seconds("register", "west"), seen.away.get("west", ""),
               "method 'fedavg' is not allowed")  # fmt: skip
    for name, task in (("east", "train"), ("south", "train"), ("west", "register")):
        report.attempt(f"nothing left {name}", partial_left(name, task), "ledger")
    if list(seen.records["loss"]) != ["north"]:
        report.add("the hospital that allows it", 0.0, f"trained: {list(seen.records['loss'])}", "north only")


def partial_left(name: str, task: str) -> Callable[[Place], str]:
    def look(place: Place) -> str:
        left(place, name, task)
        return "the ledger shows the refusal and no tensor"

    return look


# The report


class Report:
    """One line an attack."""

    def __init__(self, place: Place, only: str) -> None:
        self.place = place
        self.only = only
        self.bad = 0

    def attempt(self, name: str, attack: Callable[[Place], str], words: str, within: float = SECONDS) -> None:
        if self.only not in name:
            return
        started = time.monotonic()
        try:
            said = attack(self.place)
        except NotRefused as error:
            said, words = f"NOT REFUSED: {error}", "\0"
        self.add(name, time.monotonic() - started, said, words, within)

    def add(self, name: str, seconds: float, said: str, words: str, within: float = SECONDS) -> None:
        ran = self.place.mark.exists()
        named = re.search(words, said, re.IGNORECASE) is not None
        good = named and seconds <= within and not ran
        self.bad += not good
        why = " A PICKLE RAN" if ran else "" if named else " NOT NAMED" if seconds <= within else " TOO LATE"
        shown = " ".join(said.split())
        print(f"{'ok ' if good else 'BAD'}{why} {seconds:6.2f} s  {name}: {shown[:230]}", flush=True)  # noqa: T201


ATTACKS: list[tuple[str, Callable[[Place], str], str]] = [
    ("wrong authority", wrong_authority, "does not accept"),
    ("expired certificate", expired, "does not accept|expired"),
    ("no certificate", no_certificate, "closed|CERTIFICATE_REQUIRED"),
    ("plain connection", plain, "closed"),
    ("changed on the wire", changed_on_the_wire, "closed|BAD_RECORD_MAC"),
    ("repeated on the wire", repeated_on_the_wire, "closed|BAD_RECORD_MAC"),
    ("tampered reply", tampered_reply, "SHA-256"),
    ("replayed reply", replayed_reply, ", expected '"),
    ("tampered request", tampered_request, "SHA-256"),
    ("replayed request", replayed_request, "replay"),
    ("pickle as array", pickle_as_array, "arrays"),
    ("pickle as header", pickle_as_header, "JSON"),
]
# Commands also take their time to start: that of one which has nothing to do is added to the five seconds.
COMMANDS: list[tuple[str, Callable[[Place], str], str]] = [
    ("expired certificate, preflight", expired_preflight, "expired on"),
    ("expired certificate, join", expired_join, "expired"),
    ("kit of another project, preflight", other_preflight, "another (project|authority)"),
    ("kit of another project, join", other_join, "another (project|authority)"),
    ("kit of another project, submit", other_submit, "another (project|authority)"),
    ("pickle as site.yaml", pickled_site, "site.yaml"),
    ("pickle in a tag of site.yaml", tagged_site, "site.yaml"),
    ("pickle as kit.json", pickled_kit, "kit.json"),
    ("pickle as project.yaml", pickled_project, "project-pickle.yaml"),
    ("pickle in a tag of project.yaml", tagged_project, "project-tag.yaml"),
    ("pickle as configuration", pickled_config, "config-pickle.yaml"),
    ("pickle in a tag of a configuration", tagged_config, "config-tag.yaml"),
    ("pickle as safetensors", pickled_tensors, "not a safetensors file"),
]
SLOW = 60.0  # no refusal that anybody waits for: a job that is taken and fails, many frames in turn
HOSTILE: list[tuple[str, Callable[[Place], str], str]] = [
    ("pickle as job description", job_is_a_pickle, "job|meta"),
    ("code in a job", job_brings_code, "custom|code|BYOC|ended"),
    ("another class in a job", job_names_a_class, "ended|allow"),
    ("pickle among a job's files", job_with_pickled_parts, "ended"),
    ("pickles in frames on the port", pickle_on_the_port, "log"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="a folder for everything, kept for looking at")
    parser.add_argument("--only", default="", help="attacks with this word in their name")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = prepared(folder.absolute())
        report = Report(place, options.only)
        organiser = place.kits["organiser"]
        stack.enter_context(running("server", organiser.folder, log=place.scratch("server.txt")))
        wait_for_port(LOOPBACK, organiser.port, 60)
        if not options.only:
            for name in NAMES:
                log = place.scratch(f"join-{name}.txt")
                stack.enter_context(running("join", place.kits[name].folder, log=log))
            with Session(organiser.folder) as session:
                wait_for_hospitals(session.connected, NAMES, 60)
        request_of(place)  # everything is loaded before the clock starts
        for attack in ATTACKS:
            report.attempt(*attack)
        start_up = seconds_to_start()
        print(f"    {start_up:6.2f} s  a command with nothing to do")  # noqa: T201
        for attack in COMMANDS:
            report.attempt(*attack, SECONDS + start_up)
        for attack in HOSTILE:
            report.attempt(*attack, SLOW)
        if not options.only:
            in_a_run(place, report)  # after all that: server and hospitals still work
        time.sleep(0.5)
        if place.mark.exists():
            report.bad += 1
    print(f"{report.bad} of them bad; no pickle ran" if not place.mark.exists() else "A PICKLE RAN")  # noqa: T201
    return 1 if report.bad else 0


if __name__ == "__main__":
    sys.exit(main())
