"""SumSession: the server's half of secure summation, for the answers to one task.

Clients answer with numbers, shapes and keys. When a method takes the mean of what they withheld, three more
exchanges give their weighted sum (Bonawitz et al., CCS 2017): shares of their secrets, the masked numbers
with a signature over the list of members, and what removes the masks; a fourth before the last, where a
member was lost, has those who are left sign their list.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.aggregation.mean import PIECE
from wardround.aggregation.withheld import Factors, Specs, Withheld
from wardround.clients.gate import specs as read_specs
from wardround.clients.secure_sum.layout import (
    ACCUSES,
    KEY,
    MODEL,
    NO_NOISE,
    REFUSAL,
    SumLayout,
    Terms,
    choose_threshold,
    make_context,
)
from wardround.errors import TooFewClients
from wardround.messages import Message, Reply
from wardround.params import Params
from wardround.privacy.secure_sum import Coordinator, SumRefusal
from wardround.tables import one_line

MOST_TENSORS = 100_000  # of a group
ATTEMPTS = 3  # to hear what removes the masks from enough clients
ACCUSERS = 2  # so many members who say that another lied are believed; a single one may be the liar

Ask = Callable[[str, Mapping[str, Message]], list[Reply]]


@dataclass
class Group:
    """What clients said of one group of tensors, by client."""

    specs: dict[str, Specs] = field(default_factory=dict)
    adverts: dict[str, Mapping[str, str]] = field(default_factory=dict)
    is_summed: bool = False


class SumSession:
    """The answers of clients to one task.

    sent: what each of them was sent; learned: names of the tensors that learn; ask: one more exchange with
    some clients; refuse: counts a client's answer to a task as refused, with the reason; exclude: leaves a
    client that lied out of what is left of the round; keep: from here on the round can be repeated with these
    alone; judge: why a sum cannot be used, by the norm of the change and of the model; note: what the records
    say of each sum; terms: of its noise.
    """

    def __init__(
        self,
        task: str,
        round: int,
        sent: Mapping[str, Message],
        min_clients: int,
        learned: Collection[str],
        *,
        ask: Ask,
        refuse: Callable[[str, str, str], None],
        exclude: Callable[[str, str], None],
        keep: Callable[[Sequence[str]], None],
        judge: Callable[[float, float], str | None],
        note: Callable[[dict[str, Any]], None],
        terms: Terms = NO_NOISE,
    ) -> None:
        self._task = task
        self._round = round
        self._sent = sent
        self._learned = learned
        self._ask = ask
        self._refuse = refuse
        self._exclude = exclude
        self._keep = keep
        self._judge = judge
        self._note = note
        self._terms = terms
        self._name = secrets.token_hex(16)
        self._threshold = choose_threshold(len(sent), min(min_clients, len(sent)))
        bases = [message.optional_params for message in sent.values()]
        self._base = bases[0] if all(base is bases[0] for base in bases) else None
        self._groups: dict[str, Group] = {}
        self._accused: dict[str, set[str]] = {}

    @property
    def requests(self) -> dict[str, Message]:
        """What clients are asked, so that they withhold what they answer."""
        about = {"session": self._name, "threshold": self._threshold, "wide": self._base is None}
        common = {
            id(message): replace(message, scalars={**message.scalars, KEY: about})
            for message in self._sent.values()
        }  # one message to all stays one
        return {name: common[id(message)] for name, message in self._sent.items()}

    def open(self, client: str, message: Message) -> Message:
        """An answer with what stands for its tensors; a ValueError where it cannot be read."""
        told = message.scalars.get(KEY, {})
        if message.tensors() or not isinstance(told, Mapping):
            raise ValueError("it holds tensors in the clear, which secure summation does not use")
        groups = {str(label): self._open_group(client, str(label), entry) for label, entry in told.items()}
        scalars = {name: value for name, value in message.scalars.items() if name != KEY}
        params = groups.pop(MODEL, None)
        extras = {label.removeprefix("extras/"): group for label, group in groups.items()}
        return Message(extras=extras, scalars=scalars) if params is None else Message(params, extras, scalars)

    def _open_group(self, client: str, label: str, entry: Any) -> Withheld:
        try:
            if len(entry["specs"]) > MOST_TENSORS:
                raise ValueError(f"{label} has more than {MOST_TENSORS} tensors")
            specs = read_specs(entry["specs"])
            counters = {
                str(name): read_counter(value, *specs[name]) for name, value in entry["counters"].items()
            }
            advert = {str(key): str(value) for key, value in entry["advert"].items()}
        except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            raise ValueError(f"what it says of {label} cannot be read ({error})") from None
        group = self._groups.setdefault(label, Group())
        group.specs[client], group.adverts[client] = specs, advert
        return Withheld(client, specs, counters, partial(self.compute_sum, label))

    def compute_sum(self, label: str, factors: Factors) -> dict[str, Tensor]:
        """Σ factor_k tensor_k in float64, once; the rest make up for those who are lost on the way."""
        group = self._groups[label]
        if group.is_summed:
            raise SumRefusal(
                f"{label} of this round is summed a second time: with two sums, what a single client sent "
                "could be computed. Set secure_sum = False on the method's card."
            )
        group.is_summed = True
        names = sorted(factors)
        if len({tuple(sorted(group.specs[name].items())) for name in names}) > 1:
            raise TooFewClients(f"round {self._round + 1}: clients sent {label} of different shapes.")
        base = self._base if label == MODEL and not self._terms.are_wide else None
        layout = SumLayout.of(group.specs[names[0]], base, self._learned)
        context = make_context(self._name, self._threshold, self._round, self._task, label, self._terms)
        coordinator = Coordinator(context, self._threshold, layout.length, layout.bits)
        try:
            total = self._exchange(coordinator, label, group, layout, factors)
        except SumRefusal as refusal:
            liars = {name for name, accusers in self._accused.items() if len(accusers) >= ACCUSERS}
            for name in sorted(liars | ({refusal.member} if refusal.member else set())):
                self._exclude(name, f"secure summation failed by its fault: {refusal}")
            raise TooFewClients(f"round {self._round + 1}: no secure sum of {label}. {refusal}") from None
        survivors = coordinator.survivors()
        self._note(
            {
                "group": label,
                "clients": survivors,
                "lost": sorted(set(names) - set(survivors)),
                "threshold": self._threshold,
                "bits": layout.bits,
                "error": layout.error(len(survivors)),
            }
        )
        found = layout.decode(total)
        bases = {name: self._sent[name].params for name in survivors} if label == MODEL else {}
        if bases:
            self._check_size(found, next(iter(bases.values())))
        return complete(found, factors, survivors, bases)

    def _check_size(self, change: Mapping[str, Tensor], base: Params) -> None:
        """Refuse a change that no earlier round came near."""
        names = [name for name in change if name in self._learned]
        norms = (math.hypot(*(float(group[name].norm()) for name in names)) for group in (change, base))
        reason = self._judge(*norms)
        if reason is not None:
            raise TooFewClients(f"round {self._round + 1}: {reason}.")

    def _exchange(
        self, coordinator: Coordinator, label: str, group: Group, layout: SumLayout, factors: Factors
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """The three exchanges; a client whose answer cannot be used counts as lost from there on.

        A fourth, over the list of those who are left, is needed only if somebody was lost by then.
        """
        for name in sorted(factors):
            self._take(coordinator.add_advert, "sum_shares", name, group.adverts[name])
        adverts = coordinator.adverts()
        weights = group_factors(factors, sorted(adverts))
        shared = self._collect(
            coordinator.add_shares, "shares", "sum_shares", label, adverts, adverts=adverts
        )
        coordinator.begin(layout.bind(sorted(adverts), weights))
        requests = {
            name: self._request(label, shares=coordinator.shares_for(name), weights=weights)
            for name in shared
        }
        for reply in self._ask("sum_masked", requests):
            add_masked = partial(coordinator.add_masked, confirmation=reply.scalars.get("confirmation"))
            self._take(add_masked, "sum_masked", reply, read_vector(reply, layout.bits))
        survivors = coordinator.survivors()
        if not coordinator.skip_confirming():
            add = coordinator.add_confirmation
            self._collect(add, "confirmation", "sum_confirm", label, survivors, survivors=survivors)
        left = signed = coordinator.confirmations()
        self._keep(survivors)  # from here on clients remember with whom they were summed
        for _ in range(ATTEMPTS):
            done = self._collect(
                coordinator.add_unmasked, "unmasked", "sum_unmask", label, left, confirmations=signed
            )
            left = {name: text for name, text in left.items() if name not in done}
            if len(signed) - len(left) >= self._threshold:
                break
        return coordinator.total()

    def _collect(
        self,
        add: Callable[[str, Any], None],
        key: str,
        task: str,
        label: str,
        names: Iterable[str],
        **told: Any,
    ) -> list[str]:
        """Ask all the same and hand on what they answer; those whose answer could be used."""
        requests = dict.fromkeys(sorted(names), self._request(label, **told))
        replies = self._ask(task, requests)
        return [reply.client for reply in replies if self._take(add, task, reply, reply.scalars.get(key))]

    def _request(self, label: str, **told: Any) -> Message:
        return Message(scalars={KEY: {"session": self._name, "group": label, **told}})

    def _take(self, add: Callable[[str, Any], None], task: str, reply: Reply | str, given: Any) -> bool:
        """Hand on what a client sent; if it cannot be used, the sum goes on without that client."""
        name, reason = reply if isinstance(reply, str) else reply.client, None
        if isinstance(reply, Reply) and REFUSAL in reply.scalars:
            reason = one_line(str(reply.scalars[REFUSAL]))
            self._accused.setdefault(str(reply.scalars.get(ACCUSES)), set()).add(name)
        else:
            try:
                add(name, given)
            except SumRefusal as refusal:
                reason = str(refusal)
        if reason is not None:
            self._refuse(task, name, reason)
        return reason is None


def read_counter(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An integer tensor that travelled as numbers."""
    if dtype.is_floating_point or math.prod(shape) > MOST_TENSORS:
        raise ValueError("a counter is not a small integer tensor")
    return torch.tensor(value, dtype=torch.int64).reshape(shape).to(dtype)


def read_vector(reply: Reply, bits: int) -> np.ndarray[Any, np.dtype[Any]] | None:
    """The masked numbers of an answer; None where it has none of this kind."""
    values = reply.extras.get("masked", Params()).get("values")
    if values is None or values.dtype != (torch.int32 if bits == 32 else torch.int64):
        return None
    array: np.ndarray[Any, np.dtype[Any]] = values.detach().cpu().contiguous().reshape(-1).numpy()
    return array.view(np.uint32 if bits == 32 else np.uint64)


def group_factors(factors: Factors, names: Sequence[str]) -> list[dict[str, Any]]:
    """The factors as clients are told them: tensors with the same ones together."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for tensor in sorted(factors[names[0]]) if names else []:
        groups.setdefault(tuple(factors[name][tensor] for name in names), []).append(tensor)
    return [
        {"names": tensors, "factors": dict(zip(names, own, strict=True))} for own, tensors in groups.items()
    ]


def complete(
    total: dict[str, Tensor], factors: Factors, survivors: Sequence[str], bases: Mapping[str, Params]
) -> dict[str, Tensor]:
    """The sum scaled to what all factors add up to, and, of changes, what they are changes of."""
    shared = next(iter(bases.values())) if len({id(base) for base in bases.values()}) == 1 else None
    for name in total:
        whole = math.fsum(own[name] for own in factors.values())
        left = math.fsum(factors[client][name] for client in survivors)
        if left == 0 and whole:
            raise TooFewClients(f"the clients that are left have no weight in tensor '{name}'.")
        scale = 1.0 if left == whole else whole / left
        if scale != 1.0:
            total[name] *= scale
        if shared is not None:
            add_scaled(total[name], shared[name], whole)
            continue
        for client, base in bases.items():
            add_scaled(total[name], base[name], scale * factors[client][name])
    return total


def add_scaled(total: Tensor, tensor: Tensor, factor: float) -> None:
    """Add so many times the tensor, in float64, in pieces that stay in the processor's cache."""
    flat, added = total.view(-1), tensor.detach().cpu().reshape(-1)
    for start in range(0, len(flat), PIECE):
        flat[start : start + PIECE] += factor * added[start : start + PIECE].double()
