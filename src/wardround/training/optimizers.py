"""Optimizers, learning-rate schedules by round, and optimizer state as plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import OptimizerSettings
from wardround.training.light_optimizers import light


def build(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model's trainable parameters; fused where torch offers it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.name == "sgd":
        return light(torch.optim.SGD)(
            parameters,
            lr=rate,
            weight_decay=decay,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            fused=True,
        )
    kind = light(torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam)
    return kind(parameters, lr=rate, weight_decay=decay, betas=settings.betas, fused=True)


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


def complete_momentum(optimizer: torch.optim.Optimizer) -> None:
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


def export_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts as named tensors: "<parameter number>.<slot>"."""
    exported: dict[str, Tensor] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                exported[f"{number}.{slot}"] = value.detach().clone()
    return exported


def import_state(optimizer: torch.optim.Optimizer, exported: dict[str, Tensor]) -> None:
    """Put exported moments back; an empty dictionary starts afresh."""
    optimizer.state.clear()
    parameters = _parameters(optimizer)
    for key, value in exported.items():
        number, slot = key.split(".", 1)
        parameter = parameters[int(number)]
        state: dict[str, Any] = optimizer.state[parameter]
        # the step counter lives where the optimizer put it: beside the parameter when fused
        moved = value.to(parameter.device).clone()
        if moved.shape == parameter.shape:  # moments lie in memory as their parameter does
            moved = torch.empty_like(parameter).copy_(moved)
        state[slot] = moved


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
