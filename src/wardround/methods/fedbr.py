"""FedBR: Improving Federated Learning on Heterogeneous Data via Local Learning Bias Reduction.

Guo et al., ICML 2023. https://arxiv.org/abs/2205.13462

All clients share a few pseudo-samples, means of cases. On them a local model shall still segment, and its
features shall stay near the received model's and away from those of the client's own images.

Symbols: x a batch, u pseudo-samples; z features of the trained model, z_g of the received one; D projection;
c the contrast, τ factor of its cosines (`scale`); mu, lam weights of c and of the Dice on u.
What leaves a client: its model (and D); once, means of disjoint groups of images and masks, as float16.

Differs: as FedEvi's authors ran it on a U-Net: masks instead of a uniform label, cosines over channels at
every location of the bottleneck, no D. `adversarial: true` restores D, which climbs c before each step.
Differs: each u is compared with every x of the batch, so that batches need not be equally long.
Differs: groups of a client are disjoint, so that no difference of means shows a case; few cases make fewer
pseudo-samples. Without any of another client, a client trains as in FedAvg.
Differs: pseudo-samples leave running statistics alone, which shall describe real images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.clients import Client, Clients, Registration
from wardround.data.cases import Batch, as_stack
from wardround.losses.contrastive import cosines, mean_over_voxels, scale_to_unit
from wardround.losses.contrastive_objectives import Projection, probe_output, require_bottleneck
from wardround.losses.objective import Context, Objective
from wardround.losses.segmentation import divide, sums
from wardround.messages import Message
from wardround.methods.bank import Banked
from wardround.methods.means import (
    GroupSize,
    check_means,
    deal_into_groups,
    draw_means,
    group_by_grid,
    group_means,
    select_fitting,
    share_evenly,
)
from wardround.models.base import Segmenter
from wardround.models.norm import frozen_statistics
from wardround.params import Params
from wardround.training.learner import Step

SMOOTH = 1e-5  # of the Dice


@dataclass(frozen=True)
class FedBR(Banked):
    """Keeps clients unbiased on pseudo-samples that all of them share.

    mu: weight of the contrast, lam: of the Dice on pseudo-samples, both 0 give FedAvg; scale: factor of the
    cosines; pseudo: the most pseudo-samples of all clients together, per_step: how many a step sees;
    group: cases behind each; adversarial: whether a projection, trained to raise the contrast, sees the
    features first.
    """

    title = "FedBR"
    paper = "Guo et al., ICML"
    year = 2023
    link = "https://arxiv.org/abs/2205.13462"
    kind = "objective"
    sends = "mean images and masks of groups of cases, once"
    needs_every_channel = "its pseudo cases mix the images of all clients"
    needs_every_class = "its pseudo cases mix the masks of all clients"
    needs_labels = needs_every_class
    needs = frozenset({"features", "global"})

    mu: Annotated[float, Field(ge=0)] = 0.05
    lam: Annotated[float, Field(ge=0)] = 0.05
    scale: Annotated[float, Field(gt=0)] = 2.0
    pseudo: Annotated[int, Field(ge=1)] = 32
    per_step: Annotated[int, Field(ge=1)] = 8
    group: GroupSize = 10
    adversarial: bool = False

    # Server

    def make_requests(self, clients: Clients) -> dict[str, Message]:
        """`pseudo` means in all, shared out evenly among the clients that have enough cases."""
        able = {name: size // self.group for name, size in clients.sizes.items()}
        shares = share_evenly(able, self.pseudo)
        return {name: Message(scalars={"count": count}) for name, count in shares.items() if count}

    def check_contribution(self, given: Params, registration: Registration) -> str | None:
        return check_means(given, registration.num_train)

    # Client

    def uses_bank(self) -> bool:
        return self.mu > 0 or self.lam > 0

    def make_contribution(self, client: Client, message: Message) -> Params:
        assert isinstance(client.model, Segmenter)
        groups = deal_into_groups(client.num_examples, self.group, client.generator("groups"))
        chosen = groups[: int(message.scalars["count"])]
        cases = as_stack(client.data.train, "method 'fedbr'")
        given = group_means(cases, chosen, client.model.num_outputs)
        client.memory["given"] = given  # it learns from its own too, and they need not come back
        return given

    def train(self, client: Client, message: Message) -> Message:
        model = client.model
        assert isinstance(model, Segmenter)
        bank = self.read_bank(client, message)
        bank = select_fitting(bank, model.in_channels, model.num_outputs, model.dimensions)
        if not bank:
            return super().train(client, message)
        given = client.memory.get("given", Params())
        pools = group_by_grid(bank | {f"{client.name}/{key}": given[key].to(client.device) for key in given})
        draw = client.generator("pseudo")

        def against_bias(step: Step) -> None:
            u = draw_means(pools, self.per_step, draw)
            if self.projects:
                self.climb(step, u)
            step.backward(add=lambda model, _, context: self.bias(client.objective, model, u, context))
            projection(step.model).zero_grad(set_to_none=True)  # D only climbs
            step.apply()

        return Message(params=client.fit(start=message.params, step=against_bias).params)

    def bias(self, objective: Objective, model: nn.Module, u: Batch, context: Context) -> Tensor:
        """mu c + lam Dice(f(u), mask), beside the objective's forward pass of x."""
        assert isinstance(model, Segmenter)
        with frozen_statistics(model):
            output = model.forward_features(u.image)
        terms = []
        if self.mu:
            z_g = context.global_.encode(u.image)
            c = contrast(require_bottleneck(output), z_g, context.features, self.scale, projection(model))
            context.note("pseudo_contrast", c)
            terms.append(self.mu * c)
        if self.lam:
            dice = pseudo_dice(objective.probabilities(output.logits), u.label)
            context.note("pseudo_dice", dice)
            terms.append(self.lam * dice)
        return torch.stack(terms).sum()

    def climb(self, step: Step, u: Batch) -> None:
        """One ascent step of D on c; the features rest."""
        model = step.model
        z_g = step.context.global_.encode(u.image)
        with torch.no_grad(), frozen_statistics(model):
            z_u, z_x = model.encode(u.image), model.encode(step.batch.image)
        step.optimizer.zero_grad(set_to_none=True)
        (-contrast(z_u, z_g, z_x, self.scale, projection(model))).backward()  # type: ignore[no-untyped-call]
        step.apply()

    # Both

    @property
    def projects(self) -> bool:
        return self.adversarial and self.mu > 0

    def start_model(self, model: nn.Module) -> None:
        if self.projects and isinstance(model, Segmenter) and model.has_features:
            width = require_bottleneck(probe_output(model)).shape[1]
            model.fedbr = Projection(width, width)


def projection(model: nn.Module) -> nn.Module:
    """D, or what changes nothing."""
    head = getattr(model, "fedbr", None)
    return head if isinstance(head, nn.Module) else nn.Identity()


def contrast(z_u: Tensor, z_g: Tensor, z_x: Tensor, scale: float, head: nn.Module) -> Tensor:
    """c = -log e^{τ cos(z_u, z_g)} / (e^{τ cos(z_u, z_g)} + e^{τ cos(z_u, z_x)}), mean over pairs and places.

    Maps are (U, C, *spatial), (U, C, *spatial) and (B, C, *spatial); of unlike size, their means are taken.
    """
    maps = [z_u, z_g, z_x]
    if z_u.shape[2:] != z_x.shape[2:]:
        maps = [mean_over_voxels(z).unsqueeze(2) for z in maps]
    u, g, x = (head(z.flatten(2).permute(2, 0, 1)) for z in maps)  # (N, C, *spatial) -> (V, N, C)
    near = (scale_to_unit(u) * scale_to_unit(g)).sum(dim=2, keepdim=True)  # (V, U, 1)
    return F.softplus(scale * (cosines(u, x) - near)).mean()  # (V, U, B)


def pseudo_dice(probabilities: Tensor, mask: Tensor) -> Tensor:
    """Soft Dice of the foreground: (B, classes, *spatial) against a soft mask of one or all classes."""
    p = probabilities[:, 1:]
    y = mask[:, -p.shape[1] :]
    total, overlap = sums("per_sample", p + y, p * y)
    return divide(total - 2 * overlap, total + SMOOTH).mean()
