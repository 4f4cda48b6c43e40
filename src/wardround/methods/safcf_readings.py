"""Other readings of SAFCF's equations, beside the default in safcf.py.

Client: `contrast: guarded` and `literal` (S4-S6), `alpha_mode: share` (S7). Server: a largest weight and
weights for each tensor (S12), and `variational: moment_match`. docs/methods/safcf.md explains the ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.aggregation.weights import normalise
from wardround.errors import ClientError
from wardround.losses.segmentation import at_least_float32
from wardround.params import Params

MOST_ALPHA = 0.99  # of alpha_mode "share"


# Client


def printed_losses(
    h_c: Tensor, h_p: Tensor, beta: Tensor, chi: Tensor, dims: tuple[int, ...], *, guarded: bool, eps: float
) -> Tensor:
    """Eqs. 6, 7 and 9 as printed, (B, C', V) -> (B,).

    guarded: a mean in Eq. 6 instead of the sum, and a divisor of at least 1 in Eq. 9.
    """
    squares = h_c.square()
    distances = (squares - beta.square()).square()
    distance = distances.mean(dims, keepdim=True) if guarded else distances.sum(dims, keepdim=True)
    delta = distance.clamp_min(eps**2).sqrt()  # Eq. 6, max(sqrt(.), eps) with a finite slope
    eta = h_p * squares + (1 - h_p) * delta  # Eq. 7
    log_chi = chi.log().clamp_min(1) if guarded else chi.log()
    return (eta.mean(dim=(1, 2), keepdim=True) / log_chi).flatten()  # Eq. 9


def refuse_small(chi: Tensor) -> None:
    """S4. The one look at a value in a training step; it costs a synchronisation, in `literal` alone."""
    if bool((chi <= 1).any()):
        raise ClientError(
            f"objective cfsl with contrast: literal divides by log chi, but chi = |h_s| is "
            f"{float(chi.min()):.3g}, and up to 1 the loss changes its sign. "
            "Use contrast: margin or guarded."
        )


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
