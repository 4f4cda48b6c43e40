"""What a client has, held against what method and objective can use; the rest is refused by name."""

from __future__ import annotations

from wardround.config import Config
from wardround.data.annotation import Annotation
from wardround.data.cases import ClientData
from wardround.data.roles import PROXY
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.methods.base import Method


def check_client(name: str, data: ClientData, config: Config, method: Method, objective: Objective) -> None:
    """Refuse a client whose labels or channels method or objective cannot use."""
    chosen = str(config.method.get("name", "fedavg"))
    check_annotation(name, data.annotation, chosen, method, objective)
    check_unlabelled(name, data, chosen, method, objective)
    check_channels(name, data, config, method)


def check_annotation(
    name: str, annotation: Annotation | None, chosen: str, method: Method, objective: Objective
) -> None:
    """Refuse a client that does not annotate every class where method or objective need that."""
    if annotation is None:
        return
    reason = method.needs_every_class
    if reason or name == PROXY:
        reason = reason or "the server's own cases stand for all classes"
        raise ConfigError(
            f"client '{name}' has labels that do not say everything (annotates or ignore in federation.yaml)"
            f", which method '{chosen}' cannot use: {reason}. Choose another method, such as fedavg, or "
            "leave the client out."
        )
    objective.check_annotation(annotation)


def check_unlabelled(name: str, data: ClientData, chosen: str, method: Method, objective: Objective) -> None:
    """Refuse training cases without a label where method or objective cannot use them."""
    if not data.num_unlabelled or method.labels_itself(name):
        return
    found = f"client '{name}' has {data.num_unlabelled} training cases without a label"
    reason = method.needs_labels or ("the server's own cases are to be right" if name == PROXY else "")
    if reason:
        raise ConfigError(
            f"{found}, which method '{chosen}' cannot use: {reason}. Choose another, such as fedavg, or take "
            "the client out of unlabelled in federation.yaml."
        )
    if not objective.uses_unlabelled:
        raise ConfigError(
            f"{found}, which objective '{objective.title}' cannot use. Set objective.name to mean_teacher or "
            "pseudo_labels, or take the client out of unlabelled in federation.yaml."
        )


def check_channels(name: str, data: ClientData, config: Config, method: Method) -> None:
    """Refuse clients whose scans lack channels, or lose some in training, where the method needs all."""
    reason = method.needs_every_channel
    if reason and (data.lacking or config.augmentation.drop_channels):
        raise ConfigError(
            f"client '{name}': scans lack channels (channels_of in federation.yaml, or "
            f"augmentation.drop_channels), which method '{config.method.get('name')}' cannot use: "
            f"{reason}. Choose another method, such as fedavg, or leave out what lacks channels."
        )
