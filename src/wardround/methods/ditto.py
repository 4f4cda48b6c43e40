"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li et al., ICML 2021. https://arxiv.org/abs/2012.04221

Beside the global model, which is plain FedAvg, each client trains one of its own and keeps it; a proximal
term ties the two. Clients that differ get a model that fits them, and a spoilt global model does less harm.

Symbols: w^t global model, v_k personal model of client k, F_k its loss, lambda (`lam`) strength of the tie.
What leaves a client: its version of w, never v_k.

Differs: v_k starts from the global model the client first receives.
Differs: v_k trains as many epochs as the global model, with batches and optimizer state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from wardround.clients import Client
from wardround.messages import Message
from wardround.methods.base import Method
from wardround.methods.proximal import pull
from wardround.params import Params


@dataclass(frozen=True)
class Ditto(Method):
    """Trains a personal model at each client, tied to the global one.

    lam: strength of the tie; 0 lets each client train alone, a large one gives every client the global model.
    """

    title = "Ditto"
    paper = "Li et al., ICML"
    year = 2021
    link = "https://arxiv.org/abs/2012.04221"
    kind = "personal"
    needs = frozenset({"state"})
    needs_labels = "the personal model of a client learns from its own labels alone"

    lam: Annotated[float, Field(ge=0)] = 0.1

    def train(self, client: Client, message: Message) -> Message:
        reply = super().train(client, message)
        start = client.memory.get("personal", message.params)
        tie = pull(client, message.params, self.lam)  # h_k = F_k(v) + lambda/2 ||v - w^t||^2
        personal = client.fit(start=start, add=tie, second=True)
        client.memory["personal"] = personal.params
        return reply

    def personal(self, client: Client, params: Params) -> Params:
        """v_k, or the global model for a client that never trained."""
        if "personal" not in client.memory:
            return super().personal(client, params)
        v: Params = client.memory["personal"]
        client.memory.pop("own", None)  # local statistics of w, which must not be laid over those of v
        return v
