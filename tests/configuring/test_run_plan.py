"""From images to a plan: the axes that it mirrors along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from wardround.configuring.budget import parse_budget
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
