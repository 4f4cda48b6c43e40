"""The headline of a comparison: the best federated row, and what stands beside it."""

from math import inf

from wardround.comparison.headline import Name, as_text, describe_headline, find_headline
from wardround.comparison.scores import (
    CaseScores,
    Replicate,
    ReplicateKey,
    RowScores,
    Sheet,
    compute_statistics,
)
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


def test_rows_that_cannot_be_told_apart_from_the_best_and_metrics_that_others_win_are_named() -> None:
    dice = {"best": [0.8 + n / 100 for n in range(10)], "close": [0.8 + (n ^ 1) / 100 for n in range(10)]}
    dice["far"] = [value - 0.3 + n / 1000 for n, value in enumerate(dice["best"])]
    dice["best"][0] += 0.001
    by_dice, by_hd95 = sheet_of("dice", **dice), sheet_of("hd95", best=[9.0], close=[9.5], far=[1.0])
    rows = [
        RowScores(a.label, {(0, None): Replicate(0, None, {**scores_of(a), **scores_of(b)})})
        for a, b in zip(by_dice.rows, by_hd95.rows, strict=True)
    ]
    sheet = Sheet("toy", rows, "far", ["dice", "hd95"])
    found = find_headline(sheet, compute_statistics(sheet, "dice"), {})

    assert found.best.label == "best" and found.alike == ["close"]
    assert found.wins == {"hd95": "far"}


def test_the_sentences_read_well_without_markup_and_names_stay_in_one_line() -> None:
    sheet = sheet_of("hd95", **{"a\nb": [5.0, 7.0], "c": [6.0, 5.5]})
    parts = describe_headline(sheet, compute_statistics(sheet, "hd95"), {})
    text = as_text(parts)

    assert text.startswith(
        "c has the lowest mean test HD95: 5.750 mm. It cannot be told apart from a b (p at"
    )
    assert "\n" not in text and "  " not in text and Name("c") in parts


def test_a_gain_whose_sign_differs_between_seeds_is_said() -> None:
    def replicates(*means: float) -> dict[ReplicateKey, Replicate]:
        return {
            (seed, None): Replicate(
                seed, None, {"dice": {CaseKey("n", str(k), "r"): m + k / 10 for k in (0, 1)}}
            )
            for seed, m in enumerate(means)
        }

    rows = [RowScores("a", replicates(0.5, 0.5, 0.5)), RowScores("b", replicates(0.7, 0.6, 0.45))]
    sheet = Sheet("toy", rows, "a", ["dice"], expected=3)
    text = as_text(describe_headline(sheet, compute_statistics(sheet, "dice"), {}))

    assert "with signs that differ between seeds" in text


def scores_of(row: RowScores) -> CaseScores:
    return row.replicates[0, None].scores


def test_the_weakest_of_clients_scored_in_different_structures_comes_with_a_warning() -> None:
    def headline(region: str) -> str:
        cases = {CaseKey("n", "1", "liver"): 0.9, CaseKey("s", "2", region): 0.4}
        row = RowScores("a", {(0, None): Replicate(0, None, {"dice": cases})})
        sheet = Sheet("toy", [row], "a", ["dice"])
        return as_text(describe_headline(sheet, compute_statistics(sheet, "dice"), {}))

    assert headline("liver").endswith("The weakest is s, 0.400.")
    assert headline("kidney").endswith(
        "0.400. Clients are scored in different structures, so compare them structure by structure."
    )


def test_rows_on_other_data_are_not_ranked_beside_the_best() -> None:
    def row(label: str, data: str, value: float) -> RowScores:
        cases = {CaseKey(f"client of {data}", "1", f"organ of {data}"): value}
        return RowScores(label, {(0, None): Replicate(0, None, {"dice": cases})}, data=data)

    rows = [row("a", "T1", 0.4), row("a, T2", "T2", 0.8), row("b", "T1", 0.5), row("b, T2", "T2", 0.9)]
    sheet = Sheet("toy", rows, "a", ["dice"])
    text = as_text(describe_headline(sheet, compute_statistics(sheet, "dice"), {}))

    assert text.startswith("b has the highest mean test Dice: 0.500.") and "structures" not in text
    assert text.endswith("On other data the best is b, T2 0.900.")
