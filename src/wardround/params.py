"""Params: named tensors with + - * /, so that a method reads like its equations.

Floating tensors take part in arithmetic. Integer tensors (BatchNorm's batch counter) ride along:
the left operand's are kept, and a mean takes their maximum. `aggregation.mean` accumulates in float64.

>>> import torch
>>> x = Params({"w": torch.tensor([1.0, 2.0])})
>>> (0.5 * x + x)["w"]
tensor([1.5000, 3.0000])
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from wardround.errors import WardroundError
from wardround.storage import StoredTensors


class NamedTensors(Mapping[str, Tensor]):
    """Tensors by name, in memory or still on disk, to be read and hashed."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._tensors: Mapping[str, Tensor] = {} if tensors is None else tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def is_stored(self) -> bool:
        """Whether the tensors are on disk, each read when it is asked for."""
        return isinstance(self._tensors, StoredTensors)

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a tensor; a stored one is not read for it."""
        if isinstance(self._tensors, StoredTensors):
            return self._tensors.spec(name)
        tensor = self[name]
        return tuple(tensor.shape), tensor.dtype

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from `start` to `stop` of the flattened tensor; of a stored one no others are read."""
        if isinstance(self._tensors, StoredTensors):
            return self._tensors.part(name, start, stop)
        return self[name].reshape(-1)[start:stop]

    def device(self, name: str) -> torch.device:
        """Where a tensor is; a stored one is read to the host."""
        return torch.device("cpu") if self.is_stored else self[name].device

    @property
    def num_bytes(self) -> int:
        specs = [self.spec(name) for name in self]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)

    def update_hash(self, digest: hashlib._Hash) -> None:
        for name in sorted(self):
            tensor = self[name].detach().cpu().contiguous()
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            if tensor.numel():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def sha256(self) -> str:
        """A hash of names, types, shapes and every byte."""
        digest = hashlib.sha256()
        self.update_hash(digest)
        return digest.hexdigest()


def copy_tensor(tensor: Tensor, layout: torch.memory_format = torch.preserve_format) -> Tensor:
    """A copy where the tensor is; of one on mps on the host, which has float64."""
    return (
        tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach().clone(memory_format=layout)
    )


class Params(NamedTensors):
    """The tensors of a model, with arithmetic, which gives new ones and changes none."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Params({len(self)} tensors)"

    # From and to a model

    @classmethod
    def of(cls, model: nn.Module) -> Params:
        """A copy of everything a model's state dict holds."""
        plain = torch.contiguous_format  # whatever the layout in which the model computes
        return cls({name: copy_tensor(tensor, plain) for name, tensor in model.state_dict().items()})

    @classmethod
    def trainable(cls, model: nn.Module) -> Params:
        """A copy of the parameters that receive gradients."""
        return cls({n: copy_tensor(p) for n, p in model.named_parameters() if p.requires_grad})

    def load_into(self, model: nn.Module) -> None:
        """Copy the values into a model; names the model lacks are an error, missing ones stay."""
        own = model.state_dict(keep_vars=True)  # without a view of each, which would take its time
        unknown = [name for name in self if name not in own]
        if unknown:
            raise KeyError(f"the model has no tensor '{unknown[0]}'")
        with torch.no_grad():
            if self.is_stored:  # one tensor in memory at a time
                for name in self:
                    own[name].copy_(self[name])
            elif len(self):
                torch._foreach_copy_([own[name] for name in self], [self[name] for name in self])

    # Selections and copies

    def only(self, names: Iterable[str]) -> Params:
        """The tensors with these names, in this object's order."""
        wanted = set(names)
        return Params({name: self[name] for name in self if name in wanted})

    def without(self, names: Iterable[str]) -> Params:
        unwanted = set(names)
        return Params({name: self[name] for name in self if name not in unwanted})

    def updated(self, other: Mapping[str, Tensor]) -> Params:
        """These tensors, with those of `other` in place of the ones of the same name."""
        return Params({name: other[name] if name in other else self[name] for name in self})

    def zeros(self) -> Params:
        return self.map(torch.zeros_like)

    def clone(self) -> Params:
        return self.map(torch.clone)

    def to(self, device: torch.device | str) -> Params:
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> Params:
        return Params({name: function(self[name]) for name in self})

    # Arithmetic

    def __add__(self, other: Params | float) -> Params:
        return self._combine(other, operator.add)

    def __sub__(self, other: Params | float) -> Params:
        return self._combine(other, operator.sub)

    def __mul__(self, other: Params | float) -> Params:
        return self._combine(other, operator.mul)

    def __truediv__(self, other: Params | float) -> Params:
        return self._combine(other, operator.truediv)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Params:
        return self * -1.0

    def _combine(self, other: Params | float, function: Callable[[Tensor, Any], Tensor]) -> Params:
        if not isinstance(other, Params):
            number = float(other)
            return self.map(lambda tensor: function(tensor, number) if tensor.is_floating_point() else tensor)
        if set(other) != set(self):
            unmatched = sorted(set(self) ^ set(other))
            raise KeyError(
                f"the two sides differ in {len(unmatched)} names, first '{unmatched[0]}'; use only()"
            )
        return Params(
            {
                name: function(self[name], other[name]) if self[name].is_floating_point() else self[name]
                for name in self
            }
        )


class NoParams(Params):
    """Stands in a message that has no params: any use of it raises."""

    __slots__ = ()

    def _refuse(self, *name: object) -> NoReturn:
        raise WardroundError("the message has no params, but its task needs them. Send Message(params=...).")

    __getitem__ = __iter__ = __len__ = _refuse

    def __repr__(self) -> str:
        return "NoParams()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoParams)
