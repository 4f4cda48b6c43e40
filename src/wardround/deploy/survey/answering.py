"""Answering: a hospital's side of a survey. No network is built, and no value of a single case leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.configuring.measuring import measure_training_cases
from wardround.data.fingerprint.hardware import Hardware, describe_hardware
from wardround.data.fingerprint.measure import summarise
from wardround.data.listing import Watch
from wardround.data.serving.loading import RealData, federation_of
from wardround.data.settings import DataSettings
from wardround.deploy.agreement import collect_facts, localise_data
from wardround.deploy.site_file import SiteFile, find_client
from wardround.deploy.survey.proposals import ProposalFolder, read_proposal
from wardround.errors import ConfigError
from wardround.messages import Message


def answer_survey(
    task: str, message: Message, site: SiteFile, name: str, state: Path, on_progress: Watch | None = None
) -> tuple[Message, int]:
    """The answer to "fingerprint" or "agree", and how many training cases are behind it.

    state: of the hospital's kit; on_progress: called with every case.
    """
    data = open_own_data(site, name)
    (inside,) = data.listing.clients
    if task == "agree":
        proposal = read_proposal(message.scalars.get("proposal"))
        decision = ProposalFolder(state).consider(proposal, data.file, site.accept)
        return Message(scalars={"decision": decision, "key": proposal.key}), 0
    measured, _ = measure_training_cases(data, jobs=site.threads, on_progress=on_progress, strict=False)
    cases = measured[inside]
    found = summarise(cases, site.min_count, behind=site.min_count)
    told = found.model_copy(update={"client": name, "hardware": describe_allowed(site)})
    scalars = {"fingerprint": told.as_dict(), "facts": describe_files(site, inside)}
    fewest = min(told.count_bins(), default=0)  # for the ledger: cases behind any number that leaves
    return Message(scalars={**scalars, "fewest": fewest}), len(cases)


def describe_allowed(site: SiteFile) -> Hardware:
    """What this hospital computes with; of its memory, as much as its rules give a run."""
    machine, most = describe_hardware(site.device), site.resources.memory
    return machine if most is None else machine.model_copy(update={"memory": min(machine.memory, most)})


def open_own_data(site: SiteFile, name: str) -> RealData:
    """The cases of one hospital, as its federation.yaml describes them."""
    if not isinstance(site.data, Path):
        raise ConfigError(f"site '{name}' has only synthetic cases, and a survey is of real ones.")
    settings = localise_data(DataSettings(hospitals=True), site)
    inside = find_client(site, federation_of(site.data, settings, 0).names, name)
    return RealData(site.data, settings, only=inside)


def describe_files(site: SiteFile, inside: str) -> Mapping[str, Any]:
    """What federation.yaml says of the cases; nothing is measured for it."""
    settings = localise_data(DataSettings(hospitals=True), site)
    federation = federation_of(Path(site.data), settings, 0, only=inside)
    return collect_facts(replace(federation, summarise_scans=None, lacks={}))  # no counts of cases
