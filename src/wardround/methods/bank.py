"""Banked: methods that pool something small of every client before round 0 and hand it out once.

FedMix and FedBR pool mean images, FedDG amplitude spectra. Each client contributes once; on its first
round it receives what the others gave, and keeps it, so nothing travels twice.

A client that was lost before round 0 gives nothing, but receives. A client whose first reply was lost
or refused receives again, since nobody knows what it kept.
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
    """FedAvg with a bank; a subclass writes `contribution` and reads `bank(client, message)` in its training.

    Names inside a contribution hold no "/": it divides them from the giver's name.
    """

    tasks = ("contribute", "train")
    up = frozenset({"bank"})

    # Server

    def prepare(self, state: ServerState, clients: Clients) -> ServerState:
        """Ask everybody once, whoever takes part in the first round."""
        if not self.uses_bank():
            return state
        requests = self.requests(clients)
        replies = clients.ask("contribute", each=requests, to=list(requests))
        bank = {reply.client: reply.extras["bank"] for reply in replies if "bank" in reply.extras}
        return replace(state, memory={**state.memory, "bank": bank, "supplied": []})

    def requests(self, clients: Clients) -> dict[str, Message]:
        """Whom to ask for a contribution, and with what words; everybody, and without any."""
        return {name: Message() for name in clients.trainable}

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        bank, supplied = state.memory.get("bank", {}), state.memory.get("supplied", [])
        each = {
            name: Message(extras={"bank": given})
            for name in clients.present
            if name not in supplied and (given := self.handed_to(name, bank))
        }
        replies = clients.ask("train", Message(params=state.params), each=each)
        now = {reply.client for reply in replies} & set(each)
        weights = self.weigh(state, replies)
        memory = {**state.memory, "supplied": sorted({*supplied, *now})} if now else state.memory
        params = self.average(state, replies, weights)
        notes = self.notes(replies, weights)
        if self.uses_bank() and not bank:
            nobody = "no client gave anything before the first round, so all train as in FedAvg."
            notes["warnings"] = [f"{self.title}: {nobody}"]
        return state.next(params=params, memory=memory, notes=notes)

    def handed_to(self, name: str, bank: Mapping[str, Params]) -> Params:
        """What a client gets: everything the others gave, under names that tell them apart."""
        others = {giver: part for giver, part in bank.items() if giver != name}
        return Params({f"{giver}/{key}": part[key] for giver, part in others.items() for key in part})

    def complaint(self, task: str, message: Message, registration: Registration) -> str | None:
        given = message.extras.get("bank")
        if task != "contribute" or given is None:
            return None
        odd = next((name for name in given if "/" in name), None)
        return self.bank_complaint(given, registration) if odd is None else f"'{odd}' is no name for a gift"

    def bank_complaint(self, given: Params, registration: Registration) -> str | None:
        """Why a contribution cannot be handed out, or None; a bad one would shut out all who receive it."""
        return None

    # Client

    def uses_bank(self) -> bool:
        """Whether anything needs to be pooled; an off switch answers no."""
        return True

    @abstractmethod
    def contribution(self, client: Client, message: Message) -> Params:
        """What a client gives to the bank; empty if it may not give any."""

    def contribute(self, client: Client, message: Message) -> Message:
        given = self.contribution(client, message)
        return Message(extras={"bank": given}) if given else Message()

    def bank(self, client: Client, message: Message) -> dict[str, Tensor]:
        """What the others gave, received now or in an earlier round, on the client's device."""
        if "bank" in message.extras:
            client.memory["bank"] = message.extras["bank"]
        kept = client.memory.get("bank", Params())
        return {name: kept[name].to(client.device) for name in kept}
