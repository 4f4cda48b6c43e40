"""Hospitals in this process, behind a channel that can lose, delay, repeat and spoil what it carries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers import settings

from wardround.config import Config
from wardround.config_file import load_config
from wardround.deploy.conducting import conduct
from wardround.deploy.resources import Resources
from wardround.deploy.site import Site
from wardround.deploy.site_file import SiteFile
from wardround.deploy.wire import Parcel, compute_sha256
from wardround.engine.memory_store import MemoryStore
from wardround.engine.outcome import Outcome
from wardround.privacy.secure_sum import LocalIdentity

# of a reply, for tests of parcels
ADDRESS: dict[str, Any] = {
    "kind": "reply",
    "run": "ab12",
    "request": "f00d",
    "client": "north",
    "task": "train",
    "round": 3,
}
NAMES = ("east", "north", "south")
# Everything allowed, as in a rehearsal: the hospitals of tests have fewer cases than real ones may.
RULES = SiteFile(
    data="phantom",
    case_names="keep",
    tasks=("all",),
    networks=("all",),
    min_cases=0,
    min_batch=1,
    resources=Resources.unlimited(),
)


class Killed(BaseException):
    """The organiser's process dies here."""


class Loopback:
    """A channel to sites of this process.

    faults: what happens to a request, by hospital, task and round from 1 (0: before the first), each once;
    away: hospitals that are not heard of; on_exchange: called with task and round before requests go out;
    asked: (hospital, task, round) of every request; bytes_up: of every reply, in the same way.
    """

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES, **rules: Any) -> None:
        self.folder = folder
        self.rules = {name: rules.get(name, RULES) for name in names}
        self.sites = {name: self.opened(name) for name in names}
        self.faults: dict[tuple[str, str, int], Fault] = {}
        self.away: set[str] = set()
        self.on_exchange: Callable[[str, int], None] = lambda task, round: None
        self.asked: list[tuple[str, str, int]] = []
        self.bytes_up: dict[tuple[str, str, int], int] = {}
        self.requests: dict[str, Parcel] = {}  # the last one to each
        self.replies: dict[str, Parcel] = {}  # the last one of each
        self._strays: list[tuple[str, str]] = []

    def opened(self, name: str) -> Site:
        return Site(name, self.rules[name], self.folder / name, LocalIdentity())

    def memory(self, name: str) -> MemoryStore:
        """What a hospital keeps of the only run there was."""
        (run,) = [path for path in (self.folder / name).iterdir() if path.is_dir()]
        return MemoryStore(run / name)

    # What a run calls

    def alive(self) -> Mapping[str, float]:
        heard = {name: 1000.0 if name in self.away else 0.0 for name in self.sites}
        return {**heard, "stranger": 0.0}

    def exchange(
        self, requests: Mapping[str, Parcel], deadline: float, absent_after: float
    ) -> Iterator[tuple[str, Parcel]]:
        for name, parcel in requests.items():
            place = (name, parcel.header["task"], parcel.header["round"] + 1)
            self.on_exchange(*place[1:])
            self.asked.append(place)
            self.deadline = deadline
            yield from self.faults.pop(place, honest)(self, name, parcel)
            self.requests[name] = parcel

    def strays(self) -> list[tuple[str, str]]:
        told, self._strays = self._strays, []
        return told

    def answer(self, name: str, parcel: Parcel) -> Parcel:
        reply = self.sites[name].answer(parcel)
        self.replies[name] = reply
        self.bytes_up[(name, parcel.header["task"], parcel.header["round"] + 1)] = reply.num_bytes
        return reply


Fault = Callable[[Loopback, str, Parcel], Iterator[tuple[str, Parcel]]]


def honest(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    yield name, loop.answer(name, parcel)


def unheard(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """The request never arrives."""
    yield from ()


def unsent(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """The hospital does its work and dies before its reply is on its way."""
    loop.answer(name, parcel)
    yield from ()


def delayed(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """The reply is there after the deadline."""
    loop.answer(name, parcel)
    time.sleep(max(0.0, loop.deadline - time.monotonic()))
    loop._strays.append((name, "late: its reply came after the deadline"))
    yield from ()


def duplicated(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    reply = loop.answer(name, parcel)
    yield name, reply
    yield name, reply


def replayed(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """An old reply instead of the new one."""
    yield name, loop.replies[name]


def replayed_first(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """An old reply comes before the new one."""
    yield name, loop.replies[name]
    yield name, loop.answer(name, parcel)


def foreign(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """Another hospital's reply under this one's name."""
    other = next(reply for client, reply in loop.replies.items() if client != name)
    yield name, other


def uninvited(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """The right reply, and one of somebody who was never asked."""
    reply = loop.answer(name, parcel)
    yield "stranger", reply
    yield name, reply


def tampered(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """One byte is another on arrival."""
    reply = loop.answer(name, parcel)
    arrays = {key: np.array(array) for key, array in reply.arrays.items()}
    next(array for array in arrays.values() if array.size).reshape(-1).view(np.uint8)[0] ^= 1
    yield name, replace(reply, arrays=arrays)


def tampered_header(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """A word of the header is another on arrival."""
    reply = loop.answer(name, parcel)
    yield name, replace(reply, header={**reply.header, "more": {**reply.header["more"], "num_steps": 7}})


def restarted(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """The hospital's process is a new one, over the same disk."""
    loop.sites[name] = loop.opened(name)
    yield name, loop.answer(name, parcel)


def killed(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
    """The organiser dies while this hospital works."""
    loop.answer(name, parcel)
    raise Killed


def changed(**content: Any) -> Fault:
    """A reply whose header says something else, with a SHA-256 that fits: a dishonest hospital."""

    def fault(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        reply = loop.answer(name, parcel)
        yield name, sealed(reply, **content)

    return fault


def spoilt(value: float) -> Fault:
    """A reply with this number in its first tensor."""

    def fault(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        reply = loop.answer(name, parcel)
        arrays = {key: np.array(array) for key, array in reply.arrays.items()}
        next(array for array in arrays.values() if array.dtype == np.float32).reshape(-1)[0] = value
        yield name, sealed(replace(reply, arrays=arrays))

    return fault


def sealed(parcel: Parcel, **content: Any) -> Parcel:
    """The parcel with other content in its header and a new SHA-256; dictionaries are laid over."""
    header = dict(parcel.header)
    for key, value in content.items():
        header[key] = {**header[key], **value} if isinstance(value, dict) else value
    return Parcel(header | {"sha256": compute_sha256(header, parcel.arrays)}, parcel.arrays)


def remote_config(folder: Path, **changes: Any) -> Config:
    return load_config(settings(folder, **{"deadline": 20.0, **changes}))


def conducted(
    channel: Loopback, folder: Path, *, resume: bool = False, from_round: int | None = None, **changes: Any
) -> Outcome:
    """A whole run over the channel."""
    config, names = remote_config(folder, **changes), sorted(channel.sites)
    return conduct(channel, config, names=names, resume=resume, from_round=from_round)
