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
from wardround.data.federation import Federation, ScanSummary
from wardround.data.opening import open_federation
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.settings import DataSettings
from wardround.deploy.agreement import elsewhere
from wardround.engine.judging.result_tables import detect_units, find_interval, read_units
from wardround.exporting.card import card
from wardround.exporting.package import Package
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
        "client", "Dice", "HD95 (px)", "Volume difference (1000 px)", "n", "95 % interval (Dice)",
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
        "client", "Dice", "HD95 (mm)", "Volume difference (ml)", "n", "95 % interval (Dice)",
    ]  # fmt: skip
    assert "HD95 (mm)" in page and "(px)" not in page and "1000 px" not in page


def test_where_some_files_have_a_spacing_both_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    result = trained(tmp_path / "run", folders["both"])

    assert result.table.columns[2] == "HD95 (mm or px)"
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
