"""FedDyn: Federated Learning Based on Dynamic Regularization.

Acar et al., ICLR 2021. https://arxiv.org/abs/2111.04263

Each client's loss gets a linear and a quadratic term that change every round, so that where all clients
agree is also where the sum of their own losses is least. FedAvg has no such point on unlike data.

Symbols: theta received model, w the client's, theta_k what it ends with; alpha strength of the terms;
h_k what client k has moved so far, -1/alpha times the paper's gradient; h its mean over all K clients.
What leaves a client: theta_k.

Differs: gradients are clipped at 10, as in the authors' code; the paper does not say so.
Differs: alpha is the same for all clients; the authors' code divides it by K n_k / sum n.
Differs: h is -1/alpha times the paper's, so alpha only appears in the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.mean import average_update
from wardround.aggregation.weights import uniform
from wardround.clients import Client, Clients
from wardround.clients.gate import is_finite
from wardround.errors import ClientError
from wardround.losses.segmentation import at_least_float32
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.methods.proximal import anchor
from wardround.params import Params
from wardround.training.learner import ParameterTerm


@dataclass(frozen=True)
class FedDyn(Method):
    """Adds to each client's loss what makes local and global optima agree.

    alpha: strength of the added terms, 0 gives FedAvg with equal weights; sensitive with Adam. clip: largest
    gradient norm, the added terms included, null for none.
    """

    title = "FedDyn"
    paper = "Acar et al., ICLR"
    year = 2021
    link = "https://arxiv.org/abs/2111.04263"
    kind = "objective"
    needs = frozenset({"state"})

    alpha: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] | None = 10.0

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        weights = self.weigh(state, replies)
        params, memory = self.average(state, replies, weights), dict(state.memory)
        if self.alpha:
            params, memory["h"] = self.shift(state, params, len(replies) / clients.num_total)
        return state.next(params=params, memory=memory, notes=self.notes(replies, weights))

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return uniform(replies)

    def shift(self, state: ServerState, average: Params, share: float) -> tuple[Params, Params]:
        """theta = mean of theta_k + h, and h; share: of all clients, those that answered."""
        h, last = {}, state.memory.get("h", {})
        for name, move in average_update(state, average).items():
            h[name] = share * move  # h + sum over the round's clients of (theta_k - theta) / K
            if name in last:
                h[name] += last[name].to(move.device)
        theta = {name: (average[name] + h[name]).to(average[name].dtype) for name in h}
        return average.updated(theta), Params(h)

    # Client

    def train(self, client: Client, message: Message) -> Message:
        if not self.alpha:
            return super().train(client, message)
        theta = anchor(client, message.params)
        h_k = client.memory["h"].to(client.device) if "h" in client.memory else theta.zeros()
        dynamic, limit = ParameterTerm("dynamic", self.alpha, penalty, h_k - theta), self.clip

        def clip(model: nn.Module) -> None:
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=True)

        params = client.fit(start=message.params, add=dynamic, after_backward=clip).params
        h_k = h_k + (params.only(theta).to(client.device) - theta)
        if not is_finite(h_k):
            raise ClientError(f"client '{client.name}': its model is no longer finite after training.")
        client.memory["h"] = h_k
        return Message(params=params)


def penalty(model: nn.Module, direction: Mapping[str, Tensor]) -> Tensor:
    """<w, h_k - theta> + 1/2 ||w||^2, in float32 or better; direction: h_k - theta."""
    terms = []
    for name, parameter in model.named_parameters():
        if name in direction:
            w = at_least_float32(parameter)
            terms.append((w * (direction[name] + w / 2)).sum())
    return torch.stack(terms).sum()
