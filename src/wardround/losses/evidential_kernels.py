"""Triton kernels of `evidential.py`: the sums of a two-class evidential loss, and their gradient.

A program sees a block of a case's voxels. Sums of blocks are kept and added in order, without atomics, so the
same input gives the same bytes. exp(cap - softplus(cap - z)) is exp(cap) sigmoid(z - cap).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # voxels a program has in hand


def forward(logits: Tensor, label: Tensor, cap: float) -> Tensor:
    """(5, B) float64: overlap of class 0 and 1, total of class 0 and 1, KL."""
    logits, label = make_dense(logits), label.contiguous()
    cases, voxels = len(logits), label[0].numel()
    blocks = triton.cdiv(voxels, BLOCK)
    partial = torch.empty((5, cases, blocks), dtype=torch.float64, device=logits.device)
    with torch.cuda.device_of(logits):
        _sums[blocks, cases](
            logits, label, partial, voxels, *strides(logits), cap, math.exp(cap), BLOCK=BLOCK
        )
    return partial.sum(dim=2)


def backward(logits: Tensor, label: Tensor, gradient: Tensor, cap: float) -> Tensor:
    """The gradient of the logits, from that of the sums (5, B)."""
    logits, label = make_dense(logits), label.contiguous()
    cases, voxels = len(logits), label[0].numel()
    result, gradient = torch.empty_like(logits), gradient.contiguous()
    with torch.cuda.device_of(logits):
        _slopes[triton.cdiv(voxels, BLOCK), cases](
            logits, label, gradient, result, voxels, *strides(logits), cap, math.exp(cap), BLOCK=BLOCK
        )
    return result


def make_dense(logits: Tensor) -> Tensor:
    """As they are, if contiguous or channels last."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(logits.dim(), torch.contiguous_format)
    return logits if logits.is_contiguous(memory_format=layout) else logits.contiguous()


def strides(logits: Tensor) -> tuple[int, int]:
    """From one class to the next, and from one voxel to the next."""
    return (logits[0, 0].numel(), 1) if logits.is_contiguous() else (1, 2)


@triton.jit
def _evidence(z, cap, top):
    """Evidence, and what is left of its slope as the cap comes near."""
    left = 1.0 / (1.0 + tl.exp(z - cap))
    return top / (1.0 + tl.exp(cap - z)), left


@triton.jit
def _sums(z, label, partial, voxels, stride_class, stride_voxel, cap, top, BLOCK: tl.constexpr):
    block, case = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    there = place < voxels
    here = z + case.to(tl.int64) * voxels * 2 + place * stride_voxel
    e0, _ = _evidence(tl.load(here, mask=there, other=0.0).to(tl.float32), cap, top)
    e1, _ = _evidence(tl.load(here + stride_class, mask=there, other=0.0).to(tl.float32), cap, top)
    true = tl.load(label + case.to(tl.int64) * voxels + place, mask=there, other=0)
    y0, y1 = tl.where(true == 0, 1.0, 0.0), tl.where(true == 1, 1.0, 0.0)
    total = e0 + e1 + 2.0
    p0, p1 = (e0 + 1.0) / total, (e1 + 1.0) / total
    spread = p0 * p1 / (total + 1.0)
    wrong = ((1.0 - y0) * e0 + (1.0 - y1) * e1).to(tl.float64)
    kl = tl.log(1.0 + wrong) - wrong / (1.0 + wrong)
    step = tl.num_programs(0) * tl.num_programs(1)
    home = partial + case * tl.num_programs(0) + block
    tl.store(home, tl.sum(tl.where(there, y0 * p0, 0.0), 0).to(tl.float64))
    tl.store(home + step, tl.sum(tl.where(there, y1 * p1, 0.0), 0).to(tl.float64))
    tl.store(home + 2 * step, tl.sum(tl.where(there, y0 + p0 * p0 + spread, 0.0), 0).to(tl.float64))
    tl.store(home + 3 * step, tl.sum(tl.where(there, y1 + p1 * p1 + spread, 0.0), 0).to(tl.float64))
    tl.store(home + 4 * step, tl.sum(tl.where(there, kl, 0.0), 0))


@triton.jit
def _slopes(z, label, gradient, result, voxels, stride_class, stride_voxel, cap, top, BLOCK: tl.constexpr):
    block, case = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    there = place < voxels
    offset = case.to(tl.int64) * voxels * 2 + place * stride_voxel
    e0, left0 = _evidence(tl.load(z + offset, mask=there, other=0.0).to(tl.float32), cap, top)
    e1, left1 = _evidence(tl.load(z + offset + stride_class, mask=there, other=0.0).to(tl.float32), cap, top)
    true = tl.load(label + case.to(tl.int64) * voxels + place, mask=there, other=0)
    y0, y1 = tl.where(true == 0, 1.0, 0.0), tl.where(true == 1, 1.0, 0.0)
    total = e0 + e1 + 2.0
    p0, p1 = (e0 + 1.0) / total, (e1 + 1.0) / total

    cases = tl.num_programs(1)
    of_overlap0 = tl.load(gradient + case).to(tl.float32)
    of_overlap1 = tl.load(gradient + cases + case).to(tl.float32)
    of_total0 = tl.load(gradient + 2 * cases + case).to(tl.float32)
    of_total1 = tl.load(gradient + 3 * cases + case).to(tl.float32)
    of_kl = tl.load(gradient + 4 * cases + case).to(tl.float32)

    both, rest = of_total0 + of_total1, 1.0 / (total + 1.0)
    of_p0 = of_overlap0 * y0 + 2.0 * of_total0 * p0 + both * p1 * rest
    of_p1 = of_overlap1 * y1 + 2.0 * of_total1 * p1 + both * p0 * rest
    common = -(of_p0 * p0 + of_p1 * p1) / total - both * p0 * p1 * rest * rest
    wrong = (1.0 - y0) * e0 + (1.0 - y1) * e1
    of_wrong = of_kl * wrong / ((1.0 + wrong) * (1.0 + wrong))
    slope0 = (of_p0 / total + common + of_wrong * (1.0 - y0)) * e0 * left0
    slope1 = (of_p1 / total + common + of_wrong * (1.0 - y1)) * e1 * left1
    tl.store(result + offset, slope0.to(result.dtype.element_ty), mask=there)
    tl.store(result + offset + stride_class, slope1.to(result.dtype.element_ty), mask=there)
