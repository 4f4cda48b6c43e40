"""Plan: every setting that the rules chose, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
