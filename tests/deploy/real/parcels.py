"""Requests and replies that are attacks, as the bytes of files, for attacks.py and fuzz.py."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from common import settings
from hostile import Caller, Said

from wardround.config_file import load_config
from wardround.deploy.agreement import make_hospital_config
from wardround.deploy.parcel_file import read_parcel, write_parcel
from wardround.deploy.rpc.service import encode
from wardround.deploy.wire import Parcel, compute_sha256, pack
from wardround.messages import Message

LARGEST = 10**9


class Bomb:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def as_file(parcel: Parcel, folder: Path) -> bytes:
    """A parcel's file."""
    path = folder / f"{secrets.token_hex(8)}.parcel"
    write_parcel(path, parcel)
    content = path.read_bytes()
    path.unlink()
    return content


def find_request(content: bytes, folder: Path) -> Parcel:
    """The parcel in a file's bytes."""
    path = folder / f"{secrets.token_hex(8)}.parcel"
    path.write_bytes(content)
    try:
        return read_parcel(path, LARGEST)
    finally:
        path.unlink()


def read_reply(content: bytes, folder: Path) -> str:
    """What a hospital's reply says of itself; `arrays` if it holds any."""
    parcel = find_request(content, folder)
    more = parcel.header["more"]
    words = more.get("refused") or more.get("failure") or f"answered: {sorted(more)}"
    return f"{words}{f' WITH {len(parcel.arrays)} ARRAYS' if parcel.arrays else ''}"


def sealed(parcel: Parcel, arrays: dict[str, Any] | None = None, **content: Any) -> Parcel:
    """The parcel with other content and a SHA-256 that fits."""
    header, found = {**parcel.header, **content}, parcel.arrays if arrays is None else arrays
    return Parcel(header | {"sha256": compute_sha256(header, found)}, found)


def raw_file(header: dict[str, Any] | bytes, numbers: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + numbers


@cache
def compress_zeros() -> bytes:
    return zlib.compress(bytes(2**30))


def zlib_bomb(parcel: Parcel) -> Parcel:
    """1 MB that becomes 1 GB."""
    key = next(iter(parcel.header["tensors"]), "params/a")
    packed = np.frombuffer(compress_zeros(), np.uint8)
    declared = {"dtype": "float32", "shape": [2**28], "compress": "zlib"}
    name = key.partition("/")[2]
    return sealed(parcel, {key: packed}, tensors={key: declared}, layout=[[key.partition("/")[0], [name]]])


# Replies of a hospital. Each: (caller, what the request said, an honest reply, a folder, the mark)

Attack = Callable[[Caller, dict[str, Any], Parcel, Path, Path], Said]


def plainly(make: Callable[[Parcel, Path, Path], bytes]) -> Attack:
    """Send these bytes in the usual way."""

    def attack(rogue: Caller, info: dict[str, Any], reply: Parcel, folder: Path, mark: Path) -> Said:
        content = make(reply, folder, mark)
        chunks = [content[start : start + 2**20] for start in range(0, len(content), 2**20)]
        return rogue.answer(info, *chunks)

    return attack


def changed(**content: Any) -> Attack:
    return plainly(lambda reply, folder, mark: as_file(sealed(reply, **content), folder))


def with_metadata(reply: Parcel, arrays: dict[str, Any]) -> bytes:
    return raw_file({"__metadata__": {"parcel": reply.text}, **arrays})


def nan(reply: Parcel, folder: Path, mark: Path) -> bytes:
    arrays = {key: np.array(array) for key, array in reply.arrays.items()}
    next(array for array in arrays.values() if array.dtype == np.float32).reshape(-1)[0] = np.nan
    return as_file(sealed(reply, arrays), folder)


def tampered(reply: Parcel, folder: Path, mark: Path) -> bytes:
    return as_file(reply, folder)[:-1] + b"\x7f"


def renamed(reply: Parcel, folder: Path, mark: Path) -> bytes:
    """Arrays whose names are paths."""
    bad = {f"params/../../{number}": array for number, array in enumerate(reply.arrays.values())}
    facts = dict(zip(bad, reply.header["tensors"].values(), strict=True))
    layout = [["params", [key.removeprefix("params/") for key in bad]]]
    return as_file(sealed(reply, bad, tensors=facts, layout=layout), folder)


def lie(num_bytes: int, sent: int) -> Attack:
    def attack(rogue: Caller, info: dict[str, Any], reply: Parcel, folder: Path, mark: Path) -> Said:
        return rogue.answer(info, b"x" * sent, num_bytes=num_bytes)

    return attack


def stall(rogue: Caller, info: dict[str, Any], reply: Parcel, folder: Path, mark: Path) -> Said:
    """A byte at a time until the organiser has enough."""

    def parts() -> Iterator[bytes]:
        yield encode({"job": info["job"], "letter": info["letter"], "bytes": 10**6})
        while True:
            yield b"x"
            time.sleep(0.2)

    return rogue.stream("Answer", parts(), 60)[0]


def announce(number: Any) -> Attack:
    def attack(rogue: Caller, info: dict[str, Any], reply: Parcel, folder: Path, mark: Path) -> Said:
        first = encode({"job": info["job"], "letter": info["letter"], "bytes": number})
        return rogue.call("Answer", first)

    return attack


SIDES = [2**31 - 1] * 4000
HOSTILE_REPLIES: list[tuple[str, Attack]] = [
    ("garbage", plainly(lambda reply, folder, mark: secrets.token_bytes(10**5))),
    ("a pickle", plainly(lambda reply, folder, mark: pickle.dumps(Bomb(mark)))),
    ("announced with 4 GB and a byte", announce(4 * 2**30 + 1)),
    ("announced with less than it is", lie(100, 10**5)),
    ("announced with more than it is", lie(10**6, 10)),
    ("4,000 sides of 2^31 in its file", plainly(lambda reply, folder, mark: with_metadata(reply, {"params/a": {"dtype": "F32", "shape": SIDES, "data_offsets": [0, 4]}}))),
    ("4,000 sides of 2^31 in its header", changed(tensors={"params/a": {"dtype": "float32", "shape": SIDES}})),
    ("1 MB that zlib makes 1 GB", plainly(lambda reply, folder, mark: as_file(zlib_bomb(reply), folder))),
    ("a header nested 100,000 deep", plainly(lambda reply, folder, mark: raw_file(b"[" * 100_000))),
    ("a whole number of 1 MB", plainly(lambda reply, folder, mark: raw_file(b'{"__metadata__": ' + b"9" * 10**6 + b"}"))),
    ("under another hospital's name", changed(client="west")),
    ("to another request", changed(request="f" * 32)),
    ("tensors named as paths", plainly(renamed)),
    ("a changed byte", plainly(tampered)),
    ("NaN in a tensor", plainly(nan)),
    ("an unknown field with code", changed(decomposer="os.system")),
    ("a trickle of single bytes", stall),  # until the deadline, so the last
]  # fmt: skip


# Requests of an organiser. Each: (a folder, the mark) -> the bytes of a file

Make = Callable[[Path, Path], bytes]


def request(task: str = "register", changes: dict[str, Any] | None = None, **more: Any) -> Parcel:
    """A request to `north` in proper form; changes: to the run's configuration, by section."""
    config = settings("asked", data={"phantom": {"hospitals": 4, "size": 16, "cases": 24}})
    plain = make_hospital_config(load_config(config))
    for section, value in (changes or {}).items():
        plain[section] = {**plain[section], **value} if isinstance(value, dict) else value
    facts = {"config": plain, "sync_state": {"rewinds": [], "best": None}}
    about: dict[str, Any] = {"run": secrets.token_hex(8), "request": secrets.token_hex(16), "client": "north"}
    about |= {"task": task, "round": 0, **more}
    return pack(Message(), kind="request", more=facts, **about)


def asking(task: str = "register", changes: dict[str, Any] | None = None, **more: Any) -> Make:
    return lambda folder, mark: as_file(request(task, changes, **more), folder)


def resealed(**content: Any) -> Make:
    return lambda folder, mark: as_file(sealed(request("train"), **content), folder)


CODE = "os:system"
HOSTILE_REQUESTS: list[tuple[str, Make, str]] = [
    ("for another hospital", asking(client="south"), "expected 'north'"),
    ("garbage", lambda folder, mark: secrets.token_bytes(10**5), "could not be read"),
    ("a pickle", lambda folder, mark: pickle.dumps(Bomb(mark)), "could not be read"),
    ("4,000 sides of 2^31 in its file", lambda folder, mark: with_metadata(request(), {"params/a": {"dtype": "F32", "shape": SIDES, "data_offsets": [0, 4]}}), "invalid shape"),
    ("4,000 sides of 2^31 in its header", lambda folder, mark: as_file(sealed(request("train"), {"params/a": np.zeros(1, np.float32)}, layout=[["params", ["a"]]], tensors={"params/a": {"dtype": "float32", "shape": SIDES}}), folder), "invalid shape"),
    ("1 MB that zlib makes 1 GB", lambda folder, mark: as_file(zlib_bomb(request("train")), folder), "compressed or recoded"),
    ("tensors named as paths", lambda folder, mark: as_file(sealed(request("train"), {"../../../x": np.zeros(1, np.float32)}), folder), "not in the header's layout"),
    ("a task outside site.yaml", asking("pictures"), "task 'pictures' is not allowed"),
    ("a task that does not exist", asking("sys.shell"), "task 'sys.shell' is not allowed"),
    ("a path as task", asking("../../train"), "is not allowed"),
    ("a network by import path", asking(changes={"model": {"name": CODE}}), "network 'os:system' is not allowed"),
    ("a method by import path", asking(changes={"method": {"name": CODE}}), "method 'os:system' is not allowed"),
    ("an objective by import path", asking(changes={"objective": {"name": CODE}}), "objective 'os:system' is not allowed"),
    ("a metric by import path", asking(changes={"evaluate": {"metrics": [CODE]}}), "metric 'os:system' is not allowed"),
    ("a file as weights", asking(changes={"model": {"weights": "/etc/passwd"}}), "model.weights"),
    ("a file as federation", asking(changes={"data": {"federation": "/etc/passwd"}}), "data.federation"),
    ("a file of splits", asking(changes={"data": {"splits": "/etc/passwd"}}), "the run sets data.splits"),
    ("one training case", asking(changes={"data": {"phantom": {"hospitals": 4, "size": 16, "cases": 4}}}), "at least"),
    ("an unknown setting with code", asking(changes={"custom": "import os"}), "custom"),
    ("without a configuration", resealed(more={}), "no configuration"),
    ("an id that is a path", asking(request="../../../x"), "no valid id"),
    ("a run named as the ledger", asking(run="egress.jsonl"), "could not answer"),
    ("a run named as the lock", asking(run="process.lock"), "could not answer"),
    ("a run that is a path", asking(run="../../../x", client="south"), "expected 'north'"),
    ("an unknown schema", resealed(schema="x"), "schema"),
    ("a decomposer", resealed(decomposer="os.system"), "unknown field"),
    ("another hash", lambda folder, mark: as_file(replace(request("train"), header={**request("train").header, "sha256": "0" * 64}), folder), "SHA-256"),
]  # fmt: skip
