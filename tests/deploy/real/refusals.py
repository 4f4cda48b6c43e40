"""What a running server and its hospitals refuse, each within five seconds and by name; no pickle ever runs.

    python tests/deploy/real/refusals.py [--keep] [--only trust,parcels,commands,run]

A server and four hospitals on loopback, each with `wardround server` and `wardround join`, mutual TLS. One
line for each attempt: what was said, and the seconds until it was.

A changed or repeated message is tried twice: on the wire, where TLS finds it, and inside a parcel, where
nothing but the SHA-256 and the number of the request can. For the second the real hospital (`Site`) and the
real organiser (`conduct`) speak over a channel of this process.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import Checks, Deployment, records, settings
from hostile import Caller
from parcels import Bomb

from wardround.config_file import load_config
from wardround.deploy.conducting import conduct
from wardround.deploy.kits.authority import Authority, write_manifest
from wardround.deploy.kits.kit import Kit, make_private, read_kit
from wardround.deploy.kits.project import load_project
from wardround.deploy.kits.provisioning import provision, put_certificate
from wardround.deploy.preflight import CheckFailed, PreflightContext
from wardround.deploy.preflight.connection import check_tls
from wardround.deploy.rpc.service import METHODS
from wardround.deploy.site import Site
from wardround.deploy.site_file import SiteFile
from wardround.deploy.wire import Parcel
from wardround.errors import WardroundError
from wardround.messages import Message

SECONDS = 5.0  # in which a refusal must come
PAUSE = 0.2  # between the end of a handshake and the record that is changed
LOOPBACK = "127.0.0.1"
NAMES = ["east", "north", "south", "west"]
RULES: dict[str, dict[str, Any]] = {
    "east": {"largest_message": "50 kB"},
    "north": {},
    "south": {"tasks": ["evaluate"]},
    "west": {"methods": ["fedprox"]},
}


class NotRefused(Exception):
    """Something went through, or nobody said what was wrong."""


class Place:
    """The deployment, kits of another project on the same port, and the mark of a pickle that ran."""

    def __init__(self, hospitals: Deployment) -> None:
        self.hospitals = hospitals
        self.mark = hospitals.folder / "a-pickle-ran"
        self.bomb = pickle.dumps(Bomb(self.mark))
        self.tag = f'!!python/object/apply:os.system ["touch {self.mark}"]'  # the same in YAML
        self.address = (LOOPBACK, hospitals.port)
        project = load_project(hospitals.folder / "project.yaml")
        self.authority = Authority.open(hospitals.kits / ".authority", project, None)
        named = project.model_copy(update={"project": "another"})
        self.others = {kit.name: kit for kit in provision(named, hospitals.folder / "others")}
        for name, rules in RULES.items():
            text = yaml.safe_dump(
                {"data": "phantom", "device": "cpu", "tasks": ["all"], "min_cases": 0, **rules}
            )
            hospitals.kit(name).site_file.write_text(text)
            self.others[name].site_file.write_text(text)

    def scratch(self, name: str) -> Path:
        path = self.hospitals.folder / "scratch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def copy_kit(self, name: str, kit: Kit | None = None) -> Kit:
        """North's kit, or another, to be changed."""
        source = (kit or self.hospitals.kit("north")).folder
        folder = shutil.copytree(source, self.scratch(name), ignore=shutil.ignore_patterns("state"))
        (Path(folder) / "state").mkdir(mode=0o700)
        return read_kit(Path(folder))

    @cached_property
    def request(self) -> Parcel:
        """A training request of a run that went well, and was answered."""
        folder = self.scratch("asked")
        channel = Channel(folder, lambda reply, last: reply)
        conduct(channel, load_config(run_values("asked", output=str(folder / "run"))), names=NAMES[:2])
        return next(parcel for parcel in channel.requests if parcel.header["task"] == "train")

    @cached_property
    def expired(self) -> Kit:
        """North's kit as it was two days after its certificate ran out."""
        kit = self.copy_kit("expired")
        start = datetime.now(UTC) - timedelta(days=12)
        issued = self.authority.issue(
            "north", "north", role="hospital", valid=timedelta(days=10), start=start
        )
        put_certificate(kit, *issued, self.authority)
        write_manifest(kit, self.authority)
        make_private(kit.folder)
        return kit


def run_values(name: str, **changes: Any) -> dict[str, Any]:
    data = {"phantom": {"hospitals": 4, "size": 16, "cases": 24}}
    model = {"name": "unet2d", "base_filters": 8, "levels": 3}
    return settings(name, rounds=1, min_clients=1, deadline=60.0, data=data, model=model, **changes)


# Connections


def context_of(kit: Kit, certificate: bool = True) -> ssl.SSLContext:
    """What a hospital with this kit connects with; the server's name is believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate:
        context.load_cert_chain(kit.own_certificate, kit.own_key)
    return context


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"wardping"


def speak(address: tuple[str, int], context: ssl.SSLContext) -> tuple[int, str]:
    """How often the server answers a PING, and how it ends the connection; empty where it does not."""
    answers = b""
    try:
        with (
            socket.create_connection(address, timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(PREFACE)
            time.sleep(3 * PAUSE)  # so that what follows is a record of its own
            connection.sendall(PING)
            connection.settimeout(2.0)
            while content := connection.recv(4096):
                answers += content
    except ssl.SSLEOFError:
        end = "closed without a word"
    except ssl.SSLError as error:
        end = str(error.reason or error)
    except TimeoutError:
        end = ""
    except OSError as error:
        end = f"closed: {error.strerror}"
    else:
        end = "closed without a word"
    return answers.count(b"wardping"), end


def refused_connection(address: tuple[str, int], context: ssl.SSLContext) -> str:
    answers, end = speak(address, context)
    if answers or not end:
        raise NotRefused(f"{answers} answers, and the connection {end or 'stays open'}")
    return end


def seen_from(kit: Kit, place: Place) -> str:
    """How the server ends the connection, and how the refused side names it."""
    ended = refused_connection(place.address, context_of(kit))
    try:
        check_tls(PreflightContext(kit, None, datetime.now(UTC), SECONDS))
    except CheckFailed as wrong:
        return f"{ended}; {wrong.found}"
    raise NotRefused(f"{ended}, but preflight finds nothing wrong")


def wrong_authority(place: Place) -> str:
    """A certificate of another project's authority, by somebody who trusts this one's server."""
    kit = place.copy_kit("wrong-authority", place.others["north"])
    shutil.copyfile(place.hospitals.kit("north").authority, kit.authority)
    return seen_from(kit, place)


def no_certificate(place: Place) -> str:
    return refused_connection(place.address, context_of(place.hospitals.kit("north"), certificate=False))


def organisers_certificate(place: Place) -> str:
    """The organiser's own certificate is for a server, and calls nothing."""
    return refused_connection(place.address, context_of(place.hospitals.kit("organiser")))


def plain_connection(place: Place) -> str:
    """Without TLS: the first bytes are answered with the end of the connection, and with nothing else."""
    with socket.create_connection(place.address, timeout=SECONDS) as connection:
        connection.sendall(PREFACE + PING)
        try:
            answer = connection.recv(4096)
        except TimeoutError:
            raise NotRefused("the connection stays open") from None
        except ConnectionError as error:
            return f"closed: {error.strerror}"
    if answer and answer[0] != 21:  # a TLS alert is all it may be
        raise NotRefused(f"the server answered: {answer[:100]!r}")
    return "closed with a TLS alert" if answer else "closed without a byte"


# On the wire: a device between hospital and organiser that changes or repeats an encrypted record


@contextmanager
def device(address: tuple[str, int], spoil: Callable[[bytes], bytes]) -> Iterator[tuple[str, int]]:
    """A port that passes on what comes, but for the first record towards the server after a pause."""
    listening = socket.create_server((LOOPBACK, 0))
    listening.settimeout(SECONDS)

    def work() -> None:
        with listening.accept()[0] as near, socket.create_connection(address) as far:
            back = threading.Thread(target=pass_on, args=(far, near), daemon=True)
            back.start()
            last, is_spoilt = time.monotonic(), False
            for record in records_of(near):
                if time.monotonic() - last > PAUSE and not is_spoilt:
                    record, is_spoilt = spoil(record), True
                last = time.monotonic()
                try:
                    far.sendall(record)
                except OSError:  # the server has gone, which is what we are here for
                    break
            back.join(timeout=SECONDS)

    threading.Thread(target=work, daemon=True).start()
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
        while len(buffer) >= 5 and len(buffer) >= (size := 5 + struct.unpack(">H", buffer[3:5])[0]):
            yield buffer[:size]
            buffer = buffer[size:]
        try:
            data = source.recv(65536)
        except OSError:
            return
        if not data:
            return
        buffer += data


def past_the_device(place: Place, spoil: Callable[[bytes], bytes], most: int) -> str:
    """How the server ends the connection; what passes the device unchanged it must answer."""
    context = context_of(place.hospitals.kit("north"))
    with device(place.address, lambda record: record) as address:
        answers, end = speak(address, context)
    if answers != 1 or end:
        raise NotRefused(f"an honest connection had {answers} answers and was {end}")
    with device(place.address, spoil) as address:
        answers, end = speak(address, context)
    if answers > most or not end:
        raise NotRefused(f"{answers} answers, and the connection {end or 'stays open'}")
    return end


def changed_on_the_wire(place: Place) -> str:
    return past_the_device(place, lambda record: record[:-1] + bytes([record[-1] ^ 1]), 0)


def repeated_on_the_wire(place: Place) -> str:
    return past_the_device(place, lambda record: record + record, 1)


# Inside a parcel: the hospital and the organiser themselves, over a channel of this process


class Channel:
    """Two hospitals; `change` gets each reply to a training request of the first, and the one before it."""

    def __init__(self, folder: Path, change: Callable[[Parcel, Parcel], Parcel]) -> None:
        rules = SiteFile.model_validate({"data": "phantom", "tasks": "all", "min_cases": 0})
        self.sites = {name: Site(name, rules, folder / name) for name in NAMES[:2]}
        self.requests: list[Parcel] = []
        self._change = change
        self._last: dict[str, Parcel] = {}

    def alive(self) -> Mapping[str, float]:
        return dict.fromkeys(self.sites, 0.0)

    def strays(self) -> list[tuple[str, str]]:
        return []

    def exchange(
        self, requests: Mapping[str, Parcel], deadline: float, absent_after: float
    ) -> Iterator[tuple[str, Parcel]]:
        for name, request in requests.items():
            reply = sent = self.sites[name].answer(request)
            if name == "east":
                self.requests.append(request)
                if request.header["task"] == "train":
                    sent = self._change(reply, self._last.get("train", reply))
                    self._last["train"] = reply
            yield name, sent


def refused_reply(place: Place, name: str, change: Callable[[Parcel, Parcel], Parcel]) -> str:
    """What the records of a run of two rounds say of the second one's reply."""
    folder = place.scratch(name)
    values = run_values(name, output=str(folder / "run"))
    conduct(Channel(folder, change), load_config({**values, "rounds": 2}), names=NAMES[:2])
    refused = records(folder / "run")[-1]["refused"]
    if "train/east" not in refused:
        raise NotRefused(f"the records of round 2 say {refused}")
    return str(refused["train/east"])


def with_another_byte(parcel: Parcel) -> Parcel:
    arrays = {key: np.array(array) for key, array in parcel.arrays.items()}
    next(array for array in arrays.values() if array.size).reshape(-1).view(np.uint8)[0] ^= 1
    return replace(parcel, arrays=arrays)


def tampered_reply(place: Place) -> str:
    return refused_reply(place, "tampered", lambda reply, last: with_another_byte(reply))


def replayed_reply(place: Place) -> str:
    return refused_reply(place, "replayed", lambda reply, last: last)


def at_the_hospital(place: Place, change: Callable[[Parcel], Parcel]) -> str:
    """What a hospital answers to a request that was made from one it has seen."""
    rules = SiteFile.model_validate({"data": "phantom", "tasks": "all", "min_cases": 0})
    asked = change(place.request)
    reply = Site("east", rules, place.hospitals.folder / "scratch" / "asked" / "east").answer(asked)
    words = reply.header["more"].get("refused")
    if not words or reply.arrays:
        raise NotRefused(f"the hospital answered {reply.header['more']}, {len(reply.arrays)} arrays")
    return str(words)


def renumbered(parcel: Parcel) -> Parcel:
    return replace(parcel, header={**parcel.header, "request": "f" * 32})


def tampered_request(place: Place) -> str:
    return at_the_hospital(place, lambda request: renumbered(with_another_byte(request)))


def replayed_request(place: Place) -> str:
    return at_the_hospital(place, lambda request: request)


# A pickle, offered as anything


def with_array(parcel: Parcel, array: Any) -> Parcel:
    key = next(iter(parcel.arrays))
    return replace(renumbered(parcel), arrays={**parcel.arrays, key: array})


def pickle_as_array(place: Place) -> str:
    """Objects in an array; a row of bytes that is a pickle."""
    objects = np.array([Bomb(place.mark)], dtype=object)
    first = at_the_hospital(place, lambda request: with_array(request, objects))
    row = np.frombuffer(place.bomb, np.uint8).copy()
    return f"{first}; {at_the_hospital(place, lambda request: with_array(request, row))}"


def pickle_as_header(place: Place) -> str:
    try:
        Parcel.read(place.bomb.decode("latin-1"), {})
    except WardroundError as error:
        first = str(error)
    else:
        raise NotRefused("a pickle was read as a header")
    more = {**place.request.header["more"], "loss": Bomb(place.mark)}
    changed = at_the_hospital(
        place, lambda request: replace(request, header={**renumbered(request).header, "more": more})
    )
    return f"{first} {changed}"


def pickle_as_calls(place: Place) -> str:
    with (
        Caller(place.others["north"]) as stranger,
        Caller(place.hospitals.kit("north"), "preflight") as known,
    ):
        codes = [stranger.call(method, place.bomb).code for method in METHODS]
        said = [known.call(method, place.bomb) for method in METHODS]
    if set(codes) != {"UNAVAILABLE"} or any(one.code == "OK" for one in said):
        raise NotRefused(f"{codes}, {said}")
    return "; ".join(sorted({one.text for one in said}))


def pickled_tensors(place: Place) -> str:
    """As start weights, and as a message."""
    file = place.scratch("weights.safetensors")
    file.write_bytes(place.bomb)
    config = run_values("weights", output=str(place.scratch("weights-run")))
    config["model"] = {**config["model"], "weights": str(file)}
    yaml_file = place.scratch("weights.yaml")
    yaml_file.write_text(yaml.safe_dump(config))
    first = said_by(place, "train", yaml_file, "--quiet")
    try:
        Message.load(file)
    except Exception as error:
        return f"{first} As a message: {type(error).__name__}: {error}"
    raise NotRefused("a pickle was read as a message")


# Commands


def said_by(place: Place, *words: str | Path) -> str:
    """What a command that must fail says."""
    done = place.hospitals.run(*words, seconds=60)
    text = " ".join((done.stderr or done.stdout).split())
    if done.returncode == 0 or "Traceback" in text:
        raise NotRefused(f"`wardround {words[0]}` ended with {done.returncode}: {text[-300:]}")
    return text


def command(*words: str, kit: Callable[[Place], Kit] | None = None) -> Callable[[Place], str]:
    """A command with a kit."""
    return lambda place: said_by(place, *words, *([kit(place).folder] if kit else []))


def other_submit(place: Place) -> str:
    file = place.hospitals.config(run_values("other"))
    return said_by(place, "submit", file, "--kit", place.others["organiser"].folder)


def with_file(role: str, file: str, content: Callable[[Place], bytes]) -> Callable[[Place], str]:
    """A hospital's kit with another file in it."""

    def attempt(place: Place) -> str:
        kit = place.copy_kit(f"{file}-{abs(hash(content))}")
        (kit.folder / file).write_bytes(content(place))
        return said_by(place, role, kit.folder)

    return attempt


def given(role: str, file: str, content: Callable[[Place], bytes]) -> Callable[[Place], str]:
    """A file given to the organiser's command."""

    def attempt(place: Place) -> str:
        path = place.scratch(file)
        path.write_bytes(content(place))
        more = {
            "provision": ["-o", place.scratch("kits-of-nobody")],
            "submit": ["--kit", place.hospitals.organiser],
        }
        return said_by(place, role, path, *more[role])

    return attempt


def as_pickle(place: Place) -> bytes:
    return place.bomb


def as_tag(key: str) -> Callable[[Place], bytes]:
    return lambda place: f"{key}: {place.tag}\n".encode()


# One run at the hospitals, three of which refuse something


@dataclass
class Refusals:
    """What live.json showed of a run: when each hospital was asked, and when it had answered."""

    asked: dict[tuple[str, str], float]
    answered: dict[tuple[str, str], float]

    def look(self, facts: dict[str, Any]) -> None:
        now, task, waiting = time.monotonic(), str(facts.get("task")), facts.get("waiting_for") or []
        for name in waiting:
            self.asked.setdefault((task, name), now)
        for known, name in self.asked:
            if known != task or name not in waiting:
                self.answered.setdefault((known, name), now)

    def seconds(self, task: str, name: str) -> float:
        """0 where it answered between two looks."""
        asked = self.asked.get((task, name))
        return 0.0 if asked is None else self.answered.get((task, name), time.monotonic()) - asked


def refuse_in_a_run(place: Place, report: Report) -> None:
    """Four hospitals: one refuses the method, one the task, one the size, one trains."""
    hospitals, seen = place.hospitals, Refusals({}, {})
    submitted = hospitals.submit(run_values("refusals"))
    deadline = time.monotonic() + 180
    while submitted.is_running and time.monotonic() < deadline:
        seen.look(hospitals.live("refusals"))
        time.sleep(0.02)
    live = hospitals.wait_done(submitted, "refusals", 5)
    record = records(hospitals.run_folder("refusals"))[0]
    told = {**record["lost"], **{f"register/{name}": why for name, why in live["away"].items()}}
    told["train/east"] += " ".join(text for text in record.get("stray", []) if text.startswith("east"))
    expected = {
        ("east", "train"): "largest_message",
        ("south", "train"): "task 'train' is not allowed",
        ("west", "register"): "method 'fedavg' is not allowed",
    }
    for (name, task), words in expected.items():
        report.add(f"{name}, {task}", seen.seconds(task, name), told.get(f"{task}/{name}", ""), words)
        lines = (hospitals.kit(name).state / "egress.jsonl").read_text().splitlines()
        own = [entry for entry in map(json.loads, lines) if entry["task"] == task]
        silent = all(entry.get("refused") and not entry["tensors"] for entry in own)
        is_listed = bool(own) or name == "east"  # which did not even receive the request
        report.checks.check(silent and is_listed, f"{name}: its ledger shows no tensor", refusals=len(own))
    report.checks.check(list(record["loss"]) == ["north"], "the hospital that allows it trained")


# The report


class Report:
    """One line an attempt; start_up: seconds that a command with nothing to do takes."""

    def __init__(self, place: Place, checks: Checks) -> None:
        self.place, self.checks = place, checks

    def attempt(
        self, name: str, attempt: Callable[[Place], str], words: str, within: float = SECONDS
    ) -> None:
        began = time.monotonic()
        try:
            said = attempt(self.place)
        except NotRefused as error:
            said, words = f"NOT REFUSED: {error}", "\0"
        self.add(name, time.monotonic() - began, said, words, within)

    def add(self, name: str, seconds: float, said: str, words: str, within: float = SECONDS) -> None:
        ran = self.place.mark.exists()
        is_named = re.search(words, said, re.IGNORECASE) is not None
        shown = " ".join(said.split())[:230]
        self.checks.check(
            is_named and seconds <= within and not ran,
            f"{'A PICKLE RAN ' if ran else ''}{name}",
            seconds=round(seconds, 2),
            said=shown,
        )


Attempts = list[tuple[str, Callable[[Place], str], str]]
TRUST: Attempts = [
    ("wrong authority", wrong_authority, "does not accept"),
    ("expired certificate", lambda place: seen_from(place.expired, place), "does not accept|expired"),
    ("no certificate", no_certificate, "closed|CERTIFICATE_REQUIRED"),
    ("the organiser's certificate", organisers_certificate, "closed|CERTIFICATE"),
    ("plain connection", plain_connection, "closed"),
    ("changed on the wire", changed_on_the_wire, "closed|BAD_RECORD_MAC"),
    ("repeated on the wire", repeated_on_the_wire, "closed|BAD_RECORD_MAC"),
]
PARCELS: Attempts = [
    ("tampered reply", tampered_reply, "SHA-256"),
    ("replayed reply", replayed_reply, ", expected '"),
    ("tampered request", tampered_request, "SHA-256"),
    ("replayed request", replayed_request, "replay"),
    ("pickle as array", pickle_as_array, "type object.*declared as"),
    ("pickle as header", pickle_as_header, "JSON"),
    ("pickle as every call", pickle_as_calls, "not JSON"),
]
# Commands also take their time to start: that of one which has nothing to do is added to the five seconds.
COMMANDS: Attempts = [
    ("expired certificate, preflight", command("preflight", kit=lambda place: place.expired), "expired on"),
    ("expired certificate, join", command("join", kit=lambda place: place.expired), "expired"),
    ("kit of another project, preflight", command("preflight", kit=lambda place: place.others["north"]),
     "another (project|authority)"),
    ("kit of another project, join", command("join", kit=lambda place: place.others["north"]),
     "another (project|authority)"),
    ("kit of another project, submit", other_submit, "no server of this kit"),
    ("pickle as site.yaml", with_file("join", "site.yaml", as_pickle), "site.yaml"),
    ("pickle in a tag of site.yaml", with_file("join", "site.yaml", as_tag("data")), "site.yaml"),
    ("pickle as kit.json", with_file("preflight", "kit.json", as_pickle), "kit.json"),
    ("pickle as a certificate", with_file("join", "keys/own.crt", as_pickle), "own.crt"),
    ("pickle as manifest.json", with_file("join", "manifest.json", as_pickle), "manifest.json"),
    ("pickle as project.yaml", given("provision", "project-pickle.yaml", as_pickle), "project-pickle.yaml"),
    ("pickle in a tag of project.yaml", given("provision", "project-tag.yaml", as_tag("project")),
     "project-tag.yaml"),
    ("pickle as configuration", given("submit", "config-pickle.yaml", as_pickle), "config-pickle.yaml"),
    ("pickle in a tag of a configuration", given("submit", "config-tag.yaml", as_tag("name")),
     "config-tag.yaml"),
    ("pickle as safetensors", pickled_tensors, "not a safetensors file"),
]  # fmt: skip


def main() -> None:
    logging.getLogger("wardround").setLevel(logging.ERROR)
    with Checks(__doc__) as checks, Deployment(NAMES, checks.options.keep) as hospitals:
        place = Place(hospitals)
        report = Report(place, checks)
        hospitals.serve()
        hospitals.join_all()
        place.request  # noqa: B018  # everything is loaded before the clock starts
        for part, attempts in {"trust": TRUST, "parcels": PARCELS}.items():
            for attempt in attempts if checks.wants(part) else ():
                report.attempt(*attempt)
        if checks.wants("commands"):
            began = time.monotonic()
            said_by(place, "preflight", "no-such-folder")
            start_up = time.monotonic() - began
            checks.note(f"a command with nothing to do takes {start_up:.1f} s")
            for attempt in COMMANDS:
                report.attempt(*attempt, SECONDS + start_up)
        if checks.wants("run"):
            with checks.part("a run that three of four refuse"):
                refuse_in_a_run(place, report)  # after all that: server and hospitals still work
        checks.check(not place.mark.exists(), "no pickle ran")


if __name__ == "__main__":
    main()
