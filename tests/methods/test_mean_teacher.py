"""Mean teacher: two rounds against NumPy, who teaches whom, what a client remembers, whole runs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import Watcher, run, settings
from pytest import approx, mark, raises
from torch import nn

import wardround as wr
from toy import IMAGES, LABELS, NONE, average_rounds, descend, looking_client, sigmoid, supervised
from wardround.data.cases import UNLABELLED, Batch
from wardround.engine.memory_store import MemoryStore
from wardround.errors import ConfigError
from wardround.losses.objective import Context
from wardround.losses.unlabelled import follow
from wardround.methods.mean_teacher import MeanTeacher
from wardround.reporting import write_report


def consistency(w: Any, teacher: Any, images: Any, ramp: float) -> float:
    """Eqs. 2 and 3 for two classes."""
    f, taught = sigmoid(w, images), sigmoid(teacher, images)
    u = -(taught * np.log(taught) + (1 - taught) * np.log(1 - taught))
    sure = u < (0.75 + 0.25 * ramp) * math.log(2)
    return float(ramp * (2 * (f - taught) ** 2)[sure].sum() / sure.sum())


def test_two_rounds_are_those_of_numpy() -> None:
    """North has labels, east none: its teacher starts as the first model it received."""
    objective = MeanTeacher(decay=0.9)
    north = looking_client("north", objective, IMAGES, LABELS)
    east = looking_client("east", objective, IMAGES + 1, NONE)
    images, labels, others = IMAGES[:, 0].numpy(), LABELS.numpy(), (IMAGES[:, 0] + 1).numpy()

    w = teacher = np.array([1.0, -0.5])
    expected = []
    for number in (1, 2):
        ramp = math.exp(-5 * (1 - number / 2) ** 2)
        teacher = 0.9 * teacher + 0.1 * w
        own = descend(lambda v: supervised(v, images, labels), w)
        other = descend(lambda v: consistency(v, teacher, others, ramp), w)  # noqa: B023, used at once
        w = (own + other) / 2
        expected.append(list(w))

    found = average_rounds([north, east], [1.0, -0.5], 2)
    assert found == [approx(values, abs=1e-6) for values in expected]
    assert east.memory["teacher"]["w"].tolist() == approx(list(teacher), abs=1e-6)
    assert "teacher" not in north.memory
    assert not np.allclose(teacher, [1.0, -0.5])


def test_cases_with_and_without_label_count_alike() -> None:
    """One of each: half the loss of the labelled case, half that of the other."""
    objective = MeanTeacher(lam=0.0)
    mixed = looking_client("north", objective, IMAGES, torch.cat([LABELS[:1], NONE[1:]]))
    w = np.array([0.3, 0.2])
    images, labels = IMAGES[:1, 0].numpy(), LABELS[:1].numpy()

    expected = descend(lambda v: 0.5 * supervised(v, images, labels), w)
    assert average_rounds([mixed], list(w), 1)[0] == approx(list(expected), abs=1e-6)


def test_the_student_sees_the_second_view_and_the_teacher_the_first() -> None:
    seen: dict[str, list[float]] = {"student": [], "teacher": []}

    class Watched(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.weight = name, nn.Parameter(torch.ones(1))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            seen[self.name].append(float(image.mean()))
            return image * self.weight

    context = Context(
        round=0, rounds=1, num_examples=1, memory={}, generator=torch.Generator(), has_unlabelled=True,
        teacher=Watched("teacher"),
    )  # fmt: skip
    context.second_view = torch.full((1, 1, 2, 2), 5.0)
    batch = Batch(torch.full((1, 1, 2, 2), 3.0), torch.full((1, 2, 2), UNLABELLED))
    MeanTeacher().loss(Watched("student"), batch, context)
    assert seen == {"student": [5.0], "teacher": [3.0]}


def test_a_teacher_follows_statistics_too_and_copies_counters() -> None:
    teacher, student = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    student(torch.tensor([[1.0], [3.0]]))
    follow(teacher, student, decay=0.5)
    assert teacher.running_mean is not None and student.running_mean is not None
    assert teacher.running_mean.item() == approx(0.5 * student.running_mean.item())
    assert teacher.num_batches_tracked == student.num_batches_tracked == 1


# Whole runs

DATA = {"phantom": {"hospitals": 3, "size": 16, "cases": 8, "unlabelled": ["east", "south"]}}
CHOSEN = {"rounds": 3, "objective": {"name": "mean_teacher", "warmup": 0.2}}


@mark.parametrize("name", ["mean_teacher", "pseudo_labels"])
def test_with_labels_everywhere_the_objective_is_dice_bce_to_the_last_bit(name: str, tmp_path: Path) -> None:
    semi = run(tmp_path / "semi", objective={"name": name})
    plain = run(tmp_path / "plain", objective={"name": "dice_bce"})
    assert semi.params_sha256 == plain.params_sha256


def test_clients_without_labels_join_after_the_warmup_and_keep_their_teacher(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data=DATA, **CHOSEN)
    assert [record["clients"] for record in result.records] == [["north"], *2 * [["east", "north", "south"]]]
    assert "unlabelled" in result.records[1]["loss"]["east"]
    assert "unlabelled" not in result.records[1]["loss"]["north"]
    kept = {name: MemoryStore(tmp_path / "run" / "clients" / name).load() for name in ("east", "north")}
    assert "teacher" in kept["east"] and "teacher" not in kept["north"]
    assert list(result.outcome.test.cases) == ["north"]


def test_a_run_with_unlabelled_clients_resumes_to_the_same_bytes_also_in_workers(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", data=DATA, **CHOSEN)
    broken = settings(tmp_path / "broken", data=DATA, **CHOSEN)
    with raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=3, crash_at="south"))
    assert wr.run(broken, resume=True).params_sha256 == whole.params_sha256
    workers = run(tmp_path / "workers", data=DATA, compute={"threads": 1, "workers": 2}, **CHOSEN)
    assert workers.params_sha256 == whole.params_sha256


def test_scores_and_the_report_count_labelled_clients_alone(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data=DATA, **CHOSEN)
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["test"]["dice"]["num_clients"] == 1 and list(stored["test"]["dice"]["clients"]) == ["north"]
    assert stored["unlabelled"] == {"east": 5, "south": 5}
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "Training cases without a label: east 5, south 5; they are in no score." in page
    assert result.table.rows[0][0] == "north"


@mark.parametrize("chosen", [{}, {"objective": {"name": "focal_tversky"}}])
def test_other_objectives_refuse_and_name_the_two(chosen: dict[str, Any], tmp_path: Path) -> None:
    said = "client 'east' has 5 training cases without a label.*mean_teacher or pseudo_labels"
    with raises(ConfigError, match=said):
        run(tmp_path / "run", data=DATA, **chosen)


def test_somebody_must_have_labels(tmp_path: Path) -> None:
    data = {"phantom": {**DATA["phantom"], "unlabelled": ["east", "north", "south"]}}
    with raises(ConfigError, match="0 of 3 clients that train have labels"):
        run(tmp_path / "run", data=data, **CHOSEN)
