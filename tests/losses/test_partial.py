"""Losses where some classes are not annotated: against sums written out, for every objective we have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from wardround.data.annotation import Annotation
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses.evidential import aggregated_kl, misleading_kl
from wardround.losses.objective import Context, CrossEntropy, Dice, DiceBCE, Objective
from wardround.losses.partial import exclusion_loss, merge_logits
from wardround.losses.reference import Reference
from wardround.losses.regions import RegionDiceBCE
from wardround.methods import OBJECTIVES, build_named
from wardround.methods.condist import ConDist
from wardround.methods.fedevi import Evidential
from wardround.models.base import Output, Segmenter

NUM_CLASSES = 5
FIRST = Annotation((0, 1, 0, 0, 0))  # organ 1 of four
JOINED = Annotation((0, 1, 1, 0, 2))  # 1 and 2 as one, 4, not 3
LABEL_FREE = {  # without the terms that see neither labels nor logits
    "cfsl": {"lam": 0.0}, "clsl": {"gamma": 0.0}, "infonce": {"lam": 0.0}, "simclr": {"lam": 0.0},
    "local_cl": {"lam": 0.0}, "swav": {"lam": 0.0},
}  # fmt: skip
EVERY = [(name, settings) for name in OBJECTIVES for settings in (LABEL_FREE.get(name, {}),)]
EVERY += [("dice", {"include_background": True, "reduction": "batch"}), ("evidential", {"lam": 0.0})]
EVERY += [("condist", {"weight": 0.0}), ("condist", {"start": 1.0, "temperature": 0.5})]
EVERY += [("region_dice_bce", {"regions": [[1, 2, 3, 4], [1, 2], [1], [4]], "order": [3, 2, 1, 4]})]


def objective_of(name: str, settings: dict[str, Any]) -> Objective:
    objective: Objective = build_named(OBJECTIVES, {"name": name, **settings}, "objective")
    return objective


def example(objective: Objective, annotation: Annotation, *, deep: bool = False) -> tuple[Output, Tensor]:
    """Logits of two cases, leaves of the graph, and labels as the client has them."""
    draw = torch.Generator().manual_seed(3)
    outputs = objective.num_outputs(NUM_CLASSES)
    sizes = [(6, 4), (3, 2)] if deep else [(6, 4)]
    logits = [torch.randn(2, outputs, *size, generator=draw, dtype=torch.float64) for size in sizes]
    fine, *coarse = (values.requires_grad_() for values in logits)
    label = torch.randint(0, NUM_CLASSES, (2, 6, 4), generator=draw)
    return Output(logits=fine, deep=tuple(coarse)), annotation.hide(label)


class Received(Segmenter):
    """A received model that gives known logits."""

    def __init__(self, outputs: int) -> None:
        super().__init__(in_channels=1, num_outputs=outputs, dimensions=2, divisor=1)

    def forward(self, image: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(8)
        return 2 * torch.randn(2, self.num_outputs, 6, 4, generator=draw, dtype=torch.float64)


class Told(Context):
    """A context whose forward pass gives known logits."""

    def __init__(self, objective: Objective, output: Output, annotation: Annotation | None) -> None:
        super().__init__(
            round=0, rounds=10, num_examples=2, memory={}, generator=torch.Generator(),
            annotation=annotation, restrict=objective.restrict,
            global_=Reference(Received(output.logits.shape[1])) if "global" in objective.needs else None,
        )  # fmt: skip
        self.output, self._size = output, output.logits.shape[2:]

    def forward(self, model: nn.Module, image: Tensor) -> Output:
        return self.output


def loss_of(objective: Objective, output: Output, label: Tensor, annotation: Annotation | None) -> Tensor:
    batch = Batch(torch.zeros(2, 1, 6, 4), label)
    return objective.loss(nn.Identity(), batch, Told(objective, output, annotation))


# The gradient of what is not annotated


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("annotation", [FIRST, JOINED])
@pytest.mark.parametrize(("name", "settings"), EVERY)
def test_logits_of_classes_not_told_apart_get_exactly_the_marginal_gradient(
    name: str, settings: dict[str, Any], annotation: Annotation, deep: bool
) -> None:
    """With L' the same loss of the groups alone, the gradient of z_n is dL'/dq_m times dq_m/dz_n; outputs of
    regions that are not told get none at all, and ConDistFL adds that of its distillation within groups."""
    objective = objective_of(name, settings)
    output, label = example(objective, annotation, deep=deep)
    loss_of(objective, output, label, annotation).backward()

    if isinstance(objective, RegionDiceBCE):
        for maps in (output.logits, *output.deep):
            assert maps.grad is not None
            for place, region in enumerate(objective.list_regions(NUM_CLASSES - 1)):
                assert bool((maps.grad[:, place] == 0).all()) != annotation.tells(region)
        return
    same, _ = example(objective, annotation, deep=deep)
    expected_gradients(objective, same, label, annotation)
    for maps, other in zip((output.logits, *output.deep), (same.logits, *same.deep), strict=True):
        assert maps.grad is not None and other.grad is not None
        torch.testing.assert_close(maps.grad, other.grad, rtol=1e-9, atol=1e-15)


def expected_gradients(objective: Objective, output: Output, label: Tensor, annotation: Annotation) -> None:
    """By the loss of a model that has the groups for its classes, and the chain rule."""
    weights = [2 / 3, 1 / 3] if output.deep else [1.0]
    groups = np.asarray(annotation.groups)
    for weight, maps in zip(weights, (output.logits, *output.deep), strict=True):
        step = 6 // maps.shape[2]
        told = torch.from_numpy(groups)[label[:, step // 2 :: step, step // 2 :: step]]
        z = maps.detach()
        if isinstance(objective, Evidential):
            maps.grad = weight * evidential_gradient(objective, z, told, groups)
            continue
        q = torch.stack([z.softmax(1)[:, groups == m].sum(1) for m in range(groups.max() + 1)], dim=1)
        merged = q.log().requires_grad_()
        whole = Output(logits=merged)
        loss_of(objective, whole, told, None).backward()
        assert merged.grad is not None
        share = z.softmax(1) / q[:, groups]  # p_n / q_m
        maps.grad = weight * share * merged.grad[:, groups]

    if isinstance(objective, ConDist) and objective.weight:
        assert output.logits.grad is not None
        output.logits.grad += distillation_gradient(objective, output.logits.detach(), label, groups)


def distillation_gradient(objective: ConDist, z: Tensor, label: Tensor, groups: Any) -> Tensor:
    """The definition written out, by autograd; logits of classes told by themselves are not in it."""
    z = z.clone().requires_grad_()
    received, told = Received(NUM_CLASSES)(label), torch.from_numpy(groups)
    losses = []
    for m in range(groups.max() + 1):
        if (groups == m).sum() == 1:
            continue
        there = (told[label] == m) & (told[received.argmax(1)] == m)
        p, q = (
            ((values / objective.temperature).exp() * (told == m)[:, None, None]) for values in (z, received)
        )
        p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        for n in (groups == m).nonzero()[0]:
            both = (p[:, n][there], q[:, n][there])
            losses.append(1 - (2 * (both[0] * both[1]).sum() + 1e-5) / (sum(map(torch.sum, both)) + 1e-5))
    lam = objective.weight * objective.start  # the first of ten rounds
    (gradient,) = torch.autograd.grad(lam * torch.stack(losses).mean(), z)
    assert bool((gradient[:, [(groups == m).sum() == 1 for m in groups]] == 0).all())
    return gradient


def evidential_gradient(objective: Evidential, z: Tensor, label: Tensor, groups: Any) -> Tensor:
    """The definition written out: Dice and KL of the aggregated Dirichlet, by autograd in float64."""
    z = z.clone().requires_grad_()
    alpha = objective.alpha(z)
    a = torch.stack([alpha[:, groups == m].sum(1) for m in range(groups.max() + 1)], dim=1)
    y = torch.stack([(label == m).double() for m in range(groups.max() + 1)], dim=1)
    total = a.sum(1, keepdim=True)
    mean = a / total
    square = mean**2 + (mean * (1 - mean) / (total + 1) if objective.dice_mode == "bayes" else 0)
    sides = (0, 2, 3)
    ratio = (2 * (y * mean).sum(sides) + 1e-5) / ((y * y + square).sum(sides) + 1e-5)
    loss = 1 - ratio.mean()
    sizes = torch.tensor([float((groups == m).sum()) for m in range(groups.max() + 1)], dtype=torch.float64)
    misled = sizes[None, :, None, None] + (1 - y) * (a - sizes[None, :, None, None])
    own = torch.distributions.Dirichlet(misled.movedim(1, -1))
    none = torch.distributions.Dirichlet(sizes.expand(own.concentration.shape))
    kl = torch.distributions.kl_divergence(own, none).mean()
    annealed = 0.1  # the first of ten rounds
    (gradient,) = torch.autograd.grad(loss + objective.lam * annealed * kl, z)
    return gradient


@pytest.mark.parametrize(("name", "settings"), EVERY)
def test_losses_of_cases_are_restricted_too(name: str, settings: dict[str, Any]) -> None:
    """What another class than the annotated one is called there changes nothing."""
    objective = objective_of(name, settings)
    output, label = example(objective, FIRST)
    losses = objective.restrict(objective.sample_losses, FIRST)
    hidden = torch.where(label == 0, 3, label)  # an organ that nobody outlines there

    assert losses(output.logits, label).shape == (2,)
    assert torch.equal(losses(output.logits, label), losses(output.logits, hidden))


# Voxels to be ignored

COUNTING_BACKGROUND = ("generalised_dice", "evidential", "feduaa_evidential", "clsl")
IGNORING = [(name, settings) for name, settings in EVERY if name not in COUNTING_BACKGROUND]
IGNORING.remove(("dice", {"include_background": True, "reduction": "batch"}))


@pytest.mark.parametrize("annotation", [Annotation((0, 1, 2, 3, 4), True), Annotation((0, 1, 0, 0, 0), True)])
@pytest.mark.parametrize(("name", "settings"), IGNORING)
def test_voxels_to_ignore_get_no_gradient_and_change_no_loss(
    name: str, settings: dict[str, Any], annotation: Annotation
) -> None:
    objective = objective_of(name, settings)
    objective.check_annotation(annotation)
    output, label = example(objective, annotation)
    label[:, :2] = annotation.ignored
    loss = loss_of(objective, output, label, annotation)
    loss.backward()
    other, _ = example(objective, annotation)
    with torch.no_grad():
        other.logits[:, :, :2] = 7 * torch.randn(other.logits[:, :, :2].shape, dtype=torch.float64)

    assert output.logits.grad is not None
    assert bool((output.logits.grad[:, :, :2] == 0).all()) and bool((output.logits.grad != 0).any())
    assert torch.equal(loss, loss_of(objective, other, label, annotation))


def test_dice_sums_skip_voxels_to_ignore() -> None:
    """As if the scan ended where they begin; in two classes, with one output, too."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 1, 6, 4, generator=draw, dtype=torch.float64)
    label = torch.randint(0, 2, (2, 6, 4), generator=draw)
    whole = Dice().function()(logits[:, :, 2:], label[:, 2:])
    label[:, :2] = 2
    restricted = Dice().restrict(Dice().function(), Annotation((0, 1), ignores=True))

    assert float(restricted(logits, label)) == pytest.approx(float(whole), abs=1e-12)


@pytest.mark.parametrize("name", COUNTING_BACKGROUND)
def test_objectives_that_count_background_refuse_voxels_to_ignore(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot leave out those to be ignored"):
        objective_of(name, {}).check_annotation(Annotation((0, 1), ignores=True))


# By hand


def test_the_marginal_cross_entropy_is_minus_the_log_of_the_summed_probability() -> None:
    logits = torch.tensor([0.2, -1.0, 0.7]).log_softmax(0)[None, :, None, None]
    p = logits.exp().flatten().tolist()
    annotation = Annotation((0, 1, 0))
    loss = CrossEntropy().restrict(CrossEntropy().function(), annotation)

    assert float(loss(logits, torch.zeros(1, 1, 1, dtype=torch.long))) == pytest.approx(
        -math.log(p[0] + p[2])
    )
    assert float(loss(logits, torch.ones(1, 1, 1, dtype=torch.long))) == pytest.approx(-math.log(p[1]))


def test_the_marginal_dice_is_that_of_the_annotated_classes_alone() -> None:
    output, label = example(Dice(), FIRST)
    logits = output.logits.detach()
    p, y = logits.softmax(1)[:, 1], (label == 1).double()
    ratios = [(2 * (p[k] * y[k]).sum() + 1e-5) / (p[k].sum() + y[k].sum() + 1e-5) for k in range(2)]

    loss = Dice().restrict(Dice().function(), FIRST)(logits, label)
    assert float(loss) == pytest.approx(1 - float(sum(ratios)) / 2, abs=1e-12)


def test_merged_logits_are_finite_where_one_class_is_certain() -> None:
    logits = torch.tensor([[-1e4, 1e4, -1e4, 0.0, 0.0]])[..., None].requires_grad_()
    merged = merge_logits(logits, FIRST)
    merged.sum().backward()

    assert bool(merged.isfinite().all())
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_half_precision_logits_are_raised_to_float32() -> None:
    output, label = example(DiceBCE(), FIRST)
    loss = DiceBCE().restrict(DiceBCE().function(), FIRST)
    assert loss(output.logits.bfloat16(), label).dtype == torch.float32


def test_the_exclusion_loss_is_the_published_sum_by_hand() -> None:
    """Two voxels, the first outlined; classes 2 and 3 of three organs are not annotated."""
    p = torch.tensor([[[0.1, 0.4], [0.6, 0.3], [0.2, 0.2], [0.1, 0.1]]], dtype=torch.float64)
    label = torch.tensor([[1, 0]])
    dice = [2 * 0.2 / (1 + 0.4), 2 * 0.1 / (1 + 0.2)]
    cross_entropy = [math.log(1.2) / 2, math.log(1.1) / 2]

    found = exclusion_loss(p, label, annotation=Annotation((0, 1, 0, 0)))
    assert float(found) == pytest.approx((sum(dice) + sum(cross_entropy)) / 2, abs=1e-12)


def test_the_exclusion_dice_is_that_of_public_code_for_classes_not_annotated() -> None:
    """There -Dice is 2 TP / (2 TP + FP + FN) of p_n and e_n = 1 - y_background, of each case and class."""
    draw = np.random.default_rng(5)
    p = draw.dirichlet(np.ones(4), size=(2, 6)).transpose(0, 2, 1)
    label = draw.integers(0, 2, size=(2, 6))  # organ 1 alone
    e = 1 - (label == 0).astype(float)
    ratios, logs = [], []
    for case in range(2):
        for n in (2, 3):
            true, wrong = (p[case, n] * e[case]).sum(), (p[case, n] * (1 - e[case])).sum()
            missed = ((1 - p[case, n]) * e[case]).sum()
            ratios.append(2 * true / (2 * true + wrong + missed))
            logs.append((e[case] * np.log(p[case, n] + 1)).mean())

    found = exclusion_loss(torch.from_numpy(p), torch.from_numpy(label), annotation=Annotation((0, 1, 0, 0)))
    assert float(found) == pytest.approx(np.mean(ratios) + np.mean(logs), abs=1e-12)


def test_nothing_is_excluded_where_nothing_is_outlined_or_all_is_annotated() -> None:
    p = torch.full((1, 4, 3), 0.25)
    nothing, all_ = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)

    assert float(exclusion_loss(p, nothing, annotation=Annotation((0, 1, 0, 0)))) == 0
    assert float(exclusion_loss(p, all_, annotation=Annotation((0, 1, 1, 2)))) == 0


def test_the_aggregated_kl_of_single_classes_is_the_ordinary_one() -> None:
    draw = torch.Generator().manual_seed(1)
    evidence = 20 * torch.rand(2, 3, 4, generator=draw, dtype=torch.float64)
    y = torch.eye(3, dtype=torch.float64)[torch.randint(0, 3, (2, 4), generator=draw)].movedim(-1, 1)

    found = aggregated_kl(evidence + 1, y, [1, 1, 1])
    torch.testing.assert_close(found, misleading_kl(evidence, y, one_hot=True), rtol=1e-9, atol=1e-11)


def test_regions_are_refused_where_the_client_outlines_none_of_them() -> None:
    nested = RegionDiceBCE(regions=((1, 2), (2,)))
    with pytest.raises(ConfigError, match="has no region among what this client annotates"):
        nested.check_annotation(Annotation((0, 1, 0)))
    nested.check_annotation(Annotation((0, 1, 1)))
