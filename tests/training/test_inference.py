"""Windows and mirror images, against plain implementations; and that a run is tested with them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import config, run
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from wardround.config_file import load_config
from wardround.data.cases import Batch
from wardround.data.opening import open_federation
from wardround.engine.host import Host
from wardround.errors import ConfigError
from wardround.losses.objective import CrossEntropy, Dice
from wardround.methods import build_objective
from wardround.methods.fedevi import Evidential
from wardround.models.base import Segmenter
from wardround.models.unet import unet2d, unet3d
from wardround.params import Params
from wardround.training.inference import (
    check_averaging,
    cut_window,
    evaluated_as,
    list_mirrors,
    mirrored,
    windowed,
)
from wardround.uncertainty.maps import sampling


def network(num_outputs: int = 2, dimensions: int = 2) -> nn.Module:
    torch.manual_seed(4)
    build: Any = unet3d if dimensions == 3 else unet2d
    sizes = {"in_channels": 1, "base_filters": 2, "levels": 2, "norm": "none"}
    return build(num_outputs=num_outputs, **sizes).eval()


def views(model: nn.Module, image: Tensor) -> list[Tensor]:
    """The logits of every mirror image, each turned back; by hand."""
    found = []
    for flips in itertools.product([False, True], repeat=image.ndim - 2):
        axes = [axis for axis, flip in enumerate(flips, start=2) if flip]
        found.append(torch.flip(model(torch.flip(image, axes)), axes))
    return found


def slide_by_hand(model: nn.Module, image: Tensor, window: tuple[int, ...]) -> Tensor:
    """Half overlapping windows, the last one moved back to the edge; Gaussian of an eighth of the side."""
    weight = torch.ones(())
    starts = []
    for side, length in zip(image.shape[2:], window, strict=True):
        place = torch.arange(length, dtype=torch.float64) - (length - 1) / 2
        weight = weight[..., None] * torch.exp(-0.5 * (place / (0.125 * length)) ** 2)
        count = math.ceil((side - length) / (length // 2)) + 1
        starts.append([min(number * (length // 2), side - length) for number in range(count)])
    weight = weight.clamp_min(1e-3)
    total = norm = torch.zeros(())
    for corner in itertools.product(*starts):
        box = (..., *(slice(c, c + length) for c, length in zip(corner, window, strict=True)))
        if total.ndim == 0:
            total = torch.zeros(1, model.num_outputs, *image.shape[2:], dtype=torch.float64)
            norm = torch.zeros_like(total)
        total[box] += weight * model(image[box]).double()
        norm[box] += weight
    return (total / norm).float()


@torch.no_grad()
def test_windows_are_blended_by_a_gaussian() -> None:
    model, image = network(dimensions=3), torch.randn(1, 1, 14, 9, 12)
    expected = slide_by_hand(model, image, (8, 9, 8))
    with windowed(model, (8, 16, 8)):  # no side is longer than the image
        found = model(image)

    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, model(image), atol=1e-3)
    assert "forward" not in vars(model)


@torch.no_grad()
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_mirror_images_give_the_mean_of_probabilities(num_outputs: int) -> None:
    objective, model, image = Dice(), network(num_outputs), torch.randn(2, 1, 8, 6)
    expected = torch.stack([objective.probabilities(found) for found in views(model, image)]).mean(0)
    with mirrored(model, objective):
        logits = model(image)

    assert torch.allclose(objective.probabilities(logits), expected, atol=1e-6)
    assert logits.shape == (2, num_outputs, 8, 6)


@torch.no_grad()
def test_mirror_images_are_along_the_named_axes_alone() -> None:
    objective, model, image = Dice(), network(3), torch.randn(2, 1, 8, 6)
    both = [model(image), model(image.flip(3)).flip(3)]
    expected = torch.stack([objective.probabilities(found) for found in both]).mean(0)
    with evaluated_as(model, objective, tta=True, axes=[1]):
        found = objective.probabilities(model(image))

    assert torch.allclose(found, expected, atol=1e-6)


def test_axes_that_images_do_not_have_and_none_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mirror_axes is \[0, 2\], but the images are 2D"):
        list(list_mirrors(2, [0, 2]))
    with pytest.raises(ConfigError, match=r"mirror_axes is \[\], so images are not mirrored"):
        check_averaging(Dice(), [])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"cap_kind": "hard"}, {"evidence": "softplus"}])
def test_mirror_images_of_a_dirichlet_model_average_its_evidence(changes: dict[str, Any]) -> None:
    objective, model, image = Evidential(**changes), network(3), 20 * torch.randn(2, 1, 8, 6)
    expected = torch.stack([objective.alpha(found) for found in views(model, image)]).mean(0)
    with mirrored(model, objective):
        alpha = objective.alpha(model(image))

    assert torch.allclose(alpha, expected, rtol=1e-4)


@torch.no_grad()
def test_mirror_images_are_views_of_one_sample() -> None:
    """Dropout drops the same channels in all of them, so samples differ as much as without mirror images."""
    model = nn.Sequential(nn.Conv2d(1, 6, 1), nn.Dropout2d(0.5), nn.Conv2d(6, 2, 1)).eval()
    image = torch.randn(1, 1, 8, 8)
    with sampling(model, "dropout"):
        torch.manual_seed(1)
        plain = [model(image).softmax(1) for _ in range(2)]
        with mirrored(model, CrossEntropy()):
            torch.manual_seed(1)
            mean = [model(image).softmax(1) for _ in range(2)]

    assert torch.allclose(torch.stack(mean), torch.stack(plain), atol=1e-6)
    assert not torch.allclose(*plain, atol=0.01)


@pytest.mark.parametrize("method", ["fedevi", "fedce", "fedga", "feduaa", "aaw", "fedlaw"])
def test_methods_that_score_a_clients_cases_take_them_window_by_window(tmp_path: Path, method: str) -> None:
    """No pass in evaluation mode is given more than a window."""
    seen: set[tuple[int, ...]] = set()

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, Segmenter) and not module.training:
            seen.add(tuple(inputs[0].shape[2:]))

    hook = register_module_forward_pre_hook(note)
    try:
        given = {"name": method, **({"proxy": "clients"} if method == "fedlaw" else {})}
        judged = {"metrics": ["dice"], "overlays": 0, "calibrate": False, "window": [8, 16]}
        result = run(tmp_path / "run", method=given, evaluate=judged)
    finally:
        hook.remove()

    assert seen == {(8, 16)}
    assert result.summary["num_refused"] == result.summary["num_lost"] == 0


def test_a_client_measures_with_windows_as_the_judge_does(tmp_path: Path) -> None:
    here, whole = (
        Host(config(tmp_path, evaluate={"metrics": ["dice"], "window": window}), tmp_path, ["north"])
        for window in ([8, 16], None)
    )
    client, params = here.client("north"), Params.of(here.bench.model)
    batch = client.data.val.batch(range(len(client.data.val)))
    model = here.bench.model.eval()
    with torch.no_grad(), windowed(model, (8, 16)):
        expected = here.objective.sample_losses(model(batch.image), batch.label).mean()

    assert client.evaluate(params) == pytest.approx(float(expected), abs=1e-6)
    assert client.evaluate(params) != pytest.approx(whole.client("north").evaluate(params), abs=1e-6)
    assert "forward" not in vars(model)


def test_a_window_lies_around_something_labelled_and_is_padded() -> None:
    label = torch.zeros(1, 20, 6, dtype=torch.long)
    label[0, 17, 2] = 1
    image = torch.arange(120.0).reshape(1, 1, 20, 6)
    cut = cut_window(Batch(image, label), (8, 8), torch.Generator().manual_seed(1))
    empty = cut_window(Batch(image, 0 * label), (8, 6), torch.Generator().manual_seed(1))

    assert cut.image.shape == (1, 1, 8, 8) and cut.label.shape == (1, 8, 8)
    assert torch.equal(cut.image[0, 0, :, :6], image[0, 0, 12:]) and int(cut.label.sum()) == 1
    assert torch.equal(cut.image[..., 6], cut.image[..., 5])
    assert empty.image.shape == (1, 1, 8, 6) and not empty.label.any()


def test_a_run_is_tested_with_windows_and_mirror_images_and_validated_without_these(tmp_path: Path) -> None:
    judged = {"metrics": ["dice"], "overlays": 1, "window": [8, 16], "tta": True}
    result = run(tmp_path / "run", rounds=1, evaluate=judged)
    objective, model = build_objective(result.config), result.model
    federation = open_federation(result.config.data, result.config.seed)
    losses: dict[str, dict[bool, dict[str, float]]] = {"val": {}, "test": {}}
    for split, tta in itertools.product(losses, (False, True)):
        with torch.no_grad(), evaluated_as(model, objective, (8, 16), tta):
            found = losses[split][tta] = {}
            for name in federation.names:
                batch = (cases := getattr(federation.load(name), split)).batch(range(len(cases)))
                found[name] = float(objective.sample_losses(model(batch.image), batch.label).mean())
    tested = {name: found.mean for name, found in result.test.clients["loss"].items()}

    assert tested == pytest.approx(losses["test"][True], abs=1e-5)
    assert tested != pytest.approx(losses["test"][False], abs=1e-5)
    assert result.records[0]["validation"]["loss"]["mean"] == pytest.approx(
        sum(losses["val"][False].values()) / 3, abs=1e-5
    )


class Unaverageable(Dice):
    """Has probabilities of its own."""

    def probabilities(self, logits: Tensor) -> Tensor:
        return super().probabilities(2 * logits)


def test_what_cannot_be_averaged_or_cut_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="does not say what to average"),
        mirrored(network(), Unaverageable()),
    ):
        pass
    model = network()
    with windowed(model, (8, 8, 8)), pytest.raises(ConfigError, match=r"images are 2D \(16x16\); give 2"):
        model(torch.zeros(1, 1, 16, 16))
    with pytest.raises(ConfigError, match="the data are 2D"):
        load_config({"data": {"phantom": {"size": 16}}, "evaluate": {"window": [8, 8, 8]}})
