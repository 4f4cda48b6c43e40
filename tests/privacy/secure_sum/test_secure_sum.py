"""The protocol as a whole: the sum is exact, whoever is lost, and the server sees nothing else."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from summing import BINDING, CONTEXT, PHASES, Sum
from wardround.privacy.secure_sum import (
    Coordinator,
    FixedPoint,
    LocalIdentity,
    Member,
    SumRefusal,
    TooFewMembers,
    primitives,
)

CHANCE = 1e-6  # of a sound generator to fail a test


@pytest.mark.parametrize(
    ("count", "threshold", "length", "bits"),
    [(3, 2, 1, 32), (3, 3, 17, 64), (4, 3, 70_001, 32), (7, 4, 33_000, 64), (12, 12, 5, 32), (5, 3, 0, 32)],
)
def test_the_total_is_the_exact_sum(count: int, threshold: int, length: int, bits: int) -> None:
    one = Sum(count, threshold, length, bits)
    one.run()

    total = one.coordinator.total()

    assert total.dtype == one.values[one.names[0]].dtype
    assert np.array_equal(total, one.plain(one.names))


@pytest.mark.parametrize("lost", [["hospital-0"], ["hospital-1", "hospital-4"]], ids=["one", "two"])
@pytest.mark.parametrize("before", PHASES)
def test_a_sum_closes_without_one_or_two_of_five_in_any_phase(before: str, lost: list[str]) -> None:
    one = Sum()
    one.run(lost={before: lost})

    have_masked = one.names if before in ("confirm", "unmask") else one.alive

    assert one.coordinator.survivors() == have_masked
    assert np.array_equal(one.coordinator.total(), one.plain(have_masked))


@given(st.integers(3, 9), st.data())
@settings(deadline=None, max_examples=30)
def test_whoever_is_lost_in_whatever_phase_the_sum_is_of_those_who_masked(
    count: int, data: st.DataObject
) -> None:
    threshold = data.draw(st.integers(count // 2 + 1, count))
    one = Sum(count, threshold, length=3)
    ending = data.draw(st.permutations(one.names))[threshold:]
    when = {name: data.draw(st.sampled_from(PHASES)) for name in ending}

    one.run(lost={phase: [name for name in when if when[name] == phase] for phase in PHASES})

    masked = [name for name in one.names if when.get(name, "unmask") in ("confirm", "unmask")]
    assert one.coordinator.survivors() == masked
    assert np.array_equal(one.coordinator.total(), one.plain(masked))


@pytest.mark.parametrize(("before", "after"), [*pairwise([*PHASES, "total"])])
def test_below_the_threshold_the_sum_ends_in_that_phase(before: str, after: str) -> None:
    one = Sum()
    lost = {before: ["hospital-0", "hospital-1", "hospital-2"]}
    said = dict(
        zip(PHASES, ["AdvertiseKeys", "ShareKeys", "MaskedInput", "Consistency", "Unmasking"], strict=True)
    )

    with pytest.raises(TooFewMembers, match=f"{said[before]}.*: 2 members are left.*needs 3") as caught:
        one.run(upto=after if after != "total" else "unmask", lost=lost)
        one.coordinator.total()

    assert caught.value.phase.startswith(said[before])


def test_what_the_server_sees_of_one_vector_is_uniform() -> None:
    one = Sum(count=3, threshold=2, length=10**6)
    one.values["hospital-1"] = np.full(10**6, 42, np.uint32)
    one.run(upto="share")

    seen = one.mask_one("hospital-1").view(np.uint8).reshape(-1, 4)

    for byte in (0, 3):  # the low and the high one
        counts = np.bincount(seen[:, byte], minlength=256)
        assert stats.chisquare(counts).pvalue > CHANCE


def test_a_member_told_another_binding_spoils_the_sum_and_reveals_nothing() -> None:
    one = Sum(length=10**5)
    one.run(upto="share")
    one.coordinator.begin(BINDING)
    for name in one.names:
        told = b"other weights" if name == "hospital-2" else BINDING
        one.coordinator.add_masked(name, one.mask_one(name, told))
    one.confirm()
    confirmations = one.coordinator.confirmations()

    with pytest.raises(SumRefusal, match="fewer than 3 members confirmed.*Not over the list"):
        one.members["hospital-2"].unmask(confirmations)
    for name in one.names:
        if name != "hospital-2":  # four of five agree, so they do unmask
            one.coordinator.add_unmasked(name, one.members[name].unmask(confirmations))
    wrong = one.coordinator.total()

    assert stats.chisquare(np.bincount(wrong >> 24, minlength=256)).pvalue > CHANCE
    assert not np.array_equal(wrong, one.plain(one.names))


def test_numbers_of_tensors_come_back_within_the_stated_error() -> None:
    fixed, draws = FixedPoint(2.0**-20), np.random.default_rng(0)
    one = Sum(count=4, threshold=3, length=1000)
    plain = {name: draws.normal(size=1000).astype(np.float32) for name in one.names}
    one.values = {name: fixed.encode(values) for name, values in plain.items()}
    one.run()

    found = fixed.decode(one.coordinator.total())

    expected = sum(values.astype(np.float64) for values in plain.values())
    assert np.abs(found - expected).max() <= fixed.error(4)


def test_identities_of_simulations_sign_for_themselves() -> None:
    one, other = LocalIdentity(), LocalIdentity()
    signature = one.sign(b"text")

    other.verify("north", one.certificate, signature, b"text")
    for certificate, data in ((other.certificate, b"text"), (one.certificate, b"test"), ("ä", b"text")):
        with pytest.raises(SumRefusal, match="signature of 'north' is not valid") as caught:
            other.verify("north", certificate, signature, data)
        assert caught.value.member == "north"


def test_without_the_library_a_sum_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = LocalIdentity()
    monkeypatch.setattr(primitives, "IS_INSTALLED", False)
    for build in (
        lambda: Member("north", context=CONTEXT, identity=identity, threshold=2),
        lambda: Coordinator(CONTEXT, 2, 1),
        LocalIdentity,
    ):
        with pytest.raises(Exception, match=r"pip install 'wardround\[privacy\]'"):
            build()


def test_the_room_is_imported_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("cryptography", "wardround.privacy.secure_sum"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)

    import wardround.privacy.secure_sum as room

    assert not room.member.require_library.__globals__["IS_INSTALLED"]
