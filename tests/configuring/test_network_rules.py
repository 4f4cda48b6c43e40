"""Patch, levels and batch size against nnU-Net 2.8.1 (nnunet_plans.json: its planner on made-up data sets)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wardround.configuring.facts import ClientFacts, Facts
from wardround.configuring.network_rules import (
    Topology,
    count_units,
    find_limits,
    find_topology,
    first_patch,
    list_widths,
    plan_network,
)
from wardround.configuring.preparation_rules import find_shape, find_spacing
from wardround.configuring.training_rules import choose_objective
from wardround.errors import ConfigError

Make = Callable[..., Facts]
GB = 10**9
PLANS = json.loads((Path(__file__).parent / "nnunet_plans.json").read_text(encoding="utf-8"))


def plan(facts: Facts, given: dict[str, Any]) -> dict[str, Any]:
    """What nnU-Net writes into its plans, by our rules."""
    limits, shape = find_limits(facts), find_shape(facts)
    network = plan_network(
        find_spacing(facts),
        shape,
        outputs=given["classes"] + 1,
        num_train=given["num_train"],
        base_filters=limits.base_filters,
        units=limits.units,
    )
    topology = network.topology
    reduction = choose_objective(facts, topology.patch, shape)[-1].value
    return {
        "spacing": pytest.approx(find_spacing(facts), abs=2e-5),  # nnU-Net adds 1e-5 to a bounded one
        "patch": list(topology.patch),
        "batch": network.batch_size,
        "strides": [list(level) for level in topology.strides],
        "kernels": [list(level) for level in topology.kernels],
        "features": list_widths(network.levels, network.base_filters, facts.dimensions),
        "batch_dice": reduction == "batch",
        "median": list(shape),
    }


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_plan_is_that_of_nnunet(make_facts: Make, number: int) -> None:
    given = PLANS[number]
    client = ClientFacts("all", given["num_train"], "cuda", round(given["memory_gb"] * GB / 0.8), 8)
    axes = {name: tuple(map(tuple, given[name])) for name in ("shape", "spacing")}
    facts = make_facts(**axes, has_spacing=given["dimensions"] == 3, clients=(client,))
    extent = make_facts(shape=tuple(map(tuple, given["extent"]))).shape
    expected = given["nnunet"]
    if len(expected["strides"]) == 1:  # too small to be halved: ours are, once
        assert len(plan(replace(facts, extent=extent), given)["strides"]) == 2
    else:
        assert expected == plan(replace(facts, extent=extent), given)


def test_fine_axes_are_halved_until_voxels_are_cubes() -> None:
    found = find_topology((5.0, 0.5, 0.5), (20, 256, 256))

    assert found.strides == (
        (1, 1, 1), (1, 2, 2), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2)
    )  # fmt: skip
    assert found.kernels[:3] == ((1, 3, 3),) * 3
    assert found.kernels[3:] == ((3, 3, 3),) * 4
    assert found.patch == (20, 256, 256)


def test_the_first_patch_is_a_cube_in_millimetres() -> None:
    assert first_patch((1.0, 1.0, 1.0), (999, 999, 999)) == (256, 256, 256)
    assert first_patch((4.0, 1.0, 1.0), (999, 999, 999)) == (102, 406, 406)
    assert first_patch((1.0, 1.0), (480, 5000)) == (480, 2048)


def test_units_are_the_values_of_all_feature_maps() -> None:
    two_levels = Topology((8, 8), ((1, 1), (2, 2)), ((3, 3), (3, 3)))

    down = 2 * 4 * 64 + 2 * 8 * 16
    up = (4 + 2 * 4) * 64
    assert count_units(two_levels, outputs=3, base_filters=4) == down + up + 3 * 64


def test_gpus_of_ten_gigabytes_and_more_are_planned_for_alike(make_facts: Make) -> None:
    facts = make_facts()
    larger = tuple(replace(client, memory=141 * GB) for client in facts.clients)

    assert find_limits(replace(facts, clients=larger)).units == find_limits(facts).units == 560_000_000


def test_a_patch_that_cannot_shrink_any_more_is_refused() -> None:
    with pytest.raises(ConfigError, match="no patch fits"):
        plan_network((1.0, 1.0, 1.0), (64, 64, 64), outputs=2, num_train=9, base_filters=32, units=100.0)
