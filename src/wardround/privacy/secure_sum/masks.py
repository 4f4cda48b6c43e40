"""Masks: streams of numbers from keys, added to a vector and taken off again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from wardround.privacy.secure_sum.primitives import derive_key, open_key_stream

PIECE_BYTES = 2**18  # of a vector at a time, so that it stays in the processor's cache
SPARE_BYTES = 16  # that the library may ask for beyond a piece
Mask = tuple[bytes, bool]  # its key, and whether it is added or taken off


def apply_masks(values: np.ndarray, masks: Iterable[Mask]) -> None:
    """Add and subtract masks in place, modulo 2^32 or 2^64."""
    streams = [(open_key_stream(key), np.add if is_added else np.subtract) for key, is_added in masks]
    zeros, buffer = bytes(PIECE_BYTES), bytearray(PIECE_BYTES + SPARE_BYTES)
    dtype = values.dtype.newbyteorder("<")  # the same mask on every machine
    count = PIECE_BYTES // values.itemsize
    mask = np.frombuffer(buffer, dtype, count)
    for start in range(0, values.size, count):
        part = values[start : start + count]
        for write, apply in streams:
            write(zeros if part.size == count else zeros[: part.nbytes], buffer)
            apply(part, mask[: part.size], out=part)


def derive_self_mask(seed: bytes, session: bytes, binding: bytes, name: str) -> bytes:
    """The key of the mask that a member adds alone: PRG(b_u) of the paper."""
    return derive_key(seed, "wardround-sum-1 self mask", session, binding, name)


def derive_pair_mask(secret: bytes, session: bytes, binding: bytes, one: str, other: str) -> bytes:
    """The key of the mask that one of two members adds and the other takes off: PRG(s_uv)."""
    return derive_key(secret, "wardround-sum-1 pair mask", session, binding, *sorted((one, other)))


def adds(name: str, other: str) -> bool:
    """Whether this member of a pair adds their mask; the other takes it off."""
    return name > other
