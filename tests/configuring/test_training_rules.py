from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from wardround.config_file import load_config
from wardround.configuring.facts import Facts
from wardround.configuring.plan import Choice
from wardround.configuring.training_rules import (
    choose_augmentation,
    choose_evaluation,
    choose_method,
    choose_objective,
    choose_optimizer,
    choose_rounds,
    choose_work,
    find_overlap,
)
from wardround.data.fingerprint.positions import PairPosition

Make = Callable[..., Facts]


def values(choices: Sequence[Choice]) -> dict[str, Any]:
    return {choice.key: choice.value for choice in choices}


def test_overlapping_regions_are_trained_as_regions(make_facts: Make) -> None:
    facts = make_facts(regions={"core": (1,), "whole": (1, 2)})
    found = values(choose_objective(facts, (128, 128, 128), (160, 192, 160)))

    assert found["objective.name"] == "region_dice_bce"
    assert found["objective.regions"] == [[1, 2], [1]]  # the larger one first


def test_overlapping_regions_that_do_not_tell_classes_apart_are_only_measured(make_facts: Make) -> None:
    facts = make_facts(regions={"whole": (1, 2), "core": (1,), "all": (1, 2)})
    found = values(choose_objective(facts, (128, 128, 128), (160, 192, 160)))

    assert found["objective.name"] == "dice_bce"


def test_cases_without_a_label_get_an_objective_that_takes_them(make_facts: Make) -> None:
    facts = make_facts(regions={"core": (1,), "whole": (1, 2)})
    one, *others = facts.clients
    bare = replace(facts, clients=(replace(one, num_unlabelled=3), *others))

    assert values(choose_objective(bare, (8, 8), (8, 8)))["objective.name"] == "pseudo_labels"


def test_a_round_needs_no_more_clients_than_have_labels(make_facts: Make) -> None:
    facts = make_facts()
    first, *others = facts.clients
    bare = tuple(replace(client, num_unlabelled=client.num_train) for client in others)
    mixed = tuple(replace(client, num_unlabelled=1) for client in others)

    assert values(choose_method(replace(facts, clients=(first, *bare)), 300))["min_clients"] == 1
    assert values(choose_method(replace(facts, clients=(first, *mixed)), 300))["min_clients"] == 2


def test_regions_that_share_no_class_do_not_overlap() -> None:
    assert find_overlap({"a": (1, 3), "b": (2,)}) is None
    assert find_overlap({"a": (1,), "b": (2,), "c": (3, 2)}) == ("b", "c")


@pytest.mark.parametrize(
    ("patch", "shape", "expected"),
    [
        ((128, 128, 128), (256, 256, 256), "per_sample"),
        ((128, 128, 128), (256, 256, 257), "batch"),
        ((512, 512), (512, 512), "batch"),
    ],
)
def test_dice_is_of_the_batch_in_2d_or_where_a_patch_sees_little(
    make_facts: Make, patch: tuple[int, ...], shape: tuple[int, ...], expected: str
) -> None:
    facts = make_facts(shape=shape)

    assert values(choose_objective(facts, patch, shape))["objective.reduction"] == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, (1, 1)), (9, (1, 9)), (300, (60, 5)), (1250, (250, 5)), (5000, (200, 25)), (62_500, (625, 100))],
)
def test_rounds_and_local_steps_make_the_steps(
    make_facts: Make, steps: int, expected: tuple[int, int]
) -> None:
    assert choose_rounds(make_facts(), steps) == expected


def annotate_parts(facts: Facts) -> Facts:
    """The second client outlines the core alone, the others everything."""
    first, second, *others = facts.clients
    return replace(facts, clients=(first, replace(second, annotates=("core",)), *others))


@pytest.mark.parametrize("steps", [1, 300, 5000])
def test_adam_is_at_the_server_where_clients_annotate_different_classes(make_facts: Make, steps: int) -> None:
    facts = annotate_parts(make_facts())
    work, optimizer = choose_work(facts, steps), values(choose_optimizer(facts, steps))
    method = values(choose_method(facts, steps))

    assert values(work) == {"rounds": steps, "local_steps": 1}
    assert "'north' annotates core alone" in work[1].reason
    assert (optimizer["optimizer.name"], optimizer["optimizer.momentum"]) == ("sgd", 0.0)
    assert "optimizer.state" not in optimizer  # a plain step has none
    assert "optimizer.schedule" not in optimizer  # the server's rate falls instead
    assert method.get("method.decay_power") == (None if steps <= 500 else 0.9)
    assert method["method.name"] == "fedadam"
    assert method["method.server_lr"] == (0.01 if steps <= 500 else 0.001)
    evaluation = choose_evaluation(facts, steps, (8, 8, 8))
    assert values(evaluation)["evaluate.every"] == max(1, steps // 10)
    reason = next(choice.reason for choice in evaluation if choice.key == "evaluate.model")
    assert ("fallen to 0" in reason) == ("method.decay_power" in method)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (1200, "200 x 6 steps are the 1200 of each client"),
        (1049, "210 x 5 steps make 1050, nearest to 1049"),
        (25147, "251 x 100 steps make 25100, nearest to 25147"),
    ],
)
def test_the_plan_says_how_many_steps_its_rounds_make(make_facts: Make, steps: int, reason: str) -> None:
    rounds = choose_work(make_facts(), steps)[0]

    assert (rounds.key, rounds.reason) == ("rounds", reason)


def test_adam_trains_below_ten_thousand_steps_and_nnunets_sgd_from_there(make_facts: Make) -> None:
    few, some, many = (values(choose_optimizer(make_facts(), steps)) for steps in (500, 9999, 10_000))

    assert (few["optimizer.name"], few["optimizer.learning_rate"]) == ("adam", 0.01)
    assert (some["optimizer.name"], some["optimizer.learning_rate"]) == ("adam", 0.001)
    assert (many["optimizer.name"], many["optimizer.momentum"], many["optimizer.nesterov"]) == (
        "sgd",
        0.99,
        True,
    )
    assert few["optimizer.state"] == many["optimizer.state"] == "keep"


@pytest.mark.parametrize(
    ("patch", "angle", "axis"),
    [
        ((64, 64, 64), 30, None),
        ((64, 64, 22), 30, None),
        ((64, 64, 16), 180, 2),
        ((8, 64, 64), 180, 0),
        ((64, 64), 180, None),
        ((64, 100), 15, None),
    ],
)
def test_patches_rotate_as_nnunets_and_thick_slices_in_their_plane(
    make_facts: Make, patch: tuple[int, ...], angle: float, axis: int | None
) -> None:
    found = values(choose_augmentation(make_facts(shape=patch), 5000, patch))["augmentation"]

    assert (found["rotate"], found.get("slice_axis")) == (angle, axis)
    assert found["spatial"] > 0
    assert found["mirror"] == 0.5


def test_few_steps_see_images_as_they_are(make_facts: Make) -> None:
    found = values(choose_augmentation(make_facts(shape=(64, 64)), 500, (64, 64)))

    assert found["augmentation"] == {"flip": 0.0, "intensity": 0.0}


def lie(before: Sequence[int], after: Sequence[int], patients: int = 100) -> dict[str, Any]:
    pair = PairPosition(classes=("core", "rim"), patients=patients, before=tuple(before), after=tuple(after))
    return {"positions": (pair,)}


@pytest.mark.parametrize(
    ("positions", "axes"),
    [
        ({}, None),
        (lie((94, 0, 50), (0, 94, 50)), None),
        (lie((95, 0, 50), (0, 94, 50)), [1, 2]),
        (lie((95, 0, 50), (0, 98, 50)), [2]),
        (lie((9, 0, 0), (0, 0, 0), 9), None),
        (lie((10, 0, 0), (0, 0, 0), 10), [1, 2]),
        (lie((9, 0, 0), (0, 0, 0), 10), None),
        (lie((100, 0, 100), (0, 100, 0)), []),
    ],
)
def test_an_axis_that_tells_classes_apart_is_not_mirrored(
    make_facts: Make, positions: dict[str, Any], axes: list[int] | None
) -> None:
    facts, plain = make_facts(**positions), make_facts()
    found, today = (
        values(choose_augmentation(f, 5000, (64, 64, 64)))["augmentation"] for f in (facts, plain)
    )
    tested = values(choose_evaluation(facts, 5000, (64, 64, 64)))["evaluate.tta"]

    assert found.get("mirror_axes") == axes
    assert found["mirror"] == (0.0 if axes == [] else 0.5)
    assert tested is (axes != [])
    assert {**found, "mirror": 0.5, "mirror_axes": 0} == {**today, "mirror_axes": 0}
    load_config({"augmentation": found, "evaluate": {"tta": tested}})


def test_the_reason_names_the_classes_and_the_axis(make_facts: Make) -> None:
    facts = make_facts(**lie((0, 1, 50), (97, 99, 50)))
    (mirrored,) = choose_augmentation(facts, 5000, (64, 64, 64))
    tta = next(c for c in choose_evaluation(facts, 5000, (64, 64, 64)) if c.key == "evaluate.tta")

    assert mirrored.reason == (
        "nnU-Net's set; 'rim' lies before 'core' along R in 97 % of 100 patients: not mirrored along it; "
        "'rim' lies before 'core' along A in 99 % of 100 patients: not mirrored along it"
    )
    assert tta.reason == "the mean over 2 mirror images, along the axes of training"


def test_of_pictures_axes_have_numbers_and_few_steps_leave_their_mark_on_prediction(make_facts: Make) -> None:
    facts = make_facts(shape=(64, 64), **lie((0, 100), (0, 0)))
    (found,) = choose_augmentation(facts, 500, (64, 64))

    assert found.value == {"flip": 0.0, "intensity": 0.0, "mirror_axes": [0]}
    assert "'core' lies before 'rim' along axis 1 in 100 % of 100 patients" in found.reason
    (many,) = choose_augmentation(facts, 5000, (64, 64))
    assert many.value["mirror_axes"] == [0] and many.value["mirror"] == 0.5


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 2), (4, 2), (7, 4)])
def test_a_round_needs_half_of_the_clients_and_two(make_facts: Make, count: int, expected: int) -> None:
    one = make_facts().clients[0]
    facts = make_facts(clients=tuple(replace(one, name=str(number)) for number in range(count)))

    assert values(choose_method(facts, 300))["min_clients"] == expected


def test_mirror_images_are_averaged_where_they_were_trained_on_and_cheap(make_facts: Make) -> None:
    facts = make_facts()
    slow = replace(facts, clients=(replace(facts.clients[0], device="cpu"),))
    found = [
        values(choose_evaluation(f, steps, (8, 8, 8)))
        for f, steps in ((facts, 5000), (facts, 300), (slow, 5000))
    ]

    assert [one["evaluate.tta"] for one in found] == [True, False, False]


def test_postprocessing_is_chosen_on_validation_cases(make_facts: Make) -> None:
    found = {choice.key: choice for choice in choose_evaluation(make_facts(), 300, (8, 8, 8))}

    chosen = found["evaluate.postprocess"]
    assert chosen.value == "auto" and "validation cases, as nnU-Net" in chosen.reason
