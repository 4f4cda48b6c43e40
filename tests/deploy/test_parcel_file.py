"""Parcels as files: every byte comes back, and a file that is not a whole parcel is refused in a sentence."""

import json
import math
import os
import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytest import fixture, mark, raises

from deploy.loopback import ADDRESS
from wardround.config import TrafficSettings
from wardround.deploy import limits
from wardround.deploy.parcel_file import read_parcel, write_parcel
from wardround.deploy.wire import TYPES, Parcel, ParcelError, compute_sha256, pack, unpack
from wardround.messages import Message
from wardround.params import Params
from wardround.storage import StoredTensors

ROOM = {"largest": 10**8, "unpacked": 10**8}


def message() -> Message:
    """Every type that can travel, with no, one and several axes, and without a number."""
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randint(0, 2, (3, 5), generator=draw).to(dtype) for name, dtype in TYPES.items()}
    odd = torch.tensor([math.nan, -0.0, math.inf, 1e-45])
    shapes = {"scalar": torch.tensor(4), "none": torch.empty(0, 5), "odd": odd, "half": odd.bfloat16()}
    return Message(Params({**params, **shapes}), {"a/b": Params({"é": torch.ones(1)})}, {"a": [0.1, None]})


@fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reply"


@mark.parametrize("traffic", [None, TrafficSettings(upload="delta", compress="zlib")])
def test_a_parcel_comes_back_from_its_file_to_the_bit(path: Path, traffic: TrafficSettings | None) -> None:
    base = message().params.map(torch.clone)
    parcel = pack(message(), **ADDRESS, traffic=traffic, base=base)
    assert write_parcel(path, parcel) == path.stat().st_size

    found = read_parcel(path, sum(array.nbytes for array in parcel.arrays.values()))

    assert found.header == parcel.header and found.num_bytes == parcel.num_bytes
    for name, array in parcel.arrays.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
        assert found.arrays[name].tobytes() == array.tobytes()
    assert unpack(found, **ADDRESS, **ROOM, base=base)[0].sha256() == message().sha256()
    assert json.loads(StoredTensors(path).metadata["parcel"]) == parcel.header


def test_tensors_are_the_file_s_own_pages_and_writing_to_them_changes_no_file(path: Path) -> None:
    write_parcel(path, pack(Message(Params({"w": torch.ones(5000)})), **ADDRESS))
    before = path.read_bytes()
    parcel = read_parcel(path, 10**6)
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen, _ = unpack(parcel, **ADDRESS, **ROOM)
    assert seen.params["w"].data_ptr() == parcel.arrays["params/w"].ctypes.data
    path.write_bytes(before)
    again = read_parcel(path, 10**6)
    seen.params["w"].zero_()
    unpack(again, **ADDRESS, **ROOM)[0].params["w"].add_(1)
    assert path.read_bytes() == before


def test_what_would_not_be_read_is_not_written(path: Path) -> None:
    with raises(ParcelError, match="array 'x' has type complex64"):
        write_parcel(path, Parcel({}, {"x": np.ones(1, np.complex64)}))
    with raises(ParcelError, match=r"more than 2,000,000 items"):
        write_parcel(path, Parcel({"x": [0] * (limits.ITEMS + 1)}, {}))
    assert not path.exists()


# What is refused


def build(header: Any, numbers: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if length is None else length) + text + numbers


def declare(shape: Any = (2,), start: int = 0, end: int = 8, dtype: Any = "F32", **more: Any) -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end], **more}


def hold(*entries: Any, numbers: int = 8) -> bytes:
    named = {f"params/{number}": entry for number, entry in enumerate(entries)}
    return build({"__metadata__": {"parcel": "{}"}, **named}, bytes(numbers))


TENSOR = b',"":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
DIGITS = b'{"__metadata__": {"parcel": "{}"}, "w": {"dtype": "F32", "data_offsets": [0, 8], "shape": [1%s]}}'
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "header does not have the length it declares"),
    "seven bytes": (lambda: b"1234567", "header does not have the length it declares"),
    "a header longer than the file": (lambda: build({}, length=1000), "length it declares"),
    "a header of 2**63 bytes": (lambda: build({}, length=2**63), "length it declares"),
    "a header that is not aligned": (lambda: build(b" " * 16, length=9), "length it declares"),
    "not text": (lambda: build(b"\xff\xfe"), "a header that is not text"),
    "a pickle": (lambda: build(b"\x80\x04\x95"), "a header that is not text"),
    "not JSON": (lambda: build(b"{"), "is not readable JSON"),
    "a list": (lambda: build([]), "not a JSON object"),
    "nested 100,000 deep": (lambda: build(b"[" * 100_000), "nested more than 50 levels deep"),
    "a key twice": (lambda: build(b'{"a": 1, "a": 2}'), "names a key twice"),
    "10**6 tensors": (lambda: build(b'{"":0' + TENSOR * 10**6 + b"}"), "more than 2,000,000 items"),
    "150,000 tensors": (lambda: build({str(n): 0 for n in range(150_000)}), "at most 100,000 tensors"),
    "no metadata": (lambda: build({"w": declare()}, bytes(8)), "metadata hold no header"),
    "more metadata": (lambda: build({"__metadata__": {"parcel": "{}", "b": ""}}), "metadata hold no header"),
    "a header of another type": (lambda: build({"__metadata__": {"parcel": {}}}), "header is not text"),
    "a damaged header": (lambda: build({"__metadata__": {"parcel": "{"}}), "header is not readable JSON"),
    "5,000 axes": (lambda: hold(declare([2**62] * 5000)), "the invalid shape"),
    "5,000 axes of one": (lambda: hold(declare([1] * 5000, 0, 4), numbers=4), "the invalid shape"),
    "sides of 10**400": (lambda: hold(declare([10**400])), "an integer of more than 64 bits"),
    "sides of 10**5000": (lambda: build(DIGITS % (b"0" * 5000), bytes(8)), "more than 64 bits"),
    "many long sides": (lambda: hold(declare([2**31] * 8)), "the invalid shape"),
    "a negative side": (lambda: hold(declare([-2])), "the invalid shape"),
    "an unknown type": (lambda: hold(declare(dtype="O")), "the unknown type O"),
    "a type of another kind": (lambda: hold(declare(dtype=["F32"])), "the unknown type"),
    "more facts": (lambda: hold(declare(loader="pickle")), "by its type, shape and place"),
    "no facts": (lambda: hold(7), "by its type, shape and place"),
    "beyond the file": (lambda: hold(declare([2**30], 0, 2**32)), "8 bytes of numbers, but declares 4,294,967,296"),
    "overlapping": (lambda: hold(declare(), declare(), numbers=16), "place for array 'params/1'"),
    "a gap": (lambda: hold(declare(), declare((2,), 12, 20), numbers=20), "place for array 'params/1'"),
    "a negative place": (lambda: hold(declare((2,), -8, 0)), "place for array 'params/0'"),
    "another size": (lambda: hold(declare((2,), 0, 7)), "place for array 'params/0'"),
    "not aligned": (lambda: hold(declare((1,), 0, 1, "U8"), declare((1,), 1, 5), numbers=5), "place for array 'params/1'"),
    "numbers left over": (lambda: hold(declare(), numbers=9), "9 bytes of numbers, but declares 8"),
}  # fmt: skip


@mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_parcel_is_refused_by_name(path: Path, name: str) -> None:
    make, sentence = HOSTILE[name]
    path.write_bytes(make())
    with raises(ParcelError, match=sentence) as caught:
        read_parcel(path, 10**8)
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


def test_no_part_of_a_file_is_read_as_a_whole_one(path: Path) -> None:
    write_parcel(path, pack(message(), **ADDRESS))
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with raises(ParcelError):
            read_parcel(path, 10**6)


def test_a_large_file_is_refused_before_it_is_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(limits.HEADER_CHARACTERS + 1001)
    with raises(ParcelError, match="has 67,109,865 bytes, at most 1,000 are allowed beside its header"):
        read_parcel(path, 1000)


def test_only_a_plain_file_is_read(path: Path, tmp_path: Path) -> None:
    with raises(ParcelError, match="cannot be read: No such file"):
        read_parcel(path, 1000)
    write_parcel(tmp_path / "other", pack(message(), **ADDRESS))
    path.symlink_to(tmp_path / "other")
    with raises(ParcelError, match="cannot be read"):
        read_parcel(path, 10**6)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with raises(ParcelError, match="is not a file|Is a directory"):
            read_parcel(place, 1000)


def test_2000_mutations_are_refused_in_a_sentence(path: Path) -> None:
    traffic = TrafficSettings(upload="delta", compress="zlib")
    base = message().params.map(torch.clone)
    write_parcel(path, pack(message(), **ADDRESS, traffic=traffic, base=base))
    whole, draw, read = path.read_bytes(), random.Random(0), 0
    for _ in range(2000):
        path.write_bytes(mutate(bytearray(whole), draw))
        try:
            parcel = read_parcel(path, 10**6)
            read += 1
            unpack(parcel, **ADDRESS, **ROOM, base=base)
        except ParcelError:
            continue
        assert path.read_bytes().replace(b" ", b"") == whole.replace(b" ", b"")
    assert 100 < read < 1900  # both readers were tried


def test_mutations_by_someone_who_mends_the_sha256_end_in_a_message_or_a_sentence(path: Path) -> None:
    traffic = TrafficSettings(upload="delta_float16", compress="zlib")
    base = message().params.map(torch.clone)
    honest, draw, ended = pack(message(), **ADDRESS, traffic=traffic, base=base), random.Random(0), Counter()
    for _ in range(500):
        arrays = {name: mutate_array(array, draw) for name, array in honest.arrays.items()}
        try:
            text = mutate(bytearray(honest.text, "ascii"), draw).decode(errors="replace")
            header = Parcel.read(text, {}).header if draw.random() < 0.7 else honest.header
            sealed = Parcel({**header, "sha256": compute_sha256(header, arrays)}, arrays)
            write_parcel(path, sealed)
            unpack(read_parcel(path, 10**6), **ADDRESS, **ROOM, base=base)
            ended["a message"] += 1
        except ParcelError as error:
            assert "SHA-256" not in str(error)
            ended["a sentence"] += 1
    assert min(ended["a message"], ended["a sentence"]) > 20


def mutate_array(array: Any, draw: random.Random) -> Any:
    """Now and then a bit of an array changed."""
    changed = array.copy()
    if changed.size and draw.random() < 0.03:
        changed.reshape(-1).view(np.uint8)[draw.randrange(changed.nbytes)] ^= 1 << draw.randrange(8)
    return changed


def mutate(content: bytearray, draw: random.Random) -> bytes:
    """Some bytes changed, removed, repeated or put elsewhere."""
    for _ in range(draw.choice((1, 1, 2, 5))):
        start = draw.randrange(len(content))
        end = min(len(content), start + draw.choice((1, 1, 2, 8, 50)))
        match draw.randrange(5):
            case 0 | 1:
                content[start] ^= 1 << draw.randrange(8)
            case 2:
                content[start:end] = bytes(draw.randrange(256) for _ in range(start, end))
            case 3:
                del content[start:end]
            case _:
                place = draw.randrange(len(content))
                content[place:place] = content[start:end]
    return bytes(content)
