"""Other readings of SAFCF's equations, beside the default in safcf.py.

Client: `contrast: guarded` and `literal` (S4-S6), `divisor`, `alpha_mode: share` (S7). Server: a largest
weight and weights for each tensor (S12), and `variational: moment_match`. docs/methods/safcf.md
explains the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.aggregation.weights import normalise
from wardround.errors import ClientError, ConfigError
from wardround.losses.segmentation import at_least_float32
from wardround.params import Params

Divisor = Literal["log_chi", "chi", "none"]  # Eq. 9 and its ablations

MOST_ALPHA = 0.99  # of alpha_mode "share"


# Client


def printed_eta(
    h_c: Tensor, h_p: Tensor, beta: Tensor, dims: tuple[int, ...], *, guarded: bool, eps: float
) -> Tensor:
    """The mean of Eq. 7 over each case, (B, C', V) -> (B, 1, 1). guarded: a mean in Eq. 6, not the sum."""
    squares = h_c.square()
    distances = (squares - beta.square()).square()
    distance = distances.mean(dims, keepdim=True) if guarded else distances.sum(dims, keepdim=True)
    delta = distance.clamp_min(eps**2).sqrt()  # Eq. 6, max(sqrt(.), eps) with a finite slope
    eta = h_p * squares + (1 - h_p) * delta  # Eq. 7
    return eta.mean(dim=(1, 2), keepdim=True)


def divide(eta: Tensor, chi: Tensor, divisor: Divisor, *, guarded: bool) -> Tensor:
    """Eq. 9 without alpha, (B, 1, 1) -> (B,). guarded: a divisor of at least 1."""
    if divisor == "none":
        return eta.flatten()
    scale = chi.log() if divisor == "log_chi" else chi
    return (eta / (scale.clamp_min(1) if guarded else scale)).flatten()


def refuse_divisor(contrast: str, divisor: Divisor) -> None:
    """The default form has no chi: a divisor there would change nothing."""
    if divisor != "log_chi" and contrast == "margin":
        raise ConfigError(
            f"objective.divisor is {divisor}, but contrast: margin does not divide by chi. "
            "Set objective.contrast to guarded or literal, or leave objective.divisor out."
        )


def refuse_small(chi: Tensor) -> None:
    """S4. The one look at a value in a training step; it costs a synchronisation, in `literal` alone."""
    if bool((chi <= 1).any()):
        raise ClientError(
            f"objective cfsl with contrast: literal divides by log chi, but chi = |h_s| is "
            f"{float(chi.min()):.3g}, and up to 1 the loss changes its sign. "
            "Use contrast: margin or guarded."
        )


def list_warnings(lam: float, dice_literal: bool, norm: str | None) -> list[str]:
    """What a user of CFSL should know of these settings: S1, S8, BatchNorm."""
    found = []
    if dice_literal:
        found.append(
            "objective.dice_literal minimises Eq. 13 as printed, so training makes the overlap smaller."
        )
    if lam == 1:
        found.append(
            "objective.lam is 1: the contrastive term alone cannot train the decoder. Use less than 1."
        )
    if lam and norm == "batch":
        found.append(
            "objective cfsl compares features of the trained network with those of frozen ones, and "
            "BatchNorm makes them differ even where the weights are equal. "
            "Prefer model.norm instance or group."
        )
    return found


def alpha_share(h_c: Tensor, h_p: Tensor, h_s: Tensor, eps: float = 1e-8) -> Tensor:
    """alpha_mode "share" (S7): the server features' part of the three means, about 1/3, no recursion."""
    m_c, m_p, m_s = (at_least_float32(h).mean() for h in (h_c, h_p, h_s))  # Eq. 10
    return (m_s / (m_s + m_c + m_p + eps)).clamp(0, MOST_ALPHA)


# Server


def cap_weights(weights: Sequence[float], limit: float) -> list[float]:
    """Weights of at most `limit` (or 1/K, if that is more); what is cut goes to the others in proportion.

    >>> cap_weights([0.75, 0.125, 0.125], 0.5)
    [0.5, 0.25, 0.25]
    """
    limit = max(limit, 1 / len(weights))
    current, full = list(weights), set[int]()
    while any(weight > limit * (1 + 1e-12) for weight in current):
        full |= {index for index, weight in enumerate(current) if weight > limit}
        open_ones = [index for index in range(len(weights)) if index not in full]
        shares = normalise([weights[index] for index in open_ones])
        room = 1 - limit * len(full)
        current = [limit] * len(weights)
        for index, share in zip(open_ones, shares, strict=True):
            current[index] = room * share
    return current


def overall_weights(by_tensor: Mapping[str, Sequence[float]], counts: Tensor) -> list[float]:
    """`uncertainty: per_tensor`: the mean of the tensors' weights over all parameters, one a client."""
    all_weights = torch.tensor(list(by_tensor.values()), dtype=torch.float64)  # (tensors, K)
    return normalise((counts @ all_weights).tolist())


def match_rho(items: Sequence[Params], weights: Sequence[float], mu: str, rho: str) -> Tensor:
    """rho of the Gaussian with the mixture's variance, Σ a_i (sigma_i² + (mu_i - mu-)²)."""
    centre = torch.zeros_like(items[0][mu], dtype=torch.float64)
    for item, weight in zip(items, weights, strict=True):
        centre.add_(item[mu].to(centre), alpha=weight)
    variance = torch.zeros_like(centre)
    for item, weight in zip(items, weights, strict=True):
        sigma = F.softplus(item[rho].to(centre))
        variance.add_(sigma.square() + (item[mu].to(centre) - centre).square(), alpha=weight)
    sigma = variance.sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    inverse = sigma + torch.log(-torch.expm1(-sigma))  # softplus backwards
    return inverse.to(items[0][rho].dtype)
