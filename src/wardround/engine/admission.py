"""Who takes part in a run, and for how many cases each counts: claims, held against the limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from wardround.clients import Clients, Registration
from wardround.clients.bounds import bound_counts
from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.losses.unlabelled import SemiSupervised
from wardround.text import suggest

log = logging.getLogger(__name__)


def check_left_out(config: Config, names: Sequence[str], resume: bool) -> None:
    """Refuse to leave out who is not there; names: all clients, none where they are not known yet."""
    if config.without and not resume:
        raise ConfigError(
            "clients can be left out of a run that goes on; add --resume. For a new run, name those that "
            "take part in participation."
        )
    unknown = [name for name in config.without if names and name not in names]
    if unknown:
        raise ConfigError(
            f"'{unknown[0]}' is not a client of this run and cannot be left out."
            f"{suggest(unknown[0], names)} It has: {', '.join(names)}."
        )


def admit_clients(
    config: Config, registered: Sequence[Registration], classes: Sequence[str] = (), *, fewest: int = 1
) -> tuple[list[Registration], dict[str, int], list[str]]:
    """Those that take part; counts of those that claim too many cases, lowered; and a sentence about each.

    classes: their names, without background; fewest: clients that must be able to train.
    """
    agreed, admitted, warnings = config.limits.cases, [], []
    for entry in registered:
        if entry.client in config.without:
            continue
        if entry.num_train > agreed.get(entry.client, entry.num_train):
            warnings.append(
                f"client '{entry.client}' does not take part: it registered {entry.num_train} training "
                f"cases, and limits.cases says {agreed[entry.client]}."
            )
            continue
        admitted.append(entry)
    check_trainable(config, admitted, fewest)
    check_labelled(admitted, config.min_clients)
    if not config.without:  # a model that has learned a class may go on without who taught it
        check_taught(config, admitted, classes)
    sizes = {entry.client: entry.num_train for entry in admitted if entry.num_train}
    if not isinstance(config.participation, float):
        sizes = {name: size for name, size in sizes.items() if name in config.participation}
    share = config.limits.max_share
    lowered = bound_counts(sizes, share)
    warnings += [
        f"client '{name}' registered {sizes[name]} training cases, far more than the others; they count as "
        f"{count} (limits.max_share is {share}; 1 lets any number count)."
        for name, count in lowered.items()
    ]
    for warning in warnings:
        log.warning("%s", warning)
    return admitted, lowered, warnings


def list_training(config: Config, registered: Sequence[Registration]) -> list[Registration]:
    """Those with training cases that ever take part."""
    share = config.participation
    return [e for e in registered if e.num_train and (isinstance(share, float) or e.client in share)]


def check_trainable(config: Config, registered: Sequence[Registration], fewest: int) -> None:
    """Refuse a run whose first round would have nobody, or too few, to ask."""
    training = list_training(config, registered)
    if len(training) >= fewest:
        return
    why = f"Look at splits, and at what was left out ({config.folder / 'left_out.json'})."
    if not training:
        raise ConfigError(f"no client that takes part has a training case that can be used. {why}")
    named = ", ".join(f"'{entry.client}'" for entry in training)
    raise ConfigError(
        f"min_clients is {fewest}, but only {named} can train: no other client that takes part has a "
        f"training case that can be used. {why}"
    )


def check_labelled(registered: Sequence[Registration], min_clients: int) -> None:
    """Refuse a run that nobody could teach: clients without any label follow those that have some."""
    training = [entry for entry in registered if entry.num_train]
    labelled = [entry for entry in training if entry.has_labels]
    if len(labelled) < len(training) and len(labelled) < min_clients:
        raise ConfigError(
            f"{len(labelled)} of {len(training)} clients that train have labels, but min_clients is "
            f"{min_clients}. Lower it, or add labels; somebody must have them."
        )


def check_taught(config: Config, registered: Sequence[Registration], classes: Sequence[str]) -> None:
    """Refuse a class that nobody who trains annotates: what the model said of it would be chance."""
    training = list_training(config, registered)
    if not all(entry.annotates for entry in training):
        return
    for number, told in enumerate(zip(*(entry.annotates for entry in training), strict=False), start=1):
        if not any(told):
            name = classes[number - 1] if number <= len(classes) else str(number)
            raise ConfigError(
                f"class '{name}' is annotated by no client that trains (annotates in federation.yaml), so "
                "nothing would teach it. Take it out of labels, or add a client that annotates it."
            )


def list_able(clients: Clients, objective: Objective, rounds: int, round: int) -> list[str]:
    """Who can train in a round: those without any label join once others have taught the model."""
    able = clients.trainable
    if isinstance(objective, SemiSupervised) and round < objective.first_unlabelled_round(rounds):
        return [name for name in able if clients.registered[name].has_labels]
    return able
