"""Rows are found by their labels, and one that is not tested says why."""

from pytest import mark, raises

from wardround.comparison.scores import Replicate, RowScores, Sheet, compute_statistics
from wardround.comparison.statistics import CaseKey
from wardround.errors import ConfigError

SCORES = {CaseKey("north", "case-1", "lesion"): 0.5, CaseKey("north", "case-2", "lesion"): 0.6}


def done(label: str, data: str = "x") -> RowScores:
    return RowScores(label, {(1, None): Replicate(1, None, {"dice": SCORES})}, data=data)


def why_not(*rows: RowScores) -> list[str]:
    return [
        row.why_not for row in compute_statistics(Sheet("toy", rows, rows[0].label, ["dice"]), "dice").rows
    ]


def test_a_row_that_failed_is_told_apart_from_one_with_other_data() -> None:
    rows = [done("ref"), RowScores("bad", {}, failed=True), RowScores("later", {}), done("other", data="y")]

    assert why_not(*rows) == ["reference", "failed", "no finished run", "other data"]


def test_rows_beside_a_reference_that_failed_are_told_so() -> None:
    assert why_not(RowScores("ref", {}, failed=True), done("a")) == ["reference, failed", "reference: failed"]


@mark.parametrize("label", ["fedevj", "nothing like it"])
def test_a_row_that_is_not_there_is_told_with_those_that_are(label: str) -> None:
    sheet = Sheet("toy", [done("fedavg"), done("fedevi")], "fedavg", ["dice"])
    hint = " Did you mean 'fedevi'?" if label == "fedevj" else ""

    for found in (sheet, compute_statistics(sheet, "dice")):
        with raises(
            ConfigError, match=f"^'{label}' is not a row.{hint.replace('?', '.')} Rows: fedavg, fedevi.$"
        ):
            found.row(label)
