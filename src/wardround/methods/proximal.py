"""The proximal pull: how far a model has moved from the one it was sent.

FedProx, FedNova (with `mu`) and Ditto add a multiple of it to what a client minimises. It goes into the
loss, not into the weights, so every optimizer sees its gradient, w - w^t for half the squared distance.

>>> model = nn.Linear(2, 1, bias=False)
>>> received = {"weight": model.weight.detach() - torch.tensor([[3.0, 4.0]])}
>>> round(squared_distance(model, received).item(), 4)
25.0
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from wardround.clients import Client
from wardround.losses.segmentation import at_least_float32
from wardround.params import Params
from wardround.training.learner import ParameterTerm


def squared_distance(model: nn.Module, received: Mapping[str, Tensor]) -> Tensor:
    """Σ ‖w - w^t‖² over the parameters `received` names, in float32 or better, also under autocast."""
    moved = [
        (at_least_float32(parameter) - received[name]).square().sum()
        for name, parameter in model.named_parameters()
        if name in received
    ]
    return torch.stack(moved).sum()


def anchor(client: Client, params: Params) -> Params:
    """Of the params a client received, those that learn and travel, on its device.

    Buffers do not learn; a head that never travels has nothing to be compared with.
    """
    own = set(client.objective.local_names(client.model))
    learned = {name for name, p in client.model.named_parameters() if p.requires_grad}
    return params.only(learned - own).to(client.device)  # read once, if they lie on disk


def pull(client: Client, params: Params, strength: float) -> ParameterTerm | None:
    """A loss term strength/2 ‖w - w^t‖², noted as "proximal"; None at strength 0."""
    if not strength:
        return None
    return ParameterTerm("proximal", strength / 2, squared_distance, anchor(client, params))
