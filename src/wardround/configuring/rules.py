"""Rules: from facts to a configuration.

    plan = configure(facts, steps=1250)
    plan.settings()                             the sections of a configuration file

`steps` are the optimizer steps of each client in all. Preparation and network do not depend on them.
"""

from __future__ import annotations

from dataclasses import replace

from wardround.configuring.facts import Facts
from wardround.configuring.network_rules import Limits, NetworkPlan, find_limits, plan_network
from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.configuring.preparation_rules import find_shape, find_spacing, plan_preparation
from wardround.configuring.training_rules import (
    choose_augmentation,
    choose_evaluation,
    choose_foreground,
    choose_method,
    choose_objective,
    choose_optimizer,
    choose_work,
)
from wardround.errors import ConfigError
from wardround.text import format_size

FEWEST_DEEP = 4  # levels that deep supervision needs


def configure(facts: Facts, *, steps: int) -> ConfigurationPlan:
    """A plan for these facts, or a refusal that names who stands in the way.

    steps: optimizer steps of each client in all, at least 1.
    """
    warnings = check_facts(facts)
    limits = find_limits(facts)
    shape = find_shape(facts)
    network = plan_within(facts, limits)
    patch = network.topology.patch
    choices = [
        *plan_preparation(facts),
        *choose_network(network, limits),
        *choose_patch(network, shape, limits),
        *choose_foreground(),
        *choose_objective(facts, patch, shape),
        *choose_work(facts, steps),
        *choose_optimizer(facts, steps),
        *choose_augmentation(facts, steps, patch),
        *choose_method(facts, steps),
        *choose_evaluation(facts, steps, patch),
    ]
    warnings += warn_of_hardware(facts, limits, network)
    return ConfigurationPlan(tuple(choices), (*facts.notes, *warnings))


def plan_within(facts: Facts, limits: Limits) -> NetworkPlan:
    return plan_network(
        find_spacing(facts),
        find_shape(facts),
        outputs=len(facts.classes) + 1,
        num_train=facts.num_train,
        base_filters=limits.base_filters,
        units=limits.units,
    )


def choose_network(network: NetworkPlan, limits: Limits) -> list[Choice]:
    """nnU-Net's plain U-Net with instance norm, without running statistics to average."""
    sides = network.topology.patch
    deepest = [side // step for side, step in zip(sides, network.topology.divisors, strict=True)]
    filters = network.base_filters
    is_deep = network.levels >= FEWEST_DEEP
    return [
        Choice("model.name", "nnunet", f"{len(sides)}D U-Net of an nnU-Net plan"),
        Choice("model.levels", network.levels, f"halved until {format_size(deepest)} voxels are left"),
        Choice("model.base_filters", filters, "as nnU-Net" if filters == 32 else limits.reason),
        Choice("model.norm", "instance_affine", "no running statistics that differ between clients"),
        Choice(
            "model.deep_supervision",
            is_deep,
            "coarser levels learn too, as nnU-Net"
            if is_deep
            else f"{network.levels} levels have none to add",
        ),
        Choice(
            "model.arguments.strides",
            [list(level) for level in network.topology.strides],
            "an axis is halved while its voxels are less than twice as large as the smallest",
        ),
        Choice(
            "model.arguments.kernels",
            [list(level) for level in network.topology.kernels],
            "1 along axes whose voxels are twice as large or more",
        ),
    ]


def choose_patch(network: NetworkPlan, shape: tuple[int, ...], limits: Limits) -> list[Choice]:
    patch = network.topology.patch
    median = f"the median image is {format_size(shape)}"
    if patch != network.first_patch:
        median += f"; {limits.reason}"
    if network.batch_size == network.covered < network.fitting:
        why = f"5 % of all training voxels; {network.fitting} would fit"
    elif network.batch_size == network.fitting:
        why = limits.reason
    else:
        why = "the fewest that Dice of a batch is taken over"
    return [
        Choice("data.patch", list(patch), median),
        Choice("batch_size", network.batch_size, why),
    ]


def check_facts(facts: Facts) -> list[str]:
    """Refuse what cannot be trained on; say what is unusual."""
    if not facts.clients or not facts.num_train:
        raise ConfigError("no client has a training case. Check the splits: wardround data check")
    absent = [name for name in facts.classes if not facts.presence.get(name, 0)]
    if facts.classes and len(absent) == len(facts.classes):
        raise ConfigError(
            f"no case has anything labelled ({', '.join(absent)}). Check labels in federation.yaml: the "
            "values in the files that mean each class."
        )
    warnings = [
        f"class '{name}' is in no case, so it cannot be learned; check its values under labels."
        for name in absent
    ]
    warnings += [
        f"client '{client.name}' has a single training case: it trains on patches of that alone, and counts "
        f"1 of {facts.num_train} in the mean."
        for client in facts.clients
        if client.num_train == 1
    ]
    bare = [client.name for client in facts.clients if client.num_unlabelled]
    if bare:
        warnings.append(
            f"cases without a label ({', '.join(bare)}) take part. In our own runs they did not help to rely "
            "on: compare with a run of clients that have labels (participation)."
        )
    return warnings


def warn_of_hardware(facts: Facts, limits: Limits, network: NetworkPlan) -> list[str]:
    """Say whose machine decides over the network of all, where it would be another without it."""
    decides = limits.client
    others = [client for client in facts.clients if client.device == "cuda"]
    if decides.device == "cpu" and others:
        return [
            f"client '{decides.name}' has no GPU, so all {len(facts.clients)} clients train a network for "
            f"processors. Without it the network is four times as wide."
        ]
    largest = max(facts.clients, key=lambda client: client.memory)
    other = plan_within(facts, find_limits(replace(facts, clients=(largest,))))
    if (other.topology.patch, other.batch_size) == (network.topology.patch, network.batch_size):
        return []
    return [f"the plan is smaller than it could be: {limits.reason}."]
