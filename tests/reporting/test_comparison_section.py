"""The result of several runs in words."""

import re
from math import inf

from wardround.comparison.scores import Replicate, RowScores, Sheet, compute_statistics
from wardround.comparison.statistics import CaseKey
from wardround.reporting.comparison_section import describe_result


def row(label: str, *values: float) -> RowScores:
    scores = {CaseKey("north", f"case-{number}", "lesion"): value for number, value in enumerate(values)}
    return RowScores(label, {(0, None): Replicate(0, None, {"hd95": scores})})


def test_the_sentence_does_not_praise_a_row_for_what_it_left_out() -> None:
    sheet = Sheet("toy", [row("fails", 0.0, inf), row("works", 5.0, 6.0)], "fails", ["hd95"])
    found = describe_result(sheet, compute_statistics(sheet, "hd95"), {})

    assert "works has the lowest" in re.sub("<[^>]*>", "", found)


def test_the_sentence_names_rows_that_cannot_be_told_apart() -> None:
    sheet = Sheet("toy", [row("a", 5.0, 7.0), row("b", 6.0, 5.5)], "a", ["hd95"])
    found = re.sub("<[^>]*>", "", describe_result(sheet, compute_statistics(sheet, "hd95"), {}))

    assert "b has the lowest" in found and "It cannot be told apart from a (p at least 0.05" in found
