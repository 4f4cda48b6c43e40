"""Evidential losses: golden vectors, independent implementations, extremes."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from helpers import vectors
from torch.distributions import Dirichlet, kl_divergence

from wardround.losses import evidential
from wardround.losses.evidential import (
    dirichlet_dice_loss,
    dirichlet_kl,
    evidence,
    expected_probabilities,
    misleading_kl,
    second_moment,
    smooth_cap,
    sums_by_definition,
    two_class_sums,
    two_class_terms,
)
from wardround.methods.fedevi import Evidential

GOLDEN = vectors("fedevi")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # the file asks for 1e-6


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def golden_pixels(name):
    """α and the one-hot target of a golden case, (1, C, pixels), and what is expected."""
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    logits = tensor(inputs["logits"]).T[None]
    target = F.one_hot(torch.tensor(inputs["labels"]), logits.shape[1]).T[None].double()
    return logits.exp() + 1, target, expected


def example(num_classes=3, batch=2, size=(4, 5), scale=2.0, seed=0):
    """Evidence and a one-hot target that holds every class."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(batch, num_classes, *size, generator=generator, dtype=torch.float64)
    label = torch.randint(0, num_classes, (batch, *size), generator=generator)
    return logits.exp(), F.one_hot(label, num_classes).movedim(-1, 1).double()


# Golden vectors


@pytest.mark.parametrize(
    ("mode", "smooth", "field"),
    [("bayes", 0.0, "with_variance"), ("plug_in", 0.0, "plug_in"), ("plug_in", 1e-5, "plug_in_smooth_1e_5")],
)
def test_dice_gives_the_golden_numbers(mode, smooth, field):
    alpha, target, expected = golden_pixels("dice_bayes_risk")
    loss = dirichlet_dice_loss(alpha, target, mode=mode, smooth=smooth)
    assert loss.item() == pytest.approx(expected[field], abs=1e-11)


def test_the_second_moment_gives_the_golden_numbers():
    alpha, _, expected = golden_pixels("dice_bayes_risk")
    assert torch.allclose(second_moment(alpha)[0].T, tensor(expected["second_moment"]), **TOLERANCE)


@pytest.mark.parametrize("case", ["uncertainty_binary", "uncertainty_three_class"])
def test_expected_probabilities_are_the_golden_ones(case):
    inputs, expected = GOLDEN[case]["inputs"], GOLDEN[case]["expected"]
    alpha = evidence(tensor(inputs["logits"]).T[None], cap=80, cap_kind="hard") + 1
    assert torch.allclose(alpha[0].T, tensor(expected["alpha"]), **TOLERANCE)
    assert torch.allclose(expected_probabilities(alpha)[0].T, tensor(expected["rho_bar"]), **TOLERANCE)


@pytest.mark.parametrize("one_hot", [True, False])
def test_the_kl_gives_the_golden_numbers(one_hot):
    alpha, target, expected = golden_pixels("kl_regulariser")
    kl = misleading_kl(alpha - 1, target, one_hot=one_hot)
    assert torch.allclose(kl[0], tensor(expected["kl_per_pixel"]), **TOLERANCE)
    assert kl.mean().item() == pytest.approx(expected["L_reg_mean"], abs=1e-11)
    tilde = target + (1 - target) * alpha
    assert torch.allclose(tilde[0].T, tensor(expected["alpha_tilde"]), **TOLERANCE)


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kl_of_strong_evidence_gives_the_golden_number_also_from_float32(one_hot, dtype):
    case = GOLDEN["kl_large_evidence"]
    wrong = torch.tensor([[[case["inputs"]["alpha_wrong"] - 1], [0.0]]], dtype=dtype)
    kl = misleading_kl(wrong, torch.tensor([[[0.0], [1.0]]], dtype=dtype), one_hot=one_hot)
    assert kl.item() == pytest.approx(case["expected"]["kl"], rel=1e-7)


# Evidence


def test_the_smooth_cap_is_nearly_the_identity_below_and_never_above():
    logits = torch.linspace(-100, 100, 2001, dtype=torch.float64)
    capped = smooth_cap(logits, 10.0)
    assert (capped <= 10).all()
    assert (capped.diff() >= 0).all()
    low = logits < 0
    assert torch.allclose(capped[low], logits[low], atol=5e-5)


def test_the_smooth_cap_still_has_a_slope_above_the_cap_and_the_hard_one_has_none():
    logits = torch.tensor([15.0], dtype=torch.float64, requires_grad=True)
    (smooth,) = torch.autograd.grad(evidence(logits, cap_kind="smooth").sum(), logits)
    (hard,) = torch.autograd.grad(evidence(logits, cap_kind="hard").sum(), logits)
    assert smooth.item() > 0
    assert hard.item() == 0


def test_softplus_evidence_has_no_cap():
    assert evidence(torch.tensor([50.0]), kind="softplus").item() == pytest.approx(50.0)


@pytest.mark.parametrize("cap_kind", ["smooth", "hard"])
def test_evidence_is_finite_and_at_most_exp_of_the_cap(cap_kind):
    e = evidence(torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]), cap=10, cap_kind=cap_kind)
    assert torch.isfinite(e).all()
    assert e.max() <= math.exp(10) * (1 + 1e-6)


# Dice


def test_the_second_moment_equals_its_textbook_form():
    e, _ = example()
    alpha = e + 1
    total = alpha.sum(dim=1, keepdim=True)
    assert torch.allclose(second_moment(alpha), alpha * (alpha + 1) / (total * (total + 1)), **TOLERANCE)


def test_the_bayes_dice_is_the_mean_dice_of_sampled_probabilities():
    e, target = example(num_classes=2, batch=1, size=(16, 16), scale=1.0)
    alpha = e + 1
    torch.manual_seed(0)
    rho = Dirichlet(alpha.movedim(1, -1)).sample((400,)).movedim(-1, 2)  # (draws, B, C, H, W)
    overlap = (target * rho).sum(dim=(1, 3, 4))
    sampled = (1 - 2 * overlap / (target.square() + rho.square()).sum(dim=(1, 3, 4))).mean(dim=1)
    bayes = dirichlet_dice_loss(alpha, target, smooth=0.0)
    plug_in = dirichlet_dice_loss(alpha, target, smooth=0.0, mode="plug_in")
    assert bayes.item() == pytest.approx(sampled.mean().item(), abs=2e-3)
    assert plug_in.item() < bayes.item() - 0.02  # lacks the variance


def test_batch_pooling_sums_before_it_divides():
    e, target = example()
    pooled = dirichlet_dice_loss(e + 1, target, reduction="batch")
    side_by_side = dirichlet_dice_loss(
        torch.cat(list(e + 1), dim=-1)[None], torch.cat(list(target), dim=-1)[None]
    )
    assert pooled.item() == pytest.approx(side_by_side.item(), abs=1e-12)


@pytest.mark.parametrize("reduction", ["batch", "per_sample"])
def test_single_losses_do_not_depend_on_the_reduction(reduction):
    e, target = example()
    single = dirichlet_dice_loss(e + 1, target, reduction=reduction, reduce=False)
    assert single.shape == (2,)
    mean = dirichlet_dice_loss(e + 1, target, reduction="per_sample")
    assert single.mean().item() == pytest.approx(mean.item(), abs=1e-12)


def test_an_absent_class_costs_nothing_when_it_has_no_probability():
    alpha = torch.tensor([[[1e12, 1e12], [1.0, 1.0]]], dtype=torch.float64)
    target = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    assert dirichlet_dice_loss(alpha, target).item() == pytest.approx(0, abs=1e-5)


# KL


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_the_kl_equals_that_of_torch_distributions(num_classes):
    e, _ = example(num_classes)
    alpha = (1 + e).movedim(1, -1)
    expected = kl_divergence(Dirichlet(alpha), Dirichlet(torch.ones_like(alpha)))
    assert torch.allclose(dirichlet_kl(e), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "logits", [(80, 80, -3), (50, 20, 0), (28, 28, 28), (4.1, 4.2, 4.15), (2, 2.5, 3), (-30, -30, 1)]
)
def test_the_kl_is_exact_for_any_evidence(logits):
    e = tensor(logits).exp()
    with mpmath.workdps(80):
        alpha = [1 + mpmath.mpf(value) for value in e.tolist()]
        total = sum(alpha)
        exact = mpmath.loggamma(total) - sum(map(mpmath.loggamma, alpha)) - mpmath.loggamma(3)
        exact += sum((a - 1) * (mpmath.digamma(a) - mpmath.digamma(total)) for a in alpha)
    assert dirichlet_kl(e.reshape(1, 3, 1)).item() == pytest.approx(float(exact), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("logit", [-40, -5, 0, 3, 10, 17, 28, 50, 80])
def test_the_closed_form_of_two_classes_equals_the_general_one(logit):
    e = tensor([[[0.7], [float(logit)]]]).exp()
    target = tensor([[[1.0], [0.0]]])
    general = misleading_kl(e, target, one_hot=False)
    assert misleading_kl(e, target, one_hot=True).item() == pytest.approx(
        general.item(), rel=1e-12, abs=2e-15
    )


def test_two_soft_classes_take_the_general_form():
    e, _ = example(num_classes=2)
    soft = torch.full_like(e, 0.5)
    alpha = (soft + (1 - soft) * (e + 1)).movedim(1, -1)
    expected = kl_divergence(Dirichlet(alpha), Dirichlet(torch.ones_like(alpha)))
    assert torch.allclose(misleading_kl(e, soft, one_hot=False), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_evidence_for_the_true_class_is_free_and_for_a_wrong_one_is_not(num_classes):
    _, target = example(num_classes)
    assert misleading_kl(100 * target, target, one_hot=True).abs().max() < 1e-12
    assert (misleading_kl(100 * (1 - target), target, one_hot=True) > 1).all()


def test_the_kl_in_pieces_equals_the_whole(monkeypatch):
    e, _ = example()
    e.requires_grad_()
    whole = dirichlet_kl(e)
    (slope,) = torch.autograd.grad(whole.sum(), e)
    monkeypatch.setattr(evidential, "VOXELS_AT_ONCE", 7)
    pieces = dirichlet_kl(e)
    assert torch.equal(pieces, whole)
    assert torch.equal(torch.autograd.grad(pieces.sum(), e)[0], slope)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("one_hot", [True, False])
def test_the_kl_has_the_right_gradient(num_classes, one_hot):
    e, target = example(num_classes, batch=1, size=(2, 3))
    target = target if one_hot else 0.8 * target + 0.1
    assert torch.autograd.gradcheck(
        lambda value: misleading_kl(value, target, one_hot=one_hot), e.requires_grad_()
    )


@pytest.mark.parametrize("mode", ["bayes", "plug_in"])
def test_the_dice_has_the_right_gradient(mode):
    e, target = example(batch=2, size=(2, 3))
    assert torch.autograd.gradcheck(
        lambda value: dirichlet_dice_loss(value + 1, target, mode=mode), e.requires_grad_()
    )


def test_the_slope_of_the_kl_stays_finite_at_the_largest_evidence():
    e = torch.full((1, 3, 1), math.exp(80), dtype=torch.float32, requires_grad=True)
    dirichlet_kl(e).sum().backward()
    assert torch.isfinite(e.grad).all()


# Two classes on a GPU


def two_classes(device="cpu", kind=torch.float32, layout=torch.contiguous_format, shape=(3, 2, 37, 41)):
    draw = torch.Generator().manual_seed(4)
    logits = (6 * torch.randn(shape, generator=draw)).to(device, kind)
    label = torch.randint(2, (shape[0], *shape[2:]), generator=draw).to(device)
    return logits.contiguous(memory_format=layout).requires_grad_(), label


@pytest.mark.parametrize("reduction", ["batch", "per_sample"])
@pytest.mark.parametrize("reduce", [True, False])
def test_the_loss_of_two_classes_follows_from_five_sums(reduction, reduce, monkeypatch):
    monkeypatch.setattr(evidential, "two_class_sums", sums_by_definition)
    logits, label = two_classes()
    expected = Evidential(reduction=reduction).terms(logits, label, reduce=reduce)
    found = two_class_terms(logits, label, cap=10.0, smooth=1e-5, reduction=reduction, reduce=reduce)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (torch.contiguous_format, (3, 2, 37, 41)),
        (torch.channels_last, (8, 2, 160, 160)),
        (torch.channels_last_3d, (2, 2, 9, 17, 33)),
    ],
)
def test_the_kernels_give_the_sums_and_their_gradient(kind, layout, shape):
    logits, label = two_classes("cuda", kind, layout, shape)
    assert evidential.fits_kernels(logits, label)
    weights = torch.randn(5, len(logits), dtype=torch.float64, device="cuda")
    exact = logits.detach().double().requires_grad_()
    theirs = sums_by_definition(exact, label, 10.0)
    (expected,) = torch.autograd.grad((theirs * weights).sum(), exact)
    ours = two_class_sums(logits, label, 10.0)
    (found,) = torch.autograd.grad((ours * weights).sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert found.dtype == kind and found.stride() == logits.stride()
    limit = 2e-2 if kind == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit * float(expected.abs().max()))
    assert torch.equal(two_class_sums(logits, label, 10.0), ours)


@pytest.mark.gpu
def test_the_kernels_of_the_sums_have_a_second_derivative():
    found = []
    for kind in (torch.float32, torch.float64):
        logits, label = two_classes("cuda", shape=(2, 2, 5, 6))
        at = logits.detach().to(kind).requires_grad_()
        value = sum(Evidential().terms(at, label))
        (slope,) = torch.autograd.grad(value, at, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), at)[0].double())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
