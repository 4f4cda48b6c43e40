"""What clients annotate: groups of classes, and runs in which hospitals outline different organs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers import run, settings, whole_and_resumed
from PIL import Image

import wardround as wr
from wardround.data.annotation import Annotation, annotations_of, measurable, shared_annotation
from wardround.data.checking.check import check
from wardround.data.federation_file import load
from wardround.data.opening import open_federation
from wardround.data.phantom.cases import PhantomSettings, make_client
from wardround.data.phantom.files import write as write_files
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.data.sources import list_cases
from wardround.errors import ConfigError, DataError
from wardround.methods import METHODS

ORGANS = ("skull", "nuclei", "ventricles", "lesion")
FOUR = {"hospitals": 4, "size": 24, "cases": 8, "organs": ORGANS}
ONE_EACH = dict(zip(("north", "east", "south", "west"), ([organ] for organ in ORGANS), strict=True))
PARTIAL = {"phantom": {**FOUR, "annotates": ONE_EACH}}


def test_classes_with_the_same_outlines_are_one_group() -> None:
    assert Annotation.of([[2]], 4) == Annotation((0, 0, 1, 0))
    assert Annotation.of([[1, 2]], 3) == Annotation((0, 1, 1))
    assert Annotation.of([[1, 2], [2]], 3) is None
    assert Annotation.of([[1]], 2) is None
    assert Annotation((0, 1, 0)).unannotated == (2,)


def test_a_region_can_be_measured_where_it_is_a_union_of_what_is_told() -> None:
    regions = {"disc": [1, 2], "cup": [2], "rim": [1]}
    assert list(measurable(regions, Annotation((0, 1, 1)))) == ["disc"]
    assert list(measurable(regions, Annotation((0, 0, 1)))) == ["cup"]
    assert measurable(regions, None) is regions


def test_labels_hide_what_is_not_annotated_and_keep_their_type() -> None:
    label = torch.tensor([0, 1, 2, 3, 4], dtype=torch.uint8)
    annotation = Annotation((0, 1, 1, 0, 2))

    assert annotation.hide(label).tolist() == [0, 1, 1, 0, 4]
    assert annotation.to_groups(label).tolist() == [0, 1, 1, 0, 2]
    assert annotation.hide(label).dtype == torch.uint8
    voxels = {number: torch.tensor([[number, number]]) for number in (1, 2, 3)}
    assert {n: v.tolist() for n, v in annotation.hide_voxels(voxels).items()} == {1: [[1, 1], [2, 2]]}


@pytest.mark.parametrize(
    ("annotates", "message"),
    [
        ({"nrth": ["liver"]}, "client 'nrth', which does not exist. Did you mean 'north'"),
        ({"north": ["livr"]}, "annotates.north names 'livr'.*Did you mean 'liver'.*liver, kidney, both"),
        ({"north": []}, "annotates.north is empty"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_those_that_do(annotates: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        annotations_of(annotates, ["liver", "kidney"], {"both": [1, 2]}, ["north", "south"])


def test_a_name_of_a_class_and_of_another_region_is_refused() -> None:
    regions = {"tumour": [1, 2], "oedema": [2]}
    with pytest.raises(ConfigError, match=r"'tumour', which is class 1 under labels but joins \[1, 2\]"):
        annotations_of({"north": ["tumour"]}, ["tumour", "oedema"], regions, ["north"])
    assert annotations_of({"north": ["oedema"]}, ["tumour", "oedema"], regions, ["north"])


def test_cases_are_pooled_only_where_all_clients_annotate_the_same() -> None:
    one, other = Annotation((0, 1, 0)), Annotation((0, 0, 1))
    assert shared_annotation({"north": one, "south": one}) == one
    assert shared_annotation({"north": None}) is None
    with pytest.raises(ConfigError, match="cannot be trained on as one set"):
        shared_annotation({"north": one, "south": other})


# Synthetic hospitals


def test_a_phantom_hospital_holds_the_labels_of_what_it_annotates_alone() -> None:
    whole, part = (PhantomSettings(**FOUR, annotates=given) for given in ({}, ONE_EACH))
    for number, name in enumerate(ONE_EACH, start=1):
        every, own = make_client(whole, name, 1).train, make_client(part, name, 1).train
        labels, hidden = every.batch(range(len(every))).label, own.batch(range(len(own))).label
        assert torch.equal(hidden, torch.where(labels == number, labels, 0))
        assert torch.equal(every.batch([0]).image, own.batch([0]).image)
    assert set(labels.unique().tolist()) == {0, 1, 2, 3, 4}


# Files

PATCHES = {"patch": [16, 16], "foreground": 1.0}


@pytest.mark.parametrize("cut", [{}, PATCHES])
def test_labels_that_hold_more_than_is_annotated_give_the_bytes_of_those_that_do_not(
    tmp_path: Path, cut: dict[str, Any]
) -> None:
    """Voxels of other classes are hidden from losses, scores, and the places where patches are cut."""
    found = []
    for name, given in {"hidden": ONE_EACH, "whole": {}}.items():
        write_files(PhantomSettings(**FOUR, annotates=given), tmp_path / name / "scans", "png", 1)
        labels = {organ: [number] for number, organ in enumerate(ORGANS, start=1)}
        plain = {"sources": [{"path": "scans"}], "labels": labels, "annotates": ONE_EACH}
        (tmp_path / name / "federation.yaml").write_text(yaml.safe_dump(plain))
        data = {"federation": str(tmp_path / name / "federation.yaml"), **cut}
        found.append(run(tmp_path / name / "run", data=data))

    assert found[0].outcome.state.params.sha256() == found[1].outcome.state.params.sha256()
    cases = [(result.folder / "cases.csv").read_text() for result in found]
    assert cases[0] == cases[1]


def test_voxels_to_ignore_change_neither_training_nor_scores(tmp_path: Path) -> None:
    """Two runs whose labels have different values there, all of them ignored."""
    found = []
    for number in (0, 1):
        home = tmp_path / str(number)
        write_files(PhantomSettings(hospitals=2, size=24, cases=8), home / "scans", "png", 1)
        for path in sorted((home / "scans").glob("*/labels/*.png")):
            label = np.asarray(Image.open(path)).copy()
            label[:12] = 9 if number else np.where(label[:12] == 1, 9, 8)
            Image.fromarray(label).save(path)
        plain = {"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "ignore": [8, 9]}
        (home / "federation.yaml").write_text(yaml.safe_dump(plain))
        data: dict[str, Any] = {"federation": str(home / "federation.yaml")}
        judged = {"metrics": ["dice"], "calibrate": True, "postprocess": "largest_component"}
        found.append(run(home / "run", data=data, evaluate=judged))

    assert found[0].outcome.state.params.sha256() == found[1].outcome.state.params.sha256()
    for name in ("cases.csv", "calibration.json"):
        one, other = ((result.folder / name).read_text() for result in found)
        assert one == other
    calibration = json.loads(one)
    assert calibration["overall"]["num_cases"] == len(found[0].cases) > 0
    assert calibration["overall"]["before"]["voxels"] and calibration["validation_cases"]["north"]
    assert [row["dice"] for row in calibration["cases"]] == [row["dice"] for row in found[0].cases]
    data = RealData(tmp_path / "0" / "federation.yaml", DataSettings()).load("north")
    assert data.annotation == Annotation((0, 1), ignores=True)
    assert set(data.train.batch(range(len(data.train))).label.unique().tolist()) == {0, 1, 2}


def test_a_class_that_a_client_lacks_is_no_finding_where_it_is_not_annotated(tmp_path: Path) -> None:
    write_files(PhantomSettings(**FOUR, annotates=ONE_EACH), tmp_path / "scans", "png", 1)
    labels = {organ: [number] for number, organ in enumerate(ORGANS, start=1)}
    plain: dict[str, Any] = {"sources": [{"path": "scans"}], "labels": labels}
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(plain))
    data = {"federation": str(path)}
    with pytest.raises(DataError, match=r"say what was, such as annotates: \{east: \[...\]\}"):
        run(tmp_path / "refused", data=data)
    path.write_text(yaml.safe_dump({**plain, "annotates": ONE_EACH}))
    report = check(list_cases(load(path), tmp_path), load(path))
    assert not [found for found in report.findings if found.code.startswith("class_")]


def test_a_class_that_nobody_annotates_is_a_finding_and_refused_in_training(tmp_path: Path) -> None:
    """Its output would be chance, also where only a client held out of training could judge it."""
    given = {name: organs for name, organs in ONE_EACH.items() if name != "west"}
    write_files(PhantomSettings(**FOUR, annotates=ONE_EACH), tmp_path / "scans", "png", 1)
    labels = {organ: [number] for number, organ in enumerate(ORGANS, start=1)}
    plain: dict[str, Any] = {"sources": [{"path": "scans"}], "labels": labels, "clients": sorted(given)}
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump({**plain, "annotates": given}))
    found = check(list_cases(load(path), tmp_path), load(path)).findings
    assert "No client annotates class 'lesion' by itself" in " ".join(entry.sentence for entry in found)
    for held_out in ([], ["west"]):
        every = ONE_EACH if held_out else given
        path.write_text(yaml.safe_dump({**plain, "annotates": every, "held_out": held_out}))
        with pytest.raises(ConfigError, match="class 'lesion' is annotated by no client that trains"):
            run(tmp_path / f"run{len(held_out)}", data={"federation": str(path)})


def test_annotates_and_a_partition_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "federation.yaml"
    plain = {
        "sources": [{"path": "scans"}], "labels": {"lesion": [1], "core": [2]},
        "annotates": {"north": "lesion"}, "partition": {"kind": "iid"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(plain))
    with pytest.raises(ConfigError, match="annotates names clients, but partition.kind is iid"):
        load(path)


# Whole runs


def test_naming_all_classes_gives_the_bytes_of_naming_none(tmp_path: Path) -> None:
    named = {"phantom": {**FOUR, "annotates": dict.fromkeys(ONE_EACH, ORGANS)}}
    plain = run(tmp_path / "plain", data={"phantom": FOUR}, exclusion=1.0)
    full = run(tmp_path / "full", data=named, exclusion=1.0)

    assert plain.outcome.state.params.sha256() == full.outcome.state.params.sha256()
    cases = [(folder / "cases.csv").read_bytes() for folder in (plain.folder, full.folder)]
    assert cases[0] == cases[1]


def test_each_class_is_scored_where_it_was_annotated(tmp_path: Path) -> None:
    result = run(tmp_path, data=PARTIAL)
    rows = [line.split(",") for line in (tmp_path / "cases.csv").read_text().splitlines()[1:]]

    assert {(client, region) for client, _, region, *_ in rows} == {(c, o[0]) for c, o in ONE_EACH.items()}
    found = json.loads((tmp_path / "result.json").read_text())["test"]["dice"]
    assert {name: entry["num"] for name, entry in found["clients"].items()} == dict.fromkeys(ONE_EACH, 2)
    assert result.outcome.state.round == 2


def test_a_resumed_run_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(tmp_path, data=PARTIAL, exclusion=0.5)
    assert whole.outcome.state.params.sha256() == resumed.outcome.state.params.sha256()


def test_worker_processes_give_the_same_bytes(tmp_path: Path) -> None:
    one = run(tmp_path / "one", data=PARTIAL)
    two = run(tmp_path / "two", data=PARTIAL, compute={"threads": 1, "workers": 2})
    assert one.outcome.state.params.sha256() == two.outcome.state.params.sha256()


@pytest.mark.parametrize("method", ["fedevi", "feduaa", "aaw", "fedce", "fedga", "local", "ditto", "moon"])
def test_methods_that_weigh_by_loss_or_uncertainty_run(tmp_path: Path, method: str) -> None:
    assert run(tmp_path, data=PARTIAL, method={"name": method}).outcome.state.round == 2


@pytest.mark.parametrize("method", sorted(name for name in METHODS if METHODS[name].needs_every_class))
def test_methods_that_need_every_class_refuse_with_the_reason(tmp_path: Path, method: str) -> None:
    reason = METHODS[method].needs_every_class
    with pytest.raises(ConfigError, match=f"labels that do not say everything.*{method}.*{reason}"):
        wr.run(settings(tmp_path, data=PARTIAL, method={"name": method}))


def test_centralised_training_on_different_annotations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clients annotate different classes"):
        run(tmp_path, data=PARTIAL, method={"name": "centralised"})


def test_a_server_whose_own_cases_lack_classes_is_refused(tmp_path: Path) -> None:
    data = {**PARTIAL, "proxy": "west"}
    with pytest.raises(ConfigError, match="the server's own cases stand for all classes"):
        run(tmp_path, data=data, method={"name": "fedlaw"})


def test_deep_supervision_and_the_exclusion_loss_train(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 4, "deep_supervision": True}
    run(tmp_path, data=PARTIAL, model=model, exclusion=1.0)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert records[0]["loss"]["north"]["exclusion"] > 0


def test_open_federations_name_organs_in_order() -> None:
    federation = open_federation(DataSettings.read({"phantom": FOUR}), 1)
    assert list(federation.regions) == list(ORGANS) and federation.num_classes == 5
