"""Optimizers, learning-rate schedules by round, and optimizer state as plain tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wardround.config import OptimizerSettings

Kind = TypeVar("Kind", bound=Optimizer)


def build(settings: OptimizerSettings, model: nn.Module) -> Optimizer:
    """The optimizer of a model's trainable parameters; fused where torch offers it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    how: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, "fused": True}
    if settings.name == "sgd":
        how |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
        return without_compiler(torch.optim.SGD)(parameters, **how)
    kind = without_compiler(torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam)
    return kind(parameters, betas=settings.betas, **how)


def without_compiler(kind: type[Kind]) -> type[Kind]:
    """The same optimizer, the same bytes, without torch's compiler.

    torch wraps an optimizer's functions so that a compiled program leaves them out. The wrappers import the
    compiler, with sympy and much else, when they are first called: about a second and 100 MB in every process
    that trains, compiled or not. We never compile an optimizer, so we call what is inside the wrappers.
    """
    inside = {
        "step": torch.no_grad()(inspect.unwrap(kind.step)),  # the wrapper also turns gradients off
        "zero_grad": inspect.unwrap(kind.zero_grad),
        "add_param_group": inspect.unwrap(kind.add_param_group),
    }
    return type(kind.__name__, (kind,), inside)


def accumulated(steps: int, momentum: float = 0.0, pull: float = 0.0, *, nesterov: bool = False) -> float:
    """How far `steps` SGD steps at rate 1 go along a gradient of 1; pull: rate times proximal strength.

    >>> accumulated(5), round(accumulated(2, momentum=0.9), 12), accumulated(2, pull=0.5)
    (5.0, 2.9, 1.5)
    """
    m, a = 0.0, 0.0
    for _ in range(steps):
        if momentum:
            m = momentum * m + 1
            a += 1 + momentum * m if nesterov else m
        if pull:
            a = a * (1 - pull) + 1
        if not momentum and not pull:
            a += 1
    return a


def complete_momentum(optimizer: Optimizer) -> None:
    """Momentum 0 for parameters whose first gradient comes after others' (a head that rested at first).

    SGD would begin it with the gradient, which is the same, but its fused step takes all or none.
    """
    if not any(group.get("momentum") for group in optimizer.param_groups):
        return
    moving = [p for p in _parameters(optimizer) if p.grad is not None]
    late = [p for p in moving if optimizer.state.get(p, {}).get("momentum_buffer") is None]
    if len(late) < len(moving):
        for parameter in late:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def export_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments and step counts as named tensors: "<parameter number>.<slot>"."""
    exported: dict[str, Tensor] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                exported[f"{number}.{slot}"] = value.detach().clone()
    return exported


def import_state(optimizer: Optimizer, exported: Mapping[str, Tensor]) -> None:
    """Put exported moments back; an empty mapping starts afresh."""
    before = {id(parameter): dict(state) for parameter, state in optimizer.state.items()}
    if not exported and before and isinstance(optimizer, torch.optim.Adam) and _is_on_gpu(optimizer):
        # the same as none, without allocating them again
        torch._foreach_zero_([value for state in before.values() for value in state.values()])
        return
    optimizer.state.clear()
    parameters = _parameters(optimizer)
    homes, values = [], []
    for key, value in exported.items():
        number, slot = key.split(".", 1)
        parameter = parameters[int(number)]
        home = before.get(id(parameter), {}).get(slot)
        if home is None:  # moments lie in memory as their parameter does, a step counter beside it
            is_moment = value.shape == parameter.shape
            home = torch.empty_like(parameter if is_moment else value, device=parameter.device)
        optimizer.state[parameter][slot] = home
        homes.append(home)
        values.append(value)
    if homes:
        torch._foreach_copy_(homes, values)


def _is_on_gpu(optimizer: Optimizer) -> bool:
    return all(parameter.device.type == "cuda" for parameter in _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
