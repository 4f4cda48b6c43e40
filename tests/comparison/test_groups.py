"""The headline of a comparison: the best federated row, and what stands beside it."""

from math import inf

from wardround.comparison.groups import find_headline
from wardround.comparison.scores import Replicate, RowScores, Sheet, compute_statistics
from wardround.comparison.statistics import CaseKey


def sheet_of(metric: str = "dice", **rows: list[float]) -> Sheet:
    scores = {
        label: {CaseKey("north", f"case-{number}", "lesion"): value for number, value in enumerate(values)}
        for label, values in rows.items()
    }
    found = [
        RowScores(label, {(0, None): Replicate(0, None, {metric: cases})}) for label, cases in scores.items()
    ]
    return Sheet("toy", found, found[0].label, [metric])


def test_a_row_is_not_the_best_for_failures_it_left_out_of_its_mean() -> None:
    sheet = sheet_of("hd95", fails=[0.0, inf], works=[5.0, 6.0])

    assert find_headline(sheet, compute_statistics(sheet, "hd95"), {}).best.label == "works"


def test_references_are_not_the_best_federated_row() -> None:
    sheet = sheet_of(fedavg=[0.5, 0.6], pooled=[0.8, 0.9], mine=[0.6, 0.7])
    methods = {"fedavg": "fedavg", "pooled": "centralised", "mine": "fedprox"}
    found = find_headline(sheet, compute_statistics(sheet, "dice"), methods)

    assert found.best.label == "mine" and [row.label for row in found.references] == ["pooled"]
    assert found.test is not None and found.test.num_better == 2
