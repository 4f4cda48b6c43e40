"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.

Li et al., ICLR 2021. https://arxiv.org/abs/2102.07623

Every client keeps its batch norm layers to itself, scale, shift and statistics; all other tensors are
averaged. Scanners differ in brightness and contrast, and each hospital's norm layers take that up.

What leaves a client: its model without norm tensors; beside it the norm tensors, whose weighted mean serves
clients that have none of their own (never those that trained).

Differs: layers are found by type; the authors' code looks for "bn" in names, which misses many.
Differs: by number of cases, where the authors' code weighs its equal-sized clients alike.
Differs: `norm_types` beyond batch carry the idea to layers without statistics; a variant of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wardround.aggregation.mean import mean
from wardround.clients import Client, Registration
from wardround.clients.gate import params_complaint
from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.models import ModelSettings, is_foreign
from wardround.models.norm import Norm, norm_names
from wardround.params import Params
from wardround.training.sketch import sketch_model

NormType = Literal["batch", "instance_affine", "group", "layer"]
KINDS: dict[NormType, type[nn.Module]] = {
    "batch": _BatchNorm,
    "instance_affine": _InstanceNorm,  # one that learns nothing has no tensors to keep
    "group": nn.GroupNorm,
    "layer": nn.LayerNorm,
}


@dataclass(frozen=True)
class FedBN(Method):
    """Leaves norm layers at the clients and averages the rest.

    norm_types: kinds of layers that stay; the paper's is batch. unseen_norm: what a client that never
    trained uses, the mean of the others' norm tensors, or their mean scale and shift with statistics
    measured on its own training images (no labels needed).
    """

    title = "FedBN"
    paper = "Li et al., ICLR"
    year = 2021
    link = "https://arxiv.org/abs/2102.07623"
    kind = "personal"
    sends = "its norm tensors, for clients that never train"
    needs = frozenset({"state"})
    up = frozenset({"norm"})

    norm_types: Annotated[tuple[NormType, ...], Field(min_length=1)] = ("batch",)
    unseen_norm: Literal["average", "reestimate"] = "average"

    # Server

    def average(self, state: ServerState, replies: Sequence[Reply], weights: Sequence[float]) -> Params:
        """The mean of the shared tensors, and beside it that of the norm tensors."""
        params = super().average(state, replies, weights)
        norms = [reply.extras["norm"] for reply in replies if "norm" in reply.extras]
        return params.updated(mean(norms, weights)) if norms else params

    def check_reply(self, task: str, message: Message, registration: Registration) -> str | None:
        return params_complaint(registration.kept, message.extras.get("norm"))

    # Client

    def train(self, client: Client, message: Message) -> Message:
        params = client.fit(start=message.params).params
        norm = params.only(self.kept(client.model)).without(client.objective.local_names(client.model))
        return Message(params=params, extras={"norm": norm} if norm else {})

    def personal(self, client: Client, params: Params) -> Params:
        if "own" in client.memory or self.unseen_norm == "average":
            return super().personal(client, params)
        return client.with_own_statistics(params)

    # Both

    def kept(self, model: nn.Module) -> list[str]:
        """State-dict names of the norm layers that stay."""
        return norm_names(model, tuple(KINDS[kind] for kind in self.norm_types))

    def shared(self, model: nn.Module) -> list[str]:
        kept = set(self.kept(model))
        return [name for name in model.state_dict() if name not in kept]

    def check(self, config: Config, objective: Objective) -> None:
        if config.model.bn_stats != "average":
            raise ConfigError(
                f"method 'fedbn' keeps norm layers whole, statistics too, but model.bn_stats is "
                f"'{config.model.bn_stats}'. Leave model.bn_stats out."
            )
        model = sketch_model(config, objective)
        if model is not None and not self.kept(model):
            kinds = " or ".join(self.norm_types)
            raise ConfigError(
                f"method 'fedbn' keeps {kinds} norm at the clients, but model '{config.model.name}' has no "
                "such layer with tensors of its own, so this would be FedAvg. "
                + self._advice(config.model, model)
            )

    def _advice(self, settings: ModelSettings, model: nn.Module) -> str:
        """How to get norm layers to keep; model.norm is a setting of our own networks alone."""
        if not is_foreign(settings):
            wanted = [kind for kind in self.norm_types if kind in get_args(Norm)]
            return f"Choose {f'model.norm={wanted[0]}, or ' if wanted else ''}another method.norm_types."
        there = [kind for kind, layer in KINDS.items() if norm_names(model, (layer,))]
        if there:
            return f"Choose method.norm_types=[{','.join(there)}], which it has, or another network."
        return "Give it such layers, by its own argument in model.arguments if it has one, or choose another."

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if self.norm_types == ("batch",):
            return []
        kinds = " or ".join(self.norm_types)
        return [f"FedBN: {kinds} norm stays local; the paper keeps batch norm alone, so report a variant."]
