"""FedProx: Federated Optimization in Heterogeneous Networks.

Li et al., MLSys 2020. https://arxiv.org/abs/1812.06127

A proximal term holds each client's model near the one it received, so that many local steps on
unlike data do not carry the clients apart.

Symbols: w^t received model, w the client's, mu strength of the pull.
What leaves a client: w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from wardround.clients import Client
from wardround.messages import Message
from wardround.methods.base import Method
from wardround.methods.proximal import pull


@dataclass(frozen=True)
class FedProx(Method):
    """Averages client models that were held near the global one.

    mu: strength of the pull, 0 gives FedAvg.
    """

    title = "FedProx"
    paper = "Li et al., MLSys"
    year = 2020
    link = "https://arxiv.org/abs/1812.06127"
    kind = "objective"

    mu: Annotated[float, Field(ge=0)] = 0.01

    def train(self, client: Client, message: Message) -> Message:
        proximal = pull(client, message.params, self.mu)  # h_k = F_k + mu/2 ||w - w^t||^2, Eq. 2
        return Message(params=client.fit(start=message.params, add=proximal).params)
