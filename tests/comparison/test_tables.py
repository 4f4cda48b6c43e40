"""The tables of a comparison: means over clients and seeds, ranks, captions, tests, the cross-site matrix."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from pytest import approx, mark, raises
from scipy import stats

from wardround.comparison.scores import (
    Replicate,
    RowScores,
    Sheet,
    compute_statistics,
    read_cases,
    set_apart,
)
from wardround.comparison.statistics import CaseKey
from wardround.comparison.tables import (
    cross_site_table,
    hospital_table,
    join_tables,
    score_table,
    significance_table,
)
from wardround.engine.judging.evaluation import Evaluation
from wardround.errors import CheckpointError
from wardround.metrics import across_clients, summarise
from wardround.tables import Spread, shown

nan, inf = math.nan, math.inf


def scores(**clients: list[float]) -> dict[CaseKey, float]:
    return {
        CaseKey(client, f"{client}-{number}", "lesion"): value
        for client, values in clients.items()
        for number, value in enumerate(values)
    }


def row(label: str, *seeds: dict[CaseKey, float], metric: str = "dice", **facts: Any) -> RowScores:
    found = {(number, None): Replicate(number, None, {metric: each}) for number, each in enumerate(seeds)}
    return RowScores(label, found, **facts)


def sheet(*rows: RowScores, metric: str = "dice", **facts: Any) -> Sheet:
    expected = max(len(each.replicates) for each in rows)
    return Sheet("toy", rows, rows[0].label, [metric], **{"expected": expected, **facts})


def cell(table: Any, label: str, column: str) -> Any:
    found = next(row for row in table.rows if row[0] == label)
    return found[list(table.columns).index(column)]


def test_a_row_has_clients_mean_sd_worst_and_weighted_mean() -> None:
    table = score_table(sheet(row("a", scores(north=[0.8, 0.6], south=[0.4]))), "dice")

    assert list(table.columns) == [
        "method", "mean", "SD between clients", "worst client", "weighted mean", "north", "south",
    ]  # fmt: skip
    assert [value.mean for value in table.rows[0][1:]] == approx([0.55, 0.3 / 2**0.5, 0.4, 0.6, 0.7, 0.4])
    assert all(value.sd is None and value.rank == 0 for value in table.rows[0][1:])  # one seed, one row


def test_seeds_give_a_mean_and_a_spread() -> None:
    table = score_table(sheet(row("a", scores(north=[0.8]), scores(north=[0.6]))), "dice")

    assert cell(table, "a", "mean") == Spread(approx(0.7), approx(0.2 / 2**0.5))
    assert "mean ± SD over 2 seeds" in table.caption


def test_the_best_and_the_second_are_marked_by_the_direction_of_the_metric() -> None:
    values = {"a": 0.7, "b": 0.9, "c": 0.8}
    higher = score_table(sheet(*(row(n, scores(north=[v])) for n, v in values.items())), "dice")
    lower = score_table(
        sheet(*(row(n, scores(north=[v]), metric="hd95") for n, v in values.items()), metric="hd95"), "hd95"
    )
    signed = [("a", -0.1), ("b", 2.0), ("c", 0.5)]
    nearest = score_table(
        sheet(
            *(row(n, scores(north=[v]), metric="volume_difference") for n, v in signed),
            metric="volume_difference",
        ),
        "volume_difference",
    )

    assert [cell(higher, name, "mean").rank for name in "abc"] == [0, 1, 2]
    assert [cell(lower, name, "mean").rank for name in "abc"] == [1, 0, 2]
    assert [cell(nearest, name, "mean").rank for name in "abc"] == [1, 0, 2]


def test_values_that_look_equal_share_their_mark() -> None:
    table = score_table(
        sheet(*(row(n, scores(north=[v])) for n, v in [("a", 0.90001), ("b", 0.9), ("c", 0.5)])), "dice"
    )

    assert [cell(table, name, "mean").rank for name in "abc"] == [1, 1, 2]


def test_a_mean_that_leaves_failures_out_is_not_the_best() -> None:
    fails = row("fails", scores(north=[1.0, inf]), metric="hd95")
    works = row("works", scores(north=[5.0, 6.0]), metric="hd95")
    table = score_table(sheet(fails, works, metric="hd95"), "hd95")

    assert cell(table, "fails", "mean") == Spread(1.0, None, 0, 1)
    assert cell(table, "works", "mean").rank == 1
    assert "infinite fails 1" in table.caption and "†" in table.caption


def test_a_row_is_not_the_best_of_rows_that_never_ran() -> None:
    table = score_table(sheet(row("a", scores(north=[0.5])), RowScores("failed", {})), "dice")

    assert cell(table, "a", "mean").rank == 0


def test_where_all_leave_failures_out_only_those_with_the_fewest_are_marked() -> None:
    nothing = row("nothing", scores(north=[0.0, inf, inf], south=[inf]), metric="hd95")
    once = row("once", scores(north=[5.0, 6.0, inf], south=[9.0]), metric="hd95")
    again = row("again", scores(north=[inf, 4.0, 4.0], south=[9.0]), metric="hd95")
    table = score_table(sheet(nothing, once, again, metric="hd95"), "hd95")

    assert [cell(table, name, "mean").rank for name in ("nothing", "once", "again")] == [0, 2, 1]
    assert [cell(table, name, "south").rank for name in ("nothing", "once", "again")] == [0, 1, 1]
    assert "of rows with the fewest infinite values" in table.caption


def test_the_mean_over_seen_clients_tells_of_its_failures_too() -> None:
    seen = {"hd95": scores(south=[1.0, inf])}
    fails = RowScores("fails", {(0, None): Replicate(0, None, {"hd95": scores(north=[2.0])}, seen)})
    table = score_table(sheet(fails, metric="hd95", held_out=True), "hd95")

    assert cell(table, "fails", "seen clients") == Spread(1.0, None, 0, 1)


def test_held_out_clients_have_columns_of_their_own_and_are_in_no_mean_and_no_test() -> None:
    rows = [row("a", scores(north=[0.8], west=[0.1])), row("b", scores(north=[0.6], west=[0.9]))]
    apart = sheet(*set_apart(rows, {"a": ["west"]}))  # b does not know: its run is an older one
    table, tests = score_table(apart, "dice"), compute_statistics(apart, "dice")

    assert list(table.columns)[-1] == "west (held out)" and "west" not in table.columns
    assert cell(table, "a", "mean").mean == 0.8 and cell(table, "b", "mean").mean == 0.6
    assert cell(table, "a", "west (held out)").mean == 0.1 and cell(table, "b", "west (held out)").rank == 1
    assert "Held-out clients took no part in training" in table.caption
    assert tests.row("b").test.num_pairs == 1 and tests.row("b").mean == 0.6


def test_rows_that_held_out_everyone_between_them_set_their_own_clients_apart() -> None:
    rows = [row("a", scores(north=[0.8], west=[0.1])), row("b", scores(north=[0.6], west=[0.9]))]
    apart = sheet(*set_apart(rows, {"a": ["west"], "b": ["north"]}))
    table = score_table(apart, "dice")

    assert cell(table, "a", "mean").mean == 0.8 and cell(table, "b", "mean").mean == 0.9


def test_seeds_that_disagree_about_the_sign_are_flagged() -> None:
    before, after = scores(north=[0.5, 0.6, 0.7]), scores(north=[0.6, 0.75, 0.8])
    a, b = row("a", before, before, before), row("b", after, after, scores(north=[0.4, 0.55, 0.6]))
    steady = row("c", after, after, scores(north=[0.55, 0.65, 0.8]))
    compared = sheet(a, b, steady)
    table = significance_table(compared, compute_statistics(compared, "dice"))

    assert cell(table, "b", "better with") == "2 of 3 seeds: signs differ"
    assert shown(cell(table, "b", "difference")).endswith("‡")  # in a column that no terminal leaves out
    assert not shown(cell(table, "c", "difference")).endswith("‡")
    assert cell(table, "c", "better with") == "3 of 3 seeds" and cell(table, "a", "better with") == ""
    assert "seeds and cases both random" in table.caption and "Signs differ:" in table.caption


def test_the_test_of_one_seed_says_what_it_is_about() -> None:
    compared = sheet(row("a", scores(north=[0.5, 0.6])), row("b", scores(north=[0.6, 0.7])))
    table = significance_table(compared, compute_statistics(compared, "dice"))

    assert (
        "better with" not in table.columns and "One seed: this is about these trained models" in table.caption
    )


def test_the_interval_of_a_mean_over_seeds_stays_where_scores_can_be() -> None:
    compared = sheet(row("a", scores(north=[0.99, 0.8]), scores(north=[0.9, 0.99])))

    assert compute_statistics(compared, "dice").row("a").interval.high == 1.0


def test_neighbouring_tables_have_the_same_mean() -> None:
    """Also where a case is infinite with one seed: averaging it over seeds first gives another number."""
    found = row("a", scores(north=[1.0, inf]), scores(north=[2.0, 9.0]), metric="hd95")
    compared = sheet(found, row("b", *[scores(north=[3.0, 4.0])] * 2, metric="hd95"), metric="hd95")
    tests = significance_table(compared, compute_statistics(compared, "hd95"))

    assert cell(tests, "a", "mean") == cell(score_table(compared, "hd95"), "a", "mean").mean == 3.25


def test_one_client_has_no_sd_between_clients() -> None:
    table = score_table(sheet(row("a", scores(north=[0.8, 0.7]))), "dice")

    assert math.isnan(cell(table, "a", "SD between clients").mean)


def test_the_caption_counts_cases_undefined_and_infinite_values_and_names_the_rules() -> None:
    table = score_table(
        sheet(row("a", scores(north=[0.5, nan], south=[inf, 0.5]), empty_policy="nan", tested="last")), "dice"
    )

    assert "4 test cases of 2 clients" in table.caption
    assert "of 4 values a row: undefined a 1; infinite a 1" in table.caption
    assert "Empty masks: scores that empty masks leave undefined are skipped" in table.caption
    assert "Tested: the last round" in table.caption


def test_rows_that_tested_other_rounds_are_told_apart() -> None:
    table = score_table(sheet(row("a", scores(n=[1])), row("b", scores(n=[1]), tested="last")), "dice")

    assert "best on validation cases (a); the last round (b)" in table.caption


def test_a_row_with_fewer_seeds_is_told() -> None:
    table = score_table(
        sheet(row("a", scores(n=[0.5]), scores(n=[0.5])), row("b", scores(n=[0.5])), RowScores("c", {})),
        "dice",
    )

    assert "Not complete: b 1 of 2, c 0 of 2." in table.caption
    assert math.isnan(cell(table, "c", "mean").mean)


def test_many_clients_have_no_columns_of_their_own() -> None:
    table = score_table(sheet(row("a", scores(**{f"c{n}": [0.5] for n in range(21)}))), "dice")

    assert list(table.columns)[:2] == ["method", "mean"] and "Columns of single clients" in table.caption


def test_a_client_called_mean_keeps_its_column() -> None:
    table = score_table(sheet(row("a", scores(mean=[0.2], other=[0.8]))), "dice")

    assert list(table.columns)[-2:] == ["mean", "other"]
    assert [table.rows[0][place].mean for place in (1, -2, -1)] == approx([0.5, 0.2, 0.8])


def in_regions(**regions: dict[CaseKey, float]) -> dict[CaseKey, float]:
    return {
        key._replace(region=name): value for name, found in regions.items() for key, value in found.items()
    }


def test_several_structures_have_rows_and_ranks_of_their_own() -> None:
    a = row("a", in_regions(rim=scores(north=[0.8, 0.6]), cup=scores(north=[0.2, 0.4])))
    b = row("b", in_regions(rim=scores(north=[0.5, 0.5]), cup=scores(north=[0.6, 0.8])))
    table = score_table(sheet(a, b), "dice")
    means = {(line[0], line[1]): line[2] for line in table.rows}

    assert list(table.columns)[:3] == ["method", "structure", "mean"]
    assert [line[:2] for line in table.rows] == [
        ["a", "all"], ["b", "all"], ["a", "rim"], ["b", "rim"], ["a", "cup"], ["b", "cup"],
    ]  # fmt: skip
    assert [means[key].mean for key in means] == approx([0.5, 0.6, 0.7, 0.5, 0.3, 0.7])
    assert [means[key].rank for key in means] == [2, 1, 1, 2, 2, 1]
    assert "2 structures" in table.caption


def test_a_structure_that_a_client_does_not_have_is_not_available_and_in_no_mean() -> None:
    found = in_regions(rim=scores(north=[0.8, 0.6], south=[0.3]), cup=scores(north=[0.2, 0.4]))
    table, by_client = (
        score_table(sheet(row("a", found)), "dice"),
        hospital_table(sheet(row("a", found)), "dice"),
    )
    cup = next(line for line in table.rows if line[1] == "cup")
    south = next(line for line in by_client.cells() if line[0] == "south" and line[2] == "cup")

    assert cup[2].mean == approx(0.3) and shown(cup[list(table.columns).index("south")]) == "n/a"
    assert south[3:] == ["n/a", "n/a", "0"]


def test_rows_are_ranked_among_those_with_their_data_and_have_no_lines_for_others() -> None:
    polyp, prostate = in_regions(polyp=scores(kvasir=[0.5])), in_regions(prostate=scores(ucl=[0.8]))
    better = in_regions(polyp=scores(kvasir=[0.6])), in_regions(prostate=scores(ucl=[0.9]))
    rows = [row("a, polyp", polyp, data="polyp"), row("a, prostate", prostate, data="prostate")]
    rows += [row("b, polyp", better[0], data="polyp"), row("b, prostate", better[1], data="prostate")]
    table, by_client = score_table(sheet(*rows), "dice"), hospital_table(sheet(*rows), "dice")

    assert [cell(table, each.label, "mean").rank for each in rows] == [2, 2, 1, 1]
    assert "second underlined, among rows with the same data." in table.caption
    assert [line[0] for line in table.rows if line[1] == "polyp"] == ["a, polyp", "b, polyp"]
    assert {(line[0], line[1]) for line in by_client.rows} == {
        ("kvasir", "a, polyp"), ("kvasir", "b, polyp"), ("ucl", "a, prostate"), ("ucl", "b, prostate"),
    }  # fmt: skip


def test_every_client_has_its_score_with_an_interval_and_the_number_of_cases() -> None:
    """Of one seed the interval is that of a run's own table: Student's t over the cases' means."""
    values = [0.5, 0.6, 0.7, 0.8]
    table = hospital_table(sheet(row("a", scores(north=values, south=[0.4]))), "dice")
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))

    assert list(table.columns) == ["client", "method", "Dice", "95 % interval", "n"]
    assert table.rows[0][2].mean == approx(0.65) and table.rows[0][3] == approx(expected)
    assert table.rows[0][4] == 4 and shown(table.rows[1][3]) == "n/a" and table.rows[1][4] == 1


def test_the_interval_of_a_client_counts_seeds() -> None:
    """Seeds that differ widen it; it is the interval of a comparison with this client alone."""
    seeds = [scores(north=[0.5, 0.6, 0.7], south=[0.9, 0.8]), scores(north=[0.3, 0.4, 0.5], south=[0.9, 0.7])]
    found = sheet(row("a", *seeds))
    alone = sheet(row("a", *({k: v for k, v in seed.items() if k.client == "north"} for seed in seeds)))
    table = hospital_table(found, "dice")

    assert table.rows[0][3] == compute_statistics(alone, "dice").row("a").interval
    assert "seeds and cases both random" in table.caption


def test_held_out_clients_are_marked_in_the_table_of_clients() -> None:
    found = sheet(row("a", scores(north=[0.5, 0.6], south=[0.1, 0.3])))
    apart = dataclasses.replace(found, rows=set_apart(found.rows, {"a": ["south"]}))
    table = hospital_table(apart, "dice")

    assert [line[0] for line in table.rows] == ["north", "south (held out)"]
    assert table.rows[1][2].mean == approx(0.2) and table.rows[1][4] == 2


def test_the_objective_stands_beside_the_method_where_rows_differ_in_it() -> None:
    plain, other = {"name": "dice_bce"}, {"name": "evidential"}
    rows = [row("a", scores(n=[0.5, 0.6]), objective=plain), row("b", scores(n=[0.6, 0.7]), objective=other)]
    differ, same = sheet(*rows), sheet(rows[0], dataclasses.replace(rows[1], objective=plain))
    tests = significance_table(differ, compute_statistics(differ, "dice"))

    for table in (score_table(differ, "dice"), tests, hospital_table(differ, "dice")):
        place = list(table.columns).index("objective")
        assert table.columns[place - 1] == "method"
        assert [line[place] for line in table.rows] == ["dice_bce", "evidential"]
    assert "too; --same-objective gives" in score_table(differ, "dice").caption
    of_a_paper = dataclasses.replace(differ, print_notes=("Published: there.",))
    assert "Rows differ in the objective too." in score_table(of_a_paper, "dice").caption
    assert "objective" in join_tables(score_table(differ, "dice"), tests).csv().splitlines()[0]
    assert "objective" not in score_table(same, "dice").columns


# Tests


def test_rows_are_tested_against_the_reference_and_corrected_together() -> None:
    base = [0.1 * n for n in range(1, 8)]
    rows = [row("ref", scores(n=base)), row("same", scores(n=base))]
    rows += [row(f"up{k}", scores(n=[v + 0.01 * (n + k) for n, v in enumerate(base)])) for k in (1, 2)]
    found = compute_statistics(sheet(*rows), "dice")
    table = significance_table(sheet(*rows), found)

    assert found.num_tests == 3 and found.row("ref").test is None
    same, up = found.row("same").test, found.row("up1").test
    assert same is not None and (same.p, same.p_holm, same.difference) == (1.0, 1.0, 0.0)
    assert up is not None and up.p == 2 / 2**7 and up.p_holm == approx(3 * up.p)
    assert cell(table, "ref", "difference") == "reference"
    assert "7 pairs" in table.caption and "against ref" in table.caption and "over 3 rows" in table.caption


def test_rows_with_other_data_are_not_paired() -> None:
    found = compute_statistics(
        sheet(row("a", scores(n=[0.5]), data="x"), row("b", scores(n=[0.5]), data="y")), "dice"
    )

    assert found.row("b").test is None and found.row("b").why_not == "other data"


def test_only_seeds_both_rows_have_are_compared() -> None:
    a = row("a", scores(n=[0.5, 0.6]), scores(n=[0.1, 0.1]))
    b = row("b", scores(n=[0.6, 0.7]))
    test = compute_statistics(sheet(a, b), "dice").row("b").test

    assert test is not None and test.difference == approx(0.1)


def test_csv_has_tests_beside_the_rows_of_all_structures() -> None:
    found = in_regions(rim=scores(n=[0.5, 0.6]), cup=scores(n=[0.1, 0.2]))
    both = sheet(row("a", found), row("b", {key: value + 0.1 for key, value in found.items()}))
    wide = join_tables(score_table(both, "dice"), significance_table(both, compute_statistics(both, "dice")))
    place = list(wide.columns).index("p (Holm)")

    assert [line[place] == "" for line in wide.rows] == [True, False, True, True, True, True]


def test_scores_and_tests_stand_side_by_side_in_csv() -> None:
    both = sheet(row("a", scores(n=[0.5])), row("b", scores(n=[0.5])))
    wide = join_tables(score_table(both, "dice"), significance_table(both, compute_statistics(both, "dice")))

    assert len(wide.csv().splitlines()) == 3 and "p (Holm)" in wide.columns


# Held-out clients and other sites


def test_scores_at_unseen_clients_stand_beside_those_at_seen_ones() -> None:
    found = Replicate(0, None, {"dice": scores(n=[0.4])}, {"dice": scores(s=[0.9])})
    table = score_table(sheet(RowScores("a", {(0, None): found}), held_out=True), "dice")

    assert cell(table, "a", "n").mean == 0.4 and cell(table, "a", "seen clients").mean == 0.9
    assert "took no part" in table.title and "took no part in training" in table.caption


def evaluation(**means: float) -> Evaluation:
    clients = {name: summarise([value]) for name, value in means.items()}
    return Evaluation({}, {"dice": clients}, {"dice": across_clients(clients, best=1.0)})


def test_the_cross_site_matrix_has_the_owner_in_rows_and_the_site_in_columns() -> None:
    run = {"east": evaluation(east=0.9, north=0.5), "north": evaluation(east=0.4, north=0.8)}
    again = {"east": evaluation(east=0.7, north=0.5), "north": evaluation(east=0.4, north=0.8)}
    table = cross_site_table({"local": [run, again]}, "dice")

    assert list(table.columns) == ["method", "model of", "at east", "at north", "elsewhere"]
    assert [value.mean for value in table.rows[0][2:]] == approx([0.8, 0.5, 0.5])
    assert table.rows[1][1] == "north" and table.rows[1][4].mean == 0.4


def test_the_cross_site_matrix_tells_of_infinite_values() -> None:
    clients = {"east": summarise([3.0]), "north": summarise([2.0, inf])}
    run = {"east": Evaluation({}, {"hd95": clients}, {"hd95": across_clients(clients, best=0.0)})}
    table = cross_site_table({"local": [run]}, "hd95")

    assert table.cells()[0][2:] == ["3.000", "2.000†", "2.000†"]
    assert "infinite values are left out" in table.caption


# Reading


@mark.parametrize("text", ["", "client,case,region,dice\nnorth,1\n", "client,case,region,dice\nn,1,l,high\n"])
def test_a_damaged_list_of_cases_is_told_in_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text(text)

    with raises(CheckpointError, match="cases.csv cannot be read"):
        read_cases(tmp_path / "cases.csv")
