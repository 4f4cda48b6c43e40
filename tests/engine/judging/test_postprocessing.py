"""Only the largest connected part is kept where validation cases say so, and test cases are not asked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import config, run, settings
from pytest import LogCaptureFixture, MonkeyPatch, fixture, mark, raises
from torch import Tensor

import wardround as wr
from wardround.config import EvaluateSettings
from wardround.data.annotation import Annotation
from wardround.data.cases import Case, TensorSplit
from wardround.engine.host import Host
from wardround.engine.judging.evaluation import Scorer
from wardround.engine.judging.postprocessing import (
    Chosen,
    choose_postprocessing,
    improves,
    keep_largest,
    largest_components,
    postprocess_labels,
    read_steps,
)
from wardround.errors import ConfigError
from wardround.exporting.package import Package, opened
from wardround.messages import Message, Reply
from wardround.params import Params
from wardround.prediction.trained import TrainedModel

AUTO = {"metrics": ["dice"], "overlays": 0, "calibrate": False, "postprocess": "auto"}
REGIONS = {"one": (1,), "two": (2,)}


# Masks


def test_only_the_largest_part_of_each_class_is_kept() -> None:
    labels = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [2, 0, 2, 2]], dtype=np.uint8)

    assert largest_components(labels).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 2, 2]]


def test_the_largest_part_of_nothing_is_nothing() -> None:
    empty = np.zeros((3, 3), np.uint8)

    assert np.array_equal(largest_components(empty), empty)
    assert largest_components(empty).dtype == np.uint8


def test_corners_do_not_connect_and_volumes_work_alike() -> None:
    labels = np.zeros((2, 3, 3), np.uint8)
    labels[0, 0, 0] = labels[1, 0, 0] = 1  # two voxels, face to face
    labels[1, 1, 1] = 1  # touches by an edge only

    kept = largest_components(labels)

    assert kept.sum() == 2 and kept[1, 1, 1] == 0


def test_the_prediction_itself_is_not_changed() -> None:
    labels = np.array([[1, 0, 1, 1]], np.uint8)
    largest_components(labels)

    assert labels.tolist() == [[1, 0, 1, 1]]


def test_a_step_keeps_the_largest_part_that_its_classes_form_together() -> None:
    labels = np.array([[1, 1, 2, 0, 2, 2], [0, 0, 0, 0, 0, 0], [1, 0, 3, 3, 3, 3]], np.uint8)

    assert keep_largest(labels, (1, 2)).tolist() == [[1, 1, 2, 0, 0, 0], [0] * 6, [0, 0, 3, 3, 3, 3]]
    assert postprocess_labels(labels, ((2,), (1,))).tolist() == [
        [1, 1, 0, 0, 2, 2], [0] * 6, [0, 0, 3, 3, 3, 3],
    ]  # fmt: skip
    assert postprocess_labels(labels, "auto") is labels and postprocess_labels(labels, "none") is labels


# The choice


def test_a_step_is_taken_where_the_mean_rises_and_no_region_falls() -> None:
    assert improves({"a": 0.5, "b": 0.5}, {"a": 0.6, "b": 0.5})
    assert not improves({"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.49})
    assert not improves({"a": 0.5}, {"a": 0.5})
    assert improves({"a": 0.5, "b": math.nan}, {"a": 0.6, "b": math.nan})
    assert not improves({"a": 0.5, "b": 0.1}, {"a": 0.5, "b": math.nan})


class Hospitals:
    """Clients with predictions and truths of their validation cases; requests are kept."""

    def __init__(self, cases: Mapping[str, Sequence[tuple[Any, Any]]], regions: Any = REGIONS) -> None:
        self.cases, self.regions, self.requests = cases, regions, []  # type: ignore[var-annotated]

    def ask(self, task: str, message: Message, *, to: Sequence[str]) -> list[Reply]:
        self.requests.append((task, message.scalars["split"]))
        variants = [read_steps(steps) for steps in message.scalars["variants"]]
        return [Reply(scalars={"cases": self.rows(name, variants)}, client=name) for name in to]

    def rows(self, name: str, variants: Sequence[Any]) -> list[dict[str, Any]]:
        if not self.cases[name]:
            return []
        predicted, truth = (torch.tensor(np.array(maps)) for maps in zip(*self.cases[name], strict=True))
        split = TensorSplit.of(
            [Case(str(k), one[None].float(), one, (1.0, 1.0)) for k, one in enumerate(truth)]
        )
        scorer = Scorer(split, self.regions, ["dice"], EvaluateSettings(), variants)
        return [job() for job in scorer.jobs(predicted, truth, torch.zeros(len(truth)))]


def choose(hospitals: Hospitals, num_classes: int = 3) -> Chosen:
    judges = sorted(hospitals.cases)
    clients: Any = hospitals
    return choose_postprocessing(clients, Params({}), {}, judges=judges, num_classes=num_classes)


ONE = [[1, 1, 1, 0, 0, 0, 0, 0], [0] * 8, [0, 0, 0, 0, 2, 2, 2, 0]]  # two structures, apart
STRAY_ONE = [[1, 1, 1, 0, 0, 0, 0, 1], [0] * 8, [0, 0, 0, 0, 2, 2, 2, 0]]
STRAY_BOTH = [[1, 1, 1, 0, 0, 0, 0, 1], [0] * 8, [2, 0, 0, 0, 2, 2, 2, 0]]
TOUCHING = [[1, 1, 1, 0, 0, 0, 0, 0], [2, 2, 2, 0, 0, 0, 0, 0], [0] * 8]
TOUCHING_STRAY = [[1, 1, 1, 0, 0, 0, 0, 0], [2, 2, 2, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 2]]


def test_a_class_with_a_stray_part_is_cleaned_and_the_other_is_left() -> None:
    found = choose(Hospitals({"a": [(STRAY_ONE, ONE)], "b": [(ONE, ONE)]}))

    assert found.steps == ((1,),)
    assert found.before == {"one": (6 / 7 + 1) / 2, "two": 1.0}  # by hand: 2 * 3 / (4 + 3) at a, 1 at b
    assert found.after == {"one": 1.0, "two": 1.0}
    assert [(t["classes"], t["taken"]) for t in found.tried] == [([1, 2], False), ([1], True), ([2], False)]
    assert found.note == "only the largest connected part is kept of class 1"


def test_all_classes_as_one_come_first_and_leave_nothing_to_each() -> None:
    found = choose(Hospitals({"a": [(TOUCHING_STRAY, TOUCHING)]}))

    assert found.steps == ((1, 2),)
    assert found.note.endswith("of classes 1, 2 together")


def test_classes_chosen_apart_are_measured_together() -> None:
    hospitals = Hospitals({"a": [(STRAY_BOTH, ONE)]})
    found = choose(hospitals)

    assert found.steps == ((1,), (2,))
    assert found.after == {"one": 1.0, "two": 1.0}
    assert hospitals.requests == [("evaluate", "val")] * 2


def test_a_prediction_without_stray_parts_stays_as_it_is() -> None:
    found = choose(Hospitals({"a": [(ONE, ONE)]}))

    assert found.steps == () and found.before == found.after
    assert "stay as they are" in found.note


def test_a_structure_of_two_parts_forbids_the_step() -> None:
    """What one client gains is less than what the other loses."""
    assert choose(Hospitals({"a": [(STRAY_ONE, ONE)], "b": [(STRAY_BOTH, STRAY_BOTH)]})).steps == ()


def test_every_client_counts_the_same_whatever_its_number_of_cases() -> None:
    many = [(STRAY_ONE, STRAY_ONE)] * 9  # loses 1 - 6 / 7 in each
    heavier = [[1, 1, 1, 0, 1, 1, 0, 1], [0] * 8, [0, 0, 0, 0, 2, 2, 2, 0]]  # gains 1 - 6 / 9

    assert choose(Hospitals({"a": many, "b": [(heavier, ONE)]})).steps == ((1,),)


def test_one_class_is_tried_once() -> None:
    found = choose(Hospitals({"a": [(STRAY_ONE, ONE)]}, {"one": (1,)}), num_classes=2)

    assert found.steps == ((1,),) and len(found.tried) == 1


def test_without_validation_cases_nothing_is_done_and_said(caplog: LogCaptureFixture) -> None:
    found = choose(Hospitals({"a": [], "b": []}))

    assert "postprocess is auto, but no client has a validation case" in caplog.text

    assert found.steps == () and found.num_cases == {"a": 0, "b": 0}
    assert found.note.startswith("no client has a validation case")
    assert found.as_dict()["dice"] == {"before": {}, "after": {}}


# In runs


@fixture
def stray(monkeypatch: MonkeyPatch) -> None:
    """Every prediction is the truth and one voxel in a corner."""
    honest = Scorer.jobs

    def jobs(self: Scorer, predicted: Tensor, label: Tensor, losses: Tensor) -> Any:
        spoilt = label.clone()
        spoilt[..., 0, 0] = 1
        return honest(self, spoilt, label, losses)

    monkeypatch.setattr(Scorer, "jobs", jobs)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "postprocess.json").read_text())
    return found


@mark.usefixtures("stray")
def test_a_run_is_tested_with_what_its_validation_cases_chose(tmp_path: Path) -> None:
    auto = run(tmp_path / "auto", evaluate=AUTO)
    given = run(tmp_path / "given", evaluate={**AUTO, "postprocess": [[1]]})
    none = run(tmp_path / "none", evaluate={**AUTO, "postprocess": "none"})

    found = read(tmp_path / "auto")
    assert found["steps"] == [[1]]
    assert found["dice"]["after"]["mean"] > found["dice"]["before"]["mean"]
    assert auto.summary["test"] == given.summary["test"] != none.summary["test"]
    assert (
        auto.records[-1]["validation"] == none.records[-1]["validation"]
    )  # chosen only after the last round


@mark.usefixtures("stray")
def test_test_cases_are_not_read_for_the_choice(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []
    honest = Host.run

    def listening(self: Host, name: str, task: str, round: int, message: Message, *rest: Any) -> Any:
        if task == "evaluate":
            asked.append((message.scalars["split"], "variants" in message.scalars))
        return honest(self, name, task, round, message, *rest)

    monkeypatch.setattr(Host, "run", listening)
    run(tmp_path / "run", rounds=1, evaluate=AUTO)
    closed = {"phantom": {"hospitals": 3, "size": 16, "cases": 8}, "test": False}
    run(tmp_path / "closed", rounds=1, evaluate=AUTO, data=closed)

    assert asked[:9] == [("val", False)] * 3 + [("val", True)] * 3 + [("test", False)] * 3
    assert ("test", True) not in asked
    assert read(tmp_path / "closed") == read(tmp_path / "run")


def test_a_resumed_run_and_worker_processes_choose_the_same(tmp_path: Path) -> None:
    three = {"phantom": {"hospitals": 3, "size": 16, "cases": 8, "num_classes": 3}}
    whole = run(tmp_path / "whole", evaluate=AUTO, data=three)
    text = (tmp_path / "whole/postprocess.json").read_text()
    wr.run(settings(tmp_path / "whole", evaluate=AUTO, data=three), resume=True)
    workers = run(tmp_path / "work", evaluate=AUTO, data=three, compute={"threads": 1, "workers": 2})

    assert (tmp_path / "whole/postprocess.json").read_text() == text
    assert (tmp_path / "work/postprocess.json").read_text() == text
    assert workers.summary["test"] == whole.summary["test"]


@mark.usefixtures("stray")
def test_prediction_and_export_take_the_steps_of_the_run(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1, evaluate=AUTO)
    trained = TrainedModel.load(tmp_path / "run", device="cpu")
    Package.of(tmp_path / "run").save(tmp_path / "model.json", tmp_path / "model.safetensors")

    assert trained.config.evaluate.postprocess == ((1,),) and not trained.warnings
    again = opened(tmp_path / "model.json", tmp_path / "model.safetensors")
    assert again.config.evaluate.postprocess == ((1,),)
    (tmp_path / "run/postprocess.json").unlink()
    assert "comes after the last round" in TrainedModel.load(tmp_path / "run", device="cpu").warnings[0]


def test_a_wrong_setting_is_said_with_what_it_can_be(tmp_path: Path) -> None:
    for wrong in ("largest", [1, 2], [[0]], [[]], [[True]], 3):
        with raises(ConfigError, match="evaluate.postprocess: it is .*; give none, largest_component, auto"):
            config(tmp_path, evaluate={"postprocess": wrong})
    assert config(tmp_path, evaluate={"postprocess": []}).evaluate.postprocess == "none"


def test_a_prediction_is_tidied_up_whole_before_voxels_are_ignored() -> None:
    """One part of seven voxels whose middle is to be ignored stays whole, as `predict` leaves it."""
    predicted, truth = torch.ones(1, 1, 7, dtype=torch.uint8), torch.ones(1, 1, 7, dtype=torch.uint8)
    truth[..., 3] = 2
    split = TensorSplit.of([Case("p1", truth[0][None].float(), truth[0], (1.0, 1.0))])
    settings, annotation = EvaluateSettings(), Annotation((0, 1), ignores=True)
    for variants in ([((1,),)], []):
        tidied = settings.model_copy(update={"postprocess": "largest_component"})
        scorer = Scorer(split, {"one": (1,)}, ["dice"], tidied, variants, annotation)
        (job,) = scorer.jobs(predicted, truth, torch.zeros(1))
        assert [scores["dice"] for scores in job()["regions"].values()] == [1.0]
