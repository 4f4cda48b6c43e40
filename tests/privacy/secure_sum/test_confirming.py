"""Members sign the list of all of them beside their vectors; the round for it is needed if one is lost."""

from __future__ import annotations

import numpy as np
import pytest

from summing import BINDING, Sum
from wardround.privacy.secure_sum import Coordinator, LocalIdentity, SumRefusal

LOST = "hospital-3"


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
