"""Splits: whole groups, close to the ratios, drawn by names, editable."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st

from wardround.data.federation_file import SplitSettings
from wardround.data.listing import FOLD, Entry
from wardround.data.splits import assign, find_subset, read_splits, write_splits
from wardround.errors import ConfigError, DataError

HERE = Path(__file__).parent
sizes_of_groups = st.lists(st.integers(1, 12), min_size=1, max_size=25)


def client(sizes: list[int], name: str = "north", label: Path | None = Path("l")) -> list[Entry]:
    """One case a file: group g of sizes[g] cases."""
    return [
        Entry(name, f"g{group}c{case}", (Path(f"{group}-{case}"),), label, f"g{group}")
        for group, size in enumerate(sizes)
        for case in range(size)
    ]


def split(entries: list[Entry], base: Path = HERE, **values: Any) -> list[Entry]:
    return assign(entries, SplitSettings(**{"by": "ratios", **values}), base)


def homes(entries: list[Entry]) -> dict[tuple[str, str], str | None]:
    return {(entry.client, entry.name): entry.split for entry in entries}


def counts(entries: list[Entry]) -> tuple[int, ...]:
    found = Counter(entry.split for entry in entries)
    return found["train"], found["val"], found["test"]


def leaks(entries: list[Entry]) -> bool:
    return len({(e.client, e.group, e.split) for e in entries}) > len({(e.client, e.group) for e in entries})


# Ratios


@pytest.mark.parametrize(
    ("num_groups", "expected"),
    [(1, (1, 0, 0)), (2, (1, 0, 1)), (3, (1, 1, 1)), (4, (2, 1, 1)), (10, (7, 1, 2)), (100, (70, 10, 20))],
)
def test_groups_of_one_case_meet_the_ratios(num_groups: int, expected: tuple[int, ...]) -> None:
    assert counts(split(client([1] * num_groups))) == expected


def test_a_split_without_a_share_stays_empty() -> None:
    assert counts(split(client([1] * 10), ratios=(0.8, 0.0, 0.2))) == (8, 0, 2)
    assert counts(split(client([1] * 10), ratios=(1.0, 0.0, 0.0))) == (10, 0, 0)
    assert counts(split(client([1] * 2), ratios=(0.5, 0.5, 0.0))) == (1, 1, 0)


def test_one_huge_group_trains_and_the_small_ones_choose_and_test() -> None:
    assert counts(split(client([1, 50, 1]))) == (50, 1, 1)


@given(
    sizes=sizes_of_groups,
    seed=st.integers(0, 10**6),
    ratios=st.sampled_from([(0.7, 0.1, 0.2), (0.5, 0.25, 0.25)]),
)
@settings(max_examples=120, deadline=None)
def test_no_group_leaks_no_case_is_lost_and_no_split_stays_empty(
    sizes: list[int], seed: int, ratios: Any
) -> None:
    entries = client(sizes)
    done = split(entries, seed=seed, ratios=ratios)
    assert [replace(entry, split=None) for entry in done] == entries
    assert not leaks(done)
    found, total, largest = counts(done), sum(sizes), max(sizes)
    assert found[0] > 0
    if len(sizes) >= 3:
        assert all(found)
    assert all(abs(have - ratio * total) <= 2 * largest for have, ratio in zip(found, ratios, strict=True))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), target=st.floats(0, 40))
@settings(max_examples=100, deadline=None)
def test_a_subset_is_as_close_to_its_target_as_any(sizes: list[int], target: float) -> None:
    names = [str(number) for number in range(len(sizes))]
    chosen = find_subset(names, dict(zip(names, sizes, strict=True)), target, some=False)
    best = min(
        abs(sum(size for place, size in enumerate(sizes) if mask >> place & 1) - target)
        for mask in range(2 ** len(sizes))
    )
    assert abs(sum(sizes[int(name)] for name in chosen) - target) == pytest.approx(best)


@given(sizes=sizes_of_groups, other=sizes_of_groups, order=st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_neither_order_nor_another_client_changes_a_split(
    sizes: list[int], other: list[int], order: Any
) -> None:
    entries = client(sizes)
    more = [*entries, *client(other, "south")]
    order.shuffle(more)
    alone, together = homes(split(entries)), homes(split(more))
    assert alone.items() <= together.items()


def test_another_seed_draws_another_split() -> None:
    entries = client([1] * 20)
    assert homes(split(entries, seed=1)) != homes(split(entries, seed=2))
    assert homes(split(entries, seed=1)) == homes(split(entries, seed=1))


def test_two_clients_with_the_same_names_are_drawn_apart() -> None:
    done = homes(split([*client([1] * 20), *client([1] * 20, "south")]))
    assert any(done["north", name] != done["south", name] for who, name in done if who == "north")


def test_unlabelled_cases_do_not_shift_the_labelled_ones() -> None:
    labelled = client([1] * 10)
    bare = [
        replace(entry, name=f"u{entry.name}", group=f"u{entry.group}")
        for entry in client([1] * 9, label=None)
    ]
    assert homes(split(labelled)).items() <= homes(split(labelled + bare)).items()


@pytest.mark.parametrize("chosen", [{}, {"by": "kfold", "folds": 3}, {"by": "repeated", "repeat": 2}])
def test_unlabelled_cases_always_train(chosen: dict[str, Any]) -> None:
    bare = [
        replace(entry, name=f"u{entry.name}", group=f"u{entry.group}", label=None)
        for entry in client([1] * 9)
    ]
    done = homes(split([*client([1] * 10), *bare], **chosen))
    assert {home for (_, name), home in done.items() if name.startswith("u")} == {"train"}
    assert set(done.values()) == {"train", "val", "test"}


def test_twenty_thousand_cases_are_divided_in_a_moment() -> None:
    done = split(client([2] * 10_000))
    assert counts(done)[1:] == (2_000, 4_000)


def test_a_group_with_half_a_character_in_its_name_is_drawn_like_any_other() -> None:
    odd = [replace(entry, group=f"{entry.group}\ud800") for entry in client([1] * 5)]
    assert sum(counts(split(odd))) == 5


@pytest.mark.parametrize(
    "ratios", [(0.7, 0.1, 0.3), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1), (float("nan"), 0.5, 0.5)]
)
def test_ratios_that_make_no_sense_are_refused(ratios: Any) -> None:
    with pytest.raises(ConfigError, match="splits.ratios is"):
        split(client([1] * 5), ratios=ratios)


def test_held_out_clients_are_only_tested() -> None:
    entries = [*client([1] * 10), *client([1] * 10, "far")]
    done = assign(entries, SplitSettings(by="ratios"), HERE, held_out=["far"])
    assert counts([e for e in done if e.client == "far"]) == (0, 0, 10)
    assert counts([e for e in done if e.client == "north"]) == (7, 1, 2)


def test_no_cases_have_no_splits() -> None:
    assert split([]) == []


# Column


def test_the_list_decides_where_it_says_something() -> None:
    entries = client([1] * 10)
    said = [replace(entry, split=("test" if number < 3 else None)) for number, entry in enumerate(entries)]
    done = split(said, by="column")
    assert [entry.split for entry in done[:3]] == ["test"] * 3
    assert counts(done) == (6, 1, 3), "the list's three test cases are enough; the rest trains and chooses"


def test_a_list_that_says_all_is_taken_as_it_stands() -> None:
    said = [replace(entry, split="train") for entry in client([1] * 10)]
    assert split(said, by="column") == said


def test_a_single_case_that_the_list_tests_is_not_trained_on() -> None:
    assert counts(split([replace(client([1])[0], split="test")], by="column")) == (0, 0, 1)


@given(sizes=sizes_of_groups, data=st.data())
@settings(max_examples=80, deadline=None)
def test_cases_without_a_split_follow_their_group(sizes: list[int], data: st.DataObject) -> None:
    words = [data.draw(st.sampled_from([None, "train", "val", "test"])) for _ in sizes]
    said = []
    for entry in client(sizes):
        word = words[int(entry.group[1:])]
        said.append(replace(entry, split=word if entry.name.endswith("c0") else None))
    done = split(said, by="column")
    assert not leaks(done)
    assert all(old.split in (None, new.split) for old, new in zip(said, done, strict=True))
    if None in words:
        assert counts(done)[0] > 0


def test_a_list_that_splits_a_patient_apart_is_refused() -> None:
    first, second = client([2])
    with pytest.raises(DataError, match="group 'g0' in train and test.*splits.by: ratios"):
        split([replace(first, split="test"), replace(second, split="train")], by="column")


def test_a_test_part_without_labels_does_not_stand_for_one() -> None:
    bare = [
        replace(e, name=f"t{e.name}", group=f"t{e.group}", split="test") for e in client([1] * 10, label=None)
    ]
    done = split([*client([1] * 10), *bare], by="column")
    assert counts([entry for entry in done if entry.label]) == (7, 1, 2)


# Folds and repeats


@given(sizes=st.lists(st.integers(1, 9), min_size=3, max_size=20), folds=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_folds_partition_the_groups(sizes: list[int], folds: int) -> None:
    tested: list[str] = []
    for fold in range(folds):
        done = split(client(sizes), by="kfold", folds=folds, fold=fold)
        assert not leaks(done)
        assert counts(done)[0] > 0
        others = {entry.group for entry in done if entry.split != "test"}
        assert counts(done)[1] > 0 or len(others) == 1
        tested += sorted({entry.group for entry in done if entry.split == "test"})
    assert sorted(tested) == sorted(f"g{number}" for number in range(len(sizes)))


def test_folds_of_equal_groups_are_equal() -> None:
    for fold in range(5):
        assert counts(split(client([1] * 50), by="kfold", fold=fold)) == (35, 5, 10)


def test_a_single_group_trains_in_every_fold() -> None:
    assert {counts(split(client([3]), by="kfold", fold=fold)) for fold in range(5)} == {(3, 0, 0)}


def test_a_fold_that_tests_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    split(client([1] * 4), by="kfold", fold=3)
    assert not caplog.records
    split(client([1] * 4), by="kfold", fold=4)
    assert "Fold 4 of 5 has no case to test" in caplog.text


def test_a_fold_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="splits.fold is 5; with 5 folds it goes from 0 to 4"):
        split(client([1] * 9), by="kfold", fold=5)


@pytest.mark.parametrize(("name", "by"), [("fold", "kfold"), ("repeat", "repeated")])
def test_a_fold_or_repeat_of_a_split_that_has_none_is_refused(name: str, by: str) -> None:
    with pytest.raises(ConfigError, match=f"splits.{name} is 2, but splits.by is ratios.* splits.by: {by}"):
        split(client([1] * 9), by="ratios", **{name: 2})


def nnunet_folds(*folds: str, test: int = 0) -> list[Entry]:
    """One case a group with its fold in splits_final.json, then so many test cases."""
    told = [*folds, *[""] * test]
    cases = [replace(e, columns={FOLD: fold}) for e, fold in zip(client([1] * len(told)), told, strict=True)]
    return [replace(e, split="test") if n >= len(folds) else e for n, e in enumerate(cases)]


def test_folds_of_nnunet_are_kept_and_what_is_in_none_always_trains() -> None:
    entries = nnunet_folds("0", "0", "1", "1", "1", "")
    for fold in range(2):
        done = split(entries, by="kfold", folds=2, fold=fold, ratios=(0.8, 0.0, 0.2))
        assert [e.split == "test" for e in done] == [e.columns[FOLD] == str(fold) for e in entries]
        assert counts(done)[1] == 0
    assert counts(split(entries, by="kfold", folds=2)) == (3, 1, 2)


def test_a_fold_of_nnunet_validates_where_there_are_test_cases() -> None:
    done = split(nnunet_folds("0", "1", "1", test=2), by="kfold", folds=2)
    assert [entry.split for entry in done] == ["val", "train", "train", "test", "test"]


def test_repeats_draw_anew_and_the_first_is_the_plain_draw() -> None:
    entries = client([1] * 20)
    repeats = [homes(split(entries, by="repeated", repeat=number)) for number in range(3)]
    assert repeats[0] == homes(split(entries))
    assert repeats[1] == homes(split(entries, seed=43))
    assert repeats[0] != repeats[1] != repeats[2]


# File


def test_what_is_written_is_read_and_may_be_edited(tmp_path: Path) -> None:
    entries = [*client([2, 1, 3, 1]), *client([1, 1, 1], "søuth/..")]
    done = split(entries)
    write_splits(reversed(done), tmp_path / "splits.json")
    assert split(entries, tmp_path, by="file", file="splits.json") == done
    content = json.loads((tmp_path / "splits.json").read_text())
    assert list(content) == sorted(content)
    assert all(cases == sorted(cases) for parts in content.values() for cases in parts.values())

    everything = [case for cases in content["north"].values() for case in cases]
    content["north"] = {"train": everything}
    (tmp_path / "splits.json").write_text(json.dumps(content))
    again = split(entries, tmp_path, by="file", file="splits.json")
    assert counts([entry for entry in again if entry.client == "north"]) == (7, 0, 0)


def test_a_file_serves_a_federation_of_fewer_clients(tmp_path: Path) -> None:
    done = split([*client([1] * 5), *client([1] * 5, "south")])
    write_splits(done, tmp_path / "s.json")
    assert split(client([1] * 5), tmp_path, by="file", file="s.json") == done[:5]


@pytest.mark.parametrize(
    ("north", "sentence"),
    [
        ({"train": ["g0c0", "g0c1"]}, "case 'g1c0' is in no split.*wardround data split"),
        ({"train": ["g0c0", "g0c1", "g1c0", "g1c9"]}, "has no case 'g1c9'. Did you mean 'g1c0'"),
        (
            {"train": ["g0c0", "g1c0"], "test": ["g0c1"]},
            "group 'g0' is split apart: case 'g0c0' is in train, case 'g0c1' in test",
        ),
        ({"train": ["g0c0", "g1c0"], "val": ["g0c0"]}, "case 'g0c0' is in train and in val"),
        ({"train": ["g0c0", "g0c0"]}, "case 'g0c0' is twice in train"),
        ({"tain": ["g0c0"]}, "'tain' is not a split. Did you mean 'train'"),
        ({"train": "g0c0"}, "train is not a list"),
        ({"train": [1]}, "train is not a list"),
        ([], "client 'north': give train, val and test"),
    ],
)
def test_a_wrong_file_is_explained_in_a_sentence(tmp_path: Path, north: Any, sentence: str) -> None:
    (tmp_path / "splits.json").write_text(json.dumps({"north": north}))
    with pytest.raises(DataError, match=sentence) as error:
        split(client([2, 1]), tmp_path, by="file", file="splits.json")
    assert "splits.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "{" * 100_000, '{"a": {}, "a": {}}', "[" * 100_000])
def test_what_is_not_a_file_of_splits_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "splits.json").write_text(text)
    with pytest.raises(DataError, match="is not a file of splits"):
        read_splits(tmp_path / "splits.json")


def test_a_file_that_is_not_there_or_not_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_splits(tmp_path / "splits.json")
    with pytest.raises(ConfigError, match="splits.file names none"):
        split(client([1]), by="file")


def test_cases_without_a_split_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="client 'north', case 'g0c0' has no split"):
        write_splits(client([1]), tmp_path / "splits.json")
    assert not list(tmp_path.iterdir())


# Real lists


@pytest.mark.skipif(not (SHARED / "polyp4").exists(), reason="the shared data are not here")
@pytest.mark.parametrize("name", ["polyp4", "fundus_odoc", "lgg3d", "hippocampus"])
def test_the_shared_sets_are_divided_as_they_say_and_anew(name: str) -> None:
    from wardround.data.federation_file import Source
    from wardround.data.sources import read_source

    entries = list(read_source(Source(path=SHARED / name), HERE).entries)
    assert split(entries, by="column") == entries
    assert not leaks(split(entries))
    for who in {entry.client for entry in entries}:
        own = [entry for entry in split(entries) if entry.client == who]
        if len({entry.group for entry in own}) > 10:
            assert counts(own)[2] / len(own) == pytest.approx(0.2, abs=0.06)
