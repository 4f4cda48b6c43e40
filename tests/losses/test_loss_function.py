"""A loss handed over in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import settings
from torch import Tensor, nn
from torch.nn import functional

import wardround as wr
from wardround.errors import ConfigError
from wardround.losses.loss_function import LossFunction, give_loss


def smooth_dice(logits: Tensor, label: Tensor) -> Tensor:
    truth = functional.one_hot(label, logits.shape[1]).movedim(-1, 1)
    overlap = (logits.softmax(1) * truth).sum()
    return 1 - 2 * overlap / (logits.softmax(1).sum() + truth.sum())


def test_its_value_is_the_functions_and_that_of_each_case_too() -> None:
    objective = LossFunction(function=give_loss(functional.cross_entropy))
    logits, label = torch.randn(3, 4, 5, 6), torch.randint(4, (3, 5, 6))

    of_cases = objective.sample_losses(logits, label)

    expected = -logits.log_softmax(1).gather(1, label[:, None]).mean(dim=(1, 2, 3))
    torch.testing.assert_close(of_cases, expected)
    torch.testing.assert_close(objective.call(logits, label), expected.mean())


def test_two_classes_have_two_channels_as_pytorch_has_them() -> None:
    objective = LossFunction(function="x")

    assert [objective.num_outputs(classes) for classes in (2, 3)] == [2, 3]
    logits = torch.tensor([[[0.0, 3.0]], [[1.0, 2.0]]]).movedim(0, 1)  # one case, two channels, two voxels
    assert objective.predict(logits).tolist() == [[1, 0]]
    np.testing.assert_allclose(objective.probabilities(logits).sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("loss", [smooth_dice, nn.CrossEntropyLoss(weight=torch.tensor([0.3, 0.7]))])
def test_a_function_and_an_object_of_pytorch_train(tmp_path: Path, loss: Any) -> None:
    result = wr.run(settings(tmp_path / "run", rounds=8), objective=loss)

    losses = [record["loss"]["north"]["total"] for record in result.records]
    assert losses[-1] < losses[0]
    assert result.model(torch.zeros(1, 1, 16, 16)).shape == (1, 2, 16, 16)
    assert result.config.objective["name"] == "loss_function"


def test_it_is_the_same_run_as_the_objective_of_that_function(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 8, "num_classes": 3}}

    ours = wr.run(settings(tmp_path / "ours", data=data, objective={"name": "cross_entropy"}))
    theirs = wr.run(settings(tmp_path / "theirs", data=data), objective=nn.CrossEntropyLoss())

    assert ours.test is not None and theirs.test is not None
    for name, tensor in ours.params.items():
        torch.testing.assert_close(theirs.params[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.CrossEntropyLoss, r"the class CrossEntropyLoss. Give a function .*such as CrossEntropyLoss\(\)"),
        (nn.Linear(2, 2), "with parameters of its own, which nothing would train"),
        (3, "objective is 3; give a name, a loss of"),
        (lambda logits, label: logits, "returned 2x2x32x32 numbers; it must return a tensor of one number"),
        (lambda logits, label: 0.5, "returned float; it must return"),
        (lambda logits, label: logits.detach().mean(), "has no gradient"),
        (
            lambda logits, label: logits.nope(),
            "failed on logits 2x2x32x32 and labels 2x32x32: AttributeError: 'Tensor' object has no attribute",
        ),
        (lambda logits: logits.mean(), "takes 1 positional argument but 2 were given"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_before_the_run(tmp_path: Path, loss: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wr.run(settings(tmp_path / "run"), objective=loss)

    assert not (tmp_path / "run").exists()


def test_the_users_own_line_is_in_the_traceback(tmp_path: Path) -> None:
    def broken(logits: Tensor, label: Tensor) -> Tensor:
        return logits.nope()

    with pytest.raises(ConfigError) as found:
        wr.run(settings(tmp_path / "run"), objective=broken)

    cause = found.value.__cause__
    assert isinstance(cause, AttributeError) and cause.__traceback__ is not None
    last = cause.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    assert last.tb_frame.f_code.co_name == "broken"


def test_deep_supervision_takes_the_loss_at_every_resolution(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 4, "deep_supervision": True}
    sizes = set()

    def counted(logits: Tensor, label: Tensor) -> Tensor:
        sizes.add(tuple(label.shape[1:]))
        return functional.cross_entropy(logits, label)

    wr.run(settings(tmp_path / "run", rounds=1, model=model), objective=counted)

    assert {(16, 16), (8, 8)} <= sizes
