"""FedRCL: golden numbers, which voxels are drawn, the off switch, whole runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, vectors
from torch import Tensor

from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.contrastive import (
    MIXED,
    MOST_OF_A_CLASS,
    Voxels,
    cosines,
    draw_voxels,
    iterate_levels,
    pure_labels,
)
from wardround.methods.fedrcl import FedRCL, divergence_penalty, supervised_contrast
from wardround.models.base import Segmenter

GOLDEN = vectors("fedrcl")
LARGER = {"phantom": {"hospitals": 2, "size": 32, "cases": 6}}  # masks thick enough to have an inside


def voxels(features: Any, label: Any, kept: Any = None) -> Voxels:
    chosen = torch.tensor(features, dtype=torch.float64)
    number = torch.ones(len(chosen), dtype=torch.bool) if kept is None else torch.tensor(kept)
    return Voxels(chosen, torch.tensor(label), number)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The loss


@pytest.mark.parametrize("name", GOLDEN)
def test_both_terms_are_the_golden_ones(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    tau, k, threshold = inputs["temperature"], inputs["topk_neg"], inputs["threshold"]
    given = voxels(inputs["features"], inputs["labels"])
    s = cosines(given.features, given.features)

    first = supervised_contrast(s, given, tau, k)
    second = divergence_penalty(s, given, tau, threshold)
    assert first.tolist() == pytest.approx(expected["scl_per_sample"], abs=1e-6)
    assert second.tolist() == pytest.approx(expected["penalty_per_sample"], abs=1e-6)
    method = FedRCL(temperature=tau, negatives=k, threshold=threshold)
    assert float(method.relaxed(given)) == pytest.approx(expected["loss"], abs=1e-6)


def in_numpy(features: Any, label: Any, tau: float, k: int, threshold: float) -> float:
    """Both terms sample by sample, as the card writes them."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    total = 0.0
    for i in range(len(unit)):
        s = unit @ unit[i]
        mates = [j for j in range(len(unit)) if label[j] == label[i] and j != i]
        s_p = min((s[j] for j in mates), default=s[i])
        rivals = sorted((s[j] for j in range(len(unit)) if label[j] != label[i]), reverse=True)[:k]
        total += math.log(1 + sum(math.exp((s_n - s_p) / tau) for s_n in rivals))
        s_q = min((s[j] for j in mates), default=-math.inf)
        total += math.log(1 + math.exp(((s_q if s_q >= threshold else -1) - 1) / tau))
    return total / len(unit)


@pytest.mark.parametrize("label", [[0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 2, 2, 2, 2], [1] * 7, list(range(7))])
def test_the_loss_is_that_of_a_plain_loop(label: list[int]) -> None:
    features = np.random.default_rng(3).normal(size=(7, 3)) + 1
    method = FedRCL(temperature=0.2, threshold=0.3, negatives=3)
    expected = in_numpy(features, label, 0.2, 3, 0.3)
    assert float(method.relaxed(voxels(features.tolist(), label))) == pytest.approx(expected, rel=1e-6)


def test_places_that_were_not_filled_change_nothing_and_get_no_gradient() -> None:
    features = np.random.default_rng(0).normal(size=(6, 4)).tolist()
    label, method = [0, 0, 1, 1, 0, 1], FedRCL()
    alone = method.relaxed(voxels(features[:4], label[:4]))
    padded = voxels(features, label, [True] * 4 + [False] * 2)
    padded.features.requires_grad_()
    loss = method.relaxed(padded)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(float(alone))
    assert padded.features.grad is not None
    assert padded.features.grad[:4].any() and not padded.features.grad[4:].any()


def test_one_class_has_no_first_term() -> None:
    given = voxels(np.random.default_rng(0).normal(size=(5, 4)).tolist(), [1] * 5)
    s = cosines(given.features, given.features)
    assert not supervised_contrast(s, given, 0.05, 2).any()
    assert float(FedRCL().relaxed(given)) == pytest.approx(
        float(divergence_penalty(s, given, 0.05, 0.7).mean())
    )


def test_no_voxel_at_all_gives_zero_and_finite_gradients() -> None:
    given = voxels([[1.0, 2.0], [0.0, 0.0]], [0, 1], [False, False])
    given.features.requires_grad_()
    loss = FedRCL().relaxed(given)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0
    assert given.features.grad is not None and not given.features.grad.any()


def test_a_small_temperature_does_not_overflow_in_half_precision() -> None:
    features = torch.randn(32, 8, dtype=torch.float16).requires_grad_()
    loss = FedRCL().relaxed(Voxels(features, torch.arange(32) % 2, torch.ones(32, dtype=torch.bool)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32 and bool(loss.isfinite())
    assert features.grad is not None and bool(features.grad.isfinite().all())


def test_only_voxels_that_are_too_alike_are_pushed_apart() -> None:
    near, far = voxels([[1.0, 0.1], [1.0, 0.0]], [1, 1]), voxels([[1.0, 0.0], [0.0, 1.0]], [1, 1])
    gradients = []
    for given in (near, far):
        given.features.requires_grad_()
        s = cosines(given.features, given.features)
        divergence_penalty(s, given, 0.5, 0.7).sum().backward()  # type: ignore[no-untyped-call]
        assert given.features.grad is not None
        gradients.append(given.features.grad)
    assert gradients[0].any() and not gradients[1].any()


# Which voxels


def test_a_voxel_whose_neighbourhood_mixes_classes_is_dropped() -> None:
    label = torch.zeros(1, 6, 6, dtype=torch.long)
    label[0, 1:5, 1:5] = 2
    expected = torch.full((6, 6), MIXED)
    expected[2:4, 2:4] = 2  # all else touches the outline; even the corners
    assert torch.equal(pure_labels(label, (6, 6))[0], expected)


def test_a_coarse_voxel_needs_its_whole_block_and_the_ring_around_it() -> None:
    label = torch.zeros(1, 12, 12, dtype=torch.long)
    label[0, 3:9, 3:9] = 1
    coarse = pure_labels(label, (3, 3))[0]
    assert coarse.tolist() == [[MIXED] * 3, [MIXED, 1, MIXED], [MIXED] * 3]  # block 4:8, ring 3:9
    label[0, 3, 3] = 0
    assert pure_labels(label, (3, 3))[0, 1, 1] == MIXED


def test_a_volume_is_treated_alike() -> None:
    label = torch.zeros(1, 4, 4, 4, dtype=torch.long)
    assert torch.equal(pure_labels(label, (2, 2, 2)), torch.zeros(1, 2, 2, 2, dtype=torch.long))
    label[0, 0, 0, 0] = 1
    assert pure_labels(label, (2, 2, 2))[0, 0, 0, 0] == MIXED


def test_pure_labels_are_those_of_the_nearest_voxel() -> None:
    label = (torch.rand(2, 8, 8, generator=stream()) > 0.9).long()
    coarse, nearest = pure_labels(label, (4, 4)), label[:, ::2, ::2]
    assert torch.equal(coarse[coarse != MIXED], nearest[coarse != MIXED])


def filled(label: Tensor, most: int = 1024, num_classes: int = 2, seed: int = 0) -> tuple[Voxels, Tensor]:
    """Draws from features that are the voxel's own number, and the labels where they were drawn."""
    features = torch.arange(label.numel()).view(label.shape)[:, None].double()
    given = draw_voxels(features, label, num_classes, most, stream(seed))
    return given, label.flatten()[given.features[:, 0].long()]


def test_drawn_voxels_have_the_label_they_are_said_to_have_and_none_is_drawn_twice() -> None:
    given, truth = filled(torch.randint(-1, 3, (3, 8, 8), generator=stream()), num_classes=3)
    assert torch.equal(truth[given.kept], given.label[given.kept])
    numbers = given.features[given.kept, 0]
    assert len(set(numbers.tolist())) == len(numbers) > 0


def test_at_most_64_of_a_class_and_image_and_1024_in_all() -> None:
    half = torch.zeros(1, 32, 32, dtype=torch.long)
    half[:, :16] = 1
    given, _ = filled(half)
    assert int(given.kept.sum()) == 2 * MOST_OF_A_CLASS
    given, _ = filled(half.expand(20, -1, -1))
    assert int(given.kept.sum()) == 20 * 2 * (1024 // 40) <= 1024
    given, _ = filled(half.expand(4, -1, -1), most=16)
    assert int(given.kept.sum()) == 16


def test_background_has_no_more_voxels_than_the_foreground() -> None:
    label = torch.zeros(2, 8, 8, dtype=torch.long)
    label[0, 0, :3], label[1, 5, 5], label[1, 6, 6] = 1, 2, MIXED
    given, _ = filled(label, num_classes=3)
    counts = [int((given.kept & (given.label == value)).sum()) for value in range(3)]
    assert counts == [4, 3, 1]


def test_a_batch_of_empty_masks_gives_no_voxel_and_a_full_one_no_background() -> None:
    empty, _ = filled(torch.zeros(2, 4, 4, dtype=torch.long))
    full, _ = filled(torch.ones(2, 4, 4, dtype=torch.long))
    assert not empty.kept.any()
    assert set(full.label[full.kept].tolist()) == {1}


def test_other_draws_take_other_voxels() -> None:
    label = torch.ones(1, 32, 32, dtype=torch.long)
    one, two, again = (filled(label, seed=seed)[0].features for seed in (0, 1, 0))
    assert not torch.equal(one, two) and torch.equal(one, again)


@pytest.mark.parametrize("size", [(16, 16), (13, 18), (5, 6)])
def test_levels_are_the_bottleneck_and_every_decoder_stage_with_labels_of_their_size(
    size: tuple[int, int], tmp_path: Path
) -> None:
    model = build_model(config(tmp_path, model={"name": "unet2d", "base_filters": 2, "levels": 3}))
    assert isinstance(model, Segmenter)
    output = model.forward_features(torch.rand(2, 1, *size))
    found = list(iterate_levels(model, output, torch.ones(2, *size, dtype=torch.long)))
    assert len(found) == 3
    for features, label in found:
        assert features.shape[2:] == label.shape[1:]
        assert bool((label == 1).all())
    assert found[-1][1].shape[1:] == size


# Whole runs


def test_fedrcl_with_weight_zero_is_fedavg(tmp_path: Path) -> None:
    fedrcl = run(tmp_path / "fedrcl", data=LARGER, method={"name": "fedrcl", "weight": 0.0})
    fedavg = run(tmp_path / "fedavg", data=LARGER, method={"name": "fedavg"})
    assert fedrcl.params_sha256 == fedavg.params_sha256


def test_the_term_changes_the_model_and_is_recorded(tmp_path: Path) -> None:
    fedrcl = run(tmp_path / "fedrcl", data=LARGER, method={"name": "fedrcl"})
    fedavg = run(tmp_path / "fedavg", data=LARGER, method={"name": "fedavg"})
    assert fedrcl.params_sha256 != fedavg.params_sha256
    assert all(loss["contrast"] > 0 for record in fedrcl.records for loss in record["loss"].values())


def test_three_classes_and_one_client_train(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 1, "size": 32, "cases": 6, "num_classes": 3}}
    result = run(tmp_path / "run", rounds=1, data=data, method={"name": "fedrcl"})
    assert result.records[0]["weights"] == {"north": 1.0}
    assert math.isfinite(result.records[0]["loss"]["north"]["contrast"])


@pytest.mark.parametrize(
    ("key", "value"), [("weight", -1), ("temperature", 0), ("negatives", 0), ("threshold", 2)]
)
def test_impossible_settings_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method.{key}"):
        config(tmp_path, method={"name": "fedrcl", key: value})
