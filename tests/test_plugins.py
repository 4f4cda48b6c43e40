"""Methods, objectives, networks, metrics and readers of a user's own, in a folder outside the package."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import call, settings
from pytest import CaptureFixture, MonkeyPatch

import wardround as wr
from wardround import plugins
from wardround.errors import ConfigError
from wardround.methods import METHODS

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_code"


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The example's folder elsewhere, and started there."""
    folder = tmp_path / "own"
    shutil.copytree(EXAMPLE, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return folder


def train(folder: Path, monkeypatch: MonkeyPatch, capsys: Any, **changes: Any) -> dict[str, Any]:
    """`wardround train` of a tiny run, through the command line; its result."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings(folder / "run", **changes)))
    code, _, error = call(monkeypatch, capsys, "train", "tiny.yaml", "--quiet", "--no-report")
    assert code == 0, error
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return result


def test_a_method_of_ones_own_trains_and_its_settings_are_checked(
    own_folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 12, 16]}}
    method = {"name": "my_method:EqualWeights"}
    result = train(own_folder, monkeypatch, capsys, data=data, method=method)
    record = json.loads((own_folder / "run" / "records.jsonl").read_text().splitlines()[0])

    assert result["method"] == "my_method:EqualWeights"
    assert list(record["weights"].values()) == pytest.approx([1 / 3] * 3)
    with pytest.raises(ConfigError, match="'by_case' is not a setting|by_case is not a setting"):
        wr.load_config({"method": {**method, "by_case": 1}})


def test_an_objective_of_ones_own_trains(
    own_folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    result = train(own_folder, monkeypatch, capsys, objective={"name": "my_objective:LogCoshDice"})

    assert result["status"] == "done"


def test_a_network_and_a_metric_of_ones_own(
    own_folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    result = train(
        own_folder,
        monkeypatch,
        capsys,
        model={"name": "my_network:TinyNet", "arguments": {"width": 4}},
        evaluate={"metrics": ["dice", "my_metric:volume_similarity"], "overlays": 0},
    )
    heading = (own_folder / "run" / "cases.csv").read_text().splitlines()[0]

    assert "my_metric:volume_similarity" in heading
    assert "my_metric:volume_similarity" in json.dumps(result["test"])


def test_a_reader_of_ones_own_reads_a_dataset(
    own_folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, _, error = call(
        monkeypatch, capsys, "data", "phantom", "made", "--set", "size=16", "--set", "cases=8"
    )
    assert code == 0, error
    for centre in ("north", "south"):
        for image in sorted((own_folder / "made" / centre / "images").iterdir()):
            patient = own_folder / "scans" / centre / image.name.removesuffix(".nii.gz")
            patient.mkdir(parents=True)
            shutil.copy(image, patient / "scan.nii.gz")
            shutil.copy(own_folder / "made" / centre / "labels" / image.name, patient / "mask.nii.gz")
    sources = [{"path": f"scans/{c}", "reader": "my_reader:READER", "client": c} for c in ("north", "south")]
    (own_folder / "federation.yaml").write_text(
        yaml.safe_dump({"sources": sources, "labels": {"lesion": [1]}, "prepare": {"size": [16, 16]}})
    )

    result = train(own_folder, monkeypatch, capsys, data={"federation": "federation.yaml"})

    assert {"north", "south"} <= set(json.dumps(result["test"]).split('"'))


def test_the_example_runs_as_it_says(
    own_folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, error = call(monkeypatch, capsys, "train", "run.yaml", "--set", "rounds=1")

    assert code == 0, error
    assert "Volume similarity" in out


def test_an_entry_point_is_found_by_its_name(own_folder: Path, monkeypatch: MonkeyPatch) -> None:
    point = EntryPoint("equal_weights", "my_method:EqualWeights", "wardround.methods")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])

    found = METHODS.find("equal_weights")

    assert found.__name__ == "EqualWeights"
    METHODS._loaded.clear()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SCAFFOLD", "Did you mean 'scaffold'"),
        ("nowhere.at_all:Method", "there is no module 'nowhere'"),
        ("my_method:Equalweights", "Did you mean 'EqualWeights'"),
        ("my_network:TinyNet", "which is not a class that extends wardround.Method"),
        ("broken_plugin:Method", "cannot be imported: ZeroDivisionError"),
        ("leaving_plugin:Method", "cannot be imported: SystemExit"),
    ],
)
def test_what_is_not_a_method_is_one_sentence(own_folder: Path, name: str, words: str) -> None:
    (own_folder / "broken_plugin.py").write_text("1 / 0\n")
    (own_folder / "leaving_plugin.py").write_text("raise SystemExit(3)\n")

    with pytest.raises(ConfigError, match=words):
        wr.load_config({"method": {"name": name}})


def test_nothing_is_imported_by_looking_a_name_up(own_folder: Path) -> None:
    (own_folder / "touched.py").write_text("from pathlib import Path\nPath('imported').touch()\n")

    assert "touched:Method" not in METHODS and METHODS.get("touched:Method") is None
    assert not (own_folder / "imported").exists()
