"""HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous Medical Images.

Jiang et al., AAAI 2022. https://arxiv.org/abs/2112.10775

Every image takes the federation's mean amplitude and keeps its own phase, so that clients train on images
of one style. Each step uses the gradient at a point a little uphill, which leads to flat optima that
survive averaging.

Symbols: A amplitude spectrum; w parameters, g their gradient, delta = alpha g/||g|| the perturbation.
What leaves a client: w_k each round; once, the mean amplitude of its training images in the window.

Differs: clients measure the mean over their images before round 0; the release keeps a running mean
during the first round, averages it then, and freezes it.
Same: the release replaces the amplitude of frequency 0 alone, which is the mean intensity (`window: 0`).
Images that were z-scored have none, so for them only a window of 1 or more changes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.mean import mean
from wardround.aggregation.weights import uniform
from wardround.aggregation.withheld import Withheld
from wardround.clients import Client, Clients, Registration
from wardround.clients.gate import params_complaint
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.methods.fedsam import ascent
from wardround.methods.frequency import amplitude_window, check_amplitudes, is_blank, restyle
from wardround.models.base import Output, Segmenter
from wardround.params import Params
from wardround.training.learner import Step

log = logging.getLogger(__name__)

AMPLITUDE = "amplitude_norm.amplitude"  # its name in the model
IMAGES_AT_ONCE = 16


@dataclass(frozen=True)
class HarmoFL(Method):
    """Trains on images of one common amplitude, with gradients from a little uphill; all clients count alike.

    alpha: length of the perturbation, 0 gives plain steps; normalise: whether images take the common
    amplitude (without it and with alpha 0: FedAvg with uniform weights); window: the highest frequency
    whose amplitude is replaced, along each axis; 0 is the mean intensity alone.
    """

    title = "HarmoFL"
    paper = "Jiang et al., AAAI"
    year = 2022
    link = "https://arxiv.org/abs/2112.10775"
    kind = "objective"
    sends = "the mean amplitude of its images at the lowest frequencies, once"
    needs_every_channel = "it gives every image the mean amplitude of all clients"
    tasks = ("measure", "train")
    up = frozenset({"amplitude"})

    alpha: Annotated[float, Field(ge=0)] = 0.05
    normalise: bool = True
    window: Annotated[int, Field(ge=0)] = 0

    # Server

    def prepare(self, state: ServerState, clients: Clients) -> ServerState:
        """The common amplitude: every client's counts alike, and it stays for the whole run."""
        if not self.normalise:
            return state
        replies = clients.ask("measure", to=clients.trainable)
        measured = [reply.extras["amplitude"] for reply in replies if "amplitude" in reply.extras]
        if not measured:
            log.warning("harmofl: no client measured its amplitude; images stay as they are")
            return state
        return replace(state, params=state.params.updated(mean(measured)))

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        """A round of FedAvg; the first one warns of an amplitude that says nothing."""
        after = super().run_round(state, clients)
        if state.round or not self.normalise or not is_blank(state.params[AMPLITUDE]):
            return after
        warning = (
            "HarmoFL normalises the mean intensity alone (window 0), and that is 0 already (z-scored). "
            "Set method.window to 1 or more."
        )
        log.warning(warning)
        return replace(after, notes={**after.notes, "warnings": [warning]})

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return uniform(replies)

    def check_reply(self, task: str, message: Message, registration: Registration) -> str | None:
        """The amplitude is laid over the model, so it may hold nothing else."""
        sent = message.extras.get("amplitude")
        if task != "measure" or sent is None:
            return None
        reason = params_complaint({AMPLITUDE: registration.tensors[AMPLITUDE]}, sent)
        return reason or (None if isinstance(sent, Withheld) else check_amplitudes(sent[AMPLITUDE]))

    # Client

    def measure(self, client: Client, message: Message) -> Message:
        """The mean amplitude of the training images, as large as training sees them, without augmentation."""
        split, draw = client.data.train, client.generator("patches")
        sums = [
            amplitude_window(split.batch(indices, draw).image, self.window).double().sum(dim=0)
            for indices in torch.split(torch.arange(len(split)), IMAGES_AT_ONCE)
        ]
        amplitude = torch.stack(sums).sum(dim=0) / len(split)
        return Message(extras={"amplitude": Params({AMPLITUDE: amplitude.float()})})

    def train(self, client: Client, message: Message) -> Message:

        def uphill(step: Step) -> None:
            step.backward()
            learned = {name: p for name, p in step.model.named_parameters() if p.grad is not None}
            with step.shifted(ascent(learned, self.alpha)):  # delta = alpha g/||g||
                step.backward()  # the gradient at w + delta
            step.apply()  # moves w

        step = uphill if self.alpha else None
        return Message(params=client.fit(start=message.params, step=step).params)

    # Both

    def start_model(self, model: nn.Module) -> None:
        if self.normalise:
            assert isinstance(model, Segmenter)
            model.add_module("amplitude_norm", AmplitudeNorm(model, self.window))
            model.__class__ = harmonise(type(model))  # as torch's own parametrisations do


class AmplitudeNorm(nn.Module):
    """An input layer: images take the amplitude in its buffer; while that is 0, they stay as they are."""

    amplitude: Tensor

    def __init__(self, model: Segmenter, window: int) -> None:
        super().__init__()
        shape = (model.in_channels, *[2 * window + 1] * model.dimensions)
        self.register_buffer("amplitude", torch.zeros(shape))

    def forward(self, image: Tensor) -> Tensor:
        return torch.where(self.amplitude.any(), restyle(image, self.amplitude[None]), image)


class Harmonised(Segmenter):
    """What `harmonise` lays over a network: both ways in pass the input layer.

    So evaluation, prediction, frozen references and a model loaded from its checkpoint all see the same.
    """

    amplitude_norm: AmplitudeNorm

    def forward_features(self, x: Tensor) -> Output:
        return super().forward_features(self.amplitude_norm(x))

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(self.amplitude_norm(x))


def harmonise(kind: type[Segmenter]) -> type[Segmenter]:
    """This kind of network with the input layer in front."""
    return type(f"Harmonised{kind.__name__}", (Harmonised, kind), {})
