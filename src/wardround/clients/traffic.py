"""Traffic: how a trained model travels back to the server, and what that costs in bytes and in accuracy.

A lossy choice rounds in every kind of run, simulated or at hospitals, so that its price shows in the scores.
Only the model of a reply to "train" is recoded; integer buffers, `extras` and tensors that float16 cannot
hold stay as they are. Only replies to "train" are compressed, since their size is known before: the server
never unpacks more than was registered.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.config import TrafficSettings
from wardround.messages import Message
from wardround.params import Params

Array = np.ndarray[Any, np.dtype[Any]]
PIECE = 2**18  # bytes taken in and given out at a time in decompression


@dataclass(frozen=True)
class Coding:
    """How one tensor was recoded: type on the way, type restored, and whether the sent model is needed."""

    carried: torch.dtype
    restored: torch.dtype
    needs_base: bool


FLOATS = {torch.float32: "float32", torch.float64: "float64"}
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
CODINGS = {
    f"{kind}:{name}": Coding(BITS[dtype] if kind == "xor" else torch.float16, dtype, kind != "float16")
    for kind in ("float16", "xor", "delta_float16")
    for dtype, name in FLOATS.items()
}


def encode(
    params: Params, base: Params | None, settings: TrafficSettings
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that travel, and the coding of those that were recoded; base: the model that was sent."""
    tensors, codings = {}, {}
    for name in params:
        counterpart = _find_counterpart(params, base, name)
        tensors[name], coding = _encode_tensor(params[name], counterpart, settings.upload)
        if coding:
            codings[name] = coding
    return tensors, codings


def _find_counterpart(params: Params, base: Params | None, name: str) -> Tensor | None:
    """The tensor that was sent under this name, if a difference to it makes sense."""
    if base is None or name not in base or base.spec(name) != params.spec(name):
        return None
    return base[name].to(params.device(name))


def _encode_tensor(tensor: Tensor, base: Tensor | None, upload: str) -> tuple[Tensor, str]:
    if tensor.dtype not in FLOATS or upload == "full" or (upload == "delta" and base is None):
        return tensor, ""
    tensor, name = tensor.detach(), FLOATS[tensor.dtype]
    if upload == "delta":
        assert base is not None
        bits = BITS[tensor.dtype]  # of the bit patterns, since subtraction would round
        return tensor.view(bits) ^ base.view(bits), f"xor:{name}"
    kind = "float16" if base is None else upload
    half = (tensor - base if kind == "delta_float16" and base is not None else tensor).half()
    if not bool(torch.isfinite(half).all()):  # beyond 65504; and NaN is for the gate to see as it is
        return tensor, ""
    return half, f"{kind}:{name}"


def decode(tensors: Mapping[str, Tensor], codings: Mapping[str, str], base: Params | None) -> Params:
    """The model the server sees; a coding that does not fit is a ValueError."""
    return Params({name: _decode_tensor(name, tensors[name], codings.get(name), base) for name in tensors})


def _decode_tensor(name: str, tensor: Tensor, code: str | None, base: Params | None) -> Tensor:
    if not code:
        return tensor
    coding = CODINGS.get(code)
    if coding is None or coding.carried != tensor.dtype:
        raise ValueError(f"tensor '{name}' of type {short(tensor.dtype)} has the unknown coding {code!r}")
    if not coding.needs_base:
        return tensor.to(coding.restored)
    if base is None or name not in base or base.spec(name) != (tuple(tensor.shape), coding.restored):
        raise ValueError(f"tensor '{name}' is a difference, but there is nothing it could be a difference to")
    before = base[name].to(tensor.device)
    if code.startswith("xor:"):
        return (tensor ^ before.view(coding.carried)).view(coding.restored)
    return tensor.to(coding.restored).add_(before)  # in place: one tensor's room, not two


def as_received(
    message: Message, base: Params | None, settings: TrafficSettings, task: str = "train"
) -> Message:
    """The reply as the server will see it; the very same object unless the upload is lossy."""
    if not settings.is_lossy or message.optional_params is None or task != "train":
        return message
    return replace(message, params=decode(*encode(message.params, base, settings), base))


def count_wire_bytes(
    message: Message, base: Params | None, settings: TrafficSettings, task: str = "train"
) -> int:
    """Bytes of a reply's tensors as they would travel, and of its scalars' JSON text."""
    groups = message.tensors()
    if settings == TrafficSettings() or not groups:
        return message.num_bytes
    total = message.num_bytes - sum(group.num_bytes for group in groups.values())
    for label, group in groups.items():
        recoded = label == "params" and task == "train"
        for name in group:
            one = Params({name: group[name]})
            array = as_array(encode(one, base, settings)[0][name] if recoded else one[name])
            small = compress_array(array) if settings.compress == "zlib" and task == "train" else None
            total += array.nbytes if small is None else small.nbytes
    return total


# Arrays and their bytes


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_array(tensor: Tensor) -> Array:
    """The tensor as NumPy sees it, without a copy where it lies on the host; bfloat16 as uint16."""
    plain = tensor.detach().cpu().contiguous()
    array: Array = (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def compress_array(array: Array) -> Array | None:
    """The bytes made smaller without loss, or None where that does not work.

    All first bytes of the numbers, then all second ones, and so on: signs and exponents repeat, the lower
    digits do not. Run lengths and Huffman codes then win as much as a search for matches, in less time.
    """
    planes = array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
    packer = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    small = packer.compress(planes) + packer.flush()
    return np.frombuffer(small, dtype=np.uint8) if len(small) < array.nbytes else None


def decompress_array(small: Array, dtype: np.dtype[Any], count: int) -> Array:
    """`count` numbers back; never more memory than they need, and a ValueError if there are not as many."""
    size, place = count * dtype.itemsize, 0
    numbers = np.empty((count, dtype.itemsize), dtype=np.uint8)
    for piece in _decompress(small, size):
        while len(piece):  # a plane is a column
            plane, row = divmod(place, count)
            part = piece[: count - row]
            numbers[row : row + len(part), plane] = part
            piece, place = piece[len(part) :], place + len(part)
    return numbers.reshape(-1).view(dtype)


def _decompress(small: Array, size: int) -> Iterator[Array]:
    """The bytes in pieces; a ValueError as soon as there is one more than `size`, or too few at the end."""
    unpacker, done = zlib.decompressobj(), 0
    wrong = ValueError(f"it does not decompress to the {size} bytes it declares")
    for start in range(0, small.size, PIECE):
        given = small[start : start + PIECE].tobytes()
        if unpacker.eof:
            raise wrong
        is_full = False
        while (given or is_full) and not unpacker.eof:
            try:
                piece = unpacker.decompress(given, PIECE)
            except zlib.error:
                raise ValueError("its bytes cannot be decompressed") from None
            done, given, is_full = done + len(piece), unpacker.unconsumed_tail, len(piece) == PIECE
            if done > size:
                raise wrong
            yield np.frombuffer(piece, dtype=np.uint8)
    if done != size or not unpacker.eof or unpacker.unused_data:
        raise wrong
