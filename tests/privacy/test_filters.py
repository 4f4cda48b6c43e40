"""Filters: what leaves after each."""

from __future__ import annotations

import torch
from helpers import params
from pytest import approx

from wardround.messages import Message
from wardround.privacy.filters import ClientNoise, Outgoing, Withhold

LEARNS = frozenset({"w"})


def answer(change: torch.Tensor) -> Outgoing:
    received = params(w=torch.zeros(len(change)), count=torch.tensor(3))
    sent = params(w=change, count=torch.tensor(9))
    message = Message(params=sent, extras={"more": sent}, scalars={"score": 0.5})
    return Outgoing("train", received, message, 17, 5, 2.5, {"total": 0.3})


def test_losses_seconds_counts_buffers_and_what_is_beside_the_model_stay() -> None:
    left = Withhold(100, 12, LEARNS)(answer(torch.ones(4)))

    assert (left.num_examples, left.num_steps, left.seconds, left.loss) == (100, 12, 0.0, {})
    assert not left.message.extras and not left.message.scalars
    assert left.message.params["w"].tolist() == [1.0] * 4
    assert int(left.message.params["count"]) == 3


def test_an_update_is_clipped_and_noised_by_twice_the_norm() -> None:
    count = 10_000
    left = ClientNoise(0.5, 2.0, LEARNS)(answer(torch.full((count,), 3.0)))

    noised = left.message.params["w"].double()
    assert float(noised.mean()) == approx(0.5 / count**0.5, abs=0.1)
    assert float(noised.std()) == approx(2.0, rel=0.04)
    assert left.notes == ({"filter": "client_noise", "clip": 0.5, "noise": 2.0},)


def test_without_noise_the_update_has_the_norm_it_is_clipped_to() -> None:
    left = ClientNoise(0.5, 0.0, LEARNS)(answer(torch.full((100,), 3.0)))
    assert float(left.message.params["w"].norm()) == approx(0.5)

    small = ClientNoise(0.5, 0.0, LEARNS)(answer(torch.full((100,), 0.01)))
    assert torch.equal(small.message.params["w"], torch.full((100,), 0.01))


def test_an_update_that_is_not_finite_leaves_as_noise_alone() -> None:
    left = ClientNoise(0.5, 1.0, LEARNS)(answer(torch.tensor([float("nan"), 1.0, float("inf")])))

    assert torch.isfinite(left.message.params["w"]).all()


def test_the_same_update_never_leaves_with_the_same_noise() -> None:
    noise = ClientNoise(1.0, 1.0, LEARNS)
    first, second = noise(answer(torch.ones(4))), noise(answer(torch.ones(4)))

    assert not torch.equal(first.message.params["w"], second.message.params["w"])
