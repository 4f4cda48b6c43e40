"""Conducting a survey: the organiser asks all hospitals, and proposes what they have in common."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from wardround.clients import SyncState
from wardround.config import Config
from wardround.deploy.live_file import Live, announcing
from wardround.deploy.remote import Channel, Remote
from wardround.deploy.survey.page import draw_survey
from wardround.deploy.survey.proposals import HospitalProposal
from wardround.deploy.survey.replies import Surveyed, read_decision, read_surveyed
from wardround.deploy.survey.survey_file import PAGE, Survey
from wardround.errors import ConfigError
from wardround.files import write_text
from wardround.messages import Message


def conduct_survey(channel: Channel, config: Config, *, names: list[str], job: str = "") -> Survey:
    """Survey the named hospitals, and ask each whether it accepts what is proposed; survey.json and
    survey.html land in the folder of the configuration."""
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    with announcing(Live(folder / "live.json", job=job, rounds=0, run=None)) as live:
        run = secrets.token_hex(8)
        remote = Remote(channel, config, run=run, names=names, live=live, exchange=folder / "exchange")
        found, absent = ask_fingerprints(remote, names)
        survey = Survey(found, absent)
        if survey.common.class_names:
            proposals = {name: survey.common.propose_to(name) for name in survey.common.classes}
            survey = Survey(found, absent, ask_agreement(remote, proposals), survey.time)
        survey.save(folder)
        write_text(folder / PAGE, draw_survey(survey))
    return survey


def ask_fingerprints(remote: Remote, names: list[str]) -> tuple[dict[str, Surveyed], dict[str, str]]:
    """What hospitals said, and why others said nothing."""
    found: dict[str, Surveyed] = {}
    absent: dict[str, str] = {}
    for answer in remote.deliver("fingerprint", -1, dict.fromkeys(names, Message()), SyncState()):
        reason = answer.failure or answer.refused
        if reason is not None:
            absent[answer.client] = reason.rstrip(".")
        else:
            found[answer.client] = read_surveyed(answer.client, answer.message.scalars)
    if not found:
        why = "; ".join(f"'{name}': {reason}" for name, reason in sorted(absent.items()))
        raise ConfigError(f"no hospital answered the survey. {why}")
    return found, absent


def ask_agreement(remote: Remote, proposals: Mapping[str, HospitalProposal]) -> dict[str, str]:
    """Hospital -> accepted, waiting or declined; or why it did not say."""
    messages = {
        name: Message(scalars={"proposal": one.model_dump(mode="json")}) for name, one in proposals.items()
    }
    decisions = {}
    for answer in remote.deliver("agree", -1, messages, SyncState()):
        reason = answer.failure or answer.refused
        decisions[answer.client] = reason or read_decision(answer.message.scalars)
    return decisions


def require_agreement(remote: Remote, proposals: Mapping[str, Any]) -> None:
    """Raise where a hospital does not accept what the run proposes."""
    decisions = ask_agreement(remote, {name: HospitalProposal.read(one) for name, one in proposals.items()})
    waiting = [name for name, decision in sorted(decisions.items()) if decision == "waiting"]
    others = {name: why for name, why in decisions.items() if why not in ("accepted", "waiting")}
    if waiting:
        who = ", ".join(f"'{name}'" for name in waiting)
        raise ConfigError(
            f"{who} must confirm the common names and preparation first: wardround confirm KIT, at the "
            "hospital. Then submit the run again, or leave them out with --hospitals."
        )
    for name, why in sorted(others.items()):
        said = "declined the common names and preparation" if why == "declined" else f"did not agree: {why}"
        raise ConfigError(f"'{name}' {said.rstrip('.')}. Leave it out with --hospitals, or survey again.")
