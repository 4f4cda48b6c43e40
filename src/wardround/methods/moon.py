"""MOON: Model-Contrastive Federated Learning.

Li et al., CVPR 2021. https://arxiv.org/abs/2103.16257

Averaging makes better representations than a client alone. MOON pulls the representation of each case
towards the received model's and away from that of the client's own last model.

Symbols: z, z_glob, z_prev representations of a case by the trained, received and last local model;
tau temperature, mu weight of the term.
What leaves a client: its model. Its last model stays there.

Differs: z is the mean of the bottleneck over voxels; the paper's classifier has a vector there.
Differs: no projection by default; `head: mlp` adds the paper's, trained and averaged with the network.
Differs: a client's first participation has no last model, and the term is left out. The received model in
its place would give the constant log 2.
Differs: one previous model; the released code can keep several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.clients import Client
from wardround.config import Config
from wardround.data.cases import Batch
from wardround.losses.contrastive import mean_over_voxels, scale_to_unit
from wardround.losses.contrastive_objectives import Projection, probe_output, require_bottleneck
from wardround.losses.objective import Context
from wardround.messages import Message
from wardround.methods.base import Method
from wardround.models.base import Segmenter


@dataclass(frozen=True)
class MOON(Method):
    """Averages models whose representations were kept near the received model's.

    mu: weight of the contrastive term, 0 gives FedAvg; temperature: cosines are divided by it;
    head: compare the pooled bottleneck as it is, or behind a projection of two layers;
    dimension: length of the projected vectors.
    """

    title = "MOON"
    paper = "Li et al., CVPR"
    year = 2021
    link = "https://arxiv.org/abs/2103.16257"
    kind = "objective"
    needs = frozenset({"features", "global", "previous"})

    mu: Annotated[float, Field(ge=0)] = 0.5
    temperature: Annotated[float, Field(gt=0)] = 0.5
    head: Literal["none", "mlp"] = "none"
    dimension: Annotated[int, Field(ge=1)] = 256

    def train(self, client: Client, message: Message) -> Message:

        def contrast(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            received, previous = context.global_, context.previous
            z = self.represent(model, context.features)
            with torch.no_grad():
                z_glob = self.represent(received.model, received.encode(batch.image))
                z_prev = self.represent(previous.model, previous.encode(batch.image))
            term = self.mu * model_contrast(z, z_glob, [z_prev], self.temperature).mean()  # mu l_con
            context.note("contrast", term)
            return term

        add = contrast if self.mu and "previous" in client.memory else None
        return Message(params=client.fit(start=message.params, add=add).params)

    def represent(self, model: nn.Module, features: Tensor) -> Tensor:
        """One vector a case, (B, C, *spatial) -> (B, D)."""
        pooled = mean_over_voxels(features)
        head = getattr(model, "moon_head", None)
        return pooled if head is None else head(pooled)

    def start_model(self, model: nn.Module) -> None:
        if self.mu and self.head == "mlp" and isinstance(model, Segmenter) and model.has_features:
            model.moon_head = Projection(require_bottleneck(probe_output(model)).shape[1], self.dimension)

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if not self.mu or not any(isinstance(module, _BatchNorm) for module in model.modules()):
            return []
        return [
            "method moon compares the trained network's features with those of frozen ones; BatchNorm makes "
            "them differ even where the weights are equal. Prefer model.norm instance or group."
        ]


def model_contrast(z: Tensor, z_glob: Tensor, z_prev: Sequence[Tensor], temperature: float) -> Tensor:
    """-log e^{s_glob} / (e^{s_glob} + Σ e^{s_prev}), s = cosine with z over tau: (B, D) each -> (B,).

    >>> z = torch.eye(2)
    >>> model_contrast(z, z, [-z], temperature=0.05) < 1e-6
    tensor([True, True])
    """
    z = scale_to_unit(z)
    towards = (z * scale_to_unit(z_glob)).sum(dim=-1)
    away = torch.stack([(z * scale_to_unit(other)).sum(dim=-1) for other in z_prev])  # (previous models, B)
    # log(1 + Σ e^{s_prev - s_glob}): where both models agree, the gradient is 0 to the last bit
    return F.softplus(((away - towards) / temperature).logsumexp(dim=0))
