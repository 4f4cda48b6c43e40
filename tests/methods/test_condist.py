"""ConDistFL: two rounds against NumPy, its off switch, what it distils, whole runs."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import Watcher, run, settings
from pytest import approx, mark, raises
from torch import Tensor, nn

import wardround as wr
from toy import IMAGES, LABELS, average_rounds, descend, looking_client, vector
from wardround.data.annotation import Annotation
from wardround.methods.condist import ConDist, distillation_loss
from wardround.models.base import Segmenter

FIRST, SECOND = Annotation((0, 1, 0)), Annotation((0, 0, 1))  # one of two organs each


class Planes(Segmenter):
    """The logit of class k is w_k times a pixel's brightness plus w_(3 + k)."""

    def __init__(self) -> None:
        super().__init__(in_channels=1, num_outputs=3, dimensions=2, divisor=1)
        self.w = nn.Parameter(vector([0.0] * 6))

    def forward(self, image: Tensor) -> Tensor:
        return self.w[:3, None, None] * image + self.w[3:, None, None]


def numpy_logits(w: Any, images: Any) -> Any:
    return w[:3, None, None] * images[:, None] + w[3:, None, None]


def softmax(z: Any) -> Any:
    return np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)


def marginal(w: Any, images: Any, label: Any, organ: int) -> float:
    """Dice of each case and cross entropy of "the organ, or anything else"."""
    p, losses = softmax(numpy_logits(w, images))[:, organ], []
    for own, y in zip(p, label == organ, strict=True):
        dice = (2 * (own * y).sum() + 1e-5) / (own.sum() + y.sum() + 1e-5)
        losses.append(1 - dice - np.log(np.where(y, own, 1 - own)).mean())
    return float(np.mean(losses))


def distilled(w: Any, received: Any, images: Any, label: Any, organ: int, temperature: float) -> float:
    z, other = numpy_logits(w, images), numpy_logits(received, images)
    there = (label != organ) & (other.argmax(axis=1) != organ)
    rest = [number for number in range(3) if number != organ]
    p, q = softmax(z[:, rest] / temperature), softmax(other[:, rest] / temperature)
    ratios = []
    for n in range(2):
        a, b = p[:, n][there], q[:, n][there]
        ratios.append(1 - (2 * (a * b).sum() + 1e-5) / (a.sum() + b.sum() + 1e-5))
    return float(np.mean(ratios))


def test_two_rounds_are_those_of_numpy() -> None:
    objective = ConDist(weight=0.8, start=0.25, temperature=0.7)
    labels = {"north": LABELS, "east": 2 * (1 - LABELS)}
    told = {"north": (FIRST, 1), "east": (SECOND, 2)}
    clients = [
        looking_client(name, objective, IMAGES, labels[name], model=Planes(), annotation=told[name][0])
        for name in labels
    ]
    images = IMAGES[:, 0].numpy()

    w = np.array([0.1, 0.6, -0.7, 0.3, -0.2, 0.1])
    expected = []
    for share in (0.25, 1.0):
        replies = []
        for name, label in labels.items():

            def loss(
                v: Any, y: Any, received: Any = w, organ: int = told[name][1], lam: float = 0.8 * share
            ) -> float:
                return marginal(v, images, y, organ) + lam * distilled(v, received, images, y, organ, 0.7)

            replies.append(descend(partial(loss, y=label.numpy()), w))
        w = np.mean(replies, axis=0)
        expected.append(list(w))

    found = average_rounds(clients, [0.1, 0.6, -0.7, 0.3, -0.2, 0.1], 2)
    assert found == [approx(values, abs=1e-6) for values in expected]
    assert clients[0].fitted is not None and clients[0].fitted.loss["distillation"] > 0


def test_the_loss_by_hand() -> None:
    """Voxel 1 counts; 2 is outlined, 3 is the annotated class to the received model."""
    z = torch.tensor([[[0.0, 5.0, 1.0], [9.0, 0.0, 0.0], [np.log(3), 2.0, 0.0]]], dtype=torch.float64)
    received = torch.tensor([[[0.0, 3.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]], dtype=torch.float64)
    label = torch.tensor([[0, 1, 0]])
    ratios = [1 - 2 * 0.25 * 0.5 / 0.75, 1 - 2 * 0.75 * 0.5 / 1.25]

    found = distillation_loss(z, received, label, annotation=FIRST, temperature=1.0, smooth=0.0)
    assert float(found) == approx(np.mean(ratios), abs=1e-12)


def test_nothing_to_distil_costs_nothing() -> None:
    z = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    everything_outlined = torch.ones(2, 4, dtype=torch.long)
    loss = distillation_loss(z, z.detach(), everything_outlined, annotation=FIRST)
    loss.backward()
    assert loss.item() == 0
    assert z.grad is not None and not z.grad.any()


def test_rim_and_cup_are_distilled_where_the_disc_is_outlined_as_a_whole() -> None:
    """The disc is the group (1, 2): given the disc, the received model says which of both."""
    z = torch.zeros(1, 3, 1, dtype=torch.float64)
    received = torch.tensor([[[0.0], [np.log(3)], [0.0]]], dtype=torch.float64)
    ratios = [1 - 2 * 0.5 * 0.75 / 1.25, 1 - 2 * 0.5 * 0.25 / 0.75]

    found = distillation_loss(
        z, received, torch.ones(1, 1, dtype=torch.long), annotation=Annotation((0, 1, 1)),
        temperature=1.0, smooth=0.0,
    )  # fmt: skip
    assert float(found) == approx(np.mean(ratios), abs=1e-12)


# Whole runs

ORGANS = {"organs": ["skull", "nuclei", "lesion"], "hospitals": 3, "size": 16, "cases": 8}
DATA = {"phantom": {**ORGANS, "annotates": {"north": ["skull"], "east": ["nuclei"]}}}
CHOSEN = {"rounds": 3, "objective": {"name": "condist"}}


@mark.parametrize("data", [DATA, {"phantom": ORGANS}])
def test_without_weight_or_with_everything_annotated_it_is_dice_bce_to_the_last_bit(
    data: dict[str, Any], tmp_path: Path
) -> None:
    off = {} if data is not DATA else {"weight": 0.0}
    plain = run(tmp_path / "plain", data=data, objective={"name": "dice_bce"})
    found = run(tmp_path / "condist", data=data, objective={"name": "condist", **off})
    assert found.params_sha256 == plain.params_sha256


def test_clients_that_annotate_everything_have_no_distillation(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data=DATA, **CHOSEN)
    losses = result.records[-1]["loss"]
    assert {name for name in losses if "distillation" in losses[name]} == {"east", "north"}


def test_a_run_resumes_to_the_same_bytes_also_in_workers_with_deep_supervision(tmp_path: Path) -> None:
    chosen = {
        **CHOSEN,
        "data": DATA,
        "model": {"name": "unet2d", "deep_supervision": True, "base_filters": 4},
    }
    whole = run(tmp_path / "whole", **chosen)
    broken = settings(tmp_path / "broken", **chosen)
    with raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=3, crash_at="north"))
    assert wr.run(broken, resume=True).params_sha256 == whole.params_sha256
    workers = run(tmp_path / "workers", compute={"threads": 1, "workers": 2}, **chosen)
    assert workers.params_sha256 == whole.params_sha256
