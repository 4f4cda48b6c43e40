"""What works under privacy, by the cards of method and objective and by the network; the rest is refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Protocol

from torch import nn

from wardround.errors import ConfigError
from wardround.privacy.settings import PrivacySettings

NEAREST = {"scaffold": "feddyn", "fedbn": "fedper", "ditto": "fedprox", "fedsam": "fedprox"}
NEAREST_SUM = {
    "safcf": "fedavg with objective cfsl",
    "fedevi": "feduaa",
    "fedce": "fedga",
    "fedproto": "moon",
}
OTHERS = "fedavg"


class MethodCard(Protocol):
    """What is read of a method."""

    kind: ClassVar[str]
    sends: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    tasks: ClassVar[tuple[str, ...]]
    up: ClassVar[frozenset[str]]
    own_steps: ClassVar[bool]
    secure_sum: ClassVar[bool]
    needs_each_model: ClassVar[str]


class ObjectiveCard(Protocol):
    """What is read of an objective."""

    needs: ClassVar[frozenset[str]]
    least_together: ClassVar[int]


def explain_method(settings: PrivacySettings, card: MethodCard) -> str | None:
    """Why a method cannot keep this level, or None."""
    if card.kind == "reference":
        return "it is a reference without exchange"
    if card.sends != "nothing" or card.up or card.tasks != ("train",):
        sent = card.sends if card.sends != "nothing" else "more"
        return f"beside the model it sends {sent}"
    is_personal = card.kind == "personal"
    if is_personal and settings.scores == "show":
        return "scores of models that clients keep to themselves (privacy.scores: show) would not be covered"
    if settings.level != "case":
        return None
    if is_personal:
        return "models that clients keep to themselves are trained without noise"
    if card.own_steps:
        return "it changes the training step, whose gradients cannot be clipped by case"
    others = card.needs - {"state", "full"}
    return f"its loss needs {' and '.join(sorted(others))} beside the case itself" if others else None


def check_cards(
    settings: PrivacySettings, method: str, card: MethodCard, objective: str, aim: ObjectiveCard
) -> None:
    """Refuse a method or an objective by name, with the nearest that works."""
    if settings.secure_sum and not card.secure_sum:
        why = card.needs_each_model or "the server needs what every client sends by itself"
        raise ConfigError(
            f"method '{method}' does not work with privacy.secure_sum: {why}. The nearest that does is "
            f"{NEAREST_SUM.get(method, OTHERS)}."
        )
    if not settings.is_on:
        return
    reason = explain_method(settings, card)
    if reason is not None:
        nearest = NEAREST.get(method, OTHERS)
        nearest = OTHERS if settings.level == "case" and nearest == "fedper" else nearest
        raise ConfigError(
            f"method '{method}' does not work with privacy.level: {settings.level}: {reason}. The nearest "
            f"that does is {nearest}."
        )
    if settings.level == "case" and (aim.least_together > 1 or aim.needs):
        raise ConfigError(
            f"objective '{objective}' does not work with privacy.level: case: it compares a case with others "
            "or with other models, so its gradient cannot be clipped by case. The nearest that does is "
            "dice_bce."
        )


def check_network(settings: PrivacySettings, name: str, model: nn.Module, shared: Collection[str]) -> None:
    """Refuse running statistics that travel: they are measured on cases and are not noised."""
    if not settings.is_on:
        return
    tracking = [
        (key, layer)
        for key, layer in model.named_modules()
        if getattr(layer, "track_running_stats", False)
        and (settings.level == "case" or f"{key}.running_mean" in shared)  # else they stay at the client
    ]
    if tracking:
        key, layer = tracking[0]
        raise ConfigError(
            f"model '{name}' does not work with privacy.level: {settings.level}: its layer '{key}' "
            f"({type(layer).__name__}) keeps running statistics of cases. Set model.norm to instance or "
            "group."
        )
