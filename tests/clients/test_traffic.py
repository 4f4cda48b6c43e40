"""Uploads in fewer bytes: lossless ones to the bit, lossy ones with the error they promise."""

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pytest import mark, raises

from wardround.clients.traffic import (
    CODINGS,
    PIECE,
    as_array,
    as_received,
    compress_array,
    count_wire_bytes,
    decode,
    decompress_array,
    encode,
)
from wardround.config import TrafficSettings
from wardround.deploy.wire import pack
from wardround.messages import Message, Reply
from wardround.params import NoParams, Params

UPLOADS = ["full", "float16", "delta", "delta_float16"]
FULL = TrafficSettings()


def model(seed: int, scale: float = 1.0) -> Params:
    draw = torch.Generator().manual_seed(seed)
    return Params(
        {
            "weight": scale * torch.randn(4, 3, 3, generator=draw),
            "double": scale * torch.randn(7, generator=draw, dtype=torch.float64),
            "scalar": scale * torch.randn((), generator=draw),
            "empty": torch.empty(0, 5),
            "count": torch.tensor(7),
            "brain": torch.randn(3, generator=draw).bfloat16(),
        }
    )


def same_bits(a: Params, b: Params) -> bool:
    return list(a) == list(b) and a.sha256() == b.sha256()


@mark.parametrize("upload", UPLOADS)
def test_decoding_gives_the_names_shapes_and_types_back(upload: str) -> None:
    base, params = model(0), model(1)
    seen = decode(*encode(params, base, TrafficSettings(upload=upload)), base)
    assert list(seen) == list(params)
    assert all(seen.spec(name) == params.spec(name) for name in params)


@mark.parametrize("upload", ["full", "delta"])
def test_full_and_delta_are_exact_to_the_bit(upload: str) -> None:
    base, params = model(0), model(1)
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]).expand(36 // 4, 5).reshape(-1)[:36]
    params = params.updated({"weight": odd.reshape(4, 3, 3)})
    assert same_bits(decode(*encode(params, base, TrafficSettings(upload=upload)), base), params)


def test_a_delta_of_the_same_model_is_all_zero_bits() -> None:
    tensors, codings = encode(model(0), model(0), TrafficSettings(upload="delta"))
    assert codings == {
        "weight": "xor:float32",
        "double": "xor:float64",
        "scalar": "xor:float32",
        "empty": "xor:float32",
    }
    assert not any(bool(tensors[name].any()) for name in codings)


def test_float16_is_pytorch_s_rounding_of_the_floating_tensors_alone() -> None:
    params = model(1)
    seen = decode(*encode(params, None, TrafficSettings(upload="float16")), None)
    assert torch.equal(seen["weight"], params["weight"].half().float())
    assert torch.equal(seen["double"], params["double"].half().double())
    assert seen["count"] is params["count"]
    assert seen["brain"] is params["brain"]


def test_a_rounded_delta_is_nearer_than_a_rounded_model() -> None:
    base = model(0)
    params = base + 1e-3 * model(1)
    error = {}
    for upload in ("float16", "delta_float16"):
        seen = as_received(Message(params), base, TrafficSettings(upload=upload)).params
        error[upload] = float(sum((seen[name] - params[name]).double().norm() for name in seen))
    assert 0 < error["delta_float16"] < error["float16"] / 100
    expected = base["weight"] + (params["weight"] - base["weight"]).half().float()
    assert torch.equal(seen["weight"], expected)


@mark.parametrize("upload", ["float16", "delta_float16"])
@mark.parametrize("value", [1e5, math.inf, math.nan])
def test_what_float16_cannot_hold_stays_as_it_is(upload: str, value: float) -> None:
    base = model(0)
    params = base.updated({"weight": base["weight"].clone()})
    params["weight"][0, 0, 0] = value
    tensors, codings = encode(params, base, TrafficSettings(upload=upload))
    assert "weight" not in codings and tensors["weight"] is not None
    assert same_bits(decode(tensors, codings, base).only(["weight"]), params.only(["weight"]))


def test_without_a_model_that_was_sent_a_delta_is_full_and_a_rounded_one_float16() -> None:
    params = model(1)
    assert encode(params, None, TrafficSettings(upload="delta"))[1] == {}
    rounded = TrafficSettings(upload="delta_float16")
    assert set(encode(params, None, rounded)[1].values()) == {"float16:float32", "float16:float64"}
    other = Params({"weight": torch.zeros(2)})  # another shape is another tensor
    assert encode(params, other, TrafficSettings(upload="delta"))[1] == {}


def test_a_lossless_upload_gives_the_very_same_message() -> None:
    message = Message(model(1))
    for upload in ("full", "delta"):
        assert as_received(message, model(0), TrafficSettings(upload=upload, compress="zlib")) is message


def test_only_the_model_of_a_training_reply_is_rounded() -> None:
    rounded = TrafficSettings(upload="float16")
    reply = Reply(model(1), extras={"control": model(2)}, scalars={"a": 0.1}, client="north", num_steps=3)
    seen = as_received(reply, None, rounded)
    assert isinstance(seen, Reply) and replace(seen, params=NoParams()) == replace(reply, params=NoParams())
    assert seen.extras["control"] is reply.extras["control"]
    assert as_received(reply, None, rounded, task="score") is reply
    assert as_received(Message(), None, rounded) == Message()


def test_decoding_names_what_does_not_fit() -> None:
    with raises(ValueError, match="unknown coding 'rot13'"):
        decode({"w": torch.ones(2)}, {"w": "rot13"}, None)
    with raises(ValueError, match="type float32 has the unknown coding 'xor:float32'"):
        decode({"w": torch.ones(2)}, {"w": "xor:float32"}, None)
    with raises(ValueError, match="nothing it could be a difference to"):
        decode({"w": torch.ones(2).half()}, {"w": "delta_float16:float32"}, Params({"w": torch.ones(3)}))
    assert len(CODINGS) == 6


@mark.parametrize("upload", UPLOADS)
@mark.parametrize("compress", ["none", "zlib"])
def test_the_bytes_of_the_records_are_those_of_the_parcel(upload: str, compress: str) -> None:
    base, settings = model(0), TrafficSettings(upload=upload, compress=compress)
    reply = Message(base + 1e-3 * model(1), {"control": model(3)}, {"a": [1, 0.5]})
    address: dict[str, Any] = {"run": "r", "request": "q", "client": "c", "task": "train", "round": 0}
    parcel = pack(reply, kind="reply", **address, traffic=settings, base=base)
    assert count_wire_bytes(reply, base, settings) == sum(a.nbytes for a in parcel.arrays.values()) + len(
        '{"a": [1, 0.5]}'
    )


def test_only_replies_to_train_are_compressed() -> None:
    reply, settings = (
        Message(extras={"bank": Params({"x": torch.zeros(1000)})}),
        TrafficSettings(compress="zlib"),
    )
    sizes = {task: count_wire_bytes(reply, None, settings, task) for task in ("train", "contribute")}
    assert sizes["train"] < 100 and sizes["contribute"] == 4000


def test_each_option_sends_fewer_bytes_and_the_default_measures_nothing() -> None:
    base = Params({"w": torch.randn(200, 100, generator=torch.Generator().manual_seed(0))})
    reply = Message(base * (1 + 1e-5))
    bytes_up = {u: count_wire_bytes(reply, base, TrafficSettings(upload=u, compress="zlib")) for u in UPLOADS}
    assert count_wire_bytes(reply, base, FULL) == reply.num_bytes == 80_000
    assert count_wire_bytes(reply, base, TrafficSettings(upload="float16")) == 40_000
    assert bytes_up["full"] < 80_000 and bytes_up["float16"] < 40_000
    assert bytes_up["delta"] < 40_000 and bytes_up["delta_float16"] < 40_000


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32), max_size=40),
    st.lists(st.floats(width=32), max_size=40),
    st.sampled_from(["delta", "full"]),
)
def test_any_numbers_survive_a_lossless_upload(first: list[float], second: list[float], upload: str) -> None:
    count = min(len(first), len(second))
    base, params = (Params({"w": torch.tensor(v[:count])}) for v in (first, second))
    assert same_bits(decode(*encode(params, base, TrafficSettings(upload=upload)), base), params)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=300), st.sampled_from([np.uint8, np.int16, np.float32, np.int64]), st.integers(1, 50)
)
def test_compression_gives_every_byte_back(content: bytes, dtype: Any, repeats: int) -> None:
    raw = content * repeats
    array = np.frombuffer(raw[: len(raw) // 8 * 8], dtype=np.uint8).view(dtype)
    small = compress_array(array)
    if small is not None:
        assert small.nbytes < array.nbytes
        assert decompress_array(small, array.dtype, array.size).tobytes() == array.tobytes()


@mark.parametrize("count", [PIECE // 4 - 1, PIECE // 4, PIECE, PIECE + 3])
def test_arrays_of_several_pieces_come_back(count: int) -> None:
    random = np.random.default_rng(0).integers(0, 2**31, count, dtype=np.int32)
    for array in (np.zeros(count, np.int32), np.where(np.arange(count) % 3, 0, random).astype(np.int32)):
        small = compress_array(array)
        assert small is not None
        assert decompress_array(small, array.dtype, count).tobytes() == array.tobytes()


def test_an_array_is_decompressed_in_its_own_room() -> None:
    small = compress_array(np.zeros(2**22, np.float32))
    assert small is not None
    tracemalloc.start()
    try:
        decompress_array(small, np.dtype(np.float32), 2**22)
        assert tracemalloc.get_traced_memory()[1] < 2**24 + 2**21  # one copy, and a few pieces
    finally:
        tracemalloc.stop()


def test_a_bomb_is_not_unpacked_beyond_what_it_declares() -> None:
    bomb = compress_array(np.zeros(50_000_000, dtype=np.uint8))
    assert bomb is not None and bomb.nbytes < 100_000
    with raises(ValueError, match="does not decompress to the 100 bytes"):
        decompress_array(bomb, np.dtype(np.uint8), 100)
    with raises(ValueError, match="does not decompress to the"):
        decompress_array(bomb, np.dtype(np.uint8), 50_000_001)
    with raises(ValueError, match="does not decompress to the 50000000 bytes"):
        decompress_array(np.append(bomb, np.uint8(0)), np.dtype(np.uint8), 50_000_000)
    with raises(ValueError, match="cannot be decompressed"):
        decompress_array(np.arange(30, dtype=np.uint8), np.dtype(np.uint8), 30)


def test_an_array_is_the_tensor_s_own_memory() -> None:
    tensor = torch.zeros(3)
    as_array(tensor)[0] = 5
    assert tensor[0] == 5


def test_a_misspelt_option_is_an_error() -> None:
    with raises(ValidationError):
        TrafficSettings(upload="float8")  # type: ignore[arg-type]
    with raises(ValidationError):
        TrafficSettings(uplod="float16")  # type: ignore[call-arg]
