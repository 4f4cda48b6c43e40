"""Norm layers: made by name, found by type.

Names differ between libraries (MONAI's batch norm has no "bn" in it), so a layer is asked what
it is: `isinstance(module, _BatchNorm)`.

BatchNorm keeps running means and variances. Averaging variances forgets that the clients' means
differ; second moments average exactly. `to_moments` and `from_moments` wrap whatever is linear in
between:

>>> stats = [("mean", "var")]
>>> a = {"mean": torch.tensor([0.0]), "var": torch.tensor([1.0])}
>>> b = {"mean": torch.tensor([2.0]), "var": torch.tensor([1.0])}
>>> a, b = to_moments(a, stats), to_moments(b, stats)
>>> from_moments({name: (a[name] + b[name]) / 2 for name in a}, stats)["var"]
tensor([2.])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

Norm = Literal["batch", "instance", "instance_affine", "group", "none"]

NORMS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
NUM_GROUPS = 8


def make_norm(norm: Norm, channels: int, dimensions: int) -> nn.Module:
    """A norm layer. "instance" learns nothing, "instance_affine" a scale and a shift a channel.

    "group" makes 8 groups, fewer where 8 does not divide the channels.
    """
    three = dimensions == 3
    match norm:
        case "batch":
            return (nn.BatchNorm3d if three else nn.BatchNorm2d)(channels)
        case "instance":
            return (nn.InstanceNorm3d if three else nn.InstanceNorm2d)(channels)
        case "instance_affine":
            return (nn.InstanceNorm3d if three else nn.InstanceNorm2d)(channels, affine=True)
        case "group":
            return nn.GroupNorm(math.gcd(NUM_GROUPS, channels), channels)
        case "none":
            return nn.Identity()


def needs_bias(norm: Norm) -> bool:
    """Whether a convolution in front of this norm has a bias; batch and instance norm would subtract it."""
    return norm in ("none", "group")


def norm_names(model: nn.Module, kinds: tuple[type[nn.Module], ...] = NORMS) -> list[str]:
    """State-dict names of all tensors that belong to norm layers of these types."""
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    return [name for layer in layers for name in state_names(model, layer)]


def running_stats(model: nn.Module) -> list[tuple[str, str]]:
    """(mean, variance) state-dict names of every norm layer that keeps running statistics."""
    return [
        (full_name(prefix, "running_mean"), full_name(prefix, "running_var"))
        for prefix, module in model.named_modules(remove_duplicate=False)
        if keeps_statistics(module)
    ]


def keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None


def to_moments(tensors: Mapping[str, Tensor], stats: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """The tensors with every running variance replaced by its second moment, var + mean².

    Statistics that do not travel (FedBN) are passed over.
    """
    changed = dict(tensors)
    for mean, var in stats:
        if var in tensors:
            moment = tensors[var].double() + tensors[mean].double().square()
            changed[var] = moment.to(tensors[var].dtype)
    return changed


def from_moments(tensors: Mapping[str, Tensor], stats: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """The inverse of `to_moments`; a variance that rounding made negative becomes 0."""
    changed = dict(tensors)
    for mean, var in stats:
        if var in tensors:
            variance = tensors[var].double() - tensors[mean].double().square()
            changed[var] = variance.clamp_min(0).to(tensors[var].dtype)
    return changed


def reestimate(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace all running statistics by the plain mean over these batches of images.

    Only the norm layers are in training mode, so dropout is off. Nothing else of the model changes,
    and without batches nothing at all.
    """
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and keeps_statistics(m)]
    remaining = iter(batches)
    first = next(remaining, None)
    if not layers or first is None:
        return
    with torch.no_grad(), _collecting(model, layers):
        for batch in chain([first], remaining):
            model(batch)


@contextmanager
def _collecting(model: nn.Module, layers: Sequence[_NormBase]) -> Iterator[None]:
    """Reset the layers and let them average cumulatively; flags and momentum come back at the end."""
    training = {module: module.training for module in model.modules()}
    momentum = {layer: layer.momentum for layer in layers}
    try:
        for module in training:
            module.training = False
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
            layer.training = True
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for layer, value in momentum.items():
            layer.momentum = value


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Let norm layers go on using batch statistics in training, without remembering them."""
    layers = [m for m in model.modules() if isinstance(m, _NormBase) and keeps_statistics(m)]
    kept = [(layer, layer.momentum, layer.num_batches_tracked) for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 0.0
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked = layer.num_batches_tracked.clone()
        yield
    finally:
        for layer, momentum, count in kept:
            layer.momentum, layer.num_batches_tracked = momentum, count


# Names of tensors in a state dict


def state_names(model: nn.Module, layer: nn.Module) -> list[str]:
    """State-dict names of one layer's own tensors; a layer registered twice has them twice."""
    prefixes = [name for name, module in model.named_modules(remove_duplicate=False) if module is layer]
    return [full_name(prefix, name) for prefix in prefixes for name in layer.state_dict()]


def full_name(prefix: str, name: str) -> str:
    """A tensor's state-dict name; the model itself has the prefix ""."""
    return f"{prefix}.{name}" if prefix else name
