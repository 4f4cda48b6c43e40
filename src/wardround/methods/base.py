"""Method: one paper, one file. The base class is FedAvg.

A method object holds hyper-parameters only (a frozen dataclass; its fields are its settings). What
the server remembers is in `ServerState.memory`, what a client remembers is in `client.memory`.

 server                                              each client
 run_round: clients.ask("train", params)  -------->  train: client.fit(), client.memory
            weigh the replies, take the mean <------  Message(params)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict
from torch import nn

from wardround.aggregation.mean import mean
from wardround.aggregation.weights import by_samples, map_to_clients
from wardround.clients import Client, Clients, Registration
from wardround.config import Config
from wardround.losses.objective import Objective
from wardround.messages import Message, Reply, ServerState
from wardround.params import Params


@dataclass(frozen=True)
class Method:
    """Weighted averaging of client models; every other method overrides a few functions."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    # The card: `wardround methods` prints it
    title: ClassVar[str] = "FedAvg"
    paper: ClassVar[str] = ""
    year: ClassVar[int] = 0
    link: ClassVar[str] = ""
    # kind: reference, objective, aggregation, personal, robust, server optimizer
    kind: ClassVar[str] = "aggregation"
    sends: ClassVar[str] = "nothing"  # beyond the model
    secure_sum: ClassVar[bool] = True  # works when the server sees only one weighted sum of what clients send
    needs_each_model: ClassVar[str] = ""  # why not
    # needs: features, decoder, global, previous, validation, proxy, state; full: all clients in every round
    needs: ClassVar[frozenset[str]] = frozenset()
    tasks: ClassVar[tuple[str, ...]] = ("train",)  # functions a client may be asked for
    up: ClassVar[frozenset[str]] = frozenset()  # extras and scalars a reply may hold; the gate refuses others
    own_steps: ClassVar[bool] = False  # `train` replaces the training step or its loss
    pooled: ClassVar[bool] = False  # trains on the union of all cases, as a reference only
    needs_every_class: ClassVar[str] = ""  # why it cannot use clients that annotate some classes only
    needs_labels: ClassVar[str] = ""  # why it cannot use clients with cases that have no label
    needs_every_channel: ClassVar[str] = ""  # why it cannot use clients whose scans lack channels
    objective: ClassVar[str] = "dice_bce"  # what clients minimise unless the configuration says otherwise

    # Server

    def start(self, model: nn.Module) -> ServerState:
        """The state before round 0."""
        return ServerState(params=Params.of(model), trainable=tuple(Params.trainable(model)))

    def prepare(self, state: ServerState, clients: Clients) -> ServerState:
        """Exchanges before round 0 (image statistics, prototypes); default none."""
        return state

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        weights = self.weigh(state, replies)
        return state.next(params=self.average(state, replies, weights), notes=self.notes(replies, weights))

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        """One weight per reply, non-negative, summing to one."""
        return by_samples(replies)

    def average(self, state: ServerState, replies: Sequence[Reply], weights: Sequence[float]) -> Params:
        """The weighted mean of what was sent, laid over what was not."""
        sent = mean([reply.params for reply in replies], weights)
        return state.params.updated(sent)

    def notes(self, replies: Sequence[Reply], weights: Sequence[float], **ingredients: Any) -> dict[str, Any]:
        """Weights and their ingredients for the records."""
        return {"weights": map_to_clients(replies, weights), **ingredients}

    def check_reply(self, task: str, message: Message, registration: Registration) -> str | None:
        """Why a reply's extras or scalars cannot be used, or None; called after the gate's own checks."""
        return None

    def most_steps(self, config: Config, num_train: int) -> int:
        """The most local steps a reply may report; more where `train` fits for `epochs` of its own."""
        return config.count_steps(num_train)

    # Client

    def train(self, client: Client, message: Message) -> Message:
        return Message(params=client.fit(start=message.params).params)

    def labels_itself(self, client: str) -> bool:
        """Whether a client's cases need no labels, whatever the objective; default no."""
        return False

    def personal(self, client: Client, params: Params) -> Params:
        """The model this client uses, given the global one; default that one, with what never travels."""
        return params.updated(client.memory.get("own", {}))

    # Both

    def start_model(self, model: nn.Module) -> None:
        """Add what the method trains beside the network (a second network, a projection); default nothing."""

    def shared(self, model: nn.Module) -> list[str]:
        """State-dict names that travel; the engine keeps the rest in the client's memory."""
        return list(model.state_dict())

    def check(self, config: Config, objective: Objective) -> None:
        """Refuse what cannot work, with the reason, when the configuration is read."""

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        """What is allowed but unusual, each in a sentence: logged at the start, shown in every record."""
        return []
