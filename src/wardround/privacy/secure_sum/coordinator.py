"""The server of one sum: collects, passes on, and in the end takes all masks off the sum at once.

It holds one vector, whatever the number of members. A message that is not as it must be is refused in its
member's name and changes nothing, so that the sum goes on without that member where enough are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wardround.privacy.secure_sum.fixed_point import UNSIGNED
from wardround.privacy.secure_sum.identity import Identity
from wardround.privacy.secure_sum.masks import Mask, adds, apply_masks, derive_pair_mask, derive_self_mask
from wardround.privacy.secure_sum.primitives import (
    KEY_BYTES,
    agree,
    draw_secret,
    find_public_key,
    require_library,
)
from wardround.privacy.secure_sum.refusals import SumRefusal, TooFewMembers
from wardround.privacy.secure_sum.shamir import SHARE_BYTES, join_shares
from wardround.privacy.secure_sum.transcript import (
    ADVERTISE,
    CONFIRM,
    MASK,
    MOST_MEMBERS,
    PHASES,
    SEALED_BYTES,
    SHARE,
    SIGNATURE_BYTES,
    UNMASK,
    Advert,
    check_distinct,
    check_mapping,
    check_name,
    check_threshold,
    commit_seed,
    commit_share,
    decode,
    find_session,
    number_members,
    parse_advert,
    read_share,
    state_advert,
    state_members,
    state_survivors,
    write_advert,
)

Shares = dict[str, bytes]  # by the member who holds them


class Coordinator:
    """The server's part. Reading the result of a phase ends it; what comes later is refused.

    length: of the vectors. identity: verifies signatures when they come; without it members alone do.
    """

    def __init__(
        self, context: bytes, threshold: int, length: int, bits: int = 32, *, identity: Identity | None = None
    ) -> None:
        require_library()
        if threshold < 2 or bits not in UNSIGNED or length < 0:
            raise SumRefusal(
                f"there is no secure sum of {length} numbers of {bits} bits with threshold {threshold}: the "
                "threshold is at least 2, and numbers have 32 or 64 bits."
            )
        self._context = bytes(context)
        self._threshold = threshold
        self._total: np.ndarray = np.zeros(length, UNSIGNED[bits])
        self._identity = identity
        self._phase = ADVERTISE
        self._session = b""
        self._binding: bytes | None = None
        self._adverts: dict[str, Advert] = {}
        self._sealed: dict[str, dict[str, str]] = {}  # by dealer, then by holder
        self._commitments: dict[
            tuple[str, str], bytes
        ] = {}  # by dealer and holder: of seed share, of key share
        self._masked: set[str] = set()
        self._signed: dict[str, str] = {}  # of round 2, over all members
        self._confirmed: dict[str, str] = {}
        self._seeds: dict[str, Shares] = {}  # by dealer
        self._keys: dict[str, Shares] = {}

    # Round 0, AdvertiseKeys

    def add_advert(self, name: str, advert: Mapping[str, str]) -> None:
        self._admit(ADVERTISE, name, self._adverts)
        if len(self._adverts) >= MOST_MEMBERS:
            raise SumRefusal(f"a secure sum has at most {MOST_MEMBERS} members.", name)
        parsed = parse_advert(check_name(name), advert)
        check_distinct({**self._adverts, name: parsed})
        try:
            for key in (parsed.cipher, parsed.mask):
                agree(draw_secret(), key)  # a key that agrees with nobody would stop the others
        except ValueError:
            raise SumRefusal(f"'{name}' has a public key that is not usable.", name) from None
        if self._identity is not None:
            statement = state_advert(self._context, name, parsed)
            self._identity.verify(name, parsed.certificate, parsed.signature, statement)
        self._adverts[name] = parsed

    def adverts(self) -> dict[str, dict[str, str]]:
        """For all who advertised."""
        self._close(ADVERTISE, len(self._adverts))
        return {name: write_advert(advert) for name, advert in sorted(self._adverts.items())}

    # Round 1, ShareKeys

    def add_shares(self, name: str, ciphertexts: Mapping[str, str]) -> None:
        self._admit(SHARE, name, self._sealed, among=self._adverts)
        others = self._adverts.keys() - {name}
        texts = check_mapping(ciphertexts, others, name, "list of shares")
        found = {other: decode(texts[other], name, "encrypted shares", SEALED_BYTES) for other in others}
        self._commitments |= {(name, other): content[: 2 * KEY_BYTES] for other, content in found.items()}
        self._sealed[name] = {other: texts[other] for other in others}

    def shares_for(self, name: str) -> dict[str, str]:
        """What the others encrypted to this member, if it shared too."""
        self._close(SHARE, len(self._sealed))
        self._check_known(name, self._sealed)
        return {dealer: texts[name] for dealer, texts in sorted(self._sealed.items()) if dealer != name}

    # Round 2, MaskedInputCollection

    def begin(self, binding: bytes) -> None:
        """Take masked vectors from here on; binding: what members were told with their shares."""
        self._close(SHARE, len(self._sealed))
        if self._binding is not None:
            raise SumRefusal("the masks of this sum are bound already.")
        self._binding = bytes(binding)

    def add_masked(self, name: str, array: np.ndarray, confirmation: str | None = None) -> None:
        """confirmation: the member's signature over all who shared, where it gave one."""
        if self._binding is None:
            raise SumRefusal("a masked vector came before the masks were bound (begin).", name)
        self._admit(MASK, name, self._masked, among=self._sealed)
        if not isinstance(array, np.ndarray):
            raise SumRefusal(f"'{name}': its masked vector is not an array.", name)
        if array.dtype != self._total.dtype or array.shape != self._total.shape:
            raise SumRefusal(
                f"'{name}': its masked vector is {array.dtype} of shape {array.shape}, and must be "
                f"{self._total.dtype} of shape {self._total.shape}.",
                name,
            )
        if confirmation is not None:
            self._verify(name, confirmation, state_members(self._session, self._binding, self._sealed))
            self._signed[name] = confirmation
        np.add(self._total, array, out=self._total)
        self._masked.add(name)

    def survivors(self) -> list[str]:
        """Those whose vectors are in the sum."""
        self._close(MASK, len(self._masked))
        return sorted(self._masked)

    # Round 3, ConsistencyCheck

    def skip_confirming(self) -> bool:
        """Whether round 3 is not needed: nobody who shared was lost, and all signed that in round 2."""
        self._close(MASK, len(self._masked))
        if self._phase != CONFIRM or self._signed.keys() != self._sealed.keys():
            return False
        self._phase, self._confirmed = UNMASK, self._signed
        return True

    def add_confirmation(self, name: str, text: str) -> None:
        self._admit(CONFIRM, name, self._confirmed, among=self._masked)
        assert self._binding is not None
        self._verify(name, text, state_survivors(self._session, self._binding, self._masked))
        self._confirmed[name] = text

    def confirmations(self) -> dict[str, str]:
        """Of all who confirmed, in this round or, where it was skipped, in the one before."""
        self._close(CONFIRM, len(self._confirmed))
        return dict(sorted(self._confirmed.items()))

    def _verify(self, name: str, text: str, statement: bytes) -> None:
        signature = decode(text, name, "confirmation", SIGNATURE_BYTES, or_less=True)
        if self._identity is not None:
            self._identity.verify(name, self._adverts[name].certificate, signature, statement)

    # Round 4, Unmasking

    def add_unmasked(self, name: str, reply: Mapping[str, Any]) -> None:
        givers = next(iter(self._seeds.values()), {})
        self._admit(UNMASK, name, givers, among=self._masked)
        both = check_mapping(reply, ("seeds", "keys"), name, "list of shares")
        dealers = {"seeds": self._masked, "keys": self._sealed.keys() - self._masked}
        found = {
            kind: self._read_shares(name, kind, check_mapping(both[kind], those, name, f"shares of {kind}"))
            for kind, those in dealers.items()
        }
        for kept, kind in ((self._seeds, "seeds"), (self._keys, "keys")):
            for dealer, share in found[kind].items():
                kept.setdefault(dealer, {})[name] = share

    def total(self) -> np.ndarray:
        """The sum, of those in `survivors`."""
        self._close(UNMASK, len(next(iter(self._seeds.values()), {})))
        assert self._binding is not None
        bound, masks = (self._session, self._binding), list[Mask]()
        for dealer in sorted(self._masked):
            seed = self._join(dealer, self._seeds[dealer])
            if seed is None or commit_seed(self._context, dealer, seed) != self._adverts[dealer].commitment:
                raise SumRefusal(f"'{dealer}' dealt shares that do not give the seed of its mask.", dealer)
            masks.append((derive_self_mask(seed, *bound, dealer), False))
        for dealer in sorted(self._keys):
            private = self._join(dealer, self._keys[dealer])
            if private is None or find_public_key(private) != self._adverts[dealer].mask:
                raise SumRefusal(f"'{dealer}' dealt shares that do not give its mask key.", dealer)
            for name in sorted(self._masked):
                secret = agree(private, self._adverts[name].mask)
                masks.append((derive_pair_mask(secret, *bound, dealer, name), not adds(name, dealer)))
        apply_masks(self._total, masks)
        return self._total

    def _read_shares(self, giver: str, kind: str, texts: Mapping[str, Any]) -> Shares:
        """Shares by dealer, each as its dealer committed to it: whoever holds it has seen that it was."""
        half, word = (slice(KEY_BYTES), "seed") if kind == "seeds" else (slice(KEY_BYTES, None), "key")
        found = {}
        for dealer, text in texts.items():
            share = decode(text, giver, f"share of '{dealer}'", SHARE_BYTES)
            read_share(share, giver)
            committed = self._commitments.get((dealer, giver))  # none to itself
            hashed = commit_share(self._session, dealer, giver, word, share)
            if committed is not None and hashed != committed[half]:
                raise SumRefusal(f"'{giver}' gave a share of '{dealer}' that is not the one it got.", giver)
            found[dealer] = share
        return found

    def _join(self, dealer: str, shares: Shares) -> bytes | None:
        """The secret; None where it is none. The dealer's own share, which nobody saw, is the last resort."""
        chosen = sorted(shares, key=lambda giver: (giver == dealer, giver))[: self._threshold]
        numbers = number_members(self._adverts)
        secret = join_shares({numbers[giver]: int.from_bytes(shares[giver], "big") for giver in chosen})
        return secret.to_bytes(KEY_BYTES, "big") if secret < 2 ** (8 * KEY_BYTES) else None

    # Order

    def _admit(self, phase: str, name: str, seen: Any, among: Any = None) -> None:
        """Refuse what is not for now, not of a member who is still in, or there already."""
        if self._phase != phase:
            raise SumRefusal(f"a message of {phase} came in {self._phase}.", name)
        if among is not None:
            self._check_known(name, among)
        if name in seen:
            raise SumRefusal(f"'{name}' sent its message of {phase} twice.", name)

    @staticmethod
    def _check_known(name: str, among: Any) -> None:
        if name not in among:
            raise SumRefusal(f"'{check_name(name)}' is not a member of this sum, or no longer.", name)

    def _close(self, phase: str, found: int) -> None:
        """End a phase, if it is the present one and enough are left."""
        if self._phase == phase:
            if found < self._threshold:
                raise TooFewMembers(phase, found, self._threshold)
            if phase == ADVERTISE:
                check_threshold(self._threshold, found, phase)
                self._session = find_session(self._context, self._threshold, self._adverts)
            self._phase = PHASES[PHASES.index(phase) + 1]
        elif PHASES.index(self._phase) < PHASES.index(phase) or phase == UNMASK:
            raise SumRefusal(f"{phase} cannot be ended in {self._phase}.")
