"""An MPS device where there is none: tensors that say they are on `mps` and compute on the CPU.

As on Apple's GPUs there is no float64, no complex number (before macOS 14), no pinned memory, and no sum of a
tensor there and one on the CPU.
Results are those of the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

MPS, CPU = torch.device("mps", 0), torch.device("cpu")


class MpsTensor(Tensor):
    """A tensor of the fake device, around one of the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> MpsTensor:
        if held.dtype == torch.float64 or held.dtype.is_complex:
            raise TypeError(f"Cannot convert a MPS Tensor to {held.dtype}: the MPS framework has none.")
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=CPU, requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held.detach()
        return made

    def cpu(self, *_: object, **__: object) -> Tensor:  # in threads too, where no mode is on
        return Move.apply(self, False)  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"mps({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strangers = [x for x in tensors if not isinstance(x, MpsTensor) and x.dim() > 0]
        name = function._schema.name
        if strangers and "copy" not in name:
            raise RuntimeError(f"{function}: expected all tensors on one device, found mps and cpu")
        plain_args, plain_kwargs = tree_map(lambda x: getattr(x, "held", x), (args, kwargs or {}))
        found = function(*plain_args, **plain_kwargs)
        if name.endswith("_"):  # in place
            return args[0] if function._schema.returns else None
        return tree_map(lambda x: MpsTensor(x) if isinstance(x, Tensor) else x, found)


class Move(torch.autograd.Function):
    """To the fake device or back, gradients included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: bool) -> Tensor:
        ctx.came_from = isinstance(x, MpsTensor)
        held = x.held if isinstance(x, MpsTensor) else x
        return MpsTensor(held.clone()) if there else held.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        held = gradient.held if isinstance(gradient, MpsTensor) else gradient
        return (MpsTensor(held) if ctx.came_from else held), None


class FakeMps(TorchFunctionMode):
    """Takes `mps` out of every call that names it, and puts the result there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        name = getattr(function, "__name__", "")
        if name == "__get__" and isinstance(first, MpsTensor):
            getter = getattr(function, "__self__", None)
            if getter is Tensor.device:
                return MPS
        if name == "numpy" and isinstance(first, MpsTensor):
            raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "pin_memory":
            raise RuntimeError("memory cannot be pinned for mps")
        if name == "to" and isinstance(first, Tensor):
            return self.move(first, args[1:], kwargs)
        if name == "double" and isinstance(first, MpsTensor):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype: the MPS framework has none.")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "mps":
            kwargs["device"] = CPU
            found = function(*args, **kwargs)
            return Move.apply(found, True) if isinstance(found, Tensor) else found
        return function(*args, **kwargs)

    def move(self, tensor: Tensor, given: Any, kwargs: dict[str, Any]) -> Tensor:
        device, dtype, _, layout = torch._C._nn._parse_to(
            *(x for x in given if not isinstance(x, Tensor)),
            **{key: value for key, value in kwargs.items() if key not in ("copy",)},
        )
        for other in given:
            if isinstance(other, Tensor):
                device, dtype = MPS if isinstance(other, MpsTensor) else CPU, other.dtype
        here = isinstance(tensor, MpsTensor)
        there = here if device is None else device.type == "mps"
        if here and not there:
            tensor = Move.apply(tensor, False)
        if dtype is not None:
            tensor = Tensor.to(tensor, dtype)
        if layout is not None:
            tensor = Tensor.contiguous(tensor, memory_format=layout)
        return Move.apply(tensor, True) if there and not here else tensor


@contextlib.contextmanager
def fake_mps(monkeypatch: MonkeyPatch) -> Iterator[None]:
    """Within, `mps` is there and computes."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    stream = torch.default_generator
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: stream.manual_seed(seed))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: stream.get_state())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: stream.set_state(state))
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FakeMps():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
