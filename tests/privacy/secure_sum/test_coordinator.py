"""The server refuses what is not as it must be, in its member's name, and goes on without it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from summing import BINDING, CONTEXT, Sum
from wardround.privacy.secure_sum import Coordinator, LocalIdentity, Member, SumRefusal
from wardround.privacy.secure_sum import member as member_module
from wardround.privacy.secure_sum.shamir import split_secret

LIAR = LOST = "hospital-3"
JUNK: list[Any] = [None, 7, 10**400, "text", [], {}, {"a": 1}, "A" * 10**6, {"hospital-0": "ä"}]


@pytest.fixture
def five() -> Sum:
    return Sum()


def refuses(call: Callable[[], Any], words: str, member: str | None = LIAR) -> None:
    with pytest.raises(SumRefusal, match=words) as caught:
        call()
    assert caught.value.member == member


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_whatever_comes_is_refused_by_name_and_the_sum_goes_on(five: Sum, junk: Any) -> None:
    coordinator, liar = five.coordinator, five.members[LIAR]
    others = [name for name in five.names if name != LIAR]
    refuses(lambda: coordinator.add_advert(LIAR, junk), "'hospital-3'")
    five.advertise()
    refuses(lambda: coordinator.adverts() and coordinator.add_shares(LIAR, junk), "'hospital-3'")
    five.share()
    coordinator.begin(BINDING)
    refuses(lambda: coordinator.add_masked(LIAR, junk), "'hospital-3'")
    for name in five.names:
        coordinator.add_masked(name, five.mask_one(name))
    survivors = coordinator.survivors()
    refuses(
        lambda: coordinator.add_confirmation(LIAR, junk if junk != "text" else "A" * 10**4), "'hospital-3'"
    )
    liar.confirm(survivors)
    five.lose([LIAR])
    five.confirm()
    refuses(lambda: coordinator.confirmations() and coordinator.add_unmasked(LIAR, junk), "'hospital-3'")
    refuses(lambda: coordinator.add_unmasked(LIAR, {"seeds": junk, "keys": {}}), "'hospital-3'")
    refuses(
        lambda: coordinator.add_unmasked(LIAR, {"seeds": dict.fromkeys(survivors, junk), "keys": {}}),
        "'hospital-3'",
    )
    five.unmask()

    assert five.alive == others
    assert np.array_equal(coordinator.total(), five.plain(five.names))


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300, None, 3])
def test_a_name_that_is_none_is_refused(five: Sum, name: Any) -> None:
    with pytest.raises(SumRefusal, match="a member's name is"):
        five.coordinator.add_advert(name, five.members[LIAR].advertise())


def test_a_public_key_that_agrees_with_nobody_is_refused(five: Sum) -> None:
    advert = five.members[LIAR].advertise()
    zero = base64.b64encode(bytes(32)).decode()  # a point of small order

    for key in ("cipher", "mask"):
        refuses(lambda key=key: five.coordinator.add_advert(LIAR, {**advert, key: zero}), "not usable")


def test_a_copied_key_is_refused(five: Sum) -> None:
    advert = five.members["hospital-0"].advertise()
    five.coordinator.add_advert("hospital-0", advert)

    refuses(lambda: five.coordinator.add_advert(LIAR, advert), "same public key as 'hospital-0'")


def test_with_an_identity_signatures_are_verified_when_they_come() -> None:
    coordinator = Coordinator(CONTEXT, 3, 4, identity=LocalIdentity())
    member = Member(LIAR, context=b"another run", identity=LocalIdentity(), threshold=3)
    refuses(
        lambda: coordinator.add_advert(LIAR, member.advertise()), "signature of 'hospital-3' is not valid"
    )

    five = Sum()
    five.coordinator = Coordinator(CONTEXT, 3, 40, identity=LocalIdentity())
    five.run(upto="mask")
    survivors = five.coordinator.survivors()
    wrong = five.members[LIAR].confirm(survivors[1:])
    refuses(lambda: five.coordinator.add_confirmation(LIAR, wrong), "signature of 'hospital-3' is not valid")
    five.lose([LIAR])
    five.confirm()
    five.unmask()
    assert np.array_equal(five.coordinator.total(), five.plain(five.names))


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(39, np.uint32),
        np.zeros((40, 1), np.uint32),
        np.zeros(40, np.uint64),
        np.zeros(40, np.float32),
    ],
    ids=["short", "two axes", "64 bits", "float"],
)
def test_a_vector_of_another_length_or_kind_is_refused_and_not_added(five: Sum, wrong: np.ndarray) -> None:
    five.run(upto="share")
    five.coordinator.begin(BINDING)
    refuses(lambda: five.coordinator.add_masked(LIAR, wrong), "'hospital-3': its masked vector is")
    five.lose([LIAR])
    for name in five.alive:
        five.coordinator.add_masked(name, five.mask_one(name))
    five.confirm()
    five.unmask()

    assert np.array_equal(five.coordinator.total(), five.plain(five.alive))


def test_messages_out_of_turn_twice_or_of_strangers_are_refused(five: Sum) -> None:
    coordinator = five.coordinator
    with pytest.raises(SumRefusal, match="before the masks were bound"):
        coordinator.add_masked(LIAR, five.values[LIAR])
    refuses(lambda: coordinator.add_confirmation(LIAR, ""), "of ConsistencyCheck came in AdvertiseKeys")
    with pytest.raises(SumRefusal, match="MaskedInputCollection cannot be ended in AdvertiseKeys"):
        coordinator.survivors()
    five.run(upto="share", lost={"share": ["hospital-4"]})
    refuses(lambda: coordinator.add_shares(LIAR, {}), "sent its message of ShareKeys twice")
    refuses(lambda: coordinator.add_shares("stranger", {}), "'stranger' is not a member", "stranger")
    refuses(lambda: coordinator.shares_for("hospital-4"), "or no longer", "hospital-4")
    late = five.members["hospital-4"].share(coordinator.adverts())
    refuses(lambda: coordinator.add_shares("hospital-4", late), "of ShareKeys came in Masked", "hospital-4")
    five.mask()
    refuses(lambda: coordinator.add_masked(LIAR, five.values[LIAR]), "MaskedInputCollection twice")
    with pytest.raises(SumRefusal, match="bound already"):
        coordinator.begin(BINDING)
    five.confirm()
    refuses(lambda: coordinator.add_confirmation(LIAR, "AAAA"), "ConsistencyCheck twice")
    five.unmask()
    refuses(lambda: coordinator.add_unmasked(LIAR, {}), "Unmasking twice")
    coordinator.total()
    with pytest.raises(SumRefusal, match="Unmasking cannot be ended in done"):
        coordinator.total()


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_whoever_gives_a_share_that_it_did_not_get_is_named(five: Sum, kind: str) -> None:
    five.run(upto="confirm", lost={"mask": ["hospital-4"]})
    confirmations = five.coordinator.confirmations()
    reply = five.members[LIAR].unmask(confirmations)
    victim = {"seeds": "hospital-0", "keys": "hospital-4"}[kind]
    reply[kind][victim] = base64.b64encode(bytes(33)).decode()

    refuses(lambda: five.coordinator.add_unmasked(LIAR, reply), f"gave a share of '{victim}' that is not")
    five.lose([LIAR])
    five.unmask()

    assert np.array_equal(five.coordinator.total(), five.plain([f"hospital-{i}" for i in range(4)]))


@pytest.mark.parametrize("is_lost", [False, True], ids=["seed", "key"])
def test_whoever_dealt_shares_of_something_else_is_named(
    five: Sum, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    five.advertise()
    adverts = five.coordinator.adverts()
    for name in five.names:
        with monkeypatch.context() as patch:
            if name == LIAR:
                patch.setattr(member_module, "split_secret", lambda _, *more: split_secret(5, *more))
            five.coordinator.add_shares(name, five.members[name].share(adverts))
    five.lose([LIAR] if is_lost else [])
    five.mask()
    five.confirm()
    five.unmask()

    refuses(five.coordinator.total, "'hospital-3' dealt shares that do not give")


def test_a_false_share_of_its_own_seed_names_the_dealer(five: Sum) -> None:
    five.run(upto="confirm")
    confirmations = five.coordinator.confirmations()
    for name in (LIAR, "hospital-0", "hospital-1"):  # so few that its own share is needed
        reply = five.members[name].unmask(confirmations)
        reply["seeds"][name] = base64.b64encode(bytes(33)).decode() if name == LIAR else reply["seeds"][name]
        five.coordinator.add_unmasked(name, reply)

    refuses(five.coordinator.total, "'hospital-3' dealt shares")


def test_sums_that_cannot_be_are_refused() -> None:
    for wrong in ({"threshold": 1}, {"bits": 16}, {"length": -1}):
        with pytest.raises(SumRefusal, match="there is no secure sum"):
            Coordinator(CONTEXT, **{"threshold": 2, "length": 3, **wrong})
    four = Sum(count=4, threshold=2)
    four.advertise()
    with pytest.raises(SumRefusal, match="more than half"):
        four.coordinator.adverts()


def test_the_server_holds_one_vector_whatever_the_number_of_members() -> None:
    one = Sum(count=7, threshold=4)
    one.run(upto="mask")

    arrays = [value for value in vars(one.coordinator).values() if isinstance(value, np.ndarray)]
    assert [array.size for array in arrays] == [40]


# Signatures over all members, beside round 2


def collect(one: Sum) -> dict[str, str]:
    """The vectors of all, and what each signed beside it."""
    one.coordinator.begin(BINDING)
    signed = {}
    for name in one.alive:
        vector = one.mask_one(name)
        signed[name] = one.members[name].confirm_members()
        one.coordinator.add_masked(name, vector, signed[name])
    return signed


@pytest.fixture
def six() -> Sum:
    one = Sum(count=6, threshold=4)
    one.run(upto="share")
    return one


def test_where_nobody_is_lost_the_round_of_signatures_is_skipped() -> None:
    five = Sum()
    five.coordinator = Coordinator(b"run 1, round 1", 3, 40, identity=LocalIdentity())
    five.run(upto="share")
    signed = collect(five)

    assert five.coordinator.skip_confirming() and five.coordinator.confirmations() == signed
    five.lose(["hospital-1", "hospital-4"])  # the rest are enough to unmask all
    five.unmask()
    assert np.array_equal(five.coordinator.total(), five.plain(five.names))


def test_where_one_is_lost_the_first_signatures_unmask_nothing(six: Sum) -> None:
    six.lose([LOST])
    signed = collect(six)
    six.coordinator.survivors()

    assert not six.coordinator.skip_confirming()
    six.confirm()
    for name in six.alive:  # who has signed the shorter list is bound to it
        with pytest.raises(SumRefusal, match="fewer than 4 members confirmed"):
            six.members[name].unmask(signed)


def test_where_one_is_lost_the_sum_is_of_the_others(six: Sum) -> None:
    six.lose([LOST])
    collect(six)
    six.confirm()
    six.unmask()
    assert np.array_equal(six.coordinator.total(), six.plain(six.alive))


def test_signatures_of_the_one_round_do_not_count_in_the_other(six: Sum) -> None:
    collect(six)
    others = six.names[1:]
    later = {name: six.members[name].confirm(six.names) for name in others}

    with pytest.raises(SumRefusal, match="fewer than 4 members confirmed"):
        six.members[six.names[0]].unmask(later)


def test_two_lists_never_give_the_seed_and_the_key_of_one_member(six: Sum) -> None:
    """What a lying server can do at most: some unmask the list of all, the others one without a victim."""
    signed = collect(six)
    without = [name for name in six.names if name != LOST]
    bound, free = without[:4], without[4:]
    later = {name: six.members[name].confirm(without) for name in bound}
    given = [six.members[name].unmask(later) for name in bound]
    given += [six.members[name].unmask(signed) for name in (*free, LOST)]

    seeds = sum(LOST in one["seeds"] for one in given)
    keys = sum(LOST in one["keys"] for one in given)
    assert (seeds, keys) == (2, 4)  # of four that each would take
    for name in six.names:
        with pytest.raises(SumRefusal, match="not its turn"):
            six.members[name].unmask(signed)


def test_signatures_of_another_sum_do_not_count(six: Sum) -> None:
    other = Sum(count=6, threshold=4)
    other.run(upto="share")
    replayed = collect(other)
    collect(six)

    with pytest.raises(SumRefusal, match="fewer than 4 members confirmed"):
        six.members[LOST].unmask(replayed)


def test_a_member_told_of_fewer_signs_another_list(six: Sum) -> None:
    shares = six.coordinator.shares_for(LOST)
    fewer = {name: text for name, text in shares.items() if name != "hospital-0"}
    six.members[LOST].mask(six.values[LOST], fewer, binding=BINDING)
    own = six.members[LOST].confirm_members()
    six.lose([LOST])
    signed = collect(six)

    with pytest.raises(SumRefusal, match="are of members who are not in the sum"):
        six.members[LOST].unmask(signed)
    six.members["hospital-0"].unmask({**signed, LOST: own})  # five others are enough, and without it


@pytest.mark.parametrize("wrong", ["no base64", "AAAA" * 1000, 7])
def test_a_signature_that_is_none_leaves_its_vector_out(six: Sum, wrong: object) -> None:
    six.coordinator.begin(BINDING)
    vector = six.mask_one(LOST)

    with pytest.raises(SumRefusal, match="confirmation is not") as caught:
        six.coordinator.add_masked(LOST, vector, wrong)  # type: ignore[arg-type]
    assert caught.value.member == LOST and not six.coordinator._total.any()


def test_with_an_identity_a_wrong_signature_leaves_its_vector_out() -> None:
    five = Sum()
    five.coordinator = Coordinator(b"run 1, round 1", 3, 40, identity=LocalIdentity())
    five.run(upto="share")
    five.coordinator.begin(BINDING)
    vector, other = five.mask_one(LOST), five.mask_one("hospital-0")

    with pytest.raises(SumRefusal, match="signature of 'hospital-3' is not valid"):
        five.coordinator.add_masked(LOST, vector, five.members["hospital-0"].confirm_members())
    five.coordinator.add_masked("hospital-0", other, five.members["hospital-0"].confirm_members())


def test_the_list_is_signed_in_its_turn_alone(six: Sum) -> None:
    with pytest.raises(SumRefusal, match="not its turn"):
        six.members[LOST].confirm_members()
    collect(six)
    six.members[LOST].confirm(six.names)
    with pytest.raises(SumRefusal, match="not its turn"):
        six.members[LOST].confirm_members()
