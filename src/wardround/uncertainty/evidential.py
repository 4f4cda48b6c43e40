"""What a Dirichlet distribution does not know: total, epistemic and aleatoric uncertainty.

α (B, C, *spatial) are the Dirichlet parameters of each voxel, S their sum, ρ̄ = α / S (FedEvi, Eqs. 1-5).
Aleatoric uncertainty is the entropy to expect of the class probabilities: what the scan leaves open.
Epistemic uncertainty is the rest of the total: what more training cases could settle.

All in float64: at logit 15, float32 is wrong by a factor of five (E3).

>>> flat = decompose(torch.ones(1, 2, 1))
>>> [round(part.item(), 4) for part in (flat.total, flat.epistemic, flat.aleatoric)]
[0.6931, 0.1931, 0.5]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VOXELS_AT_ONCE = 2**20  # bounds the memory of a volume; a batch of 2D images is one piece


@dataclass(frozen=True)
class Uncertainty:
    """Maps (B, *spatial) in nats, float64; total = epistemic + aleatoric (Eq. 3)."""

    total: Tensor
    epistemic: Tensor
    aleatoric: Tensor


def decompose(alpha: Tensor, *, voxels_at_once: int = VOXELS_AT_ONCE) -> Uncertainty:
    """Uncertainty of every voxel, worked out piece by piece (E10)."""
    shape = (alpha.shape[0], *alpha.shape[2:])
    voxels = alpha.flatten(2)  # (B, C, *spatial) -> (B, C, V)
    step = max(1, voxels_at_once // len(voxels))
    pieces = [entropies(voxels[..., start : start + step]) for start in range(0, voxels.shape[2], step)]
    total, aleatoric = (torch.cat(maps, dim=1).reshape(shape) for maps in zip(*pieces, strict=True))
    epistemic = (total - aleatoric).clamp_min(0)  # Eq. 4 with the sign of Eq. 3 (E1)
    return Uncertainty(total, epistemic, aleatoric)


def entropies(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy of the expected probabilities, and the expected entropy; (B, C, V) -> (B, V) each."""
    alpha = alpha.double()
    total = alpha.sum(dim=1, keepdim=True)
    mean = alpha / total  # Eq. 2
    of_mean = -(mean * mean.log()).sum(dim=1)  # Eq. 3
    expected = (mean * (torch.digamma(total + 1) - torch.digamma(alpha + 1))).sum(dim=1)  # Eq. 5
    return of_mean, expected


def case_means(values: Tensor) -> Tensor:
    """One number a case, the mean over its voxels (E2): (B, *spatial) -> (B,)."""
    return values.flatten(1).mean(dim=1)
