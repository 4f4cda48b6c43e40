"""Filters: each takes an answer on its way out and gives back what may go on; their order is the Guard's.

A filter says what it did in `notes`, which go to the ledger and into the records. It tells settings, never
what it saw: whether an update was clipped is a fact about the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from wardround.messages import Message
from wardround.params import Params
from wardround.privacy.noise import add_noise, clip_factor


@dataclass(frozen=True)
class Outgoing:
    """An answer on its way out, and what it answers.

    received: the params that came with the request; notes: what each filter did, in their order.
    """

    task: str
    received: Params | None
    message: Message
    num_examples: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    loss: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[Mapping[str, Any], ...] = ()

    def noted(self, name: str, **facts: Any) -> Outgoing:
        return replace(self, notes=(*self.notes, {"filter": name, **facts}))


Filter = Callable[[Outgoing], Outgoing]


@dataclass(frozen=True)
class Withhold:
    """What is not a model stays: losses, seconds, running statistics; counts are public numbers.

    num_examples, num_steps: the public numbers of an answer to `train`; trainable: names of the tensors that
    learn, every other one leaves as it came.
    """

    num_examples: int
    num_steps: int
    trainable: frozenset[str]

    def __call__(self, outgoing: Outgoing) -> Outgoing:
        is_train, message = outgoing.task == "train", outgoing.message
        if is_train:
            learned, received = message.params, outgoing.received
            assert received is not None, "a request to train brings a model"
            sent = {name: (learned if name in self.trainable else received)[name] for name in learned}
            message = Message(params=Params(sent))
        return replace(
            outgoing,
            message=message,
            num_examples=self.num_examples,
            num_steps=self.num_steps if is_train else 0,
            seconds=0.0,
            loss={},
        ).noted("withhold")


@dataclass(frozen=True)
class ClientNoise:
    """The update, clipped to a norm and noised: what leaves says little of whatever the client trained on.

    Any two updates of at most this norm differ by at most twice as much, so the noise is `noise` times that,
    and none where it is 0. trainable: names of the tensors that learn, which are noised.
    """

    clip: float
    noise: float
    trainable: frozenset[str]

    def __call__(self, outgoing: Outgoing) -> Outgoing:
        received, params = outgoing.received, outgoing.message.params
        assert received is not None, "a request to train brings a model"
        update = {name: params[name] - received[name] for name in params if name in self.trainable}
        factor = clip_factor(list(update.values()), self.clip)
        deviation = self.noise * 2 * self.clip
        noised = {
            name: received[name]
            + add_noise(change * factor if factor else torch.zeros_like(change), deviation)
            for name, change in update.items()
        }
        sent = Params({name: noised.get(name, received[name]) for name in params})
        message = replace(outgoing.message, params=sent)
        return replace(outgoing, message=message).noted("client_noise", clip=self.clip, noise=self.noise)
