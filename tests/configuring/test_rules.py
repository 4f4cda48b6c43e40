"""Whole plans: each validates, builds its network, and says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from wardround.config_file import parse
from wardround.configuring.facts import ChannelFacts, ClientFacts, Facts
from wardround.configuring.plan import ConfigurationPlan
from wardround.configuring.rules import configure
from wardround.errors import ConfigError
from wardround.models import build

Make = Callable[..., Facts]
GB = 10**9


def check(plan: ConfigurationPlan, facts: Facts) -> None:
    """The settings are valid, and their network takes a patch in training."""
    settings = plan.settings()
    settings["data"]["federation"] = "federation.yaml"
    config = parse(settings)
    network = build(config.model, in_channels=len(facts.channels), num_outputs=3, dimensions=facts.dimensions)
    assert config.data.patch is not None
    assert network.padded_size(config.data.patch) == list(config.data.patch)
    assert all(
        choice.reason and len(choice.reason) < 110 and not choice.reason.endswith(".")
        for choice in plan.choices
    )


def value(plan: ConfigurationPlan, key: str) -> object:
    return next(choice.value for choice in plan.choices if choice.key == key)


@pytest.mark.parametrize("steps", [1, 7, 300, 1250, 62_500])
def test_a_plan_is_a_valid_configuration_for_any_number_of_steps(make_facts: Make, steps: int) -> None:
    facts = make_facts()
    plan = configure(facts, steps=steps)
    first, *others = facts.clients
    partial = replace(facts, clients=(replace(first, annotates=("core",)), *others))

    check(plan, facts)
    check(configure(partial, steps=steps), partial)
    assert value(plan, "rounds") * value(plan, "local_steps") == steps  # type: ignore[operator]


def test_preparation_and_network_do_not_depend_on_the_steps(make_facts: Make) -> None:
    few, many = (configure(make_facts(), steps=steps).settings() for steps in (10, 10_000))

    assert [few[key] for key in ("data", "model", "batch_size")] == [
        many[key] for key in ("data", "model", "batch_size")
    ]


def test_a_client_with_a_third_of_the_memory_gives_a_smaller_plan_for_all(make_facts: Make) -> None:
    facts = make_facts()
    small = replace(facts.clients[1], memory=8 * GB)
    mixed = replace(facts, clients=(facts.clients[0], small, *facts.clients[2:]))
    plan = configure(mixed, steps=1250)

    check(plan, mixed)
    assert value(configure(facts, steps=1250), "data.patch") == [128, 128, 128]
    assert value(plan, "data.patch") == [112, 128, 128]
    assert plan.warnings == (
        "the plan is smaller than it could be: planned for 6.4 GB, since 'north' has 8.0 GB.",
    )

    scans = make_facts(shape=(96, 96, 96))
    plan = configure(replace(scans, clients=mixed.clients), steps=1250)
    assert value(plan, "data.patch") == value(configure(scans, steps=1250), "data.patch") == [96, 96, 96]
    assert plan.warnings == ()  # images are smaller than the memory of any client


def test_a_client_without_a_gpu_gives_a_network_for_processors(make_facts: Make) -> None:
    facts = make_facts()
    slow = replace(facts.clients[2], device="cpu", cores=2)
    mixed = replace(facts, clients=(*facts.clients[:2], slow))
    plan = configure(mixed, steps=1250)

    check(plan, mixed)
    assert value(plan, "model.base_filters") == 8
    assert value(plan, "evaluate.tta") is False
    assert "'south' has no GPU" in plan.warnings[0]


def test_a_client_with_too_little_memory_is_refused_by_name(make_facts: Make) -> None:
    facts = make_facts(clients=(ClientFacts("attic", 25, "cuda", GB, 2),))

    with pytest.raises(ConfigError, match="client 'attic' has 1.0 GB of memory"):
        configure(facts, steps=10)


def test_a_client_with_a_single_case_takes_part_and_is_named(make_facts: Make) -> None:
    facts = make_facts()
    single = replace(facts, clients=(*facts.clients[:3], replace(facts.clients[3], num_train=1)))
    plan = configure(single, steps=1250)

    check(plan, single)
    assert plan.warnings == (
        "client 'west' has a single training case: it trains on patches of that alone, and counts 1 of 76 in "
        "the mean.",
    )


def test_a_class_that_is_nowhere_is_named(make_facts: Make) -> None:
    facts = make_facts(presence={"core": 1.0})
    plan = configure(facts, steps=10)

    check(plan, facts)
    assert plan.warnings == (
        "class 'rim' is in no case, so it cannot be learned; check its values under labels.",
    )


def test_cases_without_any_label_are_refused(make_facts: Make) -> None:
    with pytest.raises(ConfigError, match=r"no case has anything labelled \(core, rim\)"):
        configure(make_facts(presence={}), steps=10)


def test_a_federation_without_training_cases_is_refused(make_facts: Make) -> None:
    with pytest.raises(ConfigError, match="no client has a training case"):
        configure(make_facts(clients=()), steps=10)


def test_2d_images_of_mixed_shapes_without_spacing_are_resized(make_facts: Make) -> None:
    sides = ((200, 480, 1080), (300, 640, 1920))
    facts = make_facts(has_spacing=False, shape=sides)
    plan = configure(facts, steps=1250)

    check(plan, facts)
    assert value(plan, "data.prepare.size") == [480, 640]
    assert value(plan, "data.prepare.spacing") is None


@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 64, 64), (9, 9, 9), (1, 1, 1), (5, 5), (20, 400)])
def test_tiny_images_have_a_network_of_two_levels_or_more(make_facts: Make, shape: tuple[int, ...]) -> None:
    facts = make_facts(shape=shape)
    plan = configure(facts, steps=10)

    check(plan, facts)
    assert value(plan, "model.levels") >= 2  # type: ignore[operator]


def test_huge_volumes_are_trained_in_patches_with_dice_of_the_batch(make_facts: Make) -> None:
    facts = make_facts(shape=(1024, 1024, 900), spacing=(0.4, 0.4, 0.4))
    plan = configure(facts, steps=10)

    check(plan, facts)
    assert value(plan, "data.patch") == [128, 128, 128]
    assert (value(plan, "batch_size"), value(plan, "objective.reduction")) == (2, "batch")


def test_several_channels_change_neither_patch_nor_batch(make_facts: Make) -> None:
    channels = tuple(ChannelFacts(name, "mr", 0.0, 1.0, -2.0, 2.0) for name in ("t1", "t2", "flair"))
    facts = make_facts(channels=channels)
    plan = configure(facts, steps=10)

    check(plan, facts)
    assert plan == configure(make_facts(), steps=10)
