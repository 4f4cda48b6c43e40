"""The two references every federated result is read against: no federation, and pooled data.

`local`: each client trains alone, with the same number of epochs or steps.
`centralised`: one model on the union of all training cases, as if they could be brought together;
every case keeps its split, so nothing leaks into the test. With `local_steps` it takes as many steps a round
as all clients together, so that both do the same work.
What leaves a client: nothing (local); everything (centralised, so it exists in simulation only).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.messages import Message, ServerState
from wardround.methods.base import Method


@dataclass(frozen=True)
class Local(Method):
    """Every client trains its own model and keeps it."""

    title = "Local only"
    kind = "reference"
    sends = "nothing at all"
    secure_sum = False
    needs_each_model = "no model is sent"
    needs_labels = "every client trains alone"

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        """Only a client's first round sends it the common start; after that nothing travels."""
        started = set(state.memory.get("started", []))
        first = {name: Message(params=state.params) for name in clients.present if name not in started}
        replies = clients.ask("train", each=first)
        return state.next(memory={"started": sorted(started | {reply.client for reply in replies})})

    def train(self, client: Client, message: Message) -> Message:
        client.fit(start=client.kept_model() or message.params)
        return Message()

    def shared(self, model: nn.Module) -> list[str]:
        return []


@dataclass(frozen=True)
class Centralised(Method):
    """FedAvg with one client that owns all training cases."""

    title = "Centralised"
    kind = "reference"
    sends = "all training cases (simulation only)"
    secure_sum = False
    needs_each_model = "one client has all cases"
    pooled = True

    def most_steps(self, config: Config, num_train: int) -> int:
        """With `local_steps`, those of as many clients as there are cases: nobody else trains."""
        return super().most_steps(config, num_train) * (1 if config.local_steps is None else num_train)
