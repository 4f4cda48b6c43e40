"""Sender: a client's half of secure summation. What it answers stays with it, and leaves masked, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.aggregation.weights import is_number
from wardround.clients.gate import describe_specs
from wardround.clients.secure_sum.layout import (
    ACCUSES,
    KEY,
    MAX_SHARE,
    MODEL,
    NO_NOISE,
    REFUSAL,
    SumLayout,
    Terms,
    choose_threshold,
    make_context,
)
from wardround.errors import ClientError
from wardround.files import parse_json, write_json
from wardround.messages import Message
from wardround.params import Params
from wardround.privacy import PrivacyRefusal, SumNoise
from wardround.privacy.noise import add_noise
from wardround.privacy.secure_sum import Identity, LocalIdentity, Member, SumRefusal
from wardround.privacy.secure_sum.fixed_point import PIECE
from wardround.privacy.secure_sum.primitives import digest

SUMMED = "summed.json"
# How far shares may differ from those of an earlier sum of the same answers, as they do where weights add up
# to one again: sums in 32 bits then differ by far less than a step. In 64 they might not.
SAME_SHARES = 1e-14

Charge = Callable[[], SumNoise | None]  # the noise of a client's share in a sum, charged to its budget


class NoSum(ClientError, PrivacyRefusal):
    """A sum that a client does not help with. Why is about the request, so it leaves under privacy too."""


@dataclass
class Pending:
    """A group of tensors that waits to be summed.

    base: what its tensors are summed as the change of, if they are; key: the same for every attempt at this
    answer; names, weights: of the members, once they are known.
    """

    tensors: Params
    base: Params | None
    layout: SumLayout
    key: str
    member: Member
    names: tuple[str, ...] = ()
    weights: Any = ()
    unmasked: Mapping[str, Any] = field(default_factory=dict)


class Sender:
    """One client's answers until they are summed.

    folder: where it remembers of whom and with what weights each was summed: of several sums of the same
    answers, what a single client sent could be computed. learned: names of the tensors that learn; terms: of
    the run's noise.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        learned: Collection[str],
        identity: Identity | None,
        terms: Terms = NO_NOISE,
    ) -> None:
        self._name = name
        self._folder = folder
        self._learned = frozenset(learned)
        self._identity = identity
        self._terms = terms
        self._session = ""
        self._threshold = 0
        self._charge: Charge = lambda: None
        self._pending: dict[str, Pending] = {}

    def withhold(
        self, asked: Any, round: int, task: str, reply: Message, received: Params | None, charge: Charge
    ) -> Message:
        """What leaves of an answer for now: numbers, counters, shapes, and keys made for this sum."""
        if not reply.tensors():
            return reply
        self._session, self._threshold = read_session(asked, task)
        self._charge, self._pending = charge, {}
        identity = self._identity = self._identity or LocalIdentity()
        start = "" if received is None else received.sha256()
        told: dict[str, Any] = {}
        for label, group in reply.tensors().items():
            specs = {name: group.spec(name) for name in group}
            floats = group.only([name for name in group if specs[name][1].is_floating_point])
            base = received.only(floats) if label == MODEL and received is not None else None
            is_wide = self._terms.are_wide or asked.get("wide")
            layout = SumLayout.of(specs, None if is_wide else base, self._learned)
            member = Member(
                self._name,
                context=make_context(self._session, self._threshold, round, task, label, self._terms),
                identity=identity,
                threshold=self._threshold,
            )
            self._pending[label] = Pending(floats, base, layout, f"{round}:{task}:{label}:{start}", member)
            told[label] = {
                "specs": describe_specs(specs),
                "advert": member.advertise(),
                "counters": {name: group[name].tolist() for name in group if name not in floats},
            }
        return Message(scalars={**reply.scalars, KEY: told})

    def answer(self, task: str, message: Message) -> Message:
        """The answer to one exchange of the protocol."""
        asked = message.scalars.get(KEY)
        if not isinstance(asked, Mapping) or asked.get("session") != self._session:
            raise ClientError("nothing of this sum is waiting here: the client has been restarted since")
        pending = self._pending.get(str(asked.get("group")))
        if pending is None:
            raise ClientError("this group of tensors was never answered")
        try:
            match task:
                case "sum_shares":
                    return Message(scalars={"shares": self._share(pending, read(asked, "adverts"))})
                case "sum_masked":
                    masked = self._mask(pending, read(asked, "shares"), asked.get("weights"))
                    signed = {"confirmation": pending.member.confirm_members()}
                    return Message(extras={"masked": Params({"values": masked})}, scalars=signed)
                case "sum_confirm":
                    return Message(scalars={"confirmation": self._confirm(pending, asked.get("survivors"))})
            if not pending.unmasked:  # asked again, it says the same
                self._remember(pending)
                pending.unmasked = pending.member.unmask(read(asked, "confirmations"))
            return Message(scalars={"unmasked": pending.unmasked})
        except SumRefusal as refusal:
            if refusal.member not in (None, self._name):
                return Message(scalars={REFUSAL: str(refusal), ACCUSES: refusal.member})
            raise NoSum(f"secure summation: {refusal}") from None

    def _share(self, pending: Pending, adverts: Mapping[str, Any]) -> dict[str, str]:
        least = choose_threshold(len(adverts))
        if self._threshold < least:
            raise SumRefusal(f"{self._threshold} of {len(adverts)} could unmask it; {least} are the least")
        shares = pending.member.share(adverts)
        pending.names = tuple(sorted(adverts))
        return shares

    def _mask(self, pending: Pending, shares: Mapping[str, Any], weights: Any) -> Tensor:
        factors = read_factors(weights, pending.layout, pending.names, self._name)
        check_weights(weights, [self._name], {*shares, self._name})
        noise = self._charge() if pending.base is not None else None
        deviation = 0.0 if noise is None else noise.share(largest_factor(weights), self._threshold)
        shrink = 1.0 if noise is None else self._clip_factor(pending, noise.clip)

        def weigh(name: str) -> Iterator[Tensor]:
            flat, base = (
                None if group is None else group[name].detach().cpu().reshape(-1)
                for group in (pending.tensors, pending.base)
            )
            assert flat is not None
            for start in range(0, len(flat), PIECE):
                piece = flat[start : start + PIECE].to(torch.float64, copy=True)
                if base is not None:
                    piece -= base[start : start + PIECE]
                piece *= factors[name] * (shrink if name in self._learned else 1.0)
                yield add_noise(piece, deviation) if deviation and name in self._learned else piece

        vector = pending.layout.encode(weigh, len(pending.names))
        binding = pending.layout.bind(pending.names, weights)
        masked = pending.member.mask(vector, shares, binding=binding, in_place=True)
        pending.tensors, pending.base, pending.weights = Params(), None, weights
        return torch.from_numpy(masked.view(np.int32 if pending.layout.bits == 32 else np.int64))

    def _clip_factor(self, pending: Pending, clip: float) -> float:
        """What brings the change to the clipping norm: adding it to the model, in float32, has rounded it."""
        base = pending.base
        assert base is not None, "noise is for the change of a model"
        changes = (
            pending.tensors[n].detach().cpu().double() - base[n].detach().cpu().double()
            for n in pending.tensors
            if n in self._learned
        )
        norm = math.hypot(*(float(change.norm()) for change in changes))
        return min(1.0, clip / norm) if norm else 1.0

    def _confirm(self, pending: Pending, survivors: Any) -> str:
        if not isinstance(survivors, list) or not all(isinstance(name, str) for name in survivors):
            raise SumRefusal("the request does not name those who sent their numbers")
        check_weights(pending.weights, survivors, survivors)  # with fewer in it, shares are larger
        return pending.member.confirm(survivors)

    def _remember(self, pending: Pending) -> None:
        """Write down of whom and with what weights this answer is summed; refuse any other sum of it."""
        path = self._folder / SUMMED
        clients = sorted(pending.member.survivors)
        is_exact = pending.layout.bits == 64
        now: dict[str, Any] = {
            "clients": clients,
            "weights": relate_weights(pending.weights, clients, is_exact),
        }
        try:
            known = dict(parse_json(path.read_bytes())) if path.exists() else {}
            before: Any = known.get(pending.key, now)
            others, weights = before["clients"], before["weights"]
            tolerance = 0.0 if is_exact else SAME_SHARES
            is_same = others == clients and are_same(weights, now["weights"], tolerance)
        except (ValueError, TypeError, LookupError, AttributeError):
            raise SumRefusal(f"{SUMMED} is damaged, so it is not known what was summed before") from None
        if not is_same:
            how = "with other weights" if others == clients else f"over {describe(clients)}"
            raise SumRefusal(
                f"this answer was summed before, over {describe(others)}; with a second sum, {how}, what a "
                "single client sent could be computed. Wait until the same clients are there, or begin a run "
                "with another seed"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {**known, pending.key: before})


def read_session(asked: Any, task: str) -> tuple[str, int]:
    """Name and threshold of the sum that an answer is for."""
    session, threshold = (
        asked.get(key) if isinstance(asked, Mapping) else None for key in ("session", "threshold")
    )
    if not isinstance(session, str) or isinstance(threshold, bool) or not isinstance(threshold, int):
        raise ClientError(f"task '{task}' is answered under secure summation alone (privacy.secure_sum)")
    return session[:64], threshold


def read(asked: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = asked.get(key)
    if not isinstance(value, Mapping):
        raise SumRefusal(f"the request has no {key}")
    return value


def read_factors(weights: Any, layout: SumLayout, names: tuple[str, ...], own: str) -> dict[str, float]:
    """What each of a client's tensors is multiplied with."""
    factors: dict[str, float] = {}
    num_named = 0
    for part in weights if isinstance(weights, list) else []:
        given: Any = part.get("factors") if isinstance(part, Mapping) else None
        tensors: Any = part.get("names") if isinstance(part, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(tensors, list) or set(given) != set(names):
            raise SumRefusal("the weights do not name every member once")
        if not all(is_number(value) for value in given.values()):
            raise SumRefusal("a weight is not a finite number")
        factors |= dict.fromkeys((str(name) for name in tensors), float(given[own]))
        num_named += len(tensors)
    if set(factors) != set(layout.specs) or num_named != len(factors):
        raise SumRefusal("the weights are not those of the tensors that it answered")
    return factors


def check_weights(weights: Any, names: Collection[str], summed: Collection[str]) -> None:
    """Refuse a sum that is mostly of one of these clients; weights: as `read_factors` has found them good."""
    for part in weights:
        given = {name: abs(part["factors"].get(name, 0.0)) for name in summed}
        total = math.fsum(given.values())
        for name in names:
            if given[name] > MAX_SHARE * total:
                raise SumRefusal(
                    f"the weight of '{name}' is {given[name] / total:.3g} of all, so the sum would be close "
                    f"to its own update; at most {MAX_SHARE:g} is allowed"
                )


def relate_weights(weights: Any, clients: Sequence[str], is_exact: bool) -> dict[str, list[float]]:
    """The weights of these clients, by a hash of the tensors they are for; as shares unless `is_exact`."""
    found = {}
    for part in weights:
        given = [float(part["factors"][name]) for name in clients]
        whole = 1.0 if is_exact else math.fsum(map(abs, given)) or 1.0
        found[digest(*part["names"]).hex()] = [weight / whole for weight in given]
    return found


def are_same(
    one: Mapping[str, Sequence[float]], other: Mapping[str, Sequence[float]], tolerance: float
) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(mine, theirs, rel_tol=tolerance)
        for key in one
        for mine, theirs in zip(one[key], other[key], strict=True)
    )


def largest_factor(weights: Any) -> float:
    return max((abs(value) for part in weights for value in part["factors"].values()), default=0.0)


def describe(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)
