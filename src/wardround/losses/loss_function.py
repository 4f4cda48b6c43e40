"""A loss handed over in Python: `wr.run(config, objective=torch.nn.CrossEntropyLoss())`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from wardround.data.cases import Batch
from wardround.errors import ClientError, ConfigError
from wardround.losses.objective import Context, Objective
from wardround.models.base import Segmenter
from wardround.objects import name_object
from wardround.text import format_size

NAME = "loss_function"  # in a configuration
Loss = Callable[[Tensor, Tensor], Tensor]
TRIED_SIDE = 32  # voxels of the images that a loss is tried on
_given: dict[str, Loss] = {}  # in this process
_tried: set[str] = set()


def give_loss(function: Loss, name: str | None = None) -> str:
    """Take a loss; the name by which `LossFunction` knows it in this process."""
    if isinstance(function, type):
        raise ConfigError(
            f"objective is the class {function.__name__}. Give a function of (logits, label), an object "
            f"such as {function.__name__}(), or a class that extends wr.Objective."
        )
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        raise ConfigError(
            f"objective is a {type(function).__name__} with parameters of its own, which nothing would "
            "train. Write a wr.Objective, whose start_model adds them to the network."
        )
    name = name or name_object(function)
    _given[name] = function
    return name


@dataclass(frozen=True)
class LossFunction(Objective):
    """A function of logits (B, classes, *spatial) and labels (B, *spatial), as PyTorch's losses take them.

    The network has a channel for every class, background too. function: the name a run keeps of it.
    """

    title = "A loss of one's own"
    function: Annotated[str, Field(min_length=1)]

    def num_outputs(self, num_classes: int) -> int:
        return num_classes

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        logits = context.forward(model, batch.image).logits
        loss: Tensor = context.supervise(self.call, logits, batch.label)
        return loss

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        losses = [self.call(logits[n : n + 1], label[n : n + 1]) for n in range(len(logits))]
        return torch.stack(losses)

    def start_model(self, model: nn.Module) -> None:
        """Try the loss once before anything is trained, so that Python shows where a mistake is."""
        if self.function in _given and self.function not in _tried and isinstance(model, Segmenter):
            shape = (2, *(TRIED_SIDE for _ in range(model.dimensions)))
            label = torch.arange(math.prod(shape)).reshape(shape) % model.num_outputs
            devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
            for device in devices:  # a function may hold tensors on the GPU
                logits = torch.zeros(
                    shape[0], model.num_outputs, *shape[1:], device=device, requires_grad=True
                )
                try:
                    self.call(logits, label.to(device))
                    break
                except ClientError as error:
                    if device == devices[-1]:
                        raise ConfigError(f"objective: {error}.") from error.__cause__
            _tried.add(self.function)

    def check_present(self) -> None:
        """Refuse to train without the function, which only the process of its author has."""
        if self.function not in _given:
            raise ConfigError(
                f"objective.function is '{self.function}', a loss handed over in Python that is not here. "
                "Hand it over again: wr.run(..., objective=..., resume=True)."
            )

    def call(self, logits: Tensor, label: Tensor) -> Tensor:
        """The loss, one number; what is wrong with it otherwise."""
        self.check_present()
        function = _given[self.function]
        if isinstance(function, nn.Module):
            function.to(logits.device)
        try:
            loss = function(logits.float(), label)
        except Exception as error:
            sizes = f"logits {format_size(logits.shape)} and labels {format_size(label.shape)}"
            reason = f"{type(error).__name__}: {error}"
            raise ClientError(f"the loss {self.function} failed on {sizes}: {reason}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"{format_size(loss.shape)} numbers" if isinstance(loss, Tensor) else type(loss).__name__
            raise ClientError(
                f"the loss {self.function} returned {found}; it must return a tensor of one number"
            )
        if torch.is_grad_enabled() and logits.requires_grad and not loss.requires_grad:
            raise ClientError(
                f"the loss {self.function} has no gradient; compute it from the logits, in PyTorch"
            )
        return loss.reshape(())
