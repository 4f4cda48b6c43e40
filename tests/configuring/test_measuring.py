"""Measuring: training cases alone, those that the check allows, each file read once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from helpers import SHARED
from PIL import Image

from wardround.configuring.joining import join_fingerprints
from wardround.configuring.measuring import measure_federation
from wardround.configuring.run_plan import read_data_settings
from wardround.data.checking import facts as checking
from wardround.data.settings import DataSettings
from wardround.engine.egress import describe_fingerprint
from wardround.errors import DataError

HEAD = ["client", "case", "group", "split", "image", "label"]


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """Two hospitals of six training cases, 12 x 10; validation and test cases are 40 x 40, with other values."""
    rows = []
    random = np.random.default_rng(0)
    for client in ("north", "south"):
        for number in range(8):
            split = "val" if number == 6 else "test" if number == 7 else "train"
            side = (12, 10) if split == "train" else (40, 40)
            image = random.integers(1, 100, side, dtype=np.uint8) + (0 if split == "train" else 100)
            label = np.zeros(side, dtype=np.uint8)
            label[2:6, 2:6] = 1
            name = f"{client}{number}"
            Image.fromarray(image.astype(np.uint8)).save(tmp_path / f"{name}.png")
            Image.fromarray(label).save(tmp_path / f"{name}_label.png")
            rows.append([client, name, name, split, f"{name}.png", f"{name}_label.png"])
    with (tmp_path / "cases.csv").open("w", newline="") as file:
        csv.writer(file).writerows([HEAD, *rows])
    path = tmp_path / "federation.yaml"
    path.write_text("version: 1\nsources: [{path: cases.csv}]\nlabels: {organ: [1]}\n")
    return path


def test_only_training_cases_are_measured(federation: Path) -> None:
    told, facts = measure_federation(federation)

    assert [(one.client, one.cases) for one in told] == [("north", 6), ("south", 6)]
    assert [axis.high for axis in facts.shape] == [12, 10]
    assert facts.channels[0].percentile_99_5 < 101
    assert [(one.name, one.num_train) for one in facts.clients] == [("north", 6), ("south", 6)]


def test_facts_say_who_annotates_some_classes_only(federation: Path) -> None:
    for path in federation.parent.glob("south*_label.png"):
        label = np.asarray(Image.open(path)).copy()
        label[7:9, 7:9] = 2
        Image.fromarray(label).save(path)
    given = federation.read_text().replace("organ: [1]", "organ: [1], spot: [2]")
    federation.write_text(given + "annotates: {north: [organ], south: [organ, spot]}\n")

    _, facts = measure_federation(federation)

    assert {client.name: client.annotates for client in facts.clients} == {"north": ("organ",), "south": ()}
    assert facts.partial is not None and facts.partial.name == "north"


def test_splits_of_the_run_take_the_place_of_those_of_the_file(federation: Path) -> None:
    settings = DataSettings(
        federation=federation, splits={"by": "ratios", "ratios": [0.5, 0.25, 0.25], "seed": 1}
    )
    _, facts = measure_federation(federation, settings)

    assert [one.num_train for one in facts.clients] == [4, 4]


def test_cases_that_the_check_leaves_out_are_left_out(federation: Path) -> None:
    folder = federation.parent
    (folder / "north0.png").write_bytes(b"broken")
    Image.fromarray(np.full((12, 10), 9, dtype=np.uint8)).save(folder / "north1_label.png")  # 9 is no class
    (folder / "south0.png").write_bytes((folder / "south7.png").read_bytes())  # a copy of a test case
    (folder / "south0_label.png").write_bytes((folder / "south7_label.png").read_bytes())
    told, facts = measure_federation(federation)

    assert [one.cases for one in told] == [4, 5]
    assert facts.shape[0].high == 12


def test_every_file_but_the_first_is_opened_once(federation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = checking.read_image

    def count(paths: Any) -> Any:
        opened.extend(path.name for path in paths)
        return read(paths)

    monkeypatch.setattr(checking, "read_image", count)
    measure_federation(federation)

    assert sorted(opened)[1:] == sorted(set(opened)), "the first says what all are compared with"
    assert len(opened) == 17


def test_progress_is_reported_and_ctrl_c_ends_it(federation: Path) -> None:
    seen = []
    measure_federation(federation, on_progress=lambda done, total, where: seen.append((done, total)))
    assert seen == [(number, 12) for number in range(1, 13)]

    def stop(done: int, total: int, where: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_federation(federation, on_progress=stop)


def test_one_thread_and_many_measure_the_same(federation: Path) -> None:
    assert measure_federation(federation, jobs=1) == measure_federation(federation, jobs=4)


def test_as_at_hospitals_a_client_of_few_patients_is_not_described(federation: Path) -> None:
    text = (federation.parent / "cases.csv").read_text()
    (federation.parent / "cases.csv").write_text(text.replace("south3,south3,", "south3,south2,"))
    told, facts = measure_federation(federation, minimum=6)

    assert [one.is_open for one in told] == [True, False]
    assert facts.clients[1].num_train == 6, "6 or more"


def test_a_usable_case_that_cannot_be_measured_is_named(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("wardround.configuring.measuring.measure_case", fail)
    with pytest.raises(
        DataError, match=r"client 'north', case 'north0' could not be measured: .*MemoryError"
    ):
        measure_federation(federation)


def test_no_usable_case_is_refused_with_the_reason(federation: Path) -> None:
    for path in federation.parent.glob("*_label.png"):
        path.unlink()
    with pytest.raises(DataError, match=r"no training case is usable\. The first: client .*does not exist"):
        measure_federation(federation)


def test_cases_that_are_left_out_and_clients_held_out_are_said(federation: Path) -> None:
    for number in range(4):
        (federation.parent / f"south{number}.png").write_bytes(b"no picture")
    federation.write_text(federation.read_text() + "clients: [north, south]\nheld_out: [west]\n")
    rows = (federation.parent / "cases.csv").read_text()
    own = [row.replace("south", "west") for row in rows.splitlines() if "south7" in row]
    for name in ("west7.png", "west7_label.png"):
        (federation.parent / name).write_bytes(
            (federation.parent / name.replace("west", "south")).read_bytes()
        )
    (federation.parent / "cases.csv").write_text("\n".join([*rows.splitlines(), *own]))
    _, facts = measure_federation(federation)

    assert [(client.name, client.num_train) for client in facts.clients] == [("north", 6), ("south", 2)]
    assert facts.notes[0] == "Held out for testing, so they do not train: west."
    assert facts.notes[1].startswith("Of the 8 cases of client 'south', 4 can be used. The first:")


def test_a_fingerprint_has_a_line_in_the_ledger(federation: Path) -> None:
    told, _ = measure_federation(federation)
    line = describe_fingerprint("north", told[0].as_bytes(), 6)

    assert (line["client"], line["task"], line["bytes"]) == ("north", "fingerprint", len(told[0].as_bytes()))
    assert (line["round"], line["phase"], len(line["sha256"])) == (0, "round", 64)


def test_volumes_of_other_orientations_are_measured_along_prepared_axes(tmp_path: Path) -> None:
    (tmp_path / "north/images").mkdir(parents=True)
    (tmp_path / "north/labels").mkdir()
    label = np.zeros((6, 10, 8), dtype=np.int16)
    label[2:4, 2:4, 2:4] = 1
    affine = np.array([[0, 0, 2.0, 0], [0, 0.5, 0, 0], [3.0, 0, 0, 0], [0, 0, 0, 1]])  # stored as S, A, R
    for number in range(6):
        image = np.random.default_rng(number).integers(1, 9, label.shape).astype(np.int16)
        for kind, data in (("images", image), ("labels", label)):
            nibabel.save(nibabel.Nifti1Image(data, affine), tmp_path / f"north/{kind}/p{number}.nii.gz")
    path = tmp_path / "federation.yaml"
    path.write_text("version: 1\nsources: [{path: north, client: north}]\nlabels: {organ: [1]}\n")
    _, facts = measure_federation(path)

    assert [axis.median for axis in facts.spacing] == [2.0, 0.5, 3.0]
    assert [axis.median for axis in facts.shape] == [8, 10, 6]
    assert facts.has_spacing

    path.write_text(path.read_text() + "prepare: {orientation: SAR}\n")
    assert measure_federation(path)[1].spacing == facts.spacing, "a plan sets RAS, whatever the file says"
    own = read_data_settings(path, ["data.prepare.orientation=SAR"])
    assert [axis.median for axis in measure_federation(path, own)[1].spacing] == [3.0, 0.5, 2.0]


@pytest.mark.skipif(not (SHARED / "lgg3d").exists(), reason="the shared data are not here")
def test_facts_of_real_hospitals_are_those_of_their_raw_cases(tmp_path: Path) -> None:
    path = tmp_path / "federation.yaml"
    path.write_text(
        f"version: 1\nsources: [{{path: {SHARED / 'lgg3d'}}}]\nclients: [TCGA_CS, TCGA_FG]\nlabels: {{tumour: [1]}}\n"
    )
    with (SHARED / "lgg3d/index.csv").open() as file:
        rows = [
            r for r in csv.DictReader(file) if r["centre"] in ("TCGA_CS", "TCGA_FG") and r["split"] == "train"
        ]
    shapes, values = [], []
    for row in rows:
        folder = SHARED / "lgg3d" / row["centre"]
        image, label = (
            np.asarray(nibabel.load(folder / kind / f"{row['stem']}.nii.gz").dataobj)  # type: ignore[attr-defined]
            for kind in ("images", "labels")
        )
        places = np.argwhere((image != 0) | (label > 0))
        shapes.append(places.max(0) - places.min(0) + 1)
        values.append(np.quantile(image[label > 0], np.linspace(0, 1, 2001)))
    told, facts = measure_federation(path, minimum=1)

    assert facts.num_train == len(rows)
    median, high = np.quantile(shapes, (0.5, 0.9), axis=0)
    np.testing.assert_allclose([axis.median for axis in facts.shape], median)
    np.testing.assert_allclose([axis.high for axis in facts.shape], high)
    assert [axis.median for axis in facts.spacing] == [1.0, 1.0, 1.0]
    ends = [facts.channels[0].percentile_00_5, facts.channels[0].percentile_99_5]
    np.testing.assert_allclose(ends, np.quantile(np.concatenate(values), (0.005, 0.995)), atol=1.0)
    assert join_fingerprints(told, labels={"tumour": (1,)}).shape == facts.shape
