"""What a network costs and what it supports, found out without computing anything.

Networks are built on the meta device: they have shapes but no numbers, so that the largest takes no memory
and next to no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from wardround.errors import ConfigError
from wardround.models.base import Segmenter, head_names
from wardround.models.channel_groups import channel_groups
from wardround.models.probe import Call, meta_copy, trace_calls
from wardround.models.registry import ModelSettings, build
from wardround.models.tap import TappedSegmenter, decoder_names
from wardround.models.variational import VariationalSegmenter
from wardround.text import format_size

BYTES = 4  # of a float32
DRAWS = (torch.Tensor.normal_, torch.Tensor.uniform_)
STATES = 4  # numbers a parameter in training with Adam: itself, its gradient and two moments


def sketch(
    settings: ModelSettings, *, in_channels: int = 1, num_outputs: int = 2, dimensions: int
) -> Segmenter:
    """The network without its numbers; random streams stay where they are."""
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": dimensions}
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"), _Sketching():
                return build(settings, **sizes)
        except Exception:  # it reads numbers while it is built, or is wrong: then this says so
            return meta_copy(build(settings, **sizes))


class _Sketching(TorchFunctionMode):
    """Draws no numbers for tensors that have none: PyTorch would load its compiler for that, for seconds.

    What constructors compute with stays real: rates of stochastic depth are read from a linspace.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs.setdefault("device", "cpu")
        elif func in DRAWS or getattr(func, "__module__", "") == nn.init.__name__:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


# Costs


@dataclass(frozen=True)
class NetworkPart:
    """A part of the network in the order of the forward pass. flops: of its forward pass."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    flops: int


@dataclass(frozen=True)
class Costs:
    """Of one image of this size.

    flops: of a forward pass, a multiplication and an addition counted as two; kept_bytes: activations that
    training keeps for the backward pass in float32; padded: the size the network sees.
    """

    parameters: int
    flops: int
    kept_bytes: int
    padded: tuple[int, ...]
    parts: list[NetworkPart]

    @property
    def training_bytes(self) -> int:
        """Of a training step with Adam in float32, one image, roughly."""
        return self.kept_bytes + STATES * BYTES * self.parameters


def costs(model: Segmenter, size: Sequence[int]) -> Costs:
    """What one image of this size costs; refused if the network cannot take it."""
    model = meta_copy(model)
    padded = model.padded_size(size)
    image = torch.zeros(1, model.in_channels, *padded, device="meta")
    counter = FlopCounterMode(display=False)
    try:
        with trace_calls(model) as calls, counter, torch.no_grad():
            model(image)
        kept = kept_bytes(model, image)
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"an image of {format_size(size)} does not fit this network: {said}") from error
    counts = counter.get_flop_counts()
    root = type(model).__name__
    parts = [
        NetworkPart(
            strip_wrappers(call.module),
            tuple(call.gave[0]) if call.gave else (),
            sum(p.numel() for p in call.kind.parameters()),
            sum(counts.get(f"{root}.{call.module}", {}).values()),
        )
        for call in outermost(calls)
    ]
    parameters = sum(p.numel() for p in model.parameters())
    return Costs(parameters, counter.get_total_flops(), kept, tuple(padded), parts)


def kept_bytes(model: Segmenter, image: Tensor) -> int:
    """What autograd keeps of one pass in training, parameters aside; each storage counts once."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    model.train().requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(image)
    return sum(storage.nbytes() for storage in kept.values())


def outermost(calls: Sequence[Call]) -> list[Call]:
    """The calls that are in no other, wrappers aside: as long as there is one alone, those inside it."""
    inside = sorted(calls, key=lambda call: call.start)
    while True:
        found: list[Call] = []
        for call in inside:
            if not found or not call.is_inside(found[-1]):
                found.append(call)
        within = [call for call in inside if any(call.is_inside(other) for other in found)]
        if len(found) > 1 or not within:
            return found
        inside = within


def strip_wrappers(module: str) -> str:
    """A module's name without our wrappers around it."""
    for prefix in ("backbone.", "network."):
        module = module.removeprefix(prefix)
    return module


# What it supports


def norm_layers(model: nn.Module) -> dict[str, int]:
    """How many norm layers of which kind, and whether they learn: batch, instance, instance_affine ..."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            found["batch"] += 1
        elif isinstance(module, _InstanceNorm):
            found["instance_affine" if module.affine else "instance"] += 1
        elif isinstance(module, nn.GroupNorm):
            found["group"] += 1
        elif isinstance(module, nn.LayerNorm):
            found["layer"] += 1
    return dict(found)


def features_text(model: Segmenter) -> str:
    """Where the encoder features come from."""
    inner = model.backbone if isinstance(model, VariationalSegmenter) else model
    if not inner.has_features:
        why = inner.tap.why_not if isinstance(inner, TappedSegmenter) else "the network shows none."
        return f"no: {why}"
    if not isinstance(inner, TappedSegmenter):
        return "bottleneck, decoder"
    assert inner.tap.bottleneck is not None
    shown = f"bottleneck ({inner.tap.bottleneck.module})"
    return f"{shown}, decoder" if inner.tap.has_decoder else shown


def fedbn_text(model: nn.Module) -> str:
    """Which norm layers FedBN can keep at the clients."""
    kinds = {kind: count for kind, count in norm_layers(model).items() if kind not in ("instance", "layer")}
    if not kinds:
        return "refused: no norm layer with tensors of its own that FedBN knows"
    batch = kinds.pop("batch", 0)
    parts = [f"keeps {batch} batch norm layers"] if batch else []
    parts += [f"{count} {kind} norm layers with method.norm_types=[{kind}]" for kind, count in kinds.items()]
    return "; ".join(parts)


def fedma_text(model: nn.Module) -> str:
    """How many groups of channels FedMA can match, or why none."""
    return _said(lambda: f"{len(channel_groups(model))} groups of channels are matched")


def fedper_text(model: Segmenter) -> str:
    """The head that FedPer keeps, and whether there is a decoder to keep."""
    head = _said(lambda: ", ".join(head_names(model)))
    decoder = _said(lambda: f"{len(decoder_names(model))} tensors with method.layers=decoder")
    return f"keeps {head}; {decoder}"


def _said(function: Callable[[], str]) -> str:
    try:
        return function()
    except (ConfigError, TypeError) as error:
        return f"refused: {error}"
