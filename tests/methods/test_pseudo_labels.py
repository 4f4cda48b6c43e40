"""Pseudo-labels: two rounds against NumPy, what the gate lets through."""

import math
from typing import Any

import numpy as np
import torch
from helpers import config
from pytest import approx, raises

from toy import IMAGES, LABELS, NONE, average_rounds, descend, looking_client, sigmoid, supervised
from wardround.errors import ConfigError
from wardround.methods.pseudo_labels import PseudoLabels


def gated(w: Any, received: Any, images: Any, limit: float) -> float:
    """Eq. 4 for two classes, the gate by entropy."""
    q, p = sigmoid(received, images), sigmoid(w, images)
    u = -(q * np.log(q) + (1 - q) * np.log(1 - q)) / math.log(2)
    label = (q > 0.5).astype(float)
    entropy = -(label * np.log(p) + (1 - label) * np.log(1 - p))
    return float(np.where(u <= limit, entropy, 0.0).mean())


def test_two_rounds_are_those_of_numpy() -> None:
    objective = PseudoLabels(limit=0.8, lam=0.7)
    north = looking_client("north", objective, IMAGES, LABELS)
    east = looking_client("east", objective, IMAGES + 1, NONE)
    images, labels, others = IMAGES[:, 0].numpy(), LABELS.numpy(), (IMAGES[:, 0] + 1).numpy()

    w = np.array([1.0, -0.5])
    expected = []
    for _ in range(2):
        received = w
        own = descend(lambda v: supervised(v, images, labels), w)
        other = descend(lambda v: 0.7 * gated(v, received, others, 0.8), w)  # noqa: B023, used at once
        w = (own + other) / 2
        expected.append(list(w))

    assert average_rounds([north, east], [1.0, -0.5], 2) == [approx(values, abs=1e-6) for values in expected]


def test_a_model_that_is_sure_of_nothing_teaches_nothing() -> None:
    client = looking_client("east", PseudoLabels(limit=0.5), IMAGES, NONE)
    assert average_rounds([client], [0.0, 0.0], 1) == [[0.0, 0.0]]
    assert client.fitted is not None and client.fitted.loss["sure"] == 0


def test_with_a_limit_of_one_every_voxel_counts() -> None:
    client = looking_client("east", PseudoLabels(limit=1.0), IMAGES, NONE)
    average_rounds([client], [0.1, 0.1], 1)
    assert client.fitted is not None and client.fitted.loss["sure"] == 1


def test_background_sums_and_the_exclusion_loss_are_refused(tmp_path: Any) -> None:
    with raises(ConfigError, match="include_background"):
        config(tmp_path, objective={"name": "pseudo_labels", "include_background": True})
    with raises(ConfigError, match="exclusion"):
        config(tmp_path, objective={"name": "pseudo_labels"}, exclusion=1.0)


def test_gradients_of_voxels_that_are_not_sure_are_exactly_zero() -> None:
    objective = PseudoLabels(limit=0.3)
    client = looking_client("east", objective, torch.zeros_like(IMAGES), NONE)
    assert average_rounds([client], [5.0, 0.01], 1) == [[5.0, 0.01]]  # every logit is 0.01
