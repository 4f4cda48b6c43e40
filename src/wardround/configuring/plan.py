"""Plan: every setting that the rules chose, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from wardround.yaml_file import apply_override


@dataclass(frozen=True)
class Choice:
    """One setting. key: its place in a configuration, such as "model.arguments.strides"."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class ConfigurationPlan:
    """All choices, in the order in which a reader wants them; warnings: what to know before training."""

    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """The choices as nested sections of a configuration file.

        >>> ConfigurationPlan((Choice("model.name", "nnunet", "a U-Net"),)).settings()
        {'model': {'name': 'nnunet'}}
        """
        found: dict[str, Any] = {}
        for choice in self.choices:
            *sections, name = choice.key.split(".")
            place = found
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = choice.value
        return found


def override_plan(plan: ConfigurationPlan, overrides: Sequence[str]) -> ConfigurationPlan:
    """The plan with settings of the user's (`a.b=c`) in place of its own.

    With `method.name`, the plan's other settings of the method are left out: they need not exist there; with
    `local_epochs`, its steps. The window of the test is the patch of training, whoever set that; other local
    steps make other rounds, of the same steps in all.

    >>> plan = ConfigurationPlan((Choice("rounds", 10, "the budget"),))
    >>> override_plan(plan, ["rounds=3"]).choices
    (Choice(key='rounds', value=3, reason='as you set it; the plan had 10'),)
    """
    choices = list(plan.choices)
    own = [override.partition("=")[0].strip() for override in overrides]
    if "method.name" in own:
        choices = [c for c in choices if c.key == "method.name" or not c.key.startswith("method.")]
    for key, override in zip(own, overrides, strict=True):
        values: dict[str, Any] = {}
        apply_override(values, override)
        value: Any = values
        for part in key.split("."):
            value = value[part]
        choices = lay_over(choices, key, value)
        if key == "local_epochs":
            choices = [choice for choice in choices if choice.key != "local_steps"]
        if key == "data.patch" and "evaluate.window" not in own:
            choices = lay_over(choices, "evaluate.window", value, "the patch that you set")
    return replace(plan, choices=tuple(keep_work(plan.choices, choices, own)))


def keep_work(before: Sequence[Choice], after: Sequence[Choice], own: Sequence[str]) -> list[Choice]:
    """As many steps in all and validations as before, where the user changed steps a round, or the rounds."""
    old, new = ({choice.key: choice.value for choice in choices} for choices in (before, after))
    choices, local, every = list(after), new.get("local_steps"), "evaluate.every"
    is_other = isinstance(local, int) and local > 0 and local != old.get("local_steps", local)
    if is_other and "rounds" in old and "rounds" not in own:
        new["rounds"] = max(1, round(old["rounds"] * old["local_steps"] / local))
        why = f"of the {local} steps that you set, to make about as many in all"
        choices = lay_over(choices, "rounds", new["rounds"], why)
    rounds = new.get("rounds")
    if every in old and every not in own and isinstance(rounds, int) and rounds != old["rounds"]:
        often = max(1, round(old[every] * rounds / old["rounds"]))
        choices = lay_over(choices, every, often, "about as many validations in all")
    return choices


def lay_over(choices: Sequence[Choice], key: str, value: Any, why: str = "as you set it") -> list[Choice]:
    """The choices with one replaced or added; a whole section takes the place of all inside it."""
    laid = [choice for choice in choices if not choice.key.startswith(f"{key}.")]
    for place, choice in enumerate(laid):
        if choice.key == key:
            had = "" if choice.value == value else f"; the plan had {choice.value}"
            laid[place] = Choice(key, value, f"{why}{had}")
            return laid
        if key.startswith(f"{choice.key}.") and isinstance(choice.value, dict):
            section = {"value": deepcopy(choice.value)}
            *inner, last = ["value", *key[len(choice.key) + 1 :].split(".")]
            target: dict[str, Any] = section
            for part in inner:
                target = target.setdefault(part, {})
            target[last] = value
            laid[place] = Choice(choice.key, section["value"], f"{choice.reason}; {key} as you set it")
            return laid
    return [*laid, Choice(key, value, why)]
