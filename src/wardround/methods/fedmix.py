"""FedMix: Approximation of Mixup under Mean Augmented Federated Learning.

Yoon et al., ICLR 2021. https://arxiv.org/abs/2107.00233

Mixup with other hospitals' cases, without their cases: before round 0 each client shares means of groups
of its images and masks. Each step then minimises a first-order expansion of mixup with one of the others'.

Symbols: x, y a batch; x̄, ȳ a mean image and its soft mask; λ mixing ratio (`lam`); ℓ the objective, a mean
over the batch; x' = (1 - λ) x.
What leaves a client: its model; once, mean images and mean masks of disjoint groups, as float16.
Not to be taken for the FedMix of Wicaksana et al., which is `fedmix_supervision`.

Differs: the third term sums over the batch, as the gradient of a batch mean asks for; public code divides
by the batch size once more.
Differs: a mean has at least 5 cases, what is left over joins the last group, and a client of many cases
makes larger groups instead of more than `max_means`.
Differs: Dice is not linear in the mask, so with it the second term is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.clients import Client, Clients, Registration
from wardround.config import Config
from wardround.data.cases import Batch, as_stack
from wardround.data.opening import open_federation
from wardround.errors import ConfigError
from wardround.losses.objective import Context, Objective
from wardround.messages import Message, ServerState
from wardround.methods.bank import Banked
from wardround.methods.means import (
    GroupSize,
    check_means,
    deal_into_groups,
    draw_means,
    group_by_grid,
    group_means,
    require_one_grid,
    select_fitting,
)
from wardround.models.base import Output, Segmenter
from wardround.models.norm import frozen_statistics
from wardround.params import Params
from wardround.training.learner import Loss


@dataclass(frozen=True)
class FedMix(Banked):
    """Mixes every batch with a mean image of another hospital.

    lam: share of the mean, 0 gives FedAvg; group: cases behind each mean; max_means: the most means of one
    client; form: the expansion in x̄ (taylor, twice the memory), or plain mixup with the mean (naive).
    """

    title = "FedMix"
    paper = "Yoon et al., ICLR"
    year = 2021
    link = "https://arxiv.org/abs/2107.00233"
    kind = "objective"
    sends = "mean images and masks of groups of cases, once"
    needs_every_channel = "it mixes in the mean images of other clients"
    needs_every_class = "it mixes the masks of all clients"
    needs_labels = needs_every_class

    lam: Annotated[float, Field(ge=0, lt=1)] = 0.05
    group: GroupSize = 5
    max_means: Annotated[int, Field(ge=1)] = 16
    form: Literal["taylor", "naive"] = "taylor"

    # Server

    def prepare(self, state: ServerState, clients: Clients) -> ServerState:
        state = super().prepare(state, clients)
        bank = state.memory.get("bank", {})
        require_one_grid("fedmix", {giver: part.spec("image")[0][1:] for giver, part in bank.items()})
        return state

    def check_contribution(self, given: Params, registration: Registration) -> str | None:
        return check_means(given, registration.num_train)

    # Client

    def uses_bank(self) -> bool:
        return self.lam > 0

    def make_contribution(self, client: Client, message: Message) -> Params:
        assert isinstance(client.model, Segmenter)
        size = max(self.group, -(-client.num_examples // self.max_means))
        groups = deal_into_groups(client.num_examples, size, client.generator("groups"))
        return group_means(as_stack(client.data.train, "method 'fedmix'"), groups, client.model.num_outputs)

    def train(self, client: Client, message: Message) -> Message:
        model = client.model
        assert isinstance(model, Segmenter)
        given = self.read_bank(client, message)
        pools = group_by_grid(select_fitting(given, model.in_channels, model.num_outputs, model.dimensions))
        if not pools:  # one client, or no other may give a mean
            return super().train(client, message)
        own = as_stack(client.data.train, "method 'fedmix'").images.shape[1:]
        require_one_grid("fedmix", {client.name: own, "other clients": pools[0].image.shape[1:]})
        draw = client.generator("means")

        def mixed(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            return self.mixed_loss(client.loss, model, batch, draw_means(pools, 1, draw), context)

        return Message(params=client.fit(start=message.params, loss=mixed).params)

    def mixed_loss(self, loss: Loss, model: nn.Module, batch: Batch, mean: Batch, context: Context) -> Tensor:
        """(1-λ) ℓ(f(x'), y) + λ ℓ(f(x'), ȳ) + λ(1-λ) ⟨∂ℓ(f(x'), y)/∂x', x̄⟩, or mixup without the last."""
        lam, taylor, x_bar = self.lam, self.form == "taylor", mean.image
        memory = {k: v.clone() if isinstance(v, Tensor) else v for k, v in context.memory.items()}

        def mix(image: Tensor) -> Tensor:
            return (1 - lam) * image if taylor else (1 - lam) * image + lam * x_bar

        if context.second_view is not None:
            context.second_view = mix(context.second_view)
        x = mix(batch.image).requires_grad_(taylor)
        own = loss(model, replace(batch, image=x), context)
        y_bar = mean.label.expand(len(batch), *mean.label.shape[1:])
        with frozen_statistics(model):  # else a second view would count twice
            terms = {"mix_mask": lam * loss(model, Batch(x, y_bar), Again(context, memory))}
        if taylor:
            (slope,) = torch.autograd.grad(own, x, create_graph=True)
            terms["mix_slope"] = lam * (1 - lam) * (slope * x_bar).sum()
        for name, term in terms.items():
            context.note(name, term)
        return (1 - lam) * own + sum(terms.values())

    # Both

    def check(self, config: Config, objective: Objective) -> None:
        """Try the objective on four voxels: with a soft mask, and for a second derivative."""
        if not self.uses_bank():
            return
        name = config.objective.get("name", self.objective)
        num_classes = open_federation(config.data, config.seed).num_classes
        logits = torch.linspace(-1, 1, 4 * objective.num_outputs(num_classes), dtype=torch.float64)
        logits = logits.reshape(1, -1, 2, 2)
        try:
            objective.sample_losses(logits, torch.full_like(logits, 0.5))
        except Exception as error:
            raise ConfigError(
                f"method 'fedmix' gives soft masks, which objective '{name}' does not take ({error}). "
                "Use another objective, for example dice_bce."
            ) from None
        if self.form == "taylor" and not differentiable_twice(objective, logits):
            raise ConfigError(
                f"method 'fedmix' with form: taylor needs second derivatives, which objective '{name}' does "
                f"not have for {num_classes} classes. Use method.form=naive, or another objective."
            )


class Again(Context):
    """The same context for a second mask: its forward pass is there already, and nothing is noted."""

    def __init__(self, context: Context, memory: dict[str, object]) -> None:
        vars(self).update(vars(context))
        self.memory, self.terms = memory, {}

    def forward(self, model: nn.Module, image: Tensor) -> Output:
        return self.output


def differentiable_twice(objective: Objective, logits: Tensor) -> bool:
    """Whether the gradient of the loss has a gradient, and the right one: that of finite differences."""
    label = (logits[:, 0] > -0.9).long()

    def slope(at: Tensor) -> Tensor:
        loss = objective.sample_losses(at, label).sum()
        return torch.autograd.grad(loss, at, create_graph=True)[0]

    middle, shift = logits.clone().requires_grad_(), 1e-4 * logits
    try:
        (found,) = torch.autograd.grad((slope(middle) * logits).sum(), middle)
    except RuntimeError:
        return False
    ends = [slope((logits + sign * shift).requires_grad_()).detach() for sign in (1, -1)]
    expected = (ends[0] - ends[1]) / 2e-4
    return torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
