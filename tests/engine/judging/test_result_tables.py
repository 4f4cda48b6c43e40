"""Distances are in millimetres where files tell them and in pixels where they do not, and tables say which."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from helpers import run, settings
from pytest import MonkeyPatch, TempPathFactory, approx, fixture, mark
from scipy import stats

import wardround as wr
from comparison.here import Here
from wardround import batch
from wardround.comparison.headline import as_text
from wardround.data.federation import Federation, ScanSummary
from wardround.data.opening import open_federation
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.settings import DataSettings
from wardround.deploy.agreement import elsewhere
from wardround.engine.judging.evaluation import Evaluation, summarise_cases
from wardround.engine.judging.result_tables import (
    case_rows,
    client_table,
    detect_units,
    find_interval,
    method_table,
    read_case_rows,
    read_units,
)
from wardround.exporting.card import card
from wardround.exporting.package import Package
from wardround.files import write_text
from wardround.metrics import METRICS, MM, MM_OR_PX, PX, summarise
from wardround.reporting import write_report

EVALUATE = {"metrics": ["dice", "hd95", "volume_difference"], "select": "hd95", "overlays": 0}


@fixture(scope="module")
def folders(tmp_path_factory: TempPathFactory) -> dict[str, Path]:
    """The same two hospitals as pictures, as NIfTI slices, and one of each; each with a federation.yaml."""
    root = tmp_path_factory.mktemp("files")
    made = PhantomSettings(hospitals=2, size=16, cases=8)
    for name, form in (("pictures", "png"), ("slices", "nifti")):
        phantom_files.write(made, root / name / "scans", form, 1)  # type: ignore[arg-type]
    shutil.copytree(root / "pictures", root / "both")
    shutil.rmtree(root / "both/scans/north")
    shutil.copytree(root / "slices/scans/north", root / "both/scans/north")
    for name in ("pictures", "slices", "both"):
        plain = {"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "prepare": {"size": [16, 16]}}
        (root / name / "federation.yaml").write_text(yaml.safe_dump(plain))
    return {name: root / name / "federation.yaml" for name in ("pictures", "slices", "both")}


def trained(folder: Path, file: Path) -> Any:
    return run(folder, rounds=1, data={"federation": str(file)}, evaluate=EVALUATE)


def here(**data: Any) -> str:
    return detect_units(open_federation(DataSettings.model_validate(data), seed=0))


def test_files_without_a_spacing_are_in_pixels(folders: dict[str, Path]) -> None:
    assert here(federation=folders["pictures"]) == PX
    assert here(federation=folders["slices"]) == MM
    assert here(federation=folders["both"]) == MM_OR_PX
    assert here(phantom={"hospitals": 2, "size": 16}) == MM


@mark.parametrize(
    ("dimensions", "spacing", "expected"),
    [
        (2, ((1.0, 1.0), (1.0, 1.0)), MM_OR_PX),
        (2, ((0.5, 1.0), (1.0, 1.0)), MM),
        (2, None, MM),
        (3, ((1.0,) * 3, (1.0,) * 3), MM),
    ],
)
def test_hospitals_tell_sides_and_not_files(dimensions: int, spacing: Any, expected: str) -> None:
    known = Federation(
        names=["north"],
        counts={"north": 3},
        dimensions=dimensions,
        in_channels=1,
        num_classes=2,
        regions={},
        load_one=elsewhere,
        summarise_scans=lambda: ScanSummary(None, None, spacing),
    )
    assert detect_units(known) == expected


def test_a_run_on_pictures_says_pixels_everywhere(folders: dict[str, Path], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", folders["pictures"])
    page = write_report([result.folder]).read_text(encoding="utf-8")
    told = card(Package.of(result.folder), kind="a folder", files={})

    assert result.summary["units"] == "px" and set(result.summary["test"]) >= {"hd95"}
    assert list(result.table.columns) == [
        "client", "Dice", "95 % interval (Dice)", "n", "HD95 (px)", "Volume difference (1000 px)",
    ]  # fmt: skip
    assert wr.Result.load(result.folder).table.columns == result.table.columns
    assert "Validation HD95 (px)" in page and "Test HD95 (px) of every case" in page
    for text in (page, told):
        assert "HD95 (px)" in text and "(mm)" not in text and "(ml)" not in text
    assert "voxels of the training scans" not in told


def test_a_run_on_slices_with_a_spacing_says_millimetres(folders: dict[str, Path], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", folders["slices"])
    page = write_report([result.folder]).read_text(encoding="utf-8")

    assert list(result.table.columns) == [
        "client", "Dice", "95 % interval (Dice)", "n", "HD95 (mm)", "Volume difference (ml)",
    ]  # fmt: skip
    assert "HD95 (mm)" in page and "(px)" not in page and "1000 px" not in page


def test_where_some_files_have_a_spacing_both_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", folders["both"])

    assert result.table.columns[4] == "HD95 (mm or px)"
    assert "Where a file has no spacing, distances are in pixels (px), else in mm." in result.table.caption


def test_a_comparison_on_pictures_says_pixels(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "ChildProcess", Here)
    values = settings(tmp_path, rounds=1, data={"federation": str(folders["pictures"])}, evaluate=EVALUATE)
    values.pop("output")
    found = wr.compare(values, methods=["fedavg", "local"], output=tmp_path / "all", jobs=1)
    text = (tmp_path / "all/table-hd95.md").read_text()
    stored = json.loads((tmp_path / "all/statistics.json").read_text())["metrics"]

    assert "test HD95 (px)" in found.table("hd95").title and "HD95 (px)" in text and "(mm)" not in text
    assert stored["hd95"]["unit"] == "px" and stored["dice"]["unit"] == ""


def test_a_run_under_way_does_not_claim_a_unit(folders: dict[str, Path], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", folders["pictures"])
    for name in ("result.json", "cases.csv"):
        (result.folder / name).unlink()
    page = write_report([result.folder]).read_text(encoding="utf-8")

    assert "Validation HD95" in page and "(mm)" not in page and "(px)" not in page


def test_results_of_before_are_in_millimetres(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, evaluate=EVALUATE)
    path = result.folder / "result.json"
    for odd in ({}, {"units": "ell"}, {"lengths": "ell"}):
        stored = {key: value for key, value in result.summary.items() if key != "units"}
        path.write_text(json.dumps({**stored, **odd}))
        assert "HD95 (mm)" in write_report([result.folder]).read_text(encoding="utf-8")


def test_the_interval_of_a_client_is_students_and_one_score_has_none() -> None:
    values = [0.5, 0.6, 0.7, 0.8]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))

    assert find_interval(summarise(values), "dice") == approx(expected)
    assert np.isnan(find_interval(summarise([0.5]), "dice").low)
    assert find_interval(summarise([0.9, 1.0]), "dice").high == 1.0
    assert find_interval(summarise([0.1, 9.0]), "hd95").low == 0.0


def two_structures() -> Evaluation:
    """Rim and cup at two hospitals; nobody drew the cup in south, and east was held out."""
    rim, cup = [0.8, 0.6, 0.7], [0.4, 0.5, 0.9]
    cases = {
        "north": [
            {"case": f"n{k}", "regions": {"rim": {"dice": r, "hd95": 2.0}, "cup": {"dice": c, "hd95": 4.0}}}
            for k, (r, c) in enumerate(zip(rim, cup, strict=True))
        ],
        "south": [{"case": "s0", "regions": {"rim": {"dice": 0.5, "hd95": 6.0}}}],
        "east": [
            {"case": "e0", "regions": {"rim": {"dice": 0.1, "hd95": 9.0}, "cup": {"dice": 0.3, "hd95": 9.0}}}
        ],
    }
    return summarise_cases(cases, ["dice", "hd95"]).set_apart(["east"])


def test_several_structures_have_rows_of_their_own() -> None:
    table = client_table(two_structures(), ["dice", "hd95"], "Scores")
    found = {(row[0], row[1]): row[2:] for row in table.rows}

    assert list(table.columns) == ["client", "structure", "Dice", "95 % interval (Dice)", "n", "HD95 (mm)"]
    assert list(dict.fromkeys(row[1] for row in table.rows)) == ["all", "rim", "cup"]
    assert found["north", "rim"][0] == approx(0.7) and found["north", "cup"][0] == approx(0.6)
    assert found["north", "all"][0] == approx(0.65) and found["mean", "rim"][0] == approx(0.6)
    assert found["east (held out)", "cup"][0] == approx(0.3) and found["mean", "cup"][0] == approx(0.6)
    assert "All: every case counts once for each of its structures" in table.caption


def test_a_structure_that_a_client_does_not_have_is_not_available_there() -> None:
    table = client_table(two_structures(), ["dice"], "Scores")
    rows = {(row[0], row[1]): row for row in table.cells()}

    assert rows["south", "cup"][2:] == ["n/a", "n/a", "0"]
    assert rows["SD between clients", "cup"][2] == "n/a"  # one client is left
    assert rows["south", "all"][2:] == ["0.500", "n/a", "1"]


def test_regions_of_a_case_are_one_observation() -> None:
    """n counts cases, and the interval is that of the cases' means, around the mean that is printed."""
    row = next(
        row for row in client_table(two_structures(), ["dice"], "").rows if row[:2] == ["north", "all"]
    )
    means = [0.6, 0.55, 0.8]
    expected = stats.t.interval(0.95, 2, np.mean(means), stats.sem(means))

    assert row[4] == 3 and row[3] == approx((expected[0], min(1.0, expected[1])))


def test_cases_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    test = two_structures()
    write_text(tmp_path / "cases.csv", case_rows(test, ["dice", "hd95"]).csv())
    (tmp_path / "bad.csv").write_text("client,case,region,dice\nnorth,n0,rim,high\n")

    assert read_case_rows(tmp_path / "cases.csv") == test.cases
    assert read_case_rows(tmp_path / "bad.csv") == read_case_rows(tmp_path / "none.csv") == {}


def test_clients_made_by_a_partition_are_marked_in_tables_report_and_card(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "ChildProcess", Here)
    file = yaml.safe_load(folders["slices"].read_text())
    file["sources"] = [{"path": str(folders["slices"].parent / "scans"), "reader": "centres"}]
    (tmp_path / "iid.yaml").write_text(yaml.safe_dump({**file, "partition": {"kind": "iid", "clients": 2}}))
    said = "Clients are an artificial partition of scans by chance (iid), not hospitals."
    values = settings(tmp_path, rounds=1, data={"federation": str(tmp_path / "iid.yaml")})
    values.pop("output")
    found = wr.compare(values, methods=["fedavg"], output=tmp_path / "all", jobs=1)
    result = next(iter(found.results.values()))
    page = write_report([result.folder]).read_text(encoding="utf-8")

    assert (
        said in result.table.caption and said in found.table().caption and said in found.hospitals().caption
    )
    assert said in as_text(found.headline()) and page.count(said) == 3  # also below the table, and as data
    assert "partition of one collection of cases by chance (iid)" in card(
        Package.of(result.folder), kind="x", files={}
    )
    assert "partition" not in wr.run(settings(tmp_path / "natural", rounds=1)).summary


def test_the_demos_table_has_its_sums_first_and_counts_test_cases() -> None:
    table = method_table({"mine": two_structures()}, "dice", "Scores", {"elsewhere": [0.25]})

    assert list(table.columns) == ["method", "mean", "worst", "elsewhere", "east", "north", "south"]
    assert table.rows[0][1:4] == approx([0.575, 0.5, 0.25]) and table.rows[0][4:] == approx([0.2, 0.65, 0.5])
    assert "Test cases: north 3, south 1, east 1." in table.caption


def test_the_demos_table_has_objectives_beside_the_methods_where_they_differ() -> None:
    found = {"a": two_structures(), "b": two_structures()}
    table = method_table(found, "dice", "", objectives=["dice_bce", "evidential"])

    assert [row[:2] for row in table.rows] == [["a", "dice_bce"], ["b", "evidential"]]
    assert list(table.columns)[:3] == ["method", "objective", "mean"]
    assert "objective" not in method_table(found, "dice", "", objectives=["dice", "dice"]).columns


def test_units_follow_what_lengths_are_in() -> None:
    found = [METRICS["hd95"].unit_in(lengths) for lengths in (MM, PX, MM_OR_PX, "")]

    assert found == ["mm", "px", "mm or px", ""]
    assert METRICS["dice"].unit_in(PX) == "" and METRICS["dice"].title_in(PX) == "Dice"


def test_a_result_that_says_lengths_is_read_as_units() -> None:
    assert [read_units(result) for result in ({"lengths": "px"}, {"units": "mm or px"}, {})] == [
        PX,
        MM_OR_PX,
        MM,
    ]


def test_structures_stand_in_the_order_of_whoever_has_most_and_partial_clients_are_named() -> None:
    cases = {
        "east": [{"case": "p1", "regions": {"cup": {"dice": 0.5}}}],
        "north": [{"case": "p1", "regions": {"disc": {"dice": 0.9}, "cup": {"dice": 0.7}}}],
    }
    found = client_table(summarise_cases(cases, ["dice"]), ["dice"], "Scores")

    assert list(dict.fromkeys(row[1] for row in found.rows)) == ["all", "disc", "cup"]
    assert (
        "Clients are scored in what they annotate alone (east cup), so compare them structure"
        in found.caption
    )
    whole = client_table(summarise_cases({"north": cases["north"]}, ["dice"]), ["dice"], "Scores")
    assert "annotate" not in whole.caption
