"""Printed numbers beside ours: differences, and how far the order of rows is the paper's."""

from __future__ import annotations

from typing import Any

import numpy as np
from pytest import approx

from wardround.comparison.published import compare_order, published_table
from wardround.comparison.scores import Replicate, RowScores, Sheet
from wardround.comparison.statistics import CaseKey
from wardround.tables import Spread


def row(label: str, values: dict[str, list[float]], **facts: Any) -> RowScores:
    scores = {
        CaseKey(client, str(number), "lesion"): value
        for client, own in values.items()
        for number, value in enumerate(own)
    }
    return RowScores(label, {(1, None): Replicate(1, None, {"dice": scores})}, **facts)


def sheet(rows: list[RowScores], printed: dict[str, dict[str, float]], **facts: Any) -> Sheet:
    published = {
        label: {"dice": {column: Spread(value) for column, value in columns.items()}}
        for label, columns in printed.items()
    }
    return Sheet("toy", rows, rows[0].label, ["dice"], published=published, **facts)


def test_every_printed_number_of_a_column_of_ours_has_a_line_with_the_difference() -> None:
    rows = [row("a", {"n": [0.5, 0.7], "s": [0.2]}), row("b", {"n": [0.4], "s": [0.4]})]
    table = published_table(sheet(rows, {"a": {"n": 0.9, "mean": 0.8, "elsewhere": 0.1}}), "dice")
    assert table is not None
    assert [line[:2] for line in table.rows] == [["a", "n"], ["a", "mean"]]
    assert [line[2].mean for line in table.rows] == [0.9, 0.8]
    assert [line[3].mean for line in table.rows] == approx([0.6, 0.4])
    assert [line[4] for line in table.rows] == approx([-0.3, -0.4])


def test_nothing_printed_makes_no_table() -> None:
    assert published_table(sheet([row("a", {"n": [0.5]})], {}), "dice") is None


def test_cautions_stand_under_the_table() -> None:
    found = sheet([row("a", {"n": [0.5]})], {"a": {"mean": 0.8}}, print_notes=["Printed twice."])
    table = published_table(found, "dice")
    assert table is not None and table.caption.endswith("Printed twice.")


def test_what_was_not_as_in_the_paper_stands_under_the_printed_numbers_too() -> None:
    found = sheet([row("a", {"n": [0.5]})], {"a": {"mean": 0.8}}, notes=["32x32 instead of 384x384."])
    table = published_table(found, "dice")
    assert table is not None and "32x32 instead of 384x384." in table.caption


def test_the_best_in_print_is_not_alone_where_others_have_its_value() -> None:
    rows = [row(name, {"n": [value]}) for name, value in (("a", 0.5), ("b", 0.5), ("c", 0.4))]
    found = compare_order(sheet(rows, {"a": {"mean": 0.1}, "b": {"mean": 0.2}, "c": {"mean": 0.3}}), "dice")
    assert found is not None and found.sentence("Dice").endswith(
        "c, the best in print, is number 3 of 3 here."
    )
    found = compare_order(sheet(rows, {"a": {"mean": 0.1}, "b": {"mean": 0.3}, "c": {"mean": 0.2}}), "dice")
    assert found is not None and found.sentence("Dice").endswith("is also the best here, level with 1 other.")


def test_the_order_counts_pairs_and_names_the_best_in_print() -> None:
    rows = [row(name, {"n": [value]}) for name, value in (("a", 0.5), ("b", 0.7), ("c", 0.6))]
    found = compare_order(sheet(rows, {"a": {"mean": 0.1}, "b": {"mean": 0.2}, "c": {"mean": 0.3}}), "dice")
    assert found is not None
    assert (found.num_pairs, found.num_same, found.tau) == (3, 2, approx(1 / 3))
    assert (found.best, found.place, found.among) == ("c", 2, 3)
    assert "2 of 3 pairs of rows as printed" in found.sentence("Dice")
    assert "c, the best in print, is number 2 of 3 here" in found.sentence("Dice")


def test_the_table_says_what_the_spread_of_measured_values_is() -> None:
    found = sheet([row("a", {"n": [0.5]})], {"a": {"mean": 0.8}}, expected=2)
    table = published_table(found, "dice")
    assert table is not None and "Measured: mean ± SD over 2 seeds." in table.caption


def test_rows_printed_as_equal_or_measured_on_other_data_are_not_ordered() -> None:
    rows = [row(name, {"n": [0.5]}, group=group) for name, group in (("a", "x"), ("b", "x"), ("c", "y"))]
    equal = {"a": {"mean": 0.1}, "b": {"mean": 0.1}, "c": {"mean": 0.9}}
    assert compare_order(sheet(rows, equal), "dice") is None
    apart = [row(name, {"n": [0.5 + n / 10]}, group=name) for n, name in enumerate("abc")]
    found = compare_order(sheet(apart, {"a": {"mean": 0.1}, "b": {"mean": 0.2}, "c": {"mean": 0.3}}), "dice")
    assert found is not None and (found.num_pairs, found.num_same) == (3, 3)  # each has data of its own


def test_the_best_in_print_is_named_after_most_rounds() -> None:
    rows = [row(f"{name}{group}", {"n": [0.5]}, group=group) for group in ("10", "100") for name in "ab"]
    printed = {"a10": 0.9, "b10": 0.2, "a100": 0.3, "b100": 0.8}
    found = compare_order(sheet(rows, {label: {"mean": value} for label, value in printed.items()}), "dice")
    assert found is not None and (found.best, found.among) == ("b100", 2)


def test_the_interval_is_narrow_where_the_order_is_plain_and_wide_where_it_is_not() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.1, 40)
    plain = [row("a", {"n": list(0.3 + noise)}), row("b", {"n": list(0.7 + noise)})]
    printed = {"a": {"mean": 0.3}, "b": {"mean": 0.7}}
    found = compare_order(sheet(plain, printed), "dice")
    assert found is not None and (found.interval.low, found.interval.high) == (1, 1)
    close = [
        row("a", {"n": list(random.normal(0.5, 0.1, 40))}),
        row("b", {"n": list(random.normal(0.5, 0.1, 40))}),
    ]
    found = compare_order(sheet(close, printed), "dice")
    assert found is not None and (found.interval.low, found.interval.high) == (-1, 1)


def test_a_merged_test_set_is_compared_case_by_case() -> None:
    few_good = row("a", {"n": [0.9], "s": [0.1, 0.1, 0.1]})  # 0.5 over clients, 0.3 over cases
    even = row("b", {"n": [0.4], "s": [0.4, 0.4, 0.4]})
    printed = {"a": {"weighted mean": 0.1}, "b": {"weighted mean": 0.2}}
    found = compare_order(sheet([few_good, even], printed), "dice")
    assert found is not None and found.num_same == 1
    found = compare_order(sheet([few_good, even], {"a": {"mean": 0.1}, "b": {"mean": 0.2}}), "dice")
    assert found is not None and found.num_same == 0
