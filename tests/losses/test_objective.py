"""Deep supervision: weights and labels of every resolution, for all objectives; nothing of it outside training."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run
from torch import Tensor, nn

from wardround.config import OptimizerSettings
from wardround.config_file import load_config
from wardround.data.cases import Batch
from wardround.errors import ConfigError, WardroundError
from wardround.losses.objective import Context, Dice, DiceBCE
from wardround.losses.segmentation import dice_loss
from wardround.methods import OBJECTIVES
from wardround.models import ModelSettings, build
from wardround.models.base import Segmenter
from wardround.models.tap import decoder_names
from wardround.training.device import Compute
from wardround.training.workbench import Workbench

DYNUNET = {
    "kernel_size": [3] * 5,
    "strides": [1, 2, 2, 2, 2],
    "upsample_kernel_size": [2] * 4,
    "filters": [4] * 5,
}


def network(name: str = "unet2d", *, deep: bool = True, num_outputs: int = 2, **settings: Any) -> Segmenter:
    torch.manual_seed(5)
    if name == "monai:DynUNet":
        settings = {"arguments": DYNUNET, "divisor": 16}
    elif name == "unet2d":
        settings = {"base_filters": 2, "levels": 5, **settings}
    chosen = ModelSettings(name=name, deep_supervision=deep, **settings)
    return build(chosen, in_channels=1, num_outputs=num_outputs, dimensions=2)


def context(**changes: Any) -> Context:
    plain = {"round": 0, "rounds": 1, "num_examples": 4, "memory": {}, "generator": torch.Generator()}
    return Context(**{**plain, **changes})


def batch(side: int) -> Batch:
    image = torch.randn(2, 1, side, 32, generator=torch.Generator().manual_seed(1))
    return Batch(image, (image[:, 0] > 0.5).long())


def heads_of(model: Segmenter) -> list[nn.Module]:
    """Fine to coarse."""
    if isinstance(heads := getattr(model, "deep_heads", None), nn.ModuleList):
        return list(reversed(heads))
    return list(model.network.deep_supervision_heads)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["unet2d", "monai:DynUNet"])
@pytest.mark.parametrize("side", [32, 27])
def test_each_coarser_resolution_weighs_half_and_the_coarsest_nothing(name: str, side: int) -> None:
    model, given = network(name).train(), batch(side)
    seen: list[Tensor] = []
    for head in heads_of(model):
        head.register_forward_hook(lambda _, inputs, output: seen.append(output))
    loss = Dice().loss(model, given, context())
    fine_to_coarse = sorted(seen, key=lambda logits: -logits.numel())
    sizes = [tuple(logits.shape[2:]) for logits in fine_to_coarse]
    expected = dice_loss(model(given.image), given.label)
    padded = torch.cat([given.label, given.label[:, -1:].expand(-1, 32 - side, -1)], dim=1)
    for level, logits in enumerate(fine_to_coarse, start=1):
        label = F.interpolate(padded[:, None].float(), logits.shape[2:], mode="nearest-exact")[:, 0]
        expected = expected + 0.5**level * dice_loss(logits, label.long())

    assert sizes == [(16, 16), (8, 8)]  # of 16, 8, 4 and a bottleneck of 2
    assert loss.item() == pytest.approx(expected.item() / 1.75, rel=1e-5)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    seen.clear()
    copy.deepcopy(model)  # no part of the pass is left in it


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_trains_the_heads(name: str) -> None:
    objective = OBJECTIVES[name]()
    model = network(num_outputs=objective.num_outputs(2))
    objective.start_model(model)
    bench = Workbench(model, objective, OptimizerSettings(), compute=Compute(torch.device("cpu")))
    params = bench.export()
    frozen = {"global_": bench.reference("global", params), "previous": bench.reference("previous", params)}
    given, seen = batch(32), context(with_features=True, has_previous=True, **frozen)
    seen.second_view = given.image + 0.1 * torch.randn_like(given.image)
    objective.loss(bench.model.train(), given, seen).backward()

    assert seen.has_supervised
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for h in heads_of(model) for p in h.parameters())


def test_rounds_of_contrast_alone_leave_the_heads_alone() -> None:
    objective, model, given = OBJECTIVES["simclr"](schedule="pretrain"), network(num_outputs=1), batch(32)
    objective.start_model(model)
    seen = context(with_features=True)
    seen.second_view = given.image + 0.1
    objective.loss(model.train(), given, seen).backward()

    assert seen.has_supervised and all(p.grad is None for h in heads_of(model) for p in h.parameters())


def test_heads_are_part_of_training_alone() -> None:
    plain, deep = network(deep=False).eval(), network().eval()
    image = batch(32).image
    assert torch.equal(plain(image), deep(image))  # the network in front of the heads starts alike
    assert not deep.forward_features(image).deep and len(deep.train().forward_features(image).deep) == 2
    more = set(deep.state_dict()) - set(plain.state_dict())
    assert more == {f"deep_heads.{n}.{part}" for n in (0, 1) for part in ("weight", "bias")}
    assert more <= set(decoder_names(deep))


def test_a_run_with_a_stem_trains_and_predicts_with_deep_supervision(tmp_path: Path) -> None:
    model = {
        "name": "unet2d",
        "base_filters": 2,
        "levels": 4,
        "deep_supervision": True,
        "stem": "variational",
    }
    result = run(tmp_path / "run", rounds=1, model=model, objective={"name": "dice_bce"})

    assert result.status == "done"
    assert any("deep_heads" in name for name in result.params)


@dataclass(frozen=True)
class OfLogitsAlone(DiceBCE):
    """An objective that never heard of coarser logits."""

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        return self.function()(context.forward(model, batch.image).logits, batch.label)


def test_what_cannot_be_supervised_deeply_is_refused(tmp_path: Path) -> None:
    for model, reason in (
        ({"levels": 3}, "needs 4 levels or more, and there are 3"),
        ({"name": "gelan"}, "GELAN shows no decoder stages"),
        ({"name": "monai:SegResNet"}, "'monai:SegResNet' shows no coarser logits"),
        ({"name": "monai:DynUNet", "arguments": {k: v[:3] for k, v in DYNUNET.items()}}, "strides has 3"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_config({"data": {"phantom": {"size": 16}}, "model": {"deep_supervision": True, **model}})
    model = {"name": "unet2d", "base_filters": 2, "levels": 4, "deep_supervision": True}
    with pytest.raises(WardroundError, match="takes no losses of coarser logits"):
        run(tmp_path / "run", model=model, objective={"name": f"{__name__}:OfLogitsAlone"}, retries=0)
