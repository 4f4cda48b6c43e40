"""Triton kernels of `instance_norm.py`: maps (B, C, *spatial) that lie in memory as (B, voxels, C).

A program sees one share of a case's voxels and a block of its channels. Forward: one kernel takes the
moments of every share, the next puts them together and writes the map. Backward likewise. Sums of shares
are kept and added in order, without atomics, so the same input gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # about eight for each multiprocessor of a large GPU
MOST_SHARES = 64  # every program reads the moments of all of them
TILE = 4096  # elements a program has in hand


@dataclass(frozen=True)
class KernelPlan:
    """How a map is cut up: shares of `share` voxels, blocks of `columns` channels, tiles of `rows`."""

    grid: tuple[int, int, int]
    sizes: tuple[int, int, int, int]  # voxels, channels, share, shares
    tiles: dict[str, int]

    @property
    def moments(self) -> tuple[int, int, int, int]:
        """Two numbers for every case, share and channel."""
        return 2, self.grid[2], self.grid[0], self.sizes[1]


@cache
def plan(cases: int, channels: int, voxels: int) -> KernelPlan:
    columns = min(triton.next_power_of_2(channels), 64)
    rows = TILE // columns
    blocks = triton.cdiv(channels, columns)
    most = min(MOST_SHARES, triton.cdiv(voxels, rows))
    shares = max(1, min(most, triton.cdiv(PROGRAMS, cases * blocks)))
    share = triton.cdiv(triton.cdiv(voxels, shares), rows) * rows
    shares = triton.cdiv(voxels, share)
    tiles = {"SHARES": triton.next_power_of_2(shares), "ROWS": rows, "COLUMNS": columns}
    return KernelPlan((shares, blocks, cases), (voxels, channels, share, shares), tiles)


def plan_of(x: Tensor) -> KernelPlan:
    cases, channels = x.shape[:2]
    return plan(cases, channels, x.numel() // (cases * channels))


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, slope: float | None
) -> tuple[Tensor, Tensor]:
    """The normalised map, and each case's and channel's mean and 1 / sqrt(var + eps)."""
    how = plan_of(x)
    moments = torch.empty(how.moments, dtype=torch.float32, device=x.device)
    of_cases = torch.empty((2, how.grid[2], how.sizes[1]), dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    learns, relu = weight is not None, slope is not None
    with torch.cuda.device_of(x):
        _moments[how.grid](x, moments, *how.sizes, **how.tiles)
        _apply[how.grid](
            x, moments, weight if learns else x, bias if learns else x, y, of_cases, eps, slope or 0.0,
            *how.sizes, LEARNS=learns, RELU=relu, **how.tiles,
        )  # fmt: skip
    return y, of_cases


def backward(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    of_cases: Tensor,
    slope: float | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the map, the scale and the shift."""
    how = plan_of(x)
    sums = torch.empty(how.moments, dtype=torch.float32, device=x.device)
    result = torch.empty_like(x)
    learns, relu = weight is not None, slope is not None
    inputs = (x, gradient, weight if learns else x, bias if learns else x, of_cases, sums)
    with torch.cuda.device_of(x):
        _sums_back[how.grid](*inputs, slope or 0.0, *how.sizes, LEARNS=learns, RELU=relu, **how.tiles)
        _apply_back[how.grid](
            *inputs, result, slope or 0.0, *how.sizes, LEARNS=learns, RELU=relu, **how.tiles
        )
    if weight is None or bias is None:
        return result, None, None
    of_bias, of_weight = sums.sum(dim=(1, 2)).unbind()
    return result, of_weight.to(weight.dtype), of_bias.to(bias.dtype)


@triton.jit
def _moments(
    x,
    moments,
    voxels,
    channels,
    share,
    shares,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean and squared deviations from it, tile by tile (Chan, Golub and LeVeque)."""
    part, case = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = x + case.to(tl.int64) * voxels * channels
    mean = tl.zeros([COLUMNS], dtype=tl.float32)
    square = tl.zeros([COLUMNS], dtype=tl.float32)
    count = 0.0
    last = tl.minimum((part + 1) * share, voxels)
    for first in range(part * share, last, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (row < last)[:, None] & (column < channels)[None, :]
        value = tl.load(here + row[:, None] * channels + column[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        number = tl.minimum(last - first, ROWS).to(tl.float32)
        middle = tl.sum(value, 0) / number
        away = tl.where(there, value - middle[None, :], 0.0)
        step = middle - mean
        both = count + number
        square += tl.sum(away * away, 0) + step * step * (count * number / both)
        mean += step * (number / both)
        count = both
    place = (case * shares + part) * channels + column
    tl.store(moments + place, mean, mask=column < channels)
    tl.store(moments + tl.num_programs(2) * shares * channels + place, square, mask=column < channels)


@triton.jit
def _scale_and_shift(rate, weight, bias, column, channels, LEARNS: tl.constexpr):
    """What a value less its mean is multiplied by, and what comes on top."""
    scale, shift = rate, tl.zeros_like(rate)
    if LEARNS:
        known = column < channels
        scale = rate * tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit
def _apply(
    x,
    moments,
    weight,
    bias,
    y,
    of_cases,
    eps,
    slope,
    voxels,
    channels,
    share,
    shares,
    LEARNS: tl.constexpr,
    RELU: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Put the shares' moments together and write this share of the map."""
    part, case = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    other = tl.arange(0, SHARES)
    number = tl.minimum(tl.maximum(voxels - other * share, 0), share).to(tl.float32)[:, None]
    place = (case * shares + other)[:, None] * channels + column[None, :]
    there = (other < shares)[:, None] & known[None, :]
    middle = tl.load(moments + place, mask=there, other=0.0)
    mean = tl.sum(middle * number, 0) / voxels
    away = middle - mean[None, :]
    second = moments + tl.num_programs(2) * shares * channels
    square = tl.load(second + place, mask=there, other=0.0) + away * away * number
    rate = 1.0 / tl.sqrt(tl.sum(square, 0) / voxels + eps)
    if part == 0:
        tl.store(of_cases + case * channels + column, mean, mask=known)
        tl.store(of_cases + (tl.num_programs(2) + case) * channels + column, rate, mask=known)
    scale, shift = _scale_and_shift(rate, weight, bias, column, channels, LEARNS)
    start = case.to(tl.int64) * voxels * channels
    last = tl.minimum((part + 1) * share, voxels)
    for first in range(part * share, last, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & known[None, :]
        offset = row[:, None] * channels + column[None, :]
        value = tl.load(x + start + offset, mask=inside, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        if RELU:
            value = tl.where(value > 0, value, value * slope)
        tl.store(y + start + offset, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _mean_and_rate(of_cases, case, column, channels):
    """What the forward pass found of a case."""
    mean = of_cases + case * channels + column
    rate = mean + tl.num_programs(2) * channels
    known = column < channels
    return tl.load(mean, mask=known, other=0.0), tl.load(rate, mask=known, other=0.0)


@triton.jit
def _sums_back(
    x,
    gradient,
    weight,
    bias,
    of_cases,
    sums,
    slope,
    voxels,
    channels,
    share,
    shares,
    LEARNS: tl.constexpr,
    RELU: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums over a share of the gradient behind the ReLU, and of it times the normalised value."""
    part, case = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    mean, rate = _mean_and_rate(of_cases, case, column, channels)
    scale, shift = _scale_and_shift(rate, weight, bias, column, channels, LEARNS)
    start = case.to(tl.int64) * voxels * channels
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    product = tl.zeros([COLUMNS], dtype=tl.float32)
    last = tl.minimum((part + 1) * share, voxels)
    for first in range(part * share, last, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & known[None, :]
        offset = row[:, None] * channels + column[None, :]
        away = tl.load(x + start + offset, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        slopes = tl.load(gradient + start + offset, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            slopes = tl.where(away * scale[None, :] + shift[None, :] > 0, slopes, slopes * slope)
        total += tl.sum(slopes, 0)
        product += tl.sum(slopes * away, 0)
    place = (case * shares + part) * channels + column
    tl.store(sums + place, total, mask=known)
    tl.store(sums + tl.num_programs(2) * shares * channels + place, product * rate, mask=known)


@triton.jit
def _apply_back(
    x,
    gradient,
    weight,
    bias,
    of_cases,
    sums,
    result,
    slope,
    voxels,
    channels,
    share,
    shares,
    LEARNS: tl.constexpr,
    RELU: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """scale (g - mean g - x̂ mean g x̂), x̂ the normalised value and g the gradient behind the ReLU."""
    part, case = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    other = tl.arange(0, SHARES)
    place = (case * shares + other)[:, None] * channels + column[None, :]
    there = (other < shares)[:, None] & known[None, :]
    total = tl.sum(tl.load(sums + place, mask=there, other=0.0), 0) / voxels
    second = sums + tl.num_programs(2) * shares * channels
    product = tl.sum(tl.load(second + place, mask=there, other=0.0), 0) / voxels
    mean, rate = _mean_and_rate(of_cases, case, column, channels)
    scale, shift = _scale_and_shift(rate, weight, bias, column, channels, LEARNS)
    pull = rate * product
    start = case.to(tl.int64) * voxels * channels
    last = tl.minimum((part + 1) * share, voxels)
    for first in range(part * share, last, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & known[None, :]
        offset = row[:, None] * channels + column[None, :]
        away = tl.load(x + start + offset, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        slopes = tl.load(gradient + start + offset, mask=inside, other=0.0).to(tl.float32)
        if RELU:
            slopes = tl.where(away * scale[None, :] + shift[None, :] > 0, slopes, slopes * slope)
        value = scale[None, :] * (slopes - total[None, :] - away * pull[None, :])
        tl.store(result + start + offset, value.to(result.dtype.element_ty), mask=inside)
