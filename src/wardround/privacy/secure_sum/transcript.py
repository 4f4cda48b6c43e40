"""What members and coordinator say to each other: checked and bounded when it comes; what is signed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from wardround.privacy.secure_sum.primitives import KEY_BYTES, NONCE_BYTES, TAG_BYTES, digest, encode_fields
from wardround.privacy.secure_sum.refusals import SumRefusal, TooFewMembers
from wardround.privacy.secure_sum.shamir import PRIME, SHARE_BYTES
from wardround.text import clipped

ADVERTISE, SHARE, MASK = "AdvertiseKeys", "ShareKeys", "MaskedInputCollection"
CONFIRM, UNMASK, DONE = "ConsistencyCheck", "Unmasking", "done"
PHASES = (ADVERTISE, SHARE, MASK, CONFIRM, UNMASK, DONE)  # rounds 0 to 4 of the paper

# Of what comes from elsewhere
MOST_MEMBERS = 1000
NAME_CHARACTERS = 200
CERTIFICATE_CHARACTERS = 20_000  # as PEM an honest one has 2,000
SIGNATURE_BYTES = 1024  # RSA of 4,096 bits has 512
SEALED_BYTES = 2 * KEY_BYTES + NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES  # two commitments, two shares


class Advert(NamedTuple):
    """What a member says of itself; commitment: of the seed of its self mask."""

    cipher: bytes
    mask: bytes
    commitment: bytes
    certificate: str
    signature: bytes


def encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def decode(text: Any, member: str, what: str, size: int, *, or_less: bool = False) -> bytes:
    """Bytes of a known number from their text; refused in the member's name."""
    longest = 4 * -(-size // 3)
    if isinstance(text, str) and (len(text) == longest or (or_less and len(text) < longest)):
        try:
            content = base64.b64decode(text, validate=True)
            if len(content) == size or (or_less and len(content) < size):
                return content
        except (binascii.Error, ValueError):
            pass
    raise SumRefusal(f"'{member}': its {what} is not {size} bytes in base64.", member)


def check_name(name: Any) -> str:
    if isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS and name.isprintable():
        return name
    raise SumRefusal(f"a member's name is {clipped(ascii(name)[:99], 40)}, which is none.")


def check_threshold(threshold: int, members: int, phase: str) -> None:
    """Refuse too few members, and a threshold that two halves of them could reach, each for itself."""
    if members < threshold:
        raise TooFewMembers(phase, members, threshold)
    if not 2 * threshold > members:
        raise SumRefusal(
            f"the threshold of a secure sum of {members} members is {threshold}; it must be more than half "
            "of them, or two groups could be told different things."
        )


def check_mapping(value: Any, names: Iterable[str], member: str, what: str) -> Mapping[str, Any]:
    """A mapping with these keys and no other; refused in the member's name."""
    expected = set(names)
    if not isinstance(value, Mapping) or len(value) != len(expected) or set(value) != expected:
        raise SumRefusal(f"'{member}': its {what} is not for those it must be for.", member)
    return value


def parse_advert(name: str, value: Any) -> Advert:
    keys = ("cipher", "mask", "seed", "certificate", "signature")
    fields = check_mapping(value, keys, name, "advert")
    cipher, mask, commitment = (decode(fields[key], name, f"{key} key", KEY_BYTES) for key in keys[:3])
    certificate = fields["certificate"]
    if not isinstance(certificate, str) or len(certificate) > CERTIFICATE_CHARACTERS:
        raise SumRefusal(f"'{name}': its certificate is not a text, or too long.", name)
    signature = decode(fields["signature"], name, "signature", SIGNATURE_BYTES, or_less=True)
    return Advert(cipher, mask, commitment, certificate, signature)


def write_advert(advert: Advert) -> dict[str, str]:
    return {
        "cipher": encode(advert.cipher),
        "mask": encode(advert.mask),
        "seed": encode(advert.commitment),
        "certificate": advert.certificate,
        "signature": encode(advert.signature),
    }


def check_distinct(adverts: Mapping[str, Advert]) -> None:
    """Refuse a public key that comes twice."""
    owners: dict[bytes, str] = {}
    for name, advert in adverts.items():
        for key in (advert.cipher, advert.mask):
            if key in owners:
                raise SumRefusal(f"'{name}' has the same public key as '{owners[key]}'.", name)
            owners[key] = name


def state_advert(context: bytes, name: str, advert: Advert) -> bytes:
    """What a member signs in round 0."""
    keys = (advert.cipher, advert.mask, advert.commitment)
    return encode_fields("wardround-sum-1 advert", context, name, *keys)


def state_members(session: bytes, binding: bytes, members: Iterable[str]) -> bytes:
    """What a member signs in round 2; never taken for the statement of round 3, or the other way round."""
    return encode_fields("wardround-sum-1 members", session, binding, *sorted(members))


def state_survivors(session: bytes, binding: bytes, survivors: Iterable[str]) -> bytes:
    """What a member signs in round 3."""
    return encode_fields("wardround-sum-1 survivors", session, binding, *sorted(survivors))


def find_session(context: bytes, threshold: int, adverts: Mapping[str, Advert]) -> bytes:
    """A hash of the sum and its members, to which all keys are bound from round 1 on."""
    fields: list[bytes | str] = []
    for name in sorted(adverts):
        fields += [name, adverts[name].cipher, adverts[name].mask, adverts[name].commitment]
    return digest("wardround-sum-1 session", context, threshold, *fields)


def number_members(names: Iterable[str]) -> dict[str, int]:
    """The number of each member's share."""
    return {name: number for number, name in enumerate(sorted(names), start=1)}


# Shares and seeds are of at least 256 bits that nobody can guess, so their hashes tell nothing of them.


def commit_seed(context: bytes, name: str, seed: bytes) -> bytes:
    return digest("wardround-sum-1 seed", context, name, seed)


def commit_share(session: bytes, dealer: str, holder: str, kind: str, share: bytes) -> bytes:
    return digest("wardround-sum-1 share", session, dealer, holder, kind, share)


def read_share(share: bytes, member: str) -> int:
    number = int.from_bytes(share, "big")
    if number >= PRIME:
        raise SumRefusal(f"'{member}': a share of it is out of range.", member)
    return number
