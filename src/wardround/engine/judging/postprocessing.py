"""Postprocessing: which predictions lose all but their largest connected part, chosen on validation cases.

`evaluate.postprocess: auto` is nnU-Net's rule. Steps are tried in this order: all foreground classes as one,
then each class by itself. A step is taken where it raises the mean Dice and lowers that of no region. Each
client tries all of them on its own validation cases, after one prediction of each, and tells Dice alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wardround.clients import Clients
from wardround.config import Postprocess
from wardround.messages import Message, Reply
from wardround.metrics.summary import summarise
from wardround.params import Params

log = logging.getLogger(__name__)

Labels = NDArray[Any]
Steps = tuple[tuple[int, ...], ...]  # of each, the classes whose largest part stays
Dice = dict[str, float]  # region -> mean over clients

POSTPROCESS = "postprocess.json"
NO_CASES = "no client has a validation case to choose by, so predictions stay as they are"


# Masks


def postprocess_labels(labels: Labels, how: Postprocess) -> Labels:
    """A mask after the steps of a setting; `auto` is none until its steps are known."""
    if how == "largest_component":
        return largest_components(labels)
    return labels if isinstance(how, str) else reduce(keep_largest, how, labels)


def largest_components(labels: Labels) -> Labels:
    """Only the largest connected part of each class."""
    return reduce(keep_largest, ((int(value),) for value in np.unique(labels[labels > 0])), labels)


def keep_largest(labels: Labels, classes: Sequence[int]) -> Labels:
    """Without voxels of these classes outside of the largest connected part that they form together."""
    from scipy import ndimage

    mask = np.isin(labels, classes)
    parts, count = ndimage.label(mask)
    if count < 2:
        return labels
    sizes = np.bincount(parts.ravel())
    sizes[0] = 0
    return np.where(mask & (parts != sizes.argmax()), np.zeros_like(labels), labels)


# In messages


def read_steps(steps: Sequence[Sequence[int]]) -> Steps:
    """Steps as they travel in a message."""
    return tuple(tuple(int(number) for number in classes) for classes in steps)


def as_sent(variants: Sequence[Steps]) -> list[list[list[int]]]:
    return [[list(classes) for classes in steps] for steps in variants]


def name_variant(number: int, region: str) -> str:
    """The name of a region in a case's row, after the steps of one variant."""
    return f"{number}/{region}"


# Server


@dataclass(frozen=True)
class Chosen:
    """The steps taken. before, after: Dice of validation cases by region; tried: every step with its Dice;
    num_cases: validation cases of each client; note: what the reader should know, in a sentence."""

    steps: Steps = ()
    before: Dice = field(default_factory=dict)
    after: Dice = field(default_factory=dict)
    tried: tuple[dict[str, Any], ...] = ()
    num_cases: Mapping[str, int] = field(default_factory=dict)
    note: str = NO_CASES

    def as_dict(self) -> dict[str, Any]:
        """The content of postprocess.json."""
        return {
            "steps": as_sent([self.steps])[0],
            "note": self.note,
            "validation_cases": dict(self.num_cases),
            "dice": {"before": describe(self.before), "after": describe(self.after)},
            "tried": list(self.tried),
        }


def choose_postprocessing(
    clients: Clients, params: Params, scalars: Mapping[str, Any], *, judges: Sequence[str], num_classes: int
) -> Chosen:
    """Have the model tried at the clients `judges`, on validation cases alone."""

    def measure(variants: Sequence[Steps]) -> tuple[list[Dice], dict[str, int]]:
        asked = {**scalars, "split": "val", "metrics": ["dice"], "variants": as_sent(variants)}
        replies = clients.ask("evaluate", Message(params=params, scalars=asked), to=judges)
        return join_dice(replies, len(variants)), {r.client: len(r.scalars.get("cases", ())) for r in replies}

    whole, apart = list_steps(num_classes)
    variants: list[Steps] = [(), whole, *(s for one in apart for s in ((one,), (*whole, one)))]
    found, num_cases = measure(variants)
    if not found[0]:
        log.warning("evaluate.postprocess is auto, but %s", NO_CASES)
        return Chosen(num_cases=num_cases)
    dice = dict(zip(variants, found, strict=True))
    tried = [record_step(dice[()], dice[whole], whole[0])]
    steps = whole if tried[0]["taken"] else ()
    tried += [record_step(dice[steps], dice[(*steps, one)], one) for one in apart]
    chosen = steps + tuple(one for one, record in zip(apart, tried[1:], strict=True) if record["taken"])
    if chosen not in dice:  # several classes, each measured by itself
        dice[chosen] = measure([chosen])[0][0]
        if not improves(dice[steps], dice[chosen]):
            chosen = steps
    note = describe_steps(chosen)
    log.info("postprocessing, by %d validation cases: %s", sum(num_cases.values()), note)
    return Chosen(chosen, dice[()], dice[chosen], tuple(tried), num_cases, note)


def list_steps(num_classes: int) -> tuple[Steps, Steps]:
    """All foreground classes as one; each by itself, where there are several."""
    foreground = tuple(range(1, num_classes))
    return (foreground,), tuple((number,) for number in foreground) if len(foreground) > 1 else ()


def join_dice(replies: Sequence[Reply], num_variants: int) -> list[Dice]:
    """By variant, each region's mean over clients of their means over cases; empty without a case."""
    rows = [reply.scalars["cases"] for reply in replies if reply.scalars.get("cases")]
    if not rows:
        return [{} for _ in range(num_variants)]
    names = dict.fromkeys(name for own in rows for row in own for name in row["regions"])
    regions = [name.partition("/")[2] for name in names if name.startswith("0/")]

    def join(name: str) -> float:
        found = [[row["regions"].get(name, {}).get("dice", math.nan) for row in own] for own in rows]
        return summarise([summarise(list(map(float, own))).mean for own in found]).mean

    return [{region: join(name_variant(k, region)) for region in regions} for k in range(num_variants)]


def record_step(before: Dice, after: Dice, classes: Sequence[int]) -> dict[str, Any]:
    return {"classes": list(classes), "dice": describe(after), "taken": improves(before, after)}


def improves(before: Dice, after: Dice) -> bool:
    """Whether the mean over regions rises and no region falls; one without a value counts in neither."""
    pairs = [(before[name], after[name]) for name in before]
    pairs = [(one, other) for one, other in pairs if math.isfinite(one) and math.isfinite(other)]
    falls = any(other < one for one, other in pairs)
    return not falls and sum(other for _, other in pairs) > sum(one for one, _ in pairs)


def describe(dice: Dice) -> dict[str, Any]:
    """Dice by region, and their mean."""
    return {"mean": summarise(list(dice.values())).mean, "regions": dice} if dice else {}


def describe_steps(steps: Steps) -> str:
    """What is done, in a sentence."""
    if not steps:
        return "predictions stay as they are, since no step raised Dice without lowering that of a region"
    named = [", ".join(map(str, classes)) for classes in steps]
    return "only the largest connected part is kept of " + ", then of ".join(
        f"class {one}" if "," not in one else f"classes {one} together" for one in named
    )
