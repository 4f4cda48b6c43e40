"""Masks: the format does not drift, they cancel, and no two sums have the same."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest

from wardround.privacy.secure_sum.masks import (
    PIECE_BYTES,
    apply_masks,
    derive_pair_mask,
    derive_self_mask,
)
from wardround.privacy.secure_sum.primitives import derive_key, encode_fields, open_sealed, seal

SEED = bytes(range(32))


def test_key_derivation_is_hkdf_with_sha256() -> None:
    info = b"\0\0\0\0\0\0\0\x03tag" + b"\0\0\0\0\0\0\0\x02\x01\x02" + b"\0\0\0\0\0\0\0\x0212"
    extracted = hmac.digest(bytes(32), SEED, "sha256")  # RFC 5869

    assert encode_fields("tag", b"\x01\x02", 12) == info
    assert derive_key(SEED, "tag", b"\x01\x02", 12) == hmac.digest(extracted, info + b"\x01", "sha256")


def test_the_stream_of_a_key_stays_what_it_is() -> None:
    key = derive_self_mask(SEED, b"session", b"binding", "north")
    values = np.zeros(2 * PIECE_BYTES // 4 + 5, np.uint32)
    apply_masks(values, [(key, True)])

    assert key.hex() == "786b416872206a3095d51e2174076d14deb7f12126b91d1cb5ba10845d5d32ac"
    assert values[:4].tolist() == [1549625803, 4127771881, 3239831588, 1176050743]
    assert (
        hashlib.sha256(values.astype("<u4").tobytes()).hexdigest()
        == "63639c217731e59e99f7434609bfe7d08a018ed445a925f81107860c8229a214"
    )


def test_the_stream_is_aes_256_in_counter_mode() -> None:
    """AES-256 of a block of zeros under a key of zeros, as `openssl enc -aes-256-ctr` prints it."""
    values = np.zeros(4, np.uint32)
    apply_masks(values, [(bytes(32), True)])

    assert values.astype("<u4").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_masks_come_off_as_they_went_on(dtype: type, more: int) -> None:
    count = PIECE_BYTES // np.dtype(dtype).itemsize + more
    values = np.arange(count, dtype=dtype)
    keys = [bytes([number]) * 32 for number in range(3)]

    apply_masks(values, [(keys[0], True), (keys[1], False), (keys[2], True)])
    assert not np.array_equal(values, np.arange(count))
    apply_masks(values, [(keys[2], False), (keys[0], False), (keys[1], True)])

    assert np.array_equal(values, np.arange(count))


def test_masks_of_one_seed_differ_between_contexts_bindings_and_names() -> None:
    keys = {
        derive_self_mask(SEED, b"session", b"binding", "north"),
        derive_self_mask(SEED, b"another", b"binding", "north"),
        derive_self_mask(SEED, b"session", b"another", "north"),
        derive_self_mask(SEED, b"session", b"binding", "south"),
        derive_self_mask(SEED, b"sessionb", b"inding", "north"),
        derive_pair_mask(SEED, b"session", b"binding", "north", "south"),
        derive_pair_mask(SEED, b"session", b"binding", "north", "west"),
    }

    assert len(keys) == 7
    assert derive_pair_mask(SEED, b"s", b"b", "a", "b") == derive_pair_mask(SEED, b"s", b"b", "b", "a")


def test_a_sealed_text_opens_only_unchanged_and_under_its_key() -> None:
    sealed = seal(SEED, b"shares", b"bound")

    assert open_sealed(SEED, sealed, b"bound") == b"shares"
    for key, text, bound in (
        (bytes(32), sealed, b"bound"),
        (SEED, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"bound"),
        (SEED, sealed, b"other"),
    ):
        with pytest.raises(ValueError, match="does not decrypt"):
            open_sealed(key, text, bound)
