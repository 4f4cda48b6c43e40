"""One client in one sum: calls in the order of the paper's rounds, each once; `confirm` only where it is
needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from wardround.privacy.secure_sum.fixed_point import UNSIGNED
from wardround.privacy.secure_sum.identity import Identity
from wardround.privacy.secure_sum.masks import adds, apply_masks, derive_pair_mask, derive_self_mask
from wardround.privacy.secure_sum.primitives import (
    KEY_BYTES,
    agree,
    derive_key,
    draw_secret,
    make_key_pair,
    open_sealed,
    require_library,
    seal,
)
from wardround.privacy.secure_sum.refusals import SumRefusal, TooFewMembers
from wardround.privacy.secure_sum.shamir import SHARE_BYTES, split_secret
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
    check_name,
    check_threshold,
    commit_seed,
    commit_share,
    decode,
    encode,
    find_session,
    number_members,
    parse_advert,
    read_share,
    state_advert,
    state_members,
    state_survivors,
    write_advert,
)


class Member:
    """A client's part, with secrets that are in this object alone and only for this sum.

    context: what this sum is (run, round, purpose), the same for all. threshold: so many members at least are
    in the sum and unmask it; more than half of all. A call that is refused ends the member.
    """

    def __init__(self, name: str, *, context: bytes, identity: Identity, threshold: int) -> None:
        require_library()
        if threshold < 2:
            raise SumRefusal(f"the threshold of a secure sum is {threshold}; it must be at least 2.")
        self.name = check_name(name)
        self._context = bytes(context)
        self._identity = identity
        self._threshold = threshold
        self._phase: str | None = ADVERTISE
        self._adverts: dict[str, Advert] = {}
        self._session = self._binding = b""
        self._secrets: dict[
            str, bytes
        ] = {}  # private keys "cipher" and "mask", and the "seed" of the self mask
        self._shares: dict[
            str, tuple[bytes, bytes]
        ] = {}  # that others dealt to me: of their seed, of their key
        self.survivors: frozenset[str] = frozenset()  # those in the sum, as far as I was told
        self._statement = b""  # what others must have signed before anything is unmasked

    def advertise(self) -> dict[str, str]:
        """Round 0, AdvertiseKeys: fresh public keys and a commitment to the seed of the self mask, signed."""
        with self._in_phase(ADVERTISE):
            cipher, cipher_public = make_key_pair()
            mask, mask_public = make_key_pair()
            self._secrets = {"cipher": cipher, "mask": mask, "seed": draw_secret()}
            commitment = commit_seed(self._context, self.name, self._secrets["seed"])
            advert = Advert(cipher_public, mask_public, commitment, self._identity.certificate, b"")
            signature = self._identity.sign(state_advert(self._context, self.name, advert))
            self._adverts = {self.name: advert._replace(signature=signature)}
            return write_advert(self._adverts[self.name])

    def share(self, adverts: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Round 1, ShareKeys: shares of the mask key and of the seed, encrypted to each other member."""
        with self._in_phase(SHARE):
            self._adverts = self._check_adverts(adverts)
            self._session = find_session(self._context, self._threshold, self._adverts)
            count = len(self._adverts)
            dealt = [
                [
                    number.to_bytes(SHARE_BYTES, "big")
                    for number in split_secret(value, self._threshold, count)
                ]
                for value in (int.from_bytes(self._secrets[kind], "big") for kind in ("seed", "mask"))
            ]
            texts = {}
            for other, number in number_members(self._adverts).items():
                seed_share, key_share = (shares[number - 1] for shares in dealt)
                if other == self.name:
                    self._shares[other] = (seed_share, key_share)
                else:
                    texts[other] = encode(self._seal(other, seed_share, key_share))
            return texts

    def mask(
        self, values: np.ndarray, shares: Mapping[str, str], *, binding: bytes, in_place: bool = False
    ) -> np.ndarray:
        """Round 2, MaskedInputCollection: the vector under the self mask and those of all pairs.

        shares: what the others encrypted to me, whose names make the list of members. binding: what all must
        have been told alike, such as weights; masks of members who were told different things do not cancel.
        in_place: the vector itself is masked, which spares a second one.
        """
        with self._in_phase(MASK):
            if values.ndim != 1 or values.dtype not in UNSIGNED.values():
                raise SumRefusal(f"a vector to be masked is {values.dtype} with {values.ndim} axes.")
            self._binding = bytes(binding)
            self._open_shares(shares)
            masks = [(derive_self_mask(self._secrets["seed"], *self._bound, self.name), True)]
            for other in sorted(shares):
                secret = self._agree("mask", other)
                masks.append(
                    (derive_pair_mask(secret, *self._bound, self.name, other), adds(self.name, other))
                )
            self._secrets = {}
            masked = values if in_place else np.array(values)
            apply_masks(masked, masks)
            self.survivors = frozenset(self._shares)
            self._statement = state_members(*self._bound, self.survivors)
            return masked

    def confirm_members(self) -> str:
        """Beside round 2: a signature over all members who shared, which does if none of them is lost."""
        if self._phase != CONFIRM:
            raise self._refuse_turn(CONFIRM)
        return encode(self._identity.sign(self._statement))

    def confirm(self, survivors: Sequence[str]) -> str:
        """Round 3, ConsistencyCheck: a signature over the members whose vectors are in the sum.

        From here on the signatures of round 2 count no more.
        """
        with self._in_phase(CONFIRM):
            told = frozenset(name for name in survivors if isinstance(name, str))
            if len(told) != len(survivors) or not told <= self._shares.keys() or self.name not in told:
                raise SumRefusal(f"those in the sum are not '{self.name}' and others who shared their keys.")
            if len(told) < self._threshold:
                raise TooFewMembers(CONFIRM, len(told), self._threshold)
            self.survivors = told
            self._statement = state_survivors(*self._bound, told)
            return encode(self._identity.sign(self._statement))

    def unmask(self, confirmations: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Round 4, Unmasking: shares of the seeds of those in the sum, and of the keys of those who are not.

        Only if enough members signed the same list, in round 3, or, where that was left out, in round 2. A
        signature that is not over it, or of the other round, does not count.
        """
        with self._in_phase(UNMASK if self._phase == UNMASK else CONFIRM, UNMASK):
            if not isinstance(confirmations, Mapping) or not confirmations.keys() <= self.survivors:
                raise SumRefusal("confirmations are of members who are not in the sum.")
            wrong = [name for name, text in confirmations.items() if not self._is_confirmed(name, text)]
            if len(confirmations) - len(wrong) < self._threshold:
                reason = f" Not over the list that I was told: {', '.join(sorted(wrong))}." if wrong else ""
                raise SumRefusal(
                    f"{UNMASK}: fewer than {self._threshold} members confirmed who is in the sum.{reason}",
                    wrong[0] if len(wrong) == 1 else None,
                )
            held, self._shares = self._shares, {}
            return {
                "seeds": {name: encode(held[name][0]) for name in sorted(self.survivors)},
                "keys": {name: encode(held[name][1]) for name in sorted(held.keys() - self.survivors)},
            }

    @contextmanager
    def _in_phase(self, *phases: str) -> Iterator[None]:
        """Each phase once, in order; one that fails is the last, and its secrets go.

        phases: the present one, and any that are skipped up to the one that is asked for.
        """
        phase = phases[-1]
        if self._phase != phases[0]:
            raise self._refuse_turn(phase)
        self._phase = None
        try:
            yield
        except BaseException:
            self._secrets, self._shares = {}, {}
            raise
        self._phase = PHASES[PHASES.index(phase) + 1]

    def _refuse_turn(self, phase: str) -> SumRefusal:
        return SumRefusal(f"'{self.name}' was asked for {phase} when it was not its turn.")

    @property
    def _bound(self) -> tuple[bytes, bytes]:
        return self._session, self._binding

    def _check_adverts(self, adverts: Mapping[str, Any]) -> dict[str, Advert]:
        """All of them, parsed: mine as I made it, the others signed by those whom they name."""
        if not isinstance(adverts, Mapping) or len(adverts) > MOST_MEMBERS:
            raise SumRefusal(f"adverts are not a mapping of at most {MOST_MEMBERS} members.")
        found = {check_name(name): parse_advert(name, advert) for name, advert in adverts.items()}
        if found.get(self.name) != self._adverts[self.name]:
            raise SumRefusal(f"the advert of '{self.name}' is not the one that it sent.")
        check_threshold(self._threshold, len(found), SHARE)
        check_distinct(found)
        for name, advert in found.items():
            statement = state_advert(self._context, name, advert)
            self._identity.verify(name, advert.certificate, advert.signature, statement)
        return found

    def _agree(self, kind: str, other: str) -> bytes:
        """The secret shared with another member; kind: of which of its two keys."""
        try:
            return agree(self._secrets[kind], getattr(self._adverts[other], kind))
        except ValueError:
            raise SumRefusal(f"the {kind} key of '{other}' is not usable.", other) from None

    def _derive_cipher(self, dealer: str, holder: str) -> bytes:
        """The key of one message between me and another member, for one direction."""
        secret = self._agree("cipher", holder if dealer == self.name else dealer)
        return derive_key(secret, "wardround-sum-1 cipher", self._session, dealer, holder)

    def _seal(self, other: str, seed_share: bytes, key_share: bytes) -> bytes:
        commitments = self._commit(self.name, other, seed_share, key_share)
        return commitments + seal(self._derive_cipher(self.name, other), seed_share + key_share, commitments)

    def _commit(self, dealer: str, holder: str, seed_share: bytes, key_share: bytes) -> bytes:
        pairs = (("seed", seed_share), ("key", key_share))
        return b"".join(commit_share(self._session, dealer, holder, kind, share) for kind, share in pairs)

    def _open_shares(self, texts: Mapping[str, str]) -> None:
        """What was dealt to me, decrypted; a dealer whose shares are not as committed to is named."""
        if not isinstance(texts, Mapping) or not texts.keys() <= self._adverts.keys() - {self.name}:
            raise SumRefusal("shares are of members who advertised no keys.")
        if len(texts) + 1 < self._threshold:
            raise TooFewMembers(MASK, len(texts) + 1, self._threshold)
        for dealer, text in texts.items():
            content = decode(text, dealer, "encrypted shares", SEALED_BYTES)
            commitments, sealed = content[: 2 * KEY_BYTES], content[2 * KEY_BYTES :]
            try:
                opened = open_sealed(self._derive_cipher(dealer, self.name), sealed, commitments)
            except ValueError:
                raise SumRefusal(
                    f"the shares that '{dealer}' encrypted to '{self.name}' do not decrypt.", dealer
                ) from None
            pair = opened[:SHARE_BYTES], opened[SHARE_BYTES:]
            if self._commit(dealer, self.name, *pair) != commitments:
                raise SumRefusal(f"the shares of '{dealer}' are not those it committed to.", dealer)
            for share in pair:
                read_share(share, dealer)
            self._shares[dealer] = pair

    def _is_confirmed(self, name: str, text: str) -> bool:
        try:
            signature = decode(text, name, "confirmation", SIGNATURE_BYTES, or_less=True)
            self._identity.verify(name, self._adverts[name].certificate, signature, self._statement)
        except SumRefusal:
            return False
        return True
