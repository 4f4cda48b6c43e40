"""Bounds on claims and updates: how much one client may weigh, how large and how contrary its update may be.

The gate looks at each reply alone. What is well formed may still be a hundred times as large as any other
update, or point the other way; that shows only beside the round's others and the client's own past. The
figures behind the factors are those of honest runs of every method (`benchmarks/honest_updates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median, median_high
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wardround.aggregation.mean import Piece, map_pieces, split_pieces
from wardround.config import LimitSettings
from wardround.messages import Message, Reply
from wardround.params import Params

MANY = 5.0  # times the others' mean number of cases
INCREDIBLE = 20.0  # times more than that: a claim, not a hospital
MAX_NORM = 20.0  # of an update, in those of the others
MAX_JUMP, LEAST_JUMP = 10.0, 5.0  # in what was usual for it; below the second none is one
MAX_PART = 60.0  # of one tensor or one group of extras: small ones differ more
STILL = 1e-3  # of the model's norm: whatever is below is no change to speak of
MAX_OPPOSITE = -0.15  # mean cosine with the others, by which a client is against them
EVIDENCE = 0.1  # the least sum of the others' own agreement, before that is said
SUM = ""  # stands for all clients together among what earlier rounds showed
JUDGED, RECENT = 20, 5  # rounds of a client that show its direction; that show its usual size


# Numbers of cases


def bound_counts(counts: Mapping[str, int], max_share: float | Literal["auto"]) -> dict[str, int]:
    """The counts that are too large, lowered; max_share: of all counts, 1 for any.

    auto: at most MANY times what the others have on average, or as many as all of them together where that is
    more; a count INCREDIBLE times beyond that is not believed at all and becomes the others' median. Of two
    clients neither can be held against the others, so `auto` takes them as they are.

    >>> bound_counts({"north": 500, "east": 40, "south": 60}, "auto")
    {'north': 250}
    >>> bound_counts({"north": 10**7, "east": 40, "south": 60}, "auto")
    {'north': 50}
    """
    if max_share == "auto":
        lowered = {}
        for name, count in counts.items() if len(counts) > 2 else ():
            others = [other for key, other in counts.items() if key != name]
            most = max(sum(others), int(MANY * fmean(others)))
            if count > most:
                lowered[name] = most if count <= INCREDIBLE * most else int(median(others))
        return lowered
    ranked, level = sorted(counts, key=lambda name: -counts[name]), 0
    for num_above in range(len(ranked)):
        rest = sum(counts[name] for name in ranked[num_above:])
        room = 1 - max_share * num_above
        level = int(max_share * rest / room + 1e-9) if room > 1e-9 else 0
        if counts[ranked[num_above]] <= level:
            break
    level = max(level, min(counts.values(), default=0))  # a share that not all can have makes them equal
    return {name: level for name in ranked if counts[name] > level}


# Updates


@dataclass(frozen=True)
class Change:
    """How far a reply is from what its client was sent.

    norms: of the change of each floating tensor, or of the tensor itself where none was sent; starts: of the
    tensors as sent; extras: of each further group of tensors; learned: the names that make the update; size:
    the client's number of cases; has_labels: whether it was trained on any.
    """

    norms: Mapping[str, float]
    starts: Mapping[str, float]
    extras: Mapping[str, float]
    learned: tuple[str, ...]
    size: int
    has_labels: bool = True

    @property
    def norm(self) -> float:
        return math.hypot(*(self.norms[name] for name in self.learned))

    @property
    def start(self) -> float:
        """The norm of the model that was sent."""
        return math.hypot(*(self.starts.get(name, 0.0) for name in self.learned))


def measure_change(reply: Reply, sent: Message, trainable: Sequence[str], size: int) -> Change:
    """The sizes of a reply's tensors, which are read one at a time; on a GPU there is one wait."""
    params, base = reply.optional_params or Params(), sent.optional_params or Params()
    names = [name for name in params if params.spec(name)[1].is_floating_point]
    known = [name for name in names if name in base and base.spec(name) == params.spec(name)]
    norms = [
        *(
            measure_norm(params[name] - base[name].to(params.device(name)))
            if name in known
            else measure_norm(params[name])
            for name in names
        ),
        *(measure_norm(base[name]) for name in known),
        *(measure_norm(tensor) for group in reply.extras.values() for tensor in group.values()),
    ]
    found = iter(read_numbers(norms))
    return Change(
        dict(zip(names, found, strict=False)),
        dict(zip(known, found, strict=False)),
        {label: math.hypot(*islice(found, len(group))) for label, group in reply.extras.items()},
        tuple(name for name in trainable if name in names),
        size,
        has_labels=not reply.annotates or any(reply.annotates),
    )


def measure_norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm in float64, of numbers that may be as large as float32 has them."""
    one = tensor if tensor.is_floating_point() and tensor.numel() > 1 else tensor.double()
    found: Tensor = torch.linalg.vector_norm(one, dtype=torch.float64)
    return found


def read_numbers(found: Sequence[Tensor]) -> list[float]:
    """Of tensors of one number each; those of a device are waited for together."""
    device = next((number.device for number in found if number.device.type != "cpu"), None)
    return torch.stack([number.to(device) for number in found]).tolist() if found else []


class Direction(NamedTuple):
    """cosine: of an update with the others', the mean over tensors; agreement: the same among these."""

    cosine: float
    agreement: float


def compare_directions(
    replies: Sequence[Params], bases: Sequence[Params], changes: Sequence[Change]
) -> list[Direction]:
    """Each update beside the others, tensor by tensor, in one pass over the replies.

    Every tensor counts the same: in early rounds all clients agree on the few numbers of a norm layer or of
    the head, while most coordinates of large tensors are noise.
    """
    num = len(replies)
    names = [name for name in changes[0].learned if all(change.norms.get(name) for change in changes)]

    def along(piece: Piece) -> Tensor:
        device = replies[0].device(piece.name)
        rows = torch.stack(
            [
                (piece.of(reply).to(device) - piece.of(base).to(device)).double() / change.norms[piece.name]
                for reply, base, change in zip(replies, bases, changes, strict=True)
            ]
        )  # (K, n), each of length one over all pieces
        total = rows.sum(dim=0)
        return torch.cat([rows @ total, (total @ total)[None]])

    pieces = split_pieces(replies[0], names)
    if not pieces:
        return [Direction(0.0, 0.0)] * num
    *dots, square = (torch.stack(map_pieces(along, pieces)).sum(dim=0) / len(names)).tolist()
    pairs = (num - 1) * (num - 2)
    return [Direction((dot - 1) / (num - 1), (square - num - 2 * (dot - 1)) / pairs) for dot in dots]


class Sight(NamedTuple):
    """What a round showed of a client: its size beside the others', and its direction."""

    round: int
    ratio: float
    cosine: float
    agreement: float


class Bounds:
    """Judges the updates of a round beside each other, and each client beside its own past.

    seen: what earlier rounds showed of each client, its first rounds and its last.
    """

    def __init__(self, limits: LimitSettings, seen: Mapping[str, Sequence[Sequence[float]]] | None = None):
        self._limits = limits
        self.seen = {
            name: [Sight(int(entry[0]), *entry[1:]) for entry in entries]
            for name, entries in (seen or {}).items()
        }

    @property
    def are_on(self) -> bool:
        return self._limits.max_norm is not None or self._limits.refuse_opposite

    def begin(self, round: int) -> None:
        """What an earlier attempt at this round showed does not count."""
        self.seen = {
            name: [sight for sight in entries if sight.round < round] for name, entries in self.seen.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: [list(sight) for sight in entries] for name, entries in self.seen.items() if entries}

    def judge(
        self,
        round: int,
        replies: Mapping[str, Reply],
        sent: Mapping[str, Message],
        changes: Mapping[str, Change],
    ) -> dict[str, str]:
        """Why some replies cannot be used, by client."""
        refused: dict[str, str] = {}
        ratios = {name: self._ratio(name, changes) for name in changes}
        if self._limits.max_norm is not None:
            refused = {
                name: found
                for name in changes
                if (found := self._size_complaint(name, changes, ratios[name]))
            }
        directions = self._directions(replies, sent, {n: c for n, c in changes.items() if n not in refused})
        for name, direction in directions.items():
            sights = self.seen.setdefault(name, [])
            sights.append(Sight(round, round_off(ratios[name]), *map(round_off, direction)))
            del sights[JUDGED:-RECENT]
            reason = self._direction_complaint(sights) if self._limits.refuse_opposite else None
            if reason is not None:
                refused[name] = reason
        return refused

    def judge_sum(self, round: int, norm: float, start: float) -> str | None:
        """Why a secure sum of updates cannot be used, beside earlier rounds; start: the model's norm."""
        sights = self.seen.setdefault(SUM, [])
        usual = max(median([sight.ratio for sight in sights[-RECENT:]] or [math.inf]), STILL * start)
        factor = MAX_NORM if self._limits.max_norm == "auto" else float(self._limits.max_norm or math.inf)
        if len(sights) >= 2 and norm > factor * usual:
            return (
                f"the sum of all updates has {norm / usual:.3g} times the norm of earlier rounds'; "
                f"{allowed(factor)}. Whose update it is cannot be seen under secure summation"
            )
        sights.append(Sight(round, round_off(norm), 0.0, 0.0))
        del sights[:-RECENT]
        return None

    # Size

    def _ratio(self, name: str, changes: Mapping[str, Change]) -> float:
        """An update's norm in those of the others."""
        reference = self._reference(name, changes)
        return changes[name].norm / reference if reference else 0.0

    def _reference(self, name: str, changes: Mapping[str, Change]) -> float:
        """What an update's size is held against: the others' median, of two clients its own past too."""
        own = changes[name]
        found = [change.norm for change in list_others(name, changes) if change.learned]
        floor = STILL * own.start
        if len(found) >= 2:
            return max(median_high(found), floor)
        if not self.seen.get(name):
            floor = 0.1 * own.start  # nothing to go by but the model itself
        return max([*found, floor])

    def _size_complaint(self, name: str, changes: Mapping[str, Change], ratio: float) -> str | None:
        own, others = changes[name], list_others(name, changes)
        if not others:
            return None
        factor = MAX_NORM if self._limits.max_norm == "auto" else float(self._limits.max_norm or math.inf)
        more_cases = math.sqrt(max(1.0, own.size / max(median_high([other.size for other in others]), 1)))
        known = [sight.ratio for sight in self.seen.get(name, ())[-RECENT:]]
        usual = median(known) if len(known) >= 2 else math.inf
        most = factor * more_cases
        if len(others) == 1 and usual < math.inf:  # either of two may be the odd one
            most = max(most, MAX_JUMP * usual)
        if own.learned and self._limits.max_norm == "auto":
            most = min(most, max(LEAST_JUMP * more_cases, MAX_JUMP * usual))
        if own.learned and ratio > most:
            past = f" ({usual:.3g} in its rounds before)" if usual < math.inf else ""
            return f"its update has {ratio:.3g} times the norm of the others'{past}; {allowed(most)}"
        most = factor * more_cases * MAX_PART / MAX_NORM
        for label, norm, reference in self._parts(name, changes):
            if norm > most * reference > 0:
                times = f"{norm / reference:.3g} times the others'"
                return f"{label} changed by {norm:.3g}, {times}; {allowed(most)}"
        return None

    def _parts(self, name: str, changes: Mapping[str, Change]) -> Iterable[tuple[str, float, float]]:
        """Each tensor and group of extras: what to call it, its size, and what that is held against."""
        own, others = changes[name], list_others(name, changes)
        whole = self._reference(name, changes)
        for tensor, norm in own.norms.items():
            floor = max(0.1 * own.starts.get(tensor, 0.0), 0.05 * whole if tensor in own.learned else 0.0)
            yield (
                f"tensor '{tensor}'",
                norm,
                max(median_high([o.norms.get(tensor, 0.0) for o in others]), floor),
            )
        for label, norm in own.extras.items():
            yield f"extras '{label}'", norm, median_high([o.extras.get(label, 0.0) for o in others])

    # Direction

    def _directions(
        self, replies: Mapping[str, Reply], sent: Mapping[str, Message], changes: Mapping[str, Change]
    ) -> dict[str, Direction]:
        """Of updates that have a size: none of those that were refused, and zero of fewer than three.

        Who teaches a class alone may honestly point against everybody else, so only clients that annotate
        the same are held against each other.
        """
        if not all(change.starts.keys() >= set(change.learned) for change in changes.values()):
            return {}
        alike: dict[tuple[bool, ...], list[str]] = {}
        for name, change in changes.items():
            if change.learned and change.norm > 0:
                told = replies[name].annotates
                alike.setdefault(() if all(told) else told, []).append(name)
        directions: dict[str, Direction] = {}
        for names in alike.values():
            found = [Direction(0.0, 0.0)] * len(names)
            if len(names) > 2:
                found = compare_directions(
                    [replies[name].params for name in names],
                    [sent[name].params for name in names],
                    [changes[name] for name in names],
                )
            directions |= dict(zip(names, found, strict=True))
        return directions

    def _direction_complaint(self, sights: Sequence[Sight]) -> str | None:
        """A client whose first rounds pointed against the others, where these agreed."""
        weights = [max(sight.agreement, 0.0) for sight in sights[:JUDGED]]
        total = math.fsum(weights)
        if total < EVIDENCE:
            return None
        mean = math.fsum(w * sight.cosine for w, sight in zip(weights, sights, strict=False)) / total
        if mean > MAX_OPPOSITE:
            return None
        return (
            f"its updates point against the others: their mean cosine is {mean:.2f}, below {MAX_OPPOSITE:g}, "
            f"while the others' own is {fmean(weights):.2f} (limits.refuse_opposite)"
        )


def list_others(name: str, changes: Mapping[str, Change]) -> list[Change]:
    """What a client is held against: the others that trained. A model sent back as it was says nothing, and
    an update made without labels, which may honestly be tiny, says nothing of one made with them."""
    return [
        change
        for other, change in changes.items()
        if other != name
        and any(change.norms.values())
        and (change.has_labels or not changes[name].has_labels)
    ]


def allowed(most: float) -> str:
    return f"at most {most:.3g} times is allowed (limits.max_norm)"


def round_off(value: float) -> float:
    """What a checkpoint keeps and a run goes by are the same."""
    return float(f"{value:.4g}")
