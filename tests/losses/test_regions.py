"""Training by regions: against plain NumPy, and that masks, probabilities and scores are of classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run

from wardround.errors import ConfigError
from wardround.losses.objective import DiceBCE
from wardround.losses.regions import RegionDiceBCE, region_dice_bce_loss
from wardround.training.inference import mirrored
from wardround.uncertainty.maps import Accumulator

WHOLE, CORE, ENHANCING = (1, 2, 3), (1, 3), (3,)
BRATS = RegionDiceBCE(regions=(WHOLE, CORE, ENHANCING))
THREE = {"phantom": {"hospitals": 3, "size": 16, "cases": 8, "num_classes": 3}}
NESTED = {"name": "region_dice_bce", "regions": [[1, 2], [2]]}
REFUSED = ["fedbr", "feddg", "fedmix_supervision", "fedproto", "fedrcl"]


def example(seed: int = 1, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(2, 3, 5, 4, 3, generator=draw)
    return logits, torch.randint(0, 4, (2, 5, 4, 3), generator=draw)


@pytest.mark.parametrize("reduction", ["per_sample", "batch"])
def test_the_loss_is_that_of_nnunet_written_out(reduction: Any) -> None:
    """DC_and_BCE_loss: sigmoid, Dice of every region with the smooth term above and below, BCE over all."""
    logits, label = example()
    p = 1 / (1 + np.exp(-logits.double().numpy()))
    y = np.stack([np.isin(label.numpy(), region) for region in (WHOLE, CORE, ENHANCING)], axis=1)
    axes = (0, 2, 3, 4) if reduction == "batch" else (2, 3, 4)
    dice = (2 * (p * y).sum(axes) + 1e-5) / (p.sum(axes) + y.sum(axes) + 1e-5)
    bce = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    found = region_dice_bce_loss(
        logits.double(), label, regions=(WHOLE, CORE, ENHANCING), reduction=reduction
    )

    assert float(found) == pytest.approx(1 - dice.mean() + bce, abs=1e-12)


def test_empty_and_full_regions_that_are_right_cost_nothing() -> None:
    logits = torch.full((1, 3, 4, 4), -40.0)
    assert float(BRATS.sample_losses(logits, torch.zeros(1, 4, 4, dtype=torch.long))) < 1e-6
    assert float(BRATS.sample_losses(-logits, torch.full((1, 4, 4), 3))) < 1e-6


def test_one_region_of_two_classes_is_dice_and_cross_entropy() -> None:
    logits, label = example()
    one, two = logits[:, :1], (label > 0).long()
    plain = DiceBCE()
    given = RegionDiceBCE()

    assert torch.equal(given.sample_losses(one, two), plain.sample_losses(one, two))
    assert torch.equal(given.predict(one), plain.predict(one))
    assert torch.allclose(given.probabilities(one), plain.probabilities(one))


def test_later_regions_are_painted_over_earlier_ones() -> None:
    logits, _ = example()
    expected = np.zeros((2, 5, 4, 3), dtype=np.uint8)
    for number, there in zip((2, 1, 3), (logits > 0).unbind(1), strict=True):  # regions_class_order
        expected[there.numpy()] = number
    named = RegionDiceBCE(regions=(WHOLE, CORE, ENHANCING), order=(2, 1, 3))

    assert np.array_equal(BRATS.predict(logits).numpy(), expected)
    assert BRATS.painted(3) == [2, 1, 3] and torch.equal(named.predict(logits), BRATS.predict(logits))
    assert BRATS.num_outputs(4) == 3 and BRATS.count_classes(3) == 4


def test_class_probabilities_are_those_of_painting_with_independent_regions() -> None:
    """All eight combinations of regions, each with its probability, painted one by one."""
    logits, _ = example()
    p = torch.sigmoid(logits.double())
    expected = torch.zeros(2, 4, 5, 4, 3, dtype=torch.float64)
    for code in range(8):
        there = [bool(code >> place & 1) for place in range(3)]
        chance = torch.stack([p[:, k] if on else 1 - p[:, k] for k, on in enumerate(there)]).prod(dim=0)
        painted = [number for number, on in zip((2, 1, 3), there, strict=True) if on]
        expected[:, painted[-1] if painted else 0] += chance

    assert torch.allclose(BRATS.probabilities(logits.double()), expected, atol=1e-12)
    assert BRATS.probabilities(1000 * logits).isfinite().all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_masks_can_be_had_back_from_class_probabilities(scale: float) -> None:
    logits, _ = example(scale=scale)
    assert torch.equal(BRATS.decide(BRATS.probabilities(logits.double())), BRATS.predict(logits))


def test_several_passes_are_painted_from_their_mean() -> None:
    logits, _ = example()
    maps = Accumulator(BRATS)
    for _ in range(3):
        maps.add(logits[0])
    found = maps.result()

    assert found.probabilities.shape == (4, 5, 4, 3)
    assert torch.equal(found.label, BRATS.predict(logits[:1])[0])


@torch.no_grad()
def test_mirror_images_average_regions() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(1, 3, 3, padding=1)
    image = torch.randn(1, 1, 6, 6)
    axes: list[tuple[int, ...]] = [(), (2,), (3,), (2, 3)]
    expected = sum(torch.sigmoid(model(image.flip(a)).flip(a)) for a in axes) / 4
    with mirrored(model, BRATS):
        assert torch.allclose(torch.sigmoid(model(image)), expected, atol=1e-6)


def test_a_run_by_regions_has_classes_in_its_masks_and_regions_in_its_table(tmp_path: Path) -> None:
    judged = {"metrics": ["dice"], "overlays": 1, "tta": True, "window": [8, 16]}
    model = {"name": "unet2d", "base_filters": 2, "levels": 4, "deep_supervision": True}
    method = {"name": "fedce"}
    result = run(tmp_path / "run", data=THREE, objective=NESTED, evaluate=judged, model=model, method=method)

    assert result.model.num_outputs == 2
    assert set(result.test.clients["dice"]) == {"north", "east", "south"}
    assert {region for row in result.test.cases["north"] for region in row["regions"]} == {"lesion", "core"}
    assert (tmp_path / "run/calibration.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regions": [[2], [1, 2]]}, "not every one paints a class of its own"),
        ({"regions": [[1, 2], [1, 2]], "order": [1]}, "order has 1 classes for 2 regions"),
        ({"regions": [[1], [2]], "order": [2, 1]}, "paints class 2 for region \\[1\\], which lacks it"),
        ({"regions": [[1], []]}, "regions"),
        ({"regions": [[0, 1]]}, "regions"),
    ],
)
def test_regions_that_paint_no_label_map_are_refused(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, data=THREE, objective={"name": "region_dice_bce", **given})


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_take_outputs_for_classes_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=f"method '{method}' takes outputs for classes"):
        config(tmp_path, data=THREE, objective=NESTED, method={"name": method})


def test_soft_masks_have_no_regions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="regions are made of class numbers"):
        config(tmp_path, data=THREE, objective=NESTED, method={"name": "fedmix"})


def test_data_with_other_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names 3 regions, but the data have 2 classes"):
        run(tmp_path, data=THREE, objective={"name": "region_dice_bce", "regions": [[1, 2, 3], [2, 3], [3]]})
