"""PrivateLoop: the steps of one `fit` under case-level differential privacy (DP-SGD).

Abadi et al., CCS 2016. https://arxiv.org/abs/1607.00133

Every step draws each case with the same chance (Poisson sampling, as the accountant assumes), takes the
gradient of each case by itself, clips it, adds them up and adds Gaussian noise. A case is read, augmented and
passed through the network alone, so that no gradient can depend on another case. All draws come from the
operating system's random numbers, for the accountant counts on nobody knowing them.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.errors import ClientError
from wardround.privacy.guard import CaseNoise
from wardround.privacy.noise import add_noise, clip_factor, draw_uniform
from wardround.training.learner import Step
from wardround.training.slow_conv3d import AvoidSlowConv3d
from wardround.training.workbench import FitHooks, TrainingLoop


class PrivateLoop(TrainingLoop):
    """Steps along noised sums of clipped gradients; `values` stays empty, for losses are not covered."""

    def __init__(self, noise: CaseNoise, *args: Any) -> None:
        super().__init__(*args)
        self._noise = noise
        self._usual = self._settings.stream

    def run(self) -> None:
        """Take the steps that were charged."""
        learner, context, noise, hooks = self._learner, self._context, self._noise, self._hooks
        parameters = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
        buffers = {name: tensor.clone() for name, tensor in learner.model.named_buffers()}
        learner.objective.start_epoch(learner.model, context)
        for _ in range(noise.steps):
            chosen = np.flatnonzero(draw_uniform(len(self._split)) < noise.rate)
            sums = [torch.zeros_like(parameter) for parameter in parameters]
            for index in chosen.tolist():
                self._add_clipped(index, parameters, sums)
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = add_noise(total, noise.noise * noise.clip) / noise.batch
            if hooks.after_backward is not None:
                hooks.after_backward(learner.model)
            learner.move()
            self.num_steps += 1
            context.step += 1
            if hooks.on_progress is not None:
                hooks.on_progress(self.num_steps, noise.steps)
        self._check_kept(buffers)

    def _add_clipped(self, index: int, parameters: list[torch.nn.Parameter], sums: list[Tensor]) -> None:
        """Add one case's gradient, at most `clip` long."""
        self._settings = replace(self._settings, stream=(*self._usual, secrets.randbits(64)))
        batch = self._read_batch(torch.tensor([index]))
        with AvoidSlowConv3d():
            Step(self._learner, batch, self._context, self._loss, taken_apart=False).backward()
        found = [(total, p.grad) for total, p in zip(sums, parameters, strict=True) if p.grad is not None]
        factor = clip_factor([gradient for _, gradient in found], self._noise.clip)
        if factor:
            for total, gradient in found:
                total.add_(gradient, alpha=factor)

    def _check_kept(self, buffers: dict[str, Tensor]) -> None:
        """Refuse what carries one case over to the next beside gradients."""
        now = dict(self._learner.model.named_buffers())
        moved = next((name for name, tensor in buffers.items() if not torch.equal(tensor, now[name])), None)
        what = (
            f"the network's '{moved}'" if moved else "the objective's memory" if self._context.memory else ""
        )
        if what:
            raise ClientError(
                f"{what} changes with every case, beside the gradients, which privacy.level: case cannot "
                "cover. Choose instance or group norm, and an objective such as dice_bce."
            )


def check_hooks(hooks: FitHooks) -> None:
    """Refuse a method that changes more than gradients, or the loss by a term."""
    changed = [name for name in ("loss", "on_batch", "step") if getattr(hooks, name)]
    if changed:
        raise ClientError(
            f"the method changes the training step ({', '.join(changed)} of fit), whose gradients "
            "privacy.level: case cannot clip by case. Choose fedavg or fedprox."
        )
