"""Banked: methods that pool something small from every client before round 0 and distribute it once.

FedMix and FedBR pool mean images, FedDG amplitude spectra. Each client contributes once; on its first
round it receives what the others gave, and keeps it, so nothing travels twice.

A client that was lost before round 0 gives nothing, but receives. A client whose first reply was lost
or refused receives it again, since the server cannot know what it kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from wardround.clients import Client, Clients, Registration
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.params import Params


@dataclass(frozen=True)
class Banked(Method, ABC):
    """FedAvg with a bank; a subclass writes `make_contribution` and calls `read_bank` in its training.

    Names inside a contribution hold no "/": it separates them from the contributor's name.
    """

    tasks = ("contribute", "train")
    up = frozenset({"bank"})
    secure_sum = False
    needs_each_model = "what each client contributes is handed on to the others"

    # Server

    def prepare(self, state: ServerState, clients: Clients) -> ServerState:
        """Ask every client once, whether or not it takes part in the first round."""
        if not self.uses_bank():
            return state
        requests = self.make_requests(clients)
        replies = clients.ask("contribute", each=requests, to=list(requests))
        bank = {reply.client: reply.extras["bank"] for reply in replies if "bank" in reply.extras}
        return replace(state, memory={**state.memory, "bank": bank, "supplied": []})

    def make_requests(self, clients: Clients) -> dict[str, Message]:
        """The clients to ask for a contribution, each with its message; by default all, with an empty one."""
        return {name: Message() for name in clients.trainable}

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        bank, supplied = state.memory.get("bank", {}), state.memory.get("supplied", [])
        each = {
            name: Message(extras={"bank": given})
            for name in clients.present
            if name not in supplied and (given := self.collect_for(name, bank))
        }
        replies = clients.ask("train", Message(params=state.params), each=each)
        now = {reply.client for reply in replies} & set(each)
        weights = self.weigh(state, replies)
        memory = {**state.memory, "supplied": sorted({*supplied, *now})} if now else state.memory
        params = self.average(state, replies, weights)
        notes = self.notes(replies, weights)
        if self.uses_bank() and not bank:
            empty = "no client contributed before the first round, so all train as in FedAvg."
            notes["warnings"] = [f"{self.title}: {empty}"]
        return state.next(params=params, memory=memory, notes=notes)

    def collect_for(self, name: str, bank: Mapping[str, Params]) -> Params:
        """What a client gets: the contributions of all others, as `<contributor>/<name>`."""
        others = {giver: part for giver, part in bank.items() if giver != name}
        return Params({f"{giver}/{key}": part[key] for giver, part in others.items() for key in part})

    def check_reply(self, task: str, message: Message, registration: Registration) -> str | None:
        given = message.extras.get("bank")
        if task != "contribute" or given is None:
            return None
        bad = next((name for name in given if "/" in name), None)
        if bad is not None:
            return f"the contributed tensor '{bad}' has a / in its name"
        return self.check_contribution(given, registration)

    def check_contribution(self, given: Params, registration: Registration) -> str | None:
        """Why a contribution cannot be distributed, or None; a bad one would break all who receive it."""
        return None

    # Client

    def uses_bank(self) -> bool:
        """Whether anything needs to be pooled; an off switch answers no."""
        return True

    @abstractmethod
    def make_contribution(self, client: Client, message: Message) -> Params:
        """What a client contributes; empty if it may not contribute."""

    def contribute(self, client: Client, message: Message) -> Message:
        given = self.make_contribution(client, message)
        return Message(extras={"bank": given}) if given else Message()

    def read_bank(self, client: Client, message: Message) -> dict[str, Tensor]:
        """The others' contributions, received now or in an earlier round, on the client's device."""
        if "bank" in message.extras:
            client.memory["bank"] = message.extras["bank"]
        kept = client.memory.get("bank", Params())
        return {name: kept[name].to(client.device) for name in kept}
