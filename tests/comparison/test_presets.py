"""A paper's table as a comparison: its rows and seeds, and the printed numbers beside ours."""

from html import unescape
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, approx, mark, raises

import wardround as wr
from wardround.comparison import presets
from wardround.comparison.presets import (
    describe_published,
    find_preset,
    list_preset_rows,
    list_printed_values,
    match_columns,
    plan_paper,
)
from wardround.comparison.run import plan_comparison, run_grid
from wardround.errors import ConfigError
from wardround.papers import presets as papers
from wardround.papers.scaling import Scale
from wardround.reporting import write_report

DATA = ["data.phantom.hospitals=4", "data.phantom.size=32", "data.phantom.cases=8", "model.levels=3"]
SHARES = {"dice", "iou", "precision", "sensitivity"}
TWO = {"methods": ["FedAvg", "FedEvi"]}


def planned(name: Any, options: Any = TWO, overrides: Any = DATA) -> Any:
    return plan_comparison(name, {**options, "overrides": overrides})[0]


def test_a_preset_brings_rows_and_seeds() -> None:
    grid = planned("fedevi-table1")

    assert [row.label for row in grid.rows] == ["FedAvg", "FedEvi"] and list(grid.seeds) == [1, 2, 3]
    assert grid.reference == "FedAvg" and grid.preset == grid.name == "fedevi-table1"
    assert grid.rows[0].settings["objective"] == {"name": "dice"} and len(grid.cells) == 6


@mark.parametrize("change", ["method.name=fedprox", "method={name: fedprox, mu: 0.1}"])
def test_a_row_that_runs_another_method_says_so_and_has_no_printed_numbers(change: str) -> None:
    options = {"methods": ["FedAvg", "FedProx", "FedEvi"], "reference": "FedProx"}
    grid = planned("fedevi-table1", options, [*DATA, change])
    printed = list_printed_values(papers.load("fedevi-table1"), [], "px")

    labels = [row.label for row in grid.rows]
    assert labels[0] == "FedAvg (method.name=fedprox)" and labels[1].startswith("FedProx")
    assert labels[0] not in printed and "FedAvg" in printed
    assert {row.method for row in grid.rows} == {"fedprox"}


def test_a_row_whose_own_setting_is_changed_says_so() -> None:
    grid = planned("fedevi-figure-delta", {}, [*DATA, "method.delta=3", "rounds=2", "seed=1"])

    assert [row.label for row in grid.rows][:2] == [
        "delta=0.25 (method.delta=3)",
        "delta=0.5 (method.delta=3)",
    ]


def test_a_row_that_loses_a_setting_of_its_own_says_so() -> None:
    grid = planned("fedevi-figure-delta", {}, [*DATA, "method={name: fedevi}", "seed=1"])

    assert grid.rows[0].label == "delta=0.25 (method.delta=default)"


def test_settings_no_row_stands_for_leave_the_labels_alone() -> None:
    changes = [*DATA, "rounds=2", "optimizer.learning_rate=0.5", "method.name=fedavg"]
    grid = planned("fedevi-table1", {"methods": ["FedAvg"]}, changes)

    assert [row.label for row in grid.rows] == ["FedAvg"]


def test_the_file_of_a_preset_is_the_preset() -> None:
    path = papers.find_folder() / "safcf-table2.yaml"

    assert find_preset(path) == find_preset(str(path)) == find_preset("safcf-table2") == "safcf-table2"
    assert find_preset("quickstart") is None and find_preset({}) is None


def test_an_ordinary_file_of_the_same_name_is_no_preset(tmp_path: Path) -> None:
    (tmp_path / "safcf-table2.yaml").write_text("rounds: 3")

    assert find_preset(tmp_path / "safcf-table2.yaml") is None


def test_one_federation_of_a_table_is_compared() -> None:
    grid = planned("fedevi-table4", {}, [*DATA, "datasets=prostate", "seed=5"])

    assert all(row.label.endswith(", prostate") for row in grid.rows) and len(grid.rows) == 5


def test_rows_that_cannot_run_are_left_out_and_told(monkeypatch: MonkeyPatch) -> None:
    told = "there is no such method"
    monkeypatch.setattr(
        presets, "find_obstacle", lambda row: told if row["method"]["name"] == "fedlaw" else ""
    )
    grid = planned("fedevi-table1", {"methods": ["FedAvg", "FedLAW"], "seeds": 1})

    assert [row.label for row in grid.rows] == ["FedAvg"] and "Not run: FedLAW" in grid.notes[0]


@mark.parametrize(
    ("options", "overrides", "sentence"),
    [
        ({}, [], "needs data.*Kvasir.*data.federation"),
        ({"methods": ["FedAvgg"]}, DATA, "has no row 'FedAvgg'. Did you mean 'FedAvg'"),
        ({"objectives": ["dice"]}, DATA, "rows of its own"),
        ({}, [*DATA, "datasets=brain"], "datasets is 'brain'"),
        (TWO, [*DATA, "rounds=0"], "nothing can be run. Not run: FedAvg .rounds is 0"),
    ],
)
def test_mistakes_are_one_sentence(options: Any, overrides: Any, sentence: str) -> None:
    with raises(ConfigError, match=sentence):
        planned("fedevi-table1", options, overrides)


def test_printed_percent_become_shares() -> None:
    preset = papers.load("fedevi-table1")
    printed = list_printed_values(preset, [], "mm")["FedAvg"]
    value = preset.published.rows["FedAvg"]["mean"]["dice"]

    assert printed["dice"]["mean"].mean == approx(value.mean / 100)


@mark.parametrize(
    ("name", "label", "lengths", "metrics", "sentence"),
    [
        (
            "fedevi-table1",
            "FedAvg",
            "px",
            {"hd95_pooled"},
            "in pixels of 384 x 384 images, ours in pixels of the files",
        ),
        ("fedevi-table1", "FedAvg", "mm", set(), "HD95 pooled left out: in px, ours in mm."),
        ("aaw-table2", "FedAvg, T1", "mm", set(), "HD95 and ASSD left out: the paper does not give a unit."),
    ],
)
def test_printed_distances_stand_beside_ours_or_the_note_says_why_not(
    name: str, label: str, lengths: str, metrics: set[str], sentence: str
) -> None:
    preset = papers.load(name)

    assert set(list_printed_values(preset, [], lengths)[label]) - SHARES == metrics
    assert sentence in describe_published(preset, [label], ["Kvasir"], lengths, synthetic=False)


def test_a_merged_test_set_stands_under_the_weighted_mean() -> None:
    assert list(list_printed_values(papers.load("safcf-table2"), [], "mm")["FedAvg"]["dice"]) == [
        "weighted mean"
    ]


def test_one_number_for_all_clients_stands_under_the_mean() -> None:
    preset = papers.load("safcf-table6")

    assert list(list_printed_values(preset, [], "mm")["5 clients"]["dice"]) == ["mean"]
    assert "read as their mean" in describe_published(preset, ["5 clients"], [], "mm", synthetic=False)


@mark.parametrize(
    ("name", "clients", "printed"),
    [
        ("fedevi-table1", ["kvasir", "etis", "other"], ["Kvasir", "ETIS"]),
        ("fedevi-table3", ["drishti_gs", "rim_one_r3"], ["Drishti-GS", "RIM-ONE-r3"]),
        ("safcf-table1", ["ucsf_pdgm", "UPENN-GBM", "msd_brain"], ["UCSF-PDGM", "UPenn-GBM", "MSD Brain"]),
        ("safcf-table7", ["busi"], ["BUS"]),
    ],
)
def test_clients_are_found_by_the_key_of_their_card(
    name: str, clients: list[str], printed: list[str]
) -> None:
    matched = match_columns(papers.load(name), clients)
    found = {column: ours for column, ours in matched.items() if ours in clients}

    assert found == dict(zip(printed, clients, strict=False))


def test_the_name_of_a_row_stands_for_all_its_points_of_the_grid() -> None:
    rows, _, _ = list_preset_rows(papers.load("safcf-table1"), ["data.phantom.dimensions=3"], ["FedDice"])

    assert [row.label for row in rows] == [f"FedDice, rounds={rounds}" for rounds in (10, 50, 100)]


def test_a_label_with_a_comma_is_chosen_by_its_name() -> None:
    grid = planned("fedevi-table1", {"methods": ["FedAvg", "batch norm", "FedAvg", "FedBN"], "seeds": 1})

    assert [row.label for row in grid.rows] == ["FedAvg", "FedBN", "FedAvg, batch norm"]


def test_rows_that_differ_in_rounds_are_read_off_one_run() -> None:
    labels = ["FedDice, rounds=10", "FedDice, rounds=50", "FedDice, rounds=100", "SAFCF, rounds=50"]
    rows, _, notes = list_preset_rows(papers.load("safcf-table1"), ["data.phantom.dimensions=3"], labels)

    assert [(row.label, row.run_of, row.after) for row in rows] == [
        (labels[0], labels[2], 10), (labels[1], labels[2], 50), (labels[2], None, None), (labels[3], None, None)
    ]  # fmt: skip
    assert rows[2].settings["rounds"] == 100 and rows[2].settings["evaluate"]["test_after"] == [10, 50]
    assert rows[3].settings["rounds"] == 50 and "test_after" not in rows[3].settings["evaluate"]
    assert any("one run" in note for note in notes)
    grid = planned("safcf-table1", {"methods": labels}, ["data.phantom.dimensions=3", "seed=1"])
    assert {cell.row for cell in grid.cells} == {labels[2], labels[3]}


@mark.parametrize("change", ["evaluate.model=best", "optimizer.schedule.name=polynomial"])
def test_runs_that_depend_on_their_number_of_rounds_are_not_shared(change: str) -> None:
    labels = ["FedDice, rounds=10", "FedDice, rounds=50"]
    overrides = ["data.phantom.dimensions=3", change]
    rows, _, _ = list_preset_rows(papers.load("safcf-table1"), overrides, labels)

    assert [row.run_of for row in rows] == [None, None]


def test_the_note_names_the_paper_and_what_cannot_be_compared() -> None:
    labels = ["FedAvg, polyp", "FedEvi, polyp"]
    note = describe_published(papers.load("fedevi-table4"), labels, ["Kvasir"], "px", synthetic=True)

    assert "FedEvi" in note and "Table 4" in note and "left out: ETIS, ColonDB, ClinicDB." in note
    assert "cannot be compared" in note


def test_the_note_of_a_table_of_validation_cases_says_so() -> None:
    note = describe_published(papers.load("safcf-table11"), ["lam=0.5"], ["MSD Brain"], "mm", synthetic=False)

    assert "Published numbers are of validation cases, ours of test cases." in note


def test_every_preset_that_runs_something_can_be_planned() -> None:
    for name in papers.list_names():
        preset = papers.load(name)
        list_printed_values(preset, [], "mm")
        for cell in preset.list_runs():
            assert cell.datasets in preset.datasets


# From a data folder to the page


@mark.slow
@mark.parametrize("name", [name for name in papers.list_names() if papers.load(name).list_runs()])
def test_every_preset_runs_from_data_in_its_true_layout_to_the_page(name: str, tmp_path: Path) -> None:
    preset = papers.load(name)
    small, alone = Scale.parse("0.01"), ["compute.threads=1"]
    grid = plan_paper(preset, ["synthetic"], tmp_path, scale=small, overrides=alone)
    assert len(grid.rows) == len(preset.list_runs())
    for cell in grid.cells:  # in this process: starting others takes longer than a cell
        wr.run(dict(cell.settings), overrides=[f"output={tmp_path / 'cells' / cell.name}"])
    found = run_grid(grid, tmp_path, jobs=1)

    assert not found.failures and len(found.results) == len(grid.cells)
    table = found.published()
    assert (table is None) == (not preset.published.rows)
    if table is not None:
        assert {row[0] for row in table.rows} <= set(preset.published.rows)
        assert {row[0] for row in table.rows} == {row.label for row in grid.rows} & set(preset.published.rows)
    page = unescape(write_report([tmp_path]).read_text(encoding="utf-8"))
    assert "Scaled to 0.01" in page and all(note in page for note in preset.published.notes)
    assert all((tmp_path / f"figures/{kind}.png").exists() for kind in preset.figures)
