"""FedSAM: Generalized Federated Learning via Sharpness Aware Minimization.

Qu et al., ICML 2022. https://arxiv.org/abs/2206.02618

Clients look for flat minima, which stay good when models are averaged: each step takes its gradient not where
the model is but at the worst point nearby.

Symbols: w the client's model, g its gradient, eps the way to the worst point nearby, rho its length;
T_w = |w| + eta the scale of each weight (ASAM).
What leaves a client: w.

Differs: rho is 0.02, for segmentation with Adam; the FedASAM paper has 0.1, and 0.7 with eta 0.2 for ASAM.
Differs: `asam` (Kwon et al., ICML 2021; Caldarola et al., ECCV 2022) adds eta to biases as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from wardround.clients import Client
from wardround.losses.segmentation import at_least_float32
from wardround.messages import Message
from wardround.methods.base import Method
from wardround.training.learner import Step

TINY = 1e-12  # keeps eps 0 where the gradient is 0


@dataclass(frozen=True)
class FedSAM(Method):
    """Averages client models that were trained to lie in flat minima, with two passes a step.

    rho: how far the worst point nearby may lie, 0 gives FedAvg. variant: distance in weights (sam) or
    relative to their size (asam, which wants a larger rho). eta: added to that size, for asam only.
    """

    title = "FedSAM"
    paper = "Qu et al., ICML"
    year = 2022
    link = "https://arxiv.org/abs/2206.02618"
    kind = "objective"
    own_steps = True

    rho: Annotated[float, Field(ge=0)] = 0.02
    variant: Literal["sam", "asam"] = "sam"
    eta: Annotated[float, Field(ge=0)] = 0.2

    def train(self, client: Client, message: Message) -> Message:
        if not self.rho:
            return super().train(client, message)
        eta = self.eta if self.variant == "asam" else None

        def sharpness_aware(step: Step) -> None:
            step.backward()
            learned = {n: p for n, p in step.model.named_parameters() if p.grad is not None}
            with step.shifted(ascent(learned, self.rho, eta)):
                step.backward()  # g' = gradient at w + eps, same batch and dropout
            step.apply()

        return Message(params=client.fit(start=message.params, step=sharpness_aware).params)


def ascent(parameters: Mapping[str, Tensor], rho: float, eta: float | None = None) -> dict[str, Tensor]:
    """eps = rho g / ||g||, the norm over all tensors; with eta, eps = rho T_w² g / ||T_w g||.

    A gradient of 0 gives an eps of 0. Nothing is read back from the device.
    """
    scale = {n: 1.0 if eta is None else p.detach().abs() + eta for n, p in parameters.items()}
    scaled = {n: at_least_float32(p.grad) * scale[n] for n, p in parameters.items() if p.grad is not None}
    norm = torch.stack([torch.linalg.vector_norm(tensor) for tensor in scaled.values()]).norm()
    return {name: tensor * scale[name] * (rho / (norm + TINY)) for name, tensor in scaled.items()}
