"""From images to a plan: the axes that it mirrors along."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from wardround.configuring import run_plan
from wardround.configuring.budget import Pace, parse_budget
from wardround.configuring.plan import ConfigurationPlan, override_plan
from wardround.configuring.run_plan import plan_run


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """Two hospitals of ten pictures: `left` and `right` are beside each other, a bit above or below."""
    random = np.random.default_rng(0)
    for client in ("north", "south"):
        for kind in ("images", "labels"):
            (tmp_path / client / kind).mkdir(parents=True)
        for number in range(10):
            label = np.zeros((32, 40), dtype=np.uint8)
            for value, column in ((1, 4), (2, 24)):
                row = int(random.integers(2, 22))
                label[row : row + 8, column : column + 10] = value
            image = random.integers(1, 60, label.shape) + 100 * (label > 0)
            Image.fromarray(image.astype(np.uint8)).save(tmp_path / client / "images" / f"p{number}.png")
            Image.fromarray(label).save(tmp_path / client / "labels" / f"p{number}.png")
    path = tmp_path / "federation.yaml"
    path.write_text("version: 1\nsources: [{path: north}, {path: south}]\nlabels: {left: [1], right: [2]}\n")
    return path


def find_augmentation(federation: Path, **changes: Any) -> dict[str, Any]:
    plan = plan_run(federation, parse_budget("600"), **changes).plan
    return dict(plan.settings()["augmentation"])


def test_a_plan_does_not_mirror_left_to_right(federation: Path) -> None:
    assert find_augmentation(federation)["mirror_axes"] == [0]


def test_a_plan_of_nnunets_mirrors_along_every_axis(federation: Path) -> None:
    found = find_augmentation(federation, adapt=lambda plan: plan)

    assert found["mirror"] == 0.5 and "mirror_axes" not in found


def test_a_plan_of_nnunets_rotates_as_its_own_patch_asks(federation: Path) -> None:
    def take_over(plan: ConfigurationPlan) -> ConfigurationPlan:
        return override_plan(plan, ["data.patch=[16, 64]"])

    assert find_augmentation(federation, adapt=lambda plan: plan)["rotate"] == 180
    assert find_augmentation(federation, adapt=take_over)["rotate"] == 15


def test_a_plan_for_ct_on_other_images_is_told(federation: Path) -> None:
    rows = "data.prepare.intensities=[[-15, 197, 99, 37]]"

    def take_over(plan: ConfigurationPlan) -> ConfigurationPlan:
        return override_plan(plan, ["data.prepare.normalise=ct", rows])

    warnings = plan_run(federation, parse_budget("600"), adapt=take_over).plan.warnings
    assert "no channel is CT" in warnings[-1]


def test_a_gpu_that_does_not_train_makes_no_large_network(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(total_memory=24 * 10**9)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)

    def find_filters(*overrides: str) -> Any:
        return plan_run(federation, parse_budget("20"), overrides).plan.settings()["model"]["base_filters"]

    assert (find_filters(), find_filters("compute.device=cpu")) == (32, 8)


def test_the_time_is_that_of_the_rounds_and_steps_the_user_set(
    federation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "measure_pace", lambda config: Pace(1.0, 0.0, 0.0, 0.0))
    longer = plan_run(federation, parse_budget("10m"), ["local_steps=20"])
    fixed = plan_run(federation, parse_budget("quick"), ["rounds=100", "local_steps=20"])

    settings = longer.plan.settings()
    assert longer.seconds == longer.steps == 20 * settings["rounds"] and 560 <= longer.steps <= 600
    assert settings["evaluate"]["every"] == settings["rounds"] // 10
    assert fixed.seconds == fixed.steps == 2000
    assert fixed.notes == (
        "quick means 5 min, but the 2,000 steps of each client that you set take about 33 min on this machine.",
    )


def test_patch_and_network_fit_images_in_the_users_own_spacing_and_size(tmp_path: Path) -> None:
    for seed, client in enumerate(("north", "south")):
        for kind in ("images", "labels"):
            (tmp_path / client / kind).mkdir(parents=True)
        for number in range(4):
            label = np.zeros((40, 32, 24), dtype=np.uint8)
            label[8:16, 8:16, 8:16] = 1
            image = np.random.default_rng([seed, number]).random(label.shape, np.float32) + label + 1
            for kind, values in (("images", image), ("labels", label)):
                nibabel.save(
                    nibabel.Nifti1Image(values, np.eye(4)), tmp_path / client / kind / f"p{number}.nii.gz"
                )
    path = tmp_path / "federation.yaml"
    path.write_text("version: 1\nsources: [{path: north}, {path: south}]\nlabels: {organ: [1]}\n")

    def find_patch(*overrides: str) -> Any:
        data = plan_run(path, parse_budget("600"), overrides).plan.settings()["data"]
        return data["prepare"]["spacing"], data["prepare"]["size"], data["patch"]

    assert find_patch() == ([1.0, 1.0, 1.0], None, [40, 32, 24])
    assert find_patch("data.prepare.spacing=[2, 2, 1]") == ([2, 2, 1], None, [20, 16, 24])
    assert find_patch("data.prepare.spacing=null") == (None, None, [40, 32, 24])
    assert find_patch("data.prepare.size=[16, 32, 16]") == ([1.0, 1.0, 1.0], [16, 32, 16], [16, 32, 16])
