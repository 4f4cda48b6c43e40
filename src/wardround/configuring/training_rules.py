"""Rules of the training: what is minimised, by which steps, on which images, and how clients work together.

nnU-Net 2's recipe (`nnUNetTrainer`), and ours where a federation or a short run adds a question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from wardround.configuring.facts import Facts
from wardround.configuring.plan import Choice
from wardround.text import format_count, format_percent

# Steps of each client; benchmarks/autopilot/recipes.json has the trials that these rest on
FEW_STEPS = 500  # up to here images are seen as they are: at 300 and 500 augmentation cost more than it gave
MANY_STEPS = 10_000  # from here on nnU-Net's SGD, tuned for 250,000; tried up to 4,000, where Adam was ahead
FEWEST_ROUNDS = 200  # where there are steps enough
LOCAL_STEPS = (5, 100)  # of a round: fewest and most
VALIDATIONS = 10  # in a run
THICK = 3  # longest to shortest side of a patch of few thick slices (nnU-Net: do_dummy_2d_data_aug)
FEWEST_PATIENTS = 10  # who have two classes: ten lie alike along an axis once in 500 times by chance
SAME_ORDER = 0.95  # of them: a few are drawn or oriented wrongly
LONG = 1.5  # longest to shortest side of a 2D patch that is not turned upside down (nnU-Net)


# What is minimised


def choose_objective(facts: Facts, patch: Sequence[int], shape: Sequence[int]) -> list[Choice]:
    """Dice + cross entropy; of each region by itself where regions overlap (nnU-Net: region-based training).
    Where cases have no label, an objective that takes them (ours).

    nnU-Net takes Dice over the whole batch in 2D, and in 3D where a patch sees so little of the image that
    a coarser network would be trained before it, which is below about an eighth of its voxels.
    """
    share = math.prod(patch) / math.prod(shape)
    is_batch = facts.dimensions == 2 or share < 1 / 8
    if is_batch:
        why = "images are 2D" if facts.dimensions == 2 else f"a patch has {format_percent(share)} of an image"
        why = f"Dice of the whole batch, as {why}: a class may be missing in one"
    else:
        why = f"Dice of each patch, which has {format_percent(min(share, 1.0))} of an image"
    reduction = Choice("objective.reduction", "batch" if is_batch else "per_sample", why)
    pair = find_overlap(facts.regions)
    regions = order_regions(facts)
    bare = [client.name for client in facts.clients if client.num_unlabelled]
    if bare:
        why = f"'{bare[0]}' has cases without a label, which the received model labels where it is sure"
        return [Choice("objective.name", "pseudo_labels", why), reduction]
    if pair is None or regions is None:
        why = "Dice + cross entropy, as nnU-Net"
        if pair is not None:
            why = f"regions {pair[0]} and {pair[1]} overlap but do not tell classes apart, which are trained"
        return [Choice("objective.name", "dice_bce", why), reduction]
    return [
        Choice("objective.name", "region_dice_bce", f"regions {pair[0]} and {pair[1]} overlap"),
        Choice("objective.regions", regions, "each is learned as a whole, as it is measured"),
        reduction,
    ]


def order_regions(facts: Facts) -> list[list[int]] | None:
    """Regions from the largest on, where each paints one class over those before it; None where not."""
    ordered = sorted((sorted(classes) for classes in facts.regions.values()), key=len, reverse=True)
    painted = [set(own).difference(*ordered[place + 1 :]) for place, own in enumerate(ordered)]
    every = sorted(number for classes in painted for number in classes)
    one_each = all(len(classes) == 1 for classes in painted)
    return ordered if one_each and every == list(range(1, len(facts.classes) + 1)) else None


def find_overlap(regions: Mapping[str, Sequence[int]]) -> tuple[str, str] | None:
    """Two regions that share a class, if there are any."""
    pairs = combinations(regions.items(), 2)
    return next(((a, b) for (a, one), (b, other) in pairs if set(one) & set(other)), None)


def choose_foreground() -> list[Choice]:
    """nnU-Net: a third of each batch lies at something labelled, at least one patch."""
    return [
        Choice("data.foreground", 0.33, "a third of the patches lie at something labelled, as nnU-Net"),
        Choice("data.foreground_by", "batch", "so that every batch has one"),
    ]


# By which steps


def choose_optimizer(facts: Facts, steps: int) -> list[Choice]:
    """nnU-Net's SGD for long runs; ours below MANY_STEPS: Adam, which is far after a few hundred steps.

    Momentum of 0.99 is a mean over a hundred steps, and of K clients each takes a K-th of them. The state
    stays at the clients from round to round: reset, each round would begin without momentum.

    Where clients annotate different classes, a plain step of each, and Adam at the server (`choose_method`):
    Adam at a client divides by the size of its own gradients, which of classes that it does not annotate are
    small, so that they count as much as any.
    """
    if facts.partial is not None:
        why = f"the mean of plain steps is one on the mean loss, though '{facts.partial.name}' annotates part"
        chosen = [
            Choice("optimizer.name", "sgd", why),
            Choice("optimizer.learning_rate", 1.0, "the server's Adam divides by the size of steps"),
            Choice("optimizer.momentum", 0.0, "the server's Adam has it"),
        ]
    elif steps < MANY_STEPS:
        few = f"{steps} steps are few: Adam learns from the first on"
        chosen = [
            Choice("optimizer.name", "adam", few),
            Choice("optimizer.learning_rate", choose_rate(steps), few),
        ]
    else:
        chosen = [
            Choice("optimizer.name", "sgd", "as nnU-Net"),
            Choice("optimizer.learning_rate", 0.01, "as nnU-Net"),
            Choice("optimizer.momentum", 0.99, "as nnU-Net"),
            Choice("optimizer.nesterov", True, "as nnU-Net"),
            Choice("optimizer.weight_decay", 3e-5, "as nnU-Net"),
        ]
    if facts.partial is not None:
        return [*chosen, Choice("optimizer.clip_norm", 1.0, "no single batch stands out among updates")]
    return [
        *chosen,
        Choice("optimizer.clip_norm", 12.0, "as nnU-Net"),
        Choice("optimizer.schedule", {"name": "polynomial", "power": 0.9}, "falls to 0, as nnU-Net's"),
        Choice("optimizer.state", "keep", "its moments take more than a round"),
    ]


def choose_rate(steps: int) -> float:
    """Adam's, wherever it is; few steps are those of a narrow network on a CPU."""
    return 0.01 if steps <= FEW_STEPS else 0.001


def choose_rounds(facts: Facts, steps: int) -> tuple[int, int]:
    """Rounds and local steps of each that make `steps`, or nearly so where they do not divide (ours).

    At least 200 rounds where there are steps for it, so that clients do not drift apart (of 20, 10 and 5
    local steps the fewest were best on validation cases), of 5 to 100 steps, so that the exchange does not
    take longer than the training. Where clients annotate different classes, of one: by a second step each
    forgets what the others teach.
    """
    if facts.partial is not None:
        return steps, 1
    fewest, most = LOCAL_STEPS
    if steps < 2 * fewest:
        return 1, steps
    local = min(max(steps // FEWEST_ROUNDS, fewest), most)
    dividing = [few for few in range(local, max(fewest, local // 2) - 1, -1) if steps % few == 0]
    local = dividing[0] if dividing else local
    return round(steps / local), local


def choose_work(facts: Facts, steps: int) -> list[Choice]:
    """Equal steps for every client, whatever its number of cases (ours): one with few cases is as far as the
    others when models are averaged, and nobody waits for the largest.
    """
    rounds, local = choose_rounds(facts, steps)
    whole = rounds * local == steps
    made = f"are the {steps} of each client" if whole else f"make {rounds * local}, nearest to {steps}"
    counts = [client.num_train for client in facts.clients]
    has = f"clients have {min(counts)} to" if min(counts) < max(counts) else "every client has"
    why = f"{has} {format_count(max(counts), 'training case')}: equal steps, not epochs"
    if facts.partial is not None:
        told = ", ".join(facts.partial.annotates)
        why = f"'{facts.partial.name}' annotates {told} alone, and would forget the rest in more"
    return [
        Choice("rounds", rounds, f"{rounds} x {local} steps {made}"),
        Choice("local_steps", local, why),
    ]


# On which images


def find_ordered_axes(facts: Facts) -> dict[int, str]:
    """Axes along which some class lies before another in nearly all patients, each with a sentence (ours).

    A network tells such classes apart by their place, and mirror images teach that they are the same
    (nnU-Net leaves it to its user, who takes `nnUNetTrainer_onlyMirror01` or `NoMirroring`).
    """
    found: dict[int, str] = {}
    for axis in range(facts.dimensions):
        pairs = []
        for one in facts.positions:
            ordered = one if one.before[axis] >= one.after[axis] else one.swap()
            share = ordered.before[axis] / one.patients
            if one.patients >= FEWEST_PATIENTS and share >= SAME_ORDER:
                pairs.append((share, one.patients, ordered.classes))
        if pairs:
            share, patients, (first, second) = max(pairs)
            name = "RAS"[axis] if facts.dimensions == 3 else f"axis {axis}"
            found[axis] = (
                f"'{first}' lies before '{second}' along {name} in {format_percent(share)} of {patients} "
                "patients: not mirrored along it"
            )
    return found


def choose_mirroring(facts: Facts) -> tuple[dict[str, Any], str]:
    """Settings of the mirroring, beside the set's, and why; none where all axes are mirrored, as nnU-Net."""
    ordered = find_ordered_axes(facts)
    axes = [axis for axis in range(facts.dimensions) if axis not in ordered]
    chosen = {"mirror_axes": axes, **({} if axes else {"mirror": 0.0})}
    return (chosen, "".join(f"; {why}" for why in ordered.values())) if ordered else ({}, "")


def choose_augmentation(facts: Facts, steps: int, patch: Sequence[int]) -> list[Choice]:
    """nnU-Net's set, in our terms, without mirroring along axes that tell classes apart; none where steps are
    few (ours).

    Rotation up to 30 degrees, in 2D up to 180, or 15 where the patch is long; few thick slices are rotated
    (up to 180) and scaled in their plane alone (do_dummy_2d_data_aug). Scaling 0.7 to 1.4; noise, blur,
    brightness, contrast, low resolution and gamma with its probabilities.
    """
    mirroring, why = choose_mirroring(facts)
    if steps <= FEW_STEPS:
        few = f"{steps} steps are too few to see variants"
        axes = {key: value for key, value in mirroring.items() if key == "mirror_axes"}  # of predict --tta
        return [Choice("augmentation", NO_AUGMENTATION | axes, few + why)]
    sides = max(patch) / min(patch)
    chosen: dict[str, Any] = {"flip": 0.0, "mirror": 0.5, "spatial": 0.36, "scale": 0.4} | mirroring
    reason = "nnU-Net's set"
    if len(patch) == 3 and sides > THICK:
        chosen |= {"rotate": 180.0, "slice_axis": min(range(3), key=patch.__getitem__)}
        reason += f"; {min(patch)} thick slices are rotated and scaled in their plane"
    else:
        chosen["rotate"] = 30.0 if len(patch) == 3 else 15.0 if sides > LONG else 180.0
    return [Choice("augmentation", chosen | SHADING, reason + why)]


NO_AUGMENTATION: dict[str, Any] = {"flip": 0.0, "intensity": 0.0}
SHADING: dict[str, Any] = {
    "noise": 0.2, "blur": 1.0, "intensity": 0.25, "contrast": 0.25, "low_resolution": 0.5, "gamma": 0.4,
    "inverted": 0.25, "chances": {"noise": 0.1, "blur": 0.2, "intensity": 0.15, "contrast": 0.15,
    "low_resolution": 0.25, "gamma": 0.37},
}  # fmt: skip


# How clients work together


def choose_method(facts: Facts, steps: int) -> list[Choice]:
    """FedAvg by number of cases, as if all were pooled (ours), with momentum at the clients. Whether some at
    the server too (FedAvgM) helps is not settled: few runs were made, one seed each.

    Where clients annotate different classes, FedAdam on one plain step of each (ours; benchmarks/README.md),
    which is Adam on the mean of their losses.
    """
    count = len(facts.clients)
    labelled = sum(client.num_unlabelled < client.num_train for client in facts.clients)
    enough = min(count, max(2, math.ceil(count / 2)), max(1, labelled))
    why = f"a round needs {enough} of {count} clients; a mean of one would be its model"
    if enough == labelled < count:
        why = f"{enough} of {count} clients have labels, and a round needs no more"
    return [*choose_server(facts, steps), Choice("min_clients", enough, why)]


def choose_server(facts: Facts, steps: int) -> list[Choice]:
    if facts.partial is None:
        alike = f"{facts.num_train} training cases count alike, wherever they are"
        return [
            Choice("method.name", "fedavg", "momentum is the clients', so the server has none"),
            Choice("method.weighting", "samples", alike),
        ]
    falling = [Choice("method.decay_power", 0.9, "the rate falls to 0, as nnU-Net's")]
    return [
        Choice("method.name", "fedadam", "Adam on the mean loss, to which each client adds its classes"),
        Choice("method.server_lr", choose_rate(steps), f"Adam's rate for {steps} steps"),
        *([] if steps <= FEW_STEPS else falling),  # with 300 steps a rate that stayed learned more
        Choice("method.tau", 1e-6, "a divisor as small as Adam's, for steps as small as gradients"),
        Choice("method.bias_correction", True, "as Adam"),
    ]


# How models are judged


def choose_evaluation(facts: Facts, steps: int, patch: Sequence[int]) -> list[Choice]:
    """Windows of the training patch and the last model, as nnU-Net; mirror images where they were trained on,
    along the same axes, and all clients have a GPU, since each costs a pass.
    """
    rounds, _ = choose_rounds(facts, steps)
    every = max(1, rounds // VALIDATIONS)
    slow = [client.name for client in facts.clients if client.device == "cpu"]
    ordered = find_ordered_axes(facts)
    passes = 2 ** (len(patch) - len(ordered))
    if steps <= FEW_STEPS or passes == 1:
        tta, why = False, "no mirror images in training"
    elif slow:
        tta, why = False, f"'{slow[0]}' has no GPU, and it takes {passes} passes an image"
    else:
        how = "along the axes of training" if ordered else "as nnU-Net"
        tta, why = True, f"the mean over {passes} mirror images, {how}"
    falls = "the rate has fallen to 0"
    if facts.partial is not None and steps <= FEW_STEPS:  # see choose_server
        falls = "it has seen the most steps"
    return [
        Choice("evaluate.window", list(patch), "the patch of training, as nnU-Net"),
        Choice("evaluate.every", every, f"{math.ceil(rounds / every)} validations in all"),
        Choice("evaluate.model", "last", f"{falls}; validation cases are few to choose by"),
        Choice("evaluate.tta", tta, why),
        Choice(
            "evaluate.postprocess",
            "auto",
            "only the largest part is kept where that raises Dice on validation cases, as nnU-Net",
        ),
    ]
