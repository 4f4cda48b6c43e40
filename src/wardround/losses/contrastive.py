"""Contrastive losses: pure functions of feature vectors.

The last axis holds the vectors. Every function returns the loss of each sample, and the caller
takes the mean; similarities are cosines, computed in float32 or better, whatever autocast says: at
a temperature of 0.07 the rounding of bfloat16 would already change the ranking.

InfoNCE    van den Oord et al., 2018. https://arxiv.org/abs/1807.03748
NT-Xent    Chen et al., ICML 2020 (SimCLR). https://arxiv.org/abs/2002.05709
Local      Chaitanya et al., NeurIPS 2020. https://arxiv.org/abs/2006.10511
SwAV       Caron et al., NeurIPS 2020. https://arxiv.org/abs/2006.09882

>>> views = torch.eye(2)
>>> info_nce(views, views, tau=0.07) < 1e-5
tensor([True, True])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wardround.losses.segmentation import at_least_float32
from wardround.models.base import Output, Segmenter, pad

MOST_OF_A_CLASS = 64  # voxels of one class and image
MIXED = -1  # the label of a voxel whose neighbourhood mixes classes

SHORTEST = 1e-8  # a vector below this length has no direction
REGION = 3  # voxels along each axis of a region (Local CL)
NUM_NEGATIVES = {2: 5, 3: 8}  # near regions as negatives of each one, in 2D and 3D (Local CL)


def scale_to_unit(vectors: Tensor) -> Tensor:
    """Vectors of length one. A zero vector stays zero and receives no gradient."""
    vectors = at_least_float32(vectors)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(length > SHORTEST, vectors / length.clamp_min(SHORTEST), 0.0)


def info_nce(query: Tensor, key: Tensor, tau: float) -> Tensor:
    """-log e^{q·k⁺/τ} / (e^{q·k⁺/τ} + Σ e^{q·k⁻/τ}), one direction: (N, D), (N, D) -> (N,).

    Row n of `key` is the positive of row n of `query`, all other rows are its negatives. One row
    alone has none, and its loss is 0.
    """
    similarity = cosines(query, key) / tau  # (N, N)
    return similarity.logsumexp(dim=1) - similarity.diagonal()


def nt_xent(first: Tensor, second: Tensor, tau: float) -> Tensor:
    """InfoNCE over all 2N views, each with 2N - 2 negatives: (N, D), (N, D) -> (2N,).

    Rows of `first` come first; the mean runs over both directions. N = 1 gives 0.
    """
    views = torch.cat([first, second])
    similarity = cosines(views, views) / tau  # (2N, 2N)
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    positive = torch.cat([similarity.diagonal(len(first)), similarity.diagonal(-len(first))])
    return similarity.masked_fill(itself, -math.inf).logsumexp(dim=1) - positive


def local_contrast(a: Tensor, b: Tensor, negatives: Tensor, tau: float) -> Tensor:
    """Regions of one image against its near regions in both views: (B, R, D) twice -> (B, 2R).

    negatives: (R, N), the negative regions of each. First all a -> b, then all b -> a.
    """
    count = a.shape[1]
    own, across = cosines(a, a) / tau, cosines(a, b) / tau  # (B, R, R)
    other, back = cosines(b, b) / tau, across.transpose(1, 2)
    row = torch.arange(count, device=a.device)[:, None]

    def direction(same: Tensor, cross: Tensor) -> Tensor:
        positive = cross.diagonal(dim1=1, dim2=2)  # s(a_r, b_r)
        rivals = [positive[:, :, None], same[:, row, negatives], cross[:, row, negatives]]
        return torch.cat(rivals, dim=2).logsumexp(dim=2) - positive

    return torch.cat([direction(own, across), direction(other, back)], dim=1)


def sinkhorn_codes(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Codes Q of samples by prototypes, (N, K): every sample sums to 1, prototypes share evenly.

    Sinkhorn's iterations on exp(scores / ε) in logarithms, so that nothing overflows; no gradient.
    """
    log_codes = at_least_float32(scores.detach()) / epsilon
    for _ in range(iterations):
        log_codes = log_codes - log_codes.logsumexp(dim=0, keepdim=True)  # each prototype to 1/K
        log_codes = log_codes - log_codes.logsumexp(dim=1, keepdim=True)  # each sample to 1/N
    return log_codes.exp()  # times N


def swapped_prediction(
    scores_a: Tensor, scores_b: Tensor, codes_a: Tensor, codes_b: Tensor, tau: float
) -> Tensor:
    """½[CE(Q_b, softmax(S_a/τ)) + CE(Q_a, softmax(S_b/τ))] of each sample: (N, K) each -> (N,)."""
    predict_b = -(codes_b * (scores_a / tau).log_softmax(dim=1)).sum(dim=1)
    predict_a = -(codes_a * (scores_b / tau).log_softmax(dim=1)).sum(dim=1)
    return (predict_a + predict_b) / 2


def swav(a: Tensor, b: Tensor, prototypes: Tensor, *, tau: float, epsilon: float, iterations: int) -> Tensor:
    """Each view predicts the other's codes: (N, D), (N, D) and prototypes (K, D) -> (N,)."""
    scores_a, scores_b = cosines(a, prototypes), cosines(b, prototypes)
    codes_a = sinkhorn_codes(scores_a, epsilon, iterations)
    codes_b = sinkhorn_codes(scores_b, epsilon, iterations)
    return swapped_prediction(scores_a, scores_b, codes_a, codes_b, tau)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Every vector of `a` with every one of `b`: (..., N, D), (..., M, D) -> (..., N, M)."""
    with torch.autocast(a.device.type, enabled=False):
        return scale_to_unit(a) @ scale_to_unit(b).transpose(-1, -2)


# Regions of a feature map (Local CL)


def region_places(dimensions: int) -> Tensor:
    """Where regions lie, as shares of the way along each axis: 13 in 2D, 35 in 3D, (R, dimensions).

    A grid of corners, edges and centre, and the middle of every quarter (octant).
    """
    grid = itertools.product((0.0, 0.5, 1.0), repeat=dimensions)
    middles = itertools.product((0.25, 0.75), repeat=dimensions)
    return torch.tensor([*grid, *middles])


@lru_cache(maxsize=32)
def region_negatives(dimensions: int, device: torch.device) -> Tensor:
    """The nearest other regions of each one, 5 in 2D and 8 in 3D: (R, N). Ties go by their order."""
    places = region_places(dimensions)
    squares = (places[:, None] - places[None]).square().sum(dim=2)
    return squares.argsort(dim=1, stable=True)[:, 1 : 1 + NUM_NEGATIVES[dimensions]].to(device)


def take_regions(features: Tensor) -> Tensor:
    """The regions of a map, (B, C, *spatial) -> (B, R, voxels of a region, C).

    A side below 3 voxels gives thinner regions; below 12, regions overlap.
    """
    every = slice(None)
    box: tuple[slice | Tensor, ...] = (
        every,
        every,
        *region_index(tuple(features.shape[2:]), features.device),
    )
    regions = features[box]  # (B, C, R, 3, 3(, 3))
    return regions.flatten(3).permute(0, 2, 3, 1)


@lru_cache(maxsize=32)
def region_index(sides: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """For every axis the voxels each region covers, shaped to span a box together."""
    places, index = region_places(len(sides)), []
    for axis, side in enumerate(sides):
        size = min(REGION, side)
        start = (places[:, axis] * (side - size)).round().long()
        covered = start[:, None] + torch.arange(size)  # (R, size)
        index.append(covered.reshape(len(places), *[size if a == axis else 1 for a in range(len(sides))]))
    return tuple(at.to(device) for at in index)


def mean_over_voxels(features: Tensor) -> Tensor:
    """Global average pooling in float32 or better: (B, C, *spatial) -> (B, C)."""
    return at_least_float32(features).flatten(2).mean(dim=2)


def flatten_voxels(features: Tensor) -> Tensor:
    """Every voxel as a sample: (B, C, *spatial) -> (B · voxels, C)."""
    return features.flatten(2).transpose(1, 2).flatten(0, 1)


# Random voxels: a fixed number of places, so that nothing waits for the host


class Voxels(NamedTuple):
    """A fixed number of draws, some of them empty: features (N, D), label (N,), kept (N,)."""

    features: Tensor
    label: Tensor
    kept: Tensor

    def same_class(self) -> Tensor:
        """Which pairs are of one class, (N, N); a voxel is always its own, so that no row is empty."""
        pairs = (self.label[:, None] == self.label) & self.kept[:, None] & self.kept
        return pairs | torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)


def iterate_levels(model: Segmenter, output: Output, label: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels at the bottleneck and at every decoder stage."""
    assert output.bottleneck is not None
    sides = model.padded_size(label.shape[1:])
    padded = pad(label[:, None], sides)[:, 0]  # coarse maps still have the padding
    for features in (output.bottleneck, *output.stages[:-1]):
        yield features, pure_labels(padded, tuple(features.shape[2:]))
    yield output.stages[-1], pure_labels(label, tuple(label.shape[1:]))


def pure_labels(label: Tensor, size: tuple[int, ...]) -> Tensor:
    """The label on a coarser grid, MIXED where a voxel's block and the ring around it mix classes."""
    stride = [full // coarse for full, coarse in zip(label.shape[1:], size, strict=True)]
    pool = F.max_pool3d if len(size) == 3 else F.max_pool2d
    values = label[:, None].float()
    block = [step + 2 for step in stride]
    highest, lowest = pool(values, block, stride, 1), -pool(-values, block, stride, 1)
    return highest.where(highest == lowest, MIXED)[:, 0].long()


def draw_voxels(
    features: Tensor, label: Tensor, num_classes: int, most: int, draw: torch.Generator
) -> Voxels:
    """Random voxels, an equal number of places for every class and image; unfilled places are not kept."""
    batch, classes = len(label), torch.arange(num_classes, device=label.device)
    flat = label.flatten(1).clamp_max(num_classes - 1)
    share = min(MOST_OF_A_CLASS, max(1, most // (batch * num_classes)), flat.shape[1])
    ticket = torch.rand(flat.shape, generator=draw, device=flat.device)
    tickets = ticket[:, None].where(flat[:, None] == classes[:, None], -1.0)  # (B, classes, voxels)
    best, place = tickets.topk(share, dim=2)  # (B, classes, share)
    kept = best >= 0
    foreground = kept[:, 1:].sum()
    rank = best[:, 0].flatten().argsort(descending=True).argsort().view_as(best[:, 0])
    kept = torch.cat([(kept[:, 0] & (rank < foreground))[:, None], kept[:, 1:]], dim=1)
    case = torch.arange(batch, device=flat.device)[:, None, None]
    chosen = features.flatten(2).transpose(1, 2)[case, place]  # (B, classes, share, D)
    labels = classes[:, None].expand_as(best)
    return Voxels(chosen.flatten(0, 2), labels.flatten(), kept.flatten())
