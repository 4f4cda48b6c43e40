"""A member refuses whatever a lying server or another member tells it, and names whom it can."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from summing import BINDING, CONTEXT, Sum
from wardround.privacy.secure_sum import LocalIdentity, Member, SumRefusal, TooFewMembers

LIAR, VICTIM = "hospital-3", "hospital-0"


def flip(text: str, byte: int = -1) -> str:
    """The text of the same bytes with one bit changed."""
    content = bytearray(base64.b64decode(text))
    content[byte] ^= 1
    return base64.b64encode(content).decode()


@pytest.fixture
def five() -> Sum:
    return Sum()


# AdvertiseKeys


def test_adverts_are_fresh_in_every_sum() -> None:
    identity = LocalIdentity()
    first, second = (
        Member("north", context=CONTEXT, identity=identity, threshold=2).advertise() for _ in "12"
    )

    assert first["certificate"] == second["certificate"]
    assert all(first[key] != second[key] for key in ("cipher", "mask", "seed", "signature"))


# ShareKeys


@pytest.mark.parametrize("field", ["cipher", "mask", "seed", "signature"])
def test_a_changed_advert_is_refused_by_name(five: Sum, field: str) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    adverts[LIAR][field] = flip(adverts[LIAR][field], 5)

    with pytest.raises(SumRefusal, match="signature of 'hospital-3' is not valid") as caught:
        five.members[VICTIM].share(adverts)

    assert caught.value.member == LIAR


def test_a_changed_advert_of_my_own_is_refused(five: Sum) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    other = Member(VICTIM, context=CONTEXT, identity=LocalIdentity(), threshold=3)
    adverts[VICTIM] = other.advertise()

    with pytest.raises(SumRefusal, match="advert of 'hospital-0' is not the one that it sent"):
        five.members[VICTIM].share(adverts)


def test_swapped_adverts_are_refused(five: Sum) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    adverts[LIAR], adverts["hospital-4"] = adverts["hospital-4"], adverts[LIAR]

    with pytest.raises(SumRefusal, match="signature of 'hospital-[34]' is not valid"):
        five.members[VICTIM].share(adverts)


def test_an_advert_of_another_context_is_refused(five: Sum) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    adverts[LIAR] = Member(LIAR, context=b"round 2", identity=LocalIdentity(), threshold=3).advertise()

    with pytest.raises(SumRefusal, match="signature of 'hospital-3' is not valid"):
        five.members[VICTIM].share(adverts)


def test_a_key_that_two_members_have_is_refused(five: Sum) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    adverts["twin"] = adverts[LIAR]
    del adverts["hospital-4"]

    with pytest.raises(SumRefusal, match="'twin' has the same public key as 'hospital-3'"):
        five.members[VICTIM].share(adverts)


@pytest.mark.parametrize("wrong", [{}, {"cipher": "x"}, "text", None, 10**400])
def test_a_malformed_advert_is_refused_by_name(five: Sum, wrong: object) -> None:
    five.advertise()

    with pytest.raises(SumRefusal, match="'hospital-3'") as caught:
        five.members[VICTIM].share({**five.coordinator.adverts(), LIAR: wrong})  # type: ignore[dict-item]

    assert caught.value.member == LIAR


def test_a_threshold_that_two_halves_could_reach_is_refused() -> None:
    members = {
        name: Member(name, context=CONTEXT, identity=LocalIdentity(), threshold=2)
        for name in ("a", "b", "c", "d")
    }
    adverts = {name: member.advertise() for name, member in members.items()}

    with pytest.raises(
        SumRefusal, match="threshold of a secure sum of 4 members is 2; it must be more than half"
    ):
        members["a"].share(adverts)
    with pytest.raises(SumRefusal, match="at least 2"):
        Member("a", context=CONTEXT, identity=LocalIdentity(), threshold=1)


def test_fewer_adverts_than_the_threshold_are_refused(five: Sum) -> None:
    five.advertise()
    adverts = {name: advert for name, advert in five.coordinator.adverts().items() if name in (VICTIM, LIAR)}

    with pytest.raises(TooFewMembers, match="ShareKeys: 2 members are left, and a secure sum needs 3"):
        five.members[VICTIM].share(adverts)


def test_a_list_that_others_were_not_told_makes_their_shares_unreadable(five: Sum) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    four = {name: advert for name, advert in adverts.items() if name != "hospital-4"}
    texts = {name: five.members[name].share(adverts if name == LIAR else four) for name in four}

    with pytest.raises(SumRefusal, match="'hospital-3' encrypted to 'hospital-0' do not decrypt"):
        five.members[VICTIM].mask(
            five.values[VICTIM],
            {name: texts[name][VICTIM] for name in four if name != VICTIM},
            binding=BINDING,
        )


# MaskedInputCollection


@pytest.mark.parametrize("byte", [0, 40, 70, -1], ids=["commitment", "other commitment", "nonce", "tag"])
def test_shares_that_do_not_decrypt_are_refused_by_name(five: Sum, byte: int) -> None:
    five.run(upto="share")
    shares = five.coordinator.shares_for(VICTIM)
    shares[LIAR] = flip(shares[LIAR], byte)

    with pytest.raises(SumRefusal, match="'hospital-3' encrypted to 'hospital-0' do not decrypt") as caught:
        five.members[VICTIM].mask(five.values[VICTIM], shares, binding=BINDING)

    assert caught.value.member == LIAR


def test_shares_other_than_committed_to_are_refused_by_name(
    five: Sum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(five.members[LIAR], "_commit", lambda *_: bytes(64))
    five.run(upto="share")

    with pytest.raises(SumRefusal, match="shares of 'hospital-3' are not those it committed to") as caught:
        five.mask_one(VICTIM)

    assert caught.value.member == LIAR


def test_replayed_shares_do_not_decrypt(five: Sum) -> None:
    before = Sum()
    for one in (before, five):
        one.run(upto="share")
    shares = five.coordinator.shares_for(VICTIM)
    shares[LIAR] = before.coordinator.shares_for(VICTIM)[LIAR]

    with pytest.raises(SumRefusal, match="'hospital-3' encrypted to 'hospital-0' do not decrypt"):
        five.members[VICTIM].mask(five.values[VICTIM], shares, binding=BINDING)


def test_shares_for_another_member_do_not_decrypt(five: Sum) -> None:
    five.run(upto="share")
    shares = five.coordinator.shares_for(VICTIM)
    shares[LIAR] = five.coordinator.shares_for("hospital-4")[LIAR]

    with pytest.raises(SumRefusal, match="do not decrypt"):
        five.members[VICTIM].mask(five.values[VICTIM], shares, binding=BINDING)


def test_too_few_or_foreign_dealers_are_refused() -> None:
    for change, reason in (
        (lambda shares: {LIAR: shares[LIAR]}, "MaskedInputCollection: 2 members are left"),
        (lambda shares: {**shares, "stranger": shares[LIAR]}, "members who advertised no keys"),
        (lambda shares: {**shares, VICTIM: shares[LIAR]}, "members who advertised no keys"),
        (lambda shares: {**shares, LIAR: 10**400}, "'hospital-3': its encrypted shares is not"),
    ):
        five = Sum()
        five.run(upto="share")
        with pytest.raises(SumRefusal, match=reason):
            five.members[VICTIM].mask(
                five.values[VICTIM], change(five.coordinator.shares_for(VICTIM)), binding=BINDING
            )


def test_only_vectors_of_unsigned_numbers_are_masked(five: Sum) -> None:
    five.run(upto="share")

    with pytest.raises(SumRefusal, match="float64 with 2 axes"):
        five.members[VICTIM].mask(np.zeros((2, 2)), five.coordinator.shares_for(VICTIM), binding=BINDING)


def test_masking_leaves_the_vector_as_it_was(five: Sum) -> None:
    before = five.values[VICTIM].copy()
    five.run(upto="mask")

    assert np.array_equal(five.values[VICTIM], before)


# ConsistencyCheck


@pytest.mark.parametrize(
    ("survivors", "reason"),
    [
        (["hospital-1", "hospital-2", "hospital-3"], "are not 'hospital-0' and others"),
        (["hospital-0", "hospital-1", "stranger"], "are not 'hospital-0' and others"),
        (["hospital-0", "hospital-0", "hospital-1"], "are not 'hospital-0' and others"),
        (["hospital-0", "hospital-1"], "ConsistencyCheck: 2 members are left"),
        (["hospital-0", "hospital-1", 7], "are not 'hospital-0' and others"),
    ],
    ids=["without me", "a stranger", "twice", "too few", "a number"],
)
def test_lists_that_cannot_be_are_not_confirmed(five: Sum, survivors: list[str], reason: str) -> None:
    five.run(upto="mask")

    with pytest.raises(SumRefusal, match=reason):
        five.members[VICTIM].confirm(survivors)


# Unmasking


def test_different_survivors_told_to_different_members_unmask_nothing() -> None:
    """The attack that the consistency check is for: with both lists the server would have seed and key."""
    six = Sum(count=6, threshold=4)
    six.run(upto="mask")
    all_six, without = list(six.names), [name for name in six.names if name != LIAR]
    told = {name: all_six if number < 3 else without for number, name in enumerate(without)}
    confirmations = {name: six.members[name].confirm(told[name]) for name in without}

    for name in without:
        with pytest.raises(SumRefusal, match="fewer than 4 members confirmed who is in the sum"):
            six.members[name].unmask(confirmations)


def test_a_wrong_confirmation_does_not_count_and_is_named(five: Sum) -> None:
    five.run(upto="confirm")
    confirmations = five.coordinator.confirmations()
    confirmations[LIAR] = flip(confirmations[LIAR])

    assert five.members["hospital-1"].unmask(confirmations)  # four of five are enough
    two_and_liar = {name: confirmations[name] for name in (VICTIM, "hospital-1", LIAR)}
    with pytest.raises(SumRefusal, match="fewer than 3.*told: hospital-3") as caught:
        five.members[VICTIM].unmask(two_and_liar)
    assert caught.value.member == LIAR


def test_confirmations_of_strangers_are_refused(five: Sum) -> None:
    five.run(upto="confirm")

    with pytest.raises(SumRefusal, match="not in the sum"):
        five.members[VICTIM].unmask({**five.coordinator.confirmations(), "stranger": "AAAA"})


def test_of_each_member_the_seed_or_the_key_is_given_never_both(five: Sum) -> None:
    five.run(upto="confirm", lost={"mask": [LIAR]})

    given = five.members[VICTIM].unmask(five.coordinator.confirmations())

    assert set(given["seeds"]) == set(five.names) - {LIAR}
    assert set(given["keys"]) == {LIAR}


def test_every_call_is_answered_once_and_in_order(five: Sum) -> None:
    five.run()
    member = five.members[VICTIM]
    shares, confirmations = {}, five.coordinator.confirmations()
    calls = {
        "AdvertiseKeys": member.advertise,
        "ShareKeys": lambda: member.share(five.coordinator.adverts()),
        "MaskedInputCollection": lambda: member.mask(five.values[VICTIM], shares, binding=BINDING),
        "ConsistencyCheck": lambda: member.confirm(five.names),
        "Unmasking": lambda: member.unmask(confirmations),
    }
    for phase, call in calls.items():
        with pytest.raises(SumRefusal, match=f"asked for {phase} when it was not its turn"):
            call()


def test_a_call_that_was_refused_ends_the_member_and_its_secrets(five: Sum) -> None:
    five.run(upto="mask")
    member = five.members[VICTIM]
    with pytest.raises(SumRefusal):
        member.confirm([])

    assert not member._shares and not member._secrets
    with pytest.raises(SumRefusal, match="not its turn"):
        member.confirm(five.names)


def test_secrets_are_gone_when_they_were_used(five: Sum) -> None:
    five.run(upto="mask")
    assert not any(member._secrets for member in five.members.values())
    five.confirm()
    five.unmask()
    assert not any(member._shares for member in five.members.values())
