"""Evidential segmentation losses: pure functions of evidence and targets (FedEvi, section 3.2).

Logits z (B, C, *spatial), one for every class, become evidence e >= 0, and α = e + 1 are the
parameters of a Dirichlet distribution of class probabilities ρ at each voxel. S is the sum of α over
classes. A target y is (B, C, *spatial), as `segmentation.targets` makes it.

Strong evidence is where float32 fails: the KL of a wrong class of logit 17 and more comes out as 0
(E3). So the KL is float64 here and written without differences of large numbers.

>>> alpha = torch.tensor([[[3.0], [1.0]]])
>>> expected_probabilities(alpha)
tensor([[[0.7500],
         [0.2500]]])
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from wardround.losses.segmentation import Reduction, at_least_float32, divide, finish, matching_targets, sums
from wardround.models.instance_norm import MOST_ELEMENTS, TYPES, has_kernels
from wardround.precision import widen, widest

EvidenceKind = Literal["exp", "softplus"]
CapKind = Literal["smooth", "hard"]
DiceMode = Literal["bayes", "plug_in"]

HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)
SERIES_FROM = 64.0  # from here on, three terms of Stirling's series are exact in float64
VOXELS_AT_ONCE = 2**20  # bounds the memory of a volume; a batch of 2D images is one piece or two


def smooth_cap(logits: Tensor, cap: float) -> Tensor:
    """cap - softplus(cap - z): nearly z below the cap, never above it, and never without a slope (E3)."""
    return cap - F.softplus(cap - logits)


def evidence(
    logits: Tensor, kind: EvidenceKind = "exp", cap: float = 10.0, cap_kind: CapKind = "smooth"
) -> Tensor:
    """e = exp(z) with capped logits, or softplus(z), which grows too slowly to need a cap."""
    if kind == "softplus":
        return F.softplus(logits)
    capped = smooth_cap(logits, cap) if cap_kind == "smooth" else logits.clamp(max=cap)
    return capped.exp()


def invert_evidence(
    evidence: Tensor, kind: EvidenceKind = "exp", cap: float = 10.0, cap_kind: CapKind = "smooth"
) -> Tensor:
    """The logits of this evidence, below the cap by what float32 can tell."""
    evidence = evidence.clamp_min(torch.finfo(evidence.dtype).tiny)
    if kind == "softplus":
        return evidence + torch.log(-torch.expm1(-evidence))
    if cap_kind == "hard":
        return evidence.log()
    below = (cap - evidence.log()).clamp_min(torch.finfo(evidence.dtype).eps)  # softplus(cap - z)
    return cap - below - torch.log(-torch.expm1(-below))


def expected_probabilities(alpha: Tensor) -> Tensor:
    """ρ̄ = α / S, Eq. 2."""
    return alpha / alpha.sum(dim=1, keepdim=True)


def second_moment(alpha: Tensor) -> Tensor:
    """E[ρ²] = ρ̄² + ρ̄(1 - ρ̄) / (S + 1); the form α(α+1) / S(S+1) overflows float32 at S = 2e19."""
    total = alpha.sum(dim=1, keepdim=True)
    mean = alpha / total
    return mean.square() + mean * (1 - mean) / (total + 1)


def dirichlet_dice_loss(
    alpha: Tensor,
    target: Tensor,
    *,
    mode: DiceMode = "bayes",
    smooth: float = 1e-5,
    reduction: Reduction = "batch",
    reduce: bool = True,
) -> Tensor:
    """1 - mean over all classes of (2Σyρ̄ + s) / (Σy² + Σm + s), Eq. 9.

    The expectation of the ratio has no closed form; numerator and denominator are averaged each for
    itself. mode: "bayes" takes m = E[ρ²], "plug_in" m = ρ̄², which forgets the variance (E4).
    reduce: False gives each sample's loss, (B,), whatever the reduction.
    """
    mean = expected_probabilities(alpha)
    square = second_moment(alpha) if mode == "bayes" else mean.square()
    overlap, total = sums(reduction if reduce else "per_sample", target * mean, target.square() + square)
    ratio = divide(total - 2 * overlap, total + smooth)  # (B, C), equal to the formula above
    return finish(ratio.mean(dim=1), reduce)


def misleading_kl(evidence: Tensor, target: Tensor, *, one_hot: bool) -> Tensor:
    """KL( Dir(α̃) ‖ Dir(1) ) of each voxel, α̃ = y + (1 - y)α, Eq. 10; float64, (B, *spatial).

    It is 0 where only the true class has evidence. one_hot: whether targets are exactly 0 or 1; two
    such classes leave one parameter a that differs from 1, and the KL is ln a - 1 + 1/a.
    """
    misleading = (1 - target) * evidence  # α̃ - 1, whatever the target
    if one_hot and evidence.shape[1] == 2:
        wrong = widen(misleading.sum(dim=1))  # a - 1: of two numbers one is 0
        return torch.log1p(wrong) - wrong / (1 + wrong)
    return dirichlet_kl(misleading)


def aggregated_kl(alpha: Tensor, target: Tensor, sizes: Sequence[int]) -> Tensor:
    """`misleading_kl` where several classes count as one: KL( Dir(α̃) ‖ Dir(m) ), m the sizes of the groups.

    Sums of a Dirichlet's parts are a Dirichlet of the sums of its parameters, so without evidence α is m, and
    α̃ = m + (1 - y)(α - m). With groups of one class it is `misleading_kl`.
    """
    counts = [torch.full((), size, dtype=widest(alpha.device), device=alpha.device) for size in sizes]
    m = torch.stack(counts).reshape(1, -1, *[1] * (alpha.dim() - 2))
    misled = (1 - widen(target)) * (widen(alpha) - m)
    a = m + misled
    total = a.sum(dim=1)
    gammas = torch.lgamma(total) - torch.lgamma(m.sum()) + (torch.lgamma(m) - torch.lgamma(a)).sum(dim=1)
    return gammas + (misled * (torch.digamma(a) - torch.digamma(total).unsqueeze(1))).sum(dim=1)


def dirichlet_kl(evidence: Tensor) -> Tensor:
    """KL( Dir(1 + e) ‖ Dir(1) ) of each voxel, (B, C, *spatial) -> (B, *spatial); float64."""
    return cast(Tensor, _DirichletKL.apply(evidence))  # type: ignore[no-untyped-call]


class _DirichletKL(torch.autograd.Function):
    """The KL and its slope together, piece by piece: what it keeps for the way back is one map a class.

    The KL is lnΓ(S) - ΣlnΓ(α) - lnΓ(C) + Σ(α - 1)[ψ(α) - ψ(S)]. Its slope is (α - 1)ψ'(α) - (S - C)ψ'(S).
    """

    @staticmethod
    def forward(ctx: Any, evidence: Tensor) -> Tensor:
        voxels = evidence.flatten(2)  # (B, C, V)
        value = voxels.new_empty(len(voxels), voxels.shape[2], dtype=widest(voxels.device))
        slope = torch.empty_like(voxels) if ctx.needs_input_grad[0] else None
        step = max(1, VOXELS_AT_ONCE // len(voxels))
        for start in range(0, voxels.shape[2], step):
            piece = slice(start, start + step)
            alpha = 1 + widen(voxels[..., piece])
            value[:, piece] = _kl(alpha)
            if slope is not None:
                slope[..., piece] = _kl_slope(alpha)
        if slope is not None:
            ctx.save_for_backward(slope.reshape(evidence.shape))
        return value.reshape(len(evidence), *evidence.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return cast(Tensor, gradient.unsqueeze(1).to(slope.dtype) * slope)


def _kl(alpha: Tensor) -> Tensor:
    """The KL without differences of large numbers: (B, C, V) -> (B, V).

    Put lnΓ(x) = (x - ½)ln x - x + ½ln 2π + r(x) and ψ(x) = ln x - 1/2x + q(x). All that grows faster
    than ln S cancels on paper, and what is left is exact for any evidence.
    """
    num_classes = alpha.shape[1]
    total = alpha.sum(dim=1)
    r_alpha, q_alpha = stirling_rests(alpha)
    r_total, q_total = stirling_rests(total)
    logs = (num_classes - 0.5) * total.log() - 0.5 * alpha.log().sum(dim=1)
    per_class = (alpha - 1) * (q_alpha - 0.5 / alpha) - r_alpha
    of_total = (total - num_classes) * (q_total - 0.5 / total) - r_total
    constant = (num_classes - 1) * HALF_LOG_2_PI + math.lgamma(num_classes)
    return logs + per_class.sum(dim=1) - of_total - constant


def _kl_slope(alpha: Tensor) -> Tensor:
    total = alpha.sum(dim=1, keepdim=True)
    per_class = (alpha - 1) * torch.polygamma(1, alpha)
    return per_class - (total - alpha.shape[1]) * torch.polygamma(1, total)


def stirling_rests(x: Tensor) -> tuple[Tensor, Tensor]:
    """r(x) and q(x), what Stirling's formulas leave of lnΓ(x) and ψ(x)."""
    log, inverse = x.log(), 1 / x
    square = inverse.square()
    near_r = torch.lgamma(x) - ((x - 0.5) * log - x + HALF_LOG_2_PI)
    near_q = torch.digamma(x) - log + 0.5 * inverse
    far_r = inverse * (1 / 12 - square * (1 / 360 - square / 1260))
    far_q = -square * (1 / 12 - square * (1 / 120 - square / 252))
    far = x >= SERIES_FROM
    return torch.where(far, far_r, near_r), torch.where(far, far_q, near_q)


# Two classes on a GPU: both terms from sums that one kernel of our own forms, instead of eighty of PyTorch's


def two_class_terms(
    logits: Tensor, label: Tensor, *, cap: float, smooth: float, reduction: Reduction, reduce: bool = True
) -> tuple[Tensor, Tensor]:
    """The Dice (`dirichlet_dice_loss`, bayes) and the mean KL (`misleading_kl`) of integer labels."""
    found = two_class_sums(logits, label, cap)  # (5, B)
    shares, kl = found[:4], found[4] / label[0].numel()
    if reduce and reduction == "batch":
        shares = shares.sum(dim=1, keepdim=True)
    overlap, total = shares[:2], shares[2:]
    dice = divide(total - 2 * overlap, total + smooth).mean(dim=0)  # (B,), or (1,)
    return finish(dice, reduce).float(), finish(kl, reduce).float()


def fits_kernels(logits: Tensor, label: Tensor) -> bool:
    """Whether our kernels can take this batch; compiled code is inductor's."""
    fits = (
        logits.is_cuda and logits.dtype in TYPES and logits.shape[1] == 2 and logits.numel() <= MOST_ELEMENTS
    )
    whole = label.shape == (len(logits), *logits.shape[2:]) and not label.is_floating_point()
    return fits and whole and label.numel() > 0 and not torch.compiler.is_compiling() and has_kernels()


def two_class_sums(logits: Tensor, label: Tensor, cap: float) -> Tensor:
    """Of each case: Σyρ̄ of both classes, Σ(y² + E[ρ²]) of both, and the KL; (5, B) float64."""
    return cast(Tensor, _TwoClassSums.apply(logits, label, cap))  # type: ignore[no-untyped-call]


def sums_by_definition(logits: Tensor, label: Tensor, cap: float) -> Tensor:
    """The same in PyTorch, for any device."""
    logits = at_least_float32(logits)
    y, e = matching_targets(logits, label), evidence(logits, cap=cap)
    overlap, total = sums("per_sample", y * expected_probabilities(e + 1), y.square() + second_moment(e + 1))
    kl = misleading_kl(e, y, one_hot=True).flatten(1).sum(dim=1, keepdim=True)
    return torch.cat([overlap, total, kl], dim=1).T


@cache
def kernels() -> Any:
    """Imported on first use: Triton is there on GPU machines only."""
    return importlib.import_module("wardround.losses.evidential_kernels")


class _TwoClassSums(torch.autograd.Function):
    """The sums by our kernels; where a second derivative is wanted, the first by the definition."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(logits, label)
        ctx.cap = cap
        return cast(Tensor, kernels().forward(logits, label, cap))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = sums_by_definition(logits, label, ctx.cap)
            return *torch.autograd.grad(found, [logits], gradient, create_graph=True), None, None
        return kernels().backward(logits, label, gradient, ctx.cap), None, None
