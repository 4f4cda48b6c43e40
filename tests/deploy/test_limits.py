"""Limits: what is beyond them costs little to refuse, and nothing that a method sends is beyond them."""

import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import run
from pytest import MonkeyPatch, fixture, mark, raises

from deploy.loopback import ADDRESS
from wardround.clients import Answer, Registration
from wardround.config import TrafficSettings
from wardround.deploy import limits
from wardround.deploy.remote import bound_reply
from wardround.deploy.wire import SCHEMA, Parcel, ParcelError, compute_sha256, pack, unpack
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.methods import METHODS
from wardround.params import Params

SMALLEST = TrafficSettings(upload="delta_float16", compress="zlib")
MODEL = Params({"w": torch.zeros(20, 30), "n": torch.tensor(4)})
NORTH = Registration("north", 8, tensors={name: MODEL.spec(name) for name in MODEL})


# Nothing honest is refused


ADDING = [name for name in METHODS if METHODS[name].up or METHODS[name].tasks != ("train",)]


@mark.parametrize("method", ["fedavg", *ADDING])  # the gate holds all others to the model alone
def test_what_a_method_sends_is_within_the_limits(
    method: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    exchanged: list[tuple[str, str, Message, Answer, Registration]] = []
    answer = Host.run

    def watched(self: Host, name: str, task: str, round: int, message: Message, *rest: Any) -> Answer:
        found = answer(self, name, task, round, message, *rest)
        exchanged.append((name, task, message, found, self.register(name)))
        return found

    monkeypatch.setattr(Host, "run", watched)
    needs_own = "proxy" in METHODS[method].needs
    phantom = {"hospitals": 3, "size": 16, "cases": 4}
    data = {"phantom": phantom, "proxy": "south" if needs_own else None}
    norm = {"norm": "batch"} if method == "fedbn" else {}
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, **norm}
    run(tmp_path, rounds=1, method={"name": method}, data=data, model=model)

    assert {task for _, task, *_ in exchanged} >= {"train", "evaluate"}
    for name, task, sent, found, registration in exchanged:
        address = {**ADDRESS, "client": name, "task": task}
        base = sent.optional_params
        parcel = pack(found.message, **address, traffic=SMALLEST, base=base)
        unpack(parcel, **address, base=base, **bound_reply(task, registration))
        specs = registration.tensors.values()
        model_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in specs)
        tensor_bytes = sum(group.num_bytes for group in found.message.tensors().values())
        if task == "train":  # no more than half of what is allowed, leaving the fixed allowance aside
            assert tensor_bytes <= limits.REPLY_MODELS / 2 * model_bytes + 1000
        unpack(pack(sent, **address | {"kind": "request"}), kind="request", largest=10**7)


# What is refused costs little


def sealed(**changes: Any) -> Parcel:
    """A reply of north, changed by somebody who mends the SHA-256."""
    extras = {"bank": Params({"x": torch.zeros(2)})} if "extra" in changes else {}
    parcel = pack(Message(MODEL, extras), **ADDRESS)
    header, arrays = parcel.header, dict(parcel.arrays)
    key = "extras/bank/x" if "extra" in changes else "params/w"
    header["tensors"][key] |= {"shape": changes["shape"], "compress": "zlib"}
    arrays[key] = changes.get("array", arrays[key])
    return Parcel(header | {"sha256": compute_sha256(header, arrays)}, arrays)


@fixture(scope="module")
def bomb() -> Any:
    """A quarter of a million bytes that become 256 MiB."""
    packer = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    piece = bytes(2**20)
    return np.frombuffer(b"".join([*(packer.compress(piece) for _ in range(256)), packer.flush()]), np.uint8)


def test_a_bomb_is_refused_for_little_memory(bomb: Any) -> None:
    assert bomb.nbytes < 300_000
    offers = {
        "a tensor of another shape": (sealed(shape=[2**24], array=bomb), "'w' has shape .16777216,., registered"),
        "a tensor beyond all that was registered": (sealed(shape=[2**26], array=bomb), "268,435,456 bytes unpacked"),
        "an extra": (sealed(shape=[2**26], array=bomb, extra=True), "268,435,456 bytes unpacked, at most 67,"),
        "more than it declares": (sealed(shape=[20, 30], array=bomb), "not decompress to the 2400 bytes"),
    }  # fmt: skip
    for parcel, sentence in offers.values():
        refuse(partial(open_reply, parcel), sentence, most=2**21)


def open_reply(parcel: Parcel) -> Any:
    return unpack(parcel, **ADDRESS, base=MODEL, **bound_reply("train", NORTH))


def refuse(call: Callable[[], Any], sentence: str, most: int) -> None:
    """Check that a call is refused in this sentence within a second and `most` bytes of memory."""
    started = time.process_time()
    with raises(ParcelError, match=sentence):
        call()
    assert time.process_time() - started < 1
    tracemalloc.start()
    try:
        with raises(ParcelError):
            call()
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_what_a_hospital_says_it_keeps_allows_it_nothing() -> None:
    keeping = Registration("north", 8, tensors=NORTH.tensors, kept={"x": ((2**31, 4), torch.float32)})
    assert bound_reply("train", keeping) == bound_reply("train", NORTH)


def test_only_the_reply_to_train_may_be_compressed(bomb: Any) -> None:
    parcel = sealed(shape=[2**26], array=bomb)
    for task in ("contribute", "personal_model", "evaluate", "register"):
        header = {**parcel.header, "task": task}
        header["sha256"] = compute_sha256(header, parcel.arrays)
        bounds = bound_reply(task, None if task == "register" else NORTH)
        with raises(ParcelError, match="only that of a reply to 'train' may be"):
            unpack(Parcel(header, parcel.arrays), **{**ADDRESS, "task": task}, **bounds)
    header = {**parcel.header, "kind": "request"}
    header["sha256"] = compute_sha256(header, parcel.arrays)
    with raises(ParcelError, match="is compressed or recoded"):
        unpack(Parcel(header, parcel.arrays), kind="request", client="north", largest=10**9)


def test_a_reply_holds_the_registered_tensors_and_no_others() -> None:
    others = {
        "tensor 'v' was never registered": {"v": torch.zeros(2)},
        r"tensor 'w' has shape \(30, 20\), registered \(20, 30\)": {"w": torch.zeros(30, 20)},
        "tensor 'w' has type float64, registered float32": {"w": torch.zeros(20, 30, dtype=torch.float64)},
    }
    for sentence, tensors in others.items():
        with raises(ParcelError, match=sentence):
            open_reply(pack(Message(Params(tensors)), **ADDRESS, traffic=SMALLEST, base=MODEL))
    with raises(ParcelError, match="tensor 'w' was never registered"):
        about = {**ADDRESS, "task": "evaluate"}
        unpack(pack(Message(MODEL), **about), **about, **bound_reply("evaluate", NORTH))


SHAPED = '{"schema": "wardround-parcel-1", "tensors": {"params/w": {"dtype": "float32", "shape": %s}}}'
TEXTS: dict[str, tuple[Callable[[], str], str]] = {
    "a side of 10**400": (lambda: SHAPED % [10**400], "an integer of more than 64 bits"),
    "a number of a million digits": (lambda: SHAPED % ("[" + "1" * 10**6 + "]"), "more than 64 bits"),
    "nested 100,000 deep": (lambda: "[" * 100_000 + "]" * 100_000, "nested more than 50 levels deep"),
    "nested 100 deep": (lambda: json.dumps({"schema": SCHEMA, "more": json.loads("[" * 100 + "]" * 100)}), "'more' is nested more than 50"),
    "10**6 tensors": (lambda: '{"layout": [' + '["params", []],' * 10**6 + "0]}", "more than 2,000,000 items"),
    "a key twice": (lambda: '{"schema": 1, "schema": 2}', "names a key twice"),
    "a long text": (lambda: json.dumps({"schema": SCHEMA, "run": "x" * 200_000}), "'run' holds a text of more than 131,072"),
    "a long key": (lambda: json.dumps({"schema": SCHEMA, "x" * 200_000: 1}), "the header has a key of too many characters"),
    "more than 64 MiB": (lambda: " " * (limits.HEADER_CHARACTERS + 1), "longer than 67,108,864 characters"),
}  # fmt: skip


@mark.parametrize("name", TEXTS)
def test_a_header_beyond_the_limits_is_refused_by_name(name: str) -> None:
    make, sentence = TEXTS[name]
    text = make()
    refuse(lambda: open_reply(Parcel.read(text, {})), sentence, most=10 * 2**20)


@mark.parametrize("shape", [[2**62] * 5000, [1] * 5000, [2**31] * 8, [2**32], [1] * 9])
def test_a_shape_beyond_the_limits_is_refused_before_its_sides_are_multiplied(shape: list[int]) -> None:
    parcel = sealed(shape=shape)
    refuse(lambda: open_reply(parcel), "declares the invalid shape", most=2**21)


def test_more_tensors_than_the_limit_are_refused() -> None:
    one = np.zeros(1, np.float32)
    parcel = Parcel(pack(Message(), **ADDRESS).header, {str(n): one for n in range(limits.TENSORS + 1)})
    refuse(lambda: open_reply(parcel), "more than 100,000 tensors", most=2**20)


def test_a_shape_that_would_not_be_read_is_not_sent() -> None:
    with raises(ParcelError, match="tensor 'w' has the shape .*, which cannot be sent"):
        pack(Message(Params({"w": torch.zeros([1] * 9)})), **ADDRESS)
