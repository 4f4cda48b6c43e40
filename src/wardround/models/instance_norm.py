"""Instance norm for maps that lie in memory channels last, together with the ReLU behind it.

PyTorch's instance norm knows one layout only: it copies channels-last maps to and fro, which was 45 % of a
training step of the 2D U-Net on an H200. `keep_layout` lets a model's layers leave their maps as they are:

- in eager mode by kernels of our own (`instance_norm_kernels.py`, in Triton, which comes with PyTorch for
  GPUs): the ReLU costs nothing, sums are formed in float32 and always in the same order;
- in compiled code by the definition below, which inductor turns into kernels for the layout it finds.

Anywhere else (CPU, other layouts, layers with running statistics) PyTorch's own layer runs.

>>> x = torch.tensor([[[[1.0, 3.0]]]])
>>> by_definition(x, None, None, eps=0.0)
tensor([[[[-1.,  1.]]]])
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

TYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ELEMENTS = 2**31 - 1  # of one case: kernels count them in 32 bits


class FusableUnit(nn.Sequential):
    """Layers that nobody uses one by one, so that a norm may do the work of the ReLU behind it."""


def keep_layout(model: nn.Module) -> None:
    """Let all instance norms of a model work in the layout they are given, in a `Unit` with their ReLU.

    Names and tensors of the model stay what they are.
    """
    for module in list(model.modules()):
        if type(module) in QUICK and not cast(_InstanceNorm, module).track_running_stats:
            module.__class__ = QUICK[type(module)]
    for module in list(model.modules()):
        if isinstance(module, FusableUnit):
            for (_, layer), (name, behind) in pairwise(list(module.named_children())):
                if isinstance(layer, QuickNorm) and isinstance(behind, nn.ReLU | nn.LeakyReLU):
                    layer.slope = getattr(behind, "negative_slope", 0.0)
                    setattr(module, name, nn.Identity())


def by_definition(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, slope: float | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + eps) over each case's and channel's voxels, scaled, shifted, and the ReLU."""
    axes = tuple(range(2, x.ndim))
    wide = x.float()
    variance, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
    y = (wide - mean) * torch.rsqrt(variance + eps)
    if weight is not None and bias is not None:
        shape = (1, -1) + (1,) * len(axes)
        y = y * weight.view(shape) + bias.view(shape)
    return apply_slope(y, slope).to(x.dtype)


def apply_slope(y: Tensor, slope: float | None) -> Tensor:
    if slope is None:
        return y
    return F.leaky_relu(y, slope) if slope else F.relu(y)


class QuickNorm(_InstanceNorm):
    """slope: of the ReLU behind, below 0; None: there is none."""

    slope: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and x.is_cuda:
            return by_definition(x, self.weight, self.bias, self.eps, self.slope)
        if fits_kernels(x):
            if not torch.is_grad_enabled():
                return cast(Tensor, kernels().forward(x, self.weight, self.bias, self.eps, self.slope)[0])
            y = _Kernels.apply(x, self.weight, self.bias, self.eps, self.slope)  # type: ignore[no-untyped-call]
            return cast(Tensor, y)
        if len(x) == 1 and x[0, 0].numel() > 1:  # on a CPU PyTorch's channels-last gradient is wrong
            return by_definition(x, self.weight, self.bias, self.eps, self.slope)
        return apply_slope(super().forward(x), self.slope)


class _Quick2d(QuickNorm, nn.InstanceNorm2d):
    pass


class _Quick3d(QuickNorm, nn.InstanceNorm3d):
    pass


QUICK: dict[type[nn.Module], type[QuickNorm]] = {nn.InstanceNorm2d: _Quick2d, nn.InstanceNorm3d: _Quick3d}


@cache
def has_kernels() -> bool:
    """Whether our kernels run here: they are made for GPUs of NVIDIA (not ROCm, nor Windows)."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


@cache
def kernels() -> Any:
    """Imported on first use: Triton is there on GPU machines only."""
    return importlib.import_module("wardround.models.instance_norm_kernels")


def fits_kernels(x: Tensor) -> bool:
    """Whether our kernels can take this map."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not x.is_cuda or x.dim() not in layouts or x.dtype not in TYPES or not has_kernels():
        return False
    cases, channels = x.shape[:2]
    if cases == 0 or x.numel() < 2 * cases * channels or x.numel() > MOST_ELEMENTS * cases:
        return False
    return x.is_contiguous(memory_format=layouts[x.dim()])


class _Kernels(torch.autograd.Function):
    """The layer by our kernels; where a second derivative is wanted, by the definition."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, slope: float | None
    ) -> Tensor:
        y, of_cases = kernels().forward(x, weight, bias, eps, slope)
        ctx.save_for_backward(x, weight, bias, of_cases)
        ctx.settings = eps, slope
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, of_cases = ctx.saved_tensors
        eps, slope = ctx.settings
        if torch.is_grad_enabled():
            wanted = [tensor for tensor in (x, weight, bias) if tensor is not None and tensor.requires_grad]
            y = by_definition(x, weight, bias, eps, slope)
            found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
            of = [next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)]
            return *of, None, None
        layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        gradient = gradient.to(x.dtype).contiguous(memory_format=layout)
        return *kernels().backward(x, gradient, weight, bias, of_cases, slope), None, None
