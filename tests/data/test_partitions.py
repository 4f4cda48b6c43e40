"""Partitions: whole groups to clients, by the law that was asked for; shifts that do what they say."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.data.federation_file import PartitionSettings, SplitSettings
from wardround.data.listing import Entry
from wardround.data.partitions import (
    SHIFTS,
    Description,
    apply_shift,
    draw,
    make_shift,
    partition,
    read_shift,
    summarise,
)
from wardround.data.splits import assign
from wardround.errors import ConfigError, DataError

HERE = Path(__file__).parent


def entries(sizes: list[int], client: str = "vanderbilt", **columns: str) -> list[Entry]:
    return [
        Entry(
            client,
            f"g{group}c{case}",
            (Path(f"{client}{group}-{case}"),),
            Path("l"),
            f"g{group}",
            None,
            columns,
        )
        for group, size in enumerate(sizes)
        for case in range(size)
    ]


def never(entry: Entry) -> Description:
    raise AssertionError("only a dirichlet partition looks at labels")


def by_number(entry: Entry) -> Description:
    """Foreground grows with the group's number; class 2 is in every third group."""
    number = int(entry.group[1:])
    return Description(number / 100, (1, 2) if number % 3 == 0 else (1,))


def deal(cases: list[Entry], describe: Any = never, **values: Any) -> list[Entry]:
    return partition(cases, PartitionSettings(**values), describe)


def sizes(cases: list[Entry]) -> list[int]:
    found = Counter(case.client for case in cases)
    return [found[name] for name in sorted(found)]


def files(cases: list[Entry]) -> list[Path]:
    return sorted(case.images[0] for case in cases)


def homes(cases: list[Entry]) -> dict[Path, str]:
    return {case.images[0]: case.client for case in cases}


# Kinds


def test_natural_leaves_the_clients_as_they_are() -> None:
    cases = [*entries([1, 1], "a"), *entries([2], "b")]
    assert deal(cases) == cases


def test_iid_gives_every_client_as_many_cases() -> None:
    assert sizes(deal(entries([1] * 40), kind="iid", clients=4)) == [10] * 4
    assert sizes(deal(entries([1] * 10), kind="iid", clients=4)) == [3, 3, 2, 2]


def test_quantity_follows_the_power_law_above_three_groups_each() -> None:
    found = sizes(deal(entries([1] * 1000), kind="quantity", clients=5, skew=1.5))
    law = np.arange(1, 6) ** -1.5
    assert found == sorted(found, reverse=True)
    np.testing.assert_allclose(found, 3 + (1000 - 15) * law / law.sum(), atol=1)
    assert min(sizes(deal(entries([1] * 30), kind="quantity", clients=10, skew=3))) == 3
    assert min(sizes(deal(entries([1] * 25), kind="quantity", clients=10, skew=3))) == 2


def shares_of_large(cases: list[Entry]) -> list[float]:
    clients = {case.client for case in cases}
    own = [[int(case.group[1:]) for case in cases if case.client == name] for name in sorted(clients)]
    return [float(np.mean(np.array(numbers) >= 100)) for numbers in own]


def test_dirichlet_with_a_small_alpha_gives_each_client_its_own_sizes() -> None:
    cases = entries([1] * 200)
    apart = [shares_of_large(deal(cases, by_number, kind="dirichlet", alpha=0.1, seed=s)) for s in range(5)]
    alike = [shares_of_large(deal(cases, by_number, kind="dirichlet", alpha=1e4, seed=s)) for s in range(5)]
    assert np.mean([np.ptp(shares) for shares in apart]) > 0.6
    assert np.max([np.ptp(shares) for shares in alike]) < 0.1


@pytest.mark.parametrize("alpha", [1e-12, 1e-3, 1.0, 1e9])
def test_dirichlet_leaves_no_client_empty(alpha: float) -> None:
    done = deal(entries([1] * 60), by_number, kind="dirichlet", clients=20, alpha=alpha, by="class")
    assert min(sizes(done)) >= 3
    assert len(sizes(done)) == 20


def test_dirichlet_asks_for_each_label_once_and_never_for_one_nobody_drew() -> None:
    asked: list[str] = []

    def describe(entry: Entry) -> Description:
        assert entry.label is not None
        asked.append(entry.name)
        return by_number(entry)

    cases = entries([2] * 20)
    cases[3] = replace(cases[3], label=None)
    deal(cases, describe, kind="dirichlet", clients=3)
    assert sorted(asked) == sorted(case.name for case in cases if case.label)


@pytest.mark.parametrize(("by", "other"), [("class", "by: foreground"), ("foreground", "by: class")])
def test_dirichlet_over_labels_that_are_all_alike_is_refused(by: str, other: str) -> None:
    with pytest.raises(DataError, match=f"cannot tell them apart; try partition {other}"):
        deal(entries([1] * 20), lambda entry: Description(0.5, (1, 2)), kind="dirichlet", by=by)


def test_a_column_gives_one_client_for_each_value() -> None:
    cases = [*entries([1, 2], "v", family="u8"), *entries([3], "w", family="1e5")]
    done = deal(cases, kind="column", column="Family")
    assert {case.client for case in done} == {"u8", "1e5"}
    assert sizes(done) == [3, 3]


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        (None, ["x", "y"], "name one in partition.column. There are: family"),
        ("famly", ["x", "y"], "'famly', which no list has. Did you mean 'family'"),
        ("family", ["x", ""], "case 'g1c0' has no value in column 'family'"),
        ("family", ["x", "x"], "1 different values"),
        ("family", ["x", "../up"], "not a usable name"),
        ("family", ["x", "pooled"], "cannot be called 'pooled'"),
        ("family", ["x", "X"], "differ only in capitals"),
    ],
)
def test_a_column_that_makes_no_clients_is_refused(
    column: str | None, values: list[str], sentence: str
) -> None:
    cases = [replace(c, columns={"family": v}) for c, v in zip(entries([1, 1]), values, strict=True)]
    with pytest.raises((ConfigError, DataError), match=sentence):
        deal(cases, kind="column", column=column)


@pytest.mark.parametrize("column", [None, "scanner"])
def test_cases_without_columns_are_told_what_to_write(column: str | None) -> None:
    with pytest.raises(ConfigError, match="There are: none; write a list with columns"):
        deal(entries([1, 1]), kind="column", column=column)


def test_a_patient_with_two_values_is_refused() -> None:
    first, second, other = entries([2, 1])
    cases = [replace(first, columns={"eye": "left"}), replace(second, columns={"eye": "right"}), other]
    with pytest.raises(DataError, match="group 'g0' has 'left' and 'right' in column 'eye'"):
        deal(cases, kind="column", column="eye")


def test_a_column_of_numbers_is_refused() -> None:
    cases = [replace(case, columns={"mean": str(n)}) for n, case in enumerate(entries([1] * 101))]
    with pytest.raises(DataError, match="101 different values .* a partition needs 2 to 100"):
        deal(cases, kind="column", column="mean")


def test_feature_keeps_natural_clients_and_deals_a_single_one() -> None:
    natural = deal([*entries([1, 1], "a"), *entries([1], "b")], kind="feature", shift="contrast")
    assert sizes(natural) == [2, 1]
    assert [read_shift(case) for case in natural][::2] == [
        {"kind": "contrast", "gamma": 0.632456},
        {"kind": "contrast", "gamma": 1.581139},
    ]
    dealt = deal(entries([1] * 12), kind="feature", clients=3, shift="resolution", strength=1.0)
    assert [read_shift(case)["factor"] for case in dealt[::4]] == [1.0, 2.5, 4.0]  # type: ignore[index]


# Promises of all


@given(
    groups=st.lists(st.integers(1, 6), min_size=12, max_size=60),
    clients=st.integers(2, 12),
    kind=st.sampled_from(["iid", "quantity", "dirichlet"]),
    seed=st.integers(0, 99),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_no_case_is_lost_no_group_parted_and_order_does_not_matter(
    groups: list[int], clients: int, kind: str, seed: int, order: Any
) -> None:
    half = len(groups) // 2
    cases = [*entries(groups[:half], "a"), *entries(groups[half:], "b")]
    values = {"kind": kind, "clients": clients, "seed": seed, "alpha": 0.2}
    done = deal(cases, by_number, **values)
    assert files(done) == files(cases)
    assert len({(case.client, case.name) for case in done}) == len(cases)
    assert (
        len({case.group for case in done}) == len({(case.client, case.group) for case in done}) == len(groups)
    )
    per_client = Counter(client for client, _ in {(case.client, case.group) for case in done})
    assert len(per_client) == clients
    assert min(per_client.values()) >= min(3, len(groups) // clients)
    order.shuffle(cases)
    assert deal(cases, by_number, **values) == done


@pytest.mark.parametrize("kind", ["iid", "quantity", "dirichlet"])
def test_hundred_clients_are_made_and_each_can_train(kind: str) -> None:
    done = deal(entries([1] * 300), by_number, kind=kind, clients=100)
    assert sorted({case.client for case in done})[::99] == ["client-001", "client-100"]
    split = assign(done, SplitSettings(by="ratios"), HERE)
    assert len({case.client for case in split if case.split == "train"}) == 100


@pytest.mark.parametrize("kind", ["iid", "quantity", "dirichlet"])
def test_fixed_splits_stay_with_their_cases_and_reach_every_client(kind: str) -> None:
    cases = entries([1] * 50)
    fixed = [replace(c, split=("test", "val", "train", "train", "train")[n % 5]) for n, c in enumerate(cases)]
    done = deal(fixed, by_number, kind=kind, clients=10, alpha=0.1)
    said = {case.images[0]: case.split for case in fixed}
    assert all(case.split == said[case.images[0]] for case in done)
    for split in ("train", "val", "test"):
        assert len({case.client for case in done if case.split == split}) == 10


@pytest.mark.parametrize("kind", ["iid", "quantity", "dirichlet"])
def test_fewer_groups_than_clients_are_refused(kind: str) -> None:
    with pytest.raises(DataError, match="partition.clients is 4, but the 30 cases have only 3 groups"):
        deal(entries([10, 10, 10]), by_number, kind=kind, clients=4)
    few = [replace(case, split="test") for case in entries([1] * 10)]
    with pytest.raises(DataError, match="only 0 groups \\(patients\\) to train on"):
        deal(few, by_number, kind=kind, clients=2)


def test_names_that_clash_get_their_client_in_front() -> None:
    cases = [*entries([1, 1], "a"), *entries([1, 1], "a_g0c0")]
    done = deal(cases, kind="iid", clients=2)
    assert {case.name for case in done} == {"a_g0c0", "a_g1c0", "a_g0c0_g0c0", "a_g0c0_g1c0"}
    awkward = [*entries([1], "a"), *entries([1], "b"), replace(entries([1], "a")[0], name="b_g0c0")]
    assert len({case.name for case in deal(awkward, kind="iid", clients=2)}) == 3


def test_another_seed_deals_anew() -> None:
    cases = entries([1] * 30)
    assert homes(deal(cases, kind="iid", seed=1)) != homes(deal(cases, kind="iid", seed=2))


def test_held_out_clients_stay_as_they_are() -> None:
    cases = [*entries([1] * 10), *entries([1] * 3, "far")]
    done = partition(cases, PartitionSettings(kind="iid", clients=2), never, held_out=["far"])
    assert [case for case in done if case.client == "far"] == cases[10:]
    clash = [*entries([1] * 10), *entries([1] * 3, "client-01")]
    with pytest.raises(DataError, match="held-out client 'client-01'"):
        partition(clash, PartitionSettings(kind="iid", clients=2), never, held_out=["client-01"])


# Shifts

IMAGES = {"2D": (3, 17, 12), "3D": (1, 9, 10, 11), "one slice": (2, 8, 8, 1)}


@pytest.mark.parametrize("kind", SHIFTS)
@pytest.mark.parametrize("shape", IMAGES.values(), ids=IMAGES)
def test_a_shift_is_deterministic_finite_and_none_at_strength_zero(kind: str, shape: tuple[int, ...]) -> None:
    image = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for place in (0.0, 0.5, 1.0):
        assert torch.equal(apply_shift(image, make_shift(kind, 0.0, place)), image)
        shift = json.loads(json.dumps(make_shift(kind, 1.0, place)))
        done = apply_shift(image, shift)
        assert done.shape == image.shape
        assert done.dtype == image.dtype
        assert bool(done.isfinite().all())
        assert torch.equal(done, apply_shift(image, shift))
    assert not torch.allclose(apply_shift(image, make_shift(kind, 1.0, 1.0)), image)


@pytest.mark.parametrize("kind", SHIFTS)
def test_a_shift_does_the_same_before_and_after_scaling(kind: str) -> None:
    image = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
    shift = make_shift(kind, 0.7, 1.0)
    torch.testing.assert_close(apply_shift(image * 400 - 30, shift), apply_shift(image, shift) * 400 - 30)


@pytest.mark.parametrize("kind", SHIFTS)
def test_a_constant_image_stays_finite(kind: str) -> None:
    image = torch.full((1, 4, 4), 7.0)
    assert torch.allclose(apply_shift(image, make_shift(kind, 1.0, 1.0)), image)


def test_shifts_do_what_their_names_say() -> None:
    image = torch.rand(1, 32, 32, generator=torch.Generator().manual_seed(0))
    dark, bright = (apply_shift(image, make_shift("intensity", 1.0, place)) for place in (0.0, 1.0))
    assert dark.mean() < image.mean() < bright.mean()
    assert apply_shift(image, {"kind": "contrast", "gamma": 2.0}).mean() < image.mean()
    blurred = apply_shift(image, {"kind": "resolution", "factor": 4.0})
    assert blurred.std() < 0.5 * image.std()
    assert blurred.mean() == pytest.approx(float(image.mean()), abs=0.02)


def test_an_unknown_shift_is_refused_and_a_list_s_own_column_is_not_one() -> None:
    with pytest.raises(
        DataError, match="The shift 'rotate' is unknown; there are intensity, contrast, resolution"
    ):
        apply_shift(torch.zeros(1, 2, 2), {"kind": "rotate"})
    for text in ("night", "3", '{"kind": "rotate"}', "[" * 100_000):
        assert read_shift(entries([1], shift=text)[0]) is None
    assert read_shift(entries([1])[0]) is None


# What came out


def test_the_summary_counts_cases_groups_splits_and_foreground() -> None:
    done = assign(deal(entries([2] * 20), kind="iid", clients=2), SplitSettings(by="ratios"), HERE)
    table = summarise(done, by_number)
    assert table.columns == ["client", "cases", "groups", "train", "val", "test", "foreground (median)"]
    assert [list(row[:6]) for row in table.rows] == [
        ["client-01", 20, 10, 14, 2, 4],
        ["client-02", 20, 10, 14, 2, 4],
    ]
    assert "foreground (median)" not in summarise(done).columns


@pytest.mark.parametrize(("clients", "describe"), [(3, by_number), (100, None)])
def test_a_picture_is_drawn_for_any_number_of_clients(tmp_path: Path, clients: int, describe: Any) -> None:
    done = deal(entries([1] * 300), kind="quantity", clients=clients)
    done[0] = replace(done[0], client="$x^2$ 病院 _a")
    draw(done, describe, tmp_path / "clients.png")
    assert (tmp_path / "clients.png").read_bytes()[:4] == b"\x89PNG"
    assert len(list(tmp_path.iterdir())) == 1
