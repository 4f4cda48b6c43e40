"""Proposals: names of classes and channels, and a preparation, that all hospitals of a run use.

The organiser proposes them, each hospital decides by its own rules. What it decided is in its kit:

    state/proposals/<key>.json    what was proposed, and whether it is accepted, waiting or declined
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from wardround.data.common_names import OwnNames
from wardround.data.federation_file import FederationFile, PrepareSettings
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError
from wardround.files import parse_json, write_json
from wardround.settings import Settings, explain

PROPOSALS = "proposals"  # folder of a hospital's state
MOST_WAITING = 20  # proposals that a hospital keeps for a person to look at
Decision = Literal["accepted", "waiting", "declined"]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class HospitalProposal(Settings):
    """What is proposed to one hospital.

    classes, channels: common name -> what this hospital calls it; prepare: settings laid over those of its
    federation.yaml.
    """

    classes: dict[Name, Name] = Field(min_length=1, max_length=255)
    channels: dict[Name, Name] = Field(default_factory=dict, max_length=64)
    prepare: dict[str, Any] = Field(default_factory=dict, max_length=len(PrepareSettings.model_fields))

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        for own in (self.classes, self.channels):
            if len(set(own.values())) < len(own):
                raise ValueError("two common names are one of the hospital's own")
        PrepareSettings.read(self.prepare, "prepare.")
        return self

    @property
    def key(self) -> str:
        """The same for all hospitals to which the same is proposed, whatever they call things."""
        return make_key(list(self.classes), list(self.channels), self.prepare)

    @property
    def names(self) -> OwnNames:
        return OwnNames(self.classes, self.channels)


def complete_prepare(prepare: Mapping[str, Any] | None) -> dict[str, Any]:
    """Every setting of a preparation, so that nothing of a hospital's own is left under it.

    How 2D images were cut from volumes is said only where it is known.
    """
    plain = PrepareSettings.read(dict(prepare or {}), "prepare.").model_dump(mode="json")
    return {name: value for name, value in plain.items() if name != "slices" or value is not None}


def make_key(classes: list[str], channels: list[str], prepare: Mapping[str, Any] | None) -> str:
    plain = [classes, channels, complete_prepare(prepare)]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def read_proposal(value: Any) -> HospitalProposal:
    try:
        return HospitalProposal.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"the proposal is wrong: {explain(error, HospitalProposal)}") from None


def spell(name: str) -> str:
    """A name without what is a matter of spelling.

    >>> spell("Left-Lung") == spell("left lung")
    True
    """
    return re.sub(r"[\W_]+", "", name.casefold())


# At the hospital


def describe_changes(proposal: HospitalProposal, file: FederationFile) -> list[str]:
    """What would be other than federation.yaml says, a sentence each; nothing: all is as it is."""
    lines = []
    for kind, own, there in (
        ("class", proposal.classes, list(file.labels)),
        ("channel", proposal.channels, list(file.channels)),
    ):
        lines += [f"{kind} '{name}' is called '{common}'" for common, name in own.items() if name != common]
        left = [name for name in there if own and name not in own.values()]
        lines += [f"{kind} '{name}' is left out" for name in left]
        kept = [name for name in there if name in own.values()]
        if own and there and kept != list(own.values()):
            plural = {"class": "classes", "channel": "channels"}[kind]
            lines.append(f"the {plural} are in this order: {', '.join(own)}")
    prepare = file.prepare.model_dump(mode="json")
    lines += [
        f"prepare.{name} is {json.dumps(value)}, not {json.dumps(prepare.get(name))}"
        for name, value in proposal.prepare.items()
        if value != prepare.get(name)
    ]
    return lines


def changes_meaning(proposal: HospitalProposal, file: FederationFile) -> bool:
    """Whether a class or channel is left out, or called something that is not a matter of spelling."""
    pairs = [*proposal.classes.items(), *proposal.channels.items()]
    renamed = any(spell(common) != spell(own) for common, own in pairs if not own.startswith("#"))
    fewer = len(proposal.classes) < len(file.labels) or 0 < len(proposal.channels) < len(file.channels)
    return renamed or fewer


class ProposalFolder:
    """What a hospital was asked to agree to. state: of its kit."""

    def __init__(self, state: Path) -> None:
        self._folder = state / PROPOSALS

    def find(self, key: str) -> tuple[HospitalProposal, Decision] | None:
        try:
            found = parse_json((self._folder / f"{key}.json").read_text(encoding="utf-8"))
            decision: Decision = found["decision"]
            return read_proposal(found["proposal"]), decision
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            raise ConfigError(
                f"{self._folder / f'{key}.json'} is damaged. Remove it; the next survey asks again."
            ) from None

    def list_waiting(self) -> list[HospitalProposal]:
        """What a person has not decided yet."""
        found = [self.find(path.stem) for path in sorted(self._folder.glob("*.json"))]
        return [one[0] for one in found if one is not None and one[1] == "waiting"]

    def decide(self, proposal: HospitalProposal, decision: Decision) -> None:
        facts = {"decision": decision, "proposal": proposal.model_dump(mode="json")}
        write_json(self._folder / f"{proposal.key}.json", facts)

    def consider(
        self, proposal: HospitalProposal, file: FederationFile, accept: Literal["ask", "auto"]
    ) -> Decision:
        """What this hospital says to a proposal: as before, by its rules, or a person is to be asked."""
        proposal.names.check(file)
        before = self.find(proposal.key)
        if before is not None and before[0] == proposal:
            return before[1]
        if not describe_changes(proposal, file) or (accept == "auto" and not changes_meaning(proposal, file)):
            decision: Decision = "accepted"
        else:
            decision = "waiting"
            if len(self.list_waiting()) >= MOST_WAITING:
                raise ConfigError("too many proposals wait here for a person to decide.")
        self.decide(proposal, decision)
        return decision

    def find_names(self, data: DataSettings) -> OwnNames | None:
        """What this hospital calls the common names of a run; None where the run has none."""
        if data.common is None:
            return None
        key = make_key(list(data.common.classes), list(data.common.channels), data.prepare)
        found = self.find(key)
        if found is None or found[1] != "accepted":
            raise ConfigError(
                "the names and the preparation of this run are not confirmed at this hospital "
                "(wardround confirm KIT there)."
            )
        return found[0].names
